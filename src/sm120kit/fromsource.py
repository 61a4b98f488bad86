"""An engine's official wheel, packed again: with the files of its own package that its series changes, which needs no compiler,
and with `--from-source` also with extension modules that are built from its own source for SM12x alone.

Source and patches, the projects that it asks for, the compiler and the libraries all come from the engine's lock. The build
itself runs without a network where the system lets it, and is refused when it fetched something.
"""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from sm120kit import build as builder
from sm120kit import locking, patches, recipe, sources, toolchain
from sm120kit import plan as plans
from sm120kit.errors import BadRecipe, UnknownName
from sm120kit.gitrepo import Repository
from sm120kit.memory import Costs
from sm120kit.records import AppliedPatch, Artifacts, BuildPlan, Lock, LockedWheel, PatchedTree, Toolchain
from sm120kit.trees import Options, patched, patched_tree
from sm120kit.workspace import read_record, require_disk

NVCC = "nvidia-cuda-nvcc"


@dataclass(frozen=True)
class Decided:
    """What will be built: the patched source of the engine and of the FlashInfer it rests on, the plan, and the wheels.

    ``official`` is the wheel that is packed again, ``environment`` are those that it is built with; ``versions`` are of what
    else it is built with, ``python`` runs the locked wheels.
    """

    item: recipe.EngineRecipe
    tree: PatchedTree
    flashinfer: PatchedTree
    plan: BuildPlan
    official: LockedWheel
    environment: tuple[LockedWheel, ...]
    versions: dict[str, str]
    python: Path


@dataclass(frozen=True)
class Built:
    """A plan, and its artifacts when it came to a wheel; ``ran`` is false when that was there before.

    ``overlaid`` are the files of the engine's own package that are replaced, and the patches that change each.
    """

    plan: BuildPlan
    overlaid: Mapping[str, tuple[AppliedPatch, ...]]
    artifacts: Artifacts | None = None
    directory: Path | None = None
    ran: bool = False

    @property
    def wheel(self) -> Path:
        """The finished wheel of a build that came so far."""
        assert self.directory is not None and self.artifacts is not None
        return self.directory / self.artifacts.wheel.path


def source(item: recipe.EngineRecipe, options: Options) -> PatchedTree:
    """Fetch an engine's own source and apply its series.

    Raises:
        UnknownName: nothing of the engine can be built from source.
    """
    if item.source is None:
        raise UnknownName(
            f"{item.name} has nothing that can be built from source",
            f"its recipe says what stays official and why; engines with a part that can: {', '.join(_capable()) or 'none'}",
        )
    return patched(item.source, (), options)


def _capable() -> list[str]:
    return [name for name in recipe.names(recipe.EngineRecipe) if recipe.load_engine(name).from_source]


def decide(item: recipe.EngineRecipe, held: Lock, options: Options) -> Decided:
    """Plan the build of an engine's extensions from its lock.

    Raises:
        UnknownName: nothing of the engine can be built from source.
        BadRecipe: the lock has no wheel of a name that the recipe says the build needs, or another CUTLASS is asked for.
        ToolchainMissing: no host compiler, no cmake, or no Python for which the locked wheels are.
    """
    tree = source(item, options)
    kernels = locking.kernels_of(item)
    flashinfer = patched_tree(kernels, options)
    repository = Repository(flashinfer.checkout.repository)
    carried = {one.project: (one.version, repository.subtree(flashinfer.commit, one.path)) for one in flashinfer.inside}
    assert item.from_source is not None
    wheels = _wheels(item, held)
    absent = [name for name in item.from_source.environment if name not in wheels]
    if absent or NVCC not in item.from_source.environment:
        raise BadRecipe(
            f"{item.name}: the build environment "
            + (f"names {', '.join(absent)}, of which the lock has no wheel" if absent else f"has no compiler: no {NVCC}"),
            "correct from_source.environment; `sm120kit recipe requirements` lists the locked wheels",
        )
    environment = tuple(wheels[name] for name in sorted(item.from_source.environment))
    python, python_version = builder.find_python(item.environment.python)
    builder.cmake_program()
    versions = {name: importlib.metadata.version(name) for name in ("cmake", "ninja")} | {"python": python_version}
    host, host_version = toolchain.host_compiler()
    compiler = wheels[NVCC].version
    tools = Toolchain(builder.cuda_home_of(compiler), compiler, host, host_version)
    costs = Costs(options.workspace.cache / "costs.json")
    official = wheels[item.engine]
    decided = plans.extensions(item, tree, carried, official, environment, tools, versions, costs.of)
    return Decided(item, tree, flashinfer, decided, official, environment, versions, python)


def _wheels(item: recipe.EngineRecipe, held: Lock) -> dict[str, LockedWheel]:
    """The locked wheels of the platform for which an engine is built, by name."""
    platform = item.environment.platforms[0]
    return {wheel.name: wheel for closure in held.closures if closure.platform == platform for wheel in closure.wheels}


def overlay(
    item: recipe.EngineRecipe,
    held: Lock,
    options: Options,
    *,
    pack: bool = True,
    tell: Callable[[str], None] = lambda message: None,
) -> Built | None:
    """An engine's official wheel with patched files in its own package; None when its series changes none of these.

    Without ``pack``, it is planned and no wheel is looked at.

    Raises:
        PatchConflict: a patch was not made for this wheel.
        FetchFailed, HashMismatch, OfflineMiss: the official wheel could not be had.
    """
    if item.source is None:
        return None
    tree, workspace = patched(item.source, (), options), options.workspace
    overlaid = builder.overlaid(item.engine, tree)
    if not overlaid:
        return None
    official = _wheels(item, held)[item.engine]
    plan = plans.overlay(item, tree, official, overlaid)
    if not pack:
        return Built(plan, overlaid)
    target = workspace.build(item.engine, plan.digest)
    place = f"{item.name}-overlay-{plan.digest[:12]}"
    with workspace.locked(place):
        if (target / "artifacts.json").is_file():
            return Built(plan, overlaid, read_record(Artifacts, target / "artifacts.json"), target)
        (path,) = sources.wheelhouse((official,), workspace, mirror=options.mirror, offline=options.offline)
        tell(f"packing {path.name} again, with {', '.join(overlaid)} patched")
        work = workspace.work(place)
        places = builder.lay(item.engine, tree, path, work)
        artifacts = builder.finish_overlay(plan, tree, (official, path), places, target)
        shutil.rmtree(work)
    return Built(plan, overlaid, artifacts, target, ran=True)


def build(
    decided: Decided,
    options: Options,
    *,
    pack: bool = True,
    tell: Callable[[str], None] = lambda message: None,
    watch: Callable[[builder.Progress], None] = lambda progress: None,
) -> Built:
    """Build what was decided; without ``pack``, stop when the modules are compiled and checked.

    An interrupted build goes on where it was. When the wheel is there, the work directory with its environment goes.

    Raises:
        FetchFailed, HashMismatch, OfflineMiss: a locked wheel could not be had.
        PatchConflict: a patch of the engine's own package was not made for the official wheel.
        CommandFailed, ExpectationFailed, NotEnoughMemory, NotEnoughDisk, CompileFailed, ToolchainMissing: the build failed.
    """
    plan, item, workspace = decided.plan, decided.item, options.workspace
    overlaid = builder.overlaid(item.engine, decided.tree)
    target = workspace.build(item.engine, plan.digest)
    place = f"{item.name}-from-source-{plan.digest[:12]}"
    work = workspace.work(place)
    with workspace.locked(place):
        if (target / "artifacts.json").is_file():
            return Built(plan, overlaid, read_record(Artifacts, target / "artifacts.json"), target)
        wheels = (*decided.environment, decided.official)
        *environment, official = sources.wheelhouse(wheels, workspace, mirror=options.mirror, offline=options.offline)
        places = builder.lay(item.engine, decided.tree, official, work / "overlay")
        site = builder.Site(work, decided.python, builder.isolation())
        if not site.environment.is_dir():
            size = sum(wheel.stat().st_size for wheel in environment)
            require_disk(work, 3 * size, f"a build environment of {len(environment)} wheels")
            tell(f"unpacking {len(environment)} wheels, {size / 1e9:.1f} GB packed, as the build environment")
            builder.install(environment, decided.python, site.environment)
        patches.materialise(decided.tree, work / builder.SOURCE)
        _put_carried(decided, work)
        tell(
            "building without a network"
            if site.isolation
            else "this system lets nobody build without a network: what the build fetches is found only afterwards"
        )
        assert item.from_source is not None
        means = builder.Means(Costs(workspace.cache / "costs.json"), options.jobs, options.memory_bytes, watch)
        builder.compile_extensions(plan, item.from_source, site, means)
        tell("checking the modules")
        if not pack:
            builder.check_extensions(plan, item, official, site)
            return Built(plan, overlaid, ran=True)
        artifacts = builder.finish_extensions(
            plan, item, decided.tree, (decided.official, official), decided.versions, places, site, target
        )
        shutil.rmtree(work)
    return Built(plan, overlaid, artifacts, target, ran=True)


def _put_carried(decided: Decided, work: Path) -> None:
    """The patched projects that the engine asks for, from the FlashInfer that it rests on."""
    table, flashinfer = decided.item.from_source, decided.flashinfer
    assert table is not None
    paths = {one.project: one.path for one in flashinfer.inside}
    for project in {filled.project for filled in table.injected.values() if filled.project}:
        tree = Repository(flashinfer.checkout.repository).subtree(flashinfer.commit, paths[project])
        patches.materialise(replace(flashinfer, tree=tree), work / project)
