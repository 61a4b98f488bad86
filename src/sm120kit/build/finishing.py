"""Ask finished modules what they are, pack them, and publish wheel and records."""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from sm120kit import process
from sm120kit.build import pack
from sm120kit.cubin import matching, read
from sm120kit.errors import BadArtifact, ExpectationFailed
from sm120kit.records import Artifact, Artifacts, BuildPlan, Cubin, LockedWheel, Module, PatchedTree
from sm120kit.workspace import file_sha256, publish_directory, record_json, write_record

SM12X = re.compile(r"(sm|compute)_12[01][af]?$")
"""Archs of code, and of PTX, that SM12x runs."""


def check(
    plan: BuildPlan, work: Path, refused: Callable[[Module], tuple[str, ...]] | None = None
) -> dict[str, tuple[Cubin, ...]]:
    """Ask every module what it is: its device code, the kernels the recipe expects, and whether it loads.

    ``refused`` says what else is wrong with a module; without it, whether tvm-ffi can load it. Returns the device images per
    module.

    Raises:
        ExpectationFailed: device code that SM12x cannot run, an expected kernel that is not there, or a library that does
            not load because of undefined symbols.
    """
    found: dict[str, tuple[Cubin, ...]] = {}
    problems = []
    for module in plan.modules:
        files = [work / module.library] if module.packed else [work / unit.output for unit in module.units]
        cubins: list[Cubin] = []
        for file in files:
            try:
                cubins += read(file)
            except BadArtifact:
                if module.packed:
                    raise
        found[module.name] = tuple(cubins)
        foreign = sorted({cubin.arch for cubin in cubins if not SM12X.match(cubin.arch)})
        if foreign:
            problems.append(f"{module.name}: device code for {', '.join(foreign)}")
        for pattern, least in module.expect_kernels:
            count = len(matching(pattern, cubins))
            if count < least:
                problems.append(f"{module.name}: {count} kernels like {pattern}, at least {least} are expected")
        if module.packed:
            wrong = refused(module) if refused else _load(work / module.library, work / "cuda" / "lib64")
            problems += [f"{module.name}: {problem}" for problem in wrong]
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise ExpectationFailed(
            f"{plan.recipe} was built but is not what its recipe expects\n{listed}",
            f"look with `sm120kit inspect` at {work}",
        )
    return found


def _load(library: Path, libraries: Path) -> tuple[str, ...]:
    """What the dynamic loader refuses when every symbol must resolve. The driver is the stub."""
    program = (
        "import ctypes, sys, pathlib, tvm_ffi\n"
        "for name in ('stubs/libcuda.so', 'libcudart.so', 'libnvrtc.so'):\n"
        "    path = pathlib.Path(sys.argv[2], name)\n"
        "    path.exists() and ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)\n"
        "tvm_ffi.load_module(sys.argv[1])\n"
    )
    done = process.run([sys.executable, "-c", program, library, libraries], check=False)
    if done.returncode == 0:
        return ()
    return (f"does not load: {(done.stderr.strip().splitlines() or [f'exit code {done.returncode}'])[-1]}",)


def finish(plan: BuildPlan, tree: PatchedTree, work: Path, target: Path) -> Artifacts:
    """Check the modules, pack the wheel, and publish both with the records in ``target``: whole or not at all."""
    cubins = check(plan, work)
    with publish_directory(target) as beside:
        write_record(beside / "plan.json", plan)
        libraries = {module.name: work / module.library for module in plan.modules if module.packed}
        wheel = pack.wheel(plan, work / "tree", libraries, beside, work / "pack", record_json(origin(plan, tree)).encode())
        (beside / "logs").mkdir()
        for log in ("generate.log", "compile.log"):
            if (work / log).is_file():
                shutil.copyfile(work / log, beside / "logs" / log)
        artifacts = Artifacts(
            plan=plan.digest,
            wheel=artifact(wheel, beside),
            modules=tuple(
                Artifact(f"flashinfer/data/aot/{name}/{name}.so", file_sha256(library), library.stat().st_size)
                for name, library in sorted(libraries.items())
            ),
            kernels=sum(len(cubin.kernels) for images in cubins.values() for cubin in images),
            left_out=plan.left_out,
        )
        write_record(beside / "kernels.json", {name: [*images] for name, images in sorted(cubins.items())})
        write_record(beside / "artifacts.json", artifacts)
    return artifacts


def origin(plan: BuildPlan, tree: PatchedTree) -> dict[str, object]:
    """What a wheel says about itself: everything that went in, and neither costs nor directories, which differ by machine."""
    return {
        "recipe": plan.recipe,
        "archs": plan.archs,
        "kernel_groups": plan.groups,
        "plan": plan.digest,
        "pin": tree.checkout.pin,
        "inside": tree.inside,
        "base": tree.checkout.commit,
        "commit": tree.commit,
        "tree": tree.tree,
        "patches": tree.patches,
        "modules": [module.name for module in plan.modules if module.packed],
        "left_out": plan.left_out,
        "toolchain": {"nvcc": plan.toolchain.nvcc_version, "host": plan.toolchain.host_version},
    }


def repacked(
    plan: BuildPlan, tree: PatchedTree, official: tuple[LockedWheel, Path], places: Mapping[str, Path]
) -> dict[str, object]:
    """What a wheel that is packed again says about itself: also the official one, and every file that is another in it.

    ``official`` is that wheel and where it lies, ``places`` are the new files by member.
    """
    locked, path = official
    with zipfile.ZipFile(path) as wheel:
        replaced = {
            member: {"official": hashlib.sha256(wheel.read(member)).hexdigest(), "here": file_sha256(file)}
            for member, file in places.items()
        }
    return {
        **origin(plan, tree),
        "official": {"wheel": locked.filename, "sha256": locked.sha256},
        "replaced": replaced,
    }


def artifact(path: Path, root: Path) -> Artifact:
    """The record of a file below ``root``."""
    return Artifact(str(path.relative_to(root)), file_sha256(path), path.stat().st_size)
