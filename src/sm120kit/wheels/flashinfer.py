"""Build a patched FlashInfer wheel with compiled kernels."""

import fnmatch
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm120kit import patches, recipes
from sm120kit.core import reporting
from sm120kit.core.digests import digest_of
from sm120kit.core.errors import NotFound
from sm120kit.core.memory import Costs
from sm120kit.core.record_files import read_record, write_record
from sm120kit.core.records import Stage, Toolchain
from sm120kit.core.workspace import Workspace
from sm120kit.kernels import tile_records
from sm120kit.kernels.cubin.cubin_records import Cubin
from sm120kit.kernels.tables import generated_tiles
from sm120kit.kernels.tiles.listing import generates_tiles
from sm120kit.patches.patch_records import PatchedTree
from sm120kit.recipes import locked_toolchain
from sm120kit.recipes.locked_toolchain import FFI, TvmFfi
from sm120kit.recipes.recipe_records import Lock
from sm120kit.recipes.target import FlashInferTarget
from sm120kit.wheels import _plan as plans
from sm120kit.wheels import compile as compiling
from sm120kit.wheels._check import check_modules, tvm_ffi_loader
from sm120kit.wheels._cuda_home import link_toolchain
from sm120kit.wheels._published_wheels import build_once, publish, wheel_record
from sm120kit.wheels.build_records import NO_TOOLCHAIN, Artifacts, BuildPlan, BuildRequest, Generated, WheelBuild
from sm120kit.wheels.compile import Progress
from sm120kit.wheels.generators import generate
from sm120kit.wheels.pack import member_of, pack_wheel


@dataclass(frozen=True)
class _GeneratedRecord:
    """Output of the generators for a tree."""

    modules: tuple[Generated, ...]
    tree: str = ""


def build(
    target: FlashInferTarget, request: BuildRequest, watch: Callable[[Progress], None] = lambda progress: None
) -> WheelBuild:
    """Build a FlashInfer wheel up to the stage of the request.

    Raises:
        NotFound: the recipe has no such kernel group.
        Mismatch: the recipe's lockfile is edited or outdated.
        RequirementMissing: no compiler for the archs.
        CompileFailed, ResourceUnavailable, CheckFailed: a unit does not compile, or the result is not what
            the recipe expects.
    """
    recipe, stage = target.recipe, request.stage
    recipes.group(recipe, request.group)
    if stage is Stage.FETCH:
        _ = target.checkout
        return WheelBuild(recipe)
    tree = target.tree
    if stage is Stage.PATCH:
        return WheelBuild(recipe, tree)
    prepared = _prepare(target, request)
    planned = WheelBuild(recipe, tree, prepared.plan)
    if stage is Stage.PLAN:
        return planned

    def make(directory: Path) -> Artifacts:
        if request.group == recipes.NO_KERNELS:
            patches.materialise(tree, prepared.work / "tree")
            return _pack(prepared, tree, {}, directory)
        ffi = _compile(target, prepared, watch)
        loader = tvm_ffi_loader(ffi.library, prepared.work, prepared.plan.toolchain)
        cubins = check_modules(prepared.plan, prepared.work, loader)
        return _pack(prepared, tree, cubins, directory)

    return build_once(planned, prepared.selection.directory, target.options, make)


def unit_ptx(
    target: FlashInferTarget, request: BuildRequest, pattern: str, watch: Callable[[Progress], None] = lambda progress: None
) -> dict[str, str]:
    """The PTX of the units of a build whose ``module/file`` contains ``pattern`` or matches it, by ``module/file``.

    The commands are those of the build with -ptx instead of -c: ptxas gets this text in a build.

    Raises:
        NotFound: the recipe has no such kernel group, or no unit matches.
        CompileFailed, ResourceUnavailable: a unit does not compile.
    """
    if request.group == recipes.NO_KERNELS:
        raise NotFound(f"kernel group {recipes.NO_KERNELS} has no units", "leave out --kernels, or name another group")
    workspace, prepared = target.options.workspace, _prepare(target, request)
    units = [unit for module in prepared.plan.modules for unit in module.units if unit.source.endswith(".cu")]
    chosen = [unit for unit in units if pattern in unit.name or fnmatch.fnmatch(unit.name, pattern)]
    if not chosen:
        raise NotFound(f"no unit of {prepared.plan.recipe} matches {pattern!r}", f"units: {', '.join(u.name for u in units)}")
    with workspace.exclusive(prepared.selection.directory):
        _ready(target, prepared)
        settings = compiling.CompileSettings.of(target.options, watch)
        outputs = compiling.compile_ptx(chosen, prepared.generated, prepared.work, settings)
        return {unit.name: (prepared.work / output).read_text() for unit, output in zip(chosen, outputs, strict=True)}


@dataclass(frozen=True)
class _PreparedBuild:
    """What a build compiles in ``work``; ``has_unknown_tiles``: no record has the tiles of its source."""

    selection: plans.Selection
    work: Path
    generated: tuple[Generated, ...]
    plan: BuildPlan
    has_unknown_tiles: bool = False


def _prepare(target: FlashInferTarget, request: BuildRequest) -> _PreparedBuild:
    """Run the generators and plan the build. Locked compilers are not fetched for it."""
    recipe, workspace, tree, selection = target.recipe, target.options.workspace, target.tree, _selection(target, request)
    work, lock = workspace.work(selection.directory), _verified_lock(target)
    if request.group == recipes.NO_KERNELS:
        nothing = plans.BuildEnvironment(NO_TOOLCHAIN, {})
        return _PreparedBuild(selection, work, (), plans.plan_flashinfer(selection, tree, (), nothing, ()))
    tools, ffi = _tools(target, selection, unpack=False)
    for line in locked_toolchain.toolchain_differences(lock, tools) if lock else ():
        reporting.info(f"not the locked toolchain: {line}")
    costs = Costs(workspace.cache / "costs.json")
    generated = _generate(selection, tree, (tools, ffi), workspace).modules
    environment = plans.BuildEnvironment(tools, {FFI: ffi.version}, costs.of)
    tiled = any(generates_tiles(recipe.modules[module.name].generator) for module in generated)
    recorded = tile_records.recorded(target) if tiled else ()
    plan = plans.plan_flashinfer(selection, tree, generated, environment, recorded or ())
    return _PreparedBuild(selection, work, generated, plan, recorded is None)


def _tools(target: FlashInferTarget, selection: plans.Selection, *, unpack: bool = True) -> tuple[Toolchain, TvmFfi]:
    """The compilers for the machine of a selection, and tvm-ffi; without ``unpack``, those for this machine are not fetched."""
    machine = selection.machine
    ffi = locked_toolchain.tvm_ffi(target, machine, unpack=unpack)
    if machine == platform.machine():
        return locked_toolchain.compilers(target, selection.archs, unpack=unpack), ffi
    return locked_toolchain.cross_compilers(target, machine, selection.archs), ffi


def _ready(target: FlashInferTarget, prepared: _PreparedBuild) -> tuple[Toolchain, TvmFfi]:
    """Make the work directory ready to compile in, with the compilers, which are returned."""
    tools = _tools(target, prepared.selection)
    _generate_files(prepared.selection, target.tree, tools, target.options.workspace)
    link_toolchain(prepared.work / "cuda", tools[0])
    return tools


def _compile(target: FlashInferTarget, prepared: _PreparedBuild, watch: Callable[[Progress], None]) -> TvmFfi:
    """Compile the units of a plan, once SM12x can launch every tile that they consist of.

    Returns the tvm-ffi that the modules are loaded with.
    """
    (tools, ffi), plan = _ready(target, prepared), prepared.plan
    if prepared.has_unknown_tiles:
        facts = generated_tiles(target, tools, [module.name for module in plan.modules])
        tile_records.left_out(target.recipe.name, facts)
    compiling.compile_units(plan, prepared.generated, prepared.work, compiling.CompileSettings.of(target.options, watch))
    return ffi


def _pack(prepared: _PreparedBuild, tree: PatchedTree, cubins: Mapping[str, Sequence[Cubin]], directory: Path) -> Artifacts:
    """Pack the wheel with the checked modules, whose device code are ``cubins``, and publish it."""
    plan, work = prepared.plan, prepared.work
    reporting.info("packing the wheel")
    libraries = {member_of(module.name): work / module.library for module in plan.modules}
    return publish(
        plan,
        directory,
        lambda out: pack_wheel(plan, tree, libraries, out, work, wheel_record(plan, tree)),
        libraries,
        cubins,
        [work / name for name in ("generate.log", "compile.log")],
    )


def require_memory(target: FlashInferTarget, request: BuildRequest) -> None:
    """Require the memory for the largest unit, by the recipe's estimates, before anything is fetched.

    Where units were compiled before or a shared cache may have them, :func:`build` checks what is left to compile.

    Raises:
        NotFound: the recipe has no such kernel group.
        ResourceUnavailable: it does not fit.
    """
    if recipes.group(target.recipe, request.group).modules and _compiles_first(target, request):
        compiling.require_memory(*_selection(target, request).largest_unit, target.options.memory_bytes)


def _selection(target: FlashInferTarget, request: BuildRequest) -> plans.Selection:
    return plans.Selection(target.recipe, request.archs or target.recipe.archs, request.group, request.machine)


def _compiles_first(target: FlashInferTarget, request: BuildRequest) -> bool:
    """Whether a build compiles, and neither an earlier one nor a shared cache can have what it compiles."""
    workspace = target.options.workspace
    log = workspace.work(_selection(target, request).directory) / compiling.LOG
    compiled = log.is_file() or workspace.build(target.recipe.engine, "").is_dir()
    return request.stage is Stage.PACK and not compiled and target.options.cache is None


def _verified_lock(target: FlashInferTarget) -> Lock | None:
    """The lockfile of a target; None, with a message, if the recipe is not locked."""
    if target.lock_path.is_file():
        return target.lock
    reporting.info(
        f"{target.argument} is not locked: this build cannot be compared with earlier ones; lock it: {target.lock_command}"
    )
    return None


def _generate(
    selection: plans.Selection, tree: PatchedTree, tools: tuple[Toolchain, TvmFfi], workspace: Workspace
) -> _GeneratedRecord:
    """Read the record of an earlier run of the engine's generators on a tree, without a lock; run them if there is none."""
    record = workspace.cache / "generated" / f"{_generated_key(selection, tree, tools, workspace)}.json"
    if record.is_file():
        return read_record(_GeneratedRecord, record)
    with workspace.exclusive(selection.directory):
        return _generate_files(selection, tree, tools, workspace)


def _generated_key(selection: plans.Selection, tree: PatchedTree, tools: tuple[Toolchain, TvmFfi], workspace: Workspace) -> str:
    requests = plans.generator_requests(selection)
    cuda, ffi = tools
    programs = [cuda.nvcc_version, str(cuda.cuda_home), ffi.version, str(ffi.directory)]
    directory = str(workspace.work(selection.directory))
    return digest_of([plans.PLAN_FORMAT, requests, sorted(selection.archs), tree.tree, *programs, directory])


def _generate_files(
    selection: plans.Selection, tree: PatchedTree, tools: tuple[Toolchain, TvmFfi], workspace: Workspace
) -> _GeneratedRecord:
    """Run the engine's generators in the work directory unless its files are those of this tree. The caller has locked it."""
    work, key = workspace.work(selection.directory), _generated_key(selection, tree, tools, workspace)
    record, stamp = workspace.cache / "generated" / f"{key}.json", work / "generated.key"
    if record.is_file() and stamp.is_file() and stamp.read_text() == key:
        return read_record(_GeneratedRecord, record)
    reporting.info(f"generating kernels of {selection.recipe.name} (tree {tree.tree[:12]})")
    stamp.unlink(missing_ok=True)
    patches.materialise(tree, work / "tree")
    cuda, ffi = tools
    requests = plans.generator_requests(selection)
    generated = _GeneratedRecord(generate(work / "tree", work, requests, selection.archs, cuda, ffi), tree.tree)
    write_record(record, generated)
    stamp.write_text(key)
    return generated
