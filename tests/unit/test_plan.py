"""A plan is decided by what goes in, says what is left out, and is named by a digest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from sm120kit import plan, recipe
from sm120kit.errors import ExpectationFailed
from sm120kit.records import Arch, BuildPlan, Checkout, Generated, PatchedTree, Tile, TileFacts, Toolchain

ITEM = recipe.load("flashinfer-0.6.6")
TREE = PatchedTree(Checkout(ITEM.pin, Path("/somewhere"), "c" * 40, "d" * 40), ITEM.inside, "a" * 40, "b" * 40, ())
TOOLS = Toolchain(Path("/cuda"), "13.0.88", "/usr/bin/c++", "c++ 12.2.0")
DENSE = Generated(
    "fp4_gemm_cutlass_sm120",
    "jit/fp4.so",
    ("fp4_gemm_cutlass_sm120.cu", "fp4_gemm_cutlass_half_128_128_128.cu"),
    (("tree/csrc/fp4_gemm_cutlass_sm120.cu", "jit/a.cuda.o"), ("jit/fp4_gemm_cutlass_half_128_128_128.cu", "jit/b.cuda.o")),
    "ninja text",
)
GROUPED = Generated(
    "fused_moe_120",
    "jit/moe.so",
    (
        "cutlass_kernel_file_gemm_sm90_M128_group0.generated.cu",
        "cutlass_kernel_file_gemm_grouped_sm120_x.generated.cu",
        "logger.cpp",
    ),
    (("jit/cutlass_kernel_file_gemm_grouped_sm120_x.generated.cu", "jit/c.cuda.o"),),
    "more ninja text",
)


def make(
    tree: PatchedTree = TREE,
    tools: Toolchain = TOOLS,
    dense: Generated = DENSE,
    known: plan.Known = lambda unit: None,
    tiles: Sequence[TileFacts] = (),
) -> BuildPlan:
    return plan.make(ITEM, "quick", [Arch.SM_120F], tree, [dense, GROUPED], tools, {"tvm": "1"}, tiles, known)


def test_orders_ask_for_samples_only_of_unpacked_modules() -> None:
    orders = plan.orders(ITEM, "quick")
    assert orders["fp4_gemm_cutlass_sm120"]["only"] is None
    assert orders["fused_moe_120"]["only"] == ["cutlass_kernel_file_gemm_grouped_sm120_M128_BS_group0*"]
    assert orders["fused_moe_120"]["leave_out"] == ["cutlass_kernel_file_gemm_sm90_*"]
    assert list(plan.orders(ITEM, "fused-moe")) == ["fused_moe_120"]


def test_everything_not_compiled_has_a_reason() -> None:
    left = {item.what: item.reason for item in make().left_out}
    assert "Hopper" in left["fused_moe_120: 1 units cutlass_kernel_file_gemm_sm90_*"]
    assert "sample of 1" in left["fused_moe_120: 1 further units"]
    assert left["gemm_sm120"] == "not in kernel group quick"
    assert all(left.values())


def test_packed_modules_and_samples() -> None:
    dense, grouped = make().modules
    assert dense.packed and not grouped.packed
    assert dict(grouped.expect_kernels) == ITEM.groups["quick"].expect_sample_kernels


def test_digest_follows_what_goes_in_and_nothing_else() -> None:
    digest = make().digest
    assert make(tools=replace(TOOLS, cuda_home=Path("/elsewhere"))).digest == digest
    assert make(known=lambda unit: (1, 1.0)).digest == digest
    assert make(tree=replace(TREE, tree="e" * 40)).digest != digest
    assert make(tools=replace(TOOLS, nvcc_version="13.1")).digest != digest
    assert make(dense=replace(DENSE, ninja="other flags")).digest != digest


def test_measured_costs_replace_estimates() -> None:
    unit = make().modules[0].units[1]
    assert unit.estimate_bytes == int(5.6 * 2**30) and unit.estimate_seconds == 70
    learned = make(known=lambda name: (123, 4.5) if name == "fp4_gemm_cutlass_sm120/b.cuda.o" else None).modules[0].units[1]
    assert (learned.estimate_bytes, learned.estimate_seconds) == (123, 4.5)


def fact(k: int, *, generated: bool, smem_bytes: int = 0, why_not: str = "") -> TileFacts:
    tile = Tile("grouped", "nvfp4", 256, 128, k, "finalize", False, "bf16")
    return TileFacts(tile, generated, not why_not, why_not, smem_bytes=smem_bytes)


def test_tiles_that_cannot_run_are_left_out_with_the_reason() -> None:
    tiles = [fact(128, generated=True, smem_bytes=101_376), fact(64, generated=False, smem_bytes=102_400)]
    left = {
        item.what: item.reason for item in make(tiles=[*tiles, fact(32, generated=False, why_not="no such thing")]).left_out
    }
    assert left["tile grouped nvfp4 256x128x64 finalize"] == "needs 102,400 B of shared memory; SM120 has 101,376 B"
    assert left["tile grouped nvfp4 256x128x32 finalize"] == "no such thing"
    assert "tile grouped nvfp4 256x128x128 finalize" not in left


def test_a_generated_tile_that_cannot_run_stops_the_plan() -> None:
    with pytest.raises(ExpectationFailed, match="256x128x128 finalize: needs 102,400 B"):
        make(tiles=[fact(128, generated=True, smem_bytes=102_400)])
