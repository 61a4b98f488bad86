"""Patch series: apply, conflicts and drift, normal form and problems, materialise, export."""

from __future__ import annotations

import functools
import os
import re
import stat
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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
    export_edits,
    git_in,
    inside,
    patch_text,
    refs_of,
    text_at,
    trees,
    two_projects,
    version_h,
    write_blob,
)

from sm120kit import patches
from sm120kit.core.errors import BadInput, Mismatch, PatchConflict, SystemRefused
from sm120kit.patches import _export, format
from sm120kit.patches.patch_records import PatchedTree, PatchState
from sm120kit.sources.git import Repository
from sm120kit.sources.source_records import Checkout, VendoredProject


@pytest.fixture
def patch_dir(tmp_path: Path) -> PatchDirectory:
    return PatchDirectory(tmp_path)


def test_series_applies_in_order_with_overrides_below(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    two_projects(patch_dir)
    checkout = checkout_of(tmp_path / "r", BASE)
    tree = patches.apply(checkout, inside(), patch_dir.root, patch_dir.overrides)
    assert [(p.project, p.slug) for p in tree.patches] == [("cutlass", "first"), ("cutlass", "second"), ("flashinfer", "third")]
    assert text_at(tree, BUILDER) == changed(changed(KERNEL, 10, "ten\n"), 11, "eleven\n")
    assert text_at(tree, LAUNCHER) == changed(KERNEL, 3, "three\n")
    assert text_at(tree, f"{CUTLASS}/include/sm120kit/sf.hpp") == "#pragma once\n"
    log = Repository(checkout.repository).git(
        "log", "--format=%an %aI|%s|%(trailers:key=Patch,valueonly,separator=)", tree.commit
    )
    assert log.stdout.splitlines()[:3] == [
        "Jo Doe 2026-01-05T01:02:03+02:00|launcher: é|flashinfer/third",
        "Jo Doe 2026-01-05T01:02:03+02:00|builder: more|cutlass/second",
        "Jo Doe 2026-01-05T01:02:03+02:00|builder: count|cutlass/first",
    ]
    assert tree.commit in refs_of(checkout.repository)
    assert tree.tree == Repository(checkout.repository).tree_of(tree.commit)


def test_commit_ids_depend_only_on_pin_and_series(
    patch_dir: PatchDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    two_projects(patch_dir)
    first = patches.apply(checkout_of(tmp_path / "r", BASE), inside(), patch_dir.root, patch_dir.overrides)
    home = request.getfixturevalue("hostile_git")
    with (home / ".gitconfig").open("a") as config:
        config.write(
            "[apply]\nwhitespace = fix\nignoreWhitespace = change\n"
            "[diff]\nnoprefix = true\nmnemonicPrefix = true\ncontext = 1\n"
        )
    monkeypatch.setenv("TZ", "Pacific/Chatham")
    monkeypatch.chdir(home)
    second = patches.apply(checkout_of(tmp_path / "elsewhere/r", BASE), inside(), patch_dir.root, patch_dir.overrides)
    assert (second.commit, second.tree, second.patches) == (first.commit, first.tree, first.patches)


def test_conflict_names_file_line_and_hunk_and_changes_no_ref(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    two_projects(patch_dir)
    checkout = checkout_of(tmp_path / "r", {**BASE, BUILDER: changed(KERNEL, 9, "other\n")})
    before = refs_of(checkout.repository)
    with pytest.raises(PatchConflict) as conflict:
        patches.apply(checkout, inside(), patch_dir.root, patch_dir.overrides)
    message = conflict.value.message
    assert "cutlass/first does not apply to cutlass 4.2.1" in message
    assert "include/cutlass/builder.inl:7: hunk 1 @@ -7,7 +7,7 @@" in message
    assert "cutlass/second" in message, "all conflicts are in one message"
    assert "(line 21 of first.patch) does not fit" in message
    assert (patch_dir.root / "cutlass/first.patch").read_text().splitlines()[20].startswith("@@ -7,7 +7,7 @@")
    assert refs_of(checkout.repository) == before
    states = {status.slug: status.state for status in patches.status(checkout, inside(), patch_dir.root)}
    assert states == {"first": PatchState.CONFLICTS, "second": PatchState.CONFLICTS, "third": PatchState.APPLIES}


def test_no_fuzz_and_offsets_are_reported(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    patch_dir.put("first", patch_text(patch_dir.edit(BUILDER, 10, "ten\n")))
    moved = {**BASE, BUILDER: "new\nnew\n" + KERNEL}
    (status,) = patches.status(checkout_of(tmp_path / "r", moved), inside(), patch_dir.root)
    assert status.state is PatchState.APPLIES
    assert status.detail == "include/cutlass/builder.inl: hunk 1 lies 2 lines further down"
    before = {path: path.read_bytes() for path in patch_dir.root.rglob("*") if path.is_file()}
    checkout = checkout_of(tmp_path / "m", moved)
    projects = patches.projects_in_tree(checkout.pin, inside())
    tree = patches.apply(checkout, inside(), patch_dir.root, patch_dir.overrides)
    repository = Repository(checkout.repository)
    exported = _export.export(repository, checkout.commit, tree.commit, projects)
    assert exported[0].patch.content != before[patch_dir.root / "cutlass/first.patch"]
    assert _export.write_back(Repository(checkout.repository), exported, projects, patch_dir.root) == [], (
        "the same change at other lines is not rewritten"
    )
    for line in (7, 8, 9, 11, 12, 13):
        fuzzy = {**BASE, BUILDER: changed(KERNEL, line, "changed\n")}
        (status,) = patches.status(checkout_of(tmp_path / f"f{line}", fuzzy), inside(), patch_dir.root)
        assert status.state is PatchState.CONFLICTS


@pytest.mark.parametrize(("release", "stated"), [("4.2.0", True), ("4.2.1", True), ("4.4.2", False)])
def test_status_states_that_a_release_has_a_fix_of_its_own(
    release: str, stated: bool, patch_dir: PatchDirectory, tmp_path: Path
) -> None:
    text = patch_text(patch_dir.edit(BUILDER, 10, "ten\n")).replace(b"\nOrigin:", f"\nFixed-In: {release}\nOrigin:".encode())
    patch_dir.put("first", text)
    (status,) = patches.status(checkout_of(tmp_path / "r", BASE), inside(), patch_dir.root)
    assert (status.state, f"Fixed-In {release}" in status.detail) == (PatchState.APPLIES, stated)


def test_every_hunk_that_does_not_fit_is_listed(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    """git names the first of a file only."""
    edited = changed(changed(changed(KERNEL, 5, "five\n"), 15, "fifteen\n"), 25, "twentyfive\n")
    patch_dir.put("first", patch_text(patch_dir.diff(BASE, {BUILDER: edited})))
    builder = "inserted\n" * 3 + changed(changed(KERNEL, 6, "six upstream\n"), 24, "x\n")
    (status,) = patches.status(checkout_of(tmp_path / "r", {**BASE, BUILDER: builder}), inside(), patch_dir.root)
    assert status.state is PatchState.CONFLICTS
    assert [line for line in status.detail.splitlines() if "does not fit" in line] == [
        "  include/cutlass/builder.inl:2: hunk 1 @@ -2,7 +2,7 @@ line 1 (line 21 of first.patch) does not fit",
        "  include/cutlass/builder.inl:22: hunk 3 @@ -22,7 +22,7 @@ line 21 (line 39 of first.patch) does not fit",
    ]


@pytest.mark.parametrize("change", [{BUILDER: None}, {f"{CUTLASS}/include/new.h": "mine\n"}])
def test_missing_and_existing_files_conflict(patch_dir: PatchDirectory, tmp_path: Path, change: dict[str, str | None]) -> None:
    edited = changed(KERNEL, 10, "ten\n")
    patch_dir.put("first", patch_text(patch_dir.diff(BASE, {BUILDER: edited, f"{CUTLASS}/include/new.h": "ours\n"})))
    files = {name: text for name, text in {**BASE, **change}.items() if text is not None}
    (status,) = patches.status(checkout_of(tmp_path / "r", files), inside(), patch_dir.root)
    assert status.state is PatchState.CONFLICTS
    assert re.search("does not exist in index|already exists in index", status.detail)


def test_already_upstream_names_patch_and_remedy(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    two_projects(patch_dir)
    checkout = checkout_of(tmp_path / "r", {**BASE, LAUNCHER: changed(KERNEL, 3, "three\n")})
    with pytest.raises(PatchConflict, match=r"flashinfer/third is already in flashinfer 0\.6\.6") as error:
        patches.apply(checkout, inside(), patch_dir.root, patch_dir.overrides)
    assert "Applies-To" in error.value.hint
    assert [status.state for status in patches.status(checkout, inside(), patch_dir.root)][2] is PatchState.ALREADY_UPSTREAM


def test_added_lines_are_not_added_twice(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    """Repetitive code accepts an addition a second time at another offset; the existing addition must be detected."""
    blocks = "".join("a\nb\nc\nx\ny\nz\n" for _ in range(4))
    before = {**BASE, BUILDER: blocks}
    after = {**BASE, BUILDER: blocks.replace("c\nx\n", "c\nnew\nx\n", 2).replace("new\n", "", 1)}
    patch_dir.put("first", patch_text(patch_dir.diff(before, {BUILDER: after[BUILDER]})))
    for files, state in ((before, PatchState.APPLIES), (after, PatchState.ALREADY_UPSTREAM)):
        (status,) = patches.status(checkout_of(tmp_path / state, files), inside(), patch_dir.root)
        assert status.state is state


def test_variant_is_chosen_by_version(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    newer = {**BASE, BUILDER: changed(KERNEL, 9, "nine\n"), VERSION_H: version_h("4.5.0")}
    patch_dir.put("first", patch_text(patch_dir.edit(BUILDER, 10, "ten\n")))
    patch_dir.put("first--4.4.2", patch_text(patch_dir.edit(BUILDER, 10, "ten\n", newer), versions=">=4.4.2"))
    for files, version, slug in ((BASE, "4.2.1", "first"), (newer, "4.5.0", "first--4.4.2")):
        checkout = checkout_of(tmp_path / version, files)
        tree = patches.apply(checkout, inside(version), patch_dir.root, patch_dir.overrides)
        assert [patch.slug for patch in tree.patches] == [slug]
        states = [status.state for status in patches.status(checkout, inside(version), patch_dir.root) if status.slug != slug]
        assert states == [PatchState.NOT_FOR_THIS_VERSION]


@pytest.mark.parametrize(
    ("left", "right", "shared"),
    [
        (">=4.2,<4.4.2", ">=4.4.2", ""),
        (">=4.2,<=4.4.2", ">=4.4.2", "4.4.2"),
        ("<4.2", "<4.1", "0"),
        (">4.2,<4.3", ">=4.2.1", "4.2.1"),
        (">4.2", "<4.3,>4.1", "4.2.0.1"),
        ("==4.2.*", "==4.2.1", "4.2.1"),
        ("==0.7.2", "==0.7.2.post1", ""),
        (">=0.7.2.post1", "~=0.7.2", "0.7.2.post1"),
        ("!=4.2", "==4.2", ""),
        (">=4.4,<4.2", ">=4", ""),
    ],
)
def test_overlap_of_version_ranges(left: str, right: str, shared: str) -> None:
    from packaging.specifiers import SpecifierSet

    assert patches.format.overlap(SpecifierSet(left), SpecifierSet(right)) == shared
    assert bool(patches.format.overlap(SpecifierSet(right), SpecifierSet(left))) == bool(shared)


def test_lint_reports_every_problem_with_file_and_line(patch_dir: PatchDirectory) -> None:
    good = patch_text(patch_dir.edit(BUILDER, 10, "ten\n"))
    patch_dir.put("bare", good.replace(b"Origin: seen in a table of tiles\nMatters-For: everybody with a\n  small GPU\n", b""))
    patch_dir.put(
        "wrong", good.replace(b"Pending", b"Perhaps").replace(b"Drop-When", b"Drop-Wen").replace(b">=4.2,", b">=4.2;")
    )
    patch_dir.put("alien", good.replace(b"Applies-To: cutlass", b"Applies-To: nccl"))
    patch_dir.put("twin", good)
    patch_dir.put("twin--b", good.replace(b">=4.2,<4.4.2", b">=4.4"))
    patch_dir.put("orphan", good, listed=False)
    (patch_dir.root / "cutlass/series").open("a").write("# comment\nghost\ntwin\nNot A Slug\n")
    report = "\n".join(str(problem).removeprefix(f"{patch_dir.root}/cutlass/") for problem in patches.lint(patch_dir.root))
    for expected in [
        "bare.patch:12: no trailer Origin",
        "bare.patch:12: no trailer Matters-For",
        "wrong.patch:8: Applies-To has '>=4.2;<4.4.2', which is not a version range",
        "wrong.patch:9: Upstream-Status is 'Perhaps'",
        "wrong.patch:15: unknown trailer Drop-Wen; did you mean Drop-When?",
        "wrong.patch:15: no trailer Drop-When",
        "alien.patch:8: Applies-To names 'nccl'",
        "twin--b.patch:8: Applies-To overlaps that of twin: both hold for cutlass 4.4",
        "orphan.patch:1: not in",
        "series:7: there is no file ghost.patch",
        "series:8: twin is in line 4 already",
        "series:9: 'Not A Slug' is no slug",
    ]:
        assert expected in report, report
    assert len(report.splitlines()) == 12, report
    with pytest.raises(BadInput, match="12 problems"):
        patches.load(patch_dir.root, "cutlass")


MALFORMED = [
    (b"include/cutlass/builder.inl", b"../builder.inl", "leaves the project's tree"),
    (b"include/cutlass/builder.inl", b"/etc/passwd", "is absolute|not in its shortest form|leaves"),
    (b"include/cutlass/builder.inl", b".git/config", "belongs to git"),
    (b"include/cutlass/builder.inl", b".GIT/config", "belongs to git"),
    (b"include/cutlass/builder.inl", b"include//builder.inl", "shortest form"),
    (b"b/include/cutlass/builder.inl\nindex", b"b/other\nindex", "not part of a git diff of a plain path"),
    (b"+++ b/include/cutlass/builder.inl", b"+++ b/../../x", "ends early"),
    (b" 100644\n", b" 120000\n", "mode 120000"),
    (b"index ", b"old mode 100644\nnew mode 120000\nindex ", "mode 120000"),
    (b"index ", b"new file mode 160000\nindex ", "mode 160000"),
    (b"index ", b"rename from a\nrename to ../b\nindex ", "no hunk follows"),
    (b"index ", b"GIT binary patch\nindex ", "binary"),
    (b"@@ -7,7 +7,7 @@", b"@@ -7,7 +7,8 @@", "ends early"),
    (b"@@ -7,7 +7,7 @@", b"@@ -7,5 +7,5 @@", "not part of a git diff"),
    (b" line 13\n", b" line 13\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-x\n+y\n", "not part of a git diff"),
    (b"Why it", b"Why\r\nit", "not in normal form"),
    (b"Why it", b"Why \xff it", "not UTF-8"),
    (b"Subject: ", b"Subject: [PATCH] ", "starts with \\[PATCH\\]"),
    (b"From 0000000", b"From 0000001", "not in normal form"),
    (b"Date: Mon, ", b"Date: ", "not in normal form"),
    (b"Date: ", b"Date: some ", "Date is"),
    (b"Jo Doe <jo@example.invalid>", b"nobody", "From is"),
    (b"Jo Doe <jo@example.invalid>", b"a:" * 5000, "From is"),
    (b"\nWhy", b"X-Mailer: me\n\nWhy", "not in normal form"),
    (b" line 13\n", b" line 13\n-- \n2.39.5\n", "not in normal form"),
]


@pytest.mark.parametrize(("old", "new", "problem"), MALFORMED)
def test_malformed_patches_are_rejected(
    patch_dir: PatchDirectory, tmp_path: Path, old: bytes, new: bytes, problem: str
) -> None:
    good = patch_text(patch_dir.edit(BUILDER, 10, "ten\n"))
    assert old in good
    patch_dir.put("first", good)
    assert patches.lint(patch_dir.root) == []
    (patch_dir.root / "cutlass/first.patch").write_bytes(good.replace(old, new))
    with pytest.raises(BadInput, match=problem):
        patches.apply(checkout_of(tmp_path / "r", BASE), inside(), patch_dir.root, patch_dir.overrides)


@pytest.mark.parametrize(("name", "limit"), [("series", 1), ("large.patch", 16)])
def test_files_of_a_series_have_a_limit(patch_dir: PatchDirectory, name: str, limit: int) -> None:
    (patch_dir.root / "flashinfer").mkdir(parents=True, exist_ok=True)
    (patch_dir.root / "flashinfer/series").write_text("large\n")
    with (patch_dir.root / "flashinfer" / name).open("ab") as file:
        file.truncate(2**40)
    with pytest.raises(BadInput, match=rf"{name} cannot be read: it has more than {limit} MiB") as refused:
        patches.load(patch_dir.root, "flashinfer")
    assert refused.value.hint


def test_no_patch_is_written_that_a_series_cannot_have(patch_dir: PatchDirectory) -> None:
    content = patch_text(patch_dir.edit(BUILDER, 10, "ten\n"))
    large = content.replace(b"Applies-To", b"x\n" * 2**23 + b"\nApplies-To", 1)
    assert [format.parse("cutlass", Path("x.patch"), each)[0] is None for each in (content, large)] == [False, True]


def test_patch_does_not_follow_links_in_the_tree(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    """A patch whose text is harmless neither follows nor rewrites a link that the tree has at its path."""
    below = f"{CUTLASS}/include/cutlass/gemm"
    files = {**BASE, f"{below}/kernel.h": KERNEL}
    patch_dir.put("first", patch_text(patch_dir.edit(f"{below}/kernel.h", 10, "ten\n", files)))
    for name, link in (("dir", below), ("file", f"{below}/kernel.h")):
        checkout = checkout_of(tmp_path / name, {key: text for key, text in files.items() if not key.startswith(link)})
        repository = Repository(checkout.repository)
        with repository.index(checkout.tree) as index:
            target = "../../../../csrc" if name == "dir" else KERNEL
            index.git("update-index", "--add", "--cacheinfo", f"120000,{write_blob(repository, target.encode())},{link}")
            tree = index.write_tree()
        linked = Checkout(checkout.pin, checkout.repository, repository.commit_tree(tree, None, "b"), tree)
        with pytest.raises((BadInput, PatchConflict)):
            patches.apply(linked, inside(), patch_dir.root, patch_dir.overrides)


def test_patch_of_another_projects_files_is_rejected(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    text = patch_text(patch_dir.edit(BUILDER, 10, "ten\n", below=""), "flashinfer", ">=0.6")
    patch_dir.put("greedy", text, "flashinfer")
    with pytest.raises(BadInput, match=r"builder\.inl is not a file of flashinfer but of cutlass"):
        patches.apply(checkout_of(tmp_path / "r", BASE), inside(), patch_dir.root, patch_dir.overrides)


def test_override_of_upstream_header_is_rejected(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    (patch_dir.overrides / "include/cutlass").mkdir(parents=True)
    (patch_dir.overrides / "include/cutlass/version.h").write_text("mine\n")
    with pytest.raises(BadInput, match=r"would hide 3rdparty/cutlass/include/cutlass/version\.h"):
        patches.apply(checkout_of(tmp_path / "r", BASE), inside(), patch_dir.root, patch_dir.overrides)


@pytest.mark.parametrize(
    ("content", "stated"),
    [
        (version_h("4.4.2"), "states version 4.4.2"),
        (version_h("4.2.1").replace("PATCH", "BUILD"), "states no version"),
        (None, "states no version"),
    ],
)
def test_wrong_cutlass_version_is_rejected(patch_dir: PatchDirectory, tmp_path: Path, content: str | None, stated: str) -> None:
    files = {name: text for name, text in {**BASE, VERSION_H: content}.items() if text is not None}
    checkout = checkout_of(tmp_path / "r", files)
    for call in (
        lambda: patches.status(checkout, inside(), patch_dir.root),
        lambda: patches.apply(checkout, inside(), patch_dir.root, patch_dir.overrides),
    ):
        with pytest.raises(Mismatch, match=f"version\\.h {stated}; the recipe has cutlass 4\\.2\\.1") as caught:
            call()
        assert caught.value.hint


def test_wrong_path_of_vendored_project_is_rejected(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no directory elsewhere"):
        patches.status(checkout_of(tmp_path / "r", BASE), (VendoredProject("cutlass", "elsewhere", "1"),), patch_dir.root)


def plain_tree(path: Path, files: dict[str, str]) -> PatchedTree:
    checkout = checkout_of(path, files)
    return PatchedTree(checkout, (), checkout.commit, checkout.tree, ())


def files_below(directory: Path) -> dict[str, str]:
    return {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*") if path.is_file()}


def age(directory: Path) -> dict[str, int]:
    """Set the modification time of every file back and return the times."""
    for path in directory.rglob("*"):
        if path.is_file():
            os.utime(path, ns=(10**18, 10**18))
    return times(directory)


def times(directory: Path) -> dict[str, int]:
    return {str(path.relative_to(directory)): path.stat().st_mtime_ns for path in directory.rglob("*") if path.is_file()}


def test_materialise_touches_only_what_differs(tmp_path: Path) -> None:
    first = plain_tree(tmp_path / "r1", {**BASE, "gone/file": "x\n"})
    second = plain_tree(tmp_path / "r2", {**BASE, "setup.py": "two\n", "new/file": "y\n"})
    work = tmp_path / "work"
    patches.materialise(first, work)
    assert files_below(work) == {**BASE, "gone/file": "x\n"}
    assert not (work / ".git").exists()
    old = age(work)
    patches.materialise(first, work)
    assert times(work) == old
    patches.materialise(second, work)
    assert files_below(work) == {**BASE, "setup.py": "two\n", "new/file": "y\n"}
    assert {name for name, when in times(work).items() if when != old.get(name)} == {"setup.py", "new/file"}
    assert not (work / "gone").exists()


def test_materialise_repairs_leftovers_and_edits(tmp_path: Path) -> None:
    tree = plain_tree(tmp_path / "r", BASE)
    work = tmp_path / "work"
    patches.materialise(tree, work)
    old = age(work)
    (work / "setup.py").write_text("own\n")
    os.utime(work / "setup.py", ns=(10**18, 10**18))  # as long as before, as old as before
    (work / LAUNCHER).unlink()
    (work / BUILDER).chmod(0o755)
    (work / "stray/.git").mkdir(parents=True)
    (work / "stray/file").write_text("from an interrupted call\n")
    (work / ".gitignore").write_text("*\n")
    (tmp_path / ".work.index.lock").write_text("left behind\n")
    (tmp_path / ".work.index").write_bytes(b"DIRC cut o")
    patches.materialise(tree, work)
    assert files_below(work) == BASE
    assert not (work / "stray").exists()
    assert not (work / BUILDER).stat().st_mode & stat.S_IXUSR
    assert {name for name, when in times(work).items() if when != old[name]} <= {"setup.py", LAUNCHER, BUILDER}


@pytest.mark.parametrize("links", ["csrc", "csrc/launcher.cu"])
def test_materialise_does_not_follow_links(tmp_path: Path, links: str) -> None:
    tree = plain_tree(tmp_path / "r", BASE)
    work, outside = tmp_path / "work", tmp_path / "outside"
    patches.materialise(tree, work)
    outside.mkdir()
    (outside / "launcher.cu").write_text("precious\n")
    (work / LAUNCHER).unlink()
    if links == "csrc":
        (work / "csrc").rmdir()
    (work / links).symlink_to(outside if links == "csrc" else outside / "launcher.cu")
    patches.materialise(tree, work)
    assert (outside / "launcher.cu").read_text() == "precious\n"
    assert (work / LAUNCHER).read_text() == KERNEL
    assert not (work / links).is_symlink()


def test_materialise_rejects_foreign_directory(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis").write_text("years\n")
    with pytest.raises(SystemRefused, match="not made by sm120kit"):
        patches.materialise(plain_tree(tmp_path / "r", BASE), home)
    assert files_below(home) == {"thesis": "years\n"}


def test_export_restores_the_series(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    two_projects(patch_dir)
    patch_dir.put("first--later", patch_text(patch_dir.edit(BUILDER, 20, "x\n"), versions=">=4.4.2"))
    checkout = checkout_of(tmp_path / "r", BASE)
    tree = patches.apply(checkout, inside(), patch_dir.root, patch_dir.overrides)
    before = {path: path.read_bytes() for path in patch_dir.root.rglob("*") if path.is_file()}
    projects = patches.projects_in_tree(checkout.pin, inside())
    exported = _export.export(Repository(checkout.repository), f"{tree.patches[0].commit}^", tree.commit, projects)
    assert [commit.patch.slug for commit in exported] == ["first", "second", "third"]
    assert _export.write_back(Repository(checkout.repository), exported, projects, patch_dir.root) == []
    assert {path: path.read_bytes() for path in patch_dir.root.rglob("*") if path.is_file()} == before
    (patch_dir.root / "cutlass/series").write_text("# why\nfirst  # and this\n\nsecond\nfirst--later\n# end\n")
    wrote = _export.write_back(Repository(checkout.repository), exported[1:], projects, patch_dir.root)
    assert {path.name for path in wrote} == {"first.patch", "series"}
    assert (patch_dir.root / "cutlass/series").read_text() == "\nsecond\nfirst--later\n# end\n"
    assert patches.lint(patch_dir.root) == []


def test_normal_form_equals_git_format_patch(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    two_projects(patch_dir)
    checkout = checkout_of(tmp_path / "r", BASE)
    tree = patches.apply(checkout, inside(), patch_dir.root, patch_dir.overrides)
    options = (
        "-1 --stdout -p --zero-commit --no-signature --full-index -N --subject-prefix= --no-renames --no-encode-email-headers"
    )
    for applied, below in zip(tree.patches, (CUTLASS, CUTLASS, ""), strict=True):
        relative = [f"--relative={below}"] if below else []
        output = Repository(checkout.repository).git("format-patch", *options.split(), *relative, applied.commit).raw
        file = patch_dir.root / applied.project / f"{applied.slug}.patch"
        assert output.replace(f"Patch: {applied.project}/{applied.slug}\n".encode(), b"") == file.read_bytes()


LINES = st.lists(
    st.sampled_from(["a", "b", "", "-- ", "--- a/x", "+++ b/x", "@@ -1 +1 @@", "é\r", "diff --git a/x b/x"]), max_size=12
)


EDITS = st.lists(st.tuples(LINES, LINES, st.sampled_from(["", "\n"]), st.booleans()), min_size=1, max_size=8)


@settings(max_examples=5, deadline=None)
@given(edits=EDITS)
def test_apply_and_export_round_trip_any_edit(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[list[str], list[str], str, bool]]
) -> None:
    path = tmp_path_factory.mktemp("edit")
    patch_dir, old, new = PatchDirectory(path), dict(BASE), dict(BASE)
    for number, (before, after, end, created) in enumerate(edits):
        name = f"{CUTLASS}/include/cutlass/a file {number}.h"
        new[name] = "\n".join(after) + end
        if not created:
            old[name] = "\n".join(before) + "\n"
    if old == new:
        return
    content = patch_text(patch_dir.diff(old, new))
    patch_dir.put("edit", content)
    checkout = checkout_of(path / "r", old)
    tree = patches.apply(checkout, inside(), patch_dir.root, patch_dir.overrides)
    repository = Repository(checkout.repository)
    assert tree.tree == trees(repository, new)[0]
    exported = _export.export(repository, checkout.commit, tree.commit, patches.projects_in_tree(checkout.pin, inside()))
    assert [(commit.patch.slug, commit.patch.content) for commit in exported] == [("edit", content)]


def test_edit_and_export_edits(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    two_projects(patch_dir)
    checkout = checkout_of(tmp_path / "r", BASE)
    tree = patches.apply(checkout, inside(), patch_dir.root, patch_dir.overrides)
    clone = tmp_path / "clone"
    patches.edit(tree, clone, RECIPE, KEY)
    assert export_edits(clone, checkout, patch_dir.root) == []
    (clone / LAUNCHER).write_text(changed(changed(KERNEL, 3, "three\n"), 4, "four\n"))
    with pytest.raises(BadInput, match=r"uncommitted changes:\n M csrc/launcher\.cu"):
        export_edits(clone, checkout, patch_dir.root)

    def commit(message: str) -> None:
        git_in(clone, "commit", "-qam", message)

    commit("launcher: New thing\n\nBecause.")
    assert {path.name for path in export_edits(clone, checkout, patch_dir.root)} == {"launcher-new-thing.patch", "series"}
    bare = patches.find(patch_dir.root, "launcher-new-thing")
    assert bare.trailer("Applies-To") == "flashinfer ==0.6.6" and bare.trailer("Origin").startswith("TODO")
    git_in(clone, "reset", "-q", "--soft", "HEAD^")
    commit("launcher: New thing\n\nBecause.\n\n" + TRAILERS.format(project="flashinfer", versions="==0.6.6"))
    wrote = export_edits(clone, checkout, patch_dir.root)
    assert {path.name for path in wrote} == {"launcher-new-thing.patch"}
    assert (patch_dir.root / "flashinfer/series").read_text() == "third\nlauncher-new-thing\n"
    again = patches.apply(checkout, inside(), patch_dir.root, patch_dir.overrides)
    assert text_at(again, LAUNCHER) == (clone / LAUNCHER).read_text()
    assert again.patches[:3] == tree.patches
    (clone / LAUNCHER).write_text("x\n")
    (clone / BUILDER).write_text("y\n")
    commit("both\n\n" + TRAILERS.format(project="flashinfer", versions="==0.6.6"))
    with pytest.raises(BadInput, match="touches cutlass and flashinfer"):
        export_edits(clone, checkout, patch_dir.root)
    with pytest.raises(Mismatch, match="not made by"):
        export_edits(tmp_path, checkout, patch_dir.root)
    with pytest.raises(SystemRefused, match="not empty"):
        patches.edit(tree, clone, RECIPE, KEY)
    with pytest.raises(SystemRefused) as refused:
        patches.edit(tree, clone / LAUNCHER, RECIPE, KEY)
    assert str(clone / LAUNCHER) in str(refused.value) and refused.value.hint


def test_export_edits_runs_no_program_of_the_repository(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    """The edited repository may come from somebody else, and its configuration may name programs."""
    two_projects(patch_dir)
    checkout = checkout_of(tmp_path / "r", BASE)
    tree = patches.apply(checkout, inside(), patch_dir.root, patch_dir.overrides)
    clone, mark = tmp_path / "clone", tmp_path / "program-ran"
    patches.edit(tree, clone, RECIPE, KEY)
    evil = tmp_path / "evil"
    evil.write_text(f"#!/bin/sh\ntouch {mark}\nexit 1\n")
    evil.chmod(0o755)
    with (clone / ".git/config").open("a") as config:
        config.write(f"[log]\nshowSignature = true\n[gpg]\nprogram = {evil}\n[core]\nfsmonitor = {evil}\n")
        config.write(f'[filter "evil"]\nclean = {evil}\nsmudge = {evil}\n[uploadpack]\npackObjectsHook = {evil}\n')
        config.write(f'[remote "origin"]\nurl = {tmp_path}\npromisor = true\nuploadpack = {evil}\n')
    (clone / ".git/info/attributes").write_text("* filter=evil\n")
    (clone / LAUNCHER).touch()
    signed = sign(clone)
    assert export_edits(clone, checkout, patch_dir.root) == []
    assert not mark.exists()
    assert signed in (clone / ".git/refs/heads/series").read_text()


def test_export_edits_runs_no_program_of_a_repository_inside(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    """A work tree may have the work tree of somebody else's repository as a submodule."""
    checkout = checkout_of(tmp_path / "r", BASE)
    clone, mark = tmp_path / "clone", tmp_path / "program-ran"
    patches.edit(patches.apply(checkout, inside(), patch_dir.root, patch_dir.overrides), clone, RECIPE, KEY)
    other = clone / "other"
    for directory in (other, clone):
        subprocess.run(["git", "init", "--quiet", directory], check=True)
        (directory / "file").write_text("one\n")
        git_in(directory, "add", "--all")
        git_in(directory, "commit", "--quiet", "--message=other: add")
    with (other / ".git/config").open("a") as config:
        config.write(f'[filter "evil"]\nclean = touch {mark}\n')
    (other / ".git/info").mkdir(exist_ok=True)
    (other / ".git/info/attributes").write_text("* filter=evil\n")
    (other / "file").write_text("two\n")
    with pytest.raises(BadInput):
        export_edits(clone, checkout, patch_dir.root)
    assert not mark.exists()


def sign(clone: Path) -> str:
    """Replace the newest commit by a signed copy, which git would pass to gpg; returns its id."""
    run = functools.partial(subprocess.run, cwd=clone / ".git", check=True, capture_output=True)
    head, blank, body = run(["git", "cat-file", "commit", "HEAD"]).stdout.partition(b"\n\n")
    signature = b"\ngpgsig -----BEGIN PGP SIGNATURE-----\n \n x\n -----END PGP SIGNATURE-----"
    commit = run(["git", "hash-object", "-t", "commit", "-w", "--stdin"], input=head + signature + blank + body).stdout
    run(["git", "update-ref", "refs/heads/series", commit.decode().strip()])
    return commit.decode().strip()


def test_patch_check_command(patch_dir: PatchDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    from typer.testing import CliRunner

    from sm120kit.cli import app

    monkeypatch.setenv("SM120KIT_DATA", str(tmp_path))
    (tmp_path / "recipes").mkdir()
    file = patch_dir.put("first", patch_text(patch_dir.edit(BUILDER, 10, "ten\n")))
    runner = CliRunner()
    assert runner.invoke(app, ["patch", "check"]).exit_code == 0
    file.write_bytes(file.read_bytes().replace(b"Origin", b"Orgin"))
    result = runner.invoke(app, ["patch", "check", "--json"])
    assert result.exit_code == 1
    assert [problem["line"] for problem in json.loads(result.stdout)["problems"]] == [15, 10]


def test_patches_of_this_repository_are_well_formed() -> None:
    root = Path(__file__).parents[2] / "patches"
    assert patches.lint(root) == []
    assert patches.projects(root) == ["b12x", "cutlass", "flashinfer", "sglang", "vllm"]
