"""Reading the result files that the community publishes, with their known hazards refused by name.

Formats, as their files say: ``benchmark_sglang.py`` and ``llm_decode_bench.py`` (an object with ``metadata``, ``results`` and
``prefill``; also as means of several runs), and flat lists of ``users``/``system_tps`` or ``label``/``tok_s``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sm120kit.errors import BadReceipt

SHORTEST_ANSWER = 200
"""Tokens per user below which a rate says more about start and end than about decoding."""

IMPOSSIBLE_PREFILL = 500_000
"""Tokens per second of prefill that no SM12x machine reaches: 8 GPUs of 1 PFLOP/s dense FP4 at 20 GFLOP per token (10 billion
active parameters) would be 400,000. Such a figure is the prefix cache."""


@dataclass(frozen=True)
class Figure:
    """One published cell: ``tok_s`` of all users together, or of prefill. ``refused`` says why it is no measurement.

    ``notes`` are what a reader should know of one that is. None is unknown.
    """

    file: str
    model: str
    what: str
    users: int
    context_tokens: int
    tok_s: float
    spread: float | None = None
    tokens: int | None = None
    seconds: float | None = None
    acceptance: float | None = None
    refused: str = ""
    notes: tuple[str, ...] = ()


def read(paths: Sequence[Path]) -> tuple[Figure, ...]:
    """The figures of several files, judged alone and against each other.

    Raises:
        BadReceipt: a file cannot be read, or is of no known format.
    """
    found: list[Figure] = []
    pools: dict[int, tuple[str, str]] = {}
    for path in paths:
        said = _load(path)
        figures = [_judged(figure) for figure in _figures(path, said)]
        pool = said.get("metadata", {}).get("max_total_tokens") if isinstance(said, dict) else None
        if pool and figures:
            model = figures[0].model
            other, where = pools.setdefault(pool, (model, path.name))
            if other != model:
                why = f"its KV pool of {pool:,} tokens is that of {other} in {where}: another model was served than is named"
                figures = [replace(figure, refused=figure.refused or why) for figure in figures]
        found += _cached(figures)
    return tuple(found)


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise BadReceipt(f"{path}: {error.strerror}", "name a published result file") from error
    except ValueError as error:
        raise BadReceipt(f"{path} is not JSON: {error}", "name a published result file") from error


def _figures(path: Path, said: Any) -> Iterator[Figure]:
    try:
        if isinstance(said, dict) and "results" in said:
            yield from _sweep(path, said)
        elif isinstance(said, list) and said and all("system_tps" in row for row in said):
            for row in said:
                what = f"{row['output_len']} tokens asked"
                tokens, seconds = int(row["total_tokens"]), float(row["time"])
                yield Figure(path.name, "", what, row["users"], 0, float(row["system_tps"]), tokens=tokens, seconds=seconds)
        elif isinstance(said, list) and said and all("tok_s" in row for row in said):
            for row in said:
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
                    notes=("completion tokens over wall time: prefill and any thinking are in it",),
                )
        else:
            raise BadReceipt(
                f"{path} is of no known format", "known: files with metadata and results, lists of system_tps or tok_s"
            )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadReceipt(f"{path}: a cell is not as its format has it: {error!r}", "name a published result file") from error


def _sweep(path: Path, said: dict[str, Any]) -> Iterator[Figure]:
    model = str(said["metadata"]["model"])
    notes = ("the model is a label; the tool did not ask the server",)
    for row in said["results"]:
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
            f"none of {row['num_errors']} requests ended well"
            if row.get("num_errors") and not row.get("num_completed")
            else "",
            notes,
        )
    for context, row in (said.get("prefill") or {}).items():
        yield Figure(
            path.name, model, "prefill", 1, int(context), float(row["tok_per_sec"]), seconds=row["ttft_seconds"], notes=notes
        )


def _judged(figure: Figure) -> Figure:
    """A figure with what can be said of it alone."""
    refused = figure.refused
    per_user = None if figure.tokens is None else figure.tokens / figure.users
    if not refused and figure.tok_s <= 0:
        refused = "0.0 tok/s is a cell that failed, not a rate"
    elif not refused and figure.what == "prefill" and figure.tok_s > IMPOSSIBLE_PREFILL:
        refused = f"{figure.tok_s:,.0f} tok/s of prefill is the prefix cache"
    elif not refused and per_user is not None and per_user < SHORTEST_ANSWER:
        refused = f"only {per_user:.0f} tokens for each user in {figure.seconds:g} s"
    return replace(figure, refused=refused)


def _cached(figures: Sequence[Figure]) -> list[Figure]:
    """Cells with context that are faster than the same without it, by more than both spreads."""
    plain = {figure.users: figure for figure in figures if figure.what == "decode" and not figure.context_tokens}
    judged = []
    for figure in figures:
        base = plain.get(figure.users)
        if figure.what == "decode" and figure.context_tokens and base and not base.refused and not figure.refused:
            margin = (figure.spread or 0) + (base.spread or 0)
            if figure.tok_s > base.tok_s + margin:
                why = (
                    f"faster with {figure.context_tokens:,} tokens of context than without ({base.tok_s:.1f}): a cache answers"
                )
                figure = replace(figure, refused=why)
        judged.append(figure)
    return judged
