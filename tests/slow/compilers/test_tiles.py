"""The real templates of FlashInfer 0.6.6 in the real host compiler: one tile of each result, without and with the patches."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from sm12x_lab import tile_numbers
from sm12x_lab.emulation import Emulator
from sm120kit import patches, recipes
from sm120kit.cli.tiles import numbers
from sm120kit.core import process, toolchain
from sm120kit.core.errors import CompileFailed
from sm120kit.core.records import Toolchain
from sm120kit.core.workspace import Workspace
from sm120kit.kernels import tables, tile_records
from sm120kit.kernels.kernel_records import NumericStatus, TileFacts
from sm120kit.kernels.tiles import introspect, listing
from sm120kit.recipes.target import resolve, resolve_flashinfer
from sm120kit.sources.run_options import Options

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def tools() -> Toolchain:
    return toolchain.find()


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """FlashInfer 0.6.6 as it was released and with the series of this repository."""
    target = resolve_flashinfer("flashinfer-0.6.6", Options(Workspace.open(tmp_path_factory.mktemp("state"))))
    directory = tmp_path_factory.mktemp("trees")
    for name, tree in {"before": target.source.unpatched_tree, "after": target.tree}.items():
        patches.materialise(tree, directory / name)
    return {"before": directory / "before", "after": directory / "after"}


def bf16_call(tree: Path, dtype: str, shape: str, epilogue: str, family: str = "grouped") -> listing.Instantiation:
    """The call of a tile with bf16 output and without swap."""
    (call,) = (
        call
        for call in listing.instantiations(tree)
        if (call.tile.family, call.tile.dtype, call.tile.shape, call.tile.epilogue) == (family, dtype, shape, epilogue)
        if (call.tile.output, call.tile.swap) == ("bf16", False)
    )
    return call


def measure(calls: Sequence[listing.Instantiation], tree: Path, tools: Toolchain, cache: Path) -> list[tuple[TileFacts, ...]]:
    measured = introspect.measure(calls, tree, tools, cache, lambda done: None)
    return [measured[call] for call in calls]


CUTLASS = "3rdparty/cutlass/include"


def quick(tree: Path) -> list[listing.Instantiation]:
    """The calls of the kernel group ``quick``: its block-scaled module; and those of one unit of the fused MoE."""
    recipe = recipes.load_flashinfer("flashinfer-0.6.6")
    group = recipe.groups["quick"]
    calls = [call for call in listing.instantiations(tree) if call.generated and call.module in group.modules]
    units = listing.run(tree)[listing.FUSED_MOE_GENERATOR]["files"]
    names = fnmatch.filter(units, "cutlass_kernel_file_gemm_grouped_sm120_M128_BS_group0*.cu")
    sampled = {call.tile for name in names for call in listing.parse(units[name], "", ())}
    calls += [call for call in listing.instantiations(tree) if call.module == "fused_moe_120" and call.tile in sampled]
    assert {call.tile.family for call in calls} == {"dense", "grouped"}
    return calls


def test_every_tile_of_the_quick_group_is_proven(
    trees: dict[str, Path], tools: Toolchain, tmp_path: Path, emulations: Path
) -> None:
    calls = quick(trees["after"])
    facts = [fact for kernels in measure(calls, trees["after"], tools, tmp_path / "tiles") for fact in kernels]
    emulator = Emulator(trees["after"] / CUTLASS, tools, emulations)
    emulated = tile_numbers.with_numbers(facts, emulator, "quick", emulated=True)
    assert len(emulated) == len(facts) == 20
    for fact in emulated:
        assert fact.fits
        if fact.scheduler == "stream-k":
            assert (fact.numbers.proof, fact.tile.family) == (NumericStatus.NOT_CHECKED, "dense")
        else:
            whole = (fact.tile.family, fact.tile.epilogue, fact.tile.output) == ("grouped", "none", "bf16")
            proof = NumericStatus.PROVEN if whole else NumericStatus.MAINLOOP_PROVEN
            assert (fact.numbers.proof, fact.numbers.mismatches) == (proof, 0), fact
            assert fact.numbers.outputs > 100_000


def test_k64_is_wrong_without_the_patches_and_proven_with_them(
    trees: dict[str, Path], tools: Toolchain, tmp_path: Path, emulations: Path
) -> None:
    emulated: list[TileFacts] = []
    for side in ("before", "after"):
        ((fact,),) = measure([bf16_call(trees[side], "nvfp4", "128x128x64", "none")], trees[side], tools, tmp_path / "tiles")
        emulator = Emulator(trees[side] / CUTLASS, tools, emulations)
        emulated += tile_numbers.with_numbers([fact], emulator, side, emulated=True)
    assert [numbers(fact) for fact in emulated] == ["wrong: first k tile lost, last counted twice", "proven"]
    assert {fact.stages for fact in emulated} == {9}


def test_one_tile_of_each_result(trees: dict[str, Path], tools: Toolchain, tmp_path: Path) -> None:
    tree = trees["before"]
    calls = [
        bf16_call(tree, "nvfp4", "128x128x128", "finalize"),
        bf16_call(tree, "nvfp4", "256x128x128", "finalize"),
        bf16_call(tree, "fp8xmxfp4", "128x128x64", "none"),
        bf16_call(tree, "nvfp4", "128x128x128", "none", "dense"),
    ]
    (fits,), (over,), (broken,), dense = measure(calls, tree, tools, tmp_path)
    assert (fits.stages, fits.smem_bytes, fits.fits, fits.margin_bytes) == (4, 93_184, True, 8_192)
    assert (over.stages, over.smem_bytes, over.fits, over.margin_bytes) == (3, 102_400, False, -1_024)
    assert {(fact.schedule, fact.k_blocks) for fact in (fits, over)} == {("cooperative", 2)}
    assert not broken.compiles
    assert broken.why_not == "a block of 4 scale factors covers K=128 at scale vector 32: it does not fit K=64"
    assert "TMA requires CTA_Tile and SLayout top-level size equivalence" in broken.error
    assert broken.where == "3rdparty/cutlass/include/cute/atom/copy_traits_sm90_tma.hpp:739"
    assert [(fact.scheduler, fact.stages, fact.smem_bytes) for fact in dense] == [
        ("persistent", 2, 47_104),
        ("stream-k", 2, 47_104),
    ]


def test_patches_make_the_big_tile_fit_and_keep_the_small_one(trees: dict[str, Path], tools: Toolchain, tmp_path: Path) -> None:
    tree = trees["after"]
    calls = [bf16_call(tree, "nvfp4", shape, "finalize") for shape in ("128x128x128", "256x128x128")]
    (same,), (fixed,) = measure(calls, tree, tools, tmp_path)
    assert (same.stages, same.smem_bytes) == (4, 93_184)
    assert (fixed.stages, fixed.smem_bytes, fixed.fits) == (2, 74_752, True)


def test_k64_tiles_of_scale_vector_32_need_the_patches(trees: dict[str, Path], tools: Toolchain, tmp_path: Path) -> None:
    """Stages and bytes with the patches are those of the kernels that an H100 ran (its receipt)."""
    expected = {"mxfp4": (9, 98_304), "mxfp8": (4, 84_992)}
    for side in ("before", "after"):
        calls = [bf16_call(trees[side], dtype, "128x128x64", "none") for dtype in expected]
        facts = [fact for (fact,) in measure(calls, trees[side], tools, tmp_path / side)]
        if side == "before":
            assert not any(fact.compiles for fact in facts)
            assert all("does not fit K=64" in fact.why_not for fact in facts)
        else:
            assert [(fact.stages, fact.smem_bytes) for fact in facts] == [*expected.values()]
            receipt = json.loads((ROOT / "src/sm12x_lab/receipts/flashinfer-0.6.6/verify-nvidia-h100.json").read_text())
            rows = {row["name"]: (row["stages"], row["smem_bytes"]) for row in receipt["configurations"]}
            assert {dtype: rows[f"grouped-{dtype}-128x128x64-bf16"] for dtype in expected} == expected


def test_tile_that_does_not_compile_does_not_affect_another(trees: dict[str, Path], tools: Toolchain, tmp_path: Path) -> None:
    tree = trees["before"]
    calls = [
        bf16_call(tree, "fp8xmxfp4", "128x128x128", "none"),
        # as generated, so that both are in one translation unit at first
        replace(bf16_call(tree, "fp8xmxfp4", "128x128x64", "none"), generated=True),
    ]
    (good,), (broken,) = measure(calls, tree, tools, tmp_path)
    assert (good.compiles, good.stages, good.smem_bytes) == (True, 2, 82_944)
    assert not broken.compiles


def test_key_changes_with_the_content_of_included_headers(trees: dict[str, Path], tools: Toolchain, tmp_path: Path) -> None:
    tree = trees["before"]
    call = bf16_call(tree, "nvfp4", "128x128x128", "none")
    compiler = introspect.HostCompiler.of(tools, tree.resolve(), call.definitions)
    prefix = compiler.prefix(call.head, tmp_path / "prefix")
    first = compiler.headers(prefix)
    (tree / "csrc" / "unrelated.h").write_text("// no launcher includes this\n")
    assert compiler.headers(prefix) == first
    launcher = next(tree.rglob("sm120_blockscaled_mma_builder.inl"))
    text = launcher.read_text()
    launcher.write_text(text + "// changed\n")
    try:
        assert compiler.headers(prefix) != first
    finally:
        launcher.write_text(text)
    assert compiler.headers(prefix) == first


def test_headers_that_do_not_compile_raise(trees: dict[str, Path], tools: Toolchain, tmp_path: Path) -> None:
    tree = trees["before"]
    without_cuda = replace(tools, cuda_home=tmp_path / "nothing")
    with pytest.raises(CompileFailed, match=r"cuda_runtime\.h"):
        measure([bf16_call(tree, "nvfp4", "128x128x128", "none")], tree, without_cuda, tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.json"))
    assert not list((tmp_path / "cache").glob(".work-*")), "nothing is left behind"


# nvcc agrees with the host compiler: one tile of each verdict through the launcher and the real adapter, with the figures
# asserted. One to two minutes and 6 GB for each tile that compiles.

SIZE = "TMA requires CTA_Tile and SLayout top-level size equivalence."


def compile_with_nvcc(
    call: listing.Instantiation, tools: Toolchain, tree: Path, directory: Path, stages: int, smem_bytes: int
) -> process.Completed:
    """The call as FlashInfer compiles it, with its kernel's stages and bytes asserted."""
    unit = directory / "tile.cu"
    unit.write_text(f"""{call.head.split("namespace")[0]}
namespace cutlass::gemm::device {{
template <class Kernel> struct Checked : GemmUniversalAdapter<Kernel> {{
  static_assert(Kernel::CollectiveMainloop::DispatchPolicy::Stages == {stages}, "stages differ");
  static_assert(Kernel::SharedStorageSize == {smem_bytes}, "bytes differ");
}};
}}
#define GemmUniversalAdapter Checked
{call.head[call.head.index("namespace") :]}
{call.call}
{call.tail}""")
    system = [tree / name for name in introspect.INCLUDES if (tree / name).is_dir()]
    flags = [
        "-std=c++17",
        "-O3",
        "-DNDEBUG",
        "--expt-relaxed-constexpr",
        "-static-global-template-stub=false",
        "-use_fast_math",
    ]
    includes = [flag for path in (*system, toolchain.PLACEHOLDERS) for flag in ("-isystem", str(path))]
    return process.run(
        [
            tools.cuda_home / "bin" / "nvcc",
            *flags,
            *call.definitions,
            *includes,
            "-gencode=arch=compute_120f,code=sm_120f",
            "-c",
            unit,
            "-o",
            directory / "tile.o",
        ],
        check=False,
    )


@pytest.mark.parametrize(
    ("shape", "stages", "smem_bytes"), [("128x128x128", 4, 93_184), ("256x128x128", 3, 102_400)], ids=["fits", "too-big"]
)
def test_nvcc_compiles_the_same_kernel(
    trees: dict[str, Path], tools: Toolchain, tmp_path: Path, shape: str, stages: int, smem_bytes: int
) -> None:
    call = bf16_call(trees["before"], "nvfp4", shape, "finalize")
    done = compile_with_nvcc(call, tools, trees["before"], tmp_path, stages, smem_bytes)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "tile.o").stat().st_size > 0


def test_nvcc_rejects_the_same_tile_for_the_same_reason(trees: dict[str, Path], tools: Toolchain, tmp_path: Path) -> None:
    tree = trees["before"]
    call = bf16_call(tree, "fp8xmxfp4", "128x128x64", "none")
    (facts,) = introspect.measure([call], tree, tools, tmp_path / "cache", lambda done: None)[call]
    done = compile_with_nvcc(call, tools, tree, tmp_path, 5, 98_304)
    assert done.returncode != 0
    assert SIZE in facts.error
    assert SIZE in done.stderr
    file, line = facts.where.rsplit(":", 1)
    assert re.search(rf"{re.escape(Path(file).name)}\({line}\): error: static assertion failed", done.stderr), done.stderr[
        :2000
    ]


def test_nvcc_rejects_a_wrong_figure(trees: dict[str, Path], tools: Toolchain, tmp_path: Path) -> None:
    call = bf16_call(trees["before"], "nvfp4", "128x128x128", "finalize")
    done = compile_with_nvcc(call, tools, trees["before"], tmp_path, 4, 93_185)
    assert done.returncode != 0
    assert "bytes differ" in done.stderr


def test_groupwise_tiles_are_described_by_the_probe(trees: dict[str, Path], tools: Toolchain, tmp_path: Path) -> None:
    """The FP8 GEMMs of gemm_sm120, dense and grouped: 2 operand types, 2 output types, 2 granularities, 2 orders of scales."""
    calls = [call for call in listing.instantiations(trees["before"]) if call.whole_files]
    facts = [fact for kernels in measure(calls, trees["before"], tools, tmp_path) for fact in kernels]
    assert {(fact.tile.family, fact.tile.scales, fact.stages, fact.smem_bytes) for fact in facts} == {
        ("groupwise", "1x128x128", 2, 81_920),
        ("groupwise", "128x128x128", 2, 80_896),
        ("groupwise-grouped", "1x128x128", 2, 77_824),
        ("groupwise-grouped", "128x128x128", 2, 76_800),
    }
    assert len({fact.tile for fact in facts}) == len(facts) == 16
    assert {(fact.tile.dtype, fact.tile.output, fact.tile.shape, fact.tile.swap) for fact in facts} == {
        (dtype, output, "128x128x128", False) for dtype in ("fp8", "fp8_e5m2") for output in ("f16", "bf16")
    }


def test_recorded_tiles_are_those_that_the_compiler_finds() -> None:
    """All tiles of the FlashInfer that vLLM is built with by default: some minutes."""
    target = resolve("vllm", Options(Workspace.open(None))).flashinfer
    facts = tables.tiles(target, patched=True)
    assert tile_records.recorded(target) == tile_records.left_out(target.recipe.name, facts)
