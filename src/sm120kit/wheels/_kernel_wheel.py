"""Build our own kernel wheel: CMake through scikit-build-core, from ``src/sm120kit_kernels`` and a patched CUTLASS.

The work directory is also CMake's build directory, because :data:`sm120kit.wheels._cuda_home.FRONT_END` requires that the
compiler runs in the directory of the CUDA home.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sm120kit.core import reporting
from sm120kit.core.archives import SOURCE_DATE_EPOCH
from sm120kit.core.atomic_writes import write_atomic
from sm120kit.core.data_roots import data_root
from sm120kit.core.digests import digest_of, file_sha256
from sm120kit.core.errors import CommandFailed, NotFound, RequirementMissing
from sm120kit.core.memory import Costs
from sm120kit.core.record_files import record_json
from sm120kit.core.toolchain import installed_version
from sm120kit.kernels.cubin.cubin_records import Cubin
from sm120kit.kernels.tables import export_tree
from sm120kit.patches.patch_records import PatchedTree
from sm120kit.recipes import locked_toolchain
from sm120kit.recipes.target import FlashInferTarget
from sm120kit.wheels import _plan as plans
from sm120kit.wheels._check import check_modules, tvm_ffi_loader
from sm120kit.wheels._cuda_home import link_toolchain, relink
from sm120kit.wheels.build_records import Artifacts, BuildPlan, BuildRequest, Stage, WheelBuild
from sm120kit.wheels.compile import LOG, CompileSettings, Progress, compile_error, run_gated
from sm120kit.wheels.pack import local_version
from sm120kit.wheels.published_wheels import build_once, publish, wheel_record

PACKAGE = "sm120kit_kernels"
BUILD_PACKAGES = ("cmake", "ninja", "scikit_build_core", "tvm_ffi")
"""Python packages that the wheel's backend and its CMake project import."""

VERSIONED_PACKAGES = ("apache-tvm-ffi", "cmake", "scikit-build-core")
"""Distributions whose versions are inputs of the wheel."""


def build(
    target: FlashInferTarget, request: BuildRequest, watch: Callable[[Progress], None] = lambda progress: None
) -> WheelBuild:
    """Build the kernel wheel against the patched CUTLASS of a recipe, up to the stage of the request.

    Raises:
        NotFound: the recipe has no CUTLASS, or no kernel has the requested prefix.
        RequirementMissing: no compiler for the archs, or a build package is not installed.
        CommandFailed, CompileFailed, ResourceUnavailable, CheckFailed: the build failed.
    """
    recipe, workspace, stage = target.recipe, target.options.workspace, request.stage
    cutlass = next((project for project in recipe.inside if project.project == "cutlass"), None)
    if cutlass is None:
        raise NotFound(f"the sources of {recipe.name} contain no CUTLASS", "name a recipe with one: kernels@flashinfer-0.6.6")
    if stage is Stage.FETCH:
        _ = target.checkout
        return WheelBuild(recipe)
    tree = target.tree
    if stage is Stage.PATCH:
        return WheelBuild(recipe, tree)
    selection = plans.Selection(recipe, request.archs or recipe.archs, request.group)
    versions = {name: installed_version(name) for name in VERSIONED_PACKAGES}
    tools = locked_toolchain.compilers(target, selection.archs, (), unpack=False)
    environment = plans.BuildEnvironment(tools, versions, Costs(workspace.cache / "costs.json").of)
    plan = plans.plan_kernel_wheel(selection, tree, source_version(), source_files(), environment)
    planned = WheelBuild(recipe, tree, plan)
    if stage is Stage.PLAN:
        return planned
    # Ninja does not detect that a header is older or that the same path is another compiler.
    name = f"{plan.engine}-{digest_of([tree.tree, plan.archs, plan.toolchain, versions])[:12]}"
    work = workspace.work(name)

    def make(directory: Path) -> Artifacts:
        locked_toolchain.compilers(target, selection.archs, ())
        units = len(plan.modules[0].units)
        reporting.info(f"compiling {units} kernels against CUTLASS of {recipe.name} (tree {tree.tree[:12]})")
        headers = export_tree(tree, workspace) / cutlass.path
        compile_kernels(plan, tree, headers, work, CompileSettings.of(target.options, watch))
        reporting.info("checking the kernels")
        cubins = check_modules(plan, work, tvm_ffi_loader(_tvm_ffi() / "lib" / "libtvm_ffi.so", work, plan.toolchain))
        return _publish(plan, work, directory, cubins)

    return build_once(planned, name, target.options, make)


def source_files() -> dict[str, str]:
    """The files of ``src/sm120kit_kernels`` with their sha256, by path below it."""
    root = data_root() / "src" / "sm120kit_kernels"
    files = (path for path in sorted(root.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(root)): file_sha256(path) for path in files}


def source_version() -> str:
    """The version of ``src/sm120kit_kernels``, without the local part that a build adds."""
    info = json.loads((data_root() / "src" / "sm120kit_kernels" / PACKAGE / "build_info.json").read_text())
    return str(info["version"])


def compile_kernels(plan: BuildPlan, tree: PatchedTree, cutlass: Path, work: Path, settings: CompileSettings) -> None:
    """Compile the kernels of a plan in ``work`` and pack them as a wheel in ``work/dist``.

    ``cutlass`` is the directory of the patched CUTLASS.

    Raises:
        RequirementMissing: a Python package of the build is absent.
        RequirementMissing: the path of ``work`` has a character that splits arguments of CMake or nvcc.
        CommandFailed: CMake or the backend fails.
        ResourceUnavailable, CompileFailed: as :func:`sm120kit.wheels.compile.compile_units`.
    """
    absent = [name for name in BUILD_PACKAGES if importlib.util.find_spec(name) is None]
    if absent:
        raise RequirementMissing(
            f"building the kernels needs {', '.join(absent)}, which this environment lacks",
            "install its packages: pip install 'sm120kit[kernels]'",
        )
    require_path_for_cmake(work)
    (module,) = plan.modules
    cuda = link_toolchain(work / "cuda", plan.toolchain)
    relink(work / "cutlass", cutlass)
    source = work / "source"
    _copy_source(source, record_json(_build_info(plan, tree)).encode())
    # CMake puts absolute paths into its commands; __FILE__ has to be the same in every directory.
    same_paths = [f"-ffile-prefix-map={directory}={name}" for directory, name in ((work, "."), (_tvm_ffi(), "tvm_ffi"))]
    defines = {
        "CMAKE_CXX_COMPILER": plan.toolchain.host_compiler,
        "CMAKE_CUDA_COMPILER": str(cuda / "bin" / "nvcc"),
        "CMAKE_CUDA_HOST_COMPILER": plan.toolchain.host_compiler,
        "CMAKE_CUDA_COMPILER_LAUNCHER": f"{sys.executable};-m;sm120kit.core.memory",
        "CMAKE_CUDA_ARCHITECTURES": ";".join(f"{arch.removeprefix('sm_')}-real" for arch in plan.archs),
        "CMAKE_CXX_FLAGS": " ".join(same_paths),
        "CMAKE_CUDA_FLAGS": f"-Xcompiler={same_paths[0]}",
        "SM120KIT_CUTLASS": str(work / "cutlass"),
        "SM120KIT_KERNELS": ";".join(Path(unit.source).stem for unit in module.units),
    }
    dist = work / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    argv: list[str | Path] = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--skip-dependency-check",
        "--outdir",
        dist,
    ]
    argv += [f"-Cbuild-dir={work}", *(f"-Ccmake.define.{name}={value}" for name, value in defines.items()), source]
    environment = {
        "CMAKE_BUILD_PARALLEL_LEVEL": str(settings.parallel),
        "SOURCE_DATE_EPOCH": str(SOURCE_DATE_EPOCH),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    stale = [unit for unit in module.units if not (work / unit.output).is_file()]
    env = {**dict.fromkeys(user_variables()), **environment}
    done, finished = run_gated(argv, work, stale, module.units, settings, env=env)
    output = done.stdout + done.stderr
    if re.search("^FAILED: ", output, re.MULTILINE):
        raise compile_error(output, finished, work / LOG)
    if done.returncode != 0:
        tail = "\n".join(output.strip().splitlines()[-12:])
        raise CommandFailed(f"building the kernels failed with exit code {done.returncode}\n{tail}", f"log: {work / LOG}")


def require_path_for_cmake(work: Path) -> None:
    """Require a directory in which CMake and nvcc can work.

    Raises:
        RequirementMissing: its path has a character that splits their arguments.
    """
    separator = re.search(r"[\s,;'\"$]", str(work))
    if separator:
        raise RequirementMissing(
            f"CMake and nvcc cannot work in {work}: {separator[0]!r} splits their arguments",
            "name a state directory without it: --state or SM120KIT_STATE",
        )


def _tvm_ffi() -> Path:
    """The directory of the package tvm-ffi, which contains its headers."""
    spec = importlib.util.find_spec("tvm_ffi")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def user_variables() -> list[str]:
    """Environment variables that would change the output of CMake and its compilers."""
    return [
        name
        for name in os.environ
        if name.startswith(("CMAKE_", "SKBUILD_", "CUDA")) or name in ("CFLAGS", "CXXFLAGS", "LDFLAGS")
    ]


def _build_info(plan: BuildPlan, tree: PatchedTree) -> Mapping[str, object]:
    """Contents of the package's ``build_info()``: every input of the wheel."""
    (module,) = plan.modules
    cutlass = next(project.version for project in tree.inside if project.project == "cutlass")
    kernels = [Path(unit.source).stem for unit in module.units]
    return {
        **wheel_record(plan, tree),
        "version": local_version(plan.version, plan.digest),
        "cutlass": cutlass,
        "kernels": kernels,
    }


def _copy_source(target: Path, build_info: bytes) -> None:
    """Update a copy of ``src/sm120kit_kernels``. Equal files are not written, so that their units are not compiled again."""
    root = data_root() / "src" / "sm120kit_kernels"
    contents = {name: (root / name).read_bytes() for name in source_files()} | {f"{PACKAGE}/build_info.json": build_info}
    for path in sorted(target.rglob("*")):
        if path.is_file() and str(path.relative_to(target)) not in contents:
            path.unlink()
    for name, content in contents.items():
        path = target / name
        if not path.is_file() or path.read_bytes() != content:
            write_atomic(path, content)


def _publish(plan: BuildPlan, work: Path, directory: Path, cubins: Mapping[str, Sequence[Cubin]]) -> Artifacts:
    (module,) = plan.modules
    (wheel,) = (work / "dist").glob("*.whl")
    libraries = {f"{PACKAGE}/{module.library}": work / module.library}
    return publish(plan, directory, lambda out: Path(shutil.copy(wheel, out)), libraries, cubins, [work / LOG])
