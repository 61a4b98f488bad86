"""Receipts as pictures: throughput by users and by context, with spread and errors; as SVG, PNG or text."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from sm120kit.bench.receipt import Measured, Receipt, require_writable, summary
from sm120kit.errors import ToolchainMissing
from sm120kit.workspace import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = (".svg", ".png")
WIDTH = 50
"""Characters of the longest bar."""
PER_USER, TOGETHER = "tok/s per user", "tok/s together"
USERS, CONTEXT = "users", "tokens of context"


@dataclass(frozen=True)
class Point:
    """One cell: ``x`` users or tokens of context; ``rate`` in tokens per second with its lowest and highest, None unknown.

    ``failed`` of ``requests`` requests had errors.
    """

    x: int
    rate: float | None
    lowest: float | None
    highest: float | None
    failed: int
    requests: int


@dataclass(frozen=True)
class Series:
    """One line of a panel: ``what`` is measured against ``by``, in cells that are alike but for that."""

    what: str
    by: str
    label: str
    points: tuple[Point, ...]


def require(path: Path) -> None:
    """Refuse what could not be drawn, before anything is measured.

    Raises:
        ToolchainMissing: matplotlib is not installed.
        StateUnwritable: the file cannot be written.
    """
    require_writable(path, "--plot")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ToolchainMissing("plots need matplotlib", "pip install 'sm120kit[plot]'; --plot - needs nothing") from error


def series(receipts: Sequence[tuple[str, Receipt]]) -> list[Series]:
    """What there is to draw of named receipts: by users, and by context where there is more than one.

    Cells that were interrupted are left out. The spread is that between starts of the server where there are several, else,
    per user, that between requests.
    """
    found = []
    for by in (USERS, CONTEXT):
        lines: dict[str, dict[int, list[Measured]]] = {}
        for name, receipt in receipts:
            for cell in receipt.cells:
                if cell.complete:
                    x, label = (cell.users, _after(cell)) if by == USERS else (cell.context_tokens, _for_users(cell))
                    label = f"{name}: {label}" if len(receipts) > 1 else label
                    lines.setdefault(label, {}).setdefault(x, []).append(cell)
        if by == CONTEXT and len({x for cells in lines.values() for x in cells}) < 2:
            continue
        for what in (PER_USER, TOGETHER):
            for label, cells in sorted(lines.items()):
                found.append(Series(what, by, label, tuple(_point(x, starts, what) for x, starts in sorted(cells.items()))))
    return found


def _after(cell: Measured) -> str:
    return f"{cell.output_tokens:,} tokens" + (f" after {cell.context_tokens:,}" if cell.context_tokens else "")


def _for_users(cell: Measured) -> str:
    return f"{cell.output_tokens:,} tokens, {cell.users} user{'s' * (cell.users > 1)}"


def _point(x: int, starts: Sequence[Measured], what: str) -> Point:
    figures = [summary(cell) for cell in starts]
    rates = [rate for one in figures if (rate := one.decode_tok_s if what == PER_USER else one.total_tok_s) is not None]
    lowest, highest = min(rates, default=None), max(rates, default=None)
    if what == PER_USER and len(starts) == 1:
        lowest, highest = figures[0].decode_lowest, figures[0].decode_highest
    failed, requests = sum(one.errors for one in figures), sum(one.requests for one in figures)
    return Point(x, median(rates) if rates else None, lowest, highest, failed, requests)


def text(receipts: Sequence[tuple[str, Receipt]]) -> Iterator[str]:
    """Lines of bars: full up to the lowest rate, light from there to the highest."""
    for (what, by), drawn in groupby(series(receipts), lambda one: (one.what, one.by)):
        lines = list(drawn)
        longest = max((point.highest or 0.0 for line in lines for point in line.points), default=0.0)
        yield f"{what} by {by}"
        for line in lines:
            yield f"  {line.label}"
            for point in line.points:
                yield f"  {point.x:>9,} {_bar(point, longest)}"


def _bar(point: Point, longest: float) -> str:
    failed = f"  {point.failed} of {point.requests} requests failed" if point.failed else ""
    if point.rate is None or point.lowest is None or point.highest is None:
        return f"unknown{failed}"
    full, light = (round(WIDTH * rate / longest) for rate in (point.lowest, point.highest))
    return f"{'█' * full}{'░' * (light - full)} {point.rate:.1f} ({point.lowest:.1f}-{point.highest:.1f}){failed}"


def write(path: Path, receipts: Sequence[tuple[str, Receipt]]) -> None:
    """Draw SVG or PNG; the same receipts give the same bytes with the same matplotlib. Text in an SVG stays text."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    drawn = series(receipts)
    panels = list(dict.fromkeys((one.what, one.by) for one in drawn))
    columns = list(dict.fromkeys(by for _, by in panels))
    with rc_context({"svg.hashsalt": "sm120kit", "svg.fonttype": "none"}):
        figure = Figure(figsize=(6.5 * max(1, len(columns)), 8), layout="constrained")
        axes = figure.subplots(2, max(1, len(columns)), squeeze=False)
        for row, what in enumerate((PER_USER, TOGETHER)):
            for column, by in enumerate(columns):
                _panel(axes[row][column], f"{row}-{column}", [one for one in drawn if (one.what, one.by) == (what, by)])
        figure.suptitle("; ".join(dict.fromkeys(_title(receipt) for _, receipt in receipts)), fontsize="medium")
        content = io.BytesIO()
        kind = path.suffix.removeprefix(".")
        figure.savefig(content, format=kind, metadata={"Date": None} if kind == "svg" else None, dpi=150)
    write_atomic(path, content.getvalue())


def _title(receipt: Receipt) -> str:
    about = receipt.circumstances
    partial = "" if receipt.complete else ", partial"
    return f"{about.model}, {about.workload}, thinking {about.thinking}{partial}"


def _panel(axes: Axes, name: str, drawn: Sequence[Series]) -> None:
    """One panel. A line's group in an SVG is called ``<panel>-<number>``, that of its failures ``<panel>-<number>-failed``."""
    for number, one in enumerate(drawn):
        known = [p for p in one.points if p.rate is not None and p.lowest is not None and p.highest is not None]
        x, rates = [point.x for point in known], [point.rate or 0.0 for point in known]
        (line,) = axes.plot(x, rates, marker="o", label=one.label, gid=f"{name}-{number}")
        axes.vlines(x, [p.lowest or 0.0 for p in known], [p.highest or 0.0 for p in known], color=line.get_color(), alpha=0.5)
        failed = [point for point in one.points if point.failed]
        if failed:
            places = [0.0 if point.rate is None else point.rate for point in failed]
            axes.plot([p.x for p in failed], places, "x", color="red", markersize=12, gid=f"{name}-{number}-failed")
            for point, place in zip(failed, places, strict=True):
                words = f"{point.failed} of {point.requests} failed" + (", rate unknown" if point.rate is None else "")
                axes.annotate(words, (point.x, place), textcoords="offset points", xytext=(8, 6), color="red", fontsize="small")
    axes.set(xlabel=drawn[0].by, ylabel=drawn[0].what)
    axes.set_xticks(sorted({point.x for one in drawn for point in one.points}))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
