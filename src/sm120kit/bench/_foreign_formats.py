"""Formats of result files of other benchmarks: figures of each case, as the file has them.

Each function reads one format. Sources: the files of voipmonitor's ``benchmark_sglang.py`` (its text is in
Visual-Synthesizer/rtx6kpro, benchmarks/inference-throughput/) and ``llm_decode_bench.py``; llama-benchy 0.4.0 (``results.py``,
BenchmarkReport; the names of tests in its CSV), ``vllm bench serve`` of 0.33.0 (``vllm/benchmarks/serve.py``) and
``sglang.bench_serving`` of 0.5.23 (``sglang/benchmark/serving.py``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from sm120kit.core.outside import integer, number

Content = Any
"""A parsed JSON file."""

OUTPUT = "output, prefill included"
"""The quantity of a rate whose time has the prefill in it."""

LABEL = "the model is a label; the tool did not query the server"
UNKNOWN_USERS = "how many requests ran in parallel is unknown: the run has neither a limit nor mean latencies (mean_ttft_ms)"


@dataclass(frozen=True, config=ConfigDict(allow_inf_nan=False))
class Figure:
    """A published case: ``tok_s`` of all requests in parallel together, or of prefill. None is unknown.

    ``refused`` is the reason why it is not a measurement, "" if it is one; ``notes`` are caveats of a measurement.
    """

    file: str
    model: str
    what: str
    concurrency: Annotated[int, Field(ge=1)] | None
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
    if isinstance(content, list) and content and all(isinstance(row, dict) and row.keys() >= CSV_KEYS for row in content):
        return _llama_benchy_csv
    return None


def _real(value: str | float) -> float:
    """A number of JSON, or the text of one in CSV."""
    return number(value.strip()) if isinstance(value, str) else float(value)


def _whole(value: str | float) -> int:
    """An integer of JSON, or the text of one in CSV."""
    return integer(value.strip()) if isinstance(value, str) else int(value)


def _sweep(file: str, content: Content) -> Iterator[Figure]:
    model = str(content["metadata"]["model"])
    for row in content["results"]:
        yield _sweep_case(file, model, row)
    for context, row in (content.get("prefill") or {}).items():
        tokens = _whole(row.get("prompt_tokens") or context)
        yield Figure(file, model, "prefill", 1, tokens, _real(row["tok_per_sec"]), seconds=row["ttft_seconds"], notes=(LABEL,))


def _sweep_case(file: str, model: str, row: Content) -> Figure:
    """A case; only a window that begins when all requests decode (``measurement_seconds``) has no prefill in it."""
    tok_s = _real(row["aggregate_tps"] if "aggregate_tps" in row else row["aggregate_tps_mean"])
    tokens, seconds = row.get("total_tokens"), row.get("measurement_seconds") or row.get("wall_time")
    if tokens and seconds and tok_s * seconds > 1.5 * tokens:
        tokens = None  # requests that were stopped count as events
    context = _whole(row["context_tokens"])
    return Figure(
        file,
        model,
        "decode" if row.get("measurement_seconds") else OUTPUT,
        _whole(row["concurrency"]),
        round(row.get("input_seq_len_avg") or context) if context else 0,
        tok_s,
        row.get("aggregate_tps_stdev"),
        tokens,
        seconds,
        _share(row.get("server_spec_accept_rate", row.get("spec_accept_rate_mean"))),
        _failure(row),
        (LABEL,),
    )


def _failure(row: Content) -> str:
    """The reason why a case of a sweep is not of the concurrency that it names, "" if there is none."""
    concurrency, most = row["concurrency"], row.get("max_running_reqs") or 0
    if reason := row.get("failure_reason"):  # such as a loop of repeated text; the rate is a negative number then
        return f"the case failed: {reason}"
    if row.get("num_errors") and not row.get("num_completed"):
        return f"all {row['num_errors']} requests failed"
    if (running := row.get("avg_running_reqs") or 0) > 1.1 * concurrency:
        return f"{running:g} requests ran on average at concurrency {concurrency}: another client used the server"
    if 0 < most < concurrency:
        return f"at most {most} requests ran at concurrency {concurrency}"
    return ""


def _share(value: float | None) -> float | None:
    """A share; 0.0 is unknown in these files, and a value above 1 is a counter of vLLM under the name of a share."""
    return value if value and value <= 1 else None


def _llama_benchy(file: str, content: Content) -> Iterator[Figure]:
    model = str(content["model"])
    for run in content["benchmarks"]:
        concurrency, length = _whole(run["concurrency"]), _whole(run["response_size"])
        context = _whole(run["context_size"]) + _whole(run["prompt_size"])
        cached = bool(content["prefix_caching_enabled"]) and _whole(run["context_size"]) > 0
        if decode := run.get("tg_throughput"):
            notes = (f"llama-benchy counts events of streams as tokens; answers of {length:,} tokens",)
            yield Figure(file, model, "decode", concurrency, context, _real(decode["mean"]), _real(decode["std"]), notes=notes)
        if prefill := run.get("pp_throughput"):
            refused = "prefill after a cached prefix" if cached and not run["is_context_prefill_phase"] else ""
            figures = _real(prefill["mean"]), _real(prefill["std"])
            yield Figure(file, model, "prefill", concurrency, context, *figures, refused=refused)


CSV_KEYS = {"model", "test_name", "t_s_mean", "t_s_std"}
_TEST = re.compile(r"(ctx_)?(pp|tg)([0-9]{0,9})(?: @ d([0-9]{1,9}))?(?: \(c([0-9]{1,6})\))?")
"""The name of a test in llama-benchy's CSV, such as ``tg128 @ d4096 (c2)``: prompt or answer, context depth, concurrency."""


def _llama_benchy_csv(file: str, content: Content) -> Iterator[Figure]:
    tests = [_TEST.fullmatch(row["test_name"]) for row in content]
    prompts = {test[3] for test in tests if test and not test[1] and test[2] == "pp"}
    for row, test in zip(content, tests, strict=True):
        if test is None:
            raise ValueError(f"test_name {row['test_name']!r} is none of llama-benchy")
        depth, concurrency, prefill = _whole(test[4] or 0), _whole(test[5] or 1), test[2] == "pp"
        size = 0 if test[1] else _whole(test[3]) if prefill else _whole(next(iter(prompts))) if len(prompts) == 1 else None
        refused = "the length of its prompt is not in the file" if size is None else ""
        if depth and not test[1] and prefill:
            refused = "whether the context before its prompt was cached is not in the file"
        notes = () if prefill else (f"llama-benchy counts events of streams as tokens; answers of {test[3] or '?'} tokens",)
        figures = _real(row["t_s_mean"]), _real(row["t_s_std"] or 0)
        what = "prefill" if prefill else "decode"
        yield Figure(file, row["model"], what, concurrency, depth + (size or 0), *figures, refused=refused, notes=notes)


def _serving(file: str, content: Content) -> Iterator[Figure]:
    """``vllm bench serve`` and ``sglang.bench_serving``: the same keys but for the concurrency without a limit."""
    completed, requests = _whole(content["completed"]), _whole(content.get("num_prompts") or content["completed"])
    limit, (mean, notes) = content.get("max_concurrency"), _mean_in_parallel(content, completed)
    if limit and (mean is None or not _has_rate(content)):
        mean, notes = float(min(_whole(limit), requests)), []
    concurrency = max(1, round(mean)) if mean else None
    if content.get("failed"):
        notes.append(f"{content['failed']} of {requests} requests failed")
    refused = "" if concurrency else UNKNOWN_USERS
    if not completed:
        refused = "no request was successful"
    tokens, seconds = _whole(content["total_output_tokens"]), _real(content["duration"])
    context = round(_whole(content["total_input_tokens"]) / max(1, completed))
    case = partial(Figure, file, str(content.get("model_id") or ""), tokens=tokens, seconds=seconds, refused=refused)
    if content["mean_tpot_ms"] and mean:
        yield case("decode", concurrency, context, mean * 1000 / _real(content["mean_tpot_ms"]), notes=tuple(notes))
    yield case(OUTPUT, concurrency, context, _real(content["output_throughput"]), notes=tuple(notes))


def _has_rate(content: Content) -> bool:
    """Whether a run has a request rate beside its limit of requests in parallel, so that fewer may have run."""
    rate = content.get("request_rate")  # "inf" of vLLM, Infinity of SGLang, which is read as None: all requests at once
    return isinstance(rate, int | float) and rate > 0


def _mean_in_parallel(content: Content, completed: int) -> tuple[float | None, list[str]]:
    """The mean number of requests in parallel by Little's law, None if it is unknown, and notes on it."""
    notes = ["concurrency is the mean number of requests in parallel"]
    if mean := content.get("concurrency"):  # SGLang measures it
        return _real(mean), notes
    latency = content.get("mean_e2el_ms", content.get("mean_e2e_latency_ms"))
    first, each = content.get("mean_ttft_ms"), content.get("mean_tpot_ms")
    if not latency and first and each and completed:
        latency = _real(first) + _real(each) * (_whole(content["total_output_tokens"]) / completed - 1)
        notes.append("latencies are not in the file: they are estimated from the times of the first and of further tokens")
    return (completed / _real(content["duration"]) * _real(latency) / 1000, notes) if latency else (None, [])


OBJECTS: tuple[tuple[set[str], Callable[[str, Content], Iterator[Figure]]], ...] = (
    ({"metadata", "results"}, _sweep),
    ({"latency_mode", "benchmarks"}, _llama_benchy),
    ({"output_throughput", "mean_tpot_ms", "completed"}, _serving),
)
"""Keys of a file -> its reader. More specific sets precede others."""

KNOWN = (
    "JSON of benchmark_sglang, llm_decode_bench, llama-benchy, vllm bench serve and sglang.bench_serving, CSV of llama-benchy"
)
