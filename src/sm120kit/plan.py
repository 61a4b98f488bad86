"""``(Recipe, trees, Toolchain) -> BuildPlan``. Pure: reads nothing, writes nothing."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from sm120kit.errors import BadRecipe, ExpectationFailed, UnknownName
from sm120kit.recipe import EngineRecipe, ModuleTable, Recipe, TargetTable, group
from sm120kit.records import (
    SMEM_CAPACITY_BYTES,
    Arch,
    BuildPlan,
    Generated,
    LeftOut,
    LockedWheel,
    Module,
    PatchedTree,
    TileFacts,
    Toolchain,
    Unit,
)
from sm120kit.workspace import digest_of

PLAN_FORMAT = 1
"""Raised when the same inputs would be built differently by a newer sm120kit."""

DEFAULT_COST = {".cu": (2 * 2**30, 30.0), ".cpp": (2**29, 10.0)}
"""Peak bytes and seconds of a unit of which neither the recipe nor an earlier build says anything."""

KERNEL_COST = (int(5.6 * 2**30), 75.0)
"""The same for one of our own kernels, which are all alike: measured with nvcc 13.0.88."""

NO_TOOLCHAIN = Toolchain(Path(), "none", "none", "none")
"""Of a plan by which nothing is compiled."""

Known = Callable[[str], tuple[int, float] | None]
"""What a unit cost when it was last compiled: peak bytes and seconds."""


def orders(recipe: Recipe, group_name: str | None) -> dict[str, Any]:
    """What to ask the engine's generators for: per module its generator, and the file patterns left out or solely wanted."""
    table = group(recipe, group_name)
    asked: dict[str, Any] = {}
    for name in (*table.modules, *(sample.split("/")[0] for sample in table.samples)):
        only = (
            None
            if name in table.modules
            else [sample.split("/", 1)[1] for sample in table.samples if sample.startswith(name + "/")]
        )
        module = recipe.modules[name]
        asked[name] = {"generator": module.generator, "leave_out": [left.units for left in module.leave_out], "only": only}
    return asked


def make(
    recipe: Recipe,
    group_name: str | None,
    archs: Sequence[Arch],
    tree: PatchedTree,
    generated: Sequence[Generated],
    toolchain: Toolchain,
    versions: Mapping[str, str],
    tiles: Sequence[TileFacts],
    known: Known = lambda unit: None,
) -> BuildPlan:
    """Decide what is compiled and what is left out, and name the result by a digest of everything that goes in.

    ``versions`` are of packages whose headers the units include, ``tiles`` the facts of the tree. Costs and directories are
    not part of the digest.

    Raises:
        ExpectationFailed: the tree generates a tile that SM12x cannot launch.
    """
    table = group(recipe, group_name)
    modules: list[Module] = []
    left_out: list[LeftOut] = []
    for made in generated:
        settings = recipe.modules[made.name]
        packed = made.name in table.modules
        units = tuple(_unit(made.name, source, output, settings, known) for source, output in made.units)
        expect = settings.expect_kernels if packed else table.expect_sample_kernels
        modules.append(Module(made.name, made.library, units, packed, tuple(sorted(expect.items()))))
        left_out += _left_out(made, settings, packed)
    asked = {made.name for made in generated}
    left_out += [
        LeftOut(name, f"not in kernel group {group_name or recipe.default_group}")
        for name in recipe.modules
        if name not in asked
    ]
    left_out += _tiles_left_out(recipe, tiles)
    inputs = {
        "modules": [
            [module.name, module.packed, module.expect_kernels, made.ninja]
            for module, made in zip(modules, generated, strict=True)
        ],
        "left_out": left_out,
        "versions": dict(versions),
    }
    names = recipe.name, recipe.engine, recipe.version
    groups = (group_name or recipe.default_group,)
    return _named(*names, tree, inputs, archs=archs, groups=groups, modules=modules, left_out=left_out, toolchain=toolchain)


def kernels(
    recipe: Recipe,
    start: str | None,
    archs: Sequence[Arch],
    tree: PatchedTree,
    files: Mapping[str, str],
    version: str,
    toolchain: Toolchain,
    versions: Mapping[str, str],
    known: Known = lambda unit: None,
) -> BuildPlan:
    """Decide which of our own kernels are compiled against the patched CUTLASS of ``recipe``: those whose names start so.

    ``files`` are the sources with their sha256, one kernel per ``kernels/*.cu``; ``version`` is theirs.

    Raises:
        UnknownName: no kernel's name starts with ``start``.
    """
    stems = sorted(PurePosixPath(name).stem for name in files if fnmatch.fnmatch(name, "kernels/*.cu"))
    chosen = [name for name in stems if start in (None, "all") or name == start or name.startswith(f"{start}_")]
    if not chosen:
        raise UnknownName(
            f"no kernel's name is or starts with {start!r}", f"kernels: {', '.join(stems)}; or the start of a name, or all"
        )
    units = []
    for name in chosen:
        output = f"CMakeFiles/kernels.dir/kernels/{name}.cu.o"
        cost = known(f"kernels/{PurePosixPath(output).name}") or KERNEL_COST
        units.append(Unit("kernels", f"source/kernels/{name}.cu", output, *cost))
    # Each kernel carries its name, and instantiates a mainloop of SM120.
    expect = tuple((f"*device_kernel*{len(name)}{name}E*@{arch}*", 1) for name in chosen for arch in sorted(archs))
    left_out = [LeftOut(name, f"its name does not start with {start}") for name in stems if name not in chosen]
    names = f"kernels@{recipe.name}", "kernels", version
    inputs = {"recipe": [names[0], version], "kernels": chosen, "files": dict(files), "versions": dict(versions)}
    groups = (start or "all",)
    modules = [Module("kernels", "sm120kit_kernels.so", tuple(units), True, expect)]
    return _named(*names, tree, inputs, archs=archs, groups=groups, modules=modules, left_out=left_out, toolchain=toolchain)


def extensions(
    item: EngineRecipe,
    tree: PatchedTree,
    carried: Mapping[str, tuple[str, str]],
    official: LockedWheel,
    environment: Sequence[LockedWheel],
    toolchain: Toolchain,
    versions: Mapping[str, str],
    known: Known = lambda unit: None,
) -> BuildPlan:
    """Decide what is compiled of an engine's own source, and name the result by a digest of everything that goes in.

    ``tree`` is the engine's; ``carried`` has version and patched tree of every project inside the FlashInfer that it rests on.
    The result takes the place of modules in ``official``. ``environment`` are the wheels that it is built with, ``versions``
    those of other programs; ``toolchain.cuda_home`` lies in the environment.

    Raises:
        BadRecipe: a project is not carried, or in another version than the engine asks for.
    """
    table = item.from_source
    assert table is not None
    injected = {}
    for variable, filled in table.injected.items():
        version, source = carried.get(filled.project or "", ("", ""))
        if filled.project is not None and version != filled.version:
            raise BadRecipe(
                f"{item.name}: {variable} asks for {filled.project} {filled.version}; "
                f"{item.flashinfer} carries {version or 'no such project'}",
                "name the version that the engine asks for in from_source.injected, and a FlashInfer recipe that carries it",
            )
        injected[variable] = [filled.project, source, filled.files, filled.definitions]
    modules = [
        Module(
            name,
            PurePosixPath(target.member).name,
            tuple(_unit(name, source, f"CMakeFiles/{name}.dir/{source}.o", target, known) for source in target.units),
            True,
            tuple(sorted(target.expect_kernels.items())),
        )
        for name, target in sorted(table.targets.items())
    ]
    inputs = {
        "targets": [[name, target.member, sorted(target.units)] for name, target in sorted(table.targets.items())],
        "injected": injected,
        "official": official.sha256,
        "environment": sorted((wheel.name, wheel.sha256) for wheel in environment),
        "versions": dict(versions),
    }
    names = item.name, item.engine, item.version
    left_out = [LeftOut(name, filled.reason) for name, filled in table.injected.items() if filled.files]
    return _named(*names, tree, inputs, archs=item.archs, modules=modules, left_out=left_out, toolchain=toolchain)


def overlay(item: EngineRecipe, tree: PatchedTree, official: LockedWheel, replaced: Iterable[str]) -> BuildPlan:
    """Decide what the wheel is in which files of the engine's own package are ``replaced`` by patched ones of ``tree``.

    Nothing is compiled, so that it depends on the source with its series and on the wheel ``official`` alone.
    """
    inputs = {"commit": tree.commit, "official": official.sha256, "replaced": sorted(replaced)}
    return _named(item.name, item.engine, item.version, tree, inputs)


def _named(
    recipe: str,
    engine: str,
    version: str,
    tree: PatchedTree,
    inputs: Mapping[str, object],
    *,
    archs: Iterable[Arch] = (),
    groups: tuple[str, ...] = (),
    modules: Iterable[Module] = (),
    left_out: Iterable[LeftOut] = (),
    toolchain: Toolchain | None = None,
) -> BuildPlan:
    """A plan, named by the digest of ``inputs`` and of what goes into every plan; ``inputs`` come first.

    Without a toolchain nothing is compiled, so that archs and the tree as a whole do not count.
    """
    common: dict[str, object] = {"format": PLAN_FORMAT, "recipe": [recipe, engine, version]}
    if toolchain is not None:
        compilers = [toolchain.nvcc_version, toolchain.host_version]
        common |= {"archs": sorted(archs), "tree": tree.tree, "toolchain": compilers}
    return BuildPlan(
        recipe=recipe,
        engine=engine,
        version=version,
        archs=tuple(sorted(archs)),
        groups=groups,
        tree=tree.tree,
        commit=tree.commit,
        modules=tuple(modules),
        left_out=tuple(left_out),
        toolchain=toolchain or NO_TOOLCHAIN,
        digest=digest_of({**common, **inputs}),
    )


def _tiles_left_out(recipe: Recipe, tiles: Sequence[TileFacts]) -> list[LeftOut]:
    """Tiles of interest that are not generated and could not run, one entry for all outputs and swaps."""
    broken = [fact for fact in tiles if fact.generated and not fact.fits]
    if broken:
        listed = "\n".join(f"  {_tile_name(fact)}: {_why_not(fact)}" for fact in broken)
        raise ExpectationFailed(
            f"{recipe.name} generates tiles that SM12x cannot launch\n{listed}",
            "a patch has to make them fit or leave them out; sm120kit tiles shows all",
        )
    absent = {(f"tile {_tile_name(fact)}", _why_not(fact)) for fact in tiles if not fact.fits}
    return [LeftOut(what, why) for what, why in sorted(absent)]


def _tile_name(fact: TileFacts) -> str:
    return f"{fact.tile.family} {fact.tile.dtype} {fact.tile.shape} {fact.tile.epilogue}"


def _why_not(fact: TileFacts) -> str:
    if not fact.compiles:
        return fact.why_not
    return f"needs {fact.smem_bytes:,} B of shared memory; SM120 has {SMEM_CAPACITY_BYTES:,} B"


def _unit(module: str, source: str, output: str, settings: ModuleTable | TargetTable, known: Known) -> Unit:
    file, made = PurePosixPath(source).name, PurePosixPath(output).name
    cost = known(f"{module}/{made}")
    if cost is None:
        default = DEFAULT_COST.get(PurePosixPath(source).suffix, DEFAULT_COST[".cu"])
        gib = next((value for pattern, value in settings.gib.items() if _matches(pattern, file, made)), default[0] / 2**30)
        seconds = next((value for pattern, value in settings.seconds.items() if _matches(pattern, file, made)), default[1])
        cost = (int(gib * 2**30), seconds) if source.endswith(".cu") else default
    return Unit(module, source, output, *cost)


def _matches(pattern: str, *names: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for name in names)


def _left_out(made: Generated, settings: ModuleTable, packed: bool) -> Iterator[LeftOut]:
    kept = {PurePosixPath(source).name for source, _ in made.units}
    absent = [source for source in made.sources if source not in kept]
    for table in settings.leave_out:
        matching = [source for source in absent if fnmatch.fnmatch(source, table.units)]
        absent = [source for source in absent if source not in matching]
        if matching:
            yield LeftOut(f"{made.name}: {len(matching)} units {table.units}", table.reason)
    if absent and not packed:
        yield LeftOut(
            f"{made.name}: {len(absent)} further units",
            f"only a sample of {len(kept)} is compiled and checked; it is not packed, because the module needs all of them",
        )
