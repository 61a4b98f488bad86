"""Export results: the figures of their cases as CSV, Markdown or a self-contained HTML page, and charts of them."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

from sm120kit.bench import compare_results, figures, saturation
from sm120kit.bench.figures import COLUMNS, UNKNOWN, Summary, summary
from sm120kit.bench.result_file import MeasuredCase, Result
from sm120kit.bench.saturation import Objective
from sm120kit.core.errors import RequirementMissing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NamedResult = tuple[str, Result]
Value = Callable[[Summary], float | None]

CHARTS: tuple[tuple[str, float, tuple[str, ...]], ...] = (
    ("TTFT, ms", 1000, ("ttft", "ttft_p95")),
    ("ITL, ms", 1000, ("itl_p50", "itl_p99")),
    ("decode (tg) tok/s per request", 1, ("decode_tok_s",)),
    ("total tok/s", 1, ("total_tok_s",)),
)
"""Quantity with its unit, factor from seconds or tokens per second, and its figures: the first is solid, others are dashed."""

FIGURES = tuple(name for name in COLUMNS if name not in ("ttfa", "chunks"))
"""The exported columns."""

KINDS = (".csv", ".md", ".html", ".svg", ".png")

LABEL_GAP = 0.075
"""Minimum distance of two labels beside a chart, as a share of its height."""

STYLE = """:root{color-scheme:light dark}
body{font:15px/1.45 system-ui,sans-serif;max-width:76rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums;display:block;overflow-x:auto}
td,th{padding:.25rem .5rem;text-align:right;border-bottom:1px solid #8884}
td{white-space:nowrap}.text td{white-space:normal;overflow-wrap:anywhere}
td:first-child,th:first-child,.text td{text-align:left}
svg{max-width:100%;height:auto}@media(prefers-color-scheme:dark){svg{filter:invert(.9) hue-rotate(180deg)}}
@media print{body{margin:0;max-width:none}table{display:table}svg,tr{break-inside:avoid}}"""
"""Light or dark as the reader's system is; prints on white paper, no row or chart cut."""


def exported(kind: str, named: Sequence[NamedResult], objectives: Sequence[Objective] = ()) -> bytes:
    """The content of a file of one of ``KINDS``.

    Raises:
        RequirementMissing: it has charts, and matplotlib is not installed.
    """
    writers = {".csv": as_csv, ".md": as_markdown, ".html": as_html}
    return writers[kind](named, objectives).encode() if kind in writers else charts(named, kind.removeprefix("."))


def rows(named: Sequence[NamedResult], objectives: Sequence[Objective]) -> list[dict[str, Any]]:
    """A row for each case: its result, identity, figures, and requests that meet the objectives, if there are any."""
    table = []
    for name, result in named:
        for case in result.ordered:
            identity = {
                "result": name,
                "model": result.environment.model,
                "concurrency": case.concurrency,
                "output_tokens": case.output_tokens,
                "context_tokens": case.context_tokens,
                "restart": case.restart,
                "complete": case.complete,
            }
            row = {**identity, **asdict(summary(case))}
            if objectives:
                good = saturation.goodput(case, objectives)
                row |= {"goodput_requests": good.met, "goodput_per_second": good.per_second}
            table.append(row)
    return table


def as_csv(named: Sequence[NamedResult], objectives: Sequence[Objective] = ()) -> str:
    """CSV with a header; an unknown value is empty. Times are seconds, rates tokens per second."""
    table = [{key: no_formula(value) for key, value in row.items()} for row in rows(named, objectives)]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table[0]) if table else ["result"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def no_formula(value: object) -> object:
    """A value for a spreadsheet: text that it would compute, such as ``=cmd()`` or ``@SUM``, begins with an apostrophe."""
    return f"'{value}" if isinstance(value, str) and value.lstrip()[:1] in tuple("=+-@|%") else value


def in_markdown(text: str) -> str:
    """A text on one line of Markdown, without the characters that would begin HTML, a link, a case of a table or emphasis."""
    return re.sub(r"([\\`*_\[\]<>|#!&~$])", lambda match: f"&#{ord(match[1])};", " ".join(text.split()))


def as_markdown(named: Sequence[NamedResult], objectives: Sequence[Objective] = ()) -> str:
    """A Markdown section for each result: what was measured, and the figures."""
    parts = []
    for name, result in named:
        heads, body = _table_of(result, objectives)
        lines = [f"| {' | '.join(heads)} |", f"|{' ---: |' * len(heads)}", *(f"| {' | '.join(row)} |" for row in body)]
        notes = [f"- {in_markdown(note)}" for note in _notes(result)]
        title, about = in_markdown(name), in_markdown(figures.about(result))
        parts.append("\n".join([f"## {title}", "", about, "", *lines, *([""] if notes else []), *notes]))
    return "\n\n".join(parts) + "\n"


def as_html(named: Sequence[NamedResult], objectives: Sequence[Objective] = ()) -> str:
    """One page without external resources: figures, charts by concurrency and by context, and environment.

    Raises:
        RequirementMissing: matplotlib is not installed.
    """
    title = ", ".join(dict.fromkeys(result.environment.model for _, result in named))
    parts = [f"<h1>{html.escape(title)}</h1>"]
    for name, result in named:
        heads, body = _table_of(result, objectives)
        parts += [f"<h2>{html.escape(name)}</h2><p>{html.escape(figures.about(result))}</p>", _table(heads, body)]
        parts.append(f"<ul>{''.join(f'<li>{html.escape(note)}' for note in _notes(result))}</ul>")
    for by in ("concurrency", "context depth"):
        if lines := _lines(named, by):
            parts += [f"<h2>By {by}</h2>", _drawn(lines, by, "svg").decode()]
    for name, result in named:
        known = [(key, text) for key, text in compare_results.environment(result).items() if text != UNKNOWN]
        parts += [f"<h2>Environment of {html.escape(name)}</h2>", _table(("", "value"), known, "text")]
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _table_of(result: Result, objectives: Sequence[Objective]) -> tuple[list[str], list[list[str]]]:
    """The heads and rows of the figures of a result that are known of a case; notes have the reasons of the others."""
    summaries = [(case, summary(case)) for case in result.ordered]
    known = [name for name in FIGURES if any(getattr(computed, name) is not None for _, computed in summaries)]
    heads = ["concurrency", "output", "context", *(COLUMNS[name][0] for name in known), "failed"]
    body = []
    for case, computed in summaries:
        key = [f"{number:,}" for number in case.key]
        body.append([*key, *(figures.text(computed, name) for name in known), figures.failed(case)])
        if objectives:
            good = saturation.goodput(case, objectives)
            per_second = UNKNOWN if good.per_second is None else f"{good.per_second:.2f}"
            body[-1].append(f"{per_second} ({good.met} of {good.requests})")
    return [*heads, *["goodput/s"] * bool(objectives)], body


def _notes(result: Result) -> list[str]:
    return [*(knee.text for knee in saturation.knees(result.cases)), *figures.notes(result)]


def _table(heads: Sequence[str], body: Sequence[Sequence[str]], kind: str = "") -> str:
    def row(texts: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts) + "</tr>"

    return f'<table class="{kind}">{row(heads, "th")}{"".join(row(texts, "td") for texts in body)}</table>'


# ---- charts

Lines = dict[str, dict[int, list[MeasuredCase]]]
"""Label of a line -> its cases by concurrency or tokens of context, one for each start of the server."""


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


def charts(named: Sequence[NamedResult], kind: str) -> bytes:
    """The charts over concurrency, or over context if that is what was measured, as ``svg`` or ``png``.

    The same results and matplotlib give the same bytes; text in an SVG stays text.

    Raises:
        RequirementMissing: matplotlib is not installed.
    """
    by = "concurrency" if _lines(named, "concurrency") or not _lines(named, "context depth") else "context depth"
    return _drawn(_lines(named, by), by, kind)


def _drawn(lines: Lines, by: str, kind: str) -> bytes:
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
        content = io.BytesIO()
        figure.savefig(content, format=kind, metadata={"Date": None} if kind == "svg" else None, dpi=110)
    drawn = content.getvalue()
    return drawn[drawn.index(b"<svg") :] if kind == "svg" else drawn


def _draw(figure: Figure, lines: Lines, by: str) -> None:
    knees: dict[str, int | None] = dict.fromkeys(lines)
    if by == "concurrency":
        knees = {
            label: saturation.knee([case for starts in cases.values() for case in starts]) for label, cases in lines.items()
        }
    panels = figure.subplots(2, 2, squeeze=False).flatten()
    for axes, (title, factor, names) in zip(panels, CHARTS, strict=True):
        _chart(axes, title, lines, [(name, factor) for name in names], knees)
        _scale(axes, by, sorted({x for cases in lines.values() for x in cases}))


def _chart(axes: Axes, title: str, lines: Lines, values: Sequence[tuple[str, float]], knees: dict[str, int | None]) -> None:
    """One chart: a line for each series and value, with the label of the series beside the last point of its first line.

    A ring marks the knee of a series on its first line.
    """
    ends: list[tuple[float, str, Any]] = []
    highest = 0.0
    for number, (label, cases) in enumerate(lines.items()):
        for style, (name, factor) in zip(("-", "--"), values, strict=False):
            points = []
            for x, starts in sorted(cases.items()):
                known = [figure * factor for case in starts if (figure := getattr(summary(case), name)) is not None]
                if known:
                    points.append((x, median(known)))
            if points:
                color = f"C{number % 10}"
                axes.plot(*zip(*points, strict=True), style, marker="o", markersize=4, color=color)
                highest = max(highest, *(y for _, y in points))
                if style == "-":
                    ends.append((points[-1][1], label, color))
                    _ring_knee(axes, points, knees[label], color)
    meaning = ", dashed: ".join(COLUMNS[name][0] for name, _ in values)
    axes.set_title(f"{title} (solid: {meaning})" if len(values) > 1 else title, loc="left", fontsize="medium")
    axes.grid(alpha=0.25)
    top = highest * 1.05 or 1.0
    axes.set_ylim(0, top)
    if not ends:
        axes.text(0.5, 0.5, UNKNOWN, transform=axes.transAxes, ha="center")
    ends.sort(key=lambda end: end[0])
    for at, (_, label, color) in zip(_spread([y / top for y, _, _ in ends]), ends, strict=True):
        escaped = label.replace("$", r"\$")  # matplotlib would parse formulas of TeX
        axes.annotate(escaped, (1.02, at), xycoords="axes fraction", color=color, fontsize="small", va="center")


def _ring_knee(axes: Axes, points: Sequence[tuple[float, float]], knee: int | None, color: Any) -> None:
    """Mark the point of a line at its knee by a ring, with its name on the side that the line does not take."""
    falls = bool(points) and points[-1][1] < points[0][1]
    for x, y in points:
        if x == knee:
            axes.plot(
                [x], [y], "o", markersize=11, fillstyle="none", markeredgewidth=1.5, color=color, clip_on=False, gid="knee"
            )
            style: dict[str, Any] = {"textcoords": "offset points", "color": color, "fontsize": "small"}
            axes.annotate("knee", (x, y), (7, 6) if falls else (7, -13), **style)


def _spread(heights: Sequence[float]) -> list[float]:
    """Move increasing heights apart, to at least ``LABEL_GAP`` if they fit, within 0 and 1."""
    gap = min(LABEL_GAP, 1 / max(1, len(heights) - 1))
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + gap) if placed else height)
    limit = 1.0
    for number in reversed(range(len(placed))):
        placed[number] = min(placed[number], limit)
        limit = placed[number] - gap
    return placed


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
