"""``sm120kit bench``: measure a server, look at receipts, compare them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sm120kit import console
from sm120kit.cli.options import Json

if TYPE_CHECKING:
    from sm120kit.bench.receipt import Measured, Receipt, Summary

app = typer.Typer(help="Measure a server and keep receipts.", no_args_is_help=True, rich_markup_mode=None)

Output = Annotated[Path, typer.Option("--output", "-o", help="The receipt; written anew after each cell.")]


@app.command("run")
def run_(
    url: Annotated[str, typer.Argument(metavar="URL", help="The root of an OpenAI-compatible server.")],
    workload: Annotated[str, typer.Option("--workload", "-w", help="A workload by name, or a .toml file.")] = "quick",
    model: Annotated[str | None, typer.Option("--model", help="Default: the only one that the server offers.")] = None,
    given: Annotated[
        list[str] | None,
        typer.Option("--given", metavar="NAME=VALUE", help="A circumstance that cannot be seen from here, such as gpu=..."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Shuffles the order of the cells.")] = 0,
    output: Output = Path("receipt.json"),
    json: Json = False,
) -> None:
    """Measure every cell of a workload, over HTTP, and write a receipt with every sample. Exit code 1 if a request failed."""
    import re

    from sm120kit import bench
    from sm120kit.bench import receipt
    from sm120kit.bench import workload as workloads
    from sm120kit.errors import NothingMeasured

    circumstances = {}
    for text in given or ():
        if not re.fullmatch(r"[a-z][a-z0-9_.-]*=.+", text):
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--given")
        name, _, value = text.partition("=")
        circumstances[name] = value
    asked = workloads.load(workload)
    root = url.rstrip("/").removesuffix("/v1")
    chosen = bench.choose_model(root, model)
    total = len(workloads.cells(asked.workload, seed))
    receipt.require_writable(output)
    shown = 0

    def keep(made: Receipt) -> None:
        nonlocal shown
        receipt.write(output, made)
        for cell in made.cells[shown:]:
            shown += 1
            console.say(f"[{shown}/{total}] {_line(cell, receipt.summary(cell))}")

    with console.progress() as progress:

        def cell_begins(cell: workloads.Cell, requests: int) -> bench.Finished:
            name = f"{cell.users} users, {cell.output_tokens} tokens"
            task = progress.add_task(name, total=requests)
            return lambda: progress.update(task, advance=1, visible=not progress.tasks[task].finished)

        made = bench.run(root, chosen, asked, seed=seed, given=circumstances, keep=keep, cell_begins=cell_begins)
    failed = [sample for cell in made.cells for sample in cell.samples if sample.error]
    if all(sample.error for cell in made.cells for sample in cell.samples):
        raise NothingMeasured(f"every request failed; the first: {failed[0].error}", f"all of them: {output}")
    _show(made, as_json=json)
    console.say(f"receipt: {output}")
    if failed:
        raise typer.Exit(1)


@app.command()
def show(
    receipt: Annotated[Path, typer.Argument(metavar="RECEIPT", help="A file that bench run wrote.")], json: Json = False
) -> None:
    """The figures of a receipt, computed from its samples."""
    from sm120kit.bench import receipt as receipts

    _show(receipts.read(receipt), as_json=json)


@app.command()
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
    from sm120kit.bench import receipt as receipts

    differ, found = comparison.compare(
        receipts.read(before), receipts.read(after), [name.strip() for name in ignore.split(",") if name.strip()]
    )
    if json:
        console.json_data({"circumstances": differ, "cells": [asdict(one) for one in found]})
        return
    for name, (was, now) in differ.items():
        console.data(f"{name}: {was} / {now}")
    console.table(
        ("users", "output", "context", "before tok/s", "after tok/s", "ratio", "more than the spread"),
        (
            (
                one.users,
                one.output_tokens,
                one.context_tokens,
                _range(one.before),
                _range(one.after),
                "" if one.ratio is None else f"{one.ratio:.3f}",
                {None: "unknown", True: "yes", False: "no"}[one.beyond_spread],
            )
            for one in found
        ),
    )


@app.command()
def workloads(json: Json = False) -> None:
    """The workloads that come with sm120kit."""
    from sm120kit.bench import workload

    found = [workload.load(name) for name in workload.names()]
    if json:
        console.json_data([{"name": one.name, "sha256": one.sha256, **one.workload.model_dump()} for one in found])
        return
    console.table(
        ("workload", "cells", "what"), ((one.name, len(workload.cells(one.workload, 0)), one.workload.summary) for one in found)
    )


def _show(made: Receipt, *, as_json: bool) -> None:
    from dataclasses import asdict

    from sm120kit.bench.receipt import summary

    found = sorted(
        ((cell, summary(cell)) for cell in made.cells),
        key=lambda one: (one[0].users, one[0].output_tokens, one[0].context_tokens),
    )
    if as_json:
        console.json_data(
            {
                "complete": made.complete,
                "circumstances": asdict(made.circumstances),
                "cells": [
                    {
                        "users": cell.users,
                        "output_tokens": cell.output_tokens,
                        "context_tokens": cell.context_tokens,
                        **asdict(s),
                    }
                    for cell, s in found
                ],
            }
        )
        return
    about = made.circumstances
    console.data(f"{about.model} at {about.url}; {about.workload}, thinking {about.thinking}; {made.started_utc}")
    if not made.complete:
        console.data("partial: the run was interrupted")
    console.table(
        (
            "users",
            "output",
            "context",
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
        ),
        (
            (
                cell.users,
                cell.output_tokens,
                cell.context_tokens,
                _range(None if s.decode_tok_s is None else (s.decode_tok_s, s.decode_lowest or 0, s.decode_highest or 0)),
                _number(s.total_tok_s),
                _ms(s.ttft),
                _ms(s.ttfa),
                _ms(s.itl_p50),
                _ms(s.itl_p99),
                "unknown" if s.acceptance is None else f"{s.acceptance:.1%}",
                "unknown" if s.tokens is None else s.tokens,
                s.chunks,
                s.errors,
            )
            for cell, s in found
        ),
    )
    errors = sorted({sample.error for cell in made.cells for sample in cell.samples if sample.error})
    for error in errors:
        console.data(f"error: {error}")


def _line(cell: Measured, figures: Summary) -> str:
    rate = "rate unknown" if figures.decode_tok_s is None else f"{figures.decode_tok_s:.1f} tok/s per user"
    failed = f", {figures.errors} of {figures.requests} requests failed" if figures.errors else ""
    return f"{cell.users} users, {cell.output_tokens} tokens after {cell.context_tokens}: {rate}{failed}"


def _range(figures: tuple[float, float, float] | None) -> str:
    return "unknown" if figures is None else f"{figures[0]:.1f} ({figures[1]:.1f}-{figures[2]:.1f})"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f}"


def _ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1000:.1f} ms"


@app.command("import")
def import_(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Result files that others published.")],
    json: Json = False,
) -> None:
    """What published result files are worth: each cell, or why it is no measurement. Exit code 1 when none is one."""
    from dataclasses import asdict

    from sm120kit.bench import published

    found = published.read(files)
    if json:
        console.json_data([asdict(figure) for figure in found])
    else:
        console.table(
            ("file", "model", "what", "users", "context", "tok/s", "accepted", "verdict"),
            (
                (
                    figure.file,
                    figure.model or "unknown",
                    figure.what,
                    figure.users,
                    figure.context_tokens,
                    f"{figure.tok_s:.1f}" + (f" ± {figure.spread:.1f}" if figure.spread is not None else ""),
                    "unknown" if figure.acceptance is None else f"{figure.acceptance:.1%}",
                    f"refused: {figure.refused}" if figure.refused else "a measurement",
                )
                for figure in found
            ),
        )
        for note in sorted({note for figure in found for note in figure.notes}):
            console.data(f"note: {note}")
        usable = sum(not figure.refused for figure in found)
        console.data(f"{usable} of {len(found)} cells are measurements; none says under which circumstances")
    if all(figure.refused for figure in found):
        raise typer.Exit(1)
