"""Measure a server with a known schedule by this client and by llama-benchy, which the community uses.

Usage: ``side_by_side.py [VENV]``. llama-benchy is installed into VENV, or into a temporary virtual environment.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from sm120kit.bench.client import StreamRequest, stream_all
from sm120kit.bench.receipt import MeasuredCell, summary
from sm120kit.core.state import write_atomic
from sm120kit.core.urls import Endpoint

SERVER = Path(__file__).parents[1] / "support" / "schedule_server.py"
OTHER = "llama-benchy==0.4.0"
RUNS = 2


@dataclass(frozen=True)
class Case:
    """``users`` concurrent streams of ``rate`` tokens per second in chunks of ``per_chunk``, the first after ``first`` s."""

    users: int
    rate: float
    tokens: int
    per_chunk: int = 1
    first: float = 0.3
    fault: str = ""


CASES = (
    Case(1, 10, 40),
    Case(1, 200, 800),
    Case(1, 200, 800, per_chunk=4),
    Case(1, 200, 64, per_chunk=16),
    Case(4, 50, 200),
    Case(16, 500, 2000),
    Case(16, 1000, 4000),
    Case(1, 200, 400, fault="disconnect"),
    Case(1, 200, 400, fault="no usage"),
)
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "WhitespaceSplit"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "word": 1}, "unk_token": "[UNK]"},
}
"""Words are tokens, which is enough for llama-benchy to cut prompts to length."""
BOOK = "http://127.0.0.1/book"


def ours(url: str, case: Case, schedule: dict[str, str]) -> dict[str, float | None]:
    """Rates in tokens per second, time to the first token in seconds."""
    body = {"max_tokens": case.tokens, "schedule": schedule}
    results = [
        stream_all(Endpoint.parse(url), [[StreamRequest(0, "/v1/chat/completions", body)]] * case.users) for _ in range(RUNS)
    ]
    figures = [
        summary(MeasuredCell(case.users, case.tokens, 0, (), result.samples, result.lag_seconds, None)) for result in results
    ]
    return {
        "per user": _mean([cell.decode_tok_s for cell in figures]),
        "together": _mean([cell.total_tok_s for cell in figures]),
        "over wall time": _mean([cell.output_tok_s for cell in figures]),
        "TTFT": _mean([cell.ttft for cell in figures]),
    }


def theirs(python: Path, directory: Path, url: str, case: Case, schedule: dict[str, str]) -> dict[str, float | None]:
    """The same figures from llama-benchy's result file."""
    write_atomic(directory / "tokenizer.json", json.dumps(TOKENIZER).encode())
    # A file in its download cache, named by the hash of the address, instead of a download.
    book = hashlib.md5(BOOK.encode(), usedforsecurity=False).hexdigest()
    write_atomic(directory / ".cache" / "llama-benchy" / f"{book}.txt", b"word " * 5000)
    result = directory / "result.json"
    result.unlink(missing_ok=True)
    arguments = [
        "--base-url",
        f"{url}/v1",
        "--model",
        "schedule",
        "--tokenizer",
        directory / "tokenizer.json",
        "--book-url",
        BOOK,
    ]
    arguments += ["--pp", 16, "--tg", case.tokens, "--concurrency", case.users, "--runs", RUNS, "--latency-mode", "none"]
    arguments += ["--no-warmup", "--no-adapt-prompt", "--skip-coherence", "--save-result", result, "--format", "json"]
    arguments += ["--extra-body", f"schedule={json.dumps(schedule)}"] if schedule else []
    ran = subprocess.run(
        [python, "-m", "llama_benchy", *map(str, arguments)], env={"HOME": str(directory)}, capture_output=True, text=True
    )
    if ran.returncode or not result.is_file():
        print(f"llama-benchy: exit code {ran.returncode}: {(ran.stderr or ran.stdout).strip()[-300:]}")
        return {}
    runs: list[dict[str, Any]] = json.loads(result.read_text())["benchmarks"]
    if not runs:
        return {}
    (run,) = runs
    seconds = _of(run, "e2e_ttft")
    return {
        "per user": _of(run, "tg_req_throughput"),
        "together": _of(run, "tg_throughput"),
        "peak": _of(run, "peak_throughput"),
        "TTFT": None if seconds is None else seconds / 1000,
    }


def _of(run: dict[str, Any], name: str) -> float | None:
    return run[name] and float(run[name]["mean"])


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="sm120kit-") as temporary:
        directory = Path(temporary)
        venv = Path(sys.argv[1]) if len(sys.argv) > 1 else directory / "venv"
        if not (venv / "bin" / "python").exists():
            subprocess.run([sys.executable, "-m", "venv", venv], check=True)
            subprocess.run([venv / "bin" / "pip", "install", "-q", OTHER], check=True)
        print("| users x tok/s | tokens, a chunk | | per user | together | over wall time | peak | TTFT ms |")
        print("|---|---|---|---|---|---|---|---|")
        for case in CASES:
            show(case, venv / "bin" / "python", directory)


def show(case: Case, python: Path, directory: Path) -> None:
    interval = case.per_chunk / case.rate
    argv = [sys.executable, SERVER, "0", interval, case.first, case.per_chunk]
    with subprocess.Popen(list(map(str, argv)), stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        try:
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            schedule = {"fault": case.fault} if case.fault else {}
            wall = case.first + interval * ((case.tokens - 1) // case.per_chunk)
            total = case.users * case.rate
            true = {
                "per user": case.rate,
                "together": total,
                "over wall time": case.users * case.tokens / wall,
                "TTFT": case.first,
            }
            measured = (
                ("true" + (f", {case.fault}" if case.fault else ""), true),
                ("sm120kit", ours(url, case, schedule)),
                (OTHER, theirs(python, directory, url, case, schedule)),
            )
        finally:
            server.kill()
    for name, figures in measured:
        rates = [_text(figures.get(key)) for key in ("per user", "together", "over wall time", "peak")]
        ttft = figures.get("TTFT")
        cells = [f"{case.users} x {case.rate:g}", f"{case.tokens}, {case.per_chunk}", name, *rates]
        print("|", " | ".join([*cells, _text(None if ttft is None else ttft * 1000)]), "|", flush=True)


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


if __name__ == "__main__":
    main()
