"""The emulation on FlashInfer's CUTLASS: correct tiles pass, known wrong tiles fail, seeded faults are detected.

src/sm12x_lab/docs/seeded-faults.md has a row for each seeded fault; the results of these tests must equal its table. Each tile
takes most of a minute to compile.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sm12x_lab import RECEIPTS, emulation
from sm12x_lab.emulation.emulation_records import Emulation
from sm120kit import patches, recipes
from sm120kit.core import toolchain
from sm120kit.core.errors import CompileFailed
from sm120kit.core.workspace import Workspace
from sm120kit.kernels.kernel_records import Tile
from sm120kit.sources import fetch

ROOT = Path(__file__).parents[3]
PAGE = RECEIPTS.parent / "docs" / "seeded-faults.md"
PUBLISHED = RECEIPTS / "negative" / "cutlass-published-effective-block-sf.patch"
INCLUDE = "3rdparty/cutlass/include"
MAINLOOP = "cutlass/gemm/collective/sm120_blockscaled_mma_array_tma.hpp"
SCHEDULER = "cutlass/gemm/kernel/sm90_tile_scheduler_group.hpp"
EPILOGUE = "cutlass/epilogue/collective/sm90_epilogue_array_tma_warpspecialized.hpp"

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
    "alpha-of-one": "wrong alpha",
    "even-k-tiles": "wrong tile count",
    "third-tile-of-n": "wrong tile count",
    "empty-groups-skipped": "wrong group offset",
}
"""Faults that the emulation seeds (emulation.FAULTS), with their class."""


@dataclass(frozen=True)
class Edit:
    """A fault that is seeded in the text of CUTLASS's mainloop or of another file, for NVFP4 128x128x``k``."""

    kind: str
    replacements: dict[str, str] = field(hash=False)
    k: int = 128
    file: str = MAINLOOP
    whole_kernel: bool = False


_SFB_IN_SMEM = (
    "make_tensor(make_smem_ptr(shared_tensors.smem_SFB.begin()), SmemLayoutSFB{});  // (BLK_N,BLK_K,PIPE)\n\n    //\n"
)
_STAGE_OF_SFB = "append(stride(SmemLayoutAtomSFB{}), size(filter_zeros(SmemLayoutAtomSFB{})))"
_TILES_SO_FAR = "group_info.start_linear_idx + group_info.total_tiles"
_MAP_OF_C, _EXTENTS = "fill_tma_gmem_shape_stride(params.tma_load_c, tensor_c,", "prob_shape, prob_stride);"
PAST_32 = "scheduler loses count after 32 groups"
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
    PAST_32: Edit(
        "wrong group offset",
        {f"{_TILES_SO_FAR}, NumThreadsPerWarp - 1)": f"{_TILES_SO_FAR}, 0)"},
        file=SCHEDULER,
        whole_kernel=True,
    ),
    "map of C keeps the first group's address": Edit(
        "wrong group offset", {"params.ptr_C[next_batch]);": "params.ptr_C[0]);"}, file=EPILOGUE, whole_kernel=True
    ),
    "map of C keeps the first group's rows": Edit(
        "wrong group offset",
        {f"{_MAP_OF_C} \n{' ' * 50}{_EXTENTS}": f"{_MAP_OF_C} {_EXTENTS} prob_shape[1] = 1;"},
        file=EPILOGUE,
        whole_kernel=True,
    ),
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
    "alpha-of-one": "wrongly stored",
    "empty-groups-skipped": "wrongly stored",
}
"""Faults that are seeded in the whole kernel as well, and a finding of each."""

OUTPUTS = 3 * (1 * 128 + 193 * 136 + 128 * 128 + 128 * 264 + 16 * 128)
"""Outputs of NVFP4 128x128x128 with 4 stages in three runs; empty groups have none."""
MMAS = 3 * (1 + 4 * 3 + 9 + 3 * 2 + 4) * 8 * 16 * 2
"""Its instructions: k tiles of all tiles of the five GEMMs, with 8 x 16 x 2 each."""
ROWS = [0 if group % 3 == 1 or 40 <= group < 77 else 150 if group == 35 else 1 + group % 9 for group in range(80)]
"""Rows of the groups that only the whole kernel has; in two runs, with 8 columns and one k tile."""


def mutant(cutlass: Path, directory: Path, edit: Edit) -> Path:
    """A copy of the headers with every occurrence of some text of a file replaced."""
    shutil.copytree(cutlass, directory)
    text = (directory / edit.file).read_text()
    for old, new in edit.replacements.items():
        assert old in text, f"{edit.file} has no {old!r}"
        text = text.replace(old, new)
    (directory / edit.file).write_text(text)
    return directory


def published(cutlass: Path, directory: Path) -> Path:
    """A copy of the headers with the published patch applied."""
    shutil.copytree(cutlass, directory)
    subprocess.run(["git", "apply", "-p2", PUBLISHED], cwd=directory, check=True)
    return directory


def findings(result: Emulation) -> str:
    """The findings of an emulation, in the form of the docs page."""
    kinds = sorted(finding.kind for finding in result.findings)
    if result.mismatches and "hang" not in kinds:
        kinds.append(f"wrong numbers ({result.signature})" if result.signature else "wrong numbers")
    return "; ".join(kinds)


def rows() -> dict[str, tuple[str, str]]:
    """The docs page's table of the CPU emulation: fault -> class, findings."""
    table = PAGE.read_text().split("## On the CPU")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", table, re.MULTILINE)
    return {fault: (kind, detected) for kind, fault, detected in cells if kind not in ("class", "---")}


def extract(repository: Path, commit: str, directory: Path) -> Path:
    """CUTLASS's headers of a commit."""
    directory.mkdir()
    argv = ["git", "-C", repository, "--work-tree", directory, "restore", "--source", commit, "--worktree", INCLUDE]
    subprocess.run(argv, check=True)
    return directory / INCLUDE


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """FlashInfer 0.6.6's CUTLASS, as released and with our series."""
    root = tmp_path_factory.mktemp("trees")
    engine = recipes.load_flashinfer("flashinfer-0.6.6")
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
        cutlass: Path, dtype: str, m: int, n: int, k: int, *, swap: bool = False, fault: str = "none", **variant: int
    ) -> Emulation:
        tile = Tile("grouped", dtype, m, n, k, "none", swap, "bf16")
        return emulation.Emulator(cutlass, compilers, emulations).run(emulation.Mainloop.of(tile, **variant), fault)

    return emulated


def is_correct(result: Emulation) -> bool:
    """Whether all fields of the result agree that the tile is correct."""
    assert result.outputs == result.stored > 40_000
    return result.passed and (result.mismatches, result.stored_mismatches, result.max_error, result.findings) == (0, 0, 0, ())


def test_docs_page_has_a_row_for_each_fault() -> None:
    assert set(ARGUMENTS) == set(emulation.FAULTS)
    assert {fault: kind for fault, (kind, _) in rows().items()} == CLASSES


def test_correct_tile_passes_and_each_seeded_fault_fails(trees: dict[str, Path], run: Run) -> None:
    tile = ("nvfp4", 128, 128, 128)
    correct = run(trees["stock"], *tile, stages=4)
    assert is_correct(correct)
    assert correct.outputs == OUTPUTS
    assert correct.expected_bytes == correct.delivered_bytes == 2 * (128 * 64 + 128 * 8)
    assert correct.mma_count == MMAS
    results = {fault: run(trees["stock"], *tile, stages=4, fault=fault) for fault in emulation.FAULTS}
    assert not any(result.passed for result in results.values())
    assert {fault: findings(result) for fault, result in results.items()} == {
        fault: rows()[fault][1] for fault in emulation.FAULTS
    }
    only_stored = {fault for fault, result in results.items() if not result.mismatches}
    assert only_stored == {"group-offset-output", "no-store-wait", "no-named-barrier", "alpha-of-one"}, (
        "faults of the epilogue affect only its output"
    )


def test_k64_of_stock_cutlass_loses_its_first_k_tile(trees: dict[str, Path], run: Run) -> None:
    wrong = run(trees["stock"], "nvfp4", 128, 128, 64, stages=9)
    assert not wrong.passed
    assert wrong.mismatches > 0.9 * wrong.outputs
    assert wrong.signature == "first k tile lost, last counted twice"
    assert not wrong.findings, "the epilogue stores the wrong accumulators correctly"
    assert findings(wrong) == rows()[STOCK_K64][1]


@pytest.mark.parametrize(
    ("dtype", "m", "n"),
    [("nvfp4", 128, 128), ("mxfp4", 128, 128), ("mxfp8", 128, 128), ("mxfp8", 128, 256)],
)
def test_k64_is_correct_with_the_series(trees: dict[str, Path], run: Run, dtype: str, m: int, n: int) -> None:
    stages = 9 if (dtype, m, n) == ("nvfp4", 128, 128) else 0
    assert is_correct(run(trees["patched"], dtype, m, n, 64, stages=stages))


@pytest.mark.parametrize(("dtype", "swap"), [("nvfp4", False), ("mxfp8", False), ("fp8xmxfp4", False), ("fp8xmxfp4", True)])
def test_k128_is_correct_with_the_series(trees: dict[str, Path], run: Run, dtype: str, swap: bool) -> None:
    stages = 4 if dtype == "nvfp4" else 0
    assert is_correct(run(trees["patched"], dtype, 128, 128, 128, swap=swap, stages=stages))


def test_whole_kernel_with_its_scheduler(trees: dict[str, Path], run: Run) -> None:
    """The grouped kernel's own operator(), with few and with many groups and CTAs, without and with faults in its arguments."""
    tile = ("nvfp4", 128, 128, 128)
    correct = run(trees["patched"], *tile, stages=4, whole_kernel=True)
    assert (correct.passed, correct.stored_mismatches, correct.findings) == (True, 0, ())
    tiles = sum(-(-rows // 128) for rows in ROWS)
    assert (correct.outputs, correct.stored) == (OUTPUTS, 2 * OUTPUTS + 2 * 8 * sum(ROWS))
    assert correct.mma_count == 2 * MMAS + 2 * tiles * 8 * 16 * 2
    for fault, kind in WHOLE_KERNEL.items():
        result = run(trees["patched"], *tile, stages=4, whole_kernel=True, fault=f"{emulation.IN_KERNEL}{fault}")
        assert not result.passed, fault
        assert kind in {finding.kind for finding in result.findings}, fault


@pytest.mark.parametrize("name", EDITS)
def test_mutants_of_the_text_are_detected(trees: dict[str, Path], run: Run, tmp_path: Path, name: str) -> None:
    edit = EDITS[name]
    mutated = mutant(trees["stock"], tmp_path / "include", edit)
    result = run(mutated, "nvfp4", 128, 128, edit.k, whole_kernel=edit.whole_kernel)
    assert not result.passed
    assert findings(result) == rows()[name][1]
    if name == PAST_32:
        (stored,) = (finding for finding in result.findings if finding.kind == "wrongly stored")
        assert all(re.match(r"group \d+ of 80 ", text) for text in stored.first), "nine groups do not show it"


def test_published_patch_compiles_with_wrong_numbers(trees: dict[str, Path], run: Run, tmp_path: Path) -> None:
    tile = ("mxfp8", 128, 128, 64)
    with pytest.raises(CompileFailed, match="static assertion failed"):
        run(trees["stock"], *tile)
    result = run(published(trees["stock"], tmp_path / "include"), *tile)
    assert not result.passed
    assert {"rejected tensor map", "overlapping stages", "barrier bytes", "hang"} <= {
        finding.kind for finding in result.findings
    }
    assert findings(result) == rows()[PUBLISHED_K64][1]
