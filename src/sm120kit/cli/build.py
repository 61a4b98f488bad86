"""``sm120kit build``: from a recipe to a wheel that proves what it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sm120kit import console
from sm120kit.cli.options import ContextOnly, Jobs, Memory, Mirror, Network, Offline, State

if TYPE_CHECKING:
    from sm120kit.build import Progress
    from sm120kit.records import BuildPlan


def build(
    engine: Annotated[str, typer.Argument(help="An engine, engine@version, recipe name or recipe file; or kernels[@RECIPE].")],
    arch: Annotated[list[str] | None, typer.Option("--arch", help="sm_120f, sm_120a or sm_121a; may be repeated.")] = None,
    kernels: Annotated[
        str | None,
        typer.Option("--kernels", metavar="GROUP", help="A kernel group of the recipe; of kernels: how their names start."),
    ] = None,
    from_source: Annotated[
        bool,
        typer.Option(
            "--from-source", help="Of an engine: also build the modules that its recipe can, see docs/from-source.md."
        ),
    ] = False,
    jobs: Jobs = None,
    memory: Memory = None,
    to: Annotated[
        str | None, typer.Option("--to", metavar="STAGE", help="Stop after fetch, patch, plan, compile or pack, the wheel.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and compile nothing.")] = False,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the wheel is put.")] = Path("wheelhouse"),
    base: Annotated[
        str, typer.Option("--base", metavar="NAME@DIGEST|ID", help="Of an engine: the base of its image, never by a tag alone.")
    ] = "",
    network: Network = "none",
    context_only: ContextOnly = False,
    mirror: Mirror = None,
    offline: Offline = False,
    state: State = None,
    json: Annotated[bool, typer.Option("--json", help="Print the records as JSON.")] = False,
) -> None:
    """Fetch, patch, compile and check FlashInfer for SM12x, and pack it as a wheel; of vLLM and SGLang, make an image with it.

    The image of an engine gets a name when it passes its checks. Needs no GPU.
    """
    import time

    from sm120kit import engines, pipeline, recipe
    from sm120kit.cli.engine import deliver, show_built, show_plan
    from sm120kit.errors import UnknownName
    from sm120kit.image import require_pinned
    from sm120kit.workspace import Workspace

    try:
        stage = pipeline.Stage("plan" if dry_run else to or "pack")
    except ValueError:
        raise UnknownName(f"unknown stage {to!r}", f"stages: {', '.join(pipeline.Stage)}") from None
    options = pipeline.Options(
        Workspace.open(state), mirror, offline, jobs, int(memory * 2**30) if memory is not None else None
    )
    started = time.monotonic()
    archs = [recipe.parse_arch(text) for text in arch or ()]
    whole = None
    item = recipe.load_any(engine) if engine.partition("@")[0] != pipeline.KERNELS else None
    if (base or context_only or network != "none") and (not isinstance(item, recipe.EngineRecipe) or to or dry_run):
        raise typer.BadParameter(
            "--base, --network and --context-only are for an engine's image, which is made without --to and --dry-run; "
            "`sm120kit image` makes one of FlashInfer"
        )
    if base:
        require_pinned(base)
    with _watcher() as watch:
        if isinstance(item, recipe.EngineRecipe):
            if archs:
                raise typer.BadParameter("the recipe of an engine says for which archs its image is")
            whole = engines.build(
                engine, options, group=kernels, from_source=from_source, to=stage, tell=console.say, watch=watch
            )
            built = whole.kernels
        else:
            if from_source:
                raise typer.BadParameter(
                    "--from-source is for engines; FlashInfer and our kernels are always built from source"
                )
            built = pipeline.build(engine, options, archs=archs, group=kernels, to=stage, tell=console.say, watch=watch)
    seconds = time.monotonic() - started
    if built.artifacts is None or built.directory is None:
        if json:
            console.json_data(built.plan or built.tree)
        elif whole is not None and stage is pipeline.Stage.PLAN:
            show_plan(whole, options.workspace)
        elif built.plan is not None and stage is pipeline.Stage.PLAN:
            _show_plan(built.plan)
        else:
            console.say(f"{stage} of {built.name} done in {seconds:.1f} s")
        return
    wheels = [_put(path, output) for path in (whole.wheels if whole else (built.wheel,))]
    if json and (whole is None or to):
        console.json_data(built.artifacts)
        return
    for left in built.artifacts.left_out:
        console.say(f"left out  {left.what}: {left.reason}")
    console.say(f"{'built' if built.ran else 'nothing to do for'} {built.name} in {seconds:.1f} s")
    console.say(f"{len(built.artifacts.modules)} modules packed, {built.artifacts.kernels} kernels found in their device code")
    console.say("unverified on SM120: no kernel was run")
    console.say(f"records and logs: {built.directory}")
    if whole is not None:
        show_built(whole, wheels[0])
    if whole is None or to:
        for wheel in wheels:
            console.data(str(wheel))
    else:
        deliver(whole, options, base, network, context_only=context_only, json=json)


def _put(finished: Path, output: Path) -> Path:
    """A copy of a finished wheel in a directory, unless it is there."""
    from sm120kit.workspace import write_atomic

    wheel = output / finished.name
    if not wheel.is_file() or wheel.stat().st_size != finished.stat().st_size:
        write_atomic(wheel, finished.read_bytes())
    return wheel


def _show_plan(plan: BuildPlan) -> None:
    console.data(f"{plan.recipe} for {' '.join(plan.archs)}: plan {plan.digest}")
    console.data(f"tree {plan.tree}; nvcc {plan.toolchain.nvcc_version}, {plan.toolchain.host_version}\n")
    console.table(
        ("module", "unit", "expected memory", "expected time"),
        (
            (module.name, Path(unit.source).name, f"{unit.estimate_bytes / 2**30:.1f} GiB", f"{unit.estimate_seconds:.0f} s")
            for module in plan.modules
            for unit in module.units
        ),
    )
    console.table(("left out", "reason"), ((left.what, left.reason) for left in plan.left_out))


@contextmanager
def _watcher() -> Iterator[Callable[[Progress], None]]:
    """Shows a compile: a line per finished unit with its cost; on a terminal also what runs now, time left and memory."""
    from sm120kit.memory import available, resident

    seen = 0
    with console.status() as show:

        def watch(progress: Progress) -> None:
            nonlocal seen
            for event in progress.finished[seen:]:
                seen += 1
                cost = f"{event.seconds:.0f} s, {event.peak_bytes / 2**30:.1f} GiB"
                console.say(f"[{seen}/{len(progress.units)}] {Path(event.output).name}: {cost}; {_left(progress)}")
            held = sum(resident(run.pid) for run in progress.running) / 2**30
            names = ", ".join(Path(run.output).name for run in progress.running)
            memory = f"{held:.1f} GiB held, {available() / 2**30:.1f} GiB available"
            show(f"{_left(progress)}; {memory}; compiling {names or 'nothing'}")

        yield watch


def _left(progress: Progress) -> str:
    """Time left, from what units cost when they were last compiled or are said to cost, at the present parallelism."""
    finished = {event.output for event in progress.finished}
    seconds = sum(unit.estimate_seconds for unit in progress.units if unit.output not in finished)
    return f"about {seconds / max(1, len(progress.running)) / 60:.1f} min left"
