"""The emulation on FlashInfer's real CUTLASS: it passes what is right, fails what is known to be wrong, finds what is planted.

Each tile takes half a minute to compile: two tiles always, the rest with the tests that take minutes.
"""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sm120kit import emulate, patches, recipe, toolchain
from sm120kit.errors import CompileFailed
from sm120kit.records import Emulation, Tile
from sm120kit.sources import fetch
from sm120kit.workspace import Workspace

ROOT = Path(__file__).parents[2]
INCLUDE = "3rdparty/cutlass/include"
ARRAY_MAINLOOP = "cutlass/gemm/collective/sm120_blockscaled_mma_array_tma.hpp"

Run = Callable[..., Emulation]


def extract(repository: Path, commit: str, directory: Path) -> Path:
    """CUTLASS's headers as they are in a commit."""
    directory.mkdir()
    packed = directory / "include.tar"
    subprocess.run(["git", "-C", repository, "archive", "-o", packed, commit, INCLUDE], check=True)
    with tarfile.open(packed) as tar:
        tar.extractall(directory, filter="data")
    return directory / INCLUDE


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """FlashInfer 0.6.6's CUTLASS, as it came and with our series."""
    root = tmp_path_factory.mktemp("trees")
    engine = recipe.load("flashinfer-0.6.6")
    checkout = fetch(engine.pin, Workspace.open(root / "state"))
    patched = patches.apply(checkout, engine.inside, ROOT / "patches", ROOT / "cutlass_overrides")
    return {
        "stock": extract(checkout.repository, checkout.commit, root / "stock"),
        "patched": extract(checkout.repository, patched.commit, root / "patched"),
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    compilers, cache = toolchain.find(), tmp_path_factory.mktemp("cache")

    def emulated(cutlass: Path, dtype: str, m: int, n: int, k: int, *, family: str = "grouped", **options: str) -> Emulation:
        return emulate.run(cutlass, Tile(family, dtype, m, n, k, "none", False, "bf16"), compilers, cache, **options)

    return emulated


def kinds(result: Emulation) -> set[str]:
    return {finding.kind for finding in result.findings}


def test_a_right_tile_and_every_fault_in_it(trees: dict[str, Path], run: Run) -> None:
    tile = ("nvfp4", 128, 128, 128)
    right = run(trees["stock"], *tile)
    assert (right.passed, right.mismatches, right.max_error, right.findings) == (True, 0, 0, ())
    assert right.outputs == 3 * (128 * 128 + 193 * 136 + 128)
    assert right.expected_bytes == right.delivered_bytes == 2 * (128 * 64 + 128 * 8)
    # 3 runs of: a tile of 9 k tiles; 2 x 2 tiles of 3; a tile of 1. Each k tile is 8 x 16 x 2 mma.
    assert right.mma_count == 3 * (9 + 4 * 3 + 1) * 8 * 16 * 2
    found = {fault: run(trees["stock"], *tile, fault=fault) for fault in emulate.FAULTS}
    assert not any(result.passed for result in found.values())
    assert kinds(found["stage-off-by-one"]) == {"hang"}
    assert kinds(found["bytes-too-few"]) == kinds(found["bytes-too-many"]) == {"hang", "barrier bytes"}
    assert found["scales-swapped"].mismatches > 0.9 * right.outputs
    assert found["scale-stride"].mismatches > 0


def test_k64_of_stock_cutlass_loses_its_first_k_tile(trees: dict[str, Path], run: Run) -> None:
    wrong = run(trees["stock"], "nvfp4", 128, 128, 64)
    assert not wrong.passed
    assert wrong.mismatches > 0.9 * wrong.outputs
    assert wrong.signature == "first k tile lost, last counted twice"
    assert not wrong.findings


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("dtype", "m", "n"),
    [("nvfp4", 128, 128), ("mxfp4", 128, 128), ("mxfp8", 128, 128), ("nvfp4", 256, 128), ("mxfp8", 128, 256)],
)
def test_k64_is_right_with_the_series(trees: dict[str, Path], run: Run, dtype: str, m: int, n: int) -> None:
    result = run(trees["patched"], dtype, m, n, 64)
    assert (result.passed, result.mismatches, result.findings) == (True, 0, ())


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", ["nvfp4", "mxfp4", "mxfp8", "fp8xmxfp4"])
def test_k128_stays_right_with_the_series(trees: dict[str, Path], run: Run, dtype: str) -> None:
    assert run(trees["patched"], dtype, 128, 128, 128).passed


def mutant(cutlass: Path, directory: Path, edits: dict[str, dict[str, str]]) -> Path:
    """A copy of the headers with some text replaced, every time it occurs."""
    shutil.copytree(cutlass, directory)
    for name, replacements in edits.items():
        text = (directory / name).read_text()
        for old, new in replacements.items():
            assert old in text, f"{name} has no {old!r}"
            text = text.replace(old, new)
        (directory / name).write_text(text)
    return directory


SFB_IN_SMEM = "make_tensor(make_smem_ptr(shared_tensors.smem_SFB.begin()), SmemLayoutSFB{});  // (BLK_N,BLK_K,PIPE)\n\n    //\n"
STAGE_OF_SFB = "append(stride(SmemLayoutAtomSFB{}), size(filter_zeros(SmemLayoutAtomSFB{})))"
MUTANTS: dict[str, tuple[dict[str, str], set[str]]] = {
    "scale factors folded along k": ({"copy(tCsSFA_stage(_,_,k_block),": "copy(tCsSFA_stage(_,_,_0{}),"}, set()),
    "scale factors of B read where those of A lie": ({SFB_IN_SMEM: SFB_IN_SMEM.replace("smem_SFB", "smem_SFA")}, set()),
    "stage of the scale factors not advanced": ({"          tCsSFB_stage = tCsSFB(_,_,_,read_stage);\n": ""}, set()),
    "stages of the scale factors overlap": (
        {STAGE_OF_SFB: "append(stride(SmemLayoutAtomSFB{}), _512{})"},
        {"overlapping stages"},
    ),
    "no wait for the next stage": ({"          pipeline.consumer_wait(smem_pipe_read);\n": ""}, set()),
    "no wait for an empty stage": ({"pipeline.producer_acquire(smem_pipe_write);": ""}, {"hang"}),
    "group 0's scale factors for every group": (
        {"mainloop_params.ptr_SFB[next_batch]": "mainloop_params.ptr_SFB[0]"},
        set(),
    ),
    "barrier bytes without the scale factors of B": (
        {"cutlass::bits_to_bytes(cosize(take<0,2>(SmemLayoutSFB{})) * cute::sizeof_bits_v<ElementSF>) +": ""},
        {"hang", "barrier bytes"},
    ),
}


@pytest.mark.compiler
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_of_the_mainloop_are_found(trees: dict[str, Path], run: Run, tmp_path: Path, name: str) -> None:
    edits, expected = MUTANTS[name]
    k = 256 if "overlap" in name else 128  # two blocks of scale factors per stage, so that half a stage is whole blocks
    result = run(mutant(trees["stock"], tmp_path / "include", {ARRAY_MAINLOOP: edits}), "nvfp4", 128, 128, k)
    assert not result.passed
    assert expected <= kinds(result), result


@pytest.mark.compiler
def test_the_published_form_asks_tma_for_what_it_cannot_do(trees: dict[str, Path], run: Run, tmp_path: Path) -> None:
    tile = ("mxfp8", 128, 128, 64)
    with pytest.raises(CompileFailed, match="static assertion failed"):
        run(trees["stock"], *tile)
    published = mutant(trees["stock"], tmp_path / "include", {})
    patch = ROOT / "patches" / "evidence" / "negative" / "cutlass-published-effective-block-sf.patch"
    subprocess.run(["git", "apply", "-p2", patch], cwd=published, check=True)
    result = run(published, *tile)
    assert not result.passed
    assert {"rejected tensor map", "overlapping stages", "barrier bytes", "hang"} <= kinds(result)
