"""Formats of result files of other benchmarks: figures of each cell, as the file has them.

Each function reads one format. Sources: the files of voipmonitor's ``benchmark_sglang.py`` and ``llm_decode_bench.py`` and of
the K=64 benchmarks (brandonmmusic-max/sm120-moe-bench, results/); llama-benchy 0.4.0 (``results.py``, BenchmarkReport),
guidellm 0.8.1 (``benchmark/schemas/report.py``, GenerativeBenchmarksReport), aiperf 0.13.0 (``common/models/export_models.py``,
JsonExportData), ``vllm bench serve`` of 0.33.0 (``vllm/benchmarks/serve.py``) and ``sglang.bench_serving`` of 0.5.23
(``sglang/benchmark/serving.py``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

Content = Any
"""A parsed JSON file."""


@dataclass(frozen=True, config=ConfigDict(allow_inf_nan=False))
class Figure:
    """A published cell: ``tok_s`` of all users together, or of prefill. None is unknown.

    ``refused`` is the reason why it is not a measurement, "" if it is one; ``notes`` are caveats of a measurement.
    """

    file: str
    model: str
    what: str
    users: Annotated[int, Field(ge=1)] | None
    context_tokens: int
    tok_s: float
    spread: float | None = None
    tokens: int | None = None
    seconds: float | None = None
    acceptance: float | None = None
    refused: str = ""
    notes: tuple[str, ...] = ()


def reader(content: Content) -> Callable[[str, Content], Iterator[Figure]] | None:
    """The function that reads a file's name and content, None for an unknown format."""
    if isinstance(content, dict):
        for keys, read in OBJECTS:
            if keys <= content.keys():
                return read
    if isinstance(content, list) and content and all(isinstance(row, dict) for row in content):
        for keys, read in LISTS:
            if all(keys <= row.keys() for row in content):
                return read
    return None


def _sweep(file: str, content: Content) -> Iterator[Figure]:
    model = str(content["metadata"]["model"])
    notes = ("the model is a label; the tool did not query the server",)
    for row in content["results"]:
        failed = f"all {row['num_errors']} requests failed" if row.get("num_errors") and not row.get("num_completed") else ""
        if (running := row.get("avg_running_reqs") or 0) > 1.1 * row["concurrency"]:
            failed = f"{running:g} requests ran on average for {row['concurrency']} users: another client used the server"
        reason = row.get("failure_reason")  # such as a loop of repeated text; the rate is a negative number then
        yield Figure(
            file,
            model,
            "decode",
            int(row["concurrency"]),
            int(row["context_tokens"]),
            float(row["aggregate_tps"] if "aggregate_tps" in row else row["aggregate_tps_mean"]),
            row.get("aggregate_tps_stdev"),
            row.get("total_tokens"),
            row.get("wall_time"),
            _share(row.get("server_spec_accept_rate", row.get("spec_accept_rate_mean"))),
            f"the cell failed: {reason}" if reason else failed,
            notes,
        )
    for context, row in (content.get("prefill") or {}).items():
        yield Figure(
            file, model, "prefill", 1, int(context), float(row["tok_per_sec"]), seconds=row["ttft_seconds"], notes=notes
        )


def _share(value: float | None) -> float | None:
    """A share; 0.0 is unknown in these files, and a value above 1 is a counter of vLLM under the name of a share."""
    return value if value and value <= 1 else None


def _matrix(file: str, content: Content) -> Iterator[Figure]:
    for row in content:
        tokens, seconds = int(row["total_tokens"]), float(row["time"])
        what = f"{row['output_len']} tokens requested"
        yield Figure(file, "", what, row["users"], 0, float(row["system_tps"]), tokens=tokens, seconds=seconds)


def _totals(file: str, content: Content) -> Iterator[Figure]:
    notes = ("the file has no token counts: whether answers were long enough is unknown",)
    for row in content:
        what = str(row.get("label", "decode"))
        yield Figure(file, "", what, row["users"], 0, float(row["system_tps"]), notes=notes)


def _labels(file: str, content: Content) -> Iterator[Figure]:
    for row in content:
        users, context = re.match(r"(\d+) user", row["label"]), re.search(r"(\d+)K ctx", row["label"])
        yield Figure(
            file,
            "",
            row["label"],
            int(users[1]) if users else 1,
            int(context[1]) * 1024 if context else 0,
            float(row["tok_s"]),
            tokens=int(row["comp_tokens"]),
            seconds=float(row["time"]),
            notes=("completion tokens over wall time, including prefill and thinking",),
        )


def _single_requests(file: str, content: Content) -> Iterator[Figure]:
    refused = "one request: how many ran at once is not in the file"
    for row in content:
        tokens, seconds = int(row["tokens"]), float(row["time"])
        reason = str(row.get("error") or refused)
        what = str(row["prompt_key"])
        yield Figure(file, "", what, None, 0, float(row["tps"]), tokens=tokens, seconds=seconds, refused=reason)


def _llama_benchy(file: str, content: Content) -> Iterator[Figure]:
    model = str(content["model"])
    for run in content["benchmarks"]:
        users, length = int(run["concurrency"]), int(run["response_size"])
        context = int(run["context_size"]) + int(run["prompt_size"])
        cached = bool(content["prefix_caching_enabled"]) and int(run["context_size"]) > 0
        if decode := run.get("tg_throughput"):
            notes = (f"llama-benchy counts events of streams as tokens; answers of {length:,} tokens",)
            yield Figure(file, model, "decode", users, context, float(decode["mean"]), float(decode["std"]), notes=notes)
        if prefill := run.get("pp_throughput"):
            refused = "prefill after a cached prefix" if cached and not run["is_context_prefill_phase"] else ""
            figures = float(prefill["mean"]), float(prefill["std"])
            yield Figure(file, model, "prefill", users, context, *figures, refused=refused)


def _guidellm(file: str, content: Content) -> Iterator[Figure]:
    for benchmark in content["benchmarks"]:
        config, metrics = benchmark["config"], benchmark["metrics"]
        strategy, totals = config["strategy"], metrics["request_totals"]
        users = {"synchronous": 1, "concurrent": strategy.get("streams")}.get(strategy["type_"])
        notes = [f"guidellm, strategy {strategy['type_']}"]
        if users is None:
            users = max(1, round(_mean(metrics["request_concurrency"]) or 1))
            notes.append("users are the mean number of concurrent requests")
        refused = "" if totals["successful"] else f"no request was successful, {totals['errored']} failed"
        if totals["errored"]:
            notes.append(f"{totals['errored']} of {totals['total']} requests failed")
        model, context = str(config["backend"].get("model") or ""), round(_mean(metrics["prompt_token_count"]) or 0)
        total, gap = _mean(metrics["output_tokens_per_second"]), _mean(metrics["inter_token_latency_ms"])
        cell = partial(Figure, file, model, refused=refused, notes=tuple(notes))
        if gap:
            yield cell("decode", users, context, users * 1000 / gap)
        yield cell("output, prefill included", users, context, total or 0.0)


def _mean(distribution: dict[str, Any] | None) -> float | None:
    """The mean over successful requests of a StatusDistributionSummary."""
    successful = (distribution or {}).get("successful")
    return None if successful is None else float(successful["mean"])


def _aiperf(file: str, content: Content) -> Iterator[Figure]:
    config = content.get("input_config") or {}
    phases = [phase for phase in config.get("phases") or [] if phase.get("name") != "warmup"]
    notes, users = [f"aiperf {content.get('aiperf_version', 'of unknown version')}"], None
    if phases and phases[-1].get("concurrency"):
        users = int(phases[-1]["concurrency"])
    elif "request_throughput" in content and "request_latency" in content:  # Little's law
        users = max(1, round(content["request_throughput"]["avg"] * content["request_latency"]["avg"] / 1000))
        notes.append("users are the mean number of concurrent requests")
    models = (config.get("models") or {}).get("items") or [{}]
    model = str(models[0].get("name", ""))
    failed = int((content.get("error_request_count") or {}).get("avg") or 0)
    refused = ""
    if content.get("was_cancelled"):
        refused = "the run was cancelled"
    elif content.get("is_complete") is False:
        refused = f"the run is not complete: {content.get('incomplete_reason') or 'no reason given'}"
    if failed:
        notes.append(f"{failed} requests failed")
    context = round((content.get("input_sequence_length") or {}).get("avg") or 0)
    cell = partial(Figure, file, model, refused=refused, notes=tuple(notes))
    per_user = content.get("output_token_throughput_per_user")
    if per_user and users:
        yield cell("decode", users, context, users * float(per_user["avg"]))
    total = float(content["output_token_throughput"]["avg"])
    yield cell("output, prefill included", users, context, total)


def _serving(file: str, content: Content) -> Iterator[Figure]:
    """``vllm bench serve`` and ``sglang.bench_serving``: the same keys but for the number of users without a limit."""
    completed, requests = int(content["completed"]), int(content.get("num_prompts") or content["completed"])
    limit, at_once = content.get("max_concurrency"), content.get("concurrency")
    users = min(int(limit), requests) if limit else max(1, round(float(at_once))) if at_once else None
    notes = [] if limit else ["users are the mean number of concurrent requests"]
    if content.get("failed"):
        notes.append(f"{content['failed']} of {requests} requests failed")
    refused = "" if users else "how many requests ran at once is not in the file"
    if not completed:
        refused = "no request was successful"
    tokens, seconds = int(content["total_output_tokens"]), float(content["duration"])
    context = round(int(content["total_input_tokens"]) / max(1, completed))
    cell = partial(Figure, file, str(content.get("model_id") or ""), tokens=tokens, seconds=seconds, refused=refused)
    if content["mean_tpot_ms"] and users:
        yield cell("decode", users, context, users * 1000 / float(content["mean_tpot_ms"]), notes=tuple(notes))
    yield cell("output, prefill included", users, context, float(content["output_throughput"]), notes=tuple(notes))


OBJECTS: tuple[tuple[set[str], Callable[[str, Content], Iterator[Figure]]], ...] = (
    ({"metadata", "results"}, _sweep),
    ({"latency_mode", "benchmarks"}, _llama_benchy),
    ({"metadata", "config", "benchmarks"}, _guidellm),
    ({"output_token_throughput", "input_config"}, _aiperf),
    ({"output_throughput", "mean_tpot_ms", "completed"}, _serving),
)
"""Keys of a file -> its reader. More specific sets precede others."""

LISTS: tuple[tuple[set[str], Callable[[str, Content], Iterator[Figure]]], ...] = (
    ({"users", "system_tps", "output_len"}, _matrix),
    ({"users", "system_tps"}, _totals),
    ({"label", "tok_s"}, _labels),
    ({"prompt_key", "tps"}, _single_requests),
)
"""Keys of every row of a list -> its reader."""

KNOWN = (
    "llm_decode_bench and benchmark_sglang (metadata, results), lists of system_tps or tok_s, "
    "JSON of llama-benchy, guidellm, aiperf, vllm bench serve and sglang.bench_serving"
)
