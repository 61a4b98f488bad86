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
from sm120kit.bench._foreign_formats import Figure
from sm120kit.core.errors import BadInput
from sm120kit.core.outside import parse_json, read_input

SHORTEST_ANSWER = 200
"""Tokens per request below which start and end dominate a decode rate."""

IMPOSSIBLE_PREFILL = 500_000
"""Tokens per second of prefill that no SM12x machine reaches: 8 GPUs of 1 PFLOP/s dense FP4 at 20 GFLOP per token (10 billion
active parameters) would reach 400,000. Such a figure comes from a cache, or from a request that failed at once."""


@dataclass(frozen=True)
class PublishedFigures:
    """Figures of several files, and the files that could not be read, each with the reason."""

    figures: tuple[Figure, ...]
    refused: dict[str, str]


def read(paths: Sequence[Path]) -> PublishedFigures:
    """Read the figures of several files.

    Raises:
        BadInput: no file can be read, or is of a known format.
    """
    accepted: list[Figure] = []
    refused: dict[str, str] = {}
    for path in paths:
        try:
            accepted += _figures(path, _load(path))
        except BadInput as error:
            refused[str(path)] = error.message
            if len(refused) == len(paths):
                raise
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
