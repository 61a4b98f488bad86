"""Editing a series: no edit is lost, whatever the series, the directory or a commit message contain."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from patch_series import (
    BASE,
    BUILDER,
    CUTLASS,
    KERNEL,
    KEY,
    LAUNCHER,
    RECIPE,
    TRAILERS,
    VERSION_H,
    PatchDirectory,
    changed,
    checkout_of,
    contents,
    export_edits,
    git_in,
    inside,
    patch_text,
    text_at,
    two_projects,
    version_h,
)

from sm120kit import patches
from sm120kit.core.errors import AlreadyExists, BadInput, Mismatch, NotFound, PatchConflict
from sm120kit.patches.patch_records import PatchedTree

HEADER = f"{CUTLASS}/include/cutlass/arch.h"
FILES = {**BASE, HEADER: KERNEL}


@pytest.fixture
def patch_dir(tmp_path: Path) -> PatchDirectory:
    return PatchDirectory(tmp_path)


def three_files(patch_dir: PatchDirectory) -> bytes:
    """A patch with a section for each of three files, in this order: arch.h, builder.inl, new.h."""
    change: dict[str, str | None] = {
        HEADER: changed(KERNEL, 10, "ten\n"),
        BUILDER: changed(KERNEL, 10, "ten\n"),
        f"{CUTLASS}/include/cutlass/new.h": "new\n",
    }
    return patch_text(patch_dir.diff(FILES, change))


SECTION = b"diff --git a/include/cutlass/builder.inl"
UNPARSED = {
    "rename": (SECTION, b"diff --git a/a b/a\nsimilarity index 100%\nrename from a\nrename to c\n" + SECTION),
    "binary": (SECTION, b"diff --git a/a b/a\nindex 1..2 100644\nBinary files a/a and b/a differ\n" + SECTION),
    "two commits": (SECTION, b"-- \n2.39.5\n\nFrom " + b"1" * 40 + b" Mon Sep 17 00:00:00 2001\nSubject: more\n\n" + SECTION),
    "text after signature": (SECTION, b"-- \n2.39.5\n\n" + SECTION),
    "wrong counts": (b"@@ -7,7 +7,7 @@", b"@@ -7,5 +7,5 @@"),
    "blank context line": (b"\n line 9\n", b"\n\n line 9\n"),
    "junk between sections": (SECTION, b"Index: builder.inl\n=======\n" + SECTION),
    "trailers below a dashed line": (b"\nApplies-To", b"---\n\nApplies-To"),
}


@pytest.mark.parametrize("problem", UNPARSED)
def test_file_with_an_unparsed_diff_is_reported(patch_dir: PatchDirectory, problem: str) -> None:
    old, new = UNPARSED[problem]
    content = three_files(patch_dir)
    assert old in content
    patch_dir.put("first", content.replace(old, new, 1))
    assert patches.lint(patch_dir.root) != []


NEWER = {**BASE, BUILDER: changed(KERNEL, 9, "nine\n"), VERSION_H: version_h("4.5.0")}
"""The files of a version to which a patch of line 10 of builder.inl does not apply."""


def edited(patch_dir: PatchDirectory, clone: Path, files: dict[str, str] = BASE, version: str = "4.2.1") -> PatchedTree:
    """A directory of ``patches.edit`` with the present series on some files."""
    checkout = checkout_of(clone.with_name(f"{clone.name}-repository"), files, "0.6.6" if files is BASE else "0.7.2")
    tree = patches.apply(checkout, inside(version), patch_dir.root, patch_dir.overrides)
    patches.edit(tree, clone, f"flashinfer-{checkout.pin.version}", KEY)
    return tree


def message(subject: str, project: str = "flashinfer", versions: str = "==0.6.6") -> str:
    return f"{subject}\n\nBecause.\n\n{TRAILERS.format(project=project, versions=versions)}"


def commit_change(clone: Path, path: str, text: str, text_of_message: str) -> None:
    (clone / path).parent.mkdir(parents=True, exist_ok=True)
    (clone / path).write_text(text)
    git_in(clone, "add", path)
    git_in(clone, "commit", "-q", "-m", text_of_message)


def test_export_refuses_another_recipe(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    two_projects(patch_dir)
    patch_dir.put("first--4.5", patch_text(patch_dir.edit(BUILDER, 10, "ten\n", NEWER), versions=">=4.5"))
    before = contents(patch_dir.root)
    tree = edited(patch_dir, tmp_path / "clone")
    other = checkout_of(tmp_path / "other", NEWER, "0.7.2")
    with pytest.raises(Mismatch, match=r"clone was made from recipe flashinfer-0\.6\.6, not from flashinfer-0\.7\.2") as error:
        export_edits(tmp_path / "clone", other, patch_dir.root, "4.5.0")
    assert error.value.hint == f"sm120kit patch export flashinfer-0.6.6 --from {tmp_path / 'clone'}"
    with pytest.raises(Mismatch, match=r"other sources than those that recipe flashinfer-0\.6\.6 pins"):
        export_edits(tmp_path / "clone", tree.checkout, patch_dir.root, "4.2.2")
    assert contents(patch_dir.root) == before
    assert export_edits(tmp_path / "clone", tree.checkout, patch_dir.root) == []


def test_record_of_an_edit_directory_is_a_file(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    """A link or pipe is not opened."""
    two_projects(patch_dir)
    tree = edited(patch_dir, tmp_path / "clone")
    record = tmp_path / "clone/.git/sm120kit.json"
    record.rename(tmp_path / "elsewhere")
    record.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Mismatch, match="not made by"):
        export_edits(tmp_path / "clone", tree.checkout, patch_dir.root)
    record.unlink()
    os.mkfifo(record)
    with pytest.raises(Mismatch, match="not made by"):
        export_edits(tmp_path / "clone", tree.checkout, patch_dir.root)


def test_recipe_file_with_special_characters_is_recorded(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    two_projects(patch_dir)
    checkout = checkout_of(tmp_path / "r", BASE)
    tree = patches.apply(checkout, inside(), patch_dir.root, patch_dir.overrides)
    recipe = 'a "b"\\n\tc\nd;#.toml'
    patches.edit(tree, tmp_path / "clone", recipe, KEY)
    with pytest.raises(Mismatch) as error:
        patches.export_edits(
            tmp_path / "clone", patches.EditedSource(RECIPE, checkout.pin, inside("4.2.2")), patch_dir.root, KEY
        )
    assert f"made from recipe {recipe}, not" in error.value.message


def put_added(patch_dir: PatchDirectory) -> Path:
    """A patch of line 25 of builder.inl at the end of CUTLASS's series."""
    below = {**BASE, BUILDER: changed(changed(KERNEL, 10, "ten\n"), 11, "eleven\n")}
    return patch_dir.put("added", patch_text(patch_dir.edit(BUILDER, 25, "x\n", below), subject="builder: added"))


def rewritten(file: Path, old: bytes, new: bytes) -> bytes:
    """Replace text of a file; returns its new content."""
    content = file.read_bytes()
    assert old in content
    file.write_bytes(content.replace(old, new))
    return file.read_bytes()


def test_export_merges_with_a_series_that_changed(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    """Patches that were added, changed and removed meanwhile stay so, and those of the directory are written; also later on."""
    two_projects(patch_dir)
    fourth = {**BASE, LAUNCHER: changed(KERNEL, 3, "three\n")}
    launcher = patch_text(patch_dir.edit(LAUNCHER, 27, "y\n", fourth, ""), "flashinfer", "==0.6.*", "launcher: fourth")
    patch_dir.put("fourth", launcher, "flashinfer")
    clone, flashinfer, cutlass = tmp_path / "clone", patch_dir.root / "flashinfer", patch_dir.root / "cutlass"
    tree = edited(patch_dir, clone)
    commit_change(clone, LAUNCHER, changed((clone / LAUNCHER).read_text(), 20, "mine\n"), message("launcher: mine"))
    added = put_added(patch_dir)
    second = rewritten(cutlass / "second.patch", b"Why it exists.", b"Why it still exists.")
    (flashinfer / "fourth.patch").unlink()
    (flashinfer / "series").write_text("# why\nthird\n")
    assert {path.name for path in export_edits(clone, tree.checkout, patch_dir.root)} == {"launcher-mine.patch", "series"}
    assert added.is_file() and (cutlass / "second.patch").read_bytes() == second
    assert (flashinfer / "series").read_text() == "# why\nthird\nlauncher-mine\n"
    again = patches.apply(tree.checkout, inside(), patch_dir.root, patch_dir.overrides)
    assert text_at(again, LAUNCHER) == changed(changed(KERNEL, 3, "three\n"), 20, "mine\n")
    assert "\nx\n" in text_at(again, BUILDER)
    before = contents(patch_dir.root)
    assert export_edits(clone, tree.checkout, patch_dir.root) == [], "the directory still lacks what was added"
    assert contents(patch_dir.root) == before
    (clone / LAUNCHER).write_text((clone / LAUNCHER).read_text().replace("mine\n", "ours\n"))
    git_in(clone, "commit", "-qa", "--amend", "--no-edit")
    assert [path.name for path in export_edits(clone, tree.checkout, patch_dir.root)] == ["launcher-mine.patch"]
    assert contents(patch_dir.root).keys() == before.keys()
    git_in(clone, "reset", "-q", "--hard", "HEAD^")
    assert {path.name for path in export_edits(clone, tree.checkout, patch_dir.root)} == {"launcher-mine.patch", "series"}
    assert added.is_file() and not (flashinfer / "launcher-mine.patch").exists()


def test_export_merges_the_removal_of_a_patch(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    """The directory removes one patch and changes the message of another; meanwhile another is added and one removed."""
    two_projects(patch_dir)
    clone, cutlass = tmp_path / "clone", patch_dir.root / "cutlass"
    tree = edited(patch_dir, clone)
    git_in(clone, "reset", "-q", "--hard", "HEAD^")
    text = message("builder: better", "cutlass", "==4.2.1") + "Patch: cutlass/second\n"
    git_in(clone, "commit", "-q", "--amend", "-m", text)
    added = put_added(patch_dir)
    wrote = export_edits(clone, tree.checkout, patch_dir.root)
    assert {path.relative_to(patch_dir.root).as_posix() for path in wrote} == {
        "cutlass/second.patch",
        "flashinfer/third.patch",
        "flashinfer/series",
    }
    assert "builder: better" in (cutlass / "second.patch").read_text()
    assert added.is_file() and (cutlass / "series").read_text() == "first\nsecond\nadded\n"
    assert patches.lint(patch_dir.root) == []


def test_two_people_change_different_files_of_a_patch(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    """One changes the patch's file, the other adds a file to it and a line to its message; the later export has all."""
    two_projects(patch_dir)
    mine, yours = tmp_path / "mine", tmp_path / "yours"
    tree = edited(patch_dir, mine)
    edited(patch_dir, yours)
    (yours / "extra.h").write_text("extra\n")
    git_in(yours, "add", "extra.h")
    text = message("launcher: é", "flashinfer", "==0.6.*").replace("Because.", "Because.\n\nAlso extra.h.")
    git_in(yours, "commit", "-q", "--amend", "-m", text + "Patch: flashinfer/third\n")
    assert [path.name for path in export_edits(yours, tree.checkout, patch_dir.root)] == ["third.patch"]
    (mine / LAUNCHER).write_text(changed((mine / LAUNCHER).read_text(), 20, "mine\n"))
    git_in(mine, "commit", "-qa", "--amend", "--no-edit")
    assert [path.name for path in export_edits(mine, tree.checkout, patch_dir.root)] == ["third.patch"]
    merged = patches.apply(tree.checkout, inside(), patch_dir.root, patch_dir.overrides)
    assert text_at(merged, "extra.h") == "extra\n" and "mine\n" in text_at(merged, LAUNCHER)
    assert b"Also extra.h." in (patch_dir.root / "flashinfer/third.patch").read_bytes()
    assert patches.lint(patch_dir.root) == []
    assert export_edits(mine, tree.checkout, patch_dir.root) == [], "nothing is written twice"


def test_two_people_change_different_lines_of_a_file(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    two_projects(patch_dir)
    directories = [tmp_path / "mine", tmp_path / "yours"]
    tree = edited(patch_dir, directories[0])
    edited(patch_dir, directories[1])
    for directory, line in zip(directories, (10, 25), strict=True):
        (directory / LAUNCHER).write_text(changed((directory / LAUNCHER).read_text(), line, f"line {line} of mine\n"))
        git_in(directory, "commit", "-qa", "--amend", "--no-edit")
        assert [path.name for path in export_edits(directory, tree.checkout, patch_dir.root)] == ["third.patch"]
    merged = text_at(patches.apply(tree.checkout, inside(), patch_dir.root, patch_dir.overrides), LAUNCHER)
    assert "line 10 of mine\n" in merged and "line 25 of mine\n" in merged


def edited_in(patch_dir: PatchDirectory, directory: Path, line: int, text: str) -> Path:
    """A directory in which the last patch changes another line of the launcher."""
    edited(patch_dir, directory)
    (directory / LAUNCHER).write_text(changed((directory / LAUNCHER).read_text(), line, text))
    git_in(directory, "commit", "-qa", "--amend", "--no-edit")
    return directory


@pytest.mark.parametrize("side", ["changed", "removed here", "removed there"])
def test_export_refuses_a_patch_that_both_changed(patch_dir: PatchDirectory, tmp_path: Path, side: str) -> None:
    two_projects(patch_dir)
    clone, new = tmp_path / "clone", tmp_path / "new"
    tree = edited(patch_dir, clone)
    third = patch_dir.root / "flashinfer/third.patch"
    if side == "removed there":
        third.unlink()
        (third.parent / "series").write_text("")
    elif side == "removed here":
        rewritten(third, b"Why it exists.", b"Why it still exists.")
    else:
        other = edited_in(patch_dir, tmp_path / "other", 20, "yours\n")
        assert [path.name for path in export_edits(other, tree.checkout, patch_dir.root)] == ["third.patch"]
    if side == "removed here":
        git_in(clone, "reset", "-q", "--hard", "HEAD^")
    else:
        (clone / LAUNCHER).write_text(changed((clone / LAUNCHER).read_text(), 20, "mine\n"))
        git_in(clone, "commit", "-qa", "--amend", "--no-edit")
    before = contents(patch_dir.root)
    with pytest.raises(Mismatch) as error:
        export_edits(clone, tree.checkout, patch_dir.root)
    names = {
        "changed": f": both changed the same lines of {LAUNCHER}",
        "removed here": ", which the directory removed",
        "removed there": ", which the series lacks",
    }
    assert error.value.message.splitlines()[1] == f"  flashinfer/third{names[side]}"
    assert contents(patch_dir.root) == before
    assert error.value.hint.startswith(f"sm120kit patch edit {RECIPE} --into NEW")
    if side == "changed":
        again = edited(patch_dir, new)
        git_in(new, "fetch", "-q", str(clone))
        (picked,) = error.value.hint.partition("cherry-pick ")[2].partition(";")[0].split()
        git_in(new, "cherry-pick", "-X", "theirs", picked)
        git_in(new, "reset", "-q", "--soft", "HEAD^")  # as `git rebase -i` squashes
        git_in(new, "commit", "-q", "--amend", "--no-edit")
        assert [path.name for path in export_edits(new, again.checkout, patch_dir.root)] == ["third.patch"]
        assert b"mine" in third.read_bytes() and b"yours" not in third.read_bytes()
    if side == "removed there":
        again = edited(patch_dir, new)
        git_in(new, "fetch", "-q", str(clone), "series")
        git_in(new, "cherry-pick", "-X", "theirs", "--keep-redundant-commits", "FETCH_HEAD~1..FETCH_HEAD")
        assert {path.name for path in export_edits(new, again.checkout, patch_dir.root)} == {"third.patch", "series"}


def test_the_same_change_on_both_sides_is_no_conflict(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    two_projects(patch_dir)
    clone, other = tmp_path / "clone", tmp_path / "other"
    tree = edited(patch_dir, clone)
    edited(patch_dir, other)
    for directory in (clone, other):
        (directory / LAUNCHER).write_text(changed((directory / LAUNCHER).read_text(), 20, "mine\n"))
        git_in(directory, "commit", "-qa", "--amend", "--no-edit")
    assert [path.name for path in export_edits(other, tree.checkout, patch_dir.root)] == ["third.patch"]
    assert export_edits(clone, tree.checkout, patch_dir.root) == []


def test_merge_that_does_not_apply_is_refused(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    """Both sides change the same line in patches of their own."""
    two_projects(patch_dir)
    clone = tmp_path / "clone"
    tree = edited(patch_dir, clone)
    commit_change(
        clone, BUILDER, changed((clone / BUILDER).read_text(), 25, "mine\n"), message("builder: mine", "cutlass", "==4.2.1")
    )
    put_added(patch_dir)
    before = contents(patch_dir.root)
    with pytest.raises(Mismatch, match=r"cannot be merged with it:\ncutlass/added: conflicts") as error:
        export_edits(clone, tree.checkout, patch_dir.root)
    assert "cutlass/added was added" in error.value.message and "git cherry-pick" in error.value.hint
    assert contents(patch_dir.root) == before


def test_export_keeps_another_order(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    """An order that one side changed is taken; two different ones are refused."""
    for number, line in enumerate((5, 15, 25)):
        patch_dir.put(f"p{number}", patch_text(patch_dir.edit(BUILDER, line, "x\n"), subject=f"builder: {number}"))
    series = patch_dir.root / "cutlass/series"
    clone, other = tmp_path / "clone", tmp_path / "other"
    tree = edited(patch_dir, clone)
    edited(patch_dir, other)
    series.write_text("p1\np0\np2\n")
    assert export_edits(clone, tree.checkout, patch_dir.root) == []
    commit_change(clone, f"{CUTLASS}/include/fine.h", "fine\n", message("fine", "cutlass", "==4.2.1"))
    assert {path.name for path in export_edits(clone, tree.checkout, patch_dir.root)} == {"fine.patch", "series"}
    assert series.read_text() == "p1\np0\np2\nfine\n"
    git_in(other, "reset", "-q", "--hard", "HEAD~3")
    git_in(other, "cherry-pick", "ORIG_HEAD", "ORIG_HEAD~1", "ORIG_HEAD~2")
    with pytest.raises(Mismatch, match="the order of the patches"):
        export_edits(other, tree.checkout, patch_dir.root)
    series.write_text("p0\np1\np2\nfine\n")
    export_edits(other, tree.checkout, patch_dir.root)
    assert series.read_text().split() == ["p2", "fine", "p1", "p0"]


def test_merge_after_the_old_commits_are_gone_is_refused(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    two_projects(patch_dir)
    clone = tmp_path / "clone"
    tree = edited(patch_dir, clone)
    git_in(clone, "commit", "-q", "--amend", "-m", message("launcher: third") + "Patch: flashinfer/third\n")
    git_in(clone, "reflog", "expire", "--expire=now", "--all")
    git_in(clone, "gc", "-q", "--prune=now")
    put_added(patch_dir)
    before = contents(patch_dir.root)
    with pytest.raises(Mismatch, match="its commits of that time are gone"):
        export_edits(clone, tree.checkout, patch_dir.root)
    assert contents(patch_dir.root) == before


def test_export_twice_and_from_another_branch(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    """The directory stays usable after an export; another HEAD would remove the patches above it."""
    two_projects(patch_dir)
    clone = tmp_path / "clone"
    tree = edited(patch_dir, clone)
    for number in (20, 25):
        text = (clone / LAUNCHER).read_text()
        commit_change(clone, LAUNCHER, changed(text, number, "mine\n"), message(f"launcher: line {number}"))
        wrote = export_edits(clone, tree.checkout, patch_dir.root)
        assert {path.name for path in wrote} == {f"launcher-line-{number}.patch", "series"}
    for arguments in (("--detach", "HEAD~2"), ("-c", "topic")):
        git_in(clone, "switch", "-q", *arguments)
        with pytest.raises(BadInput, match=r"HEAD of .* is not branch series") as error:
            export_edits(clone, tree.checkout, patch_dir.root)
        assert "git switch series" in error.value.hint


def ported(patch_dir: PatchDirectory, clone: Path, versions: str) -> PatchedTree:
    """A directory for CUTLASS 4.5.0 with the commit of the patch for 4.2 on top, its conflict resolved."""
    patch_dir.put("first", patch_text(patch_dir.edit(BUILDER, 10, "ten\n")))
    tree = edited(patch_dir, clone, NEWER, "4.5.0")
    text = message("builder: count", "cutlass", versions) + "Patch: cutlass/first\n"
    commit_change(clone, BUILDER, changed(NEWER[BUILDER], 10, "ten\n"), text)
    return tree


@pytest.mark.parametrize(
    ("versions", "expected"),
    [(">=4.2,<4.4.2", "Applies-To: cutlass ==4.5.0\n"), (">=4.5,<4.6", "Applies-To: cutlass >=4.5,<4.6\n")],
)
def test_ported_commit_becomes_a_variant(patch_dir: PatchDirectory, tmp_path: Path, versions: str, expected: str) -> None:
    tree = ported(patch_dir, tmp_path / "clone", versions)
    first = patch_dir.root / "cutlass/first.patch"
    before = first.read_bytes()
    wrote = export_edits(tmp_path / "clone", tree.checkout, patch_dir.root, "4.5.0")
    assert {path.name for path in wrote} == {"first--4.5.0.patch", "series"}
    assert first.read_bytes() == before
    assert expected in (patch_dir.root / "cutlass/first--4.5.0.patch").read_text()
    assert patches.lint(patch_dir.root) == []
    again = patches.apply(tree.checkout, inside("4.5.0"), patch_dir.root, patch_dir.overrides)
    assert text_at(again, BUILDER) == (tmp_path / "clone" / BUILDER).read_text()
    assert export_edits(tmp_path / "clone", tree.checkout, patch_dir.root, "4.5.0") == [], "an export without edits"


def test_ported_commit_for_both_versions_is_refused(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    tree = ported(patch_dir, tmp_path / "clone", ">=4.2,<4.6")
    before = contents(patch_dir.root)
    with pytest.raises(AlreadyExists, match=r"cutlass/first is for cutlass 4\.2 already") as error:
        export_edits(tmp_path / "clone", tree.checkout, patch_dir.root, "4.5.0")
    assert "--overwrite cutlass/first" in error.value.hint
    assert contents(patch_dir.root) == before
    with pytest.raises(NotFound, match="no patch cutlass/fist"):
        export_edits(tmp_path / "clone", tree.checkout, patch_dir.root, "4.5.0", ("cutlass/fist",))
    wrote = export_edits(tmp_path / "clone", tree.checkout, patch_dir.root, "4.5.0", ("cutlass/first",))
    assert [path.name for path in wrote] == ["first.patch"]


def test_narrowed_patch_with_another_diff_is_refused(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    """The commit of a patch for two versions, adapted to one of them, would leave the other without the patch."""
    patch_dir.put("first", patch_text(patch_dir.edit(BUILDER, 20, "x\n"), versions=">=4.2,<4.6"))
    clone = tmp_path / "clone"
    tree = edited(patch_dir, clone, NEWER, "4.5.0")
    (clone / BUILDER).write_text(changed(NEWER[BUILDER], 20, "y\n"))
    narrowed = message("builder: count", "cutlass", ">=4.5,<4.6") + "Patch: cutlass/first\n"
    git_in(clone, "commit", "-qa", "--amend", "-m", narrowed)
    with pytest.raises(AlreadyExists, match=r"excludes cutlass 4\.2, which loses it") as error:
        export_edits(clone, tree.checkout, patch_dir.root, "4.5.0")
    assert "--overwrite cutlass/first" in error.value.hint
    git_in(clone, "commit", "-qa", "--amend", "-m", narrowed.replace(">=4.5,<4.6", "<4.5"))
    with pytest.raises(BadInput, match=r"is for cutlass <4\.5, which excludes cutlass 4\.5\.0"):
        export_edits(clone, tree.checkout, patch_dir.root, "4.5.0")


@pytest.mark.parametrize("subject", ["発射装置: 修正", "…", "!!!"])
def test_subject_without_ascii_letters_needs_a_name(patch_dir: PatchDirectory, tmp_path: Path, subject: str) -> None:
    two_projects(patch_dir)
    clone = tmp_path / "clone"
    tree = edited(patch_dir, clone)
    before = contents(patch_dir.root)
    text = changed(changed(KERNEL, 3, "three\n"), 20, "mine\n")
    commit_change(clone, LAUNCHER, text, message(subject))
    with pytest.raises(BadInput, match="its subject gives no file name") as error:
        export_edits(clone, tree.checkout, patch_dir.root)
    assert "Patch: flashinfer/NAME" in error.value.hint
    assert contents(patch_dir.root) == before
    git_in(clone, "commit", "-q", "--amend", "-m", message(subject) + "Patch: flashinfer/named\n")
    assert {path.name for path in export_edits(clone, tree.checkout, patch_dir.root)} == {"named.patch", "series"}
    assert patches.lint(patch_dir.root) == []
    again = patches.apply(tree.checkout, inside(), patch_dir.root, patch_dir.overrides)
    assert text_at(again, LAUNCHER) == text


@pytest.mark.parametrize(
    ("subject", "trailer", "problem"),
    [
        ("x" * 400, "", "its subject gives a slug of 400 characters: 100 are allowed"),
        ("name", "Patch: flashinfer/..\n", "its trailer Patch gives '..' is no slug"),
        ("name", "Patch: flashinfer/.hidden\n", "its trailer Patch gives '.hidden' is no slug"),
    ],
)
def test_unusable_name_is_refused_before_anything_is_written(
    patch_dir: PatchDirectory, tmp_path: Path, subject: str, trailer: str, problem: str
) -> None:
    two_projects(patch_dir)
    clone = tmp_path / "clone"
    tree = edited(patch_dir, clone)
    before = contents(patch_dir.root)
    commit_change(clone, f"{CUTLASS}/include/fine.h", "fine\n", message("fine", "cutlass", "==4.2.1"))
    text = changed(changed(KERNEL, 3, "three\n"), 20, "mine\n")
    commit_change(clone, LAUNCHER, text, message(subject) + trailer)
    with pytest.raises(BadInput) as error:
        export_edits(clone, tree.checkout, patch_dir.root)
    assert problem in error.value.message
    assert len(error.value.message) < 200
    assert contents(patch_dir.root) == before


@pytest.mark.parametrize("fails_at", [0, 1, 2, 3])
def test_failed_export_changes_nothing(
    patch_dir: PatchDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    two_projects(patch_dir)
    clone = tmp_path / "clone"
    tree = edited(patch_dir, clone)
    git_in(clone, "reset", "-q", "--hard", "HEAD~2")  # removes second and third
    commit_change(clone, f"{CUTLASS}/include/fine.h", "fine\n", message("fine", "cutlass", "==4.2.1"))
    before = contents(patch_dir.root)
    real, real_unlink, count = Path.replace, Path.unlink, 0

    def failing(path: Path, target: Path) -> Path:
        nonlocal count
        count += 1
        if count == fails_at + 1:
            raise OSError(5, "Input/output error")
        return real(path, target)

    def failing_unlink(path: Path, missing_ok: bool = False) -> None:
        if path.name == "second.patch" and fails_at == 3:
            raise OSError(5, "Input/output error")
        real_unlink(path, missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", failing)
        patched.setattr(Path, "unlink", failing_unlink)
        with pytest.raises(OSError, match="Input/output error"):
            export_edits(clone, tree.checkout, patch_dir.root)
    assert contents(patch_dir.root) == before
    wrote = export_edits(clone, tree.checkout, patch_dir.root)
    assert {path.name for path in wrote} == {"second.patch", "third.patch", "fine.patch", "series"}
    assert patches.lint(patch_dir.root) == []


def test_export_of_an_overlapping_patch_changes_nothing(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    """The series that results is checked before it is written."""
    two_projects(patch_dir)
    clone = tmp_path / "clone"
    tree = edited(patch_dir, clone)
    text = message("fine", "cutlass", "==4.2.1") + "Patch: cutlass/first--twin\n"
    commit_change(clone, f"{CUTLASS}/include/fine.h", "fine\n", text)
    before = contents(patch_dir.root)
    with pytest.raises(BadInput, match="Applies-To overlaps that of first") as error:
        export_edits(clone, tree.checkout, patch_dir.root)
    assert str(patch_dir.root / "cutlass/first--twin.patch") in error.value.message
    assert contents(patch_dir.root) == before


BLOCKS = "before\nopen\nint a;\nint b;\nclose\nafter\nend\n" * 4


def test_change_moved_to_an_identical_block_is_exported(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    files = {**BASE, BUILDER: BLOCKS}
    first = BLOCKS.replace("int b;", "int c;", 1)
    third = "int b;".join(BLOCKS.split("int b;")[:3]) + "int c;" + "int b;".join(BLOCKS.split("int b;")[3:])
    patch_dir.put("first", patch_text(patch_dir.diff(files, {BUILDER: first})))
    clone = tmp_path / "clone"
    checkout = checkout_of(tmp_path / "r", files)
    tree = patches.apply(checkout, inside(), patch_dir.root, patch_dir.overrides)
    patches.edit(tree, clone, RECIPE, KEY)
    (clone / BUILDER).write_text(third)
    git_in(clone, "commit", "-qa", "--amend", "--no-edit")
    assert [path.name for path in export_edits(clone, checkout, patch_dir.root)] == ["first.patch"]
    again = patches.apply(checkout, inside(), patch_dir.root, patch_dir.overrides)
    assert text_at(again, BUILDER) == third


def test_commit_of_an_own_header_is_refused(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    """Headers of cutlass_overrides are changed there: a patch of one would not apply above it."""
    two_projects(patch_dir)
    tree, clone, before = edited(patch_dir, tmp_path / "clone"), tmp_path / "clone", contents(patch_dir.root)
    (clone / f"{CUTLASS}/include/sm120kit").mkdir(parents=True, exist_ok=True)
    (clone / f"{CUTLASS}/include/sm120kit/more.hpp").write_text("#pragma once\n")
    git_in(clone, "add", "--all")
    git_in(clone, "commit", "-qm", "overrides: more")
    with pytest.raises(BadInput, match="a header of cutlass_overrides"):
        export_edits(clone, tree.checkout, patch_dir.root)
    assert contents(patch_dir.root) == before


def test_commit_that_another_patch_requires_is_not_dropped(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    two_projects(patch_dir)
    file = patch_dir.root / "flashinfer/third.patch"
    file.write_bytes(file.read_bytes().replace(b"\nUpstream-Status", b"\nRequires: cutlass/second\nUpstream-Status"))
    tree, clone, before = edited(patch_dir, tmp_path / "clone"), tmp_path / "clone", contents(patch_dir.root)
    git_in(clone, "rebase", "-q", "--onto", "HEAD~2", "HEAD~1", "series")
    with pytest.raises(PatchConflict, match="flashinfer/third requires cutlass/second"):
        export_edits(clone, tree.checkout, patch_dir.root)
    assert contents(patch_dir.root) == before


@pytest.mark.parametrize("key", ["pin", "series", "commits"])
def test_record_that_edit_did_not_write_is_not_followed(patch_dir: PatchDirectory, tmp_path: Path, key: str) -> None:
    """Of a directory of somebody else, an export would drop patches that it lacks."""
    two_projects(patch_dir)
    tree, clone = edited(patch_dir, tmp_path / "clone"), tmp_path / "clone"
    git_in(clone, "reset", "-q", "--hard", "HEAD^")
    before = contents(patch_dir.root)
    record = clone / ".git/sm120kit.json"
    sealed, _, text = record.read_text().partition("\n")
    value = json.loads(text)
    record.write_text(f"{sealed}\n{json.dumps(value | {key: ['0' * 64] if key == 'commits' else '0' * 64})}")
    with pytest.raises(Mismatch, match="was not made by"):
        export_edits(clone, tree.checkout, patch_dir.root)
    assert contents(patch_dir.root) == before
