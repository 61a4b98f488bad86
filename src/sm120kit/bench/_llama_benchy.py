"""Results as llama-benchy 0.4.0 writes them: its JSON (``BenchmarkReport`` of ``results.py``), and its CSV.

A Spark Arena submission has that CSV. Its context is a prefix before the prompt, here the depth; the rest of the prompt
follows. What it counts otherwise is left out: peaks, and the total prefill of several requests.
"""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from statistics import fmean, pstdev
from typing import Any

import sm120kit
from sm120kit.bench.figures import summary
from sm120kit.bench.result_file import MeasuredCase, Result
from sm120kit.core.errors import BadInput

METRICS = {
    "t_s": ("pp_throughput", "tg_throughput"),
    "t_s_req": ("pp_req_throughput", "tg_req_throughput"),
    "peak_ts": (None, None),
    "peak_ts_req": (None, None),
    "ttfr": ("ttfr", None),
    "est_ppt": ("est_ppt", None),
    "e2e_ttft": ("e2e_ttft", None),
}
"""Columns of the CSV -> the metric in the row of the prompt (pp) and of the answer (tg)."""


def as_json(named: Sequence[tuple[str, Result]]) -> str:
    """The report of one result.

    Raises:
        BadInput: there are several, which a report cannot hold.
    """
    return json.dumps(_report(named), indent=2) + "\n"


def as_csv(named: Sequence[tuple[str, Result]]) -> str:
    """The rows of one result: the prompt of a case and its answer, where their total rate is known.

    Raises:
        BadInput: there are several, which a report cannot hold.
    """
    report = _report(named)
    text = io.StringIO()
    heads = ["model", "test_name", *(f"{column}_{part}" for column in METRICS for part in ("mean", "std"))]
    writer = csv.DictWriter(text, heads, lineterminator="\n")
    writer.writeheader()
    for run in report["benchmarks"]:
        depth = f" @ d{run['context_size']}" if run["context_size"] else ""
        case = f"{depth} (c{run['concurrency']})" if report["max_concurrency"] > 1 else depth
        for number, test in enumerate((f"pp{run['prompt_size']}{case}", f"tg{run['response_size']}{case}")):
            known = {column: metric for column, names in METRICS.items() if (metric := run.get(names[number] or ""))}
            if "t_s" in known:
                values = {f"{column}_{part}": metric[part] for column, metric in known.items() for part in ("mean", "std")}
                writer.writerow({"model": no_formula(report["model"]), "test_name": test, **values})
    return text.getvalue()


def no_formula(text: str) -> str:
    """A text in one line for a spreadsheet: one that it would compute, ``=cmd()`` or ``@SUM``, begins with an apostrophe."""
    line = " ".join(text.split())
    return f"'{line}" if line[:1] in tuple("=+-@|%") else line


def _report(named: Sequence[tuple[str, Result]]) -> dict[str, Any]:
    if len(named) > 1:
        raise BadInput("a file of llama-benchy has one result", "export each RESULT to a file of its own")
    (_, result), complete = named[0], [case for case in named[0][1].ordered if case.complete]
    return {
        "version": f"sm120kit {sm120kit.__version__}",
        "timestamp": result.started_utc,
        "latency_mode": "none",
        "latency_ms": 0.0,
        "model": result.environment.model,
        "prefix_caching_enabled": False,
        "max_concurrency": max((case.concurrency for case in complete), default=1),
        "benchmarks": [_run(list(starts)) for _, starts in groupby(complete, key=lambda case: case.key)],
    }


def _run(starts: Sequence[MeasuredCase]) -> dict[str, Any]:
    """A case with the values of all its starts."""
    case, summaries = starts[0], [summary(each) for each in starts]
    samples = [sample for each in starts for sample in each.samples if not sample.error]
    prompt = summaries[0].prompt_tokens or case.context_tokens
    prefill = _metric(sample.prefill_tok_s for sample in samples)
    first = _metric(sample.ttft * 1000 if sample.ttft else None for sample in samples)
    return {
        "concurrency": case.concurrency,
        "context_size": min(case.context_tokens, prompt),
        "prompt_size": max(0, prompt - case.context_tokens),
        "response_size": case.output_tokens,
        "is_context_prefill_phase": False,
        "pp_throughput": prefill if case.concurrency == 1 else None,
        "pp_req_throughput": prefill,
        "tg_throughput": _metric(each.total_tok_s for each in summaries),
        "tg_req_throughput": _metric(sample.decode_tok_s for sample in samples),
        "ttfr": first,
        "est_ppt": first,
        "e2e_ttft": first,
    }


def _metric(values: Iterable[float | None]) -> dict[str, Any] | None:
    known = [value for value in values if value is not None]
    return {"mean": fmean(known), "std": pstdev(known), "values": known} if known else None
