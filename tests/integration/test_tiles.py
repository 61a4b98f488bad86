"""The real templates of FlashInfer 0.6.6 in the real host compiler: one tile of each verdict, without and with the patches."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from sm120kit import patches, process, recipe, tiling, toolchain
from sm120kit.cli.tiles import numbers
from sm120kit.emulate import Emulator
from sm120kit.errors import CompileFailed
from sm120kit.records import PatchedTree, Proof, TileFacts, Toolchain
from sm120kit.tiles import compare, introspect, listing
from sm120kit.trees import Options, patched_tree
from sm120kit.workspace import Workspace


@pytest.fixture(scope="module")
def tools() -> Toolchain:
    return toolchain.find()


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """FlashInfer 0.6.6 as it was released and with the series of this repository."""
    item = recipe.load("flashinfer-0.6.6")
    after = patched_tree(item, Options(Workspace.open(tmp_path_factory.mktemp("state"))))
    before = PatchedTree(after.checkout, after.inside, after.checkout.commit, after.checkout.tree, ())
    directory = tmp_path_factory.mktemp("trees")
    for name, tree in {"before": before, "after": after}.items():
        patches.materialise(tree, directory / name)
    return {"before": directory / "before", "after": directory / "after"}


def ask(tree: Path, dtype: str, shape: str, epilogue: str, family: str = "grouped") -> listing.Instantiation:
    """The bf16 call for a tile without swap."""
    (found,) = (
        one
        for one in listing.instantiations(tree)
        if (one.tile.family, one.tile.dtype, one.tile.shape, one.tile.epilogue) == (family, dtype, shape, epilogue)
        if (one.tile.output, one.tile.swap) == ("bf16", False)
    )
    return found


def measure(asked: Sequence[listing.Instantiation], tree: Path, tools: Toolchain, cache: Path) -> list[tuple[TileFacts, ...]]:
    measured = introspect.measure(asked, tree, tools, cache, lambda done: None)
    return [measured[one] for one in asked]


CUTLASS = "3rdparty/cutlass/include"


def quick(tree: Path, directory: Path) -> list[listing.Instantiation]:
    """The calls of the kernel group ``quick``: its block-scaled module, and the units of another that it samples."""
    item = recipe.load("flashinfer-0.6.6")
    group = item.groups["quick"]
    found = [one for one in listing.instantiations(tree) if one.generated and one.module in group.modules]
    process.run([sys.executable, "-I", listing.__file__.replace("listing", "_generate"), tree, directory])
    units = [unit for pattern in group.samples for unit in directory.rglob(f"{pattern.rsplit('/', 1)[1]}")]
    sampled = {one.tile for unit in units for one in listing.parse(unit.read_text(), "", ())}
    found += [one for one in listing.instantiations(tree) if one.module == "fused_moe" and one.tile in sampled]
    assert {one.tile.family for one in found} == {"dense", "grouped"}
    return found


def test_every_tile_of_the_quick_group_is_proven(
    trees: dict[str, Path], tools: Toolchain, tmp_path: Path, emulations: Path
) -> None:
    asked = quick(trees["after"], tmp_path / "units")
    facts = [fact for kernels in measure(asked, trees["after"], tools, tmp_path / "tiles") for fact in kernels]
    emulator = Emulator(trees["after"] / CUTLASS, tools, emulations)
    found = tiling.with_numbers(facts, emulator, "quick", emulated=True)
    assert len(found) == len(facts) == 20
    for one in found:
        assert one.fits
        if one.scheduler == "stream-k":
            assert (one.numbers.proof, one.tile.family) == (Proof.NOT_CHECKED, "dense")
        else:
            assert (one.numbers.proof, one.numbers.mismatches) == (Proof.PROVEN, 0), one
            assert one.numbers.outputs > 100_000


def test_k64_is_wrong_without_the_patches_and_proven_with_them(
    trees: dict[str, Path], tools: Toolchain, tmp_path: Path, emulations: Path
) -> None:
    found = []
    for side in ("before", "after"):
        ((fact,),) = measure([ask(trees[side], "nvfp4", "128x128x64", "none")], trees[side], tools, tmp_path / "tiles")
        emulator = Emulator(trees[side] / CUTLASS, tools, emulations)
        found += tiling.with_numbers([fact], emulator, side, emulated=True)
    (row,) = compare.rows(found[:1], found[1:])
    assert row.changed
    assert numbers(row.before) == "wrong: first k tile lost, last counted twice"
    assert numbers(row.after) == "proven"
    assert (row.before and row.before.stages) == (row.after and row.after.stages) == 9


def test_one_tile_of_each_verdict(trees: dict[str, Path], tools: Toolchain, tmp_path: Path) -> None:
    tree = trees["before"]
    asked = [
        ask(tree, "nvfp4", "128x128x128", "finalize"),
        ask(tree, "nvfp4", "256x128x128", "finalize"),
        ask(tree, "fp8xmxfp4", "128x128x64", "none"),
        ask(tree, "nvfp4", "128x128x128", "none", "dense"),
    ]
    (fits,), (over,), (broken,), dense = measure(asked, tree, tools, tmp_path)
    assert (fits.stages, fits.smem_bytes, fits.fits, fits.margin_bytes) == (4, 93_184, True, 8_192)
    assert (over.stages, over.smem_bytes, over.fits, over.margin_bytes) == (3, 102_400, False, -1_024)
    assert {(one.schedule, one.k_blocks) for one in (fits, over)} == {("cooperative", 2)}
    assert not broken.compiles
    assert broken.why_not == "a block of 4 scale factors covers K=128 at scale vector 32: it does not fit K=64"
    assert "TMA requires CTA_Tile and SLayout top-level size equivalence" in broken.error
    assert broken.where == "3rdparty/cutlass/include/cute/atom/copy_traits_sm90_tma.hpp:739"
    assert [(one.scheduler, one.stages, one.smem_bytes) for one in dense] == [
        ("persistent", 2, 47_104),
        ("stream-k", 2, 47_104),
    ]


def test_the_patches_make_the_big_tile_fit_and_leave_the_others(
    trees: dict[str, Path], tools: Toolchain, tmp_path: Path
) -> None:
    tree = trees["after"]
    asked = [ask(tree, "nvfp4", shape, "finalize") for shape in ("128x128x128", "256x128x128")]
    (same,), (fixed,) = measure(asked, tree, tools, tmp_path)
    assert (same.stages, same.smem_bytes) == (4, 93_184)
    assert (fixed.stages, fixed.smem_bytes, fixed.fits) == (2, 74_752, True)


def test_a_tile_that_does_not_compile_hides_no_other(trees: dict[str, Path], tools: Toolchain, tmp_path: Path) -> None:
    tree = trees["before"]
    asked = [
        ask(tree, "fp8xmxfp4", "128x128x128", "none"),
        # as generated, so that both are in one translation unit at first
        replace(ask(tree, "fp8xmxfp4", "128x128x64", "none"), generated=True),
    ]
    (good,), (broken,) = measure(asked, tree, tools, tmp_path)
    assert (good.compiles, good.stages, good.smem_bytes) == (True, 2, 82_944)
    assert not broken.compiles


def test_what_headers_say_is_the_key(trees: dict[str, Path], tools: Toolchain, tmp_path: Path) -> None:
    tree = trees["before"]
    one = ask(tree, "nvfp4", "128x128x128", "none")
    compiler = introspect.Compiler.of(tools, tree.resolve(), one.definitions)
    prefix = compiler.prefix(one.head, tmp_path / "prefix")
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


def test_headers_that_do_not_compile_are_no_verdict(trees: dict[str, Path], tools: Toolchain, tmp_path: Path) -> None:
    tree = trees["before"]
    without_cuda = replace(tools, cuda_home=tmp_path / "nothing")
    with pytest.raises(CompileFailed, match=r"cuda_runtime\.h"):
        measure([ask(tree, "nvfp4", "128x128x128", "none")], tree, without_cuda, tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.json"))
    assert not list((tmp_path / "cache").glob(".work-*")), "nothing is left behind"


# nvcc agrees with the host compiler: one tile of each verdict through the launcher and the real adapter, with the figures
# asserted. One to two minutes and 6 GB for each tile that compiles.

SIZE = "TMA requires CTA_Tile and SLayout top-level size equivalence."


def compile_with_nvcc(
    one: listing.Instantiation, tools: Toolchain, tree: Path, directory: Path, stages: int, smem_bytes: int
) -> process.Completed:
    """The call as FlashInfer compiles it, with its kernel's stages and bytes asserted."""
    unit = directory / "tile.cu"
    unit.write_text(f"""{one.head.split("namespace")[0]}
namespace cutlass::gemm::device {{
template <class Kernel> struct Checked : GemmUniversalAdapter<Kernel> {{
  static_assert(Kernel::CollectiveMainloop::DispatchPolicy::Stages == {stages}, "stages differ");
  static_assert(Kernel::SharedStorageSize == {smem_bytes}, "bytes differ");
}};
}}
#define GemmUniversalAdapter Checked
{one.head[one.head.index("namespace") :]}
{one.call}
{one.tail}""")
    system = [tree / name for name in introspect.INCLUDES if (tree / name).is_dir()]
    flags = [
        "-std=c++17",
        "-O3",
        "-DNDEBUG",
        "--expt-relaxed-constexpr",
        "-static-global-template-stub=false",
        "-use_fast_math",
    ]
    includes = [flag for path in (*system, toolchain.ABSENT) for flag in ("-isystem", str(path))]
    return process.run(
        [
            tools.cuda_home / "bin" / "nvcc",
            *flags,
            *one.definitions,
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
@pytest.mark.compiler
def test_nvcc_makes_the_same_kernel(
    trees: dict[str, Path], tools: Toolchain, tmp_path: Path, shape: str, stages: int, smem_bytes: int
) -> None:
    one = ask(trees["before"], "nvfp4", shape, "finalize")
    done = compile_with_nvcc(one, tools, trees["before"], tmp_path, stages, smem_bytes)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "tile.o").stat().st_size > 0


@pytest.mark.compiler
def test_nvcc_refuses_the_same_tile_for_the_same_reason(trees: dict[str, Path], tools: Toolchain, tmp_path: Path) -> None:
    tree = trees["before"]
    one = ask(tree, "fp8xmxfp4", "128x128x64", "none")
    (facts,) = introspect.measure([one], tree, tools, tmp_path / "cache", lambda done: None)[one]
    done = compile_with_nvcc(one, tools, tree, tmp_path, 5, 98_304)
    assert done.returncode != 0
    assert SIZE in facts.error
    assert SIZE in done.stderr
    file, line = facts.where.rsplit(":", 1)
    assert re.search(rf"{re.escape(Path(file).name)}\({line}\): error: static assertion failed", done.stderr), done.stderr[
        :2000
    ]


@pytest.mark.compiler
def test_a_wrong_figure_would_be_noticed(trees: dict[str, Path], tools: Toolchain, tmp_path: Path) -> None:
    one = ask(trees["before"], "nvfp4", "128x128x128", "finalize")
    done = compile_with_nvcc(one, tools, trees["before"], tmp_path, 4, 93_185)
    assert done.returncode != 0
    assert "bytes differ" in done.stderr
