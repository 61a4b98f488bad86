"""One tile of FlashInfer 0.6.6 with the series, by the host compiler: it fits. tests/slow has a tile of each verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from sm120kit import patches, recipes
from sm120kit.core import toolchain
from sm120kit.core.records import Toolchain
from sm120kit.core.workspace import Workspace
from sm120kit.kernels.tiles import introspect, listing
from sm120kit.sources import Origin, fetch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, downloads: Path) -> Path:
    """The files of the patched tree."""
    root = tmp_path_factory.mktemp("tree")
    engine = recipes.load_flashinfer("flashinfer-0.6.6")
    checkout = fetch(engine.pin, Workspace.open(root / "state"), Origin(mirror=str(downloads), offline=True))
    patches.materialise(patches.apply(checkout, engine.inside, ROOT / "patches", ROOT / "cutlass_overrides"), root / "tree")
    return root / "tree"


@pytest.fixture(scope="module")
def compilers() -> Toolchain:
    return toolchain.find()


def test_host_compiler_finds_stages_and_shared_memory_of_a_patched_tile(
    directory: Path, compilers: Toolchain, tmp_path: Path
) -> None:
    (call,) = (
        call
        for call in listing.instantiations(directory)
        if (call.tile.family, call.tile.dtype, call.tile.shape) == ("grouped", "nvfp4", "256x128x128")
        if (call.tile.epilogue, call.tile.output, call.tile.swap) == ("finalize", "bf16", False)
    )
    ((facts,),) = introspect.measure([call], directory, compilers, tmp_path, lambda done: None).values()
    # 3 stages and 102,400 bytes without the series: 1,024 more than SM120 has.
    assert (facts.stages, facts.smem_bytes, facts.fits) == (2, 74_752, True)
