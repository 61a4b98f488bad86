"""The stages in order. A stage whose record is there is not run again; a build stops after the stage it is asked to stop at."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from sm120kit import build as builder
from sm120kit import console, emulate, locking, patches, plan, recipe, sources, toolchain
from sm120kit import tiles as tile_facts
from sm120kit import verify as verifier
from sm120kit.errors import CompileFailed, UnknownName
from sm120kit.gitrepo import Repository
from sm120kit.memory import Costs, available
from sm120kit.records import (
    Arch,
    Artifacts,
    BuildPlan,
    Emulation,
    Generated,
    Numbers,
    PatchedTree,
    Proof,
    TileFacts,
    Toolchain,
)
from sm120kit.trees import Options, patched_tree
from sm120kit.workspace import Workspace, digest_of, publish_directory, read_record, write_record

__all__ = ["KERNELS", "Built", "Options", "Stage", "build", "patched_tree", "tiles"]

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


@dataclass(frozen=True)
class _GeneratedRecord:
    modules: tuple[Generated, ...]
    versions: dict[str, str]


def tiles(name: str, options: Options, *, patched: bool, emulated: bool = False) -> tuple[TileFacts, ...]:
    """The tiles of a recipe's engine, with or without its series applied, and what is known of their numbers.

    With ``emulated``, each mainloop that was not emulated before is, half a minute each.
    """
    item = recipe.load(name)
    tools = toolchain.find(headers=item.headers)
    tree = patched_tree(item, options) if patched else _unpatched_tree(item, options)
    facts = _tiles(item, tree, tools, options.workspace)
    (cutlass,) = (inside for inside in item.inside if inside.project == "cutlass")
    headers = _exported(tree, options.workspace) / cutlass.path / "include"
    emulator = emulate.Emulator(headers, tools, options.workspace.cache)
    return with_numbers(facts, emulator, f"{item.name}, {'patched' if patched else 'unpatched'}", emulated)


def _unpatched_tree(item: recipe.Recipe, options: Options) -> PatchedTree:
    """A recipe's source without the series."""
    checkout = sources.fetch(item.pin, options.workspace, mirror=options.mirror, offline=options.offline)
    return PatchedTree(checkout, item.inside, checkout.commit, checkout.tree, ())


def _tiles(item: recipe.Recipe, tree: PatchedTree, tools: Toolchain, workspace: Workspace) -> tuple[TileFacts, ...]:
    place = _exported(tree, workspace)
    with workspace.locked(f"tiles-{tree.tree}"):
        return tile_facts.table(place, tree.tree, item.name, tools, workspace.cache)


def _exported(tree: PatchedTree, workspace: Workspace) -> Path:
    """A tree's files, for reading only."""
    place = workspace.cache / "trees" / tree.tree
    with workspace.locked(f"tree-{tree.tree}"):
        if not place.is_dir():
            with publish_directory(place) as beside:
                Repository(tree.checkout.repository).export(tree.commit, beside)
    return place


def with_numbers(facts: Sequence[TileFacts], emulator: emulate.Emulator, what: str, emulated: bool) -> tuple[TileFacts, ...]:
    """Each tile with what the emulation of its mainloop showed; tiles that differ in nothing it depends on share one."""
    mainloops = {fact: _mainloop(fact) for fact in facts}
    distinct = [one for one in dict.fromkeys(mainloops.values()) if isinstance(one, emulate.Mainloop)]
    found: dict[emulate.Mainloop, Emulation | CompileFailed | None] = {one: emulator.known(one) for one in distinct}
    if emulated:
        asked = [one for one in distinct if not found[one]]
        if asked:
            console.say(f"emulating {len(asked)} mainloops of {what}, half a minute each")
        with console.progress() as progress:
            task = progress.add_task(f"emulating {what}", total=len(asked))
            found |= emulator.run_all(asked, lambda: progress.advance(task))
    return tuple(
        replace(fact, numbers=_numbers(found[one]) if isinstance(one, emulate.Mainloop) else Numbers(why=one))
        for fact, one in mainloops.items()
    )


def _mainloop(fact: TileFacts) -> emulate.Mainloop | str:
    """What to emulate for a tile, or why nothing can be."""
    if not fact.compiles:
        return "does not compile"
    if fact.scheduler == "stream-k":
        return "its scheduler, which divides K among CTAs, is not emulated"
    if fact.tile.dtype not in emulate.DTYPES:
        return f"{fact.tile.dtype} is not emulated"
    return emulate.Mainloop.of(fact.tile, pingpong=fact.schedule == "pingpong", stages=fact.stages)


def _numbers(result: Emulation | CompileFailed | None) -> Numbers:
    """What an emulation says about the tiles that share it."""
    if result is None:
        return Numbers(why="not emulated yet")
    if isinstance(result, CompileFailed):
        return Numbers(why=f"the emulation does not compile: {result.message}")
    if result.passed:
        return Numbers(Proof.PROVEN, "", result.outputs)
    first = next((f"{finding.kind}: {finding.first[0]}" for finding in result.findings), "")
    differ = f"{result.mismatches:,} of {result.outputs:,} outputs differ"
    return Numbers(Proof.WRONG, result.signature or first or differ, result.outputs, result.mismatches)


@dataclass(frozen=True)
class Verification:
    """What ``verify kernels`` runs: all that there is, or a part, which no receipt can stand on."""

    device: verifier.Device
    only: str = ""
    quick: bool = False

    @property
    def whole(self) -> bool:
        """Whether it is the whole matrix."""
        return not (self.only or self.quick)


def verify_kernels(
    name: str, options: Options, asked: Verification, *, tell: Callable[[str], None] = lambda message: None
) -> tuple[verifier.Report, dict[str, Any], str]:
    """Run a recipe's kernels on the GPU at hand: what was found, its record, and the file name for it."""
    item = recipe.load(name)
    gpu = verifier.require(verifier.probe(), asked.device)
    compiler, tree, matrix, planted = _programs(item, options, asked, verifier.arch(asked.device, gpu))
    tell(f"{gpu.name}: {len(matrix.run)} kernels of {item.name}, {len(planted)} planted faults with programs of their own")
    report = verifier.verify(matrix, planted, tree, compiler, asked.device, quick=asked.quick, tell=tell)
    kept = verifier.record(
        report,
        engine=item.name,
        tree=tree.tree,
        device=asked.device,
        gpu=gpu,
        compiler=compiler,
        only=asked.only,
        quick=asked.quick,
    )
    return report, kept, verifier.receipt_name(item.name, gpu)


def compile_verification(
    name: str, options: Options, asked: Verification, *, tell: Callable[[str], None] = lambda message: None
) -> list[tuple[str, CompileFailed | None]]:
    """Compile what ``verify_kernels`` would run, where there is no GPU."""
    item = recipe.load(name)
    compiler, tree, matrix, planted = _programs(item, options, asked, verifier.arch(asked.device, None))
    return verifier.compile_only(matrix, planted, tree, compiler, tell)


def _programs(
    item: recipe.Recipe, options: Options, asked: Verification, arch: str
) -> tuple[verifier.Compiler, verifier.Tree, verifier.Matrix, list[verifier.Control]]:
    """The compiler, the patched tree, what to run of it, and the faults to plant."""
    workspace = options.workspace
    native = asked.device is verifier.Device.NATIVE
    tools = toolchain.find([Arch(arch)] if native else [], verifier.HEADERS)
    patched = patched_tree(item, options)
    (cutlass,) = (inside for inside in item.inside if inside.project == "cutlass")
    tree, stock = (
        verifier.Tree(_exported(one, workspace), one.tree, cutlass.path) for one in (patched, _unpatched_tree(item, options))
    )
    matrix = verifier.matrix_of(_tiles(item, patched, tools, workspace), pattern=asked.only, quick=asked.quick)
    planted = [verifier.stock_control(stock)]
    if asked.whole:
        planted += verifier.mutants(tree, workspace.cache / "verify" / "mutants", asked.device)
    compiler = verifier.Compiler(arch, not native, tools, workspace.cache, jobs=options.jobs, budget_bytes=options.memory_bytes)
    return compiler, tree, matrix, planted


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
    if to is Stage.FETCH:
        sources.fetch(item.pin, workspace, mirror=options.mirror, offline=options.offline)
        return Built(item)
    tree = patched_tree(item, options)
    if to is Stage.PATCH:
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
        facts = _tiles(item, tree, tools, workspace)
        decided = plan.make(item, group, targets, tree, made.modules, tools, made.versions, facts, costs.of)
        if to is Stage.PLAN:
            return Built(item, tree, decided)
        target = workspace.build(item.engine, decided.digest)
        if (target / "artifacts.json").is_file():
            return Built(item, tree, decided, read_record(Artifacts, target / "artifacts.json"), target)
        _generated(item, group, targets, tree, tools, work, workspace, tell, on_disk=True)
        tell(f"compiling {sum(len(module.units) for module in decided.modules)} units of {len(decided.modules)} modules")
        builder.compile_units(
            decided,
            made.modules,
            work,
            costs,
            jobs=options.jobs or len(os.sched_getaffinity(0)),
            budget_bytes=options.memory_bytes or available(),
            watch=watch,
        )
        if to is Stage.COMPILE:
            builder.check(decided, work)
            return Built(item, tree, decided)
        tell("checking the modules and packing the wheel")
        artifacts = builder.finish(decided, tree, work, target)
    return Built(item, tree, decided, artifacts, target, ran=("compile", "pack"))


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
    if to is Stage.FETCH:
        sources.fetch(item.pin, workspace, mirror=options.mirror, offline=options.offline)
        return Built(item)
    tree = patched_tree(item, options)
    if to is Stage.PATCH:
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
        builder.compile_kernels(
            decided,
            tree,
            _exported(tree, workspace) / cutlass.path,
            work,
            costs,
            jobs=options.jobs or len(os.sched_getaffinity(0)),
            budget_bytes=options.memory_bytes or available(),
            watch=watch,
        )
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
