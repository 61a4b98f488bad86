"""``tiles --cost``: counts of machine code, room on a multiprocessor, waves and bytes."""

from __future__ import annotations

import json
import lzma
from dataclasses import replace
from pathlib import Path

import pytest

from sm12x_lab import RECEIPTS, tile_costs
from sm12x_lab.tile_costs import Counts, Problem, TileCost
from sm120kit.core import process, toolchain
from sm120kit.core.errors import BadInput, NotFound
from sm120kit.core.workspace import Workspace
from sm120kit.kernels.kernel_records import Tile, TileFacts
from sm120kit.recipes.target import resolve_flashinfer
from sm120kit.sources.run_options import Options

SASS = Path(__file__).parent / "recorded" / "grouped-nvfp4-128x128x128.sass.xz"


@pytest.fixture(scope="module")
def sass() -> str:
    return lzma.decompress(SASS.read_bytes()).decode()


@pytest.fixture(scope="module")
def cost(sass: str) -> TileCost:
    (name,) = tile_costs.demangled([sass.split()[2]])
    kernel = tile_costs.tile_kernel(name)
    assert kernel
    return TileCost("unit", kernel, 168, 384, *tile_costs.kernel_counts(sass), 99_328)


def test_counts_of_recorded_machine_code(sass: str) -> None:
    """ptxas reported 68 bytes of spill stores and 56 of spill loads for this kernel: 29 accesses of up to 8 bytes.

    A k tile of 128x128x128 is 256 MMA of 16x8x64, which 8 warps share.
    """
    whole, loop = tile_costs.kernel_counts(sass)
    assert whole == Counts(4491, 64, 189, 167, 29)
    assert loop == Counts(124, 128**3 // (16 * 8 * 64) // 8, 20, 0, 0)


def test_main_loop_is_the_innermost_with_most_mma() -> None:
    """What lies between a loop's ends and is not on the way round is not counted."""
    lines = {
        0x00: "LDL R1",
        0x10: "OMMA R2",  # the outer loop
        0x20: "LDS R1",  # the inner one
        0x30: "@P1 BRA 0x60",
        0x40: "STL R1",  # jumped to from nowhere
        0x50: "EXIT",
        0x60: "OMMA R1",
        0x70: "BRA.U UP0, 0x20",
        0x80: "@!P0 BRA 0x10",
        0x90: "STS R1",
        0xA0: "BRA 0xa0",
    }
    text = "\n".join(f"        /*{address:04x}*/   {line} ;" for address, line in lines.items())
    assert tile_costs.kernel_counts(text) == (Counts(11, 2, 1, 1, 2), Counts(4, 1, 1, 0, 0))
    assert tile_costs.kernel_counts(text.replace("BRA", "NOP"))[1] == Counts()


def test_tile_of_a_name(cost: TileCost) -> None:
    kernel = cost.kernel
    assert (kernel.dtype, kernel.shape, kernel.stages) == ("nvfp4", (128, 128, 128), 4)
    assert (kernel.grouped, kernel.finalize, kernel.pingpong, kernel.streamk) == (True, True, False, False)
    assert tile_costs.tile_kernel("void vllm::rms_norm<float>(float*)") is None


@pytest.mark.parametrize(
    ("registers", "threads", "shared", "ctas"),
    [
        (168, 384, 99_328, 1),
        (128, 384, 40_000, 1),  # 16 warps of 128 registers
        (80, 384, 40_000, 2),
        (80, 384, 33_000, 2),
        (32, 128, 1024, 12),
        (16, 32, 0, 24),
        (255, 1024, 0, 0),  # 8 warps of 255 registers
    ],
)
def test_room_on_a_multiprocessor(registers: int, threads: int, shared: int, ctas: int) -> None:
    assert tile_costs.resident(registers, threads, shared) == ctas


CALCULATOR = """
#include <cuda_occupancy.h>
#include <cstdio>
int main() {
  cudaOccDeviceProp gpu;
  gpu.computeMajor = 12, gpu.computeMinor = 0, gpu.warpSize = 32, gpu.numSms = 188;
  gpu.maxThreadsPerBlock = 1024, gpu.maxThreadsPerMultiprocessor = 1536;
  gpu.regsPerBlock = gpu.regsPerMultiprocessor = 65536;
  gpu.sharedMemPerBlock = 49152, gpu.sharedMemPerBlockOptin = 101376;
  gpu.sharedMemPerMultiprocessor = 102400, gpu.reservedSharedMemPerBlock = 1024;
  cudaOccFuncAttributes kernel;
  kernel.maxThreadsPerBlock = 1024, kernel.sharedSizeBytes = 0, kernel.numBlockBarriers = 1;
  kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN, kernel.maxDynamicSharedSizeBytes = 101376;
  cudaOccDeviceState state;
  for (kernel.numRegs = 1; kernel.numRegs <= 255; kernel.numRegs += 7)
    for (int threads = 32; threads <= 1024; threads += 32)
      for (int shared = 0; shared <= 101376; shared += 9216) {
        cudaOccResult room;
        if (cudaOccMaxActiveBlocksPerMultiprocessor(&room, &gpu, &kernel, &state, threads, shared)) return 1;
        std::printf("%d %d %d %d\\n", kernel.numRegs, threads, shared, room.activeBlocksPerMultiprocessor);
      }
}
"""


def test_room_is_that_of_the_calculator_in_cudas_headers(tmp_path: Path) -> None:
    (tmp_path / "room.cpp").write_text(CALCULATOR)
    tools = toolchain.find()
    headers = ["-isystem", str(tools.cuda_home / "include")]
    process.run([tools.host_compiler, *headers, str(tmp_path / "room.cpp"), "-o", str(tmp_path / "room")])
    lines = [[*map(int, line.split())] for line in process.run([tmp_path / "room"]).stdout.splitlines()]
    assert len(lines) == 37 * 32 * 12
    assert [line for line in lines if tile_costs.resident(*line[:3]) != line[3]] == []


def test_waves_and_bytes_of_a_problem(cost: TileCost) -> None:
    problem = Problem.parse("512,3072,1024")
    assert problem.tiles(cost.kernel.shape) == 4 * 24
    assert [problem.waves(cost, count) for count in (188, 170, 48)] == [96 / 188, 96 / 170, 2]
    l2, dram = problem.megabytes(cost)
    output = 2 * 512 * 3072
    assert l2 * 1e6 == 96 * 2 * 128 * 1024 * 4.5 / 8 + output
    assert dram * 1e6 == (512 + 3072) * 1024 * 4.5 / 8 + output
    ragged = Problem.parse("1,130,64")
    assert ragged.tiles(cost.kernel.shape) == 2
    cells = tile_costs.cells(cost, problem)
    assert (cells["waves 48"], cells["CTAs/SM"], cells["LDS/STS"]) == ("2.00", "1", "20/0")


def test_bytes_are_those_that_ncu_counts(cost: TileCost) -> None:
    """`tests/lab/gpu/products.py`; the software functions store to local memory, which no SM120 does.

    What a kernel writes is in L2 when it ends, and is not all in DRAM.
    """
    receipt = json.loads((RECEIPTS / "ptx" / "bytes-nvidia-h200.json").read_text())
    assert "tuple<{}>".format(", ".join(f"C<{size}>" for size in cost.kernel.shape)) in receipt["kernel"]
    for row in receipt["rows"]:
        problem = Problem.parse(row["problem"])
        l2, dram = (1e6 * size for size in problem.megabytes(cost))
        written = 32 * (row["l2_written_sectors"] - row["local_stored_sectors"])
        assert written == 2 * problem.m * problem.n
        assert abs(row["l2_read_bytes"] + written - l2) < 0.003 * l2
        assert abs(row["dram_read_bytes"] - (dram - written)) < 0.05 * (dram - written)
        assert row["dram_written_bytes"] <= written


@pytest.mark.parametrize("text", ["", "1,2", "1,2,0", "1,2,x", "1,2,3,4", "1,2,99999999", "\u0661,2,3"])
def test_problem_that_is_none(text: str) -> None:
    with pytest.raises(BadInput, match="M,N,K"):
        Problem.parse(text)


def test_shared_memory_is_that_of_the_tile_table(cost: TileCost) -> None:
    tile = Tile("grouped", "nvfp4", 128, 128, 128, "finalize", False, "bf16")
    fact = TileFacts(tile, True, True, schedule="cooperative", scheduler="persistent", stages=4, smem_bytes=90_000)
    kernel = replace(cost, shared_bytes=16)
    assert tile_costs.with_shared_bytes(kernel, [fact]).shared_bytes == 90_016
    assert tile_costs.with_shared_bytes(kernel, [fact, replace(fact, smem_bytes=80_000)]).shared_bytes is None
    unknown = tile_costs.with_shared_bytes(kernel, [replace(fact, stages=3)])
    assert unknown.shared_bytes is None and tile_costs.cells(unknown, None)["shared B"] == "unknown"
    big = replace(fact, tile=replace(tile, n=256), smem_bytes=130_000)
    assert "130,000 B" in tile_costs.notes([big])[0] and tile_costs.notes([])[-1] == tile_costs.NOT_AN_ORDER


def test_nothing_is_compiled(tmp_path: Path) -> None:
    """Nothing is fetched to find that out."""
    target = resolve_flashinfer("flashinfer-0.6.6", Options(Workspace.open(tmp_path)))
    with pytest.raises(NotFound, match="is compiled"):
        tile_costs.tile_costs(target)
