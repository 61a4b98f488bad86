"""Export results: the figures of their cases as CSV or Markdown, and charts of them."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

from sm120kit.bench import _llama_benchy as llama_benchy
from sm120kit.bench import figures
from sm120kit.bench._llama_benchy import no_formula
from sm120kit.bench.figures import COLUMNS, UNKNOWN, summary
from sm120kit.bench.published import comparisons
from sm120kit.bench.result_file import MeasuredCase, Result
from sm120kit.core.errors import RequirementMissing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NamedResult = tuple[str, Result]

CHARTS: tuple[tuple[str, float, tuple[str, ...]], ...] = (
    ("TTFT, ms", 1000, ("ttft", "ttft_p95")),
    ("ITL, ms", 1000, ("itl_p50", "itl_p99")),
    ("decode (tg) tok/s per request", 1, ("decode_tok_s",)),
    ("total tok/s", 1, ("total_tok_s",)),
)
"""Quantity with its unit, factor from seconds or tokens per second, and its figures: the first is solid, others are dashed."""

FIGURES = tuple(name for name in COLUMNS if name not in ("ttfa", "chunks"))
"""The exported columns."""


def as_csv(named: Sequence[NamedResult]) -> str:
    """CSV: a header, then a row for each case; an unknown value is empty. Times are seconds, rates tokens per second."""
    table = [_row(name, result, case) for name, result in named for case in result.ordered]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table[0]) if table else ["result"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def _row(name: str, result: Result, case: MeasuredCase) -> dict[str, Any]:
    row = {
        "result": no_formula(name),
        "model": no_formula(result.environment.model),
        "concurrency": case.concurrency,
        "output_tokens": case.output_tokens,
        "context_tokens": case.context_tokens,
        "restart": case.restart,
        "complete": case.complete,
    }
    return row | asdict(summary(case))


def in_markdown(text: str) -> str:
    """A text on one line of Markdown, without the characters that would begin HTML, a link, a case of a table or emphasis."""
    return re.sub(r"([\\`*_\[\]<>|#!&~$])", lambda match: f"&#{ord(match[1])};", " ".join(text.split()))


def as_markdown(named: Sequence[NamedResult]) -> str:
    """A Markdown section for each result: what was measured, and the figures."""
    parts = []
    for name, result in named:
        heads, body = _table_of(result)
        lines = [f"| {' | '.join(heads)} |", f"|{' ---: |' * len(heads)}", *(f"| {' | '.join(row)} |" for row in body)]
        notes = [f"- {in_markdown(note)}" for note in _notes(result)]
        title, about = in_markdown(name), in_markdown(figures.about(result))
        parts.append("\n".join([f"## {title}", "", about, "", *lines, *([""] if notes else []), *notes]))
    return "\n\n".join(parts) + "\n"


def chart_pages(named: Sequence[NamedResult]) -> Iterator[tuple[str, str]]:
    """Charts over what was varied, concurrency and context depth: the name of each and its SVG.

    Raises:
        RequirementMissing: matplotlib is not installed.
    """
    for by in ("concurrency", "context depth"):
        if lines := _lines(named, by):
            yield by, _drawn(lines, by)


def _table_of(result: Result) -> tuple[list[str], list[list[str]]]:
    """The heads and rows of the figures of a result that are known of a case; notes have the reasons of the others."""
    summaries = [(case, summary(case)) for case in result.ordered]
    known = [name for name in FIGURES if any(getattr(computed, name) is not None for _, computed in summaries)]
    heads = ["concurrency", "output", "context", *(COLUMNS[name][0] for name in known), "failed"]
    body = []
    for case, computed in summaries:
        key = [f"{number:,}" for number in case.key]
        body.append([*key, *(figures.text(computed, name) for name in known), figures.failed(case)])
    return heads, body


def _notes(result: Result) -> list[str]:
    return [*comparisons(result), *figures.notes(result)]


KINDS = {".benchy.json": llama_benchy.as_json, ".benchy.csv": llama_benchy.as_csv, ".csv": as_csv, ".md": as_markdown}
"""The functions that write a file, by the end of its name."""

# ---- charts

Cases = dict[int, list[MeasuredCase]]
"""Cases by concurrency or context depth, one for each start of the server."""
Lines = dict[str, Cases]
"""Label of a line -> its cases."""


def _lines(named: Sequence[NamedResult], by: str) -> Lines:
    """The lines of charts over concurrency or context; none if only one number was measured. Interrupted cases are left out."""
    lines: Lines = {}
    for name, result in named:
        for case in sorted(result.cases, key=lambda case: (case.output_tokens, case.context_tokens, case.concurrency)):
            if case.complete:
                x = case.concurrency if by == "concurrency" else case.context_tokens
                other = f"context depth {case.context_tokens:,}" if by == "concurrency" else f"concurrency {case.concurrency}"
                label = f"{case.output_tokens:,} output tokens, {other}"
                lines.setdefault(f"{name}: {label}" if len(named) > 1 else label, {}).setdefault(x, []).append(case)
    return lines if len({x for cases in lines.values() for x in cases}) > 1 else {}


def _drawn(lines: Lines, by: str) -> str:
    """The charts as SVG: the same results and matplotlib give the same text, which stays text in it."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RequirementMissing("charts need matplotlib", "pip install 'sm120kit[plot]'") from error

    style: dict[Any, Any] = {
        "svg.hashsalt": "sm120kit",
        "svg.fonttype": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with rc_context(style):
        figure = Figure(figsize=(15, 9.5), layout="constrained")
        _draw(figure, lines, by)
        content = io.StringIO()
        figure.savefig(content, format="svg", metadata={"Date": None}, dpi=110)
    drawn = content.getvalue()
    return drawn[drawn.index("<svg") :]


def _draw(figure: Figure, lines: Lines, by: str) -> None:
    """A chart for each quantity, with one legend."""
    for axes, (title, factor, names) in zip(figure.subplots(2, 2, squeeze=False).flatten(), CHARTS, strict=True):
        for number, (label, cases) in enumerate(lines.items()):
            _plot(axes, label, cases, names, factor, f"C{number % 10}")
        meaning = ", dashed: ".join(COLUMNS[name][0] for name in names)
        axes.set_title(f"{title} (solid: {meaning})" if len(names) > 1 else title, loc="left", fontsize="medium")
        axes.grid(alpha=0.25)
        axes.set_ylim(bottom=0)
        if not axes.lines:
            axes.text(0.5, 0.5, UNKNOWN, transform=axes.transAxes, ha="center")
        _scale(axes, by, sorted({x for cases in lines.values() for x in cases}))
    handles = {label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=3, frameon=False)


def _plot(axes: Axes, label: str, cases: Cases, names: Sequence[str], factor: float, color: str) -> None:
    """The median over the starts of the server of each figure; the first is solid and has the label."""
    for style, name in zip(("-", "--"), names, strict=False):
        points = {}
        for x, starts in sorted(cases.items()):
            if known := [figure * factor for case in starts if (figure := getattr(summary(case), name)) is not None]:
                points[x] = median(known)
        if points:
            text = label.replace("$", r"\$") if style == "-" else "_"  # matplotlib would parse formulas of TeX
            axes.plot(list(points), list(points.values()), style, marker="o", markersize=4, color=color, label=text)


def _scale(axes: Axes, by: str, measured: Sequence[int]) -> None:
    """Ticks at the measured numbers; logarithmic if they span more than a factor of 8."""
    positive = [x for x in measured if x]
    if len(positive) > 1 and positive[-1] / positive[0] >= 8:
        axes.set_xscale(
            "symlog" if measured[0] == 0 else "log", base=2, **({"linthresh": positive[0]} if measured[0] == 0 else {})
        )
    axes.set_xticks(measured, [f"{x // 1024}k" if x >= 1024 and x % 1024 == 0 else f"{x:,}" for x in measured])
    axes.minorticks_off()
    axes.set_xlabel(by)
