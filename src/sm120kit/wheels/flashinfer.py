"""Build a patched FlashInfer wheel with compiled kernels."""

from __future__ import annotations

import fnmatch
import os
import platform
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sm120kit import patches, recipes
from sm120kit.core import reporting
from sm120kit.core.digests import digest_of, file_sha256, is_digest
from sm120kit.core.errors import BadRecord, NotFound
from sm120kit.core.memory import Costs
from sm120kit.core.record_files import read_record, write_record
from sm120kit.core.records import Toolchain
from sm120kit.core.temporary import publish_directory
from sm120kit.core.toolchain import host_compiler
from sm120kit.core.workspace import Workspace
from sm120kit.kernels import tile_records
from sm120kit.kernels.tables import tile_table
from sm120kit.kernels.tiles.listing import generates_tiles
from sm120kit.patches.patch_records import PatchedTree
from sm120kit.recipes import locked_toolchain
from sm120kit.recipes.locked_toolchain import FFI, TvmFfi
from sm120kit.recipes.recipe_records import Lock
from sm120kit.recipes.target import FlashInferTarget
from sm120kit.sources.run_options import Options
from sm120kit.wheels import _plan as plans
from sm120kit.wheels.build_records import Artifact, Artifacts, BuildPlan, BuildRequest, Generated, Stage, WheelBuild
from sm120kit.wheels.published_wheels import artifact_of, published, push, shared, wheel_record

if TYPE_CHECKING:
    from sm120kit.wheels.compile import Progress


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
    recipe, workspace, stage = target.recipe, target.options.workspace, request.stage
    recipes.group(recipe, request.group)
    if stage is Stage.FETCH:
        _ = target.checkout
        return WheelBuild(recipe)
    tree = target.tree
    if stage is Stage.PATCH:
        return WheelBuild(recipe, tree)
    if request.group == recipes.NO_KERNELS:
        return _build_without_kernels(target, request)
    if stage is Stage.PACK and (found := _from_remote_plan(target, request)):
        return found
    prepared = _prepare(target, request)
    selection, plan, work = prepared.selection, prepared.plan, workspace.work(prepared.selection.directory)
    planned = WheelBuild(recipe, tree, plan)
    if stage is Stage.PLAN:
        return planned
    directory, remote = workspace.build(recipe.engine, plan.digest), target.options.remote
    if artifacts := published(plan, directory, remote):
        _push(target, request, plan, directory)
        return replace(planned, artifacts=artifacts, directory=directory)
    with workspace.exclusive(selection.directory):
        if artifacts := shared(plan, directory, remote):  # or by a process that this one waited for
            return replace(planned, artifacts=artifacts, directory=directory)
        _generate_files(selection, tree, prepared.tools, workspace)
        if prepared.has_unknown_tiles:
            _require_launchable(target, prepared.tools[0])
        _compile(plan, prepared.generated, work, target.options, watch)
        ffi = prepared.tools[1]
        if stage is Stage.COMPILE:
            from sm120kit.wheels._check import check_modules, tvm_ffi_loader

            check_modules(plan, work, tvm_ffi_loader(ffi.library, work, plan.toolchain))
            return planned
        artifacts = _check_and_pack(plan, tree, ffi, work, directory)
    _push(target, request, plan, directory)
    return replace(planned, artifacts=artifacts, directory=directory, ran=True)


def _from_remote_plan(target: FlashInferTarget, request: BuildRequest) -> WheelBuild | None:
    """The build in the remote cache whose plan was made from the same lockfile, archs, group and host compiler.

    To plan takes minutes without earlier results: compilers are unpacked and tiles measured.
    """
    options = target.options
    if options.remote is None or not (key := _plan_key(target, request)):
        return None
    with options.workspace.scratch() as scratch:
        if not options.remote.fetch(key, scratch):
            return None
        try:
            plan = read_record(BuildPlan, scratch / "plan.json")
        except (BadRecord, OSError) as error:
            reporting.warn(f"{key} of the cache is not a plan, and not used: {error}")
            return None
    archs = tuple(sorted(request.archs or target.recipe.archs))
    group = request.group or target.recipe.default_group
    expected = (target.recipe.name, target.recipe.engine, target.tree.tree, archs, (group,))
    if (plan.recipe, plan.engine, plan.tree, plan.archs, plan.groups) != expected or not is_digest(plan.digest):
        reporting.warn(f"{key} of the cache is the plan of another build, and not used")
        return None
    directory = options.workspace.build(target.recipe.engine, plan.digest)
    with options.workspace.exclusive(_selection(target, request).directory):
        artifacts = shared(plan, directory, options.remote)
    return WheelBuild(target.recipe, target.tree, plan, artifacts, directory) if artifacts else None


def _plan_key(target: FlashInferTarget, request: BuildRequest) -> str:
    """The key of a plan in a remote cache; empty if other inputs than those of the lockfile decide it."""
    native = request.machine == platform.machine()
    if target.local or not native or not target.lock_path.is_file() or os.environ.get("CUDA_HOME"):
        return ""
    _verified_lock(target)
    archs, (_, host_version) = sorted(request.archs or target.recipe.archs), host_compiler()
    group = request.group or target.recipe.default_group
    return f"plan-{digest_of([plans.PLAN_FORMAT, target.build_id, archs, group, host_version])}"


def _push(target: FlashInferTarget, request: BuildRequest, plan: BuildPlan, directory: Path) -> None:
    """Store a finished build in the remote cache, and then its plan by what it was made from."""
    remote = target.options.remote
    if push(plan, directory, remote) and remote and (key := _plan_key(target, request)):
        with target.options.workspace.scratch() as scratch:
            shutil.copyfile(directory / "plan.json", scratch / "plan.json")
            remote.push(key, scratch)


def unit_ptx(
    target: FlashInferTarget, request: BuildRequest, pattern: str, watch: Callable[[Progress], None] = lambda progress: None
) -> dict[str, str]:
    """The PTX of the units of a build whose ``module/file`` contains ``pattern`` or matches it, by ``module/file``.

    The commands are those of the build with -ptx instead of -c: ptxas gets this text in a build.

    Raises:
        NotFound: the recipe has no such kernel group, or no unit matches.
        CompileFailed, ResourceUnavailable: a unit does not compile.
    """
    from sm120kit.wheels import compile as compiling

    if request.group == recipes.NO_KERNELS:
        raise NotFound(f"kernel group {recipes.NO_KERNELS} has no units", "leave out --kernels, or name another group")
    workspace = target.options.workspace
    prepared = _prepare(target, request)
    units = [unit for module in prepared.plan.modules for unit in module.units if unit.source.endswith(".cu")]
    chosen = [unit for unit in units if pattern in unit.name or fnmatch.fnmatch(unit.name, pattern)]
    if not chosen:
        raise NotFound(f"no unit of {prepared.plan.recipe} matches {pattern!r}", f"units: {', '.join(u.name for u in units)}")
    work = workspace.work(prepared.selection.directory)
    with workspace.exclusive(prepared.selection.directory):
        _generate_files(prepared.selection, target.tree, prepared.tools, workspace)
        reporting.info(f"compiling {len(chosen)} units to PTX")
        settings = compiling.CompileSettings.of(target.options, watch)
        outputs = compiling.compile_ptx(chosen, prepared.generated, work, settings)
        return {unit.name: (work / output).read_text() for unit, output in zip(chosen, outputs, strict=True)}


@dataclass(frozen=True)
class _PreparedBuild:
    """What a build compiles, and with which compilers; ``has_unknown_tiles``: no record has the tiles of its source."""

    selection: plans.Selection
    tools: tuple[Toolchain, TvmFfi]
    generated: tuple[Generated, ...]
    plan: BuildPlan
    has_unknown_tiles: bool


def _prepare(target: FlashInferTarget, request: BuildRequest) -> _PreparedBuild:
    """Find the compilers, run the generators and plan the build."""
    recipe, workspace, tree = target.recipe, target.options.workspace, target.tree
    selection = _selection(target, request)
    lock = _verified_lock(target)
    if request.machine == platform.machine():
        tools = locked_toolchain.compilers(target, selection.archs)
    else:
        tools = locked_toolchain.cross_compilers(target, request.machine, selection.archs)
    ffi = locked_toolchain.tvm_ffi(target, request.machine)
    for line in locked_toolchain.toolchain_differences(lock, tools) if lock else ():
        reporting.info(f"not the locked toolchain: {line}")
    costs = Costs(workspace.cache / "costs.json")
    generated = _generate(selection, tree, (tools, ffi), workspace).modules
    environment = plans.BuildEnvironment(tools, {FFI: ffi.version}, costs.of)
    tiled = any(generates_tiles(recipe.modules[module.name].generator) for module in generated)
    recorded = tile_records.recorded(target) if tiled else ()
    plan = plans.plan_flashinfer(selection, tree, generated, environment, recorded or ())
    return _PreparedBuild(selection, (tools, ffi), generated, plan, recorded is None)


def _require_launchable(target: FlashInferTarget, tools: Toolchain) -> None:
    """Require that SM12x can launch every tile that the source generates.

    Raises:
        CheckFailed: it cannot.
    """
    tile_records.left_out(target.recipe.name, tile_table(target.recipe, target.tree, tools, target.options.workspace))


def _build_without_kernels(target: FlashInferTarget, request: BuildRequest) -> WheelBuild:
    """Build the wheel of a patched tree without a compiled module."""
    workspace, tree, stage = target.options.workspace, target.tree, request.stage
    selection = _selection(target, request)
    _verified_lock(target)
    plan = plans.plan_flashinfer(selection, tree, (), plans.BuildEnvironment(plans.NO_TOOLCHAIN, {}), ())
    planned = WheelBuild(target.recipe, tree, plan)
    directory = workspace.build(target.recipe.engine, plan.digest)
    artifacts = None if stage is Stage.PLAN else published(plan, directory)
    ran = stage is Stage.PACK and artifacts is None
    if ran:
        with workspace.exclusive(selection.directory):
            work = workspace.work(selection.directory)
            patches.materialise(tree, work / "tree")
            artifacts = published(plan, directory) or _check_and_pack(plan, tree, None, work, directory)
    return replace(planned, artifacts=artifacts, directory=directory, ran=ran) if artifacts else planned


def require_memory(target: FlashInferTarget, request: BuildRequest) -> None:
    """Require the memory for the largest unit, by the recipe's estimates, before anything is fetched.

    Where units were compiled before or a remote cache may have them, :func:`build` checks what is left to compile.

    Raises:
        NotFound: the recipe has no such kernel group.
        ResourceUnavailable: it does not fit.
    """
    from sm120kit.wheels import compile as compiling

    if recipes.group(target.recipe, request.group).modules and _compiles_first(target, request):
        compiling.require_memory(*_selection(target, request).largest_unit, target.options.memory_bytes)


def expected_disk_bytes(target: FlashInferTarget, request: BuildRequest) -> int:
    """The disk space for compiling a kernel group, estimated before its units are known; 0 where it may be compiled already.

    Raises:
        NotFound: the recipe has no such kernel group.
    """
    from sm120kit.wheels import compile as compiling

    modules = recipes.group(target.recipe, request.group).modules
    if not _compiles_first(target, request):
        return 0
    return compiling.DISK_PER_UNIT * compiling.UNITS_PER_MODULE * len(modules)


def _selection(target: FlashInferTarget, request: BuildRequest) -> plans.Selection:
    return plans.Selection(target.recipe, request.archs or target.recipe.archs, request.group, request.machine)


def _compiles_first(target: FlashInferTarget, request: BuildRequest) -> bool:
    """Whether a build compiles, and neither an earlier one nor a remote cache can have what it compiles."""
    from sm120kit.wheels import compile as compiling

    workspace = target.options.workspace
    log = workspace.work(_selection(target, request).directory) / compiling.LOG
    compiled = log.is_file() or workspace.build(target.recipe.engine, "").is_dir()
    return request.stage in (Stage.COMPILE, Stage.PACK) and not compiled and target.options.remote is None


def _verified_lock(target: FlashInferTarget) -> Lock | None:
    """The lockfile of a target; None, with a message, if the recipe is not locked."""
    if target.lock_path.is_file():
        return target.lock
    name = target.argument
    reporting.info(
        f"{name} is not locked: this build cannot be compared with earlier ones; lock it: sm120kit recipe lock {name}"
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
    from sm120kit.wheels.generators import generate

    reporting.info(f"generating kernels of {selection.recipe.name} (tree {tree.tree[:12]})")
    stamp.unlink(missing_ok=True)
    patches.materialise(tree, work / "tree")
    cuda, ffi = tools
    requests = plans.generator_requests(selection)
    generated = _GeneratedRecord(generate(work / "tree", work, requests, selection.archs, cuda, ffi), tree.tree)
    write_record(record, generated)
    stamp.write_text(key)
    return generated


def _compile(
    plan: BuildPlan, generated: Sequence[Generated], work: Path, options: Options, watch: Callable[[Progress], None]
) -> None:
    from sm120kit.wheels.compile import CompileSettings, compile_units

    units = sum(len(module.units) for module in plan.modules)
    reporting.info(f"compiling {units} units of {len(plan.modules)} modules")
    compile_units(plan, generated, work, CompileSettings.of(options, watch))


def _check_and_pack(plan: BuildPlan, tree: PatchedTree, ffi: TvmFfi | None, work: Path, directory: Path) -> Artifacts:
    """Check the modules, pack the wheel, and publish it with its records in ``directory``, completely or not at all.

    ``ffi`` loads the modules; None without any.
    """
    from sm120kit.wheels._check import check_modules, count_kernels, tvm_ffi_loader
    from sm120kit.wheels.pack import pack_wheel

    reporting.info("checking the modules and packing the wheel")
    cubins = check_modules(plan, work, tvm_ffi_loader(ffi.library, work, plan.toolchain) if ffi else lambda module: ())
    with publish_directory(directory) as staging:
        write_record(staging / "plan.json", plan)
        libraries = {module.name: work / module.library for module in plan.modules if module.packed}
        wheel = pack_wheel(plan, tree, libraries, staging, work, wheel_record(plan, tree))
        (staging / "logs").mkdir()
        for log in ("generate.log", "compile.log"):
            if (work / log).is_file():
                shutil.copyfile(work / log, staging / "logs" / log)
        artifacts = Artifacts(
            plan=plan.digest,
            wheel=artifact_of(wheel, staging),
            modules=tuple(
                Artifact(f"flashinfer/data/aot/{name}/{name}.so", file_sha256(library), library.stat().st_size)
                for name, library in sorted(libraries.items())
            ),
            kernels=count_kernels(cubins),
            left_out=plan.left_out,
        )
        write_record(staging / "kernels.json", {name: [*files] for name, files in sorted(cubins.items())})
        write_record(staging / "artifacts.json", artifacts)
    return artifacts
