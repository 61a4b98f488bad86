"""Export receipts: figures of their cells as CSV or Markdown, or one self-contained HTML page with charts."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

from sm120kit.bench import compare, saturation
from sm120kit.bench.receipt import MeasuredCell, Receipt, Summary, summary
from sm120kit.bench.saturation import Objective
from sm120kit.core.errors import ToolchainMissing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NamedReceipt = tuple[str, Receipt]
Value = Callable[[Summary], float | None]

CHARTS: tuple[tuple[str, float, tuple[tuple[str, Value], ...]], ...] = (
    ("time to first token, ms", 1000, (("median", lambda s: s.ttft), ("p95", lambda s: s.ttft_p95))),
    ("time between chunks, ms", 1000, (("median", lambda s: s.itl_p50), ("p99", lambda s: s.itl_p99))),
    ("tok/s per user", 1, (("median", lambda s: s.decode_tok_s),)),
    ("tok/s of all users, prefill included", 1, (("", lambda s: s.output_tok_s),)),
)
"""Quantity with its unit, factor from seconds or tokens per second, and its lines: the first is solid, others are dashed."""

LABEL_GAP = 0.075
"""Minimum distance of two labels beside a chart, as a share of its height."""

STYLE = """body{font:15px/1.45 system-ui,sans-serif;max-width:76rem;margin:2rem auto;padding:0 1rem;color:#1b1f24}
table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums}td,th{padding:.25rem .7rem;text-align:right;
border-bottom:1px solid #d9dee3}td:first-child,th:first-child,.text td{text-align:left}svg{max-width:100%;height:auto}
.failed{color:#b3261e}"""


def rows(named: Sequence[NamedReceipt], objectives: Sequence[Objective]) -> list[dict[str, Any]]:
    """A row for each cell: its receipt, identity, figures, and requests that meet the objectives, if there are any."""
    result = []
    for name, receipt in named:
        for cell in sorted(receipt.cells, key=lambda cell: (cell.key, cell.restart)):
            identity = {
                "receipt": name,
                "model": receipt.circumstances.model,
                "users": cell.users,
                "output_tokens": cell.output_tokens,
                "context_tokens": cell.context_tokens,
                "restart": cell.restart,
                "complete": cell.complete,
            }
            row = {**identity, **asdict(summary(cell))}
            if objectives:
                good = saturation.goodput(cell, objectives)
                row |= {"goodput_requests": good.met, "goodput_per_second": good.per_second}
            result.append(row)
    return result


def as_csv(named: Sequence[NamedReceipt], objectives: Sequence[Objective] = ()) -> str:
    """CSV with a header; an unknown value is empty. Times are seconds, rates tokens per second."""
    table = rows(named, objectives)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table[0]) if table else ["receipt"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def as_markdown(named: Sequence[NamedReceipt], objectives: Sequence[Objective] = ()) -> str:
    """A Markdown section for each receipt: what was measured, and the figures."""
    parts = []
    for name, receipt in named:
        heads, body = _figures(receipt, objectives)
        lines = [f"| {' | '.join(heads)} |", f"|{' ---: |' * len(heads)}", *(f"| {' | '.join(row)} |" for row in body)]
        notes = [f"- {note}" for note in _notes(receipt)]
        parts.append("\n".join([f"## {name}", "", _about(receipt), "", *lines, *([""] if notes else []), *notes]))
    return "\n\n".join(parts) + "\n"


def as_html(named: Sequence[NamedReceipt], objectives: Sequence[Objective] = ()) -> str:
    """One page without external resources: figures, charts by users and by context, and circumstances.

    Raises:
        ToolchainMissing: matplotlib is not installed.
    """
    title = ", ".join(dict.fromkeys(receipt.circumstances.model for _, receipt in named))
    parts = [f"<h1>{html.escape(title)}</h1>"]
    for name, receipt in named:
        heads, body = _figures(receipt, objectives)
        parts += [f"<h2>{html.escape(name)}</h2><p>{html.escape(_about(receipt))}</p>", _table(heads, body)]
        parts += [f"<p>{html.escape(note)}</p>" for note in _notes(receipt)]
    for by in ("users", "tokens of context"):
        if chart := _charts(named, by):
            parts += [f"<h2>By {by}</h2>", chart]
    for name, receipt in named:
        known = [(key, text) for key, text in compare.circumstances(receipt).items() if text != compare.UNKNOWN]
        parts += [f"<h2>Circumstances of {html.escape(name)}</h2>", _table(("circumstance", "value"), known, "text")]
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _about(receipt: Receipt) -> str:
    about = receipt.circumstances
    partial = "" if receipt.complete else "; partial"
    return f"{about.model} at {about.url}; {about.workload}, thinking {about.thinking}; {receipt.started_utc}{partial}"


def _figures(receipt: Receipt, objectives: Sequence[Objective]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    heads: tuple[str, ...] = (
        "users",
        "output",
        "context",
        "tok/s per user",
        "tok/s",
        "TTFT ms",
        "p95",
        "ITL ms",
        "p99",
        "accepted",
        "cached",
        "J/token",
        "failed",
    )
    heads += ("goodput/s",) if objectives else ()
    body: list[tuple[str, ...]] = []
    for cell in sorted(receipt.cells, key=lambda cell: (cell.key, cell.restart)):
        s = summary(cell)
        times = (_text(None if value is None else value * 1000) for value in (s.ttft, s.ttft_p95, s.itl_p50, s.itl_p99))
        shares = ("unknown" if share is None else f"{share:.1%}" for share in (s.acceptance, s.cache_hits))
        row: tuple[str, ...] = (
            str(cell.users),
            f"{cell.output_tokens:,}",
            f"{cell.context_tokens:,}",
            _text(s.decode_tok_s),
            _text(s.output_tok_s),
        )
        row = (
            *row,
            *times,
            *shares,
            _text(s.joules_per_token, 3),
            f"{s.errors} of {s.requests}" + ("" if cell.complete else ", interrupted"),
        )
        if objectives:
            good = saturation.goodput(cell, objectives)
            row = (*row, f"{_text(good.per_second, 2)} ({good.met} of {good.requests})")
        body.append(row)
    return heads, body


def _notes(receipt: Receipt) -> list[str]:
    """The knees, and the errors of requests."""
    errors = {f"error: {sample.error}" for cell in receipt.cells for sample in cell.samples if sample.error}
    return [knee.text for knee in saturation.knees(receipt.cells)] + sorted(errors)


def _text(value: float | None, digits: int = 1) -> str:
    return "unknown" if value is None else f"{value:.{digits}f}"


def _table(heads: Sequence[str], body: Sequence[Sequence[str]], kind: str = "") -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return f'<table class="{kind}">{row(heads, "th")}{"".join(row(cells, "td") for cells in body)}</table>'


def _charts(named: Sequence[NamedReceipt], by: str) -> str:
    """The charts over users or context as SVG, "" if only one number was measured."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ToolchainMissing("charts need matplotlib", "pip install 'sm120kit[plot]'") from error

    lines: dict[str, dict[int, list[MeasuredCell]]] = {}
    for name, receipt in named:
        for cell in sorted(receipt.cells, key=lambda cell: (cell.output_tokens, cell.context_tokens, cell.users)):
            if cell.complete:
                x = cell.users if by == "users" else cell.context_tokens
                other = f"after {cell.context_tokens:,}" if by == "users" else f"{cell.users} user{'s' * (cell.users > 1)}"
                label = f"{cell.output_tokens:,} tokens, {other}"
                lines.setdefault(f"{name}: {label}" if len(named) > 1 else label, {}).setdefault(x, []).append(cell)
    if len({x for cells in lines.values() for x in cells}) < 2:
        return ""
    by_label = {label: [cell for starts in cells.values() for cell in starts] for label, cells in lines.items()}
    knees = {label: saturation.knee(cells) if by == "users" else None for label, cells in by_label.items()}
    with rc_context({"svg.hashsalt": "sm120kit", "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(15, 9.5), layout="constrained")
        panels = figure.subplots(2, 2, squeeze=False).flatten()
        for axes, (title, factor, values) in zip(panels, CHARTS, strict=True):
            _chart(axes, title, lines, [(suffix, value, factor) for suffix, value in values], knees)
            _scale(axes, by, sorted({x for cells in lines.values() for x in cells}))
        content = io.BytesIO()
        figure.savefig(content, format="svg", metadata={"Date": None})
    text = content.getvalue().decode()
    return text[text.index("<svg") :]


def _chart(
    axes: Axes,
    title: str,
    lines: dict[str, dict[int, list[MeasuredCell]]],
    values: Sequence[tuple[str, Value, float]],
    knees: dict[str, int | None],
) -> None:
    """One chart: a line for each series and value, with the label of the series beside the last point of its first line.

    A ring marks the knee of a series on its first line.
    """
    ends: list[tuple[float, str, Any]] = []
    highest = 0.0
    for number, (label, cells) in enumerate(lines.items()):
        for style, (_, value, factor) in zip(("-", "--"), values, strict=False):
            points = []
            for x, starts in sorted(cells.items()):
                known = [figure * factor for cell in starts if (figure := value(summary(cell))) is not None]
                if known:
                    points.append((x, median(known)))
            if points:
                color = f"C{number % 10}"
                axes.plot(*zip(*points, strict=True), style, marker="o", markersize=4, color=color)
                highest = max(highest, *(y for _, y in points))
                if style == "-":
                    ends.append((points[-1][1], label, color))
                    ring_knee(axes, points, knees[label], color)
    meaning = ", dashed: ".join(name for name, _, _ in values if name)
    axes.set_title(f"{title} (solid: {meaning})" if len(values) > 1 else title, loc="left", fontsize="medium")
    axes.grid(alpha=0.25)
    top = highest * 1.05 or 1.0
    axes.set_ylim(0, top)
    if not ends:
        axes.text(0.5, 0.5, "unknown", transform=axes.transAxes, ha="center")
    ends.sort(key=lambda end: end[0])
    for at, (_, label, color) in zip(_spread([y / top for y, _, _ in ends]), ends, strict=True):
        axes.annotate(label, (1.02, at), xycoords="axes fraction", color=color, fontsize="small", va="center")


def ring_knee(axes: Axes, points: Sequence[tuple[float, float]], knee: int | None, color: Any, gid: str | None = None) -> None:
    """Mark the point of a line at its knee by a ring, with its name on the side that the line does not take."""
    falls = bool(points) and points[-1][1] < points[0][1]
    for x, y in points:
        if x == knee:
            axes.plot([x], [y], "o", markersize=11, fillstyle="none", markeredgewidth=1.5, color=color, clip_on=False, gid=gid)
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
