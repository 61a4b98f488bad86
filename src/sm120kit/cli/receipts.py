"""``sm120kit bench show`` and ``compare``: print, plot and compare receipts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sm120kit.cli.options import Json, Overwrite
from sm120kit.core import console

if TYPE_CHECKING:
    from sm120kit.bench import RequestEnded
    from sm120kit.bench.compare import CellDifference
    from sm120kit.bench.receipt import MeasuredCell, Receipt
    from sm120kit.bench.workload import Cell

Given = Annotated[
    list[str] | None,
    typer.Option(
        "--given", metavar="NAME=VALUE", help="A circumstance that cannot be detected, such as gpu='2x ...'; repeatable."
    ),
]
SHOWN_DIFFERENCE = 0.001
"""Share of a rate from which its uncertainty is printed."""
Plot = Annotated[
    str, typer.Option("--plot", metavar="FILE|-", help="Draw throughput by users and by context: .svg, .png, or - for text.")
]


def show(
    receipts: Annotated[list[Path], typer.Argument(metavar="RECEIPT", help="Files that bench run wrote.")],
    plot: Plot = "",
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Show the figures of receipts.

    They are computed from the samples.
    """
    from sm120kit.bench import receipt

    require_plot(plot, overwrite)
    named = [(path.stem, receipt.read(path)) for path in receipts]
    render(named, as_json=json)
    draw(plot, named)


@contextmanager
def cell_progress(cells: int, *, announce: bool = False) -> Iterator[Callable[[Cell, int], RequestEnded]]:
    """A live display of a run on a terminal: of all ``cells`` to measure, and of the requests of the running one.

    The function is that of :class:`sm120kit.bench.Measurement`. ``announce``: print a line for each cell, too.
    """
    begun = 0
    with console.progress(remaining=True) as display:
        run = display.add_task("cells", total=cells)

        def cell_begins(cell: Cell, requests: int) -> RequestEnded:
            nonlocal begun
            display.update(run, completed=begun)
            begun += 1
            for task in display.tasks[1:]:  # a cell that runs for a time has no total; it is over when the next one begins
                display.update(task.id, total=task.completed, visible=False)
            name = f"{users(cell)}, {cell.output_tokens} tokens"
            if announce:
                console.info(f"{name}: {requests} requests" if requests else name)
            key = display.add_task(name, total=requests or None)
            return lambda: display.update(key, advance=1)

        yield cell_begins


def users(cell: Cell | MeasuredCell | CellDifference) -> str:
    """The number of users of a cell with its unit."""
    return f"{cell.users} user{'s' * (cell.users > 1)}"


def require_plot(plot: str, overwrite: bool) -> None:
    """Check before a measurement that its plot can be drawn, and replaces no file unless it may."""
    if plot in ("", "-"):
        return
    from sm120kit.bench import plot as plots
    from sm120kit.core.state import require_new

    if Path(plot).suffix not in plots.KINDS:
        raise typer.BadParameter(f"{plot}: a plot is {' or '.join(plots.KINDS)}, or - for text", param_hint="--plot")
    require_new(Path(plot), "--plot", overwrite)
    plots.require(Path(plot))


def draw(plot: str, named: Sequence[tuple[str, Receipt]]) -> None:
    """Draw named receipts to the file of ``--plot``, to standard output for ``-``."""
    if not plot:
        return
    from sm120kit.bench import plot as plots

    if plot == "-":
        for line in plots.text(named):
            console.data(line)
    else:
        plots.write(Path(plot), named)
        console.info(f"plot: {plot}")


def compare(
    before: Annotated[Path, typer.Argument(metavar="BEFORE", help="A receipt.")],
    after: Annotated[Path, typer.Argument(metavar="AFTER", help="The receipt to compare with it.")],
    ignore: Annotated[
        str, typer.Option("--ignore", metavar="NAME,...", help="Circumstances that may differ; they are printed.")
    ] = "",
    json: Json = False,
) -> None:
    """Compare two receipts cell by cell.

    Every figure is compared. Refused if a circumstance that is not ignored differs. Exit code 1 if a larger share of requests
    failed than before.
    """
    from dataclasses import asdict

    from sm120kit.bench import compare as comparison
    from sm120kit.bench import receipt

    compared = comparison.compare(
        receipt.read(before), receipt.read(after), [name.strip() for name in ignore.split(",") if name.strip()]
    )
    if json:
        console.json_data(
            {"circumstances": compared.differ, "unknown": compared.unknown, "cells": [asdict(cell) for cell in compared.cells]}
        )
        if any(cell.fails_more for cell in compared.cells):
            raise typer.Exit(1)
        return
    for name, (first, second) in compared.differ.items():
        console.data(f"{name}: {first} / {second}")
    if compared.unknown:
        console.data(f"unknown in both: {comparison.briefly(compared.unknown)}")
    if any(failed for cell in compared.cells for failed, _ in (cell.errors_before, cell.errors_after)):
        console.data("requests failed; the other figures are of those that did not")
    for cell in compared.cells:
        console.data(f"{users(cell)}, {cell.output_tokens:,} tokens after {cell.context_tokens:,}")
        console.table(("figure", "before", "after", "ratio", "beyond spread"), _compared(cell))
    if any(cell.fails_more for cell in compared.cells):
        raise typer.Exit(1)


TITLES = {
    "decode_tok_s": "tok/s per user",
    "total_tok_s": "together",
    "prefill_tok_s": "prefill tok/s",
    "ttft": "TTFT",
    "ttft_p95": "TTFT P95",
    "ttfa": "TTFA",
    "itl_p50": "ITL p50",
    "itl_p99": "ITL p99",
    "acceptance": "accepted",
    "cache_hits": "cached",
    "joules_per_token": "J/token",
}
SHARES = ("acceptance", "cache_hits")


def _compared(cell: CellDifference) -> Iterator[Sequence[object]]:
    """The rows of a cell: its failed requests if there are any, then each figure."""
    errors = (cell.errors_before, cell.errors_after)
    if any(failed for failed, _ in errors):
        yield ("errors", *(f"{failed} of {requests}" for failed, requests in errors), "", "")
    for figure in cell.figures:
        beyond = {None: "unknown", True: f"yes ({cell.between})", False: f"no ({cell.between})"}[figure.beyond_spread]
        ratio = "" if figure.ratio is None else f"{figure.ratio:.3f}"
        sides = (_spread(figure.figure, figure.before), _spread(figure.figure, figure.after))
        yield (TITLES[figure.figure], *sides, ratio, beyond)


def _spread(name: str, values: tuple[float, float, float] | None) -> str:
    if values is None:
        return "unknown"
    rate = name.endswith("tok_s") or name == "joules_per_token"
    scale, unit = (100, "%") if name in SHARES else (1, "") if rate else (1000, " ms")
    middle, lowest, highest = (f"{value * scale:.{3 if name == 'joules_per_token' else 1}f}" for value in values)
    return f"{middle}{unit}" + (f" ({lowest}-{highest})" if lowest != highest else "")


def render(named: Sequence[tuple[str, Receipt]], *, as_json: bool) -> None:
    """Print receipts as tables, or as JSON: an object, a list for several."""
    if as_json:
        objects = [_object(receipt) for _, receipt in named]
        console.json_data(objects[0] if len(objects) == 1 else objects)
        return
    for name, receipt in named:
        if len(named) > 1:
            console.data(f"{name}:")
        _table(receipt)


def _ordered(receipt: Receipt) -> list[MeasuredCell]:
    return sorted(receipt.cells, key=lambda cell: (cell.key, cell.restart))


def _object(receipt: Receipt) -> dict[str, Any]:
    from dataclasses import asdict

    from sm120kit.bench import saturation
    from sm120kit.bench.receipt import summary

    return {
        "complete": receipt.complete,
        "circumstances": asdict(receipt.circumstances),
        "knees": saturation.knees(receipt.cells),
        "cells": [
            {
                "users": cell.users,
                "output_tokens": cell.output_tokens,
                "context_tokens": cell.context_tokens,
                "restart": cell.restart,
                "complete": cell.complete,
                "clocks": cell.clocks,
                "energy": cell.energy,
                **asdict(summary(cell)),
            }
            for cell in _ordered(receipt)
        ],
    }


def _table(receipt: Receipt) -> None:
    from sm120kit.bench import clocks, compare, saturation
    from sm120kit.bench.receipt import summary

    about = receipt.circumstances
    console.data(f"{about.model} at {about.url}; {about.workload}, thinking {about.thinking}; {receipt.started_utc}")
    if not receipt.complete:
        console.data("partial: the run was interrupted, or the server went away")
    setup = {name: text for name, text in compare.circumstances(receipt).items() if name.startswith(("machine.", "served."))}
    for name, text in setup.items():
        if text != compare.UNKNOWN:
            console.data(f"{name}: {text}")
    if unknown := [name for name, text in setup.items() if text == compare.UNKNOWN]:
        console.data(f"unknown: {compare.briefly(unknown)}")
    restarted = any(cell.restart for cell in receipt.cells)
    filled = any(cell.context_tokens for cell in receipt.cells)
    keys = ("users", "output", "context", *["restart"] * restarted)
    rates, times = [], []
    for cell in _ordered(receipt):
        s = summary(cell)
        key = (cell.users, cell.output_tokens, cell.context_tokens, *[cell.restart] * restarted)
        rates.append(
            (
                *key,
                *[_number(s.prefill_tok_s)] * filled,
                _range(None if s.decode_tok_s is None else (s.decode_tok_s, s.decode_lowest or 0, s.decode_highest or 0)),
                _number(s.total_tok_s),
                "unknown" if s.acceptance is None else f"{s.acceptance:.1%}",
                f"{s.errors} of {s.requests}" + ("" if cell.complete else ", interrupted"),
            )
        )
        between = ["lagged", "lagged"] if s.lagged else [_ms(s.itl_p50), _ms(s.itl_p99)]
        tokens = "unknown" if s.tokens is None else s.tokens
        times.append((*key, _ms(s.ttft), _ms(s.ttfa), *between, tokens, s.chunks))
    console.table((*keys, *["prefill tok/s"] * filled, "tok/s per user", "together", "accepted", "errors"), rates)
    console.table((*keys, "TTFT", "TTFA", "ITL p50", "p99", "tokens", "chunks"), times)
    for knee in saturation.knees(receipt.cells):
        console.data(knee.text)
    _server_table(receipt, keys)
    for line in _first_chunks(receipt):
        console.data(line)
    for cell in _ordered(receipt):
        if summary(cell).lagged:
            console.warn(
                f"{users(cell)}, {cell.output_tokens} tokens: the client did not read its streams for "
                f"{(cell.lag_seconds or 0) * 1000:.0f} ms; times between chunks are unknown. Measure from an idle machine"
            )
    for line in clocks.lines(sampled for cell in receipt.cells for sampled in cell.clocks or ()):
        console.data(line)
    for error in sorted({sample.error for cell in receipt.cells for sample in cell.samples if sample.error}):
        console.data(f"error: {error}")


def _server_table(receipt: Receipt, keys: Sequence[str]) -> None:
    """Hits of the prefix cache and energy, as far as they are known for a cell; else why not."""
    from sm120kit.bench.receipt import summary

    rows = []
    for cell in _ordered(receipt):
        s = summary(cell)
        if s.cache_hits is not None or s.joules_per_token is not None:
            values = (cell.users, cell.output_tokens, cell.context_tokens, cell.restart)[: len(keys)]
            gpus = ", ".join(map(str, cell.energy.gpus)) if cell.energy else ""
            cached = "unknown" if s.cache_hits is None else f"{s.cache_hits:.1%}"
            rows.append((*values, cached, "unknown" if s.joules_per_token is None else f"{s.joules_per_token:.3f}", gpus))
    if rows:
        console.table((*keys, "cached", "J/token", "GPUs"), rows)
    if all(cell.prefix_cache is None for cell in receipt.cells):
        console.data("cached: unknown, the server's metrics do not have it")
    for reason in sorted({cell.energy.unknown for cell in receipt.cells if cell.energy and cell.energy.unknown}):
        console.data(f"J/token: unknown, {reason}")


def _first_chunks(receipt: Receipt) -> Iterator[str]:
    """How much lower the rates of cells are if the first chunk has more than the one token that is assumed."""
    from sm120kit.bench.receipt import summary

    for cell in _ordered(receipt):
        s = summary(cell)
        if s.decode_tok_s and s.decode_at_least and s.decode_at_least < s.decode_tok_s * (1 - SHOWN_DIFFERENCE):
            yield (
                f"{users(cell)}, {cell.output_tokens} tokens: the server does not count tokens by chunk; the first counts "
                f"as one, and with the average of {(s.tokens or 0) / s.chunks:.1f} the rate is {s.decode_at_least:.1f} tok/s "
                f"({1 - s.decode_at_least / s.decode_tok_s:.1%} lower)"
            )


def _range(figures: tuple[float, float, float] | None) -> str:
    return "unknown" if figures is None else f"{figures[0]:.1f} ({figures[1]:.1f}-{figures[2]:.1f})"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f}"


def _ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1000:.1f} ms"
