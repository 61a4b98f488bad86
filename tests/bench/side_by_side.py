"""One server with a known schedule, measured by this client and by llama-benchy, which the community uses.

``side_by_side.py [VENV]``: llama-benchy is installed into a virtual environment of its own, kept when it is named.
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

from sm120kit.bench.client import Ask, stream_all
from sm120kit.bench.receipt import Measured, summary
from sm120kit.workspace import write_atomic

SERVER = Path(__file__).parents[1] / "integration" / "schedule_server.py"
OTHER = "llama-benchy==0.4.0"
RUNS = 2


@dataclass(frozen=True)
class Case:
    """``users`` streams at once, each of ``rate`` tokens per second in chunks of ``per_chunk``, the first after ``first`` s."""

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
"""Words are tokens: all that llama-benchy needs to cut prompts to length."""
BOOK = "http://127.0.0.1/book"


def ours(url: str, case: Case, schedule: dict[str, str]) -> dict[str, float | None]:
    """Rates in tokens per second, time to the first token in seconds."""
    body = {"max_tokens": case.tokens, "schedule": schedule}
    seen = [stream_all(url, [[Ask(0, "/v1/chat/completions", body)]] * case.users) for _ in range(RUNS)]
    figures = [summary(Measured(case.users, case.tokens, 0, (), one.samples, one.lag_seconds, None)) for one in seen]
    return {
        "per user": _mean([one.decode_tok_s for one in figures]),
        "together": _mean([one.total_tok_s for one in figures]),
        "over wall time": _mean([one.output_tok_s for one in figures]),
        "TTFT": _mean([one.ttft for one in figures]),
    }


def theirs(python: Path, place: Path, url: str, case: Case, schedule: dict[str, str]) -> dict[str, float | None]:
    """The same of llama-benchy's own result file."""
    write_atomic(place / "tokenizer.json", json.dumps(TOKENIZER).encode())
    # What it would download once, put where it looks first: its hash of the address names the file.
    book = hashlib.md5(BOOK.encode(), usedforsecurity=False).hexdigest()
    write_atomic(place / ".cache" / "llama-benchy" / f"{book}.txt", b"word " * 5000)
    result = place / "result.json"
    result.unlink(missing_ok=True)
    words = ["--base-url", f"{url}/v1", "--model", "schedule", "--tokenizer", place / "tokenizer.json", "--book-url", BOOK]
    words += ["--pp", 16, "--tg", case.tokens, "--concurrency", case.users, "--runs", RUNS, "--latency-mode", "none"]
    words += ["--no-warmup", "--no-adapt-prompt", "--skip-coherence", "--save-result", result, "--format", "json"]
    words += ["--extra-body", f"schedule={json.dumps(schedule)}"] if schedule else []
    ran = subprocess.run(
        [python, "-m", "llama_benchy", *map(str, words)], env={"HOME": str(place)}, capture_output=True, text=True
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
        place = Path(temporary)
        venv = Path(sys.argv[1]) if len(sys.argv) > 1 else place / "venv"
        if not (venv / "bin" / "python").exists():
            subprocess.run([sys.executable, "-m", "venv", venv], check=True)
            subprocess.run([venv / "bin" / "pip", "install", "-q", OTHER], check=True)
        print("| users x tok/s | tokens, a chunk | | per user | together | over wall time | peak | TTFT ms |")
        print("|---|---|---|---|---|---|---|---|")
        for case in CASES:
            show(case, venv / "bin" / "python", place)


def show(case: Case, python: Path, place: Path) -> None:
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
            found = (
                ("true" + (f", {case.fault}" if case.fault else ""), true),
                ("sm120kit", ours(url, case, schedule)),
                (OTHER, theirs(python, place, url, case, schedule)),
            )
        finally:
            server.kill()
    for name, figures in found:
        rates = [_text(figures.get(key)) for key in ("per user", "together", "over wall time", "peak")]
        ttft = figures.get("TTFT")
        cells = [f"{case.users} x {case.rate:g}", f"{case.tokens}, {case.per_chunk}", name, *rates]
        print("|", " | ".join([*cells, _text(None if ttft is None else ttft * 1000)]), "|", flush=True)


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


if __name__ == "__main__":
    main()
