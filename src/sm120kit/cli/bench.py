"""``sm120kit bench``: measure a server, look at receipts, compare them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sm120kit import console
from sm120kit.cli import receipts
from sm120kit.cli.options import Json, State, named_values

if TYPE_CHECKING:
    from sm120kit.bench.receipt import Measured, Receipt, Summary
    from sm120kit.bench.workload import Cell

app = typer.Typer(help="Measure a server and keep receipts.", no_args_is_help=True, rich_markup_mode=None)
app.command("show")(receipts.show)
app.command("compare")(receipts.compare)


@app.command("run")
def run_(
    target: Annotated[
        str, typer.Argument(metavar="CONFIG|URL", help="A configuration to launch, or the root of an OpenAI-compatible server.")
    ],
    workload: Annotated[str, typer.Option("--workload", "-w", help="A workload by name, or a .toml file.")] = "quick",
    quick: Annotated[
        bool, typer.Option("--quick", help="A smoke run: the workload's smallest cell, one request per user.")
    ] = False,
    model: Annotated[str, typer.Option("--model", help="With URL; default: the only one that the server offers.")] = "",
    record: Annotated[
        Path | None, typer.Option("--run", metavar="FILE", help="With URL: the record that launch keeps of this server.")
    ] = None,
    given: Annotated[
        list[str] | None,
        typer.Option("--given", metavar="NAME=VALUE", help="A circumstance that cannot be seen from here, such as gpu=..."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Shuffles the order of the cells.")] = 0,
    output: Annotated[Path, typer.Option("--output", "-o", help="The receipt; written anew after each cell.")] = Path(
        "receipt.json"
    ),
    plot: receipts.Plot = "",
    restarts: Annotated[
        int, typer.Option("--restarts", min=0, help="With CONFIG: restart the server so often, and measure it all again.")
    ] = 0,
    checkpoint: Annotated[Path | None, typer.Option("--checkpoint", metavar="DIR", help="With CONFIG: its model.")] = None,
    image: Annotated[
        str,
        typer.Option("--image", metavar="IMAGE", help="With CONFIG: a verified image; default: the index's."),
    ] = "",
    index: Annotated[Path, typer.Option("--index", metavar="FILE", help="With CONFIG: the list of published images.")] = Path(
        "images.json"
    ),
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="With CONFIG: the port on 127.0.0.1.")] = 8000,
    wait: Annotated[
        int, typer.Option("--wait", metavar="SECONDS", help="With CONFIG: how long it may take to become healthy.")
    ] = 1800,
    json: Json = False,
    state: State = None,
) -> None:
    """Measure every cell of a workload, over HTTP, and write a receipt with every sample. Exit code 1 if a request failed."""
    from sm120kit import bench
    from sm120kit.bench import circumstances, receipt
    from sm120kit.bench import workload as workloads
    from sm120kit.errors import NothingMeasured
    from sm120kit.recipe import configuration

    launched = "://" not in target
    if launched:
        configuration.load(target)
        if checkpoint is None:
            raise typer.BadParameter(
                f"{target!r} is no URL (http://...), and a configuration needs its model's folder",
                param_hint="--checkpoint",
            )
    if launched and (model or record):
        raise typer.BadParameter("is for a server that runs already", param_hint="--model" if model else "--run")
    if not launched and restarts:
        raise typer.BadParameter("only a server that is launched here can be restarted: name a CONFIG", param_hint="--restarts")
    said = named_values(given or [], "--given")
    asked = workloads.load(workload)
    if quick:
        asked = workloads.quick(asked)
    receipt.require_writable(output)
    receipts.require_plot(plot)
    total = len(workloads.cells(asked.workload, seed)) * (restarts + 1)
    shown = 0

    def keep(made: Receipt) -> None:
        nonlocal shown
        receipt.write(output, made)
        for cell in made.cells[shown:]:
            shown += 1
            console.say(f"[{shown}/{total}] {_line(cell, receipt.summary(cell))}")

    with console.progress() as progress:

        def cell_begins(cell: workloads.Cell, requests: int) -> bench.Finished:
            name = f"{_users(cell)}, {cell.output_tokens} tokens"
            task = progress.add_task(name, total=requests or None)
            return lambda: progress.update(task, advance=1, visible=not progress.tasks[task].finished)

        if launched:
            from sm120kit import launching, measuring
            from sm120kit.workspace import Workspace

            assert checkpoint is not None
            workspace = Workspace.open(state)
            prepared = launching.prepare(target, checkpoint, image, index, port, Path("/"), workspace)
            made = measuring.run(
                prepared,
                index,
                workspace,
                asked,
                restarts=restarts,
                seed=seed,
                given=said,
                keep=keep,
                cell_begins=cell_begins,
                wait_seconds=wait,
                tell=console.say,
                progress=lambda seconds, line: None,
            )
        else:
            root = target.rstrip("/").removesuffix("/v1")
            chosen = bench.choose_model(root, model or None)
            served = circumstances.recorded(record, root) if record else None
            made = bench.run(root, chosen, asked, seed=seed, given=said, keep=keep, cell_begins=cell_begins, served=served)
    failed = [sample for cell in made.cells for sample in cell.samples if sample.error]
    if all(sample.error for cell in made.cells for sample in cell.samples):
        raise NothingMeasured(f"every request failed; the first: {failed[0].error}", f"all of them: {output}")
    receipts.render([(output.stem, made)], as_json=json)
    receipts.draw(plot, [(output.stem, made)])
    console.say(f"receipt: {output}")
    if failed:
        raise typer.Exit(1)


def _users(cell: Cell | Measured) -> str:
    return f"{cell.users} user{'s' * (cell.users > 1)}"


def _line(cell: Measured, figures: Summary) -> str:
    rate = "rate unknown" if figures.decode_tok_s is None else f"{figures.decode_tok_s:.1f} tok/s per user"
    failed = f", {figures.errors} of {figures.requests} requests failed" if figures.errors else ""
    partial = "" if cell.complete else ", interrupted"
    return f"{_users(cell)}, {cell.output_tokens} tokens after {cell.context_tokens}: {rate}{failed}{partial}"


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
