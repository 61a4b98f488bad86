"""Read published result files of other benchmarks and refuse the cells that are not measurements, each with the reason.

Formats: ``benchmark_sglang.py`` and ``llm_decode_bench.py`` (an object with ``metadata``, ``results`` and
``prefill``; also as means of several runs), and flat lists of ``users``/``system_tps`` or ``label``/``tok_s``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from sm120kit.core.errors import BadReceipt
from sm120kit.core.state import parse_json

SHORTEST_ANSWER = 200
"""Tokens per user below which start and end dominate a decode rate."""

IMPOSSIBLE_PREFILL = 500_000
"""Tokens per second of prefill that no SM12x machine reaches: 8 GPUs of 1 PFLOP/s dense FP4 at 20 GFLOP per token (10 billion
active parameters) would reach 400,000. Such a figure comes from the prefix cache."""


@dataclass(frozen=True, config=ConfigDict(allow_inf_nan=False))
class Figure:
    """A published cell: ``tok_s`` of all users together, or of prefill. None is unknown.

    ``refused`` is the reason why it is not a measurement, "" if it is one; ``notes`` are caveats of a measurement.
    """

    file: str
    model: str
    what: str
    users: Annotated[int, Field(ge=1)]
    context_tokens: int
    tok_s: float
    spread: float | None = None
    tokens: int | None = None
    seconds: float | None = None
    acceptance: float | None = None
    refused: str = ""
    notes: tuple[str, ...] = ()


def read(paths: Sequence[Path]) -> tuple[Figure, ...]:
    """Read the figures of several files, checked alone and against each other.

    Raises:
        BadReceipt: a file cannot be read, or is of no known format.
    """
    accepted: list[Figure] = []
    pools: dict[int, tuple[str, str]] = {}
    for path in paths:
        content = _load(path)
        try:
            figures = [_checked(figure) for figure in _figures(path, content)]
            pool = int(content.get("metadata", {}).get("max_total_tokens") or 0) if isinstance(content, dict) else 0
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            reason = repr(error)
            if isinstance(error, ValidationError):
                reason = f"{error.errors()[0]['loc'][0]}: {error.errors()[0]['msg']}"
            raise BadReceipt(f"{path}: a cell is not of its format: {reason}", "name a published result file") from error
        if pool and figures:
            model = figures[0].model
            other, file = pools.setdefault(pool, (model, path.name))
            if other != model:
                reason = f"its KV pool of {pool:,} tokens is that of {other} in {file}: the served model is not the named one"
                figures = [replace(figure, refused=figure.refused or reason) for figure in figures]
        accepted += _without_cached(figures)
    return tuple(accepted)


def _load(path: Path) -> Any:
    try:
        return parse_json(path.read_bytes())
    except OSError as error:
        raise BadReceipt(f"{path}: {error.strerror}", "name a published result file") from error
    except ValueError as error:
        raise BadReceipt(f"{path} is not JSON: {error}", "name a published result file") from error


def _figures(path: Path, content: Any) -> Iterator[Figure]:
    if isinstance(content, dict) and "results" in content:
        yield from _sweep(path, content)
    elif isinstance(content, list) and content and all("system_tps" in row for row in content):
        for row in content:
            what = f"{row['output_len']} tokens requested"
            tokens, seconds = int(row["total_tokens"]), float(row["time"])
            yield Figure(path.name, "", what, row["users"], 0, float(row["system_tps"]), tokens=tokens, seconds=seconds)
    elif isinstance(content, list) and content and all("tok_s" in row for row in content):
        for row in content:
            users, context = re.match(r"(\d+) user", row["label"]), re.search(r"(\d+)K ctx", row["label"])
            yield Figure(
                path.name,
                "",
                row["label"],
                int(users[1]) if users else 1,
                int(context[1]) * 1024 if context else 0,
                float(row["tok_s"]),
                tokens=int(row["comp_tokens"]),
                seconds=float(row["time"]),
                notes=("completion tokens over wall time, including prefill and thinking",),
            )
    else:
        raise BadReceipt(
            f"{path} has an unknown format", "known: files with metadata and results, lists of system_tps or tok_s"
        )


def _sweep(path: Path, content: dict[str, Any]) -> Iterator[Figure]:
    model = str(content["metadata"]["model"])
    notes = ("the model is a label; the tool did not query the server",)
    for row in content["results"]:
        acceptance = row.get("server_spec_accept_rate", row.get("spec_accept_rate_mean"))
        yield Figure(
            path.name,
            model,
            "decode",
            int(row["concurrency"]),
            int(row["context_tokens"]),
            float(row["aggregate_tps"] if "aggregate_tps" in row else row["aggregate_tps_mean"]),
            row.get("aggregate_tps_stdev"),
            row.get("total_tokens"),
            row.get("wall_time"),
            acceptance or None,  # these tools write 0.0 for unknown
            f"all {row['num_errors']} requests failed" if row.get("num_errors") and not row.get("num_completed") else "",
            notes,
        )
    for context, row in (content.get("prefill") or {}).items():
        yield Figure(
            path.name, model, "prefill", 1, int(context), float(row["tok_per_sec"]), seconds=row["ttft_seconds"], notes=notes
        )


def _checked(figure: Figure) -> Figure:
    """A figure with the reason to refuse it, as far as it needs no other figure."""
    refused = figure.refused
    per_user = None if figure.tokens is None else figure.tokens / figure.users
    if not refused and figure.tok_s <= 0:
        refused = "0.0 tok/s: the cell failed"
    elif not refused and figure.what == "prefill" and figure.tok_s > IMPOSSIBLE_PREFILL:
        refused = f"{figure.tok_s:,.0f} tok/s of prefill: the prefix cache answered"
    elif not refused and per_user is not None and per_user < SHORTEST_ANSWER:
        refused = f"only {per_user:.0f} tokens for each user in {figure.seconds:g} s"
    return replace(figure, refused=refused)


def _without_cached(figures: Sequence[Figure]) -> list[Figure]:
    """Refuse cells with context that are faster than the same cell without it, by more than both spreads."""
    plain = {figure.users: figure for figure in figures if figure.what == "decode" and not figure.context_tokens}
    checked = []
    for figure in figures:
        base = plain.get(figure.users)
        if figure.what == "decode" and figure.context_tokens and base and not base.refused and not figure.refused:
            margin = (figure.spread or 0) + (base.spread or 0)
            if figure.tok_s > base.tok_s + margin:
                reason = (
                    f"faster with {figure.context_tokens:,} tokens of context than without ({base.tok_s:.1f}): a cache answered"
                )
                figure = replace(figure, refused=reason)
        checked.append(figure)
    return checked
