"""``sm120kit bench show`` and ``compare``: what receipts say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sm120kit import console
from sm120kit.cli.options import Json

if TYPE_CHECKING:
    from sm120kit.bench.receipt import Measured, Receipt

Plot = Annotated[
    str, typer.Option("--plot", metavar="FILE|-", help="Draw throughput by users and by context: .svg, .png, or - for text.")
]


def show(
    receipts: Annotated[list[Path], typer.Argument(metavar="RECEIPT...", help="Files that bench run wrote.")],
    plot: Plot = "",
    json: Json = False,
) -> None:
    """The figures of receipts, computed from their samples."""
    from sm120kit.bench import receipt

    require_plot(plot)
    read = [(path.stem, receipt.read(path)) for path in receipts]
    render(read, as_json=json)
    draw(plot, read)


def require_plot(plot: str) -> None:
    """Refuse a plot that could not be drawn, before anything is measured."""
    if plot in ("", "-"):
        return
    from sm120kit.bench import plot as plots

    if Path(plot).suffix not in plots.KINDS:
        raise typer.BadParameter(f"{plot}: a plot is {' or '.join(plots.KINDS)}, or - for text", param_hint="--plot")
    plots.require(Path(plot))


def draw(plot: str, read: Sequence[tuple[str, Receipt]]) -> None:
    """Draw what --plot asks for."""
    if not plot:
        return
    from sm120kit.bench import plot as plots

    if plot == "-":
        for line in plots.text(read):
            console.data(line)
    else:
        plots.write(Path(plot), read)
        console.say(f"plot: {plot}")


def compare(
    before: Annotated[Path, typer.Argument(metavar="BEFORE")],
    after: Annotated[Path, typer.Argument(metavar="AFTER")],
    ignore: Annotated[
        str, typer.Option("--ignore", metavar="NAME,...", help="Circumstances that may differ; they are printed.")
    ] = "",
    json: Json = False,
) -> None:
    """Two receipts cell by cell. Refused when they differ in a circumstance that is not ignored."""
    from dataclasses import asdict

    from sm120kit.bench import compare as comparison
    from sm120kit.bench import receipt

    found = comparison.compare(
        receipt.read(before), receipt.read(after), [name.strip() for name in ignore.split(",") if name.strip()]
    )
    if json:
        console.json_data(
            {"circumstances": found.differ, "unknown": found.unknown, "cells": [asdict(one) for one in found.cells]}
        )
        return
    for name, (was, now) in found.differ.items():
        console.data(f"{name}: {was} / {now}")
    if found.unknown:
        console.data(f"unknown in both: {comparison.briefly(found.unknown)}")
    console.table(
        ("users", "output", "context", "before tok/s", "after tok/s", "ratio", "spread between", "beyond it"),
        (
            (
                one.users,
                one.output_tokens,
                one.context_tokens,
                _range(one.before),
                _range(one.after),
                "" if one.ratio is None else f"{one.ratio:.3f}",
                one.between,
                {None: "unknown", True: "yes", False: "no"}[one.beyond_spread],
            )
            for one in found.cells
        ),
    )


def render(read: Sequence[tuple[str, Receipt]], *, as_json: bool) -> None:
    """Receipts as tables, or as one JSON object each; several are a list."""
    if as_json:
        objects = [_object(made) for _, made in read]
        console.json_data(objects[0] if len(objects) == 1 else objects)
        return
    for name, made in read:
        if len(read) > 1:
            console.data(f"{name}:")
        _table(made)


def _ordered(made: Receipt) -> list[Measured]:
    return sorted(made.cells, key=lambda cell: (cell.key, cell.restart))


def _object(made: Receipt) -> dict[str, Any]:
    from dataclasses import asdict

    from sm120kit.bench.receipt import summary

    return {
        "complete": made.complete,
        "circumstances": asdict(made.circumstances),
        "cells": [
            {
                "users": cell.users,
                "output_tokens": cell.output_tokens,
                "context_tokens": cell.context_tokens,
                "restart": cell.restart,
                "complete": cell.complete,
                "clocks": cell.clocks,
                **asdict(summary(cell)),
            }
            for cell in _ordered(made)
        ],
    }


def _table(made: Receipt) -> None:
    from sm120kit.bench import clocks, compare
    from sm120kit.bench.receipt import summary

    about = made.circumstances
    console.data(f"{about.model} at {about.url}; {about.workload}, thinking {about.thinking}; {made.started_utc}")
    if not made.complete:
        console.data("partial: the run was interrupted, or the server went away")
    said = {name: text for name, text in compare.circumstances(made).items() if name.startswith(("machine.", "served."))}
    for name, text in said.items():
        if text != compare.UNKNOWN:
            console.data(f"{name}: {text}")
    if unknown := [name for name, text in said.items() if text == compare.UNKNOWN]:
        console.data(f"unknown: {compare.briefly(unknown)}")
    restarted = any(cell.restart for cell in made.cells)
    filled = any(cell.context_tokens for cell in made.cells)
    columns = [
        *["prefill tok/s"] * filled,
        "tok/s per user",
        "together",
        "TTFT",
        "TTFA",
        "ITL p50",
        "p99",
        "accepted",
        "tokens",
        "chunks",
        "errors",
    ]
    rows = []
    for cell in _ordered(made):
        s = summary(cell)
        rows.append(
            (
                cell.users,
                cell.output_tokens,
                cell.context_tokens,
                *[cell.restart] * restarted,
                *[_number(s.prefill_tok_s)] * filled,
                _range(None if s.decode_tok_s is None else (s.decode_tok_s, s.decode_lowest or 0, s.decode_highest or 0)),
                _number(s.total_tok_s),
                _ms(s.ttft),
                _ms(s.ttfa),
                _ms(s.itl_p50),
                _ms(s.itl_p99),
                "unknown" if s.acceptance is None else f"{s.acceptance:.1%}",
                "unknown" if s.tokens is None else s.tokens,
                s.chunks,
                f"{s.errors} of {s.requests}" + ("" if cell.complete else ", interrupted"),
            )
        )
    console.table(("users", "output", "context", *["restart"] * restarted, *columns), rows)
    for line in clocks.lines(one for cell in made.cells for one in cell.clocks or ()):
        console.data(line)
    for error in sorted({sample.error for cell in made.cells for sample in cell.samples if sample.error}):
        console.data(f"error: {error}")


def _range(figures: tuple[float, float, float] | None) -> str:
    return "unknown" if figures is None else f"{figures[0]:.1f} ({figures[1]:.1f}-{figures[2]:.1f})"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f}"


def _ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1000:.1f} ms"
