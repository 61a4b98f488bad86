"""Measure a server with a known schedule by this client and by four tools of the community.

Usage: ``side_by_side.py VENVS``, a folder with the virtual environments ``llama-benchy``, ``vllm``, ``guidellm`` and
``aiperf``, each with the tool of that name. One that is missing is left out. vLLM's client runs without a GPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm120kit.bench.client import StreamRequest, counted, stream_all
from sm120kit.bench.receipt import MeasuredCell, summary
from sm120kit.core.urls import Endpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from model_hub import model_hub
from schedule_server import schedule_server

Figures = dict[str, float | None]
"""Rates in tokens per second, ``ttft`` in milliseconds."""


@dataclass(frozen=True)
class Case:
    """``users`` streams of ``rate`` tokens per second at once: the first token alone after ``first`` s, then ``per_chunk``."""

    users: int
    requests: int
    rate: float
    tokens: int
    per_chunk: int = 1
    first: float = 0.3

    @property
    def interval(self) -> float:
        return self.per_chunk / self.rate

    def true(self) -> Figures:
        chunks = -(-(self.tokens - 1) // self.per_chunk)
        seconds = self.first + chunks * self.interval
        per_user = (self.tokens - 1) / (chunks * self.interval)
        total = self.users * self.tokens / seconds
        return {"per user": per_user, "together": self.users * per_user, "over wall time": total, "ttft": self.first * 1000}


CASES = (
    Case(1, 3, 200, 65, per_chunk=4),
    Case(4, 3, 100, 201, first=2.0),
    Case(16, 2, 500, 1001),
    Case(1, 3, 200, 65, per_chunk=16),
)
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "WhitespaceSplit"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "word": 1, "tok": 2}, "unk_token": "[UNK]"},
}
"""Words are tokens, as in the server's answers."""
TOKENIZER_REPOSITORY = "sm120kit/words"
BOOK = "http://127.0.0.1/book"


def sm120kit(venv: Path, directory: Path, url: str, case: Case) -> Figures:
    request = counted(StreamRequest(0, "/v1/chat/completions", {"max_tokens": case.tokens}))
    result = stream_all(Endpoint.parse(url), [[request] * case.requests] * case.users)
    cell = summary(MeasuredCell(case.users, case.tokens, 0, (), result.samples, result.lag_seconds, None))
    return {
        "per user": cell.decode_tok_s,
        "together": cell.total_tok_s,
        "over wall time": cell.output_tok_s,
        "ttft": None if cell.ttft is None else cell.ttft * 1000,
    }


def llama_benchy(venv: Path, directory: Path, url: str, case: Case) -> Figures:
    # A file in its download cache, named by the hash of the address, instead of a download.
    book = hashlib.md5(BOOK.encode(), usedforsecurity=False).hexdigest()
    cache = directory / ".cache" / "llama-benchy"
    cache.mkdir(parents=True, exist_ok=True)
    (cache / f"{book}.txt").write_text("word " * 5000)
    result = directory / "llama-benchy.json"
    _run(directory, venv / "bin" / "llama-benchy", "--base-url", f"{url}/v1", "--model", "schedule", "--tokenizer", directory,
         "--book-url", BOOK, "--pp", 16, "--tg", case.tokens, "--concurrency", case.users, "--runs", case.requests,
         "--latency-mode", "none", "--no-warmup", "--no-adapt-prompt", "--skip-coherence", "--save-result", result,
         "--format", "json")  # fmt: skip
    (run,) = json.loads(result.read_text())["benchmarks"]
    figures = {"per user": "tg_req_throughput", "together": "tg_throughput", "ttft": "e2e_ttft"}
    return {figure: run[name] and float(run[name]["mean"]) for figure, name in figures.items()}


def vllm(venv: Path, directory: Path, url: str, case: Case) -> Figures:
    prompts = directory / "prompts.jsonl"
    prompts.write_text((json.dumps({"prompt": "word " * 16}) + "\n") * case.users * case.requests)
    _run(directory, venv / "bin" / "vllm", "bench", "serve", "--backend", "openai-chat", "--endpoint", "/v1/chat/completions",
         "--base-url", url, "--model", "schedule", "--tokenizer", directory, "--dataset-name", "custom",
         "--dataset-path", prompts, "--custom-output-len", case.tokens, "--skip-chat-template",
         "--num-prompts", case.users * case.requests, "--max-concurrency", case.users,
         "--ready-check-timeout-sec", 0, "--save-result", "--result-dir", directory, "--result-filename", "vllm.json",
         "--disable-tqdm")  # fmt: skip
    result = json.loads((directory / "vllm.json").read_text())
    return {
        "per user": 1000 / result["mean_tpot_ms"],
        "over wall time": result["output_throughput"],
        "ttft": result["mean_ttft_ms"],
        "1 / ITL": 1000 / result["mean_itl_ms"],
    }


def guidellm(venv: Path, directory: Path, url: str, case: Case) -> Figures:
    result = directory / "guidellm.json"
    backend = f"kind=openai_http,target={url},model=schedule,request_format=/v1/chat/completions,validate_backend=false"
    _run(directory, venv / "bin" / "guidellm", "run", "--backend", backend,
         "--profile", f"kind=concurrent,streams={case.users}", "--constraint",
         f"kind=max_requests,count={case.users * case.requests}", "--data",
         f"kind=synthetic_text,prompt_tokens=16,output_tokens={case.tokens}", "--tokenizer", f"kind=hf_auto,model={directory}",
         "--output", f"kind=json,path={result}", "--disable-console")  # fmt: skip
    metrics = json.loads(result.read_text())["benchmarks"][0]["metrics"]
    itl, total, ttft = (
        float(metrics[name]["successful"]["mean"])
        for name in ("inter_token_latency_ms", "output_tokens_per_second", "time_to_first_token_ms")
    )
    return {"per user": 1000 / itl, "over wall time": total, "ttft": ttft}


def aiperf(venv: Path, directory: Path, url: str, case: Case) -> Figures:
    # It downloads its tokenizer, also a local one, from a model hub.
    hub_files = directory / "hub"
    hub_files.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (hub_files / name).write_bytes((directory / name).read_bytes())
    (hub_files / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    prompts = directory / "aiperf.jsonl"
    prompts.write_text((json.dumps({"text": "word " * 16}) + "\n") * case.users * case.requests)
    with model_hub(TOKENIZER_REPOSITORY, hub_files) as hub:
        _run(directory, venv / "bin" / "aiperf", "profile", "-m", "schedule", "-u", url, "--endpoint-type", "chat",
             "--streaming", "--concurrency", case.users, "--request-count", case.users * case.requests, "--tokenizer",
             TOKENIZER_REPOSITORY, "--input-file", prompts, "--custom-dataset-type", "single_turn", "--extra-inputs",
             f"max_tokens:{case.tokens}", "--use-server-token-count", "--artifact-dir", directory / "aiperf", "--ui", "none",
             HF_ENDPOINT=hub.url)  # fmt: skip
    (path,) = (directory / "aiperf").rglob("profile_export_aiperf.json")
    result: dict[str, Any] = json.loads(path.read_text())
    path.unlink()
    return {
        "per user": result["output_token_throughput_per_user"]["avg"],
        "over wall time": result["output_token_throughput"]["avg"],
        "ttft": result["time_to_first_token"]["avg"],
    }


TOOLS: tuple[Callable[[Path, Path, str, Case], Figures], ...] = (sm120kit, llama_benchy, vllm, guidellm, aiperf)


def _run(directory: Path, *argv: object, **variables: str) -> None:
    hub = variables or {"HF_HUB_OFFLINE": "1"}
    environment = {"HOME": str(directory), "PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "", **hub}
    subprocess.run(
        list(map(str, argv)), cwd=directory, env=environment, capture_output=True, text=True, check=True, timeout=150
    )


def main(venvs: Path) -> None:
    columns = ("per user", "together", "over wall time", "ttft", "1 / ITL")
    print("| users x requests x tok/s, tokens, in a chunk, TTFT | tool |", " | ".join(columns), "| took |")
    print("|---" * (len(columns) + 3) + "|")
    with tempfile.TemporaryDirectory(prefix="sm120kit-") as temporary:
        directory = Path(temporary)
        (directory / "tokenizer.json").write_text(json.dumps(TOKENIZER))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "eos_token": "[UNK]"}
        template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
        for case in CASES:
            name = f"{case.users} x {case.requests} x {case.rate:g}, {case.tokens}, {case.per_chunk}, {case.first:g} s"
            rows: dict[str, Figures] = {"true": case.true()}
            with schedule_server(case.interval, case.first, case.per_chunk, 1, OWNER="vllm") as url:
                for tool in TOOLS:
                    label = tool.__name__.replace("_", "-")
                    if tool is not sm120kit and not (venvs / label).is_dir():
                        continue
                    began = time.perf_counter()
                    try:
                        rows[label] = tool(venvs / label, directory, url, case)
                    except (subprocess.SubprocessError, OSError, KeyError, ValueError) as error:
                        print(f"{label}: {error} {str(getattr(error, 'stdout', ''))[-500:]}", file=sys.stderr)
                        rows[label] = {}
                    rows[label]["took"] = time.perf_counter() - began
            for label, figures in rows.items():
                values = [figures.get(column) for column in (*columns, "took")]
                print(
                    "|",
                    " | ".join([name, label, *("" if value is None else f"{value:.1f}" for value in values)]),
                    "|",
                    flush=True,
                )


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
