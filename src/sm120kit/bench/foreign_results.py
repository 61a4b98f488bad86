"""Read published result files of other benchmarks and refuse the cases that are not measurements, each with the reason."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sm120kit.bench import _foreign_formats
from sm120kit.bench._foreign_formats import OUTPUT, Figure
from sm120kit.core.errors import BadInput
from sm120kit.core.outside import parse_json, read_input

SHORTEST_ANSWER = 200
"""Tokens per request below which start and end dominate a decode rate."""

SPREAD = 0.05
"""Share by which single runs differ: 4.3 % is the standard deviation of the three runs sglang_122b_x16 of rtx6kpro."""

IMPOSSIBLE_PREFILL = 500_000
"""Tokens per second of prefill that no SM12x machine reaches: 8 GPUs of 1 PFLOP/s dense FP4 at 20 GFLOP per token (10 billion
active parameters) would reach 400,000. Such a figure comes from a cache, or from a request that failed at once."""


@dataclass(frozen=True)
class PublishedFigures:
    """Figures of several files, and the files that could not be read, each with the reason."""

    figures: tuple[Figure, ...]
    refused: dict[str, str]


def read(paths: Sequence[Path]) -> PublishedFigures:
    """Read the figures of several files, checked alone and against each other.

    Raises:
        BadInput: no file can be read, or is of a known format.
    """
    accepted: list[Figure] = []
    refused: dict[str, str] = {}
    pools: dict[int, tuple[str, str]] = {}
    for path in paths:
        try:
            content = _load(path)
            figures = _figures(path, content)
        except BadInput as error:
            refused[str(path)] = error.message
            if len(refused) == len(paths):
                raise
            continue
        pool = _pool(content)
        if pool and figures:
            model = figures[0].model
            other, file = pools.setdefault(pool, (model, path.name))
            if other != model:
                reason = f"its KV pool of {pool:,} tokens is that of {other} in {file}: the served model is not the named one"
                figures = [replace(figure, refused=figure.refused or reason) for figure in figures]
        accepted += _without_cached_prefill(_without_cached(figures))
    return PublishedFigures(tuple(accepted), refused)


def _load(path: Path) -> Any:
    """The content of a JSON file, the runs of a file of JSON lines, or the rows of a CSV file, whatever its name."""
    hint = f"name a published result file; known: {_foreign_formats.KNOWN}"
    try:
        text = read_input(path).decode("utf-8-sig").strip()
        if text[:1] in ("{", "["):
            return _documents(text)
        rows = list(csv.DictReader(io.StringIO(text, newline="")))
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}", "name a published result file") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8: {error.reason} at byte {error.start}", hint) from error
    except csv.Error as error:
        raise BadInput(f"{path} is not CSV: {error}", hint) from error
    except ValueError as error:
        raise BadInput(f"{path} is not JSON: {error}", hint) from error
    if not rows or len(rows[0]) < 2:
        raise BadInput(f"{path} is neither JSON nor CSV with columns", hint)
    if missing := _foreign_formats.CSV_KEYS - rows[0].keys():
        raise BadInput(
            f"{path} is CSV without llama-benchy's columns {', '.join(sorted(missing))}: CSV of other tools is not read",
            f"name the JSON file of its tool; known: {_foreign_formats.KNOWN}",
        )
    return rows


def _documents(text: str) -> Any:
    """A JSON document; of several lines with an object each, such as runs appended to one file, a list."""
    lines = text.splitlines()
    if len(lines) > 1 and all(line.startswith("{") and line.endswith("}") for line in map(str.strip, lines) if line):
        return _Runs(parse_json(line, lenient=True) for line in lines if line.strip())
    return parse_json(text, lenient=True)


class _Runs(list[Any]):
    """The runs of a file of JSON lines."""


def _figures(path: Path, content: Any) -> list[Figure]:
    """The checked figures of a file.

    Raises:
        BadInput: the format is unknown, or a case is not of it.
    """
    if isinstance(content, _Runs):
        return [figure for run in content for figure in _figures(path, run)]
    reader = _foreign_formats.reader(content)
    if reader is None:
        raise BadInput(f"{path} has an unknown format", f"known: {_foreign_formats.KNOWN}")
    try:
        return [_checked(figure) for figure in reader(path.name, content)]
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, IndexError) as error:
        reason = repr(error)
        if isinstance(error, ValidationError):
            reason = f"{error.errors()[0]['loc'][0]}: {error.errors()[0]['msg']}"
        raise BadInput(f"{path}: a case is not of its format: {reason}", "name a published result file") from error


def _pool(content: Any) -> int:
    """The size of the server's KV cache in tokens, 0 if the file does not have it."""
    metadata = content.get("metadata") if isinstance(content, dict) else None
    size = metadata.get("max_total_tokens") if isinstance(metadata, dict) else 0
    return size if isinstance(size, int) and size < 2**31 - 1 else 0


def _checked(figure: Figure) -> Figure:
    """A figure with the reason to refuse it, as far as it needs no other figure."""
    refused = figure.refused
    each = None if figure.tokens is None else figure.tokens / (figure.concurrency or 1)
    if not refused and figure.tok_s <= 0:
        refused = f"{figure.tok_s:.1f} tok/s: the case failed"
    elif not refused and figure.what == "prefill" and figure.tok_s > IMPOSSIBLE_PREFILL:
        refused = f"{figure.tok_s:,.0f} tok/s of prefill: a cache answered, or the request failed"
    elif not refused and each is not None and each < SHORTEST_ANSWER:
        refused = f"only {each:.0f} tokens for each request" + ("" if figure.seconds is None else f" in {figure.seconds:g} s")
    return replace(figure, refused=refused)


def _without_cached(figures: Sequence[Figure]) -> list[Figure]:
    """Refuse cases with context that are faster than the same case without it, by more than both spreads."""
    plain = {(figure.what, figure.concurrency): figure for figure in figures if not figure.context_tokens}
    checked = []
    for figure in figures:
        base = plain.get((figure.what, figure.concurrency))
        if figure.what in ("decode", OUTPUT) and figure.context_tokens and base and not base.refused and not figure.refused:
            spreads = [case.tok_s * SPREAD if case.spread is None else case.spread for case in (figure, base)]
            if figure.tok_s > base.tok_s + sum(spreads):
                reason = (
                    f"faster with {figure.context_tokens:,} tokens of context than without ({base.tok_s:.1f}): "
                    "other text with another acceptance, or a cache answered"
                )
                figure = replace(figure, refused=reason)
        checked.append(figure)
    return checked


def _without_cached_prefill(figures: Sequence[Figure]) -> list[Figure]:
    """Refuse prefill whose time cannot be that of prefill alone, by that of a shorter prompt.

    It took less than half of that time, or four times as much as attention, which grows with the square, would make of it.
    """
    longest: Figure | None = None
    refused: dict[int, str] = {}
    for number, figure in sorted(enumerate(figures), key=lambda numbered: numbered[1].context_tokens):
        if figure.what != "prefill" or figure.refused or figure.seconds is None:
            continue
        if longest and longest.seconds and figure.context_tokens > longest.context_tokens:
            took = f"{figure.seconds:g} s, but {longest.context_tokens:,} tokens took {longest.seconds:g} s"
            growth = (figure.context_tokens / longest.context_tokens) ** 2
            if figure.seconds < longest.seconds / 2:
                refused[number] = f"{took}: not both are times of prefill alone"
                continue
            if figure.seconds > 4 * growth * longest.seconds:
                refused[number] = f"{took}: the request hung or waited"
                continue
        if longest is None or figure.seconds > (longest.seconds or 0):
            longest = figure
    return [replace(figure, refused=refused.get(number, figure.refused)) for number, figure in enumerate(figures)]
