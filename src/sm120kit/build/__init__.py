"""``BuildPlan -> Artifacts``: drive the engine's generators, ninja and its wheel backend; ask the results what they are.

Everything is compiled in one work directory per recipe and arch list, which stays between builds so that ninja's depfiles can
save work. Commands there use relative paths only, so that the same inputs give the same bytes in every directory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm120kit import process
from sm120kit.build import pack
from sm120kit.cubin import matching, read
from sm120kit.errors import BadArtifact, CompileFailed, ExpectationFailed, NotEnoughMemory, ToolchainMissing
from sm120kit.memory import Costs, Event, Gate, Running, available
from sm120kit.records import Arch, Artifact, Artifacts, BuildPlan, Cubin, Generated, Toolchain, Unit
from sm120kit.workspace import file_sha256, publish_directory, require_disk, write_atomic, write_record

GENERATOR_PACKAGES = ("torch", "tvm_ffi", "jinja2", "numpy", "requests", "tqdm", "setuptools")
"""What FlashInfer's generators and build backend import."""

DISK_PER_UNIT = 60 * 2**20
"""Bytes that objects, temporary files of nvcc and the wheel take per unit, rounded up from measured builds."""


WATCH_SECONDS = 0.5


@dataclass(frozen=True)
class Progress:
    """A look at a running build: units that have finished, that run now, and all that this build compiles."""

    finished: tuple[Event, ...]
    running: tuple[Running, ...]
    units: tuple[Unit, ...]


def generate(
    tree: Path, work: Path, orders: dict[str, Any], archs: Sequence[Arch], toolchain: Toolchain
) -> tuple[tuple[Generated, ...], dict[str, str]]:
    """Let the engine generate its kernels below ``work`` and return its modules, and the versions their code depends on.

    Raises:
        ToolchainMissing: a Python package that the generators import is absent.
    """
    import importlib.util

    absent = [name for name in GENERATOR_PACKAGES if importlib.util.find_spec(name) is None]
    if absent:
        raise ToolchainMissing(
            f"FlashInfer's kernel generators import {', '.join(absent)}, which this environment lacks",
            "install what they need: pip install 'sm120kit[torch]'",
        )
    cuda = _link_toolchain(work / "cuda", toolchain)
    env = {
        "FLASHINFER_CUDA_ARCH_LIST": " ".join(f"{arch[3:5]}.{arch[5:]}" for arch in sorted(archs)),
        "FLASHINFER_WORKSPACE_BASE": str(work / "jit"),
        "FLASHINFER_NVCC": "$$SM120KIT_GATE $cuda_home/bin/nvcc",
        # Symbol tables name nvcc's temporary files, and a build id would hash them.
        "FLASHINFER_EXTRA_LDFLAGS": "-Wl,-s -Wl,--build-id=none",
        "CUDA_HOME": str(cuda),
        "CXX": toolchain.host_compiler,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
    }
    asked = json.dumps({"tree": str(tree), "modules": orders}).encode()
    done = process.run(
        [sys.executable, Path(__file__).with_name("engine_modules.py")],
        env=env,
        stdin=asked,
        drop=[name for name in os.environ if name.startswith("FLASHINFER_") or name in ("CC", "MAX_JOBS")],
        logfile=work / "generate.log",
    )
    answer = json.loads(done.stdout.splitlines()[-1])
    links = work / "include"
    links.mkdir(exist_ok=True)
    prefixes = {str(work) + "/": ""}
    for name, directory in answer["includes"].items():
        _relink(links / name, Path(directory))
        prefixes[directory] = f"include/{name}"
    modules = []
    for name, made in answer["modules"].items():
        ninja = made["ninja"]
        for absolute, relative in sorted(prefixes.items(), key=lambda item: -len(item[0])):
            ninja = ninja.replace(absolute, relative)
        units = tuple(
            (source, output) for output, source in re.findall(r"^build (\S+): (?:cuda_)?compile (\S+)$", ninja, re.MULTILINE)
        )
        modules.append(Generated(name, made["library"].removeprefix(str(work) + "/"), tuple(made["sources"]), units, ninja))
    return tuple(modules), {"apache-tvm-ffi": answer["tvm_ffi"]}


def _link_toolchain(cuda: Path, toolchain: Toolchain) -> Path:
    """A CUDA home in the work directory: links to the real one, the library names that linkers look for, a driver stub."""
    home = toolchain.cuda_home
    for name in ("bin", "nvvm", "include"):
        _relink(cuda / name, home / name)
    libraries = cuda / "lib64"
    libraries.mkdir(parents=True, exist_ok=True)
    for source in (home / "lib64", home / "lib"):
        for file in source.glob("lib*"):
            plain = re.sub(r"\.so\..*$", ".so", file.name)
            for name in {file.name, plain}:
                if not (libraries / name).is_symlink():
                    _relink(libraries / name, file)
    stub = libraries / "stubs" / "libcuda.so"
    if not stub.is_file():
        driver_stub(home / "include" / "cuda.h", stub, toolchain.host_compiler)
    return cuda


def driver_stub(cuda_h: Path, stub: Path, compiler: str) -> None:
    """A stand-in for the driver library, for linking and loading without a driver: every call answers 34, stub library.

    The driver comes with the GPU, not with the toolkit, and the compiler wheels have no stub of it (CUDA Driver API, CUresult).
    """
    header = cuda_h.read_text()
    names = set(re.findall(r"\bCUresult\s+CUDAAPI\s+(cu\w+)\s*\(", header))
    names |= set(re.findall(r"^#\s*define\s+cu[A-Z]\w*\s+(cu[A-Z]\w+)\s*$", header, re.MULTILINE))
    source = "".join(f"int {name}(void) {{ return 34; }}\n" for name in sorted(names))
    stub.parent.mkdir(parents=True, exist_ok=True)
    beside = stub.with_suffix(".new")
    process.run(
        [compiler, "-x", "c", "-", "-shared", "-fPIC", "-w", "-fno-builtin", "-Wl,-soname,libcuda.so.1", "-o", beside],
        stdin=source.encode(),
    )
    beside.rename(stub)


def _relink(link: Path, target: Path) -> None:
    if link.is_symlink() and link.readlink() == target:
        return
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(target)


def compile_units(
    plan: BuildPlan,
    generated: Sequence[Generated],
    work: Path,
    costs: Costs,
    *,
    jobs: int,
    budget_bytes: int,
    watch: Callable[[Progress], None] = lambda progress: None,
) -> tuple[Event, ...]:
    """Bring every unit and library of the plan up to date with ninja. Returns what was compiled now.

    Raises:
        NotEnoughMemory: the largest unit needs more than ``budget_bytes``.
        NotEnoughDisk: the file system is too small.
        CompileFailed: the compiler refused a unit; all others that were running have ended.
    """
    units = [unit for module in plan.modules for unit in module.units]
    # Lines of ninja read their variables at the top of the file, hence one file per module.
    for made in generated:
        write_atomic(work / "ninja" / f"{made.name}.ninja", made.ninja.encode())
    main = "".join(f"subninja ninja/{made.name}.ninja\n" for made in generated)
    write_atomic(work / "build.ninja", ("ninja_required_version = 1.3\n" + main).encode())
    targets = [module.library for module in plan.modules if module.packed]
    targets += [unit.output for module in plan.modules if not module.packed for unit in module.units]
    ninja = _ninja()
    stale = _stale(ninja, work, targets, units)
    if stale:
        largest = max(stale, key=lambda unit: unit.estimate_bytes)
        if largest.estimate_bytes > budget_bytes:
            raise NotEnoughMemory(
                f"{Path(largest.source).name} needs about {largest.estimate_bytes / 2**30:.1f} GiB to compile; "
                f"{budget_bytes / 2**30:.1f} GiB can be used",
                "end other programs, raise --memory, or choose a smaller kernel group (sm120kit recipe show)",
            )
        require_disk(work, DISK_PER_UNIT * len(stale), f"compiling {len(stale)} units")
    gate = Gate(work / "gate")
    gate.open({unit.output: unit.estimate_bytes for unit in stale}, budget_bytes)
    log = work / "compile.log"
    log.unlink(missing_ok=True)
    stop = threading.Event()

    def report() -> None:
        while not stop.wait(WATCH_SECONDS):
            watch(Progress(gate.events(), gate.running(), tuple(stale)))

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        done = process.run(
            [ninja, "-f", "build.ninja", "-j", str(jobs), *targets],
            cwd=work,
            env={
                "SM120KIT_GATE": f"{sys.executable} -m sm120kit.memory",
                "SM120KIT_GATE_DIR": str(gate.directory),
                "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])),
            },
            drop=["NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS", "CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH"],
            logfile=log,
            check=False,
        )
    finally:
        stop.set()
        reporter.join()
        for event in gate.events():
            costs.learn(_unit_key(event.output, units), event)
        costs.save()
    watch(Progress(gate.events(), (), tuple(stale)))
    if done.returncode != 0:
        raise _compile_error(done.stdout, gate.events(), log)
    return gate.events()


def _ninja() -> str:
    """The ninja of this environment's wheel."""
    import ninja

    return str(Path(ninja.BIN_DIR) / "ninja")


def _stale(ninja: str, work: Path, targets: Sequence[str], units: Sequence[Unit]) -> list[Unit]:
    """Units that ninja would compile now."""
    dry = process.run([ninja, "-f", "build.ninja", "-n", "-v", *targets], cwd=work, logfile=work / "compile.log", check=False)
    if dry.returncode != 0:
        raise CompileFailed(
            f"ninja cannot plan the build\n{(dry.stdout + dry.stderr).strip()[-500:]}", f"log: {work / 'compile.log'}"
        )
    return [unit for unit in units if f" -o {unit.output} " in dry.stdout + " "]


def _unit_key(output: str, units: Sequence[Unit]) -> str:
    unit = next(unit for unit in units if unit.output == output)
    return f"{unit.module}/{Path(output).name}"


def _compile_error(output: str, events: Sequence[Event], log: Path) -> CompileFailed | NotEnoughMemory:
    """The failed unit and the first thing its compiler said."""
    lines = output.splitlines()
    at = next((index for index, line in enumerate(lines) if line.startswith("FAILED: ")), 0)
    failed = lines[at].removeprefix("FAILED: ").strip() if lines else "ninja"
    failed = re.sub(r"^\[code=\d+\] ", "", failed).split(" ")[0]
    said = lines[at + 1 :]
    first = next((line for line in said if re.search(r"\berror\b", line, re.IGNORECASE)), "\n".join(said[1:6]))
    killed = next((event for event in events if event.output == failed and event.exit_code in (-9, 137)), None)
    if killed or re.search(
        r"Killed|bad_alloc|out of memory|virtual memory exhausted|Cannot allocate memory", "\n".join(said[:40])
    ):
        peak = next((event.peak_bytes for event in events if event.output == failed), 0)
        return NotEnoughMemory(
            f"{Path(failed).name}: the compiler ran out of memory (it had reached {peak / 2**30:.1f} GiB; "
            f"{available() / 2**30:.1f} GiB are available now)",
            f"end other programs, or compile one unit at a time with --jobs 1; log: {log}",
        )
    return CompileFailed(f"{Path(failed).name} does not compile\n{first.strip()}", f"log: {log}")


def check(plan: BuildPlan, work: Path) -> dict[str, tuple[Cubin, ...]]:
    """Ask every module what it is: its device code, the kernels the recipe expects, and whether it loads.

    Returns the device images per module.

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
        foreign = sorted({cubin.arch for cubin in cubins if not cubin.arch.startswith(("sm_120", "sm_121"))})
        if foreign:
            problems.append(f"{module.name}: device code for {', '.join(foreign)}")
        for pattern, least in module.expect_kernels:
            count = len(matching(pattern, cubins))
            if count < least:
                problems.append(f"{module.name}: {count} kernels like {pattern}, at least {least} are expected")
        if module.packed:
            refused = _load(work / module.library, work / "cuda" / "lib64")
            if refused:
                problems.append(f"{module.name}: does not load: {refused}")
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise ExpectationFailed(
            f"{plan.recipe} was built but is not what its recipe expects\n{listed}",
            f"look with `sm120kit inspect` at {work}",
        )
    return found


def _load(library: Path, libraries: Path) -> str:
    """What the dynamic loader refuses when every symbol must resolve, or an empty string. The driver is the stub."""
    program = (
        "import ctypes, sys, pathlib, tvm_ffi\n"
        "for name in ('stubs/libcuda.so', 'libcudart.so', 'libnvrtc.so'):\n"
        "    path = pathlib.Path(sys.argv[2], name)\n"
        "    path.exists() and ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)\n"
        "tvm_ffi.load_module(sys.argv[1])\n"
    )
    done = process.run([sys.executable, "-c", program, library, libraries], check=False)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def finish(plan: BuildPlan, tree: Path, work: Path, target: Path) -> Artifacts:
    """Check the modules, pack the wheel, and publish both with the records in ``target``: whole or not at all."""
    cubins = check(plan, work)
    with publish_directory(target) as beside:
        write_record(beside / "plan.json", plan)
        libraries = {module.name: work / module.library for module in plan.modules if module.packed}
        wheel = pack.wheel(plan, tree, libraries, beside, work / "pack", (beside / "plan.json").read_bytes())
        (beside / "logs").mkdir()
        for log in ("generate.log", "compile.log"):
            if (work / log).is_file():
                shutil.copyfile(work / log, beside / "logs" / log)
        artifacts = Artifacts(
            plan=plan.digest,
            wheel=_artifact(wheel, beside),
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


def _artifact(path: Path, root: Path) -> Artifact:
    return Artifact(str(path.relative_to(root)), file_sha256(path), path.stat().st_size)
