"""Responses of a measured server that are too long or compressed."""

from __future__ import annotations

import gzip

import httpx2
import pytest
from hostile_server import hostile_server

from sm120kit.bench import client
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
