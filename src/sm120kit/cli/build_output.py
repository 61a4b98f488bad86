"""Run ``sm120kit build``: print what is planned and built, and build and check the image of an engine."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import typer

from sm120kit import engines
from sm120kit.cli.build import BuildOptions, KernelOptions, watcher
from sm120kit.cli.image import show_report
from sm120kit.core import console
from sm120kit.core.atomic_writes import write_atomic
from sm120kit.core.disk import require_output_directory
from sm120kit.core.errors import Sm120kitError
from sm120kit.core.records import Stage
from sm120kit.images import checks, delivery
from sm120kit.patches.local import read_local
from sm120kit.recipes import EngineRecipe, configurations
from sm120kit.recipes.target import resolve, with_local
from sm120kit.sources import known_sizes
from sm120kit.sources.run_options import Options
from sm120kit.sources.source_records import LockedWheel
from sm120kit.wheels import pipeline
from sm120kit.wheels.build_records import BuildPlan, Module, RepackedWheel, WheelBuild
from sm120kit.wheels.compile import DISK_PER_UNIT
from sm120kit.wheels.image_wheels import EngineBuild
from sm120kit.wheels.pack import local_version


def run(
    engine: str, kernels: KernelOptions, steps: BuildOptions, base: str, options: Options
) -> tuple[str, Sequence[Path], Sequence[Path]] | None:
    """Build what a command names and print it. Of a checked image returns what recognizes the same build."""
    request = kernels.request(from_source=steps.from_source, stage=Stage.PLAN if steps.dry_run else steps.to or Stage.PACK)
    target, local = resolve(engine, options), read_local(steps.patch or (), options.origin)
    target = with_local(target, local) if local else target
    delivered = target.engine if not steps.to and not steps.dry_run else None
    _require_applicable(kernels, steps, base, engine=target.engine is not None, delivers=delivered is not None)
    pipeline.require_machine(target, request)
    if request.stage is Stage.PACK:
        require_output_directory(steps.output)
    if delivered:
        base = delivery.complete(base, delivered.recipe)
        base = delivery.prepare(base, delivered.recipe, delivered.closure, options)
    started = time.monotonic()
    with watcher() as watch:
        wheel, built = pipeline.build(target, request, watch)
    seconds = time.monotonic() - started
    if wheel.artifacts is None:
        show_stage(wheel, built, request.stage, seconds, options, json=steps.json)
        return None
    image = delivered is not None and bool(local)  # has the only use of this wheel, a third of a gigabyte for each change
    wheels = built.wheels if built else wheel.wheels
    paths = [*wheels] if image else [_copy(path, steps.output) for path in wheels]
    if steps.json and not delivered:
        console.json_data(wheel.artifacts)
        return None
    show_wheels(wheel, built, paths, seconds)
    if delivered and built:
        return deliver(built, base, options, json=steps.json)
    for path in paths:
        console.data(str(path))
    return None


def _require_applicable(kernels: KernelOptions, steps: BuildOptions, base: str, *, engine: bool, delivers: bool) -> None:
    """Refuse options that do not apply to the target.

    Raises:
        typer.BadParameter: with the first of them.
    """
    if base and not delivers:
        raise typer.BadParameter("--base is for an engine's image, which is built without --to and --dry-run")
    if engine and kernels.arch:
        raise typer.BadParameter("the recipe of an engine lists the archs of its image")
    if steps.from_source and not engine:
        raise typer.BadParameter("--from-source is for engines; FlashInfer is always built from source")


def _copy(wheel: Path, directory: Path) -> Path:
    """Copy a finished wheel to a directory, unless its copy, with its size and time, is there already."""
    copy, status = directory / wheel.name, wheel.stat()
    if not copy.is_file() or (copy.stat().st_size, copy.stat().st_mtime_ns) != (status.st_size, status.st_mtime_ns):
        write_atomic(copy, wheel.read_bytes())
        os.utime(copy, ns=(status.st_mtime_ns, status.st_mtime_ns))
    return copy


def show_stage(
    wheel: WheelBuild, engine: EngineBuild | None, stage: Stage, seconds: float, options: Options, *, json: bool
) -> None:
    """Print the result of a build that stopped before the wheel: its plan, if that is the stage."""
    if json:
        console.json_data(wheel.plan or wheel.tree)
    elif engine is not None and stage is Stage.PLAN:
        _show_engine_plan(engine, options)
    elif wheel.plan is not None and stage is Stage.PLAN:
        _show_wheel_plan(wheel.plan)
    else:
        console.info(f"{stage} of {wheel.name} done in {seconds:.1f} s")


def _show_wheel_plan(plan: BuildPlan) -> None:
    console.data(f"{plan.recipe} for {' '.join(plan.archs)}: plan {plan.digest}")
    console.data(f"tree {plan.tree}; nvcc {plan.toolchain.nvcc_version}, {plan.toolchain.host_version}\n")
    _show_units(plan.modules)
    console.data(f"{_cost(plan)}\n")
    console.table(("left out", "reason"), ((entry.what, entry.reason) for entry in plan.left_out))


def _cost(plan: BuildPlan) -> str:
    """The number of units, and the time, memory and disk that they take."""
    units = [unit for module in plan.modules for unit in module.units]
    return (
        f"{len(plan.modules)} modules, {len(units)} units, "
        f"about {sum(unit.estimate_seconds for unit in units) / 60:.0f} CPU-minutes, "
        f"at most {max((unit.estimate_bytes for unit in units), default=0) / 2**30:.1f} GiB of memory for one unit, "
        f"{DISK_PER_UNIT * len(units) / 1e9:.1f} GB of disk"
    )


def _show_units(modules: Sequence[Module], *, full_path: bool = False) -> None:
    console.table(
        ("module", "unit", "expected memory", "expected time"),
        (
            (
                module.name,
                unit.source if full_path else Path(unit.source).name,
                f"{unit.estimate_bytes / 2**30:.1f} GiB",
                f"{unit.estimate_seconds:.0f} s",
            )
            for module in modules
            for unit in module.units
        ),
    )


def with_size(wheels: Sequence[LockedWheel], sizes: Mapping[LockedWheel, int]) -> str:
    """How many wheels, their size in GB, and of how many it is not in ``sizes`` (bytes)."""
    known = [sizes[wheel] for wheel in wheels if wheel in sizes]
    unknown = f"{len(wheels) - len(known)} of unknown size" if len(known) < len(wheels) else ""
    size = f"{sum(known) / 1e9:.2f} GB" if known or not wheels else ""
    return ", ".join(filter(None, (f"{len(wheels)} wheels", size, unknown)))


def _show_engine_plan(build: EngineBuild, options: Options) -> None:
    """The wheels of the image in numbers, the patches, and the reason for each upstream part; the lockfile has the rest."""
    recipe, closure, plan = build.recipe, build.closure, build.flashinfer.plan
    console.data(f"{recipe.name} ({recipe.state}): build id {build.build_id}")
    console.data(f"Python {closure.python} on {closure.platform}; base image {build.lock.base_image}")
    console.data(f"uses {build.lock.rests_on}\n")
    workspace = options.workspace
    sizes = known_sizes(closure.wheels, workspace)
    absent = [wheel for wheel in closure.wheels if not (workspace.downloads / wheel.sha256 / wheel.filename).is_file()]
    console.data(f"{with_size(closure.wheels, sizes)}; to fetch: {with_size(absent, sizes)}\n")
    console.table(("built here", "reason"), ((part.what, part.reason) for part in recipe.built))
    console.table(("upstream wheel", "reason"), ((part.what, part.reason) for part in recipe.upstream))
    console.table(
        ("source", "version", "tree", "patched tree"),
        ((source.project, source.version, source.tree, source.patched_tree) for source in build.lock.sources),
    )
    console.table(("patch", "sha256"), ((patch.path, patch.sha256) for patch in build.lock.patches))
    if build.local:
        console.table(("local patch", "sha256"), ((f"{patch.project}/{patch.slug}", patch.sha256) for patch in build.local))
    if plan is not None:
        console.data(f"FlashInfer plan {plan.digest}: {_cost(plan)}")
        console.table(("left out", "reason"), ((entry.what, entry.reason) for entry in plan.left_out))
    for repacked in build.repacked:
        _show_repacked_wheel(repacked, recipe)
    console.data("unverified on SM120: no kernel was run")


def _show_repacked_wheel(wheel: RepackedWheel, recipe: EngineRecipe) -> None:
    """The replaced files of a wheel that is packed again, the modules that are built from source, and what these require."""
    plan = wheel.plan
    version = local_version(plan.version, plan.digest)
    console.data(f"\n{plan.engine} {version}: the upstream wheel packed again, tree {plan.tree}")
    console.table(
        ("replaced in it", "patch"),
        (
            (path, ", ".join(f"{patch.project}/{patch.slug}" for patch in patches) or "the recipe's commit")
            for path, patches in wheel.patched_members.items()
        ),
    )
    if plan.modules:
        console.data(f"from source for {' '.join(plan.archs)}:")
        _show_units(plan.modules, full_path=True)
        injected = recipe.from_source.injected.values() if recipe.from_source else ()
        required = ((entry.source, entry.git or recipe.flashinfer, entry.reason) for entry in injected if entry.project)
        console.table(("required project", "from", "reason"), required)
        if plan.left_out:
            console.table(("stand-in for", "reason"), ((entry.what, entry.reason) for entry in plan.left_out))


def show_wheels(wheel: WheelBuild, engine: EngineBuild | None, paths: Sequence[Path], seconds: float) -> None:
    """Print what was built, and a line if it was there; ``paths`` are the copies of the wheels."""
    assert wheel.artifacts is not None
    if wheel.ran:
        packed = f"{len(wheel.artifacts.modules)} modules with {wheel.artifacts.kernels} kernels"
        console.info(
            f"built {wheel.name} in {seconds:.1f} s: {packed}, {len(wheel.artifacts.left_out)} left out, see --dry-run"
        )
        console.info(f"records and logs: {wheel.directory}")
    elif not engine:
        console.info(f"nothing to do for {wheel.name}; records and logs: {wheel.directory}")
    if not engine:
        return
    for patch in engine.local:
        console.info(f"local patch {patch.project}/{patch.slug}: sha256 {patch.sha256[:12]}")
    if wheel.ran:
        console.info(f"{paths[0].name} replaces the upstream FlashInfer beside {len(engine.closure.wheels)} locked wheels")
    for own in (each for each in engine.repacked if each.ran):
        console.info(f"built {own.wheel.name}, which replaces the upstream {own.plan.engine} {own.plan.version}")
        console.info(f"records and logs: {own.directory}")


def deliver(
    build: EngineBuild, base: str, options: Options, *, json: bool
) -> tuple[str, Sequence[Path], Sequence[Path]] | None:
    """Build the image of an engine, run its checks, and print the result. Exit code 1 if a check fails.

    Returns name, records and wheels for :func:`sm120kit.images.repeated_builds.remember`. Of an engine of another
    distribution, whose code and checks may change without sm120kit, None.
    """
    started, workspace = time.monotonic(), options.workspace
    result = delivery.engine_image(build, base, options)
    if result.ran:
        console.info(f"built {result.context.reference} in {time.monotonic() - started:.1f} s: {result.image.id}")
    record = checks.record_path(workspace, result.image)
    before = record.stat().st_mtime_ns if record.is_file() else 0
    report = checks.verify_once(result.image, workspace)
    checked = report.verified is None or record.stat().st_mtime_ns != before
    if not (result.ran or checked or json):
        console.info(f"nothing to do for {result.context.reference}: the image and its checks are there")
        console.data(result.context.reference)
    else:
        show_report(report, json=json, whole=console.verbose)
        if not json:
            _show_next(build.recipe.name)
    if report.verified is None or engines.of_recipe(build.recipe.engine) not in engines.BUILT_IN:
        return None
    records = (record, workspace.root / "images" / result.context.digest / "image.json")
    return report.verified.reference, records, tuple(build.wheels)


def _show_next(recipe: str) -> None:
    """Print the command that serves a model from the image of a recipe."""
    for name in configurations.names():
        with suppress(Sm120kitError):  # a file of the user, which says nothing of the image
            if configurations.load(name).engine == recipe:
                console.info(f"next: sm120kit serve {name}; `sm120kit config list` lists the others")
                return
