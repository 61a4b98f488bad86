"""Run a program for SM120 on a Hopper GPU: compile the preloaded driver, start the program, and read what it loaded."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sm12x_lab.gpu_tests import gpu
from sm12x_lab.gpu_tests.gpu import CudaDevice
from sm12x_lab.gpu_tests.verification import Launcher
from sm12x_lab.ptx import images, library, syntax
from sm120kit.core import process, toolchain
from sm120kit.core.digests import digest_of, file_sha256
from sm120kit.core.errors import BadInput, RequirementMissing, SystemRefused
from sm120kit.core.records import Toolchain
from sm120kit.core.temporary import owned_directory
from sm120kit.core.workspace import Workspace

FORMAT = 1

LIBRARY = "libsm120kit_driver.so"
SHIM = Path(__file__).with_name("driver_shim.c")
FLAGS = ("-x", "c", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")

CANNOT_SHOW = (
    "the instructions in silicon: they are software functions here, after the text of the PTX ISA",
    "the machine code that ptxas generates for sm_120",
    "modules that have code for Hopper as well: the driver loads that",
    "races that need the timing of SM120; speed, occupancy, clocks",
)


@dataclass(frozen=True)
class InterposedRun:
    """A program's run: its exit code, the modules that were rewritten for it, and what was refused.

    ``refused_modules`` counts modules that have no replacement; ``refused_shared_bytes`` are requests for more shared memory
    than a CTA has on SM120.
    """

    command: tuple[str, ...]
    exit_code: int
    modules: tuple[dict[str, Any], ...]
    refused_modules: int
    refused_shared_bytes: tuple[int, ...]

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
        }

    def part(self, name: str, captured: bool) -> Interposition:
        """A directory below this one for the records of one program, with or without the captured PTX."""
        directory = self.directory / name
        directory.mkdir()
        (directory / images.CUTE_DSL).mkdir()
        for file in (LIBRARY, "rewriter", "ptxas", images.FUNCTIONS):
            (directory / file).hardlink_to(self.directory / file)
        (directory / images.CAPTURED).write_text((self.directory / images.CAPTURED).read_text() if captured else "")
        return Interposition(directory, self.tools)

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
    captured: Path | None, workspace: Workspace, tools: Toolchain, *, fast: bool = False, apart: bool = False
) -> Iterator[Interposition]:
    """A directory for runs with the preloaded driver; kernels in ``captured`` take the place of those of the same name.

    ``fast``: MMAs have the arithmetic of fast.cu, which is not that of the PTX ISA. ``apart``: each captured kernel is a module
    of its own. Kernels of a module that share variables would not share them then.

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
        compile_shim(directory / LIBRARY, tools)
        _write_programs(directory, tools)
        yield Interposition(directory, tools)


def run(
    command: Sequence[str], captured: Path | None, workspace: Workspace, fast: bool = False
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
    with prepared(captured, workspace, tools, fast=fast) as interposition:
        exit_code = process.run_attached(command, env=interposition.environment())
        done = _read(tuple(command), exit_code, interposition)
    return done, record(done, device, tools)


class RewritingLauncher(Launcher):
    """Starts the programs of a verification with the preloaded driver, each with records of its own."""

    def __init__(self, interposition: Interposition, captured: bool) -> None:
        self.interposition, self.captured = interposition, captured
        self.parts: dict[str, Interposition] = {}

    def launched(self, name: str, program: Path, captured: bool) -> Path:
        """A script that starts the program. Programs with a seeded fault run their own PTX, which has it."""
        part = self.parts[name] = self.interposition.part(name, captured)
        words = " ".join(f"{variable}={shlex.quote(value)}" for variable, value in part.environment().items())
        script = part.directory / "program"
        script.write_text(f'#!/bin/sh\nexport {words}\nexec {shlex.quote(str(program))} "$@"\n')
        script.chmod(0o700)
        return script

    def ptx(self, name: str) -> tuple[str, ...]:
        """Origin and digest of each module that the program loaded; none if it was not started."""
        modules = self.parts[name].modules() if name in self.parts else ()
        return tuple(f"{module['origin']}: {module['ptx']}" for module in modules if module["kernels"])


def compile_shim(output: Path, tools: Toolchain) -> None:
    """Compile the preloaded driver with the host compiler.

    Raises:
        RequirementMissing: the compiler rejects it.
    """
    done = process.run([tools.host_compiler, *FLAGS, str(SHIM), "-o", str(output), "-ldl"], check=False)
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


def _write_programs(directory: Path, tools: Toolchain) -> None:
    """The rewriter that the preloaded driver starts, and the ptxas that Triton starts."""
    variables = {"CUDA_HOME": str(tools.cuda_home), "PYTHONPATH": process.own_python_path(), "CXX": tools.host_compiler}
    words = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    python = f'{words} exec {shlex.quote(sys.executable)} -m {images.__name__} "$@"\n'
    version = f'[ "$1" = --version ] && exec {shlex.quote(str(tools.cuda_home / "bin" / "ptxas"))} --version\n'
    for name, text in (("rewriter", python), ("ptxas", version + python)):
        (directory / name).write_text(f"#!/bin/sh\nunset LD_PRELOAD\n{text}")
        (directory / name).chmod(0o700)


def _read(command: tuple[str, ...], exit_code: int, interposition: Interposition) -> InterposedRun:
    events = interposition.directory / "events"
    lines = [line.split() for line in events.read_text().splitlines()] if events.is_file() else []
    refused = {tuple(words) for words in lines if words[0] == "refused"}
    shared = sorted({int(words[1]) for words in lines if words[0] == "shared"})
    return InterposedRun(command, exit_code, tuple(interposition.modules()), len(refused), tuple(shared))


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
