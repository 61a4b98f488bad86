"""Plot receipts: throughput by users and by context, with spread and failed requests, as SVG, PNG or text."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from sm120kit.bench import saturation
from sm120kit.bench.export import ring_knee
from sm120kit.bench.receipt import MeasuredCell, Receipt, summary
from sm120kit.core.errors import ToolchainMissing
from sm120kit.core.state import require_writable, write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = (".svg", ".png")
WIDTH = 50
"""Characters of the longest bar."""
PER_USER, TOGETHER = "tok/s per user", "tok/s together"
USERS, CONTEXT = "users", "tokens of context"


@dataclass(frozen=True)
class Point:
    """One cell: ``x`` users or tokens of context; median, lowest and highest rate in tokens per second, None if unknown.

    ``failed`` of ``requests`` requests had errors.
    """

    x: int
    rates: tuple[float, float, float] | None
    failed: int
    requests: int


@dataclass(frozen=True)
class Series:
    """One line of a panel: the quantity ``what`` over ``by``, in cells that differ only in ``by``.

    ``knee`` is the number of users from which more add no throughput, None for a line over context.
    """

    what: str
    by: str
    label: str
    points: tuple[Point, ...]
    knee: int | None = None


def require(path: Path) -> None:
    """Check before a measurement that a plot can be written.

    Raises:
        ToolchainMissing: matplotlib is not installed.
        StateUnwritable: the file cannot be written.
    """
    require_writable(path, "--plot")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ToolchainMissing("plots need matplotlib", "pip install 'sm120kit[plot]', or use --plot - for text") from error


def series(receipts: Sequence[tuple[str, Receipt]]) -> list[Series]:
    """The lines of named receipts: over users, and over context if there are several lengths.

    Interrupted cells are left out. The spread is between starts of the server if there are several, else, per user, between
    requests.
    """
    drawn = []
    for by in (USERS, CONTEXT):
        lines: dict[str, dict[int, list[MeasuredCell]]] = {}
        for name, receipt in receipts:
            for cell in sorted(receipt.cells, key=lambda cell: (cell.output_tokens, cell.context_tokens, cell.users)):
                if cell.complete:
                    x, label = (cell.users, _after(cell)) if by == USERS else (cell.context_tokens, _for_users(cell))
                    label = f"{name}: {label}" if len(receipts) > 1 else label
                    lines.setdefault(label, {}).setdefault(x, []).append(cell)
        if by == CONTEXT and len({x for cells in lines.values() for x in cells}) < 2:
            continue
        for what in (PER_USER, TOGETHER):
            for label, cells in lines.items():
                points = tuple(_point(x, starts, what) for x, starts in sorted(cells.items()))
                knee = saturation.knee([cell for starts in cells.values() for cell in starts]) if by == USERS else None
                drawn.append(Series(what, by, label, points, knee))
    return drawn


def _after(cell: MeasuredCell) -> str:
    return f"{cell.output_tokens:,} tokens" + (f" after {cell.context_tokens:,}" if cell.context_tokens else "")


def _for_users(cell: MeasuredCell) -> str:
    return f"{cell.output_tokens:,} tokens, {cell.users} user{'s' * (cell.users > 1)}"


def _point(x: int, starts: Sequence[MeasuredCell], what: str) -> Point:
    figures = [summary(cell) for cell in starts]
    values = [
        rate for summed in figures if (rate := summed.decode_tok_s if what == PER_USER else summed.total_tok_s) is not None
    ]
    if what == PER_USER and len(starts) == 1:
        values = [rate for sample in starts[0].samples if (rate := sample.decode_tok_s) is not None]
    rates = (median(values), min(values), max(values)) if values else None
    return Point(x, rates, sum(summed.errors for summed in figures), sum(summed.requests for summed in figures))


def text(receipts: Sequence[tuple[str, Receipt]]) -> Iterator[str]:
    """Bars of text: full up to the lowest rate, light from there to the highest."""
    for (what, by), group in groupby(series(receipts), lambda line: (line.what, line.by)):
        lines = list(group)
        longest = max((point.rates[2] for line in lines for point in line.points if point.rates), default=0.0)
        yield f"{what} by {by}"
        for line in lines:
            yield f"  {line.label}"
            for point in line.points:
                yield f"  {point.x:>9,} {_bar(point, longest)}{'  knee' if point.x == line.knee else ''}"


def _bar(point: Point, longest: float) -> str:
    failed = f"  {point.failed} of {point.requests} requests failed" if point.failed else ""
    if point.rates is None:
        return f"unknown{failed}"
    middle, lowest, highest = point.rates
    full, light = (round(WIDTH * rate / longest) for rate in (lowest, highest))
    spread = "" if lowest == highest else f" ({lowest:.1f}-{highest:.1f})"
    return f"{'█' * full}{'░' * (light - full)} {middle:.1f}{spread}{failed}"


def write(path: Path, receipts: Sequence[tuple[str, Receipt]]) -> None:
    """Draw an SVG or PNG file. The same receipts and matplotlib give the same bytes; text in an SVG stays text."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    drawn = series(receipts)
    panels = list(dict.fromkeys((line.what, line.by) for line in drawn))
    columns = list(dict.fromkeys(by for _, by in panels))
    with rc_context({"svg.hashsalt": "sm120kit", "svg.fonttype": "none"}):
        figure = Figure(figsize=(6.5 * max(1, len(columns)), 8), layout="constrained")
        axes = figure.subplots(2, max(1, len(columns)), squeeze=False)
        for row, what in enumerate((PER_USER, TOGETHER)):
            for column, by in enumerate(columns):
                _panel(axes[row][column], f"{row}-{column}", [line for line in drawn if (line.what, line.by) == (what, by)])
        figure.suptitle("; ".join(dict.fromkeys(_title(receipt) for _, receipt in receipts)), fontsize="medium")
        content = io.BytesIO()
        extension = path.suffix.removeprefix(".")
        figure.savefig(content, format=extension, metadata={"Date": None} if extension == "svg" else None, dpi=150)
    write_atomic(path, content.getvalue())


def _title(receipt: Receipt) -> str:
    about = receipt.circumstances
    partial = "" if receipt.complete else ", partial"
    return f"{about.model}, {about.workload}, thinking {about.thinking}{partial}"


def _panel(axes: Axes, name: str, drawn: Sequence[Series]) -> None:
    """One panel. In an SVG a line is the group ``<panel>-<number>``, its failures are ``<panel>-<number>-failed``,
    its knee is ``<panel>-<number>-knee``."""
    for number, series in enumerate(drawn):
        known = [(point.x, *point.rates) for point in series.points if point.rates]
        x, middle, lowest, highest = zip(*known, strict=True) if known else ((), (), (), ())
        (line,) = axes.plot(x, middle, marker="o", label=series.label, gid=f"{name}-{number}")
        axes.vlines(x, lowest, highest, color=line.get_color(), linewidth=3)
        ring_knee(axes, list(zip(x, middle, strict=True)), series.knee, line.get_color(), f"{name}-{number}-knee")
        failed = [(point, point.rates[0] if point.rates else 0.0) for point in series.points if point.failed]
        if failed:
            positions = [point.x for point, _ in failed], [y for _, y in failed]
            axes.plot(*positions, "x", color="red", markersize=12, clip_on=False, gid=f"{name}-{number}-failed")
        for point, y in failed:
            text = f"{point.failed} of {point.requests} failed" + ("" if point.rates else ", rate unknown")
            style: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "color": "red", "fontsize": "small"}
            axes.annotate(text, (point.x, y), (0, 8), **style)
    axes.set(xlabel=drawn[0].by, ylabel=drawn[0].what)
    axes.set_xticks(sorted({point.x for series in drawn for point in series.points}))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
