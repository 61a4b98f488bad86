"""The wheel of our own kernels: CMake through scikit-build-core, from ``src/kernels`` and a patched CUTLASS.

The work directory is CMake's build directory as well, because :data:`sm120kit.build.cuda.FRONT_END` expects the compiler to run
where the CUDA home lies.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from sm120kit.build.compiling import Means, compile_error, under_gate
from sm120kit.build.cuda import link_toolchain, relink
from sm120kit.build.finishing import artifact, check, origin
from sm120kit.build.pack import EPOCH, local_version
from sm120kit.errors import CommandFailed, ToolchainMissing, ToolchainUnsuitable
from sm120kit.records import Artifact, Artifacts, BuildPlan, PatchedTree
from sm120kit.workspace import data_root, file_sha256, publish_directory, record_json, write_atomic, write_record

PACKAGE = "sm120kit_kernels"
BUILD_PACKAGES = ("cmake", "ninja", "scikit_build_core", "tvm_ffi")
"""What the wheel's backend and its CMake project import."""


def source_files() -> dict[str, str]:
    """The files of ``src/kernels`` with their sha256, by path below it."""
    root = data_root() / "src" / "kernels"
    files = (path for path in sorted(root.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(root)): file_sha256(path) for path in files}


def source_version() -> str:
    """The version of ``src/kernels``, without what a build adds to it."""
    info = json.loads((data_root() / "src" / "kernels" / PACKAGE / "build_info.json").read_text())
    return str(info["version"])


def compile_kernels(plan: BuildPlan, tree: PatchedTree, cutlass: Path, work: Path, means: Means) -> None:
    """Compile the kernels of a plan in ``work`` and let the backend make the wheel in ``work/dist``.

    Raises:
        ToolchainMissing: a Python package of the build is absent.
        ToolchainUnsuitable: the path of ``work`` has a character that divides arguments of CMake or nvcc.
        CommandFailed: CMake or the backend refuses.
        NotEnoughMemory, NotEnoughDisk, CompileFailed: as :func:`sm120kit.build.compiling.compile_units`.
    """
    absent = [name for name in BUILD_PACKAGES if importlib.util.find_spec(name) is None]
    if absent:
        raise ToolchainMissing(
            f"building the kernels needs {', '.join(absent)}, which this environment lacks",
            "install what it needs: pip install 'sm120kit[cuda,kernels]'",
        )
    require_fit_for_cmake(work)
    (module,) = plan.modules
    cuda = link_toolchain(work / "cuda", plan.toolchain)
    relink(work / "cutlass", cutlass)
    source = work / "source"
    _copy_source(source, record_json(_build_info(plan, tree)).encode())
    # CMake writes whole paths into its commands; where __FILE__ shows one, it is to be the same in every directory.
    same_paths = [f"-ffile-prefix-map={directory}={name}" for directory, name in ((work, "."), (_tvm_ffi(), "tvm_ffi"))]
    defines = {
        "CMAKE_CXX_COMPILER": plan.toolchain.host_compiler,
        "CMAKE_CUDA_COMPILER": str(cuda / "bin" / "nvcc"),
        "CMAKE_CUDA_HOST_COMPILER": plan.toolchain.host_compiler,
        "CMAKE_CUDA_COMPILER_LAUNCHER": f"{sys.executable};-m;sm120kit.memory",
        "CMAKE_CUDA_ARCHITECTURES": ";".join(f"{arch.removeprefix('sm_')}-real" for arch in plan.archs),
        "CMAKE_CXX_FLAGS": " ".join(same_paths),
        "CMAKE_CUDA_FLAGS": f"-Xcompiler={same_paths[0]}",
        "SM120KIT_CUTLASS": str(work / "cutlass"),
        "SM120KIT_KERNELS": ";".join(Path(unit.source).stem for unit in module.units),
    }
    log = work / "compile.log"
    log.unlink(missing_ok=True)
    dist = work / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    words: list[str | Path] = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--skip-dependency-check",
        "--outdir",
        dist,
    ]
    words += [f"-Cbuild-dir={work}", *(f"-Ccmake.define.{name}={value}" for name, value in defines.items()), source]
    environment = {
        "CMAKE_BUILD_PARALLEL_LEVEL": str(means.at_once),
        "SOURCE_DATE_EPOCH": EPOCH,
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    stale = [unit for unit in module.units if not (work / unit.output).is_file()]
    done, events = under_gate(
        words,
        work,
        stale,
        module.units,
        means,
        env=environment,
        drop=user_settings(),
        log=log,
    )
    said = done.stdout + done.stderr
    if re.search("^FAILED: ", said, re.MULTILINE):
        raise compile_error(said, events, log)
    if done.returncode != 0:
        tail = "\n".join(said.strip().splitlines()[-12:])
        raise CommandFailed(f"building the kernels failed with exit code {done.returncode}\n{tail}", f"log: {log}")


def require_fit_for_cmake(work: Path) -> None:
    """Refuse a directory in which CMake and nvcc cannot work.

    Raises:
        ToolchainUnsuitable: its path has a character that divides their arguments.
    """
    unfit = re.search(r"[\s,;'\"$]", str(work))
    if unfit:
        raise ToolchainUnsuitable(
            f"CMake and nvcc cannot work in {work}: {unfit[0]!r} divides their arguments",
            "name a state directory without it: --state or SM120KIT_STATE",
        )


def _tvm_ffi() -> Path:
    """The directory of tvm-ffi's package, where its headers are."""
    spec = importlib.util.find_spec("tvm_ffi")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def user_settings() -> list[str]:
    """Variables that would change what CMake and its compilers do."""
    return [
        name
        for name in os.environ
        if name.startswith(("CMAKE_", "SKBUILD_", "CUDA")) or name in ("CFLAGS", "CXXFLAGS", "LDFLAGS")
    ]


def _build_info(plan: BuildPlan, tree: PatchedTree) -> Mapping[str, object]:
    """What the package says of itself: everything that went in, see ``build_info()`` in it."""
    (module,) = plan.modules
    cutlass = next(inside.version for inside in tree.inside if inside.project == "cutlass")
    kernels = [Path(unit.source).stem for unit in module.units]
    return {**origin(plan, tree), "version": local_version(plan), "cutlass": cutlass, "kernels": kernels}


def _copy_source(target: Path, build_info: bytes) -> None:
    """Bring a copy of ``src/kernels`` up to date. Files that are the same stay, so that nothing is compiled for them again."""
    root = data_root() / "src" / "kernels"
    wanted = {name: (root / name).read_bytes() for name in source_files()} | {f"{PACKAGE}/build_info.json": build_info}
    for path in sorted(target.rglob("*")):
        if path.is_file() and str(path.relative_to(target)) not in wanted:
            path.unlink()
    for name, content in wanted.items():
        path = target / name
        if not path.is_file() or path.read_bytes() != content:
            write_atomic(path, content)


def finish_kernels(plan: BuildPlan, work: Path, target: Path) -> Artifacts:
    """Ask the finished library what it is, and publish wheel and records in ``target``: whole or not at all."""
    cubins = check(plan, work)
    (module,) = plan.modules
    (wheel,) = (work / "dist").glob("*.whl")
    with publish_directory(target) as beside:
        write_record(beside / "plan.json", plan)
        shutil.copyfile(wheel, beside / wheel.name)
        (beside / "logs").mkdir()
        shutil.copyfile(work / "compile.log", beside / "logs" / "compile.log")
        library = work / module.library
        artifacts = Artifacts(
            plan=plan.digest,
            wheel=artifact(beside / wheel.name, beside),
            modules=(Artifact(f"{PACKAGE}/{module.library}", file_sha256(library), library.stat().st_size),),
            kernels=sum(len(cubin.kernels) for images in cubins.values() for cubin in images),
            left_out=plan.left_out,
        )
        write_record(beside / "kernels.json", {name: [*images] for name, images in sorted(cubins.items())})
        write_record(beside / "artifacts.json", artifacts)
    return artifacts
