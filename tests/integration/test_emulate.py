"""The emulation on FlashInfer's real CUTLASS: it passes what is right, fails what is known to be wrong, finds what is planted.

docs/seeded-faults.md has a row for everything that is planted; what is seen here must be what it says.
Each tile takes most of a minute to compile: two tiles always, the rest with the tests that take minutes.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sm120kit import emulate, patches, recipe, toolchain
from sm120kit.errors import CompileFailed
from sm120kit.records import Emulation, Tile
from sm120kit.sources import fetch
from sm120kit.workspace import Workspace

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "seeded-faults.md"
PUBLISHED = ROOT / "patches" / "evidence" / "negative" / "cutlass-published-effective-block-sf.patch"
INCLUDE = "3rdparty/cutlass/include"
MAINLOOP = "cutlass/gemm/collective/sm120_blockscaled_mma_array_tma.hpp"

Run = Callable[..., Emulation]


ARGUMENTS = {
    "stage-off-by-one": "stage count off by one",
    "bytes-too-few": "barrier bytes",
    "bytes-too-many": "barrier bytes",
    "scales-swapped": "swapped mode",
    "modes-swapped": "swapped mode",
    "scale-stride": "scale-factor stride",
    "box-too-small": "TMA box",
    "box-too-big": "TMA box",
    "group-offset-a": "wrong group offset",
    "group-offset-b": "wrong group offset",
    "group-offset-sfa": "wrong group offset",
    "group-offset-sfb": "wrong group offset",
    "group-offset-output": "wrong group offset",
    "no-store-wait": "missing barrier",
    "no-named-barrier": "missing barrier",
}
"""Faults that the emulation plants by itself (emulate.FAULTS), and their class."""


@dataclass(frozen=True)
class Edit:
    """A fault that is planted in the text of CUTLASS's mainloop, on NVFP4 128x128x``k``."""

    kind: str
    replacements: dict[str, str] = field(hash=False)
    k: int = 128


_SFB_IN_SMEM = (
    "make_tensor(make_smem_ptr(shared_tensors.smem_SFB.begin()), SmemLayoutSFB{});  // (BLK_N,BLK_K,PIPE)\n\n    //\n"
)
_STAGE_OF_SFB = "append(stride(SmemLayoutAtomSFB{}), size(filter_zeros(SmemLayoutAtomSFB{})))"
EDITS = {
    "scale factors folded along k": Edit("scale fold", {"copy(tCsSFA_stage(_,_,k_block),": "copy(tCsSFA_stage(_,_,_0{}),"}),
    "scale factors of B read where those of A lie": Edit(
        "swapped mode", {_SFB_IN_SMEM: _SFB_IN_SMEM.replace("smem_SFB", "smem_SFA")}
    ),
    "stage of the scale factors not advanced": Edit(
        "stage count off by one", {"          tCsSFB_stage = tCsSFB(_,_,_,read_stage);\n": ""}
    ),
    # Two blocks of scale factors per stage, so that half a stage is whole blocks.
    "stages of the scale factors overlap": Edit(
        "overlapping stages", {_STAGE_OF_SFB: "append(stride(SmemLayoutAtomSFB{}), _512{})"}, k=256
    ),
    "no wait for the next stage": Edit("missing barrier", {"          pipeline.consumer_wait(smem_pipe_read);\n": ""}),
    "no wait for an empty stage": Edit("missing barrier", {"pipeline.producer_acquire(smem_pipe_write);": ""}),
}
STOCK_K64, PUBLISHED_K64 = "NVFP4 128x128x64 of CUTLASS as released", "MXFP8 128x128x64 with the published EffBlk_SF"
CLASSES = {
    **ARGUMENTS,
    **{name: edit.kind for name, edit in EDITS.items()},
    STOCK_K64: "mainloop order",
    PUBLISHED_K64: "scale-factor stride",
}
"""Every fault with its class."""
WHOLE_KERNEL = {
    "bytes-too-few": "hang",
    "scales-swapped": "wrongly stored",
    "group-offset-sfb": "wrongly stored",
    "group-offset-output": "stored out of bounds",
    "no-store-wait": "unfinished store",
}
"""Faults that are planted in the whole kernel as well, and a finding of each."""


def mutant(cutlass: Path, directory: Path, replacements: dict[str, str]) -> Path:
    """A copy of the headers with some text of the mainloop replaced, every time it occurs."""
    shutil.copytree(cutlass, directory)
    text = (directory / MAINLOOP).read_text()
    for old, new in replacements.items():
        assert old in text, f"{MAINLOOP} has no {old!r}"
        text = text.replace(old, new)
    (directory / MAINLOOP).write_text(text)
    return directory


def published(cutlass: Path, directory: Path) -> Path:
    """A copy of the headers with the published patch applied."""
    shutil.copytree(cutlass, directory)
    subprocess.run(["git", "apply", "-p2", PUBLISHED], cwd=directory, check=True)
    return directory


def seen(result: Emulation) -> str:
    """What an emulation showed of a fault, as the page says it."""
    found = sorted(finding.kind for finding in result.findings)
    if result.mismatches and "hang" not in found:
        found.append(f"wrong numbers ({result.signature})" if result.signature else "wrong numbers")
    return "; ".join(found)


def rows() -> dict[str, tuple[str, str]]:
    """The page's table of the CPU emulation: fault -> class, what showed it."""
    table = PAGE.read_text().split("## On the CPU")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", table, re.MULTILINE)
    return {fault: (kind, shown) for kind, fault, shown in cells if kind not in ("class", "---")}


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
def run(emulations: Path) -> Run:
    compilers = toolchain.find()

    def emulated(
        cutlass: Path, dtype: str, m: int, n: int, k: int, *, family: str = "grouped", swap: bool = False, **options: str | int
    ) -> Emulation:
        return emulate.run(cutlass, Tile(family, dtype, m, n, k, "none", swap, "bf16"), compilers, emulations, **options)

    return emulated


def is_right(result: Emulation) -> bool:
    """Proven, by more than one word of the record."""
    assert result.outputs == result.stored > 40_000
    return result.passed and (result.mismatches, result.stored_mismatches, result.max_error, result.findings) == (0, 0, 0, ())


def test_the_page_has_a_row_for_every_fault() -> None:
    assert set(ARGUMENTS) == set(emulate.FAULTS)
    assert {fault: kind for fault, (kind, _) in rows().items()} == CLASSES


def test_a_right_tile_and_every_fault_in_it(trees: dict[str, Path], run: Run) -> None:
    tile = ("nvfp4", 128, 128, 128)
    right = run(trees["stock"], *tile, stages=4)
    assert is_right(right)
    assert right.outputs == 3 * (128 * 128 + 193 * 136 + 128)
    assert right.expected_bytes == right.delivered_bytes == 2 * (128 * 64 + 128 * 8)
    # 3 runs of: a tile of 9 k tiles; 2 x 2 tiles of 3; a tile of 1. Each k tile is 8 x 16 x 2 mma.
    assert right.mma_count == 3 * (9 + 4 * 3 + 1) * 8 * 16 * 2
    found = {fault: run(trees["stock"], *tile, stages=4, fault=fault) for fault in emulate.FAULTS}
    assert not any(result.passed for result in found.values())
    assert {fault: seen(result) for fault, result in found.items()} == {fault: rows()[fault][1] for fault in emulate.FAULTS}
    only_stored = {fault for fault, result in found.items() if not result.mismatches}
    assert only_stored == {"group-offset-output", "no-store-wait", "no-named-barrier"}, (
        "the epilogue's faults spoil only its output"
    )


def test_k64_of_stock_cutlass_loses_its_first_k_tile(trees: dict[str, Path], run: Run) -> None:
    wrong = run(trees["stock"], "nvfp4", 128, 128, 64, stages=9)
    assert not wrong.passed
    assert wrong.mismatches > 0.9 * wrong.outputs
    assert wrong.signature == "first k tile lost, last counted twice"
    assert not wrong.findings, "the epilogue stores faithfully what the mainloop got wrong"
    assert seen(wrong) == rows()[STOCK_K64][1]


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("dtype", "m", "n"),
    [("nvfp4", 128, 128), ("mxfp4", 128, 128), ("mxfp8", 128, 128), ("mxfp8", 128, 256)],
)
def test_k64_is_right_with_the_series(trees: dict[str, Path], run: Run, dtype: str, m: int, n: int) -> None:
    stages = 9 if (dtype, m, n) == ("nvfp4", 128, 128) else 0
    assert is_right(run(trees["patched"], dtype, m, n, 64, stages=stages))


@pytest.mark.compiler
@pytest.mark.parametrize(("dtype", "swap"), [("nvfp4", False), ("mxfp8", False), ("fp8xmxfp4", False), ("fp8xmxfp4", True)])
def test_k128_stays_right_with_the_series(trees: dict[str, Path], run: Run, dtype: str, swap: bool) -> None:
    stages = 4 if dtype == "nvfp4" else 0
    assert is_right(run(trees["patched"], dtype, 128, 128, 128, swap=swap, stages=stages))


@pytest.mark.compiler
def test_the_whole_kernel_with_its_scheduler(trees: dict[str, Path], run: Run) -> None:
    """The grouped kernel's own operator(), as one, two and three CTAs; faults that its arguments can carry are found."""
    tile = ("nvfp4", 128, 128, 128)
    right = run(trees["patched"], *tile, stages=4, whole_kernel=True)
    assert (right.passed, right.stored_mismatches, right.findings) == (True, 0, ())
    assert right.stored == 3 * (128 * 128 + 193 * 136 + 128)
    assert right.mma_count == 3 * (9 + 4 * 3 + 1) * 8 * 16 * 2
    for fault, kind in WHOLE_KERNEL.items():
        result = run(trees["patched"], *tile, stages=4, whole_kernel=True, fault=fault)
        assert not result.passed, fault
        assert kind in {finding.kind for finding in result.findings}, fault


@pytest.mark.compiler
@pytest.mark.parametrize("name", EDITS)
def test_mutants_of_the_mainloop_are_found(trees: dict[str, Path], run: Run, tmp_path: Path, name: str) -> None:
    edit = EDITS[name]
    result = run(mutant(trees["stock"], tmp_path / "include", edit.replacements), "nvfp4", 128, 128, edit.k)
    assert not result.passed
    assert seen(result) == rows()[name][1]


@pytest.mark.compiler
def test_the_published_form_asks_tma_for_what_it_cannot_do(trees: dict[str, Path], run: Run, tmp_path: Path) -> None:
    tile = ("mxfp8", 128, 128, 64)
    with pytest.raises(CompileFailed, match="static assertion failed"):
        run(trees["stock"], *tile)
    result = run(published(trees["stock"], tmp_path / "include"), *tile)
    assert not result.passed
    assert {"rejected tensor map", "overlapping stages", "barrier bytes", "hang"} <= {one.kind for one in result.findings}
    assert seen(result) == rows()[PUBLISHED_K64][1]
