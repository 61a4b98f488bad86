"""One small real case of each stage, on FlashInfer 0.6.6: series and wheel.

All cases of a stage are in tests/slow; a tile of the host compiler is in test_tiles.py, an emulated one in tests/lab.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sm120kit import patches, recipes
from sm120kit.core.record_files import read_record
from sm120kit.core.workspace import Workspace
from sm120kit.kernels import cubin
from sm120kit.kernels.tile_records import TileRecord
from sm120kit.patches.patch_records import PatchedTree
from sm120kit.recipes import lockfile
from sm120kit.sources import Origin, fetch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory, downloads: Path) -> PatchedTree:
    """FlashInfer 0.6.6 with the series of this repository."""
    engine = recipes.load_flashinfer("flashinfer-0.6.6")
    checkout = fetch(engine.pin, Workspace.open(tmp_path_factory.mktemp("state")), Origin(str(downloads), offline=True))
    return patches.apply(checkout, engine.inside, ROOT / "patches", ROOT / "cutlass_overrides")


def test_series_applies_with_recorded_tree_ids(tree: PatchedTree) -> None:
    recipe = ROOT / "recipes" / "engines" / "flashinfer-0.6.6"
    (source,) = (s for s in lockfile.read(Path(f"{recipe}.lock.json")).sources if s.project == "flashinfer")
    tiles = read_record(TileRecord, Path(f"{recipe}.tiles.json"))
    assert (tree.checkout.tree, tree.tree) == (source.tree, tiles.tree)


def test_wheel_of_smallest_module_carries_compiled_sm120_code(built: tuple[Path, Path], tmp_path: Path) -> None:
    _, wheel = built
    with zipfile.ZipFile(wheel) as archive:
        library = archive.extract("flashinfer/data/aot/fp4_quantization_120f/fp4_quantization_120f.so", tmp_path)
    images = cubin.read(Path(library))
    assert {image.arch for image in images} == {"sm_120f"} and any(image.kernels for image in images)


def test_plan_and_finished_wheel_do_not_wait_for_another_build(built: tuple[Path, Path], data: Path, downloads: Path) -> None:
    state, wheel = built
    environment = {**os.environ, "SM120KIT_STATE": str(state), "SM120KIT_DATA": str(data)}
    build = [
        sys.executable,
        "-m",
        "sm120kit",
        "build",
        "flashinfer@0.6.6",
        "--kernels",
        "tiny",
        "--mirror",
        downloads,
        "--offline",
    ]
    with (state / "locks" / "flashinfer-0.6.6-sm_120f.lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as a build of these sources that compiles
        planned = subprocess.run([*build, "--dry-run"], env=environment, capture_output=True, text=True, timeout=300)
        finished = subprocess.run(
            [*build, "--output", wheel.parent], env=environment, capture_output=True, text=True, timeout=300
        )
    assert (planned.returncode, finished.returncode) == (0, 0), planned.stderr + finished.stderr
    assert "flashinfer-0.6.6 for sm_120f: plan " in planned.stdout and finished.stdout.strip() == str(wheel)
    assert "waiting" not in planned.stderr + finished.stderr
