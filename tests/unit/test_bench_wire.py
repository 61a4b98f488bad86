"""Arrival times by the kernel's stamps: never before the previous read and never after the read itself."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpcore2
import httpx2
import pytest

from sm120kit.bench import _wire
from sm120kit.bench import client as bench_client
from sm120kit.bench.sample import Sample
from sm120kit.core.urls import Endpoint


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture
def stamping() -> Iterator[None]:
    """Linux stamps from a moment after the first socket requests it, for as long as a socket does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as requesting:
        requesting.setsockopt(socket.SOL_SOCKET, _wire.SO_TIMESTAMPNS, 1)
        requesting.bind(("127.0.0.1", 0))
        for _ in range(1000):
            requesting.sendto(b"x", requesting.getsockname())
            time.sleep(0.01)
            read_ns, control = time.time_ns(), requesting.recvmsg(1, 100)[1]
            seconds, nanoseconds = _wire._TIMESPEC.unpack(control[0][2])
            if seconds * 10**9 + nanoseconds < read_ns:
                break
        yield


async def connected(listening: socket.socket) -> tuple[Any, socket.socket]:
    stream = await _wire._Backend().connect_tcp("127.0.0.1", listening.getsockname()[1], timeout=60)
    return stream, listening.accept()[0]


def test_arrival_is_before_the_read(listening: socket.socket, stamping: None) -> None:
    async def read_late() -> tuple[float, float, float]:
        stream, peer = await connected(listening)
        sent = time.perf_counter()
        peer.sendall(b"token")
        time.sleep(0.05)
        before_read = time.perf_counter()
        assert await stream.read(100, timeout=60) == b"token"
        await stream.aclose()
        peer.close()
        return sent, stream.arrived, before_read

    sent, arrived, before_read = asyncio.run(read_late())
    assert sent - 1e-4 < arrived < before_read - 0.02, "two clocks, compared to 20 us"


@pytest.mark.parametrize(("clock_ahead", "age"), [(0.0, 0.25), (-60.0, 0.0), (60.0, 1.0)])
def test_age_is_limited_when_the_clock_is_adjusted(listening: socket.socket, clock_ahead: float, age: float) -> None:
    async def aged() -> float:
        stream, peer = await connected(listening)
        wall_ns = time.time_ns()
        stamp = wall_ns - round((0.25 + clock_ahead) * 1e9)
        control = [(socket.SOL_SOCKET, _wire.SO_TIMESTAMPNS, _wire._TIMESPEC.pack(stamp // 10**9, stamp % 10**9))]
        result: float = stream._age(control, stream._last_read + 1.0, wall_ns)
        assert stream._age([], stream._last_read + 1.0, wall_ns) == 0.0, "without a stamp: the time of the read"
        await stream.aclose()
        peer.close()
        return result

    assert asyncio.run(aged()) == pytest.approx(age)


def test_what_a_full_read_leaves_may_have_arrived_before_it(listening: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_wire, "_READ_BYTES", 4)

    async def age_after(received: bytes) -> float:
        stream, peer = await connected(listening)
        before = stream._earliest
        peer.sendall(received)
        await stream.read(100, timeout=60)
        read_again = stream._last_read
        wall_ns = time.time_ns()
        control = [(socket.SOL_SOCKET, _wire.SO_TIMESTAMPNS, _wire._TIMESPEC.pack(wall_ns // 10**9 - 60, 0))]
        age: float = stream._age(control, read_again, wall_ns)
        await stream.aclose()
        peer.close()
        return age if before < read_again else -1

    assert asyncio.run(age_after(b"abc")) == 0
    assert asyncio.run(age_after(b"abcd")) >= 0


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def answers(listening: socket.socket, *responses: list[bytes]) -> list[tuple[bytes, str]]:
    """The contents that a client gets for requests of one connection, and how each ended."""
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"

    def serve() -> None:
        with listening.accept()[0] as connection:
            for response in responses:
                while not connection.recv(1 << 16).endswith(b"{}"):
                    pass
                for part in response:
                    connection.sendall(part)
                    time.sleep(0.01)

    async def request(client: httpx2.AsyncClient) -> tuple[bytes, str]:
        reads: list[tuple[float, bytes]] = []
        error = ""
        try:
            async with client.stream("POST", url, json={}) as response:
                reads = _wire.content(response, bench_client.MAX_CONTENT_BYTES)
                async for read in response.aiter_raw():
                    reads.append((_wire.arrived(response), read))
        except httpx2.HTTPError as failure:
            error = type(failure).__name__
        assert reads == sorted(reads, key=lambda read: read[0])
        return b"".join(read for _, read in reads), error

    async def requests() -> list[tuple[bytes, str]]:
        async with _wire.client(Endpoint.parse(url), httpx2.Timeout(30)) as client:
            return [await request(client) for _ in responses]

    threading.Thread(target=serve, daemon=True).start()
    return asyncio.run(requests())


CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def test_responses_of_one_connection(listening: socket.socket) -> None:
    first = [CHUNKED[:30], CHUNKED[30:] + b"3\r\nab", b"c\r\n4\r\ndefg\r\n", b"0\r\n\r\n"]
    second = [HEAD + b"transfer-encoding: Chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n"]
    plain = [HEAD + b"Content-Length: 4\r\n\r\nab", b"cd"]
    assert answers(listening, first, second, plain, second) == [(b"abcdefg", ""), (b"x", ""), (b"abcd", ""), (b"x", "")]


@pytest.mark.parametrize(
    ("response", "content", "error"),
    [
        ([CHUNKED + b"3\r\nabc\r\n", b"9\r\ndef"], b"abcdef", "RemoteProtocolError"),
        ([CHUNKED + b"3\r\nabc\r\n", b"no\r\n"], b"abc", "RemoteProtocolError"),
        ([b"SMTP ready\r\n\r\n"], b"", "RemoteProtocolError"),
        ([HEAD + b"\r\nuntil", b" closed"], b"until closed", ""),
    ],
    ids=["cut off", "not a chunk", "not HTTP", "until the connection is closed"],
)
def test_ends_of_responses(listening: socket.socket, response: list[bytes], content: bytes, error: str) -> None:
    assert answers(listening, response) == [(content, error)]


def sample_of(listening: socket.socket, *parts: bytes, **limits: Any) -> Sample:
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
    (sample,) = bench_client.stream_all(endpoint, [[request]], stall_seconds=60).samples
    return sample


def chunks(*, blank_after: int | None = None) -> list[bytes]:
    """Four events with text and the end, each as a chunk; a blank follows the size of chunk ``blank_after``."""
    events = [{"choices": [{"delta": {"content": text}}]} for text in "abc"]
    events += [{"choices": [{"delta": {"content": "d"}, "finish_reason": "stop"}]}]
    contents = [f"data: {json.dumps(event)}\n\n".encode() for event in events] + [b""]
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


def test_chunks_have_the_time_of_their_read_and_skip_the_library() -> None:
    response = _wire._Response()
    assert response.feed(1.0, CHUNKED[:-1]) == b""
    assert response.feed(2.0, CHUNKED[-1:] + b"2\r\nab\r\n1\r\nc\r\n3\r\nd") == CHUNKED
    assert response.feed(3.0, b"ef\r\n") == b""
    assert response.feed(4.0, b"0\r\n\r\n") == b"0\r\n\r\n"
    assert response.content == [(2.0, b"ab"), (2.0, b"c"), (2.0, b"d"), (3.0, b"ef")]
    assert not response.decoding


def test_answer_before_the_end_of_the_request(listening: socket.socket) -> None:
    async def refused() -> list[bytes]:
        stream, peer = await connected(listening)
        await stream.write(b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n")
        peer.sendall(CHUNKED + b"2\r\nno\r\n0\r\n\r\n")
        while stream.response.decoding:
            await asyncio.sleep(0.001)
        await stream.write(b"{}")
        assert await stream.read(1000, timeout=60) == CHUNKED + b"0\r\n\r\n"
        content = [read for _, read in stream.response.content]
        await stream.aclose()
        peer.close()
        return content

    assert asyncio.run(refused()) == [b"no"]


def test_timeout_is_of_a_pause_not_of_the_whole_response(listening: socket.socket) -> None:
    async def waited() -> float:
        stream, peer = await connected(listening)
        began = time.perf_counter()
        stream._last_read = began + 0.4  # as if chunks arrived until then
        with pytest.raises(httpcore2.ReadTimeout):
            await stream.read(1, timeout=0.1)
        await stream.aclose()
        peer.close()
        return time.perf_counter() - began

    assert asyncio.run(waited()) >= 0.5


def test_surplus_bytes_are_kept_for_the_next_read(listening: socket.socket) -> None:
    async def cut() -> list[bytes]:
        stream, peer = await connected(listening)
        peer.sendall(b"abcdef")
        peer.close()
        reads = [await stream.read(4, timeout=60) for _ in range(3)]
        assert stream.get_extra_info("is_readable"), "the pool drops a closed connection"
        await stream.aclose()
        return reads

    assert asyncio.run(cut()) == [b"abcd", b"ef", b""]


def test_next_address_of_a_host_is_tried(listening: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        unreachable = closed.getsockname()

    async def both() -> bytes:
        async def addresses(*_: object, **__: object) -> list[Any]:
            return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", address) for address in (unreachable, listening.getsockname())]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", addresses)
        stream, peer = await connected(listening)
        peer.sendall(b"here")
        read: bytes = await stream.read(100, timeout=60)
        await stream.aclose()
        peer.close()
        return read

    assert asyncio.run(both()) == b"here"


def test_timeout_and_refused_connection_are_pool_errors(listening: socket.socket) -> None:
    async def silent() -> None:
        stream, peer = await connected(listening)
        with pytest.raises(httpcore2.ReadTimeout):
            await stream.read(1, timeout=0.01)
        await stream.aclose()
        peer.close()

    async def connect(port: int) -> None:
        await _wire._Backend().connect_tcp("127.0.0.1", port, timeout=60)

    asyncio.run(silent())
    port = listening.getsockname()[1]
    listening.close()
    with pytest.raises(httpcore2.ConnectError, match="failed"):
        asyncio.run(connect(port))


def test_head_without_end_is_an_error_of_the_request(listening: socket.socket) -> None:
    """Also of interim responses without number."""
    for endless in (b"X-Pad: " + b"x" * _wire.MAX_HEAD_BYTES * 3, EARLY * (3 * _wire.MAX_HEAD_BYTES // len(EARLY))):
        assert sample_of(listening, HEAD if endless.startswith(b"X") else b"", endless).error.startswith("RemoteProtocolError")


def test_head_is_read_in_linear_time() -> None:
    def seconds(size: int) -> float:
        response, began = _wire._Response(), time.process_time()
        kept = sum(len(response.feed(1.0, b"HTTP/1.1 103 Early Hints\r\n\r\n")) for _ in range(size))
        assert kept >= size * 20 - _wire.MAX_HEAD_BYTES
        return time.process_time() - began

    assert min(seconds(80_000) for _ in range(3)) < 3.5 * min(seconds(40_000) for _ in range(3)) + 0.05


def test_answer_without_end_is_an_error(listening: socket.socket) -> None:
    piece = b"10000\r\n" + b":" * 2**16 + b"\r\n"
    for parts in ((CHUNKED, *[piece] * 24), (HEAD + b"\r\n", *[b":" * 2**16] * 24)):
        assert "more than 1 MiB" in sample_of(listening, *parts, limit_bytes=2**20).error


def test_answer_that_does_not_end_in_time_is_an_error(listening: socket.socket) -> None:
    slow = [b"1\r\n:\r\n"] * 400
    assert sample_of(listening, CHUNKED, *slow, limit_seconds=0.5).error == "not ended after 0.5 s"


def answered(listening: socket.socket, *connections: list[bytes | None]) -> tuple[list[str], int]:
    """Errors of two requests in sequence, and the number of requests that arrived.

    Each connection answers its requests with these bytes, and closes after the last; None resets it after the request.
    """
    arrived = 0

    def serve() -> None:
        nonlocal arrived
        for responses in connections:
            with suppress(OSError), listening.accept()[0] as connection:
                for response in responses:
                    while not (read := connection.recv(1 << 16)).endswith(b"{}") and read:
                        pass
                    arrived += bool(read)
                    if response is None:
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    else:
                        connection.sendall(response)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    endpoint = Endpoint.parse(f"http://127.0.0.1:{listening.getsockname()[1]}")
    request = bench_client.StreamRequest(0, "/", {})
    samples = bench_client.stream_all(endpoint, [[request] * 2], stall_seconds=60).samples
    return [sample.error for sample in samples], arrived


CLOSED = ("ReadError", "RemoteProtocolError")
GOOD = CHUNKED + b"".join(chunks())


def test_request_on_a_connection_that_was_closed_meanwhile_is_sent_again(listening: socket.socket) -> None:
    assert answered(listening, [GOOD, None], [GOOD]) == (["", ""], 3)


def test_request_on_a_new_connection_is_sent_once(listening: socket.socket) -> None:
    errors, arrived = answered(listening, [None], [GOOD])
    assert errors[0].startswith(CLOSED) and errors[1] == "" and arrived == 2


def test_request_is_sent_again_once(listening: socket.socket) -> None:
    errors, arrived = answered(listening, [GOOD, None], [None])
    assert errors[0] == "" and errors[1].startswith(CLOSED) and arrived == 3


@pytest.mark.parametrize("begun", [GOOD[:9], GOOD[:-40]])
def test_request_is_not_sent_again_after_an_answer_has_begun(listening: socket.socket, begun: bytes) -> None:
    errors, arrived = answered(listening, [GOOD, begun], [GOOD])
    assert errors[0] == "" and errors[1].startswith("RemoteProtocolError") and arrived == 2
