"""Proofs: parsing probes, comparing results, and whether the stored proofs match the present patches."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from sm12x_lab import RECEIPTS, proofs
from sm12x_lab.proofs import prover
from sm12x_lab.proofs.code import kernel_codes
from sm12x_lab.proofs.proof_records import Effect, KernelCode, PatchProof, ProbeComparison, ProbeResult
from sm12x_lab.proofs.side import _definitions
from sm120kit import patches, sources
from sm120kit.core.data_roots import REPOSITORY_FILE
from sm120kit.core.errors import BadInput, NotFound, PatchConflict, SystemRefused
from sm120kit.core.workspace import Workspace
from sm120kit.kernels.cubin.cubin_records import Kernel
from sm120kit.kernels.kernel_records import NumericStatus
from sm120kit.patches import evidence, patch_records
from sm120kit.patches.patch_records import PatchState
from sm120kit.recipes import default_recipes
from sm120kit.recipes.target import resolve_flashinfer
from sm120kit.sources.git import Repository
from sm120kit.sources.run_options import Options
from sm120kit.sources.source_records import Checkout, GitPin

ROOT = Path(__file__).parents[2]
NEGATIVE = RECEIPTS / "negative" / "cutlass-published-effective-block-sf.patch"
PINNED = {"cutlass": ("4.2.1", "4.4.2", "4.5.0"), "flashinfer": ("0.6.6", "0.6.8.post1", "0.7.2", "0.7.2.post1")}
"""The versions that recipes pin, and that patches can be proved on."""

WITHOUT_PROBES = ("flashinfer/micro-scatter-barrier",)
"""Patches of CuTe DSL kernels, which the tests that they name cover."""

EVERY = [
    patch
    for project, versions in PINNED.items()
    for patch in patches.load(ROOT / "patches", project)
    if any(map(patch.is_for, versions)) and patch.name not in WITHOUT_PROBES
]
"""The patches of kernels. Patches of an engine's own build, or for another CUTLASS, are covered by the tests that they name."""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("collective grouped  nvfp4 128x128x64", {"kind": "collective", "shape": "128x128x64", "numbers": False}),
        ("collective dense mxfp8 128x32x64 numbers code", {"dtype": "mxfp8", "n": 32, "numbers": True, "code": True}),
        ("collective grouped mxfp4 generated code -DA -DB=1", {"shape": "", "definitions": ("-DA", "-DB=1")}),
        ("launcher grouped fp8xmxfp4 128x128x128 finalize swap", {"epilogue": "finalize", "swap": True, "code": False}),
        ("flags fused_moe_120", {"kind": "flags", "module": "fused_moe_120", "family": ""}),
    ],
)
def test_probe_is_parsed(text: str, expected: dict[str, object]) -> None:
    probe = patch_records.parse_probe(text)
    assert probe.text == " ".join(text.split()) and patch_records.parse_probe(probe.text) == probe
    assert {name: getattr(probe, name) for name in expected} == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "colective grouped nvfp4 128x128x64",
        "collective grouped nvfp4",
        "collective group nvfp4 128x128x64",
        "collective grouped nvfp8 128x128x64",
        "collective grouped nvfp4 128x128",
        "collective grouped nvfp4 0x128x64",
        "collective grouped nvfp4 128x128x64 finalize",
        "collective grouped nvfp4 128x128x64 code code",
        "launcher grouped nvfp4 generated",
        "launcher grouped nvfp4 128x128x64 -DA",
        "flags",
        "flags one two",
    ],
)
def test_malformed_probe_is_rejected_with_the_forms(text: str) -> None:
    with pytest.raises(patch_records.BadProbe, match="expected collective FAMILY DTYPE"):
        patch_records.parse_probe(text)


def one_patch(root: Path, change: tuple[str, str]) -> Path:
    """A series of one real patch with some text changed."""
    text = next(patch for patch in EVERY if patch.slug == "single-k-block-mainloop").content.decode()
    assert change[0] in text
    directory = root / "patches" / "cutlass"
    directory.mkdir(parents=True)
    (directory / "series").write_text("one\n")
    (directory / "one.patch").write_text(text.replace(*change, 1))
    return root / "patches"


def test_lint_names_the_line_of_a_malformed_probe(tmp_path: Path) -> None:
    problems = patches.lint(one_patch(tmp_path, ("Probe: collective grouped", "Probe: collective groped")))
    (problem,) = (problem for problem in problems if "Probe is" in problem.text)
    line = (tmp_path / "patches/cutlass/one.patch").read_text().splitlines()[problem.line - 1]
    assert line.startswith("Probe: collective groped")
    assert "FAMILY is grouped or dense" in problem.text


def test_lint_names_missing_evidence(tmp_path: Path) -> None:
    root = one_patch(tmp_path, ("Evidence: ", "Evidence: tests/nothing.py, "))
    (tmp_path / "tests" / "image").mkdir(parents=True)  # the wheel carries the checks of images there
    assert not [problem for problem in patches.lint(root) if "nothing.py" in problem.text], "an installed copy has no tests"
    (tmp_path / "tests" / "unit").mkdir()
    (tmp_path / "tests" / "unit" / "test_a.py").touch()
    (problem,) = (problem for problem in patches.lint(root) if "nothing.py" in problem.text)
    assert (root / "cutlass/one.patch").read_text().splitlines()[problem.line - 1].startswith("Evidence:")


def code(text: str = "a", registers: int = 168) -> dict[str, tuple[KernelCode, ...]]:
    return {"sm_120f": (KernelCode("n", registers, 0, 0, 128, text, 0, 0),)}


FINE = ProbeResult(facts={"stages": 4}, types={"Mainloop": "M"})
BAD = ProbeResult("refused", "a.hpp:1")
RIGHT, WRONG = replace(FINE, numbers=NumericStatus.PROVEN), replace(FINE, numbers=NumericStatus.WRONG, why="lost")
COLLECTIVE = patch_records.parse_probe("collective grouped nvfp4 128x128x64 numbers code")


@pytest.mark.parametrize(
    ("below", "above", "expected"),
    [
        (FINE, FINE, {Effect.NOT_COMPARED}),
        (replace(FINE, code=code()), FINE, {Effect.NOT_COMPARED}),
        (replace(FINE, code=code()), replace(FINE, code=code()), {Effect.NONE}),
        (replace(FINE, code=code()), replace(FINE, code=code("b")), {Effect.CHANGES_CODE}),
        (replace(FINE, code=code()), replace(FINE, code=code(registers=128)), {Effect.CHANGES_CODE}),
        (FINE, replace(FINE, types={"Mainloop": "N"}), {Effect.CHANGES_TYPE}),
        (replace(FINE, code=code()), replace(FINE, code=code("b"), types={}), {Effect.CHANGES_CODE}),
        (FINE, replace(FINE, facts={"stages": 3}, types={}), {Effect.CHANGES_FACTS}),
        (WRONG, RIGHT, {Effect.FIXES_NUMBERS}),
        (RIGHT, WRONG, {Effect.BREAKS_NUMBERS}),
        (WRONG, replace(RIGHT, facts={}), {Effect.FIXES_NUMBERS, Effect.CHANGES_FACTS}),
        (FINE, WRONG, {Effect.NOT_COMPARED}),
        (BAD, RIGHT, {Effect.FIXES_COMPILE_ERROR}),
        (BAD, WRONG, {Effect.FIXES_COMPILE_ERROR, Effect.BREAKS_NUMBERS}),
        (FINE, BAD, {Effect.REFUSES}),
        (BAD, replace(BAD, error="other"), {Effect.OTHER_ERROR}),
        (BAD, replace(BAD, where="a.hpp:2"), {Effect.NONE}),
    ],
)
def test_effects_of_two_results(below: ProbeResult, above: ProbeResult, expected: set[Effect]) -> None:
    assert set(proofs.effects(COLLECTIVE, below, above)) == expected


def test_flags_probe_has_no_code_to_compare() -> None:
    assert proofs.effects(patch_records.parse_probe("flags m"), FINE, FINE) == (Effect.NONE,)


def test_kernel_codes_do_not_depend_on_file_hashes() -> None:
    def kernel(name: str) -> Kernel:
        return Kernel(name, "sm_120f", 168, 0, 64, 512, hashlib.sha256(b"code").hexdigest())

    def ptx(name: str) -> str:
        return f".visible .entry {name}(\n.param .b8 p\n)\n{{\ngriddepcontrol.wait;\n}}\n.weak .entry other(\n)\n{{\n}}\n"

    hashed = [f"_ZN50_GLOBAL__N__{h}_8_probe_cu_{h}3runEv" for h in ("0a1b2c3d", "99999999")]
    first, second = (kernel_codes([kernel("other"), kernel(name)], ptx(name)) for name in hashed)
    assert first == second
    assert sorted((code.grid_waits, code.grid_launches) for code in first) == [(0, 0), (1, 0)]


def test_reported_types_are_parsed_from_warnings() -> None:
    text = (
        "c.hpp:63:41: warning: 'constexpr bool sm120kit_prove::scale_factors() [with int line = 1; LayoutSFA = "
        "cute::Layout<cute::tuple<int> >; LayoutSFB = cute::C<4>]' is deprecated [-Wdeprecated-declarations]"
    )
    assert proofs.reported_types(text, 1) == {"LayoutSFA": "Layout<tuple<int> >", "LayoutSFB": "C<4>"}
    assert proofs.reported_types(text, 0) == {}


def test_definitions_of_a_ninja_variable_over_several_lines() -> None:
    ninja = "common_cflags = -DNO $\n  -DNEVER\ncuda_cflags = $common_cflags $\n    -O3 $\n    -DB=1 -DA\nrule x\n"
    assert _definitions(ninja) == "-DA -DB=1"


def proof(**changes: object) -> PatchProof:
    result = ProbeComparison(COLLECTIVE, replace(WRONG, code=code()), replace(RIGHT, code=code("b")), (Effect.FIXES_NUMBERS,))
    return replace(PatchProof("p/s", "0", "r", "1", "2", "g++", "13", (result,)), **changes)


def test_proof_round_trip_and_differences(tmp_path: Path) -> None:
    file = tmp_path / "proof.json"
    other_recipe = proof(recipe="a")
    file.write_text(proofs.file_text([proof(), other_recipe]))
    assert proofs.read(file) == (other_recipe, proof())
    assert proofs.on(proofs.read(file), "r") == proof()
    assert proofs.on(proofs.read(file), "b") is None
    assert proofs.read(tmp_path / "none.json") == ()
    (result,) = proof().results
    other = replace(result, above=replace(result.above, facts={"stages": 5}))
    assert proofs.differences(proof(), proof(results=(other,), hunks_sha256="1")) == [
        "hunks_sha256: 0 → 1",
        f"probe {COLLECTIVE.text}, above: facts {{'stages': 4}} → {{'stages': 5}}",
    ]
    assert proofs.differences(proof(), proof(results=())) == [f"probe {COLLECTIVE.text}: only in the stored proof"]


def test_stored_code_is_retained_for_the_same_trees() -> None:
    (result,) = proof().results
    cheap = proof(results=(replace(result, below=replace(result.below, code={}), above=replace(result.above, code={})),))
    (result,) = proofs.with_stored_code(cheap, proof()).results
    assert (result.below.code, result.above.code) == (code(), code("b"))
    assert Effect.CHANGES_CODE in result.effects
    assert proofs.with_stored_code(cheap, proof(tree_below="9")) == cheap
    assert proofs.with_stored_code(cheap, None) == cheap


def test_find_patch_by_name_slug_or_path() -> None:
    patch, in_series = prover.find_patch("single-k-block-mainloop")
    assert (patch.name, in_series) == ("cutlass/single-k-block-mainloop", True)
    assert prover.find_patch("cutlass/single-k-block-mainloop") == (patch, True)
    assert prover.find_patch(str(ROOT / "patches/cutlass/single-k-block-mainloop.patch")) == (patch, True)
    foreign, in_series = prover.find_patch(str(NEGATIVE))
    assert (foreign.name, in_series) == ("cutlass/cutlass-published-effective-block-sf", False)
    with pytest.raises(NotFound, match="no series has a patch 'nothing'"):
        prover.find_patch("nothing")
    with pytest.raises(BadInput, match="cannot be read"):
        prover.find_patch("nothing.patch")


def test_slug_of_two_projects_is_ambiguous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = one_patch(tmp_path, ("Applies-To: cutlass", "Applies-To: cutlass"))
    (root / "flashinfer").mkdir()
    (root / "flashinfer/series").write_text("one\n")
    text = (root / "cutlass/one.patch").read_text().replace("Applies-To: cutlass", "Applies-To: flashinfer")
    (root / "flashinfer/one.patch").write_text(text)
    (tmp_path / "recipes").mkdir()
    monkeypatch.setenv("SM120KIT_DATA", str(tmp_path))
    with pytest.raises(NotFound, match="2 projects have a patch one") as failure:
        prover.find_patch("one")
    assert failure.value.hint == "choose from cutlass/one, flashinfer/one"


def test_patch_for_no_recipe_is_refused(tmp_path: Path) -> None:
    options = Options(Workspace(tmp_path), sources.Origin(offline=True))
    file = tmp_path / "theirs.patch"
    text = NEGATIVE.read_text()
    file.write_text(text.replace("Applies-To: cutlass >=4.2,<4.3", "Applies-To: cutlass >=3,<3.1"))
    with pytest.raises(PatchConflict, match=r"is for cutlass >=3,<3\.1, which no recipe with a source has"):
        prover.source_change(str(file), options)
    file.write_text(text.replace("Applies-To: cutlass", "Applies-To: nccl"))
    with pytest.raises(PatchConflict, match=r"is for nccl; flashinfer-0\.6\.6 has cutlass, flashinfer"):
        prover.source_change(str(file), options, resolve_flashinfer("flashinfer-0.6.6", options))


def test_foreign_diff_is_read_without_trailers(tmp_path: Path) -> None:
    file = tmp_path / "theirs.diff"
    file.write_text("some words\n\ndiff --git a/x b/x\nindex 1..2\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n")
    patch = patches.read_foreign(file)
    assert (patch.project, patch.slug, patch.probes) == ("", "theirs", ())
    assert patch.diff.startswith(b"diff --git a/x b/x\n")
    file.write_text("no diff\n")
    with pytest.raises(BadInput, match="not a git diff"):
        patches.read_foreign(file)


def test_compose_applies_only_the_selected_patches(tmp_path: Path) -> None:
    repository = Repository.init(tmp_path / "repository")
    with repository.index() as index:
        index.add("a", b"1\n2\n3\n4\n5\n6\n7\n8\n9\n")
        tree = index.write_tree()
    checkout = Checkout(
        GitPin("p", "file:///nowhere", "0" * 40, "1"), repository.path, repository.commit_tree(tree, None, "b"), tree
    )

    def patch(name: str, diff: str) -> patches.Patch:
        file = tmp_path / f"{name}.diff"
        file.write_text(f"diff --git a/a b/a\n--- a/a\n+++ b/a\n{diff}")
        return replace(patches.read_foreign(file), project="p")

    first = patch("first", "@@ -1,3 +1,3 @@\n-1\n+one\n 2\n 3\n")
    second = patch("second", "@@ -1,3 +1,3 @@\n-one\n+eins\n 2\n 3\n")
    third = patch("third", "@@ -7,3 +7,3 @@\n 7\n 8\n-9\n+nine\n")
    below, steps = patches.compose(checkout, (), [first, second, third], None)
    assert below == tree
    assert repository.read(steps[-1].tree, "a") == b"eins\n2\n3\n4\n5\n6\n7\n8\nnine\n"
    _, steps = patches.compose(checkout, (), [second, third], None)
    assert [step.status.state for step in steps] == [PatchState.CONFLICTS, PatchState.APPLIES]
    assert repository.read(steps[-1].tree, "a") == b"1\n2\n3\n4\n5\n6\n7\n8\nnine\n"


@pytest.mark.parametrize("patch", [*EVERY, patches.read_foreign(NEGATIVE)], ids=lambda patch: patch.name)
def test_each_patch_has_proofs_of_its_present_hunks(patch: patches.Patch) -> None:
    path = proofs.path_of(ROOT / "patches", patch.name) if patch in EVERY else NEGATIVE.with_suffix(".json")
    stored = proofs.read(path)
    assert stored, f"{path} is missing: sm120kit patch prove {patch.name} --code --write"
    assert path.read_text() == proofs.file_text(stored)
    assert str(path.relative_to(ROOT)) in patch.trailer("Evidence")
    names = {probe.text for probe in patch.probes if probe.kind == "flags" or probe.m}
    for proof in stored:
        assert proof.hunks_sha256 == patch.hunks_sha256, f"{path} is a proof of other hunks: prove the patch again"
        assert proof.patch == patch.name
        assert names <= {result.probe.text for result in proof.results}
        for result in proof.results:
            assert result == proofs.compare(result.probe, result.below, result.above), "effects do not follow from the results"


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data, receipts and an (empty) test of a clone; commands use them."""
    for name in ("patches", "recipes", "cutlass_overrides", evidence.PROOFS):
        shutil.copytree(ROOT / name, tmp_path / name)
    for path in {path for patch in EVERY for path in patch.trailer("Evidence").replace(",", " ").split() if "/" in path}:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    monkeypatch.setenv("SM120KIT_DATA", str(tmp_path))
    return tmp_path


def unproven_in(clone: Path) -> list[str]:
    options = Options(Workspace(clone / "state"), sources.Origin(offline=True))
    return [f"{problem.file.stem}: {problem.text}" for problem in default_recipes.unproven(options)]


def test_each_patch_of_a_default_recipe_is_proved_on_its_version(clone: Path) -> None:
    """vLLM ships FlashInfer 0.7.2.post1; a proof on 0.6.6 is none for it."""
    assert unproven_in(clone) == []
    file = proofs.path_of(clone / "patches", "flashinfer/sm120-smem-accounting")
    file.write_text(proofs.file_text(proof for proof in proofs.read(file) if proof.recipe != "flashinfer-0.7.2.post1"))
    (problem,) = unproven_in(clone)
    assert problem.startswith("sm120-smem-accounting: has no proof on flashinfer-0.7.2.post1")
    file.unlink()
    assert len(unproven_in(clone)) == 3, "of three default recipes"


def test_patch_without_probes_of_a_default_recipe_needs_a_test(clone: Path) -> None:
    file = clone / "patches/flashinfer/micro-scatter-barrier.patch"
    file.write_text(file.read_text().replace("Evidence: tests/slow/engines/test_flashinfer_moe.py, ", "Evidence: "))
    assert {*unproven_in(clone)} == {"micro-scatter-barrier: has neither a probe nor a test as evidence"}


def test_proof_of_a_patch_in_a_repository_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "mine"
    one_patch(mine, ("Applies-To: cutlass", "Applies-To: cutlass"))
    (mine / REPOSITORY_FILE).write_text("edition = 1\n")
    monkeypatch.chdir(mine)
    patch, in_series = prover.find_patch("cutlass/one")
    assert (patch.name, in_series) == ("cutlass/one", True)
    assert prover.find_patch("patches/cutlass/one.patch") == (patch, True)
    assert prover.find_patch(str(ROOT / "patches/cutlass/mixed-width-tile-k.patch"))[1], (
        "a built-in patch is in the series, too"
    )
    prover.require_storable("cutlass/one")
    with pytest.raises(SystemRefused, match="mixed-width-tile-k is built in"):
        prover.require_storable("cutlass/mixed-width-tile-k")
    stored, path = prover.store("cutlass/one", proof(patch="cutlass/one"))
    assert path == mine / "patches/cutlass/one.json"
    assert proofs.read(path) == (stored,)
    prover.store("cutlass/one", proof(patch="cutlass/one", recipe="another"))
    assert [proof.recipe for proof in proofs.read(path)] == ["another", "r"]
