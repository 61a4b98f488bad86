"""The stages in order. A stage whose record is there is not run again; a build stops after the stage it is asked to stop at."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from sm120kit import build as builder
from sm120kit import locking, patches, plan, recipe, sources, toolchain
from sm120kit.errors import UnknownName
from sm120kit.memory import Costs
from sm120kit.records import (
    Arch,
    Artifacts,
    BuildPlan,
    Generated,
    PatchedTree,
    Toolchain,
)
from sm120kit.tiling import exported, table
from sm120kit.trees import Options, patched_tree
from sm120kit.workspace import Workspace, digest_of, read_record, write_record

__all__ = ["KERNELS", "Built", "Options", "Stage", "build", "patched_tree"]

KERNELS = "kernels"
"""The name under which our own kernels are built, where others are those of recipes."""


class Stage(StrEnum):
    """Where a build can stop."""

    FETCH = "fetch"
    PATCH = "patch"
    PLAN = "plan"
    COMPILE = "compile"
    PACK = "pack"


@dataclass(frozen=True)
class Built:
    """What a build came to: the records of the stages that it reached."""

    recipe: recipe.Recipe
    tree: PatchedTree | None = None
    plan: BuildPlan | None = None
    artifacts: Artifacts | None = None
    directory: Path | None = None
    ran: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As the plan calls it, or before there is one, the recipe."""
        return self.plan.recipe if self.plan else self.recipe.name

    @property
    def wheel(self) -> Path:
        """The finished wheel, of a build that reached the last stage."""
        assert self.artifacts is not None and self.directory is not None
        return self.directory / self.artifacts.wheel.path


@dataclass(frozen=True)
class _GeneratedRecord:
    modules: tuple[Generated, ...]
    versions: dict[str, str]


def build(
    name: str,
    options: Options,
    *,
    archs: Sequence[Arch] = (),
    group: str | None = None,
    to: Stage = Stage.PACK,
    tell: Callable[[str], None] = lambda message: None,
    watch: Callable[[builder.Progress], None] = lambda progress: None,
) -> Built:
    """Build an engine by recipe name up to the stage ``to``. See :mod:`sm120kit.errors` for what can go wrong.

    ``kernels`` is no engine but our own kernels, compiled against a recipe's patched CUTLASS: ``kernels@flashinfer-0.6.6``.
    """
    if name == KERNELS or name.startswith(f"{KERNELS}@"):
        against = recipe.load(name.removeprefix(KERNELS).removeprefix("@") or "flashinfer")
        return _build_kernels(against, options, archs, group, to, tell, watch)
    item = recipe.load(name)
    recipe.group(item, group)
    targets = tuple(archs) or item.archs
    workspace = options.workspace
    tree = _sources(item, options, to)
    if tree is None or to is Stage.PATCH:
        return Built(item, tree)
    held = locking.tied(name, options, tell)
    tools = toolchain.find(targets, item.headers)
    for line in locking.toolchain_differences(held, tools) if held else ():
        tell(f"not the locked toolchain: {line}")
    place = f"{item.name}-{'-'.join(sorted(targets))}"
    work = workspace.work(place)
    with workspace.locked(place):
        made = _generated(item, group, targets, tree, tools, work, workspace, tell)
        costs = Costs(workspace.cache / "costs.json")
        facts = table(item, tree, tools, workspace)
        decided = plan.make(item, group, targets, tree, made.modules, tools, made.versions, facts, costs.of)
        if to is Stage.PLAN:
            return Built(item, tree, decided)
        target = workspace.build(item.engine, decided.digest)
        if (target / "artifacts.json").is_file():
            return Built(item, tree, decided, read_record(Artifacts, target / "artifacts.json"), target)
        _generated(item, group, targets, tree, tools, work, workspace, tell, on_disk=True)
        tell(f"compiling {sum(len(module.units) for module in decided.modules)} units of {len(decided.modules)} modules")
        means = builder.Means(costs, options.jobs, options.memory_bytes, watch)
        builder.compile_units(decided, made.modules, work, means)
        if to is Stage.COMPILE:
            builder.check(decided, work)
            return Built(item, tree, decided)
        tell("checking the modules and packing the wheel")
        artifacts = builder.finish(decided, tree, work, target)
    return Built(item, tree, decided, artifacts, target, ran=("compile", "pack"))


def _sources(item: recipe.Recipe, options: Options, to: Stage) -> PatchedTree | None:
    """The patched tree; None when only the sources were asked for."""
    if to is Stage.FETCH:
        sources.fetch(item.pin, options.workspace, mirror=options.mirror, offline=options.offline)
        return None
    return patched_tree(item, options)


def _build_kernels(
    item: recipe.Recipe,
    options: Options,
    archs: Sequence[Arch],
    group: str | None,
    to: Stage,
    tell: Callable[[str], None],
    watch: Callable[[builder.Progress], None],
) -> Built:
    """The stages of :func:`build` for our own kernels; ``group`` is how their names start."""
    workspace = options.workspace
    cutlass = next((inside for inside in item.inside if inside.project == "cutlass"), None)
    if cutlass is None:
        raise UnknownName(f"no CUTLASS lies in the sources of {item.name}", "name a recipe with one: kernels@flashinfer-0.6.6")
    tree = _sources(item, options, to)
    if tree is None or to is Stage.PATCH:
        return Built(item, tree)
    targets = tuple(archs) or item.archs
    tools = toolchain.find(targets)
    versions = {package: _version(package) for package in ("apache-tvm-ffi", "cmake", "scikit-build-core")}
    costs = Costs(workspace.cache / "costs.json")
    files, version = builder.source_files(), builder.source_version()
    decided = plan.kernels(item, group, targets, tree, files, version, tools, versions, costs.of)
    if to is Stage.PLAN:
        return Built(item, tree, decided)
    # Ninja would not notice an older header or another compiler in the same place.
    place = f"{KERNELS}-{digest_of([tree.tree, decided.archs, decided.toolchain, versions])[:12]}"
    work, target = workspace.work(place), workspace.build(KERNELS, decided.digest)
    with workspace.locked(place):
        if (target / "artifacts.json").is_file():
            return Built(item, tree, decided, read_record(Artifacts, target / "artifacts.json"), target)
        tell(f"compiling {len(decided.modules[0].units)} kernels against CUTLASS of {item.name} (tree {tree.tree[:12]})")
        means = builder.Means(costs, options.jobs, options.memory_bytes, watch)
        builder.compile_kernels(decided, tree, exported(tree, workspace) / cutlass.path, work, means)
        tell("checking the kernels")
        if to is Stage.COMPILE:
            builder.check(decided, work)
            return Built(item, tree, decided)
        artifacts = builder.finish_kernels(decided, work, target)
    return Built(item, tree, decided, artifacts, target, ran=("compile", "pack"))


def _generated(
    item: recipe.Recipe,
    group: str | None,
    archs: Sequence[Arch],
    tree: PatchedTree,
    tools: Toolchain,
    work: Path,
    workspace: Workspace,
    tell: Callable[[str], None],
    *,
    on_disk: bool = False,
) -> _GeneratedRecord:
    """What the engine generates for this tree; with ``on_disk``, also make sure that the work directory holds just that."""
    orders = plan.orders(item, group)
    versions = [_version(name) for name in ("torch", "apache-tvm-ffi")]
    key = digest_of(
        [plan.PLAN_FORMAT, orders, sorted(archs), tree.tree, tools.nvcc_version, str(tools.cuda_home), versions, str(work)]
    )
    record, stamp = workspace.cache / "generated" / f"{key}.json", work / "generated.key"
    here = stamp.is_file() and stamp.read_text() == key
    if record.is_file() and (here or not on_disk):
        return read_record(_GeneratedRecord, record)
    tell(f"generating kernels of {item.name} (tree {tree.tree[:12]})")
    stamp.unlink(missing_ok=True)
    patches.materialise(tree, work / "tree")
    made = _GeneratedRecord(*builder.generate(work / "tree", work, orders, archs, tools))
    write_record(record, made)
    stamp.write_text(key)
    return made


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
