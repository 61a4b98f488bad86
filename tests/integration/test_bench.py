"""The client against a real HTTP server on loopback with a schedule. Its accuracy: tests/bench/bench_client.py."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from schedule_server import schedule_server

from sm120kit.bench import MeasuredServer, Measurement, choose_model, client, run, workload
from sm120kit.bench.client import StreamRequest
from sm120kit.bench.figures import summary
from sm120kit.bench.result_file import Result
from sm120kit.bench.sample import Sample
from sm120kit.core.errors import ServerFailed
from sm120kit.core.urls import Endpoint


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with schedule_server() as running:
        yield running


def stream(url: str, **schedule: object) -> Sample:
    request = StreamRequest(0, "/v1/chat/completions", {"schedule": {"interval": 0.002, "tokens": 40, **schedule}})
    return client.stream_all(Endpoint.parse(url), [[request]], stall_seconds=60).samples[0]


def test_sample_matches_the_schedule(url: str) -> None:
    got = stream(url, tokens=40, per_chunk=4, reasoning=8, first=0.05, interval=0.01)
    assert (got.error, got.status, got.finish_reason, got.model) == ("", 200, "stop", "schedule")
    assert (got.completion_tokens, got.reasoning_tokens, got.prompt_tokens) == (40, 8, 7)
    assert (len(got.chunk_seconds), got.answer_chunks) == (10, 8)
    assert got.ttft is not None and got.ttfa is not None
    assert got.ttft >= 0.049
    assert got.first_answer == got.chunk_seconds[2], "two chunks of reasoning come first"


def test_requests_of_a_user_run_in_sequence(url: str) -> None:
    request = StreamRequest(0, "/v1/chat/completions", {"schedule": {"interval": 0.01, "tokens": 20}})
    samples = client.stream_all(Endpoint.parse(url), [iter([request] * 4), iter([request] * 3)]).samples
    assert [sample.error for sample in samples] == [""] * 7
    for user, streams in ((0, 4), (1, 3)):
        own = sorted((sample.started, sample.ended) for sample in samples if sample.user == user)
        assert len(own) == streams and all(ended <= started for (_, ended), (started, _) in pairwise(own))


@pytest.mark.parametrize("fault", ["split", "comments", "no done", "gzip"])
def test_sample_is_independent_of_how_the_stream_is_cut(url: str, fault: str) -> None:
    word = "Grüße 🚲 "
    plain, odd = stream(url, word=word), stream(url, word=word, fault=fault)
    assert (odd.error, odd.completion_tokens, len(odd.chunk_seconds), odd.text_sha256) == ("", 40, 40, plain.text_sha256)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("500", "HTTP 500: no memory"),
        ("disconnect", "RemoteProtocolError"),
        ("stall", "stalled: no data for 4 s, the limit of --timeout"),
        ("json", "the server ignored stream: true and sent one JSON document"),
        ("br", "the server compressed the answer as 'br', which was not offered"),
        ("error event", "server: out of blocks"),
    ],
)
def test_failed_request_has_an_error_and_no_rate(url: str, fault: str, error: str) -> None:
    good, bad = (StreamRequest(0, "/v1/chat/completions", {"schedule": {"tokens": 40, "fault": name}}) for name in ("", fault))
    limit = 4 if fault == "stall" else 60
    first, broken, last = client.stream_all(Endpoint.parse(url), [[good, bad, good]], stall_seconds=limit).samples
    assert broken.error.startswith(error)
    assert broken.decode_tok_s is None
    assert len(broken.chunk_seconds) == (0 if fault in ("500", "json", "br") else 20)
    assert (first.error, last.error, last.completion_tokens) == ("", "", 40)


def test_tokens_are_unknown_without_usage(url: str) -> None:
    got = stream(url, fault="no usage")
    assert (got.error, got.completion_tokens, got.decode_tok_s, len(got.chunk_seconds)) == ("", None, None, 40)


def test_users_run_concurrently(url: str) -> None:
    request = StreamRequest(0, "/v1/chat/completions", {"schedule": {"tokens": 4, "together": 16}})
    samples = client.stream_all(Endpoint.parse(url), [[request]] * 16, stall_seconds=60).samples
    assert {(sample.user, sample.error) for sample in samples} == {(user, "") for user in range(16)}


def test_chunk_times_are_of_arrival_not_of_the_read(url: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    watched = StreamRequest(0, "/v1/chat/completions", {"schedule": {"interval": 0.1, "tokens": 21, "log": str(log)}})

    def busy() -> Iterator[StreamRequest]:
        for _ in range(20):
            time.sleep(0.08)  # blocks the event loop: nothing is read
            yield StreamRequest(1, "/v1/chat/completions", {"schedule": {"interval": 0.005, "tokens": 2}})

    result = client.stream_all(Endpoint.parse(url), [[watched], busy()])
    assert result.lag_seconds > 0.05
    while not log.exists() or not log.read_text().endswith("\n"):  # the server writes it a second after the answer
        time.sleep(0.05)
    (sent,) = (json.loads(line)["sent"] for line in log.read_text().splitlines())
    # The clocks of client and server have an unknown offset, and either may be late for one chunk: the quartiles count.
    delays = [arrived - sent_at for arrived, sent_at in zip(result.samples[0].chunk_seconds, sent, strict=True)]
    first, _, third = statistics.quantiles(delays, n=4)
    assert third - first < 0.02, f"half of the delays are within 20 ms, a quarter of the time without a read: {sorted(delays)}"


def test_choose_model(url: str) -> None:
    assert choose_model(Endpoint.parse(url), None) == "schedule"
    assert choose_model(Endpoint.parse(url), None, "other") == "schedule"
    with pytest.raises(ServerFailed, match="does not offer 'other'"):
        choose_model(Endpoint.parse(url), "other")
    with pytest.raises(ServerFailed, match="other/v1/models"):
        choose_model(Endpoint.parse(f"{url}/other"), None)


# ---- the command


def sm120kit(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "sm120kit", *arguments], cwd=cwd, capture_output=True, text=True, timeout=300)


WORKLOAD = 'summary = "x"\nprompts = ["a", "b"]\nconcurrency = [1, 3]\noutput_tokens = [8]\nrequests_per_stream = 2\n'


def test_run_show_and_compare(url: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(WORKLOAD)
    for name in ("a.json", "b.json"):
        ran = sm120kit("bench", "run", url, "-w", "mine.toml", "--given", "gpu=none", "-o", name, "--json", cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr
    shown = json.loads(ran.stdout)
    assert shown["complete"]
    assert [(case["concurrency"], case["requests"], case["errors"]) for case in shown["cases"]] == [(1, 2, 0), (3, 6, 0)]
    assert all(case["acceptance"] is None for case in shown["cases"]), "the server has no counters"
    stored = json.loads((tmp_path / "a.json").read_text())
    assert [len(case["warmup"]) for case in stored["cases"]] == [case["concurrency"] for case in stored["cases"]]
    assert stored["environment"]["given"] == {"gpu": "none"}
    assert sm120kit("bench", "show", "a.json", cwd=tmp_path).stdout.startswith(f"schedule at {url}; mine, thinking")
    compared = sm120kit("bench", "compare", "a.json", "b.json", cwd=tmp_path)
    assert compared.returncode == 0, compared.stderr
    (tmp_path / "b.json").write_text((tmp_path / "b.json").read_text().replace('"gpu": "none"', '"gpu": "other"'))
    refused = sm120kit("bench", "compare", "a.json", "b.json", cwd=tmp_path)
    assert (refused.returncode, "given.gpu: none / other" in refused.stderr) == (80, True)


def test_live_view_is_on_terminals_only(url: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(WORKLOAD)
    command = ["bench", "run", url, "-w", "mine.toml", "--overwrite"]
    parent, child = pty.openpty()
    env = os.environ | {"TERM": "xterm", "COLUMNS": "80"}
    argv = [sys.executable, "-m", "sm120kit", *command]
    with subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.PIPE, stderr=child, env=env) as running:
        os.close(child)
        screen = b""
        try:
            while chunk := os.read(parent, 65536):
                screen += chunk
        except OSError:  # the other side is closed
            pass
        assert running.stdout and b"tok/s" in running.stdout.read()
    os.close(parent)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.decode())
    assert running.returncode == 0 and re.search(r"cases .* 1/2 0:\d\d:\d\d remaining", text), text
    assert re.search(r"concurrency (1|3), 8 tokens .* \d/\d", text) and "[2/2]" in text, text
    piped = sm120kit(*command, cwd=tmp_path)
    assert piped.returncode == 0 and "[2/2]" in piped.stderr
    assert "\x1b" not in piped.stderr + piped.stdout and "remaining" not in piped.stderr


def test_interrupted_run_keeps_its_cases(url: str, tmp_path: Path) -> None:
    (tmp_path / "slow.toml").write_text(
        'summary = "x"\nprompts = ["a"]\nconcurrency = [1]\noutput_tokens = [1, 2, 3, 4]\nrequests_per_stream = 400\n'
    )
    command = [sys.executable, "-m", "sm120kit", "bench", "run", url, "-w", "slow.toml"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as running:
        deadline = time.monotonic() + 120
        while not (tmp_path / "result.json").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        running.send_signal(signal.SIGINT)
        running.wait(timeout=120)
    partial = json.loads((tmp_path / "result.json").read_text())
    assert running.returncode == 130
    assert not partial["complete"]
    done = [case for case in partial["cases"] if case["complete"]]
    assert done and len(partial["cases"]) <= 4 and len(done[0]["samples"]) == 400
    assert not any(sample["error"] for case in partial["cases"] for sample in case["samples"]), (
        "an interrupt is not an error of a request"
    )
    assert "partial" in sm120kit("bench", "show", "result.json", cwd=tmp_path).stdout
    again = sm120kit("bench", "run", url, "-w", "slow.toml", cwd=tmp_path)
    assert (again.returncode, "result.json exists" in again.stderr) == (42, True), again.stderr
    assert json.loads((tmp_path / "result.json").read_text()) == partial
    assert sm120kit("bench", "run", url, "--quick", "--overwrite", cwd=tmp_path).returncode == 0
    assert len(json.loads((tmp_path / "result.json").read_text())["cases"]) == 1


def test_older_result_stays_until_the_new_one_is_complete(url: str, tmp_path: Path) -> None:
    (tmp_path / "slow.toml").write_text(
        'summary = "x"\nprompts = ["a"]\nconcurrency = [1]\noutput_tokens = [1, 2, 3, 4]\nrequests_per_stream = 400\n'
    )
    assert sm120kit("bench", "run", url, "--quick", cwd=tmp_path).returncode == 0
    older = (tmp_path / "result.json").read_bytes()
    command = [sys.executable, "-m", "sm120kit", "bench", "run", url, "-w", "slow.toml", "--overwrite"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as running:
        deadline = time.monotonic() + 120
        assert running.stderr
        while "[1/4]" not in running.stderr.readline() and time.monotonic() < deadline:
            pass
        running.send_signal(signal.SIGINT)
        running.wait(timeout=120)
    assert running.returncode == 130
    assert (tmp_path / "result.json").read_bytes() == older
    assert not json.loads((tmp_path / "result.partial.json").read_text())["complete"]
    assert sm120kit("bench", "run", url, "--quick", "--overwrite", cwd=tmp_path).returncode == 0
    assert (tmp_path / "result.json").read_bytes() != older
    assert not (tmp_path / "result.partial.json").exists()


@pytest.mark.parametrize("after", [0.001, 0.004, 0.01])
def test_interrupted_case_keeps_ended_requests(url: str, tmp_path: Path, after: float) -> None:
    """The signal arrives at any point, most likely while asyncio reads a connection, where an exception would be lost."""
    (tmp_path / "slow.toml").write_text(
        'summary = "x"\nprompts = ["a"]\nconcurrency = [4]\noutput_tokens = [9]\n'
        "requests_per_stream = 900\nwarmup_requests = 0\n"
    )
    saved: list[Result] = []
    ended = 0

    def request_ended() -> None:
        nonlocal ended
        ended += 1
        if ended == 50:
            threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT)).start()

    named = workload.load(str(tmp_path / "slow.toml"))
    measurement = Measurement(named, saved.append, case_begins=lambda case, requests: request_ended)
    with pytest.raises(KeyboardInterrupt):
        run(MeasuredServer(Endpoint.parse(url), "schedule"), measurement)
    (partial,) = saved
    (case,) = partial.cases
    assert (partial.complete, case.complete) == (False, False)
    assert 50 <= len(case.samples) == ended < 3600 and not any(sample.error for sample in case.samples)
    assert summary(case).tokens == 9 * ended
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_bad_input(url: str, tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        unreachable = f"http://127.0.0.1:{closed.getsockname()[1]}"
    for arguments, code, message in (
        ((unreachable,), 70, "does not answer"),
        (("nope",), 10, "no configuration 'nope'"),
        (("qwen3.5-27b-fp8-1x-rtx-pro-6000",), 2, "--model"),
        ((url, "--served-model-name", "other"), 70, "does not offer 'other'"),
        ((url, "-w", "quik"), 10, "did you mean 'quick'?"),
        ((url, "--header", "none"), 2, "a header is NAME:VALUE"),
        ((unreachable.removeprefix("http://"),), 70, "does not answer"),
        ((url, "-o", "none/r.json"), 42, "cannot write none/r.json"),
        ((url, "--given", "gpu"), 2, "is not NAME=VALUE"),
    ):
        ran = sm120kit("bench", "run", *arguments, cwd=tmp_path)
        assert ran.returncode == code, ran.stderr
        assert message in re.sub(r"[\s│]+", " ", ran.stderr), ran.stderr
    assert not any(tmp_path.iterdir())
