"""Run a program for SM120 on a Hopper GPU: compile the preloaded driver, start the program, and read what it loaded."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sm12x_lab import gpu
from sm12x_lab.gpu import CudaDevice
from sm12x_lab.ptx import images, library, perturb, syntax
from sm120kit.core import process, toolchain
from sm120kit.core.digests import digest_of, file_sha256
from sm120kit.core.errors import BadInput, CompileFailed, RequirementMissing, SystemRefused
from sm120kit.core.records import Toolchain
from sm120kit.core.temporary import owned_directory
from sm120kit.core.workspace import Workspace

FORMAT = 1

LIBRARY = "libsm120kit_driver.so"
SHIM = Path(__file__).with_name("driver_shim.c")
FLAGS = ("-x", "c", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")

L2_BYTES = {188: 128 * 2**20, 170: 96 * 2**20, 48: 24 * 2**20}
"""L2 cache by number of multiprocessors, of RTX PRO 6000 Blackwell, RTX 5090 and DGX Spark (NVIDIA's architecture papers)."""
DEFAULT_L2_BYTES, SPARK = L2_BYTES[188], 48

CANNOT_SHOW = (
    "the instructions in silicon: they are software functions here, after the text of the PTX ISA",
    "the machine code that ptxas generates for sm_120",
    "modules without PTX for SM12x that also have code for Hopper: the driver loads that, and the record lists them",
    "residency of kernels that wait for each other without a cooperative launch",
    "races that need the timing of SM120; speed, occupancy, clocks",
)


@dataclass(frozen=True)
class SimulatedGpu:
    """The GPU that a program sees: ``sms`` multiprocessors, by default those of the GPU that there is.

    It is an SM120 GPU; with 48 multiprocessors SM121, as DGX Spark.
    ``strict``: modules are refused that would run code for Hopper.
    """

    sms: int | None = None
    strict: bool = False

    @property
    def l2_bytes(self) -> int | None:
        """The size of its L2 cache; None for a number of multiprocessors that no known GPU has."""
        return L2_BYTES.get(self.sms) if self.sms else DEFAULT_L2_BYTES

    def environment(self) -> dict[str, str]:
        """The variables that the preloaded driver reads."""
        return {
            "SM120KIT_PTX_SMS": str(self.sms or ""),
            "SM120KIT_PTX_L2": str(self.l2_bytes or ""),
            images.MINOR: "1" if self.sms == SPARK else "",
            "SM120KIT_PTX_STRICT": "1" if self.strict else "",
        }


@dataclass(frozen=True)
class HopperModule:
    """A module whose code for Hopper ran: the file that it is in, its size, and the kernels that were looked up in it.

    ``also_for_sm120``: it has machine code for SM12x, which SM120 would run.
    """

    file: str
    bytes: int
    also_for_sm120: bool
    kernels: tuple[str, ...]


@dataclass(frozen=True)
class InterposedRun:
    """A program's run: its exit code, the modules that were rewritten for it, and what was refused.

    ``refused_modules`` counts modules that have no replacement or that SM120 cannot load, ``rejected_modules`` those among them
    that ptxas rejects for their own target; ``refused_shared_bytes`` are requests for more shared memory than a CTA of SM120
    has, ``refused_launches`` numbers of CTAs, threads, dynamic shared bytes, and CTAs for which one multiprocessor has room.
    ``hopper_modules`` are not verified. ``unseen`` are programs that were started without the preloaded driver.
    """

    command: tuple[str, ...]
    exit_code: int
    modules: tuple[dict[str, Any], ...]
    refused_modules: int
    refused_shared_bytes: tuple[int, ...]
    rejected_modules: int = 0
    refused_launches: tuple[tuple[int, ...], ...] = ()
    hopper_modules: tuple[HopperModule, ...] = ()
    unseen: tuple[str, ...] = ()

    @property
    def kernels(self) -> int:
        """Number of rewritten kernels."""
        return sum(len(module["kernels"]) for module in self.modules)

    @property
    def replaced(self) -> dict[str, int]:
        """Number of replaced instructions by opcode, most frequent first."""
        counts: dict[str, int] = {}
        for module in self.modules:
            for opcode, count in module["replaced"].items():
                counts[opcode] = counts.get(opcode, 0) + count
        return dict(sorted(counts.items(), key=lambda item: -item[1]))


@dataclass(frozen=True)
class Interposition:
    """A directory with the preloaded driver, the programs that it starts, and what they need; one run's records are in it."""

    directory: Path
    tools: Toolchain
    gpu: SimulatedGpu = SimulatedGpu()

    def environment(self) -> dict[str, str]:
        """The variables of a program that runs with the preloaded driver.

        Triton assembles its kernels with a program of its own, which is replaced by one that rewrites them first. CuTe DSL
        assembles them itself, and keeps the PTX beside the machine code that it loads. Both compile anew: what they compiled
        before has no PTX, or is for the GPU of its name.
        """
        others = os.environ.get("LD_PRELOAD", "")
        triton = {name: str(self.directory / "ptxas") for name in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")}
        return {
            "LD_PRELOAD": f"{self.directory / LIBRARY}{f':{others}' if others else ''}",
            images.RUN_DIRECTORY: str(self.directory),
            "SM120KIT_PTX_REWRITER": str(self.directory / "rewriter"),
            **triton,
            "TRITON_CACHE_DIR": str(self.directory / "triton"),
            "CUTE_DSL_KEEP_PTX": "1",
            "CUTE_DSL_KEEP_CUBIN": "1",
            "CUTE_DSL_DUMP_DIR": str(self.directory / images.CUTE_DSL),
            "B12X_CUTE_COMPILE_CACHE_DIR": str(self.directory / "b12x"),
            **self.gpu.environment(),
        }

    def part(self, name: str, captured: bool) -> Interposition:
        """A directory below this one for the records of one program, with or without the captured PTX."""
        directory = self.directory / name
        directory.mkdir()
        (directory / images.CUTE_DSL).mkdir()
        for file in (LIBRARY, "rewriter", "ptxas", images.FUNCTIONS, perturb.FLAG):
            if (self.directory / file).exists():
                (directory / file).hardlink_to(self.directory / file)
        (directory / images.CAPTURED).write_text((self.directory / images.CAPTURED).read_text() if captured else "")
        return replace(self, directory=directory)

    def modules(self) -> list[dict[str, Any]]:
        """The records of the modules that were rewritten."""
        return [json.loads(path.read_text()) for path in sorted(self.directory.glob(f"*{images.RECORD}"))]


def captured_kernels(directory: Path) -> dict[str, Path]:
    """The PTX file of each kernel in a directory.

    Raises:
        BadInput: it has no PTX files with kernels, or one that cannot be read.
    """
    try:
        kernels = images.captured_kernels(directory)
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{directory} has a PTX file that cannot be read: {error}", "remove it, or capture it again") from error
    if not kernels:
        raise BadInput(f"{directory} has no PTX files with kernels", "make them: sm120kit verify ptx RECIPE --capture DIR")
    return kernels


@contextmanager
def prepared(
    captured: Path | None,
    workspace: Workspace,
    tools: Toolchain,
    *,
    fast: bool = False,
    apart: bool = False,
    simulated: SimulatedGpu = SimulatedGpu(),
    perturbed: bool = False,
) -> Iterator[Interposition]:
    """A directory for runs with the preloaded driver; kernels in ``captured`` take the place of those of the same name.

    ``fast``: MMAs have the arithmetic of fast.cu, which is not that of the PTX ISA. ``apart``: each captured kernel is a module
    of its own. Kernels of a module that share variables would not share them then. ``perturbed``: modules have sites for
    delays.

    Raises:
        BadInput: ``captured`` has no PTX files, or one that cannot be read.
        SystemRefused: the dynamic loader cannot preload a library from the state directory.
        RequirementMissing: no C compiler that makes the library.
    """
    kernels = captured_kernels(captured) if captured else {}
    if re.search(r"[\s:]", str(workspace.cache)):
        raise SystemRefused(
            f"no library can be preloaded from {workspace.cache}: its path has a space or colon, which separate libraries",
            "name another directory with --state or SM120KIT_STATE",
        )
    workspace.cache.mkdir(parents=True, exist_ok=True)
    with owned_directory(workspace.cache, "ptx-run-") as directory:
        sources = (library.SOURCE, library.FAST) if fast else (library.SOURCE,)
        (directory / images.FUNCTIONS).write_text("\n".join(library.functions_ptx(tools, source) for source in sources))
        if apart:
            kernels = _write_apart(directory / "captured", kernels)
        (directory / images.CAPTURED).write_text("".join(f"{name} {path}\n" for name, path in sorted(kernels.items())))
        (directory / images.CUTE_DSL).mkdir()
        if perturbed:
            (directory / perturb.FLAG).touch()
        compile_shim(directory / LIBRARY, tools)
        _write_programs(directory, tools, workspace.cache / library.NATIVE)
        yield Interposition(directory, tools, simulated)


def run(
    command: Sequence[str],
    captured: Path | None,
    workspace: Workspace,
    fast: bool = False,
    simulated: SimulatedGpu = SimulatedGpu(),
) -> tuple[InterposedRun, dict[str, Any]]:
    """Run a program with the preloaded driver; returns the run and its record. Other arguments are those of :func:`prepared`.

    Raises:
        ResourceUnavailable: not on a Hopper GPU.
        RequirementMissing: no CUDA compiler, or no C compiler that makes the library.
        BadInput: ``captured`` has no PTX files.
    """
    device = gpu.require(
        gpu.probe(), gpu.Backend.REWRITTEN, "verify run", "without a GPU, `sm120kit verify ptx` rewrites PTX only"
    )
    tools = toolchain.find()
    with prepared(captured, workspace, tools, fast=fast, simulated=simulated) as interposition:
        exit_code = process.run_attached(command, env=interposition.environment())
        done = _read(tuple(command), exit_code, interposition)
    return done, record(done, device, tools) | {"simulated": {**asdict(simulated), "l2_bytes": simulated.l2_bytes}}


def compile_shim(output: Path, tools: Toolchain) -> None:
    """Compile the preloaded driver with the host compiler.

    Raises:
        RequirementMissing: the compiler rejects it.
    """
    includes = ["-isystem", str(tools.cuda_home / "include")]
    done = process.run([tools.host_compiler, *FLAGS, *includes, str(SHIM), "-o", str(output), "-ldl"], check=False)
    if done.returncode:
        raise RequirementMissing(
            f"{tools.host_compiler} rejects {SHIM.name}: {done.stderr.strip()[-300:]}", "use g++ or clang++ on Linux with glibc"
        )


def _write_apart(directory: Path, kernels: Mapping[str, Path]) -> dict[str, Path]:
    """Write each kernel as a module of its own, named by its file and its number there."""
    directory.mkdir()
    files: dict[str, Path] = {}
    for path in sorted(set(kernels.values())):
        content = path.read_text(encoding="ascii")
        modules = single_kernels(content)
        if missing := sorted(images.kernel_names(content) - modules.keys()):
            raise BadInput(
                f"{path}: kernel {missing[0][:160]} cannot be divided from the others", "capture it again: verify ptx --capture"
            )
        for number, (name, text) in enumerate(modules.items()):
            if kernels[name] == path:
                files[name] = directory / f"{path.stem}.{number}.ptx"
                files[name].write_text(text)
    return files


def single_kernels(text: str) -> dict[str, str]:
    """A module for each kernel of a module, by the kernel's name: the module without its other kernels."""
    code, entries = syntax.blank_comments(text), []
    for entry in _ENTRY.finditer(code):
        depth = 0
        for brace in _BRACE.finditer(code, entry.end()):
            depth += 1 if brace[0] == "{" else -1
            if not depth:
                entries.append((entry["name"], entry.start(), brace.end()))
                break
    modules = {}
    for kept, _, _ in entries:
        at, parts = 0, []
        for name, start, end in entries:
            parts.append(text[at : end if name == kept else start])
            at = end
        modules[kept] = "".join([*parts, text[at:]])
    return modules


_ENTRY = re.compile(r"^(?:\.(?:visible|weak)\s+)?\.entry\s+(?P<name>[\w$]+)\s*\(", re.MULTILINE)
_BRACE = re.compile(r"[{}]")


def _write_programs(directory: Path, tools: Toolchain, native: Path) -> None:
    """The rewriter that the preloaded driver starts, and the ptxas that Triton starts."""
    variables = {"CUDA_HOME": str(tools.cuda_home), "PYTHONPATH": process.own_python_path(), "CXX": tools.host_compiler}
    variables[images.NATIVE_CACHE] = str(native.resolve())
    words = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    python = f'{words} exec {shlex.quote(sys.executable)} -m {images.__name__} "$@"\n'
    version = f'[ "$1" = --version ] && exec {shlex.quote(str(tools.cuda_home / "bin" / "ptxas"))} --version\n'
    for name, text in (("rewriter", python), ("ptxas", version + python)):
        (directory / name).write_text(f"#!/bin/sh\nunset LD_PRELOAD\n{text}")
        (directory / name).chmod(0o700)


def _read(command: tuple[str, ...], exit_code: int, interposition: Interposition) -> InterposedRun:
    events = interposition.directory / "events"
    lines = [line.split() for line in events.read_text(errors="replace").splitlines()] if events.is_file() else []
    logged = {kind: sorted({tuple(words[1:]) for words in lines if words[0] == kind}) for kind in _KINDS}
    rejected = [words for words in logged["refused"] if words[-1] == str(CompileFailed.exit_code)]
    return InterposedRun(
        command,
        exit_code,
        tuple(interposition.modules()),
        len({words[:2] for words in logged["refused"]}),
        tuple(sorted({int(words[0]) for words in logged["shared"]})),
        len({words[:2] for words in rejected}),
        tuple(tuple(map(int, words)) for words in logged["launch"]),
        _hopper_modules(logged["hopper"], logged["kernel"]),
        tuple(" ".join(words) for words in logged["unseen"]),
    )


_KINDS = ("refused", "shared", "launch", "hopper", "kernel", "unseen")
"""First words of the lines that the preloaded driver logs."""


def _hopper_modules(modules: Sequence[tuple[str, ...]], kernels: Sequence[tuple[str, ...]]) -> tuple[HopperModule, ...]:
    """Modules from lines ``ID BYTES FOR_SM120 FILE`` and ``ID KERNEL``."""
    names: dict[str, set[str]] = {}
    for owner, name in kernels:
        names.setdefault(owner, set()).add(name)
    return tuple(
        HopperModule(" ".join(file), int(size), for_sm120 == "1", tuple(sorted(names.get(owner, ()))))
        for owner, size, for_sm120, *file in modules
    )


def digests() -> dict[str, str]:
    """The digests of the rewriter and of what is preloaded."""
    files = (SHIM, Path(images.__file__), Path(__file__))
    return {
        "rewriter": library.rewriter_digest(),
        "interposer": digest_of([[path.name, file_sha256(path)] for path in files]),
    }


def record(done: InterposedRun, device: CudaDevice, tools: Toolchain) -> dict[str, Any]:
    """A run as JSON-serialisable data, with GPU, driver, toolchain and the digests of rewriter, shim and PTX."""
    return {
        "format": FORMAT,
        "kind": "ptx-run",
        **digests(),
        "arch": "sm_90a",
        "gpu": {**asdict(device), "capability": ".".join(map(str, device.capability))},
        "toolchain": {"nvcc": tools.nvcc_version},
        "verified_on_sm120": False,
        "cannot_show": list(CANNOT_SHOW),
        "replaced": done.replaced,
        **asdict(done),
    }
