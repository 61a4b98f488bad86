"""Compile the programs of a verification: one per configuration, as many at once as cores and memory allow.

A program is cached by the digest of all its inputs, so an interrupted verification resumes with the programs that are compiled.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sm120kit.core import process
from sm120kit.core.digests import digest_of, file_sha256
from sm120kit.core.errors import CompileFailed, ResourceUnavailable
from sm120kit.core.locks import exclusive
from sm120kit.core.memory import Costs, Gate, available_bytes, ran_out_of_memory
from sm120kit.core.process import own_python_path
from sm120kit.core.records import Toolchain
from sm120kit.core.temporary import publish_directory
from sm120kit.core.toolchain import PLACEHOLDERS
from sm120kit.core.workspace import mark_used

SOURCES = Path(__file__).with_name("cpp")
PRELUDE = "sm120_on_sm90.hpp"
CAPTURED_KERNEL = Path(__file__).with_name("captured_kernel.hpp")
"""The prelude of programs without the code of their kernel. Not in ``SOURCES``: other programs do not include it."""

GEMM_COST, INSTRUCTIONS_COST = (6_500_000_000, 90.0), (1_000_000_000, 20.0)
"""Memory in bytes and seconds of a compile that has not been measured yet."""

FLAGS = ("-std=c++17", "-O3", "-use_fast_math", "--expt-relaxed-constexpr", "-static-global-template-stub=false")
DEFINITIONS = (
    "-DCOMPILE_BLACKWELL_TMA_GEMMS",
    "-DCOMPILE_BLACKWELL_SM120_TMA_GROUPED_GEMMS",
    "-DCUTLASS_ENABLE_GDC_FOR_SM100=1",
    "-DENABLE_BF16",
    "-DENABLE_FP8",
    "-DENABLE_FP4",
    "-DUSING_OSS_CUTLASS_MOE_GEMM",
)
"""FlashInfer's own (flashinfer/jit/fused_moe.py), without NDEBUG: CUTLASS's assertions are part of what is verified."""

INCLUDES = (
    "include",
    "csrc",
    "csrc/nv_internal",
    "csrc/nv_internal/include",
    "csrc/nv_internal/tensorrt_llm/cutlass_extensions/include",
    "csrc/nv_internal/tensorrt_llm/kernels/cutlass_kernels/include",
    "csrc/nv_internal/tensorrt_llm/kernels/cutlass_kernels",
)
HEADERS = ("curand_kernel.h",)
"""Headers that CUTLASS's utilities include beyond compiler and runtime. Of cuBLAS they use a type; ``placeholders`` has it."""

TOO_BIG = "does not fit into the shared memory of SM120"
"""The message of the static assertion in kernels.cuh."""

DROPPED_ENVIRONMENT = ("NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS", "CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH")


def sources_digest() -> str:
    """The sha256 of all sources of the programs and of the faults seeded in them, without the tree that they verify."""
    files = [path for base in (SOURCES, PLACEHOLDERS) for path in sorted(base.iterdir()) if path.is_file()] + [CAPTURED_KERNEL]
    return digest_of([[[path.name, file_sha256(path)] for path in files], FLAGS, DEFINITIONS])


@dataclass(frozen=True)
class EngineTree:
    """An engine's files: ``root`` with the git tree id ``tree``, CUTLASS at ``cutlass`` below it.

    The include directories ``before`` are searched before those of the tree; ``key`` is the digest of their content.
    """

    root: Path
    tree: str
    cutlass: str
    before: tuple[Path, ...] = ()
    key: str = ""

    def names(self) -> tuple[str, ...]:
        """The include directories below ``root``, in search order."""
        return (f"{self.cutlass}/include", f"{self.cutlass}/tools/util/include", *INCLUDES)


@dataclass(frozen=True)
class Program:
    """A program to compile: a source file of ``cpp`` with definitions, and the tree that it includes, if any.

    ``captured``: its kernel is that of a build, from captured PTX. The program has no code for it, and fails without the PTX.
    """

    name: str
    source: str
    definitions: tuple[str, ...] = ()
    tree: EngineTree | None = None
    captured: bool = False


class Programs(Protocol):
    """Where the executables of a verification come from: a compiler, or a directory with compiled ones."""

    arch: str
    toolchain: Toolchain

    def compile_all(
        self, programs: Sequence[Program]
    ) -> AbstractContextManager[Iterator[tuple[Program, Path | CompileFailed]]]: ...

    def seconds(self, programs: Sequence[Program]) -> float: ...


class Compiler:
    """nvcc for one arch; ``compute_120a`` is PTX without machine code.

    ``budget_bytes`` limits the memory of all compiles that run at a time.
    """

    def __init__(
        self, arch: str, emulated: bool, toolchain: Toolchain, cache: Path, *, jobs: int | None, budget_bytes: int | None
    ) -> None:
        self.arch, self.emulated, self.toolchain, self.cache = arch, emulated, toolchain, cache / "verify"
        self.jobs, self.budget_bytes = jobs or len(os.sched_getaffinity(0)), budget_bytes
        self.costs = Costs(self.cache / "costs.json")
        self.base = digest_of([sources_digest(), toolchain.nvcc_version, toolchain.host_version, arch, emulated])

    def directory(self, program: Program) -> Path:
        """The cache directory of a compiled program."""
        tree = program.tree and [program.tree.tree, program.tree.cutlass, program.tree.key]
        prelude = ["captured"] if program.captured else []
        return self.cache / "programs" / digest_of([self.base, program.source, program.definitions, tree, *prelude])

    def command(self, program: Program, output: Path) -> list[str]:
        """The nvcc command line."""
        home, number = self.toolchain.cuda_home, self.arch.rpartition("_")[2]
        words = [str(home / "bin" / "nvcc"), "-ccbin", self.toolchain.host_compiler, *FLAGS]
        words += ["-gencode", f"arch=compute_{number},code={self.arch}", f"-I{SOURCES}"]
        if program.tree:
            words += ["-include", str(SOURCES / PRELUDE)] if self.emulated else []
            words += ["-include", str(CAPTURED_KERNEL)] if program.captured else []
            words += [f"-I{path}" for path in (*program.tree.before, *map(program.tree.root.joinpath, program.tree.names()))]
            words += [] if (home / "include" / "cublasLt.h").is_file() else [f"-I{PLACEHOLDERS}"]
            words += DEFINITIONS
        elif not self.emulated:
            words.append("-DNATIVE")
        words += [] if (home / "lib64").is_dir() else [f"-L{home / 'lib'}"]  # the directory of the CUDA wheels
        return [*words, *program.definitions, str(SOURCES / program.source), "-o", str(output)]

    @contextmanager
    def compile_all(self, programs: Sequence[Program]) -> Iterator[Iterator[tuple[Program, Path | CompileFailed]]]:
        """Yield each program with its executable, or with its compile error, as soon as its compiler ends.

        Leaving the block early ends the compilers that still run.

        Raises:
            ResourceUnavailable: a compiler ran out of memory.
        """
        stop = threading.Event()
        gate = Gate(self.cache / "gate")
        with exclusive(self.cache / "compile.lock", "the programs of a verification"), ThreadPoolExecutor(self.jobs) as pool:
            cached = [program for program in programs if (self.directory(program) / "program").is_file()]
            for program in cached:
                mark_used(self.directory(program))
            longest_first = sorted(
                (program for program in programs if program not in cached), key=lambda program: -self._cost(program)[1]
            )
            missing = {str(self._output(program)): program for program in longest_first}
            expected = {output: self._cost(program)[0] for output, program in missing.items()}
            gate.open(expected, self.budget_bytes or available_bytes())
            try:
                waiting = {pool.submit(self._compile, program, gate, stop): program for program in missing.values()}

                def finished() -> Iterator[tuple[Program, Path | CompileFailed]]:
                    for program in cached:
                        yield program, self.directory(program) / "program"
                    for done in as_completed(waiting):
                        yield waiting[done], done.result()

                yield finished()
            finally:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                for event in gate.events():
                    self.costs.record(missing[event.output].name, event)
                self.costs.save()

    def seconds(self, programs: Sequence[Program]) -> float:
        """The sum of the times of the compilers, including those that ran earlier."""
        costs = [self.costs.of(program.name) for program in programs]
        return round(sum(cost[1] for cost in costs if cost), 1)

    def _cost(self, program: Program) -> tuple[int, float]:
        return self.costs.of(program.name) or (GEMM_COST if program.tree else INSTRUCTIONS_COST)

    def _output(self, program: Program) -> Path:
        return self.cache / "new" / self.directory(program).name

    def _compile(self, program: Program, gate: Gate, stop: threading.Event) -> Path | CompileFailed:
        directory, output = self.directory(program), self._output(program)
        output.parent.mkdir(parents=True, exist_ok=True)
        command = self.command(program, output)
        done = process.run_within(
            [sys.executable, "-m", "sm120kit.core.memory", *command],
            None,
            stop,
            env={
                **dict.fromkeys(DROPPED_ENVIRONMENT),
                "SM120KIT_GATE_DIR": str(gate.directory),
                "PYTHONPATH": own_python_path(),
                "LC_ALL": "C",  # the first error is parsed
            },
        )
        line = process.shell_line(command)
        if done.returncode != 0:
            messages = done.stderr + done.stdout
            if ran_out_of_memory(done.returncode, messages):
                raise ResourceUnavailable(
                    f"the compiler of {program.name} ran out of memory; {available_bytes() / 2**30:.1f} GiB are available now",
                    "end other programs, or lower --memory or --jobs",
                )
            errors = [text for text in messages.splitlines() if re.search(r"\berror\b|undefined reference|cannot find", text)]
            return CompileFailed(errors[0].strip() if errors else messages.strip()[-300:], f"command: {line}")
        with publish_directory(directory) as fresh:
            output.rename(fresh / "program")
        return directory / "program"
