"""Decide what a build compiles and what it leaves out: pure functions, which read and write nothing."""

import fnmatch
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

from sm120kit.core.digests import digest_of
from sm120kit.core.errors import BadInput
from sm120kit.core.records import Arch, LeftOut, Toolchain
from sm120kit.patches.patch_records import PatchedTree
from sm120kit.recipes import NO_KERNELS, EngineRecipe, FlashInferRecipe, ModuleTable, TargetTable, group
from sm120kit.sources.source_records import LockedWheel
from sm120kit.wheels.build_records import NO_TOOLCHAIN, BuildPlan, Generated, Module, Unit

PLAN_FORMAT = 2
"""Increased when a newer sm120kit would build the same inputs differently."""

DEFAULT_COST = {".cu": (2 * 2**30, 30.0), ".cpp": (2**29, 10.0)}
"""Peak bytes and seconds of a unit without an estimate in the recipe and without an earlier compile."""


MeasuredCost = Callable[[str], tuple[int, float] | None]
"""Peak bytes and seconds of a unit, ``module/file``, when it was last compiled; None for a new unit."""


@dataclass(frozen=True)
class Selection:
    """Kernels of a recipe that are built for ``archs`` and a machine: a kernel group, by default the recipe's default group."""

    recipe: FlashInferRecipe
    archs: tuple[Arch, ...]
    group: str | None = None
    machine: str = field(default_factory=platform.machine)

    @property
    def directory(self) -> str:
        """Name of the work directory, which builds of all groups share that compile something."""
        if self.group == NO_KERNELS:
            return f"{self.recipe.name}-{NO_KERNELS}"
        other = "" if self.machine == platform.machine() else f"-{self.machine}"
        return f"{self.recipe.name}-{'-'.join(sorted(self.archs))}{other}"

    @property
    def largest_unit(self) -> tuple[str, int]:
        """Pattern and peak bytes of the largest unit, by the recipe's estimates."""
        modules = {name: self.recipe.modules[name] for name in group(self.recipe, self.group).modules}
        estimates = [
            (int(gib * 2**30), f"{name}/{units}") for name, table in modules.items() for units, gib in table.gib.items()
        ]
        bytes_, units = max(estimates, default=(DEFAULT_COST[".cu"][0], "a unit"))
        return units, bytes_


@dataclass(frozen=True)
class BuildEnvironment:
    """Programs and packages that a build uses: the compilers, and ``versions`` of packages that the result depends on.

    ``measured_cost`` is no input of the digest.
    """

    toolchain: Toolchain
    versions: Mapping[str, str]
    measured_cost: MeasuredCost = lambda unit: None


def generator_requests(selection: Selection) -> dict[str, Any]:
    """Input of the engine's generators: for each module its generator, regrouped units, and patterns of those left out."""
    modules = ((name, selection.recipe.modules[name]) for name in group(selection.recipe, selection.group).modules)
    return {name: generator_request(module, [entry.units for entry in module.leave_out]) for name, module in modules}


def generator_request(module: ModuleTable, leave_out: Sequence[str] = ()) -> dict[str, Any]:
    """Input of a module's generator; ``leave_out`` are patterns of units."""
    regroup = {"regroup": [table.model_dump() for table in module.regroup]} if module.regroup else {}
    return {**module.call, "leave_out": list(leave_out), **regroup}


def plan_flashinfer(
    selection: Selection,
    tree: PatchedTree,
    generated: Sequence[Generated],
    environment: BuildEnvironment,
    tiles: Sequence[LeftOut],
) -> BuildPlan:
    """Plan a FlashInfer wheel. The digest covers every input; costs and directories are none.

    ``generated`` is the output of the generators for :func:`generator_requests`; ``tiles`` are the recorded tiles that SM12x
    cannot launch, none if no module consists of tiles.
    """
    recipe = selection.recipe
    group_name = selection.group or recipe.default_group
    modules: list[Module] = []
    left_out: list[LeftOut] = []
    for output in generated:
        settings = recipe.modules[output.name]
        units = tuple(
            _unit(output.name, source, object_file, settings, environment.measured_cost) for source, object_file in output.units
        )
        undefined = tuple(table.symbols for table in settings.undefined)
        modules.append(Module(output.name, output.library, units, tuple(sorted(settings.expect_kernels.items())), undefined))
        left_out += _left_out(output, settings)
    selected = {output.name for output in generated}
    outside = f"compiled on first use: not in kernel group {group_name}"
    left_out += [LeftOut(name, outside) for name in recipe.modules if name not in selected]
    left_out += tiles
    inputs = {
        "modules": [
            [module.name, True, module.expect_kernels, output.ninja, *_regrouping(recipe.modules[module.name])]
            for module, output in zip(modules, generated, strict=True)
        ],
        "left_out": left_out,
        "versions": dict(environment.versions),
        "tree": tree.tree,  # the wheel has its sources, also if nothing is compiled
        **_local(tree),
    }
    plan = BuildPlan(
        recipe=recipe.name,
        engine=recipe.engine,
        version=recipe.version,
        archs=selection.archs,
        groups=(group_name,),
        tree=tree.tree,
        commit=tree.commit,
        modules=tuple(modules),
        left_out=tuple(left_out),
        toolchain=environment.toolchain,
    )
    return _with_digest(plan, inputs)


def plan_extensions(
    recipe: EngineRecipe,
    tree: PatchedTree,
    carried: Mapping[str, tuple[str, str]],
    official: LockedWheel,
    wheels: Sequence[LockedWheel],
    environment: BuildEnvironment,
) -> BuildPlan:
    """Plan the extension modules that are built from an engine's own source and replace those of its ``official`` wheel.

    ``tree`` is the engine's. ``carried`` has version and patched tree of each project inside the FlashInfer that the recipe
    uses. ``wheels`` are installed for the build; ``toolchain.cuda_home`` is in the directory where they are installed.

    Raises:
        BadInput: a project that the engine requires is not carried, or in another version.
    """
    table = recipe.from_source
    assert table is not None
    injected = {}
    for variable, filled in table.injected.items():
        version, source = carried.get(filled.project or "", ("", ""))
        if filled.commit is not None:
            source = filled.commit
        elif filled.project is not None and version != filled.version:
            raise BadInput(
                f"{recipe.name}: {variable} requires {filled.project} {filled.version}; "
                f"{recipe.flashinfer} carries {version or 'no such project'}",
                "name the version that the engine requires in from_source.injected, and a FlashInfer recipe that carries it",
            )
        injected[variable] = [filled.project, source, filled.files, filled.definitions]
    modules = [
        Module(
            name,
            PurePosixPath(target.member).name,
            tuple(
                _unit(name, source, f"CMakeFiles/{name}.dir/{source}.o", target, environment.measured_cost)
                for source in target.units
            ),
            tuple(sorted(target.expect_kernels.items())),
        )
        for name, target in sorted(table.targets.items())
    ]
    inputs = {
        "targets": [[name, target.member, sorted(target.units)] for name, target in sorted(table.targets.items())],
        "injected": injected,
        "official": official.sha256,
        **({"files": table.files} if table.files else {}),
        "environment": sorted((wheel.name, wheel.sha256) for wheel in wheels),
        "versions": dict(environment.versions),
        **_local(tree),
    }
    plan = BuildPlan(
        recipe=recipe.name,
        engine=recipe.engine,
        version=recipe.version,
        archs=recipe.archs,
        tree=tree.tree,
        commit=tree.commit,
        modules=tuple(modules),
        left_out=tuple(LeftOut(name, filled.reason) for name, filled in table.injected.items() if filled.files),
        toolchain=environment.toolchain,
    )
    return _with_digest(plan, inputs)


def plan_overlay(recipe: EngineRecipe, tree: PatchedTree, official: LockedWheel, replaced: Iterable[str]) -> BuildPlan:
    """Plan the ``official`` wheel of an engine or another package with members ``replaced`` by patched files of ``tree``.

    Nothing is compiled: the digest depends on the source with its series and on the upstream wheel only.
    """
    plan = BuildPlan(
        recipe=recipe.name,
        engine=official.name,
        version=official.version,
        tree=tree.tree,
        commit=tree.commit,
    )
    return _with_digest(plan, {"commit": tree.commit, "official": official.sha256, "replaced": sorted(replaced)})


def _local(tree: PatchedTree) -> dict[str, object]:
    """The local patches, which the wheel records: a series with the same tree gives another wheel."""
    return {"local": [patch.sha256 for patch in tree.local]} if tree.local else {}


def _regrouping(settings: ModuleTable) -> list[str]:
    """What decides the contents of regrouped units, of which the ninja file has the names."""
    return [table.model_dump_json() for table in settings.regroup]


def _with_digest(plan: BuildPlan, inputs: Mapping[str, object]) -> BuildPlan:
    """A plan with the digest of ``inputs`` and of the inputs of every plan; of a key in both, the value in ``inputs`` counts.

    Archs and the tree as a whole are inputs only if something is compiled.
    """
    common: dict[str, object] = {"format": PLAN_FORMAT, "recipe": [plan.recipe, plan.engine, plan.version]}
    if plan.toolchain is not NO_TOOLCHAIN:
        compilers = [plan.toolchain.nvcc_version, plan.toolchain.host_version, plan.toolchain.machine]
        common |= {"archs": sorted(plan.archs), "tree": plan.tree, "toolchain": compilers}
    return replace(plan, archs=tuple(sorted(plan.archs)), digest=digest_of({**common, **inputs}))


def _unit(module: str, source: str, output: str, settings: ModuleTable | TargetTable, measured_cost: MeasuredCost) -> Unit:
    file, object_file = PurePosixPath(source).name, PurePosixPath(output).name
    cost = measured_cost(f"{module}/{object_file}")
    if cost is None:
        default = DEFAULT_COST.get(PurePosixPath(source).suffix, DEFAULT_COST[".cu"])
        gib = _first_match(settings.gib, file, object_file, default=default[0] / 2**30)
        seconds = _first_match(settings.seconds, file, object_file, default=default[1])
        cost = (int(gib * 2**30), seconds) if source.endswith(".cu") else default
    return Unit(module, source, output, *cost)


def _first_match(values: Mapping[str, float], *names: str, default: float) -> float:
    """The value of the first pattern that matches one of ``names``."""
    matches = (value for pattern, value in values.items() if any(fnmatch.fnmatch(name, pattern) for name in names))
    return next(matches, default)


def _left_out(module: Generated, settings: ModuleTable) -> Iterator[LeftOut]:
    """The sources of a module that are not compiled, by the pattern that leaves them out, and functions that it lacks."""
    compiled = {PurePosixPath(source).name for source, _ in module.units}
    absent = [source for source in module.sources if source not in compiled]
    for table in settings.leave_out:
        matching = [source for source in absent if fnmatch.fnmatch(source, table.units)]
        absent = [source for source in absent if source not in matching]
        if matching:
            yield LeftOut(f"{module.name}: {len(matching)} units {table.units}", table.reason)
    for functions in settings.undefined:
        yield LeftOut(f"{module.name}: functions {functions.symbols}", functions.reason)
