"""One emulated tile of FlashInfer 0.6.6 with the series. tests/slow has more tiles, and seeded faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from sm12x_lab.emulation import Emulator, Mainloop
from sm120kit import patches, recipes
from sm120kit.core import toolchain
from sm120kit.core.workspace import Workspace
from sm120kit.kernels.kernel_records import Tile
from sm120kit.sources import Origin, fetch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory, downloads: Path) -> Path:
    """CUTLASS's headers in the patched tree."""
    root = tmp_path_factory.mktemp("tree")
    engine = recipes.load_flashinfer("flashinfer-0.6.6")
    checkout = fetch(engine.pin, Workspace.open(root / "state"), Origin(mirror=str(downloads), offline=True))
    patches.materialise(patches.apply(checkout, engine.inside, ROOT / "patches", ROOT / "cutlass_overrides"), root / "tree")
    return root / "tree" / "3rdparty/cutlass/include"


def test_k64_tile_of_the_series_passes(headers: Path, emulations: Path) -> None:
    mainloop = Mainloop.of(Tile("grouped", "nvfp4", 128, 128, 64, "none", False, "bf16"), stages=9)
    emulator = Emulator(headers, toolchain.find(), emulations)
    correct = emulator.run(mainloop)
    assert correct.passed and correct.outputs == correct.stored > 40_000 and not correct.findings
