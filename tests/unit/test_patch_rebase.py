"""Moving a series to another version: merges, conflicts, and the files that are written."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from patch_series import (
    BASE,
    BUILDER,
    CUTLASS,
    KERNEL,
    KEY,
    LAUNCHER,
    VERSION_H,
    PatchDirectory,
    changed,
    checkout_of,
    git_in,
    inside,
    patch_text,
    two_projects,
    version_h,
)

from sm120kit import patches
from sm120kit.core.errors import BadInput, Mismatch, PatchConflict, SystemRefused
from sm120kit.patches import _moved
from sm120kit.patches.patch_records import PatchedTree
from sm120kit.patches.rebase import SeriesMove, begin
from sm120kit.sources.source_records import VendoredProject

NAMES = ("flashinfer-0.6.6", "flashinfer-0.7.2")
IDENTITY = ("-c", "user.name=A. B.", "-c", "user.email=a@example.invalid")
NEW = {**BASE, VERSION_H: version_h("4.5.0"), "new.py": "new\n"}
"""The files of the new version; tests change them further."""


@pytest.fixture
def patch_dir(tmp_path: Path) -> PatchDirectory:
    return PatchDirectory(tmp_path)


def move_of(patch_dir: PatchDirectory, files: dict[str, str] = NEW, path: str = CUTLASS) -> SeriesMove:
    """The move of the series from FlashInfer 0.6.6 with CUTLASS 4.2.1 to 0.7.2 with 4.5.0, at ``path``."""
    old = checkout_of(patch_dir.path / "old-repository", BASE)
    onto = checkout_of(patch_dir.path / "new-repository", files, "0.7.2")
    tree = patches.apply(old, inside(), patch_dir.root, patch_dir.overrides)
    unpatched = PatchedTree(onto, (VendoredProject("cutlass", path, "4.5.0"),), onto.commit, onto.tree, ())
    return SeriesMove(tree, unpatched, NAMES, patch_dir.root, patch_dir.overrides, KEY)


def exported(move: SeriesMove, work: Path, **pinned: set[str]) -> list[Path]:
    source = patches.EditedSource(NAMES[1], move.onto.checkout.pin, move.onto.inside, pinned)
    return patches.export_edits(work, source, move.root, KEY)


def moved(move: SeriesMove, work: Path, **pinned: set[str]) -> tuple[dict[str, str], list[Path]]:
    """What became of each patch, and the files that were written."""
    progress = begin(move, work)
    assert progress.conflicts == ()
    return dict(progress.states), exported(move, work, **pinned)


def applied(move: SeriesMove) -> tuple[str, str]:
    """The trees of both versions with the present series."""
    old = patches.apply(move.old.checkout, move.old.inside, move.root, move.overrides)
    return old.tree, patches.apply(move.onto.checkout, move.onto.inside, move.root, move.overrides).tree


def applies_to(patch_dir: PatchDirectory) -> dict[str, str]:
    loaded = [patch for project in patches.projects(patch_dir.root) for patch in patches.load(patch_dir.root, project)]
    return {patch.name: patch.trailer("Applies-To").partition(" ")[2] for patch in loaded}


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def output(directory: Path, *arguments: str) -> str:
    """What git prints in a directory, as a developer runs it."""
    return subprocess.run(["git", "-C", directory, *arguments], check=True, capture_output=True, text=True).stdout.strip()


def tree_in(directory: Path) -> str:
    return output(directory, "rev-parse", "refs/heads/series^{tree}")


def test_patches_that_apply_unchanged(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    """A range is widened if nothing else lies between; the diff of the file stays. Comments and order of the series stay."""
    two_projects(patch_dir)
    before = contents(patch_dir.root)
    move = move_of(patch_dir, {**NEW, BUILDER: "inserted\n" + KERNEL})
    states, _ = moved(move, tmp_path / "work")
    assert {*states.values()} == {"moved"}
    assert applies_to(patch_dir) == {
        "cutlass/first": ">=4.2,<=4.5.0",
        "cutlass/second": ">=4.2,<=4.5.0",
        "flashinfer/third": ">=0.6,<=0.7.2",
    }
    after = contents(patch_dir.root)
    assert after["cutlass/series"] == before["cutlass/series"]
    for name in ("cutlass/first.patch", "cutlass/second.patch", "flashinfer/third.patch"):
        assert after[name].partition(b"\ndiff ")[2] == before[name].partition(b"\ndiff ")[2]
    assert applied(move) == (move.old.tree, tree_in(tmp_path / "work"))
    assert patches.lint(patch_dir.root) == []


@pytest.mark.parametrize("versions", [">=4.2,<4.4.2", ">=4.2"])
@pytest.mark.parametrize(("fixed", "conflicts"), [("4.5.0", False), ("4.4", False), ("4.6.0", True)])
def test_patch_that_is_fixed_upstream_is_not_moved(
    patch_dir: PatchDirectory, tmp_path: Path, versions: str, fixed: str, conflicts: bool
) -> None:
    """Upstream's own fix conflicts with the patch: there is nothing to resolve."""
    text = patch_text(patch_dir.edit(BUILDER, 10, "ten\n"), versions=versions)
    patch_dir.put(
        "first", text.replace(b"Upstream-Status: Pending\n", f"Upstream-Status: Pending\nFixed-In: {fixed}\n".encode())
    )
    move = move_of(patch_dir, {**NEW, BUILDER: changed(KERNEL, 10, "ten upstream\n")})
    progress = begin(move, tmp_path / "work")
    assert bool(progress.conflicts) == conflicts
    assert progress.states["cutlass/first"].startswith("to be moved" if conflicts else "already upstream")
    if not conflicts:
        exported(move, tmp_path / "work")
        assert applied(move) == (move.old.tree, move.onto.tree)


def test_series_of_a_user_is_moved(patch_dir: PatchDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built-in patches below it that must change are overridden in the user's repository; they stay as they are."""
    built_in = PatchDirectory(tmp_path / "built-in")
    two_projects(built_in)
    (built_in.path / "recipes").mkdir()
    monkeypatch.setenv("SM120KIT_DATA", str(built_in.path))
    (patch_dir.path / "sm120kit.toml").write_text("edition = 1\n")
    patch_dir.put("own", patch_text(patch_dir.edit(LAUNCHER, 20, "own\n", below=""), "flashinfer", "==0.6.*"), "flashinfer")
    before = contents(built_in.root)
    move = replace(move_of(patch_dir), overrides=built_in.overrides)
    move = replace(move, old=patches.apply(move.old.checkout, move.old.inside, patch_dir.root, built_in.overrides))
    states, wrote = moved(move, tmp_path / "work")
    assert {*states} == {"cutlass/first", "cutlass/second", "flashinfer/third", "flashinfer/own"}
    assert patch_dir.root / "flashinfer/own.patch" in wrote
    assert applied(move) == (move.old.tree, tree_in(tmp_path / "work"))
    assert contents(built_in.root) == before and patches.lint(patch_dir.root) == []


def test_built_in_patch_that_a_built_in_recipe_goes_without_is_not_moved(
    patch_dir: PatchDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's patches alone are moved to a version for which the built-in series is decided."""
    built_in = PatchDirectory(tmp_path / "built-in")
    built_in.put("theirs", patch_text(built_in.edit(BUILDER, 10, "ten\n"), versions="==4.2.1"))
    (built_in.path / "recipes").mkdir()
    monkeypatch.setenv("SM120KIT_DATA", str(built_in.path))
    (patch_dir.path / "sm120kit.toml").write_text("edition = 1\n")
    patch_dir.put("own", patch_text(patch_dir.edit(BUILDER, 30, "own\n"), versions="==4.2.1"))
    move = replace(move_of(patch_dir), overrides=built_in.overrides, settled=True)
    move = replace(move, old=patches.apply(move.old.checkout, move.old.inside, patch_dir.root, built_in.overrides))
    states, wrote = moved(move, tmp_path / "work")
    assert states == {"cutlass/theirs": "built-in, and not for cutlass 4.5.0", "cutlass/own": "moved"}
    assert [path.name for path in wrote] == ["own.patch"]


def test_range_is_not_widened_over_versions_of_other_recipes(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    patch_dir.put("first", patch_text(patch_dir.edit(BUILDER, 10, "ten\n"), versions=">=4.2,<4.3"))
    _, wrote = moved(move_of(patch_dir), tmp_path / "work", cutlass={"4.2.1", "4.4.2", "4.5.0"})
    assert applies_to(patch_dir) == {"cutlass/first": ">=4.2,<4.3", "cutlass/first--4.5.0": "==4.5.0"}
    assert {path.name for path in wrote} == {"first--4.5.0.patch", "series"}


def test_merged_patch_becomes_a_variant(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    """Upstream changed the context: git merges what ``git apply`` refuses. The evidence of the variant is its own."""
    text = patch_text(patch_dir.edit(BUILDER, 10, "ten\n"), versions=">=4.2,<4.4.2")
    old = patch_dir.put(
        "first", text.replace(b"tests/unit/test_patches.py", b"src/sm12x_lab/receipts/patches/cutlass/first.json")
    )
    before = old.read_bytes()
    move = move_of(patch_dir, {**NEW, BUILDER: changed(KERNEL, 12, "twelve upstream\n")})
    states, _ = moved(move, tmp_path / "work")
    assert states == {"cutlass/first": "moved"}
    assert old.read_bytes() == before
    assert applies_to(patch_dir)["cutlass/first--4.5.0"] == "==4.5.0"
    assert (
        b"Evidence: src/sm12x_lab/receipts/patches/cutlass/first--4.5.0.json\n"
        in (old.parent / "first--4.5.0.patch").read_bytes()
    )
    assert applied(move) == (move.old.tree, tree_in(tmp_path / "work"))


def test_range_that_includes_the_new_version_is_split(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    """A patch that claims the new version and conflicts there: both files stay right, and the old tree does not change."""
    old = patch_dir.put("first", patch_text(patch_dir.edit(BUILDER, 10, "ten\n"), versions=">=4.2,<4.6"))
    diff = old.read_bytes().partition(b"\ndiff ")[2]
    move = move_of(patch_dir, {**NEW, BUILDER: changed(KERNEL, 12, "twelve upstream\n")})
    moved(move, tmp_path / "work")
    assert applies_to(patch_dir) == {"cutlass/first": ">=4.2,<4.5.0", "cutlass/first--4.5.0": ">=4.5.0,<4.6"}
    assert old.read_bytes().partition(b"\ndiff ")[2] == diff
    assert applied(move) == (move.old.tree, tree_in(tmp_path / "work"))


def test_patch_that_is_upstream(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    """Its range ends before the new version if it includes that."""
    patch_dir.put("first", patch_text(patch_dir.edit(BUILDER, 10, "ten\n"), versions=">=4.2,<4.6"))
    launcher = patch_text(patch_dir.edit(LAUNCHER, 3, "three\n", below=""), "flashinfer", "<0.7", "launcher: x")
    third = patch_dir.put("third", launcher, "flashinfer")
    before = third.read_bytes()
    new = {**NEW, BUILDER: "more\n" + changed(KERNEL, 10, "ten\n"), LAUNCHER: changed(KERNEL, 3, "three\n")}
    move = move_of(patch_dir, new)
    states, _ = moved(move, tmp_path / "work")
    assert {*states.values()} == {"already upstream: nothing of it is left"}
    assert applies_to(patch_dir) == {"cutlass/first": ">=4.2,<4.5.0", "flashinfer/third": "<0.7"}
    assert third.read_bytes() == before
    assert applied(move)[0] == move.old.tree


def test_nested_project_at_another_path(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    two_projects(patch_dir)
    new = {name.replace(CUTLASS, "deps/cutlass"): text for name, text in NEW.items()}
    new["deps/cutlass/include/cutlass/builder.inl"] = changed(KERNEL, 13, "thirteen upstream\n")
    move = move_of(patch_dir, new, "deps/cutlass")
    states, _ = moved(move, tmp_path / "work")
    assert states["cutlass/second"] == "moved"
    text = (tmp_path / "work/deps/cutlass/include/cutlass/builder.inl").read_text()
    assert "ten\neleven\nline 12\nthirteen upstream\n" in text
    assert (tmp_path / "work/deps/cutlass/include/sm120kit/sf.hpp").is_file()
    assert b"+++ b/include/cutlass/builder.inl" in (patch_dir.root / "cutlass/second--4.5.0.patch").read_bytes()
    assert applied(move) == (move.old.tree, tree_in(tmp_path / "work"))


def test_variant_for_the_new_version_is_kept(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    patch_dir.put("first", patch_text(patch_dir.edit(BUILDER, 10, "ten\n"), versions="<4.4"))
    new = {**NEW, BUILDER: changed(KERNEL, 10, "ten upstream\n")}
    patch_dir.put("first--4.5", patch_text(patch_dir.diff(new, {BUILDER: changed(KERNEL, 10, "ten!\n")}), versions=">=4.5"))
    before = contents(patch_dir.root)
    states, wrote = moved(move_of(patch_dir, new), tmp_path / "work")
    assert states == {"cutlass/first": "cutlass/first--4.5 is for cutlass 4.5.0", "cutlass/first--4.5": "moved"}
    assert wrote == []
    assert contents(patch_dir.root) == before


def test_patch_of_which_a_part_is_upstream(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    both = changed(changed(KERNEL, 5, "five\n"), 25, "twentyfive\n")
    patch_dir.put("first", patch_text(patch_dir.diff(BASE, {BUILDER: both})))
    moved(move_of(patch_dir, {**NEW, BUILDER: changed(KERNEL, 5, "five\n")}), tmp_path / "work")
    assert b"five\n" not in (patch_dir.root / "cutlass/first--4.5.0.patch").read_bytes().replace(b"twentyfive", b"")


def test_conflict_is_resolved_with_git(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    """The developer goes on with git; the export then writes the files, and the directory is one of ``edit``."""
    two_projects(patch_dir)
    new = {**NEW, BUILDER: changed(KERNEL, 12, "twelve upstream\n"), LAUNCHER: changed(KERNEL, 3, "three upstream\n")}
    move, work = move_of(patch_dir, new), tmp_path / "work"
    before = contents(patch_dir.root)
    progress = begin(move, work)
    assert progress.conflicts == (BUILDER,)
    assert dict(progress.states) == {
        "cutlass/first": "moved",
        "cutlass/second": "to be moved",
        "flashinfer/third": "to be moved",
    }
    assert "||||||| " in (work / BUILDER).read_text()
    with pytest.raises(BadInput, match="a rebase is not finished"):
        exported(move, work)
    assert contents(patch_dir.root) == before
    resolved = changed(changed(changed(KERNEL, 10, "ten\n"), 11, "eleven\n"), 12, "twelve both\n")
    (work / BUILDER).write_text(resolved)
    git_in(work, "add", BUILDER)
    stopped = subprocess.run(["git", "-C", work, *IDENTITY, "-c", "core.editor=true", "rebase", "--continue"])
    assert stopped.returncode == 1, "the third patch conflicts, too"
    git_in(work, "rebase", "--skip")
    exported(move, work)
    assert applies_to(patch_dir) == {
        "cutlass/first": ">=4.2,<4.4.2",
        "cutlass/first--4.5.0": "==4.5.0",
        "cutlass/second": ">=4.2,<4.4.2",
        "cutlass/second--4.5.0": "==4.5.0",
        "flashinfer/third": "==0.6.*",
    }
    assert applied(move) == (move.old.tree, tree_in(work))
    assert output(work, "log", "--format=%an", "-2", "series").splitlines() == ["Jo Doe"] * 2
    assert exported(move, work) == []
    assert (work / ".git/sm120kit.json").read_text().count("--4.5.0") == 2
    git_in(work, "diff", "--quiet", "HEAD")


def test_wrong_directories_and_recipes(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    two_projects(patch_dir)
    move, work = move_of(patch_dir), tmp_path / "work"
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("")
    with pytest.raises(SystemRefused, match="is not empty"):
        begin(move, tmp_path / "full")
    with pytest.raises(BadInput, match=r"flashinfer-0\.7\.2 has no source cutlass"):
        begin(replace(move, onto=replace(move.onto, inside=())), work)
    begin(move, work)
    before = contents(patch_dir.root)
    with pytest.raises(Mismatch, match="was not made by"):
        patches.export_edits(
            work, patches.EditedSource(NAMES[1], move.onto.checkout.pin, move.onto.inside), move.root, b"another"
        )
    assert contents(patch_dir.root) == before
    series = patch_dir.root / "flashinfer/third.patch"
    series.write_bytes(series.read_bytes().replace(b"Why it exists.", b"Why it still exists."))
    patch_dir.put("own", patch_text(patch_dir.edit(LAUNCHER, 20, "own\n", below=""), "flashinfer", ">=0.7"), "flashinfer")
    with pytest.raises(Mismatch, match="the series changed"):
        exported(move, work)


def test_patch_for_the_new_version_alone_must_apply(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    new = {**NEW, BUILDER: changed(KERNEL, 10, "upstream\n")}
    patch_dir.put("first", patch_text(patch_dir.edit(BUILDER, 10, "ten\n"), versions=">=4.5"))
    with pytest.raises(PatchConflict, match=r"cutlass/first is for cutlass 4\.5\.0 and does not apply"):
        begin(move_of(patch_dir, new), tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_directory_runs_no_program(patch_dir: PatchDirectory, tmp_path: Path, hostile_git: Path) -> None:
    """The settings of the user are not applied while git picks the patches."""
    two_projects(patch_dir)
    moved(move_of(patch_dir), tmp_path / "work")


@pytest.mark.parametrize(
    ("versions", "keep", "at", "pinned", "expected"),
    [
        (">=4.2,<4.6", "4.2.1", "4.5.0", (), (">=4.2,<4.5.0", ">=4.5.0,<4.6")),
        (">=4.2", "4.2.1", "4.5.0", ("4.4",), (">=4.2,<4.5.0", ">=4.5.0")),
        (">=4.2", "4.2.1", "4.5.0", ("4.6",), (">=4.2,!=4.5.0", "==4.5.0")),
        (">=4.2,<4.6", "4.5.0", "4.2.1", (), (">4.2.1,<4.6", ">=4.2,<=4.2.1")),
    ],
)
def test_split_of_a_range(versions: str, keep: str, at: str, pinned: tuple[str, ...], expected: tuple[str, str]) -> None:
    assert _moved.split(versions, keep, at, pinned) == expected


@pytest.mark.parametrize(
    ("versions", "version", "expected"),
    [
        (">=4.2,<4.3", "4.5.0", ">=4.2,<=4.5.0"),
        ("==0.6.6", "0.7.2.post1", ">=0.6.6,<=0.7.2.post1"),
        ("~=0.6.6", "0.7.2", ">=0.6.6,<=0.7.2"),
        (">=4.2,<4.3", "4.1", ">=4.1,<4.3"),
        (">=4.2,!=4.5.0", "4.5.0", ">=4.2"),
    ],
)
def test_wider_range(versions: str, version: str, expected: str) -> None:
    assert _moved.widen(versions, version) == expected
    assert _moved.contains(expected, version)
