"""Responses of a measured server that are too long or compressed."""

from __future__ import annotations

import asyncio
import gzip
import json

import httpx2
import pytest
from hostile_server import hostile_server

from sm120kit import bench
from sm120kit.bench import client
from sm120kit.core import server_requests
from sm120kit.core.errors import ServerFailed
from sm120kit.core.urls import Endpoint


def test_endless_response_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_RESPONSE_BYTES", 2**20)
    with hostile_server() as server:
        for path in ("/v1/models", "/metrics"):
            server.respond(path, bytes(2**16), endless=True)
        with pytest.raises(ServerFailed, match="the response has more than 1 MiB"):
            client.models(Endpoint.parse(server.url))
        with pytest.raises(httpx2.HTTPError, match="the response has more than 1 MiB"):
            client.get(Endpoint.parse(server.url), "/metrics")


@pytest.mark.parametrize("status", [200, 103])  # content, or interim responses without end
def test_response_that_does_not_end_in_time_is_refused(status: int) -> None:
    with hostile_server() as server:
        server.respond("/version", b" " if status == 200 else b"HTTP/1.1 103 Early Hints\r\n\r\n", status, endless=True)
        with pytest.raises(httpx2.HTTPError, match="takes more than"):
            server_requests.request(Endpoint.parse(server.url), "GET", "/version", seconds=0.2, limit=2**40)


def test_lists_of_models_are_shown_in_part() -> None:
    with hostile_server() as server:
        server.respond("/v1/models", json.dumps({"data": [{"id": f"m{number}"} for number in range(10_000)]}).encode())
        with pytest.raises(ServerFailed, match="offers 10000 models") as refused:
            bench.choose_model(Endpoint.parse(server.url), None)
        assert "m0, m1, " in refused.value.hint and len(refused.value.hint) < 300
        server.respond("/v1/models", json.dumps({"data": [{"id": "m" * 10_000}]}).encode())
        with pytest.raises(ServerFailed, match="more than 1,000 characters"):
            client.models(Endpoint.parse(server.url))


def test_unrequested_compression_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The response is not decompressed."""
    with hostile_server() as server:
        server.respond("/metrics", gzip.compress(bytes(2**24)), Content_Encoding="gzip")
        assert len(client.get(Endpoint.parse(server.url), "/metrics").content) < 2**20


def test_response() -> None:
    with hostile_server() as server:
        server.respond("/v1/models", b'{"data": [{"id": "m"}]}', Content_Type="application/json")
        server.respond("/metrics", "ä 1".encode(), Content_Type="text/plain; charset=utf-8")
        assert client.models(Endpoint.parse(server.url)) == ("m",)
        assert client.get(Endpoint.parse(server.url), "/metrics").text == "ä 1"


@pytest.mark.parametrize("before", range(185, 200, 5))
def test_secret_at_the_end_of_what_is_shown(before: int) -> None:
    """An error is cut after its secrets are masked: the first part of one would not be recognized."""
    key = "hunter2xyz-hunter2xyz"

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = b"x" * before + key.encode()
        writer.write(b"HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        writer.close()

    async def request() -> str:
        async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
            endpoint = Endpoint.parse(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", key)
            ask = client.StreamRequest(0, "/v1/completions", {})
            result = await client._stream_all(endpoint, [[ask]], 10, lambda request: None)
            return result.samples[0].error

    error = asyncio.run(request())
    assert error.startswith("HTTP 403: xxx") and "hunter" not in error
