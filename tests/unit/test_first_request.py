"""The first request to a server, and the address that it listens on."""

from __future__ import annotations

import http.server
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hostile_server import hostile_server
from loopback import http_served
from typer.testing import CliRunner

from sm120kit import serving
from sm120kit.cli import app
from sm120kit.core.errors import NoAnswer, ResourceUnavailable
from sm120kit.core.urls import Endpoint
from sm120kit.serving import answer
from sm120kit.serving.resolve import require_port


@contextmanager
def server(models: Any, completion: Any) -> Iterator[Endpoint]:
    """A server that answers with these documents."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

        def reply(self, document: Any) -> None:
            content = json.dumps(document).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            self.reply(models)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.reply(completion)

    with http_served(Handler) as url:
        yield Endpoint.parse(url)


MODELS = {"data": [{"id": "m"}]}


@pytest.mark.parametrize(
    ("models", "completion"),
    [
        (MODELS, {"choices": [{"message": None}]}),
        (MODELS, {"choices": [{"message": "x"}]}),
        (MODELS, {"choices": []}),
        (MODELS, []),
        ({"data": None}, {}),
        ("x", {}),
    ],
)
def test_answer_without_a_completion(models: Any, completion: Any) -> None:
    with server(models, completion) as endpoint, pytest.raises(NoAnswer, match="answers without a completion"):
        answer.request(endpoint)


def test_answer_of_a_reasoning_model() -> None:
    with server(MODELS, {"choices": [{"message": {"content": None, "reasoning": "Hm"}}]}) as endpoint:
        assert (answer.request(endpoint).model, answer.request(endpoint).text) == ("m", "Hm")


def test_address_that_the_host_does_not_have() -> None:
    with pytest.raises(ResourceUnavailable, match=r"no server can listen on 192\.0\.2\.1: Cannot assign") as refused:
        require_port(8000, "192.0.2.1")
    assert "--listen" in refused.value.hint


def test_port_that_only_the_daemon_may_bind_is_not_in_use() -> None:
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        with socket.socket() as probe, pytest.raises(PermissionError):
            probe.bind(("127.0.0.1", 1))
        assert serving.port_is_free(1)
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("arguments", [["serve", "x", "--wait", "0"], ["bench", "run", "x", "--wait", "0"]])
def test_time_limit_is_positive(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and "--wait" in result.output


def test_an_endless_answer_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "LIMIT_BYTES", 2**20)
    with hostile_server() as server:
        server.respond("/v1/models", bytes(2**16), endless=True)
        with pytest.raises(NoAnswer, match="1 MiB"):
            answer.request(Endpoint.parse(server.url))
