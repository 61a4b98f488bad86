"""``bench run`` from end to end with an independent server: Transformers, with a tiny random model on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from cpu_server import cpu_server

from sm120kit.bench import result_file
from sm120kit.bench.figures import summary as figures_of

pytest.importorskip("transformers", reason="the extra serve is not installed")
PROMPT = "Count from one to thirty in words."
WORKLOAD = f"""
summary = "x"
prompts = ["{PROMPT}"]
concurrency = [1, 3]
output_tokens = [64]
requests_per_stream = 2
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    with cpu_server(tmp_path_factory.mktemp("server")) as running:
        yield running


def sm120kit(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "sm120kit", *map(str, arguments)]
    return subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=120)


def events_without_client(url: str, model: str) -> list[dict[str, object]]:
    """The events of a streamed answer, read by urllib."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 64,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as response:
        lines = [line.decode() for line in response.read().split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines if "[DONE]" not in line]


def test_result_matches_the_events_of_the_server(server: tuple[str, str], tmp_path: Path) -> None:
    url, model = server
    (tmp_path / "mine.toml").write_text(WORKLOAD)
    ran = sm120kit("bench", "run", url, "--served-model-name", model, "-w", "mine.toml", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    result = result_file.read(tmp_path / "result.json")
    assert result.complete and result.environment.model == model and result.environment.reported["id"] == model
    events = events_without_client(url, model)
    text = [event for event in events for choice in event.get("choices") or () if choice["delta"].get("content")]  # type: ignore[attr-defined]
    (usage,) = (event["usage"] for event in events if event.get("usage"))
    for case in result.cases:
        assert len(case.samples) == 2 * case.concurrency
        for sample in case.samples:
            # The same tokens in both: 64 by the server's count, in fewer events with text.
            assert (sample.error, sample.completion_tokens) == ("", usage["completion_tokens"]) == ("", 64)  # type: ignore[index]
            assert sample.prompt_tokens == usage["prompt_tokens"]  # type: ignore[index]
            assert len(sample.chunk_seconds) == len(text) < 64
            assert sample.model == events[0]["model"]
            assert sample.decode_tok_s is not None and sample.decode_bounds is not None
            # Chunks that a busy machine reads with the first have no share in the rate.
            assert sample.decode_bounds[0] <= sample.decode_tok_s <= sample.decode_bounds[1]
            assert sample.ttft is not None and 0 < sample.ttft < sample.ended - sample.started
        figures = figures_of(case)
        assert (figures.tokens, figures.chunks, figures.errors) == (128 * case.concurrency, 2 * len(text) * case.concurrency, 0)
        assert figures.acceptance is None and figures.output_tok_s is not None
        span = max(s.ended for s in case.samples) - min(s.started for s in case.samples)
        assert figures.output_tok_s * span == pytest.approx(128 * case.concurrency)
    assert "total tok/s" in ran.stdout


def test_unknown_model_is_refused(server: tuple[str, str], tmp_path: Path) -> None:
    url, model = server
    ran = sm120kit("bench", "run", url, "--served-model-name", "tiny/other", cwd=tmp_path)
    assert (ran.returncode, model in ran.stderr) == (70, True), ran.stderr
    assert not (tmp_path / "result.json").exists()
