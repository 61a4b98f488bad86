"""The series on CUTLASS 4.8.1, which has the defects still. No recipe pins it: its headers are in a wheel on the index."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sm12x_lab import emulation
from sm12x_lab.emulation import Mainloop
from sm12x_lab.emulation.emulation_records import Emulation
from sm120kit import patches
from sm120kit.core import toolchain
from sm120kit.core.errors import CompileFailed
from sm120kit.core.workspace import Workspace
from sm120kit.patches.patch_records import PatchedTree
from sm120kit.sources import fetch
from sm120kit.sources.source_records import VendoredProject, WheelPin

ROOT = Path(__file__).parents[3]
CARRIER = WheelPin(
    "sgl-deep-gemm",
    "sgl-deep-gemm",
    "0.2.5",
    "e13778e53f682b806dd2c799b5ad81701114d9346044643a8df7589a845f34e6",
    "sgl_deep_gemm-0.2.5-py3-none-manylinux2014_x86_64.whl",
)
CUTLASS = VendoredProject("cutlass", "deep_gemm", "4.8.1")

FP4_K64 = Mainloop("grouped", "nvfp4", 128, 128, 64, swap=False, pingpong=False, stages=0)
DENSE_FP4_K64 = replace(FP4_K64, family="dense")
FP4_K128 = replace(FP4_K64, k=128)
MXFP8_K64, MXFP4_K64 = replace(FP4_K64, dtype="mxfp8"), replace(FP4_K64, dtype="mxfp4")
MIXED_K64 = replace(FP4_K64, dtype="fp8xmxfp4")

Results = dict[str, dict[Mainloop, Emulation | CompileFailed]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, emulations: Path) -> Results:
    """The emulations with the headers as released and with the series."""
    root = tmp_path_factory.mktemp("cutlass")
    checkout = fetch(CARRIER, Workspace.open(root / "state"))
    unpatched = PatchedTree(checkout, (CUTLASS,), checkout.commit, checkout.tree, ())
    patched = patches.apply(checkout, (CUTLASS,), ROOT / "patches", ROOT / "cutlass_overrides")
    emulated: Results = {}
    for name, tree in {"released": unpatched, "patched": patched}.items():
        patches.materialise(tree, root / name)
        emulator = emulation.Emulator(root / name / CUTLASS.path / "include", toolchain.find(), emulations)
        emulated[name] = emulator.run_all([FP4_K64, DENSE_FP4_K64, FP4_K128])
        emulated[name] |= emulator.run_all([MXFP8_K64, MXFP4_K64]) | emulator.run_all([MIXED_K64])
    return emulated


def error(result: Emulation | CompileFailed) -> str:
    """The error of an emulation that does not compile."""
    assert isinstance(result, CompileFailed)
    return str(result)


@pytest.mark.parametrize("mainloop", [FP4_K64, DENSE_FP4_K64], ids=["grouped", "dense"])
def test_fp4_with_one_k_block_still_loses_its_first_k_tile(results: Results, mainloop: Mainloop) -> None:
    released, patched = results["released"][mainloop], results["patched"][mainloop]
    assert isinstance(released, Emulation) and isinstance(patched, Emulation)
    assert (released.passed, released.signature) == (False, "first k tile lost, last counted twice")
    assert patched.passed


@pytest.mark.parametrize("mainloop", [MXFP8_K64, MXFP4_K64], ids=["mxfp8", "mxfp4"])
def test_k64_with_scale_vectors_of_32_compiles_with_the_series_only(results: Results, mainloop: Mainloop) -> None:
    assert "error: " in error(results["released"][mainloop])
    patched = results["patched"][mainloop]
    assert isinstance(patched, Emulation) and patched.passed


def test_mixed_widths_are_refused_for_the_right_reason(results: Results) -> None:
    assert "TMA unpacks 4-bit" not in error(results["released"][MIXED_K64])
    assert "TMA unpacks 4-bit and 6-bit elements in boxes of 128 only" in error(results["patched"][MIXED_K64])


def test_tiles_of_two_k_blocks_are_correct_on_both_sides(results: Results) -> None:
    for side in results.values():
        correct = side[FP4_K128]
        assert isinstance(correct, Emulation) and correct.passed
