"""Emulate a tile's mainloop and epilogue on the CPU and compare with integers, bit for bit; needs neither GPU nor nvcc.

``cpp/`` compiles CUTLASS's own SM120 block-scaled collectives for the host, the mainloop's ``load()`` and ``mma()`` and the
epilogue's ``load()`` and ``store()`` unchanged, on top of an emulated machine: tensor maps with the rules of the driver's
documentation, bulk copies in both directions, mbarriers with transaction bytes, named barriers, ldmatrix, stmatrix and the
block-scaled mma by the fragment tables of the PTX ISA. One CTA computes five GEMMs (stages wrap around, ragged edges, a
partial k tile, a single row, odd and even numbers of k tiles, three tiles of n), each with the producer ahead, behind, and at
random. The epilogue is alpha A B + beta C in bf16. A grouped kernel has nine groups, four of them empty, with an alpha and
tensor maps per group. Outputs are poisoned before the run and lie between guard bytes.

With ``whole_kernel``, the ``operator()`` of the grouped cooperative kernel runs as well, with its scheduler, as one to three
persistent CTAs; then as 7 and 34 CTAs with 80 groups of few rows, 51 of them empty: the scheduler reads the shapes of 32 at a
time. All is in one program, because it shares the templates whose instantiation takes the time. For the same reason, tiles of
one shape share a program: a second one adds up to a third of the time of the first, or nothing if it differs in its stages or
family only.

Not covered: FlashInfer's finalize epilogue (g++ 12 rejects its header), f16 outputs, the schedulers of dense kernels (stream-K
among them), clusters, timing, memory ordering between the generic and the async proxy, and the instructions themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from sm12x_lab.emulation.emulation_records import Emulation
from sm120kit.core import process
from sm120kit.core.digests import digest_of, file_sha256
from sm120kit.core.errors import CheckFailed, CompileFailed, ResourceUnavailable
from sm120kit.core.locks import exclusive
from sm120kit.core.memory import max_parallel, ran_out_of_memory
from sm120kit.core.outside import parse_json
from sm120kit.core.record_files import read_record, write_record
from sm120kit.core.records import Toolchain
from sm120kit.core.sandbox import Sandbox, wrap
from sm120kit.core.temporary import owned_directory, publish_directory
from sm120kit.core.workspace import mark_used
from sm120kit.kernels.kernel_records import Tile

SOURCES = Path(__file__).with_name("cpp")
LANGUAGE = {"LC_ALL": "C"}  # the first error is parsed
UNIT_BYTES = 4_000_000_000
"""Memory in bytes that the compiler of one emulation needs."""

FLAGS = (
    "-std=c++17",
    "-O1",
    "-w",
    "-fpermissive",
    "-DNDEBUG",
    "-ftrivial-auto-var-init=zero",
    "-DCUTE_CVTA_GENERIC_TO_SHARED_ACTIVATED=1",
    "-DCUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL=1",
)

DTYPES = ("nvfp4", "mxfp4", "mxfp8", "fp8xmxfp4")
FAULTS = (
    "stage-off-by-one",
    "bytes-too-few",
    "bytes-too-many",
    "scales-swapped",
    "scale-stride",
    "box-too-small",
    "box-too-big",
    "modes-swapped",
    "group-offset-a",
    "group-offset-b",
    "group-offset-sfa",
    "group-offset-sfb",
    "group-offset-output",
    "no-store-wait",
    "no-named-barrier",
    "alpha-of-one",
    "even-k-tiles",
    "third-tile-of-n",
    "empty-groups-skipped",
)
"""Faults that an emulation can seed (cpp/cta.hpp), each of which must be detected. Faults of groups need a grouped tile."""

IN_KERNEL = "kernel:"
"""Before the name of a fault: seed it in the whole kernel, which then runs alone."""


@dataclass(frozen=True)
class Mainloop:
    """The properties of a tile that its emulation depends on; tiles with equal properties share an emulation.

    The emulated epilogue is a plain one in bf16, whatever the tile's. ``stages`` 0 stands for the pipeline stages that this
    epilogue leaves; the tile's own epilogue may leave fewer. ``whole_kernel`` also runs the kernel itself, which must be
    grouped and cooperative: its stored outputs are compared, its accumulators are not.
    """

    family: str
    dtype: str
    m: int
    n: int
    k: int
    swap: bool
    pingpong: bool
    stages: int
    whole_kernel: bool = False

    @classmethod
    def of(cls, tile: Tile, *, pingpong: bool = False, stages: int = 0, whole_kernel: bool = False) -> Mainloop:
        """The mainloop of a tile."""
        family = "grouped" if tile.grouped else "dense"
        return cls(family, tile.dtype, tile.m, tile.n, tile.k, tile.swap, pingpong, stages, whole_kernel)

    @property
    def tile(self) -> Tile:
        """A tile with this mainloop."""
        return Tile(self.family, self.dtype, self.m, self.n, self.k, "none", self.swap, "bf16")

    def definitions(self) -> dict[str, object]:
        """The macros that configure the C++ sources."""
        return {
            "DTYPE": self.dtype,
            "TILE_M": self.m,
            "TILE_N": self.n,
            "TILE_K": self.k,
            "SWAP": int(self.swap),
            "GROUPED": int(self.family == "grouped"),
            "PINGPONG": int(self.pingpong),
            "STAGES": self.stages,
            "KERNEL": int(self.whole_kernel),
        }


class Emulator:
    """Emulations with the CUTLASS whose include directory is ``cutlass``. Its files are read once and must not change.

    A compiled emulation and its results are stored in ``cache``, keyed by the digest of headers, sources, flags and compiler:
    of all that is compiled. An engine's own launchers and epilogues are not.
    Processes can share a cache: the first compiles and runs an emulation while the rest wait for its result.
    """

    def __init__(self, cutlass: Path, toolchain: Toolchain, cache: Path, sandbox: Sandbox | None = None) -> None:
        self.cutlass, self.toolchain, self.cache = cutlass, toolchain, cache / "emulate"
        self.sandbox = sandbox
        major, minor = toolchain.nvcc_version.split(".")[:2]
        self.flags = (*FLAGS, f"-D__CUDACC_VER_MAJOR__={major}", f"-D__CUDACC_VER_MINOR__={minor}")
        compiler = (toolchain.host_compiler, toolchain.host_version, toolchain.nvcc_version)
        self.base = digest_of([compiler, self.flags, _content(SOURCES), _content(cutlass)])

    def cached(self, mainloop: Mainloop, fault: str = "none") -> Emulation | None:
        """The stored result of an emulation; None if it has not run yet."""
        record = self._directory(mainloop) / f"{fault}.json"
        if not record.is_file():
            return None
        mark_used(record.parent)
        return read_record(Emulation, record)

    def run(self, mainloop: Mainloop, fault: str = "none", stop: threading.Event | None = None) -> Emulation:
        """The result of an emulation; one that is not cached is compiled (half a minute) and run.

        ``fault`` is one of :data:`FAULTS` to seed, or ``none``, either with :data:`IN_KERNEL` before it. ``stop`` ends compiler
        and emulation from another thread.

        Raises:
            CompileFailed: this CUTLASS has no mainloop for the tile; the message is its first error.
            ResourceUnavailable: the compiler ran out of memory.
            CheckFailed: the emulation ended without a result.
        """
        result = self._run_group([mainloop], fault, stop)[mainloop]
        if isinstance(result, CompileFailed):
            raise result
        return result

    def run_all(
        self, mainloops: Iterable[Mainloop], advance: Callable[[], None] = lambda: None
    ) -> dict[Mainloop, Emulation | CompileFailed]:
        """Run emulations in parallel, as cores and memory allow; the result of one that does not compile is its error.

        Those of one shape are one program. ``advance`` is called after each emulation. An interrupt ends all compilers; results
        that are finished stay in the cache.
        """
        groups: dict[str, list[Mainloop]] = {}
        for mainloop in dict.fromkeys(mainloops):
            groups.setdefault(mainloop.tile.shape, []).append(mainloop)
        results: dict[Mainloop, Emulation | CompileFailed] = {}
        stop = threading.Event()
        with ThreadPoolExecutor(max_parallel(UNIT_BYTES)) as pool:
            try:
                largest_first = sorted(groups.values(), key=len, reverse=True)
                waiting = [pool.submit(self._run_group, group, "none", stop) for group in largest_first]
                for done in as_completed(waiting):
                    for mainloop, result in done.result().items():
                        results[mainloop] = result
                        advance()
            except BaseException:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return results

    def _run_group(
        self, group: Sequence[Mainloop], fault: str, stop: threading.Event | None
    ) -> dict[Mainloop, Emulation | CompileFailed]:
        """The results of emulations of one shape; those that are not compiled become one program."""
        shape = group[0].tile.shape
        with exclusive(self.cache / "locks" / f"{digest_of([self.base, shape])}.lock", f"emulations of {shape}", stop):
            results: dict[Mainloop, Emulation | CompileFailed] = {}
            results |= {each: cached for each in group if (cached := self.cached(each, fault))}
            results |= self._compile([each for each in group if not self._directory(each).is_dir()], stop)
            for mainloop in group:
                if mainloop not in results:
                    directory = self._directory(mainloop)
                    argv, env = wrap([directory / "program", _name(directory), fault], self.sandbox, read=[directory])
                    emulation = _result(mainloop.tile, fault, process.run_within(argv, None, stop, env=env))
                    write_record(directory / f"{fault}.json", emulation)
                    mark_used(directory)
                    results[mainloop] = emulation
            return results

    def _directory(self, mainloop: Mainloop) -> Path:
        return self.cache / digest_of([self.base, mainloop.definitions()])

    def _compile(self, group: Sequence[Mainloop], stop: threading.Event | None) -> dict[Mainloop, CompileFailed]:
        """Compile emulations to one program, which the directory of each links; the error of each that does not compile.

        Raises:
            ResourceUnavailable: the compiler ran out of memory.
        """
        if not group:
            return {}
        with owned_directory(self.cache, ".work-") as work:
            unit, program = work / "unit.cpp", work / "program"
            unit.write_text(_unit({_name(self._directory(each)): each for each in group}))
            cuda = self.toolchain.cuda_home / "include"
            includes = [f"-I{SOURCES}", *(f"-isystem{path}" for path in (self.cutlass, cuda, cuda / "cccl"))]
            argv, env = wrap(
                [self.toolchain.host_compiler, *self.flags, *includes, "-s", unit, "-o", program],
                self.sandbox,
                read=[self.cutlass],
                write=[work],
                env=LANGUAGE,
            )
            done = process.run_within(argv, None, stop, env=env)
            if done.returncode and ran_out_of_memory(done.returncode, done.stderr):
                raise ResourceUnavailable(
                    f"the compiler ran out of memory: the emulations of a shape need {UNIT_BYTES / 1e9:.1f} GB to compile",
                    "end other programs, or use a machine with more memory",
                )
            if done.returncode and len(group) > 1:
                return {each: error for one in group for each, error in self._compile([one], stop).items()}
            if done.returncode or not program.is_file():
                return {group[0]: _failure(done)}
            for mainloop in group:
                with publish_directory(self._directory(mainloop)) as fresh:
                    (fresh / "program").hardlink_to(program)
        return {}


def _name(directory: Path) -> str:
    """The C++ namespace of the emulation in a directory."""
    return f"tile_{directory.name[:16]}"


def _unit(mainloops: Mapping[str, Mainloop]) -> str:
    """C++ text of a program with these emulations, by namespace; its arguments are a namespace and a fault."""
    lines = ['#include "cutlass.hpp"']
    for name, mainloop in mainloops.items():
        lines += [f"#define {macro} {value}" for macro, value in mainloop.definitions().items()]
        lines += [f"namespace {name} {{", '#include "tile.hpp"', "}"]
    runs = [f'  if (argv[1] == std::string("{name}")) return {name}::run(argv[2]);' for name in mainloops]
    return "\n".join([*lines, "int main(int, char** argv) {", *runs, "  return 2;", "}", ""])


def _failure(done: process.Completed) -> CompileFailed:
    """Why a mainloop does not compile: the first error."""
    if not done.returncode:
        return CompileFailed("no mainloop to emulate: the compiler wrote no program")
    errors = [line for line in done.stderr.splitlines() if "error: " in line]
    return CompileFailed(
        f"no mainloop to emulate: {errors[0] if errors else done.stderr.strip()[-300:]}",
        f"command: {process.shell_line(done.argv, LANGUAGE)}",
    )


def _result(tile: Tile, fault: str, done: process.Completed) -> Emulation:
    """The record of an emulation, from the JSON that it printed."""
    if done.returncode not in (0, 1):
        raise CheckFailed(
            f"emulating {tile.dtype} {tile.shape} ended with exit code {done.returncode}: {done.stderr.strip()[-300:]}",
            f"command: {process.shell_line(done.argv)}",
        )
    from pydantic import TypeAdapter, ValidationError

    try:
        fields = parse_json(done.stdout)
        findings = [{"kind": kind, **finding} for kind, finding in fields.pop("findings").items()]
        return TypeAdapter(Emulation).validate_python({**fields, "tile": tile, "fault": fault, "findings": findings})
    except (ValueError, TypeError, AttributeError, KeyError, ValidationError) as error:
        raise CheckFailed(f"emulating {tile.dtype} {tile.shape} printed no result: {str(error)[:300]}") from error


def _content(directory: Path) -> list[list[str]]:
    """Every file below a directory, by relative path, with its sha256."""
    return [[str(path.relative_to(directory)), file_sha256(path)] for path in sorted(directory.rglob("*")) if path.is_file()]
