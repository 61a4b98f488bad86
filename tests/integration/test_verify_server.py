"""Probe a small server with random weights, healthy and with seeded faults. The table of all: tests/slow/engines."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

pytest.importorskip("transformers")

from hostile_server import hostile_server
from loopback import http_served
from schedule_server import schedule_server
from small_models import probe_tokenizer, tiny_model, word_ids
from small_server import Options, SmallEngine, small_server

from sm120kit.cli import app
from sm120kit.cli.verify_server import ProbedServer
from sm120kit.core.errors import CheckFailed, NotFound, ServerFailed
from sm120kit.core.urls import Endpoint
from sm120kit.kld import ServedModel
from sm120kit.probes.decode_by_prefill import _read_alike

STRUCTURE = ("log-probabilities", "counts of tokens", "repeated requests", "decoding against prefill", "cached prefixes")
"""Probes that need no trained model."""


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    tokenizer = probe_tokenizer()
    return tiny_model(len(tokenizer)), tokenizer


@contextmanager
def running(tiny: tuple[Any, Any], fault: str = "", **options: Any) -> Iterator[str]:
    model, tokenizer = tiny
    engine = SmallEngine(model, word_ids(tokenizer), frozenset(), Options(faults=frozenset({fault} - {""}), **options))
    with small_server(engine, tokenizer) as url:
        yield url


def verify(url: str, output: Path, *options: str, probes: tuple[str, ...] = STRUCTURE) -> Result:
    chosen = [word for name in probes for word in ("--probe", name)]
    return CliRunner().invoke(app, ["verify", "server", url, "--seconds", "300", "-o", str(output), *chosen, *options])


def verdicts(output: Path) -> dict[str, str]:
    return {each["probe"]: each["verdict"] for each in json.loads(output.read_text())["probes"]}


def test_a_healthy_server_with_prefix_cache_and_speculation(tiny: tuple[Any, Any], tmp_path: Path) -> None:
    output = tmp_path / "v.json"
    with running(tiny, drafts=2) as url:
        done = verify(url, output, "--json", probes=(*STRUCTURE, "tool calls and JSON"))
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == json.loads(output.read_text())
    assert set(verdicts(output).values()) == {"ok"}
    record = json.loads(output.read_text())
    assert record["complete"] and all(probe["exchanges"] and probe["cannot_see"] for probe in record["probes"])


def test_tokens_that_the_tokenizer_divides_otherwise_are_not_compared(tiny: tuple[Any, Any]) -> None:
    _, tokenizer = tiny
    session: Any = SimpleNamespace(token_ids=lambda text: tuple(tokenizer(text, add_special_tokens=False)["input_ids"]))
    words = [" taken", "il", "le", " forest", "ir"]
    assert len(session.token_ids("a" + "".join(words))) == len(session.token_ids("a")) + len(words), "as many others"
    assert _read_alike(session, "a", words) == 2
    assert _read_alike(session, "a", words[:1] + words[3:4]) == 2


@pytest.mark.parametrize(
    ("fault", "probe"),
    [
        ("race", "repeated requests"),
        ("block-of-other-prompt", "cached prefixes"),
        ("stale-draft-kv", "decoding against prefill"),
        ("top-k-off-by-one", "log-probabilities"),
        ("cut-streamed-tool-call", "tool calls and JSON"),
    ],
)
def test_a_seeded_fault_is_found(fault: str, probe: str, tiny: tuple[Any, Any], tmp_path: Path) -> None:
    output = tmp_path / "v.json"
    with running(tiny, fault, drafts=3 if "draft" in fault else 0) as url:
        done = verify(url, output, probes=(probe,))
    assert isinstance(done.exception, CheckFailed) and probe in done.exception.message, done.output
    assert verdicts(output) == {probe: "wrong"}


def test_a_reference_shows_what_is_wrong_every_time(tiny: tuple[Any, Any], tmp_path: Path) -> None:
    _, tokenizer = tiny
    other = tiny_model(len(tokenizer), seed=1)
    output = tmp_path / "v.json"
    with running(tiny) as reference:
        for model, expected in ((tiny, "ok"), ((other, tokenizer), "wrong")):
            with running(model) as url:
                verify(url, output, "--reference", reference, "--overwrite", probes=("log-probabilities",))
            assert verdicts(output) == {"log-probabilities": "ok", "reference server": expected}


def test_bench_measures_a_server_that_answers_wrongly_only_with_force(tiny: tuple[Any, Any], tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    arguments = ["--quick", "--output-tokens", "4", "-o", str(output)]
    with running(tiny, "usage-doubled") as url:
        refused = CliRunner().invoke(app, ["bench", "run", url, *arguments])
        assert isinstance(refused.exception, CheckFailed) and not output.exists(), refused.output
        CliRunner().invoke(app, ["bench", "run", url, "--force", *arguments])
    assert json.loads(output.read_text())["probes"]["counts of tokens"].startswith("wrong: ")
    shown = CliRunner().invoke(app, ["bench", "show", str(output)])
    assert "counts of tokens" in shown.output
    with running(tiny) as url:
        done = CliRunner().invoke(app, ["bench", "run", url, "--overwrite", *arguments])
    assert done.exit_code == 0, done.output
    assert {found.partition(":")[0] for found in json.loads(output.read_text())["probes"].values()} == {"ok"}


def test_a_server_without_log_probabilities_cannot_be_judged_by_them(tmp_path: Path) -> None:
    output = tmp_path / "v.json"
    with schedule_server() as url:
        done = verify(url, output, probes=("log-probabilities", "counts of tokens", "needles"))
    assert done.exit_code == 0, done.output
    assert verdicts(output) == {
        "log-probabilities": "cannot be judged",
        "counts of tokens": "ok",
        "needles": "cannot be judged",
    }


def test_usage_errors(tmp_path: Path) -> None:
    output = tmp_path / "v.json"
    output.write_text("{}")
    with hostile_server() as server:
        server.respond("/v1/models", b'{"data": [{"id": "m"}]}')
        assert isinstance(verify(server.url, tmp_path / "n.json").exception, ServerFailed), "it answers no request"
        unknown = verify(server.url, tmp_path / "n.json", probes=("needle",))
        assert isinstance(unknown.exception, NotFound) and "needles" in unknown.exception.message
        assert verify(server.url, output).exit_code and output.read_text() == "{}"
    assert isinstance(verify("http://127.0.0.1:9", tmp_path / "n.json").exception, ServerFailed)
    assert not (tmp_path / "n.json").exists()


def respond(handler: BaseHTTPRequestHandler, body: bytes) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def test_the_command_ends_within_its_time_limit(tmp_path: Path) -> None:
    ended, asked = Event(), list[str]()

    class Hanging(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            if self.path == "/v1/models":
                respond(self, b'{"data": [{"id": "m"}]}')
            else:
                ended.wait(60)

        do_POST = do_GET

        def log_message(self, *arguments: Any) -> None:
            pass

    with http_served(Hanging) as url:
        began = time.monotonic()
        done = CliRunner().invoke(app, ["verify", "server", url, "--seconds", "10", "-o", str(tmp_path / "v.json")])
        took = time.monotonic() - began
        ended.set()
    assert isinstance(done.exception, ServerFailed) and "--seconds" in str(done.exception.hint)
    assert took < 10 and not (tmp_path / "v.json").exists()


def test_key_and_headers_of_the_server_are_not_sent_to_the_reference() -> None:
    seen: list[dict[str, str]] = []

    class Models(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(dict(self.headers))
            body = b'{"object": "list", "data": [{"id": "m", "object": "model"}]}'
            respond(self, body)

    with HTTPServer(("127.0.0.1", 0), Models) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        for key, sent in (("", None), ("of-the-reference", "Bearer of-the-reference")):
            probed = ProbedServer(api_key="hunter2", header=["X-Key: hunter2"], reference=url, reference_api_key=key)
            assert probed.compared()
            assert seen[-1].get("Authorization") == sent and "hunter2" not in str(seen)
        server.shutdown()


def test_more_tokens_than_a_text_can_have_are_none() -> None:
    class Tokenizer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body = json.dumps({"tokens": [1] * int(asked["model"])}).encode()
            respond(self, body)

    with HTTPServer(("127.0.0.1", 0), Tokenizer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        endpoint = Endpoint.parse(f"http://127.0.0.1:{server.server_port}")
        assert ServedModel(endpoint, "12", 1).token_ids("日本語") == (1,) * 12
        assert ServedModel(endpoint, "1000", 1).token_ids("日本語") is None
        server.shutdown()
