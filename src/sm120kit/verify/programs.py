"""Compile the programs of a verification: one per configuration, as many at once as cores and memory allow.

A program is kept under the digest of everything that it is made of, so that an interrupted verification goes on where it was.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sm120kit import process
from sm120kit.errors import CompileFailed, NotEnoughMemory
from sm120kit.memory import Costs, Gate, available
from sm120kit.records import Toolchain
from sm120kit.toolchain import ABSENT
from sm120kit.workspace import digest_of, file_sha256, locked, publish_directory

SOURCES = Path(__file__).with_name("cpp")
PRELUDE = "sm120_on_sm90.hpp"

GEMM_BYTES, INSTRUCTIONS_BYTES = 6_500_000_000, 1_000_000_000
"""Memory to have free for a compile that was not measured yet."""

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
"""What CUTLASS's utilities include beyond compiler and runtime. Of cuBLAS only a type is named: ``absent`` has it."""

TOO_BIG = "does not fit into the shared memory of SM120"
"""What the static assertion in kernels.cuh says."""

SURROUNDINGS = ("NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS", "CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH")


def sources_digest() -> str:
    """What the programs and the faults planted in them are made of, but for the tree that they verify."""
    files = [path for base in (SOURCES, ABSENT) for path in sorted(base.iterdir()) if path.is_file()]
    return digest_of([[[path.name, file_sha256(path)] for path in files], FLAGS, DEFINITIONS])


@dataclass(frozen=True)
class Tree:
    """An engine's files: ``root`` with the git tree id ``tree``, CUTLASS at ``cutlass`` below it.

    ``before`` holds include directories that are searched before those of the tree; ``key`` names their content.
    """

    root: Path
    tree: str
    cutlass: str
    before: tuple[Path, ...] = ()
    key: str = ""

    def names(self) -> tuple[str, ...]:
        """The include directories below ``root``, in the order in which they are searched."""
        return (f"{self.cutlass}/include", f"{self.cutlass}/tools/util/include", *INCLUDES)


@dataclass(frozen=True)
class Program:
    """What to compile: a source of ``cpp`` with definitions, against a tree when it includes one."""

    name: str
    source: str
    definitions: tuple[str, ...] = ()
    tree: Tree | None = None


class Compiler:
    """nvcc for one arch. ``budget_bytes`` bounds the memory of all compiles together."""

    def __init__(
        self, arch: str, emulated: bool, toolchain: Toolchain, cache: Path, *, jobs: int | None, budget_bytes: int | None
    ) -> None:
        self.arch, self.emulated, self.toolchain, self.cache = arch, emulated, toolchain, cache / "verify"
        self.jobs, self.budget_bytes = jobs or len(os.sched_getaffinity(0)), budget_bytes
        self.costs = Costs(self.cache / "costs.json")
        self.base = digest_of([sources_digest(), toolchain.nvcc_version, toolchain.host_version, arch, emulated])

    def place(self, program: Program) -> Path:
        """The directory of a compiled program."""
        tree = program.tree and [program.tree.tree, program.tree.cutlass, program.tree.key]
        return self.cache / "programs" / digest_of([self.base, program.source, program.definitions, tree])

    def command(self, program: Program, output: Path) -> list[str]:
        """The whole nvcc command line."""
        home, number = self.toolchain.cuda_home, self.arch.removeprefix("sm_")
        words = [str(home / "bin" / "nvcc"), "-ccbin", self.toolchain.host_compiler, *FLAGS]
        words += ["-gencode", f"arch=compute_{number},code=sm_{number}", f"-I{SOURCES}"]
        if program.tree:
            words += ["-include", str(SOURCES / PRELUDE)] if self.emulated else []
            words += [f"-I{path}" for path in (*program.tree.before, *map(program.tree.root.joinpath, program.tree.names()))]
            words += [] if (home / "include" / "cublasLt.h").is_file() else [f"-I{ABSENT}"]
            words += DEFINITIONS
        elif not self.emulated:
            words.append("-DNATIVE")
        words += [] if (home / "lib64").is_dir() else [f"-L{home / 'lib'}"]  # where the wheels have it
        return [*words, *program.definitions, str(SOURCES / program.source), "-o", str(output)]

    @contextmanager
    def compile_all(self, programs: Sequence[Program]) -> Iterator[Iterator[tuple[Program, Path | CompileFailed]]]:
        """Yields each program with its executable, or why it does not compile, as soon as that is known.

        Leaving the block early ends the compilers that still run.

        Raises:
            NotEnoughMemory: the system ended a compiler.
        """
        stop = threading.Event()
        gate = Gate(self.cache / "gate")
        with locked(self.cache / "compile.lock", "the programs of a verification"), ThreadPoolExecutor(self.jobs) as pool:
            known = [one for one in programs if (self.place(one) / "program").is_file()]
            asked = {str(self._output(one)): one for one in programs if one not in known}
            expected = {output: self._expected(one) for output, one in asked.items()}
            gate.open(expected, self.budget_bytes or available())
            try:
                waiting = {pool.submit(self._compile, one, gate, stop): one for one in asked.values()}

                def finished() -> Iterator[tuple[Program, Path | CompileFailed]]:
                    for one in known:
                        yield one, self.place(one) / "program"
                    for done in as_completed(waiting):
                        yield waiting[done], done.result()

                yield finished()
            finally:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                for event in gate.events():
                    self.costs.learn(asked[event.output].name, event)
                self.costs.save()

    def _expected(self, program: Program) -> int:
        cost = self.costs.of(program.name)
        return cost[0] if cost else GEMM_BYTES if program.tree else INSTRUCTIONS_BYTES

    def _output(self, program: Program) -> Path:
        return self.cache / "new" / self.place(program).name

    def _compile(self, program: Program, gate: Gate, stop: threading.Event) -> Path | CompileFailed:
        place, output = self.place(program), self._output(program)
        output.parent.mkdir(parents=True, exist_ok=True)
        command = self.command(program, output)
        done = process.run(
            [sys.executable, "-m", "sm120kit.memory", *command],
            env={
                "SM120KIT_GATE_DIR": str(gate.directory),
                "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])),
                "LC_ALL": "C",  # the first error is read
            },
            drop=SURROUNDINGS,
            check=False,
            tied=True,
            stop=stop,
        )
        line = process.paste_line(command)
        if done.returncode != 0:
            said = done.stderr + done.stdout
            if done.returncode in (137, 143) or re.search(r"Killed|out of memory|signal 9", said):
                raise NotEnoughMemory(
                    f"the system ended the compiler of {program.name}; {available() / 2**30:.1f} GiB are available now",
                    "end other programs, or give less to --memory or --jobs",
                )
            errors = [text for text in said.splitlines() if re.search(r"\berror\b|undefined reference|cannot find", text)]
            return CompileFailed(errors[0].strip() if errors else said.strip()[-300:], f"command: {line}")
        with publish_directory(place) as fresh:
            output.rename(fresh / "program")
        return place / "program"
