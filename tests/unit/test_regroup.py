"""Generated units regrouped by mainloop: text as the generators of FlashInfer 0.6.6 write it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sm120kit import recipes
from sm120kit.wheels.flashinfer_generators import regrouped

RECIPE = recipes.load_flashinfer("flashinfer-0.6.6")

DENSE = """// Use SM120-specific dispatch template
#include "flashinfer/gemm/fp4_gemm_cutlass_template_sm120.h"

namespace flashinfer {{
namespace gemm {{
// SM120/121 only supports 1x1x1 cluster shape
INSTANTIATE_FP4_GEMM_KERNEL_LAUNCHER({}, {}, 1, 1, 1, _1SM)

}}  // namespace gemm
}}  // namespace flashinfer"""

GROUPED = """#if defined(ENABLE_FP4) && defined(ENABLE_FP4)
        INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM(Sm120, SafeFP4, SafeFP4, {},
        void, EpilogueOpDefault, {},
        {}, 1, 1, 1,
        false, false, false, true);
#endif

"""


def write(directory: Path, texts: dict[str, str]) -> list[Path]:
    directory.mkdir()
    for name, text in texts.items():
        (directory / name).write_text(text)
    return [directory / name for name in texts]


def regroup(module: str, sources: list[Path], directory: Path) -> dict[str, str]:
    """The texts of a module's sources by file name, regrouped as in the recipe."""
    directory.mkdir(exist_ok=True)
    tables = [table.model_dump() for table in RECIPE.modules[module].regroup]
    return {path.name: path.read_text() for path in regrouped(sources, tables, directory)}


def test_output_types_of_a_dense_tile_share_a_unit(tmp_path: Path) -> None:
    tiles = ("128, 128, 128", "256, 128, 128")
    sources = write(
        tmp_path / "generated",
        {
            f"fp4_gemm_cutlass_{kind}_{tile.replace(', ', '_')}.cu": DENSE.format(kind, tile)
            for kind in ("half", "__nv_bfloat16")
            for tile in tiles
        }
        | {"fp4_gemm_cutlass_sm120.cu": "TVM_FFI_DLL_EXPORT"},
    )
    texts = regroup("fp4_gemm_cutlass_sm120", sources, tmp_path / "out")
    assert [*texts] == ["fp4_gemm_cutlass_sm120.cu", "fp4_gemm_cutlass_128x128x128.cu", "fp4_gemm_cutlass_256x128x128.cu"]
    both = "\n".join(DENSE.format(kind, tiles[1]) for kind in ("__nv_bfloat16", "half")) + "\n"
    assert texts["fp4_gemm_cutlass_256x128x128.cu"] == both


def test_instantiations_of_several_mainloops_leave_their_source(tmp_path: Path) -> None:
    """As in FlashInfer's grouped kernels, of which each source has two tiles: the text around instantiations is kept."""
    table = {
        "units": "grouped_*",
        "instantiation": r"INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM\(Sm120,[^;]*,\s+(\d+), (\d+), (\d+), 1, 1, 1,[^;]*;",
        "into": r"\1x\2x\3.cu",
    }
    tiles, texts, calls = ("128, 128, 128", "128, 128, 256"), {}, []
    for epilogue in ("NONE", "FINALIZE"):
        listed = [GROUPED.format(kind, epilogue, tile) for tile in tiles for kind in ("half", "__nv_bfloat16")]
        texts[f"grouped_{epilogue}.cu"] = "head\n" + "".join(listed) + "tail"
        calls += listed
    sources = write(tmp_path / "generated", {**texts, "logger.cpp": ""})
    units = {path.name: path.read_text() for path in regrouped(sources, [table], tmp_path)}
    assert {name: text.count("INSTANTIATE") for name, text in units.items()} == {
        "128x128x128.cu": 4,
        "128x128x256.cu": 4,
        "logger.cpp": 0,
    }
    assert all(sum(call in text for text in units.values()) == 1 for call in calls)
    assert all(text.count("head\n") == text.count("tail\n") == 2 for name, text in units.items() if name.startswith("128"))


def test_equal_units_are_not_written_again(tmp_path: Path) -> None:
    sources = write(tmp_path / "generated", {"fp4_gemm_cutlass_half_128_128_128.cu": DENSE.format("half", "128, 128, 128")})
    regroup("fp4_gemm_cutlass_sm120", sources, tmp_path / "out")
    unit = tmp_path / "out" / "fp4_gemm_cutlass_128x128x128.cu"
    unit.chmod(0o444)
    inode, written = unit.stat().st_ino, unit.stat().st_mtime_ns
    regroup("fp4_gemm_cutlass_sm120", sources, tmp_path / "out")
    assert (unit.stat().st_ino, unit.stat().st_mtime_ns) == (inode, written)


def test_table_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    """A generator that names or writes its units differently must not lose kernels."""
    renamed = write(tmp_path / "renamed", {"fp4_gemm_half.cu": DENSE.format("half", "128, 128, 128")})
    with pytest.raises(SystemExit, match=r"no source is named like fp4_gemm_cutlass_.*; they are fp4_gemm_half.cu"):
        regroup("fp4_gemm_cutlass_sm120", renamed, tmp_path / "out")
    other = write(tmp_path / "other", {"fp4_gemm_cutlass_half_128_128_128.cu": "NEW_MACRO(half, 128, 128, 128)"})
    with pytest.raises(SystemExit, match=r"fp4_gemm_cutlass_half_128_128_128\.cu has no instantiation like INSTANTIATE_FP4"):
        regroup("fp4_gemm_cutlass_sm120", other, tmp_path / "out")
