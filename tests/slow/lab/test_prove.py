"""Prove the series of two FlashInfer recipes again with host compiler and emulation, and compare with the stored proofs.

The machine code of nvcc is compared for one patch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sm12x_lab import proofs
from sm12x_lab.proofs import prover
from sm12x_lab.proofs.proof_records import Effect, PatchProof, ProofRequest
from sm120kit import patches
from sm120kit.core import sandbox
from sm120kit.core.errors import BadInput, NotFound, PatchConflict, RequirementMissing
from sm120kit.core.records import Arch
from sm120kit.core.workspace import Workspace
from sm120kit.kernels.kernel_records import NumericStatus
from sm120kit.patches import patch_records
from sm120kit.recipes.target import resolve_flashinfer
from sm120kit.sources.run_options import Options

ROOT = Path(__file__).parents[3]
RECIPE = "flashinfer-0.6.6"
NEGATIVE = "src/sm12x_lab/receipts/negative/cutlass-published-effective-block-sf.patch"
SHIPPED = "flashinfer-0.7.2.post1"
"""The FlashInfer of the vLLM that is built by default."""
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
PROVED = [
    *((RECIPE, name) for name in SERIES),
    (SHIPPED, "cutlass/single-k-block-mainloop"),
    (SHIPPED, "cutlass/mixed-width-tile-k"),
    (SHIPPED, "cutlass/effective-block-sf--4.5"),
    (SHIPPED, "flashinfer/sm120-smem-accounting"),
]
EMULATED = ("collective grouped nvfp4 128x128x64", "collective grouped mxfp8 128x128x64")
"""Probes whose numbers are emulated; each takes most of a minute."""

Again = Callable[..., PatchProof]


def stored_proof(name: str, recipe: str = RECIPE) -> PatchProof:
    proof = proofs.on(proofs.read(proofs.path_of(ROOT / "patches", name)), recipe)
    assert proof is not None
    return proof


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Options:
    return Options(Workspace.open(tmp_path_factory.mktemp("state")))


@pytest.fixture(scope="module")
def again(options: Options) -> Again:
    """Prove a patch without machine code, and with the numbers of a few probes, of a file of no series in a sandbox."""
    try:
        sandbox.find()
        sandboxed = True
    except RequirementMissing:
        sandboxed = False

    def prove_again(name: str, stored: PatchProof) -> PatchProof:
        probes = [
            replace(result.probe, numbers=result.probe.numbers and result.probe.text.startswith(EMULATED))
            for result in stored.results
        ]
        request = ProofRequest(probes=tuple(probes), trusted=not sandboxed)
        return prover.prove_patch(name, options, request, resolve_flashinfer(stored.recipe, options))

    return prove_again


def effects(proof: PatchProof) -> dict[str, set[Effect]]:
    return {result.probe.text.partition(" numbers")[0].removesuffix(" code"): set(result.effects) for result in proof.results}


def test_list_equals_the_series(options: Options) -> None:
    tree = resolve_flashinfer(RECIPE, options).tree
    assert [f"{patch.project}/{patch.slug}" for patch in tree.patches] == SERIES


@pytest.mark.parametrize(("recipe", "name"), PROVED)
def test_patch_has_the_effects_of_its_stored_proof(again: Again, recipe: str, name: str) -> None:
    stored = stored_proof(name, recipe)
    assert proofs.differences(stored, again(name, stored)) == []


def test_published_patch_has_no_effect_or_breaks_numbers(again: Again) -> None:
    (stored,) = proofs.read((ROOT / NEGATIVE).with_suffix(".json"))
    proof = again(str(ROOT / NEGATIVE), stored)
    assert proofs.differences(stored, proof) == []
    by_dtype = {dtype: [result for result in proof.results if result.probe.dtype == dtype] for dtype in ("nvfp4", "mxfp8")}
    assert {(result.probe.family, result.probe.shape) for result in by_dtype["nvfp4"]} >= {
        ("grouped", "128x128x64"),
        ("grouped", "128x128x128"),
        ("grouped", "256x128x128"),
        ("dense", "128x128x256"),
    }
    for result in by_dtype["nvfp4"]:
        assert set(result.effects) == {Effect.NOT_COMPARED}, result.probe.text
        assert (result.below.types, result.below.facts) == (result.above.types, result.above.facts)
    (mxfp8,) = by_dtype["mxfp8"]
    assert set(mxfp8.effects) == {Effect.FIXES_COMPILE_ERROR, Effect.BREAKS_NUMBERS}
    assert "rejected tensor map" in mxfp8.above.why
    with_code = [result for result in stored.results if result.below.code]
    assert with_code, "the stored proof compares the code of an NVFP4 kernel"
    assert all(set(result.effects) == {Effect.NONE} for result in with_code)


def test_our_patch_compiles_with_correct_numbers(again: Again) -> None:
    name = "cutlass/effective-block-sf"
    stored = stored_proof(name)
    assert effects(again(name, stored))["collective grouped mxfp8 128x128x64"] == {Effect.FIXES_COMPILE_ERROR}
    (mxfp8,) = (result for result in stored.results if result.probe.text.startswith("collective grouped mxfp8"))
    assert mxfp8.above.numbers is NumericStatus.PROVEN


def test_changed_patch_differs_from_its_stored_proof(options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The patch without the line that makes NVFP4 256x128x128 fit."""
    for part in ("patches", "cutlass_overrides", "recipes"):
        subprocess.run(["cp", "-r", ROOT / part, tmp_path], check=True)
    file = tmp_path / "patches/flashinfer/sm120-smem-accounting.patch"
    text = file.read_text()
    line = "typename sm120kit::FittingKernel<AutoStagesGemmKernel>::type;"
    stated, changed = "f669c0e6d9b511d69aac0e17d5961f22a4e897cb", "45a07b7b3b3eac2fbcc774f2971bf83dfb4b99fb"
    assert line in text and stated in text, "blob ids of the patched file"
    file.write_text(text.replace(line, "AutoStagesGemmKernel;".ljust(len(line))).replace(stated, changed))
    monkeypatch.setenv("SM120KIT_DATA", str(tmp_path))
    stored = stored_proof("flashinfer/sm120-smem-accounting")
    proof = prover.prove_patch("sm120-smem-accounting", options, ProofRequest(probes=(stored.results[0].probe,)))
    lines = proofs.differences(replace(stored, results=stored.results[:1]), proof)
    assert any(line.startswith("hunks_sha256") for line in lines)
    assert any("above: facts" in line and "'smem_bytes': 74752" in line for line in lines)
    assert effects(proof) == {"launcher grouped nvfp4 256x128x128 finalize": {Effect.NOT_COMPARED}}


def command(*arguments: str | Path, state: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "SM120KIT_STATE": str(state)}
    return subprocess.run([sys.executable, "-m", "sm120kit", "patch", *arguments], env=env, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["prove", "nothing"], NotFound.exit_code, "no series has a patch 'nothing'"),
        (["prove", "gdc-flags", "--for", "fp5"], NotFound.exit_code, "unknown dtype 'fp5'"),
        (["prove", "single-k-block-mainloop", "--for", "mxfp8"], NotFound.exit_code, "has no probe for mxfp8"),
        (["prove", "gdc-flags", "--arch", "sm_90"], NotFound.exit_code, "unknown arch 'sm_90'"),
        (["prove", "gdc-flags", "--probe", "launcher"], BadInput.exit_code, "expected: launcher FAMILY"),
        (
            ["prove", "gdc-flags", "--recipe", "flashinfer-0.7.2.post1"],
            PatchConflict.exit_code,
            "is for flashinfer >=0.6.6,<0.6.7; flashinfer-0.7.2.post1 has 0.7.2.post1",
        ),
        (["prove", "gdc-flags", "--for", "nvfp4", "--write"], 2, "only a complete proof is written"),
    ],
)
def test_prove_errors(options: Options, arguments: list[str], exit_code: int, message: str) -> None:
    done = command(*arguments, state=options.workspace.root)
    assert message in done.stderr, done.stderr
    assert done.returncode == exit_code
    assert not done.stdout


def test_foreign_patch(options: Options, tmp_path: Path) -> None:
    stock = "include/cutlass/gemm/collective/sm120_blockscaled_mma_array_tma.hpp"
    theirs = tmp_path / "theirs.diff"
    theirs.write_text("diff --git a/nowhere b/nowhere\n--- a/nowhere\n+++ b/nowhere\n@@ -1 +1 @@\n-a\n+b\n")
    done = command(
        "prove", theirs, "--trust-patch", "--probe", "collective grouped nvfp4 128x128x128", state=options.workspace.root
    )
    assert done.returncode == PatchConflict.exit_code, done.stderr
    ours = patches.load(ROOT / "patches", "cutlass")[0]
    assert stock in ours.diff.decode()
    theirs.write_bytes(ours.diff)
    done = command("prove", theirs, "--trust-patch", state=options.workspace.root)
    assert (done.returncode, "names no probe" in done.stderr) == (NotFound.exit_code, True), done.stderr
    probe = "collective grouped nvfp4 128x128x128"
    done = command("prove", theirs, "--probe", probe, "--trust-patch", "--json", state=options.workspace.root)
    assert done.returncode == 0, done.stderr
    assert '"patch": "cutlass/theirs"' in done.stdout


def test_nvcc_code_equals_the_stored_proof(options: Options) -> None:
    name = "cutlass/array-kernels-grid-dependency"
    stored = stored_proof(name)
    proof = prover.prove_patch(name, options, ProofRequest(code=True, arch=Arch.SM_120F))
    (result,) = (result for result in proof.results if result.probe.definitions)
    assert Effect.CHANGES_CODE in result.effects
    assert [sum(kernel.grid_waits for kernel in side.code["sm_120f"]) > 0 for side in (result.below, result.above)] == [
        False,
        True,
    ]
    if proof.nvcc == stored.nvcc:
        assert proofs.differences(stored, proof) == []


def test_all_probes_of_the_series_parse() -> None:
    for project in patches.projects(ROOT / "patches"):
        for patch in patches.load(ROOT / "patches", project):
            assert all(patch_records.parse_probe(probe.text) == probe for probe in patch.probes)
            assert patch.probes or "tests/" in patch.trailer("Evidence"), f"{patch.name} names neither a probe nor a test"
