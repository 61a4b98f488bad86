"""``sm120kit bench show``, ``compare`` and ``export``: print, compare and export receipts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sm120kit.cli.options import Json, Overwrite
from sm120kit.core import console

if TYPE_CHECKING:
    from sm120kit.bench.compare import CellDifference
    from sm120kit.bench.receipt import MeasuredCell, Receipt


def show(
    receipts: Annotated[list[Path], typer.Argument(metavar="RECEIPT", help="Files that bench run wrote.")],
    json: Json = False,
) -> None:
    """Show the figures of receipts.

    They are computed from the samples.
    """
    from sm120kit.bench import receipt

    render([(path.stem, receipt.read(path)) for path in receipts], as_json=json)


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
    from sm120kit.bench import compare as comparison
    from sm120kit.bench import figures, receipt

    ignored = [name.strip() for name in ignore.split(",") if name.strip()]
    compared = comparison.compare(receipt.read(before), receipt.read(after), ignored)
    if json:
        console.json_data(
            {"circumstances": compared.differ, "unknown": compared.unknown, "cells": [asdict(cell) for cell in compared.cells]}
        )
    else:
        for name, (first, second) in compared.differ.items():
            console.data(f"{name}: {first} / {second}")
        if compared.unknown:
            console.data(f"unknown in both: {comparison.briefly(compared.unknown)}")
        if any(failed for cell in compared.cells for failed, _ in (cell.errors_before, cell.errors_after)):
            console.data("requests failed; the other figures are of those that did not")
        for cell in compared.cells:
            console.data(figures.name(cell))
            console.table(("figure", "before", "after", "ratio", "beyond spread"), _compared(cell))
    if any(cell.fails_more for cell in compared.cells):
        raise typer.Exit(1)


def _compared(cell: CellDifference) -> Iterator[Sequence[object]]:
    """The rows of a cell: its failed requests if there are any, then each figure."""
    from sm120kit.bench.figures import COLUMNS

    errors = (cell.errors_before, cell.errors_after)
    if any(failed for failed, _ in errors):
        yield ("failed", *(f"{failed} of {requests}" for failed, requests in errors), "", "")
    for figure in cell.figures:
        beyond = {None: "unknown", True: f"yes ({cell.between})", False: f"no ({cell.between})"}[figure.beyond_spread]
        ratio = "" if figure.ratio is None else f"{figure.ratio:.3f}"
        sides = (_spread(figure.figure, figure.before), _spread(figure.figure, figure.after))
        yield (COLUMNS[figure.figure][0], *sides, ratio, beyond)


def _spread(name: str, values: tuple[float, float, float] | None) -> str:
    from sm120kit.bench.figures import COLUMNS, UNKNOWN

    if values is None:
        return UNKNOWN
    middle, lowest, highest = map(COLUMNS[name][1], values)
    return middle + (f" ({lowest} to {highest})" if lowest != highest else "")


def export(
    receipts: Annotated[list[Path], typer.Argument(metavar="RECEIPT", help="Files that bench run wrote.")],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="The file to write: .csv, .md, .html with charts, .svg or .png."),
    ] = Path("receipt.html"),
    slo: Annotated[
        list[str] | None,
        typer.Option(
            "--slo", metavar="NAME=MS", help="Objective for goodput, such as ttft=500, itl:p95=50 or e2e=9000; repeatable."
        ),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Write receipts as a table, a page with charts, or charts.

    With objectives, the requests per second that meet all of them are the goodput of a cell.
    """
    from sm120kit.bench import export as exports
    from sm120kit.bench import receipt, saturation
    from sm120kit.core.state import require_new, require_writable, write_atomic

    kind = output.suffix
    if kind not in exports.KINDS:
        raise typer.BadParameter(f"{output}: a file ends in {', '.join(exports.KINDS)}", param_hint="--output")
    require_writable(output)
    require_new(output, "--output", overwrite)
    objectives = saturation.parse_objectives(slo or [])
    named = [(path.stem, receipt.read(path)) for path in receipts]
    write_atomic(output, exports.exported(kind, named, objectives))
    console.info(f"{output}: {sum(len(each.cells) for _, each in named)} cells")


# ---- receipts as tables and as JSON


def render(named: Sequence[tuple[str, Receipt]], *, as_json: bool) -> None:
    """Print receipts as tables, or as JSON: an object, a list for several."""
    if as_json:
        objects = [_object(receipt) for _, receipt in named]
        console.json_data(objects[0] if len(objects) == 1 else objects)
        return
    for name, receipt in named:
        if len(named) > 1:
            console.data(f"{name}:")
        _print(receipt)


def _object(receipt: Receipt) -> dict[str, Any]:
    from sm120kit.bench import figures, saturation

    kept = ("users", "output_tokens", "context_tokens", "restart", "complete", "clocks", "energy")
    return {
        "complete": receipt.complete,
        "circumstances": asdict(receipt.circumstances),
        "knees": saturation.knees(receipt.cells),
        "notes": figures.notes(receipt),
        "cells": [
            {**{name: getattr(cell, name) for name in kept}, **asdict(figures.summary(cell))} for cell in receipt.ordered
        ],
    }


TABLES = (
    ("decode_tok_s", "total_tok_s", "output_tok_s", "acceptance"),
    ("prompt_tokens", "prefill_tok_s", "ttft", "ttft_p95", "ttfa"),
    ("itl_p50", "itl_p99", "tokens", "chunks"),
    ("cache_hits", "joules_per_token"),
)
"""The figures of each printed table, each within 80 columns."""


def _print(receipt: Receipt) -> None:
    from sm120kit.bench import clocks, compare, figures, saturation

    console.data(figures.about(receipt))
    setup = {name: text for name, text in compare.circumstances(receipt).items() if name.startswith(("machine.", "served."))}
    for name, text in setup.items():
        if text != figures.UNKNOWN:
            console.data(f"{name}: {text}")
    if unknown := [name for name, text in setup.items() if text == figures.UNKNOWN]:
        console.data(f"unknown: {compare.briefly(unknown)}")
    for number, names in enumerate(TABLES):
        _table(receipt, names, failed=number == 0)
    for knee in saturation.knees(receipt.cells):
        console.data(knee.text)
    for line in (*clocks.lines(sampled for cell in receipt.cells for sampled in cell.clocks or ()), *figures.notes(receipt)):
        console.data(line)


def _table(receipt: Receipt, names: Sequence[str], *, failed: bool) -> None:
    """Print figures of each cell; not if all are unknown, whose reason is a note."""
    from sm120kit.bench import figures

    restarted = any(cell.restart for cell in receipt.cells)
    summaries = [(cell, figures.summary(cell)) for cell in receipt.ordered]
    if not failed and all(getattr(summary, name) is None for _, summary in summaries for name in names):
        return
    heads = ("users", "output", "context", *["restart"] * restarted, *(figures.COLUMNS[name][0] for name in names))
    rows = [
        (*_key(cell, restarted), *(figures.text(summary, name) for name in names), *[figures.failed(cell)] * failed)
        for cell, summary in summaries
    ]
    console.table((*heads, *["failed"] * failed), rows)


def _key(cell: MeasuredCell, restarted: bool) -> tuple[int, ...]:
    return (*cell.key, *[cell.restart] * restarted)
