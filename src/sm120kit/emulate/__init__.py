"""Run a tile's real mainloop on this machine's CPU and compare with integers, bit for bit: no GPU, no nvcc.

``cpp/`` compiles CUTLASS's own SM120 block-scaled collective, its ``load()`` and ``mma()`` unchanged, for the host and puts an
emulated machine below it: tensor maps with the rules of the driver's documentation, bulk copies, mbarriers with transaction
bytes, ldmatrix and the block-scaled mma by the fragment tables of the PTX ISA. One CTA works through three GEMMs (stages wrap
around, ragged edges, a partial k tile, a single row) with the producer running ahead, lagging behind, and at random.

What it cannot show: epilogues, tile schedulers, clusters, timing, and the instructions themselves.
"""

from __future__ import annotations

import json
from pathlib import Path

from sm120kit import process
from sm120kit.errors import CompileFailed, ExpectationFailed, NotEnoughMemory
from sm120kit.records import Emulation, EmulationFinding, Tile, Toolchain
from sm120kit.workspace import digest_of, file_sha256, publish_directory

SOURCES = Path(__file__).with_name("cpp")

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

FAULTS = ("stage-off-by-one", "bytes-too-few", "bytes-too-many", "scales-swapped", "scale-stride")
"""What can be planted on demand; every one has to be found, on every tile."""


def run(
    cutlass: Path,
    tile: Tile,
    toolchain: Toolchain,
    cache: Path,
    *,
    pingpong: bool = False,
    stages: int = 0,
    fault: str = "none",
) -> Emulation:
    """Emulate ``tile`` with the CUTLASS whose include directory is ``cutlass``; half a minute, a second when known.

    The tile's epilogue and output type do not matter, except for the ``stages`` that they leave; 0 stands for those of a plain
    bf16 epilogue. ``fault`` is one of :data:`FAULTS`, to see it found.

    Raises:
        CompileFailed: this CUTLASS has no mainloop for the tile; the message is its first error.
        NotEnoughMemory: the system ended the compiler.
        ExpectationFailed: the emulation broke down without a verdict.
    """
    program = _program(cutlass, tile, toolchain, cache, pingpong, stages)
    done = process.run([program, fault], check=False)
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


def _program(cutlass: Path, tile: Tile, toolchain: Toolchain, cache: Path, pingpong: bool, stages: int) -> Path:
    """The compiled emulation, from the cache when headers, sources, flags and compiler are the same."""
    major, minor = toolchain.nvcc_version.split(".")[:2]
    definitions = (
        f"-DDTYPE={tile.dtype}",
        *(f"-DTILE_{letter}={extent}" for letter, extent in zip("MNK", (tile.m, tile.n, tile.k), strict=True)),
        f"-DSWAP={int(tile.swap)}",
        f"-DGROUPED={int(tile.family == 'grouped')}",
        f"-DPINGPONG={int(pingpong)}",
        f"-DSTAGES={stages}",
        f"-D__CUDACC_VER_MAJOR__={major}",
        f"-D__CUDACC_VER_MINOR__={minor}",
    )
    compiler = (toolchain.host_compiler, toolchain.host_version, toolchain.nvcc_version)
    key = digest_of([compiler, FLAGS, definitions, _content(SOURCES), _content(cutlass)])
    kept = cache / "emulate" / key
    if not (kept / "program").is_file():
        with publish_directory(kept) as fresh:
            _compile(cutlass, toolchain, definitions, fresh / "program")
    return kept / "program"


def _compile(cutlass: Path, toolchain: Toolchain, definitions: tuple[str, ...], output: Path) -> None:
    cuda = toolchain.cuda_home / "include"
    done = process.run(
        [
            toolchain.host_compiler,
            *FLAGS,
            *definitions,
            f"-I{SOURCES}",
            f"-isystem{cutlass}",
            f"-isystem{cuda}",
            f"-isystem{cuda / 'cccl'}",
            "-s",
            SOURCES / "collective.cpp",
            "-o",
            output,
        ],
        env={"LC_ALL": "C"},  # the first error is read
        check=False,
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


def _content(directory: Path) -> list[list[str]]:
    """Every file below a directory with its sha256."""
    return [[str(path.relative_to(directory)), file_sha256(path)] for path in sorted(directory.rglob("*")) if path.is_file()]
