"""Servers that refuse, stall, or send odd lists, counts and metrics: the error with its remedy, and no traceback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from loopback import http_served
from schedule_server import schedule_server
from typer.testing import CliRunner
from typer.testing import Result as CliResult

from sm120kit.bench import _metrics, result_file
from sm120kit.bench.figures import summary as figures_of
from sm120kit.cli import app
from sm120kit.core.errors import ServerFailed, Sm120kitError
from sm120kit.core.urls import Endpoint

MODELS = b'{"data": [{"id": "m"}]}'
EVENT = {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}]}
HUGE = "1" + "0" * 400


@contextmanager
def answering(charset: str = "utf-8", **answers: tuple[int, bytes]) -> Iterator[str]:
    """The URL of a server: status and body of ``models``, ``chat`` and ``metrics``; any other path does not exist."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, body = answers.get(
                self.path.partition("?")[0].rpartition("/")[2].replace("completions", "chat"), (404, b"")
            )
            self.send_response(status)
            kind = "text/event-stream" if body.startswith(b"data:") else f"text/plain; charset={charset}"
            for name, value in (("Content-Type", kind), ("Content-Length", str(len(body)))):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = answer

        def log_message(self, *arguments: object) -> None:
            pass

    with http_served(Handler) as url:
        yield url


def bench_run(url: str, output: Path, *options: str) -> CliResult:
    return CliRunner().invoke(
        app, ["bench", "run", url, "--force", "--quick", "--output-tokens", "4", "-o", str(output), *options]
    )


def stream(*usages: str) -> bytes:
    """Two chunks of text, with the JSON of usages in the events after them."""
    events = [json.dumps(EVENT)] * 2 + [f'{{"choices": [], "usage": {usage}}}' for usage in usages]
    finish = json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    return "".join(f"data: {event}\n\n" for event in [*events, finish, "[DONE]"]).encode()


HINTS = {401: "SM120KIT_API_KEY", 403: "SM120KIT_API_KEY", 404: "root of the server", 429: "limits the rate", 502: "proxy"}


@pytest.mark.parametrize("status", HINTS)
def test_refused_requests_have_a_remedy(status: int, tmp_path: Path) -> None:
    with answering(models=(200, MODELS), chat=(status, b"no")) as url:
        done = bench_run(url, tmp_path / "r.json")
    assert isinstance(done.exception, ServerFailed), done.output
    assert f"HTTP {status}: no" in done.exception.message and HINTS[status] in done.exception.hint
    assert all(sample.error for case in result_file.read(tmp_path / "r.json").cases for sample in case.samples)


@pytest.mark.parametrize("status", HINTS)
def test_refused_list_of_models_has_a_remedy(status: int, tmp_path: Path) -> None:
    with answering(models=(status, b"no")) as url:
        done = bench_run(url, tmp_path / "r.json")
    assert isinstance(done.exception, Sm120kitError) and done.exception.exit_code == 70, done.output
    remedy = "check its root URL" if status == 404 else HINTS[status]
    assert str(status) in done.exception.message and remedy in done.exception.hint
    assert not (tmp_path / "r.json").exists()


@pytest.mark.parametrize("fault", ["stall", "late"])
def test_timeout_is_the_longest_time_without_data(fault: str, tmp_path: Path) -> None:
    """Before the first token and after it; a longer limit lets the late answer pass."""
    schedule: dict[str, Any] = {"fault": "stall", "tokens": 4} if fault == "stall" else {"first": 2.5, "tokens": 4}
    body = json.dumps({"schedule": schedule})
    with schedule_server() as url:
        done = bench_run(url, tmp_path / "r.json", "--extra-body", body, "--timeout", "1")
        assert isinstance(done.exception, ServerFailed), done.output
        assert "1 s" in done.exception.message and "--timeout" in done.exception.hint
        if fault == "late":
            assert bench_run(url, tmp_path / "r2.json", "--extra-body", body, "--timeout", "60").exit_code == 0
    assert bench_run(url, tmp_path / "r3.json", "--timeout", "0").exit_code == 2


@pytest.mark.parametrize(
    "models", [b"[]", b"{}", b'{"data": {}}', b'{"data": [1]}', b'{"data": []}', b"\xff", b"[" * 100_000, b'{"data": null}']
)
def test_odd_lists_of_models(models: bytes, tmp_path: Path) -> None:
    with answering(models=(200, models)) as url:
        done = bench_run(url, tmp_path / "r.json")
    assert isinstance(done.exception, Sm120kitError), done.output


@pytest.mark.parametrize(
    "usage",
    [
        "7",
        '"7"',
        "[1]",
        '{"completion_tokens": -1}',
        '{"completion_tokens": true}',
        '{"completion_tokens": 2.5}',
        '{"completion_tokens": 5}',
        f'{{"completion_tokens": {HUGE}}}',
        f'{{"completion_tokens": 2, "prompt_tokens": {HUGE}}}',
        '{"completion_tokens": NaN}',
        '{"completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": "all"}}',
    ],
)
def test_odd_usage_is_an_error_of_the_request(usage: str, tmp_path: Path) -> None:
    with answering(models=(200, MODELS), chat=(200, stream(usage))) as url:
        done = bench_run(url, tmp_path / "r.json")
    assert isinstance(done.exception, ServerFailed) and "usage" in done.exception.message, done.output


@pytest.mark.parametrize(
    "usage",
    [
        "{}",
        "null",
        '{"completion_tokens": 2, "prompt_tokens_details": []}',
        '{"completion_tokens": 2, "prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 9}}',
    ],
)
def test_incomplete_usage_is_unknown(usage: str, tmp_path: Path) -> None:
    with answering(models=(200, MODELS), chat=(200, stream(usage))) as url:
        done = bench_run(url, tmp_path / "r.json")
    assert done.exit_code == 0, done.output
    (case,) = result_file.read(tmp_path / "r.json").cases
    assert figures_of(case).prefill_tok_s is None


COUNTERS = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:spec_decode_num_draft_tokens_total")


@pytest.mark.parametrize(
    "value", ["", "x", "NaN", "+Inf", "1e308", "1e400", "-5", HUGE, '{engine="0"', "{} 1 2 3", "\x00", "\ud800", "0x10", "1_0"]
)
def test_odd_metrics_are_unknown(value: str, tmp_path: Path) -> None:
    names = (*COUNTERS, "vllm:spec_decode_num_accepted_tokens_total", "sglang:spec_accept_rate", "sglang:cached_tokens_total")
    text = "".join(f"{name} {value}\n" * 3 for name in names).encode("utf-8", "surrogatepass")
    answer = stream('{"completion_tokens": 2, "prompt_tokens": 3}')
    with answering(models=(200, MODELS), chat=(200, answer), metrics=(200, text)) as url:
        done = bench_run(url, tmp_path / "r.json")
    assert done.exit_code == 0, done.output
    figures = figures_of(result_file.read(tmp_path / "r.json").cases[0])
    assert figures.cache_hits is None
    shown = CliRunner().invoke(app, ["bench", "show", str(tmp_path / "r.json")])
    assert shown.exit_code == 0, shown.output


@pytest.mark.parametrize("charset", ["hex", "rot13", "zlib", "undefined", "idna", "utf-16", "no-such", "utf-8; charset=hex"])
def test_metrics_are_read_whatever_their_charset_is(charset: str) -> None:
    text = b'vllm:prefix_cache_queries_total{e="1"} 3\nvllm:prefix_cache_hits_total 1e400\n'
    with answering(charset=charset, metrics=(200, text * 2)) as url:
        read = _metrics.metrics_of(Endpoint.parse(url))
    assert _metrics.metric(read, "vllm:prefix_cache_queries_total") == [3, 3]
    assert _metrics.metric(read, "vllm:prefix_cache_hits_total") == []


SECRET = "hunter2xyz"


@pytest.mark.parametrize("place", ["error event", "model", "finish_reason", "refusal", "models", "version"])
@pytest.mark.parametrize("given", ["key", "password", "query", "header"])
def test_credentials_that_a_server_repeats_are_in_no_output_and_no_result(given: str, place: str, tmp_path: Path) -> None:
    error = json.dumps({"error": {"message": f"invalid key {SECRET}"}})
    named = json.dumps({"model": SECRET, "choices": [{"delta": {"content": "a"}, "finish_reason": SECRET}]})
    chat = {"error event": f"data: {error}\n\n", "refusal": f"no {SECRET}"}.get(place, f"data: {named}\n\n").encode()
    listed = json.dumps({"data": [{"id": "m", "root": SECRET if place == "models" else "/m"}]}).encode()
    answers = {"models": (200, listed), "chat": (403 if place == "refusal" else 200, chat)}
    with answering(**answers, version=(200, json.dumps({"version": SECRET}).encode())) as url:
        options = {"key": ("--api-key", SECRET), "header": ("--header", f"X-Api-Key:{SECRET}")}.get(given, ())
        root = {"password": url.replace("//", f"//u:{SECRET}@"), "query": f"{url}?token={SECRET}"}.get(given, url)
        done = bench_run(root, tmp_path / "r.json", *options)
    written = (tmp_path / "r.json").read_text()
    assert SECRET not in done.output and SECRET not in written and '"complete"' in written
    for options in ((), ("--json",)):
        assert SECRET not in CliRunner().invoke(app, ["bench", "show", str(tmp_path / "r.json"), *options]).output


def test_tables_fit_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    answer = stream('{"completion_tokens": 2, "prompt_tokens": 3}')
    with answering(models=(200, MODELS), chat=(200, answer)) as url:
        for name in ("a.json", "b.json"):
            ran = CliRunner().invoke(
                app,
                [
                    "bench",
                    "run",
                    url,
                    "--force",
                    "-o",
                    name,
                    "--concurrency",
                    "1,4",
                    "--context-tokens",
                    "0,65536",
                    "--requests",
                    "1",
                ],
            )
            assert ran.exit_code == 0, ran.output
    path = tmp_path / "b.json"
    content = json.loads(path.read_text())
    for number, case in enumerate(content["cases"]):  # numbers as long as those of a real server
        case["restart"] = number % 2
        case["complete"] = number != 1
        case["prefix_cache"] = {"tokens": 10**6, "hits": 333333}
        case["energy"] = {"gpus": [0], "joules": [1.0], "unknown": ""}  # of an earlier version: ignored
        for sample in case["samples"]:
            times = [12.5, 13.5]
            sample |= {
                "chunk_seconds": times,
                "first_token": 12.5,
                "first_answer": 12.5,
                "ended": 13.5,
                "completion_tokens": 16384,
            }
    path.write_text(json.dumps(content))
    for command in (["bench", "show", "b.json"], ["bench", "compare", "a.json", "b.json"]):
        shown = CliRunner().invoke(app, [*command, *(["--ignore", "complete"] if command[1] == "compare" else [])])
        assert shown.exception is None, shown.output
        tables = [line for line in shown.output.splitlines() if line.startswith(" ")]
        assert len(tables) > 4 and max(map(len, tables)) <= 80, shown.output
