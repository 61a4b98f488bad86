"""nvcc agrees with the host compiler: one tile of each verdict through FlashInfer's own launcher, with the figures asserted.

The real adapter is in place here; a static assertion on stages and bytes stands where a launcher names its kernel type. One
to two minutes and 6 GB for each tile that compiles.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_tiles_introspected import ask, tools, trees

from sm120kit import process
from sm120kit.records import Toolchain
from sm120kit.tiles import introspect, listing

__all__ = ["tools", "trees"]
pytestmark = pytest.mark.compiler

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
    includes = [flag for path in (*system, introspect.PROBE / "absent") for flag in ("-isystem", str(path))]
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
def test_nvcc_makes_the_same_kernel(
    trees: dict[str, Path], tools: Toolchain, tmp_path: Path, shape: str, stages: int, smem_bytes: int
) -> None:
    one = ask(trees["before"], "nvfp4", shape, "finalize")
    done = compile_with_nvcc(one, tools, trees["before"], tmp_path, stages, smem_bytes)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "tile.o").stat().st_size > 0


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


def test_a_wrong_figure_would_be_noticed(trees: dict[str, Path], tools: Toolchain, tmp_path: Path) -> None:
    one = ask(trees["before"], "nvfp4", "128x128x128", "finalize")
    done = compile_with_nvcc(one, tools, trees["before"], tmp_path, 4, 93_185)
    assert done.returncode != 0
    assert "bytes differ" in done.stderr
