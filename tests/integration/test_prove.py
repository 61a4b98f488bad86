"""Every patch of FlashInfer 0.6.6's series proven again by the host compiler and the emulation, against the stored proofs.

Code is compared with nvcc where the tests take minutes; that is one probe of each kind of answer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sm120kit import patches, pipeline, prove, proving
from sm120kit.patches import probes
from sm120kit.records import Arch, Effect, PatchProof, Proof
from sm120kit.workspace import Workspace

ROOT = Path(__file__).parents[2]
RECIPE = "flashinfer-0.6.6"
NEGATIVE = "patches/evidence/negative/cutlass-published-effective-block-sf.patch"
SERIES = [
    "cutlass/single-k-block-mainloop",
    "cutlass/mixed-width-tile-k",
    "cutlass/effective-block-sf",
    "cutlass/array-kernels-grid-dependency",
    "flashinfer/sm120-smem-accounting",
    "flashinfer/gdc-flags",
    "flashinfer/fp4-gemm-auto-stages",
    "flashinfer/k64-tile-codegen",
]
EMULATED = ("collective grouped nvfp4 128x128x64", "collective grouped mxfp8 128x128x64")
"""Probes whose numbers are checked here; each takes most of a minute."""

Again = Callable[..., PatchProof]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> pipeline.Options:
    return pipeline.Options(Workspace.open(tmp_path_factory.mktemp("state")))


@pytest.fixture(scope="module")
def again(options: pipeline.Options) -> Again:
    """Prove a patch as cheaply as its stored proof allows to notice a difference."""

    def prove_again(name: str, stored: PatchProof) -> PatchProof:
        asked = [
            replace(one.probe, numbers=one.probe.numbers and one.probe.text.startswith(EMULATED)) for one in stored.results
        ]
        return proving.prove_patch(name, options, probes=asked)

    return prove_again


def effects(proof: PatchProof) -> dict[str, set[Effect]]:
    return {one.probe.text.partition(" numbers")[0].removesuffix(" code"): set(one.effects) for one in proof.results}


def test_the_list_is_the_series(options: pipeline.Options) -> None:
    from sm120kit import recipe

    tree = pipeline.patched_tree(recipe.load(RECIPE), options)
    assert [f"{one.project}/{one.slug}" for one in tree.patches] == SERIES


@pytest.mark.parametrize("name", SERIES)
def test_a_patch_does_what_its_proof_says(again: Again, name: str) -> None:
    stored = prove.read(prove.path_of(ROOT / "patches", name))
    assert stored is not None
    assert stored.recipe == RECIPE
    assert prove.differences(stored, again(name, stored)) == []


def test_the_published_form_changes_nothing_or_is_wrong(again: Again) -> None:
    stored = prove.read((ROOT / NEGATIVE).with_suffix(".json"))
    assert stored is not None
    found = again(str(ROOT / NEGATIVE), stored)
    assert prove.differences(stored, found) == []
    by_dtype = {dtype: [one for one in found.results if one.probe.dtype == dtype] for dtype in ("nvfp4", "mxfp8")}
    assert {(one.probe.family, one.probe.shape) for one in by_dtype["nvfp4"]} >= {
        ("grouped", "128x128x64"),
        ("grouped", "128x128x128"),
        ("grouped", "256x128x128"),
        ("dense", "128x128x256"),
    }
    for one in by_dtype["nvfp4"]:
        assert set(one.effects) == {Effect.NOT_COMPARED}, one.probe.text
        assert (one.below.types, one.below.facts) == (one.above.types, one.above.facts)
    (mxfp8,) = by_dtype["mxfp8"]
    assert set(mxfp8.effects) == {Effect.FIXES_COMPILE_ERROR, Effect.BREAKS_NUMBERS}
    assert "rejected tensor map" in mxfp8.above.why
    code = {one.probe.text: one for one in stored.results if one.below.code}
    assert code, "the stored proof compares the code of an NVFP4 kernel"
    assert all(set(one.effects) == {Effect.NONE} for one in code.values())


def test_our_form_compiles_and_is_right(again: Again) -> None:
    name = "cutlass/effective-block-sf"
    stored = prove.read(prove.path_of(ROOT / "patches", name))
    assert stored is not None
    found = effects(again(name, stored))
    assert found["collective grouped mxfp8 128x128x64"] == {Effect.FIXES_COMPILE_ERROR}
    (mxfp8,) = (one for one in stored.results if one.probe.text.startswith("collective grouped mxfp8"))
    assert mxfp8.above.numbers is Proof.PROVEN


def test_a_patch_that_is_changed_no_longer_has_its_proof(
    options: pipeline.Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one line that makes NVFP4 256x128x128 fit, taken out again."""
    for part in ("patches", "cutlass_overrides", "recipes"):
        subprocess.run(["cp", "-r", ROOT / part, tmp_path], check=True)
    file = tmp_path / "patches/flashinfer/sm120-smem-accounting.patch"
    text = file.read_text()
    line = "typename sm120kit::FittingKernel<AutoStagesGemmKernel>::type;"
    assert line in text
    file.write_text(text.replace(line, "AutoStagesGemmKernel;".ljust(len(line))))
    monkeypatch.setenv("SM120KIT_DATA", str(tmp_path))
    stored = prove.read(prove.path_of(ROOT / "patches", "flashinfer/sm120-smem-accounting"))
    assert stored is not None
    found = proving.prove_patch("sm120-smem-accounting", options, probes=[stored.results[0].probe])
    told = prove.differences(replace(stored, results=stored.results[:1]), found)
    assert any(one.startswith("hunks_sha256") for one in told)
    assert any("above: facts" in one and "'smem_bytes': 74752" in one for one in told)
    assert effects(found) == {"launcher grouped nvfp4 256x128x128 finalize": {Effect.NOT_COMPARED}}


def test_a_series_without_a_patch_lacks_what_it_brings(options: pipeline.Options) -> None:
    ablation = proving.ablate(RECIPE, options, dtype="fp8xmxfp4", only=["mixed-width-tile-k"])
    (mixed,) = ablation.without
    assert (mixed.patch, mixed.failure, mixed.dependents, mixed.flags) == ("cutlass/mixed-width-tile-k", "", (), ())
    assert {change.tile.epilogue for change in mixed.changes} == {"none", "finalize"}
    for change in mixed.changes:
        assert change.tile.shape == "128x128x64"
        assert change.without and change.without.compiles, "the tile that TMA cannot unpack comes out as one that fits"
        assert change.full and not change.full.compiles
        assert "boxes of 128 only" in change.full.error


def command(*words: str | Path, state: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "SM120KIT_STATE": str(state)}
    return subprocess.run([sys.executable, "-m", "sm120kit", "patch", *words], env=env, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("words", "exit_code", "said"),
    [
        (["prove", "nothing"], 10, "no series has a patch 'nothing'"),
        (["prove", "gdc-flags", "--for", "fp5"], 10, "unknown dtype 'fp5'"),
        (["prove", "single-k-block-mainloop", "--for", "mxfp8"], 10, "has no probe for mxfp8"),
        (["prove", "gdc-flags", "--arch", "sm_90"], 10, "unknown arch 'sm_90'"),
        (["prove", "gdc-flags", "--probe", "launcher"], 30, "expected: launcher FAMILY"),
        (
            ["prove", "gdc-flags", "--recipe", "flashinfer-0.7.2.post1"],
            31,
            "is for flashinfer >=0.6.6,<0.6.7; flashinfer-0.7.2.post1 has 0.7.2.post1",
        ),
        (["prove", "gdc-flags", "--for", "nvfp4", "--write"], 2, "a part of a proof is not kept"),
        (["ablate", "flashinfer-0.6.6", "--patch", "nothing"], 10, "has no patch nothing"),
    ],
)
def test_what_cannot_be_proven_says_why(options: pipeline.Options, words: list[str], exit_code: int, said: str) -> None:
    done = command(*words, state=options.workspace.root)
    assert said in done.stderr, done.stderr
    assert done.returncode == exit_code
    assert not done.stdout


def test_somebody_elses_patch(options: pipeline.Options, tmp_path: Path) -> None:
    stock = "include/cutlass/gemm/collective/sm120_blockscaled_mma_array_tma.hpp"
    theirs = tmp_path / "theirs.diff"
    theirs.write_text("diff --git a/nowhere b/nowhere\n--- a/nowhere\n+++ b/nowhere\n@@ -1 +1 @@\n-a\n+b\n")
    done = command("prove", theirs, "--probe", "collective grouped nvfp4 128x128x128", state=options.workspace.root)
    assert done.returncode == 31, done.stderr
    ours = patches.load(ROOT / "patches", "cutlass")[0]
    assert stock in ours.diff.decode()
    theirs.write_bytes(ours.diff)
    done = command("prove", theirs, state=options.workspace.root)
    assert (done.returncode, "names no probe" in done.stderr) == (10, True), done.stderr
    probe = "collective grouped nvfp4 128x128x128"
    done = command("prove", theirs, "--probe", probe, "--json", state=options.workspace.root)
    assert done.returncode == 0, done.stderr
    assert '"patch": "cutlass/theirs"' in done.stdout


@pytest.mark.compiler
def test_nvcc_gives_the_code_of_the_stored_proof(options: pipeline.Options) -> None:
    name = "cutlass/array-kernels-grid-dependency"
    stored = prove.read(prove.path_of(ROOT / "patches", name))
    assert stored is not None
    found = proving.prove_patch(name, options, code=True, arch=Arch.SM_120F)
    (one,) = (one for one in found.results if one.probe.definitions)
    assert Effect.CHANGES_CODE in one.effects
    assert [sum(kernel.grid_waits for kernel in side.code["sm_120f"]) > 0 for side in (one.below, one.above)] == [False, True]
    if found.nvcc == stored.nvcc:
        assert prove.differences(stored, found) == []


def test_probes_of_the_series_are_all_read() -> None:
    for project in patches.projects(ROOT / "patches"):
        for patch in patches.load(ROOT / "patches", project):
            assert all(probes.parse(one.text) == one for one in patch.probes)
            shown = "tests/" in patch.trailer("Evidence") if project == "vllm" else patch.probes
            assert shown, f"{patch.name} names no probe, or as a patch of an engine no test"
