"""Run a tile's real mainloop and epilogue on this machine's CPU and compare with integers, bit for bit: no GPU, no nvcc.

``cpp/`` compiles CUTLASS's own SM120 block-scaled collectives for the host, the mainloop's ``load()`` and ``mma()`` and the
epilogue's ``load()`` and ``store()`` unchanged, and puts an emulated machine below them: tensor maps with the rules of the
driver's documentation, bulk copies in both directions, mbarriers with transaction bytes, named barriers, ldmatrix, stmatrix and
the block-scaled mma by the fragment tables of the PTX ISA. One CTA works through three GEMMs (stages wrap around, ragged edges,
a partial k tile, a single row) with the producer running ahead, lagging behind, and at random. The epilogue is
alpha A B + beta C in bf16; a grouped kernel has an alpha and tensor maps per group. Outputs are poisoned, between guards.

With ``whole_kernel``, the grouped cooperative kernel's own ``operator()`` runs instead, with its scheduler, as one to three
persistent CTAs.

What it does not cover: FlashInfer's finalize epilogue (g++ 12 refuses its header), f16 outputs, the schedulers of dense kernels
(stream-K among them), clusters, timing, memory ordering between the generic and the async proxy, and the instructions
themselves.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from sm120kit import process
from sm120kit.errors import CompileFailed, ExpectationFailed, NotEnoughMemory
from sm120kit.memory import at_once
from sm120kit.records import Emulation, EmulationFinding, Tile, Toolchain
from sm120kit.workspace import digest_of, file_sha256, locked, publish_directory, read_record, write_record

SOURCES = Path(__file__).with_name("cpp")
UNIT_BYTES = 2_000_000_000
"""Memory to have free per emulation: what its compiler takes."""

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
)
"""What can be planted on demand (cpp/cta.hpp); every one has to be found. Those of groups need a grouped tile."""


@dataclass(frozen=True)
class Mainloop:
    """What an emulation depends on; tiles that agree in it share one. ``stages`` 0: as many as a plain bf16 epilogue leaves."""

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
        """A tile's."""
        return cls(tile.family, tile.dtype, tile.m, tile.n, tile.k, tile.swap, pingpong, stages, whole_kernel)

    @property
    def tile(self) -> Tile:
        """A tile that has this mainloop."""
        return Tile(self.family, self.dtype, self.m, self.n, self.k, "none", self.swap, "bf16")

    def definitions(self) -> tuple[str, ...]:
        """It as the C++ sources want it."""
        return (
            f"-DDTYPE={self.dtype}",
            *(f"-DTILE_{letter}={extent}" for letter, extent in zip("MNK", (self.m, self.n, self.k), strict=True)),
            f"-DSWAP={int(self.swap)}",
            f"-DGROUPED={int(self.family == 'grouped')}",
            f"-DPINGPONG={int(self.pingpong)}",
            f"-DSTAGES={self.stages}",
            f"-DKERNEL={int(self.whole_kernel)}",
        )


def run(
    cutlass: Path,
    tile: Tile,
    toolchain: Toolchain,
    cache: Path,
    *,
    pingpong: bool = False,
    stages: int = 0,
    fault: str = "none",
    whole_kernel: bool = False,
) -> Emulation:
    """Emulate ``tile`` with the CUTLASS whose include directory is ``cutlass``; most of a minute, nothing when known.

    The tile's epilogue and output type do not matter, except for the ``stages`` that they leave: the epilogue is a plain one in
    bf16, and ``stages`` 0 stands for those that it leaves. ``fault`` is one of :data:`FAULTS`, to see it found.
    ``whole_kernel`` runs the kernel itself, which must be grouped and cooperative: what it stores is compared, its accumulators
    (``outputs``) are not seen.

    Raises:
        CompileFailed: this CUTLASS has no mainloop for the tile; the message is its first error.
        NotEnoughMemory: the system ended the compiler.
        ExpectationFailed: the emulation broke down without a verdict.
    """
    mainloop = Mainloop.of(tile, pingpong=pingpong, stages=stages, whole_kernel=whole_kernel)
    emulation = Emulator(cutlass, toolchain, cache).run(mainloop, fault)
    return replace(emulation, tile=tile)


class Emulator:
    """The emulations of one CUTLASS, which must not change meanwhile: its files are read once.

    A compiled emulation and its results are kept in ``cache`` under the digest of headers, sources, flags and compiler. Several
    processes can work on one cache: who comes second waits and finds the first one's result.
    """

    def __init__(self, cutlass: Path, toolchain: Toolchain, cache: Path) -> None:
        self.cutlass, self.toolchain, self.cache = cutlass, toolchain, cache / "emulate"
        major, minor = toolchain.nvcc_version.split(".")[:2]
        self.flags = (*FLAGS, f"-D__CUDACC_VER_MAJOR__={major}", f"-D__CUDACC_VER_MINOR__={minor}")
        compiler = (toolchain.host_compiler, toolchain.host_version, toolchain.nvcc_version)
        self.base = digest_of([compiler, self.flags, _content(SOURCES), _content(cutlass)])

    def known(self, mainloop: Mainloop, fault: str = "none") -> Emulation | None:
        """The result of an emulation that was run before."""
        record = self._directory(mainloop) / f"{fault}.json"
        return read_record(Emulation, record) if record.is_file() else None

    def run(self, mainloop: Mainloop, fault: str = "none", stop: threading.Event | None = None) -> Emulation:
        """One emulation, compiled and run when it is not known; see :func:`run`. ``stop`` ends it from another thread."""
        directory = self._directory(mainloop)
        name = f"the emulation of {mainloop.dtype} {mainloop.tile.shape}"
        with locked(self.cache / "locks" / f"{directory.name}.lock", name, stop):
            known = self.known(mainloop, fault)
            if known:
                return known
            if not directory.is_dir():
                with publish_directory(directory) as fresh:
                    self._compile(mainloop.definitions(), fresh / "program", stop)
            emulation = _judge(mainloop.tile, fault, process.run([directory / "program", fault], check=False, stop=stop))
            write_record(directory / f"{fault}.json", emulation)
            return emulation

    def run_all(
        self, mainloops: Iterable[Mainloop], advance: Callable[[], None] = lambda: None
    ) -> dict[Mainloop, Emulation | CompileFailed]:
        """Several emulations at once, as cores and memory allow; one that does not compile is answered with its error.

        When it is interrupted, it ends the compilers that run; what was finished is kept.
        """
        found: dict[Mainloop, Emulation | CompileFailed] = {}
        stop = threading.Event()
        with ThreadPoolExecutor(at_once(UNIT_BYTES)) as pool:
            try:
                waiting = {pool.submit(self.run, one, stop=stop): one for one in dict.fromkeys(mainloops)}
                for done in as_completed(waiting):
                    try:
                        found[waiting[done]] = done.result()
                    except CompileFailed as failure:
                        found[waiting[done]] = failure
                    advance()
            except BaseException:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return found

    def _directory(self, mainloop: Mainloop) -> Path:
        return self.cache / digest_of([self.base, mainloop.definitions()])

    def _compile(self, definitions: tuple[str, ...], output: Path, stop: threading.Event | None) -> None:
        cuda = self.toolchain.cuda_home / "include"
        includes = [f"-I{SOURCES}", *(f"-isystem{path}" for path in (self.cutlass, cuda, cuda / "cccl"))]
        done = process.run(
            [
                self.toolchain.host_compiler,
                *self.flags,
                *definitions,
                *includes,
                "-s",
                SOURCES / "collective.cpp",
                "-o",
                output,
            ],
            env={"LC_ALL": "C"},  # the first error is read
            check=False,
            stop=stop,
        )
        if "Killed signal" in done.stderr:
            raise NotEnoughMemory(
                "the system ended the compiler: an emulation needs 2 GB to compile", "close something or use a bigger machine"
            )
        if done.returncode != 0:
            errors = [line for line in done.stderr.splitlines() if "error: " in line]
            raise CompileFailed(
                f"no mainloop to emulate: {errors[0] if errors else done.stderr.strip()[-300:]}",
                f"command: {process.paste_line(done.argv, {'LC_ALL': 'C'})}",
            )


def _judge(tile: Tile, fault: str, done: process.Completed) -> Emulation:
    """What an emulation printed, as a record."""
    if done.returncode not in (0, 1):
        raise ExpectationFailed(
            f"emulating {tile.dtype} {tile.shape} ended with exit code {done.returncode}: {done.stderr.strip()[-300:]}",
            f"command: {process.paste_line(done.argv)}",
        )
    said = json.loads(done.stdout)
    findings = tuple(
        EmulationFinding(kind, found["count"], tuple(found["first"])) for kind, found in said.pop("findings").items()
    )
    return Emulation(tile=tile, fault=fault, findings=findings, **said)


def _content(directory: Path) -> list[list[str]]:
    """Every file below a directory with its sha256."""
    return [[str(path.relative_to(directory)), file_sha256(path)] for path in sorted(directory.rglob("*")) if path.is_file()]
