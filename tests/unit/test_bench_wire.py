"""Answers of servers as bytes: how they are cut, how they end, and limits."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from sm120kit.bench import _wire
from sm120kit.bench import client as bench_client
from sm120kit.bench.sample import Sample
from sm120kit.core.urls import Endpoint


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def sample_of(listening: socket.socket, *parts: bytes, stall_seconds: float = 60, **limits: Any) -> Sample:
    """The sample of a request that a server answers with ``parts``, each sent alone; then it closes the connection."""

    def serve() -> None:
        with listening.accept()[0] as connection:
            while not connection.recv(1 << 16).endswith(b"{}"):
                pass
            with suppress(OSError):  # the client has given up
                for part in parts:
                    connection.sendall(part)
                    time.sleep(0.02)

    threading.Thread(target=serve, daemon=True).start()
    endpoint = Endpoint.parse(f"http://127.0.0.1:{listening.getsockname()[1]}")
    request = bench_client.StreamRequest(0, "/", {}, **limits)
    (sample,) = bench_client.stream_all(endpoint, [[request]], stall_seconds=stall_seconds).samples
    return sample


DELTAS = [{"choices": [{"delta": {"content": text}, "finish_reason": "stop" if text == "d" else None}]} for text in "abcd"]
EVENTS = [f"data: {json.dumps(event)}\n\n".encode() for event in DELTAS]


def chunks(*, blank_after: int | None = None) -> list[bytes]:
    """The events and the end, each as a chunk; a blank follows the size of chunk ``blank_after``."""
    contents = [*EVENTS, b""]
    blanks = [b" " if number == blank_after else b"" for number in range(len(contents))]
    return [b"%x%s\r\n%s\r\n" % (len(each), blank, each) for each, blank in zip(contents, blanks, strict=True)]


CLOSING = CHUNKED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
EARLY = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"


@pytest.mark.parametrize(
    "response",
    [
        [CHUNKED, *chunks(blank_after=4)],
        [CHUNKED, *chunks(blank_after=1)],
        [CLOSING, *chunks(), b"x"],
        [CHUNKED, *chunks(), b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", *chunks()],
        [EARLY, CHUNKED, *chunks()],
        [EARLY, EARLY, CLOSING, *chunks()],
    ],
    ids=["blank in the last chunk", "blank in a chunk", "surplus byte", "surplus response", "early hints", "early hints twice"],
)
@pytest.mark.parametrize("first", [0, 1, 3, 10**6])
def test_content_is_decoded_once(listening: socket.socket, response: list[bytes], first: int) -> None:
    """``first`` parts are sent together, the others after them: all in one read, or content in two."""
    sample = sample_of(listening, *filter(None, (b"".join(response[:first]), b"".join(response[first:]))))
    assert (sample.error, len(sample.chunk_seconds)) == ("", 4)


@pytest.mark.parametrize("cut", [0, 1, 4, 40])
@pytest.mark.parametrize("wrong", [b"no\r\n", b"5\r\nabcdefg\r\n", b"\r\n\r\n"])
def test_content_that_is_not_chunks_is_an_error_at_once(listening: socket.socket, cut: int, wrong: bytes) -> None:
    """``cut`` bytes of the second chunk are in the first read: the second begins inside a chunk, or inside its size."""
    first, second, *_ = chunks()
    sample = sample_of(listening, CHUNKED + first + second[:cut], second[cut:] + wrong, b"0\r\n\r\n")
    assert sample.error.startswith("RemoteProtocolError") and len(sample.chunk_seconds) == 2


def test_switch_of_protocols_is_an_error_at_once(listening: socket.socket) -> None:
    switch = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
    assert sample_of(listening, switch).error.startswith("RemoteProtocolError")


@pytest.mark.parametrize(
    ("response", "chunks_", "error"),
    [
        ([CHUNKED, *chunks()[:2], b"99\r\ndata"], 2, "RemoteProtocolError: the connection was closed"),
        ([b"SMTP ready\r\n\r\n"], 0, "RemoteProtocolError"),
        ([], 0, "RemoteProtocolError: the connection was closed"),
        ([CHUNKED[:9]], 0, "RemoteProtocolError: the connection was closed"),
        ([HEAD, b"\r\n", *EVENTS], 4, ""),
        ([HEAD.replace(b"\r\n", b"\n"), b"\n", *EVENTS], 4, ""),
        ([CHUNKED.replace(b"\r\n\r\n", b"\r\nContent-Length: 5\r\n\r\n"), *chunks()], 4, ""),
        ([HEAD, b"Content-Encoding: gzip\r\n\r\n", *EVENTS], 0, "the answer cannot be decompressed"),
        ([HEAD, b"Content-Length: %d\r\n\r\n" % sum(map(len, EVENTS)), *EVENTS], 4, ""),
        ([HEAD, b"Content-Length: 9999\r\n\r\n", *EVENTS], 4, "RemoteProtocolError: the connection was closed"),
    ],
    ids=[
        "cut off",
        "not HTTP",
        "nothing",
        "in the head",
        "until closed",
        "lines without CR",
        "chunks with a length",
        "not gzip",
        "of a length",
        "shorter",
    ],
)
def test_ends_of_answers(listening: socket.socket, response: list[bytes], chunks_: int, error: str) -> None:
    sample = sample_of(listening, *response)
    assert (len(sample.chunk_seconds), sample.error.startswith(error)) == (chunks_, True), sample.error
    assert bool(sample.error) == bool(error)


def test_chunks_of_one_read_have_one_time(listening: socket.socket) -> None:
    first, second, third, last, end = chunks()
    sample = sample_of(listening, CHUNKED + first + second, third, last + end)
    a, b, c, d = sample.chunk_seconds
    assert a == b < c < d


def test_requests_of_a_user_have_a_connection_each(listening: socket.socket) -> None:
    def serve() -> None:
        for response in ([], [CHUNKED, *chunks()]):
            with listening.accept()[0] as connection:
                while not connection.recv(1 << 16).endswith(b"{}"):
                    pass
                connection.sendall(b"".join(response))

    threading.Thread(target=serve, daemon=True).start()
    endpoint = Endpoint.parse(f"http://127.0.0.1:{listening.getsockname()[1]}")
    requests = [bench_client.StreamRequest(0, "/", {})] * 2
    first, second = bench_client.stream_all(endpoint, [requests], stall_seconds=60).samples
    assert first.error.startswith("RemoteProtocolError") and second.error == ""


def test_refused_connection_is_an_error_of_the_request(listening: socket.socket) -> None:
    port = listening.getsockname()[1]
    listening.close()
    request = bench_client.StreamRequest(0, "/", {})
    (sample,) = bench_client.stream_all(Endpoint.parse(f"http://127.0.0.1:{port}"), [[request]]).samples
    assert sample.error.startswith("ConnectError: ")


def test_head_without_end_is_an_error_of_the_request(listening: socket.socket) -> None:
    """Also of interim responses without number."""
    for endless in (b"X-Pad: " + b"x" * _wire.MAX_HEAD_BYTES * 3, EARLY * (3 * _wire.MAX_HEAD_BYTES // len(EARLY))):
        assert sample_of(listening, HEAD if endless.startswith(b"X") else b"", endless).error.startswith("RemoteProtocolError")


def test_answer_without_end_is_an_error(listening: socket.socket) -> None:
    piece = b"10000\r\n" + b":" * 2**16 + b"\r\n"
    bomb = (HEAD + b"Content-Encoding: gzip\r\n\r\n", gzip.compress(b":" * 2**24))
    for parts in ((CHUNKED, *[piece] * 24), (HEAD + b"\r\n", *[b":" * 2**16] * 24), bomb):
        assert "more than 1 MiB" in sample_of(listening, *parts, limit_bytes=2**20).error


KEEP_ALIVE = b"e\r\n: keep-alive\n\n\r\n"


@pytest.mark.parametrize(
    ("head", "part"),
    [
        (HEAD, b"X-Pad: x\r\n"),
        (CHUNKED, KEEP_ALIVE),
        (CHUNKED, KEEP_ALIVE * 9),
        (HEAD + b"\r\n", b":\r"),
        (CHUNKED + b"0\r\n", b"X-Pad: x\r\n"),
    ],
    ids=["head", "comments", "several in a read", "empty comments", "trailers"],
)
def test_bytes_without_data_do_not_end_a_silence(head: bytes, part: bytes, listening: socket.socket) -> None:
    assert sample_of(listening, head, *[part] * 400, stall_seconds=0.5).error.startswith("stalled")


def test_comments_between_events_are_no_silence(listening: socket.socket) -> None:
    parts = [part for chunk in chunks() for part in (*[KEEP_ALIVE] * 20, chunk)]
    sample = sample_of(listening, CHUNKED, *parts, stall_seconds=5)
    assert (sample.error, len(sample.chunk_seconds)) == ("", 4)


def test_answer_that_does_not_end_in_time_is_an_error(listening: socket.socket) -> None:
    slow = [b"1\r\n:\r\n"] * 400
    assert sample_of(listening, CHUNKED, *slow, limit_seconds=0.5).error == "not ended after 0.5 s"
