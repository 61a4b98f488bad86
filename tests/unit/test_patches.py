"""A series applies whole or not at all, gives the same commits everywhere, and tells everything that is wrong with it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sm120kit import patches
from sm120kit.errors import BadPatch, BadRecipe, PatchAlreadyUpstream, PatchConflict, StateUnwritable
from sm120kit.gitrepo import Repository
from sm120kit.patches import export
from sm120kit.records import Checkout, GitPin, Inside, PatchedTree, PatchState

CUTLASS = "3rdparty/cutlass"
KERNEL = "".join(f"line {n}\n" for n in range(1, 31))
BASE = {
    "csrc/launcher.cu": KERNEL,
    "setup.py": "one\n",
    f"{CUTLASS}/include/cutlass/builder.inl": KERNEL,
    f"{CUTLASS}/include/cutlass/version.h": "4.2.1\n",
}
TRAILERS = """\
Applies-To: {project} {versions}
Upstream-Status: Pending
Origin: seen in a table of tiles
Matters-For: everybody with a
  small GPU
No-Effect-For: the rest
Evidence: tests/unit/test_patches.py
Drop-When: never
"""


def trees(repository: Repository, *versions: dict[str, str]) -> list[str]:
    """Store some sets of files as trees, in one run of git."""
    stream = b""
    for number, files in enumerate(versions):
        stream += f"commit refs/heads/made\nmark :{number + 1}\ncommitter a <a> 0 +0000\ndata 0\ndeleteall\n".encode()
        for name, text in files.items():
            content = text.encode()
            stream += f'M 100644 inline "{name}"\ndata {len(content)}\n'.encode() + content + b"\n"
        stream += f"get-mark :{number + 1}\n".encode()
    commits = repository.git("fast-import", "--quiet", "--force", "--cat-blob-fd=1", stdin=stream).stdout.split()
    return repository.git("rev-parse", *(f"{commit}^{{tree}}" for commit in commits)).stdout.split()


def checkout_of(path: Path, files: dict[str, str], version: str = "0.6.6") -> Checkout:
    repository = Repository.init(path)
    (tree,) = trees(repository, files)
    return Checkout(
        GitPin("flashinfer", "file:///nowhere", "0" * 40, version), path, repository.commit_tree(tree, None, "b"), tree
    )


_diffs: dict[str, bytes] = {}


def diff_of(path: Path, files: dict[str, str], change: dict[str, str | None], below: str) -> bytes:
    """What git says about changing some of ``files``."""
    key = repr((files, change, below))
    if key not in _diffs:
        repository = Repository.init(path)
        after = {name: text for name, text in {**files, **change}.items() if text is not None}
        _diffs[key] = export.diff(repository, *trees(repository, files, after), below)
    return _diffs[key]


def patch_text(diff: bytes, project: str = "cutlass", versions: str = ">=4.2,<4.4.2", subject: str = "builder: count") -> bytes:
    head = f"""\
From {"0" * 40} Mon Sep 17 00:00:00 2001
From: Jo Doe <jo@example.invalid>
Date: Mon, 5 Jan 2026 01:02:03 +0200
Subject: {subject}

Why it exists.

{TRAILERS.format(project=project, versions=versions)}
"""
    return head.encode() + diff


def changed(text: str, line: int, to: str) -> str:
    return text.replace(f"line {line}\n", to)


class Shelf:
    """A patches directory that tests fill."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.root = path / "patches"
        self.overrides = path / "overrides"
        self.made = 0

    def put(self, slug: str, content: bytes, project: str = "cutlass", *, listed: bool = True) -> Path:
        directory = self.root / project
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{slug}.patch").write_bytes(content)
        if listed:
            with (directory / "series").open("a") as series:
                series.write(f"{slug}\n")
        return directory / f"{slug}.patch"

    def diff(self, files: dict[str, str], change: dict[str, str | None], below: str = CUTLASS) -> bytes:
        self.made += 1
        return diff_of(self.path / f"diff{self.made}", files, change, below)

    def edit(self, name: str, old: int, to: str, base: dict[str, str] = BASE, below: str = CUTLASS) -> bytes:
        return self.diff(base, {name: changed(base[name], old, to)}, below)


BUILDER = f"{CUTLASS}/include/cutlass/builder.inl"
LAUNCHER = "csrc/launcher.cu"


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


def inside(version: str = "4.2.1") -> tuple[Inside, ...]:
    return (Inside("cutlass", CUTLASS, version),)


def two_projects(shelf: Shelf) -> None:
    """Two cutlass patches, the second on top of the first, and one for flashinfer; and an override."""
    first = {**BASE, BUILDER: changed(KERNEL, 10, "ten\n")}
    shelf.put("first", patch_text(shelf.edit(BUILDER, 10, "ten\n")))
    shelf.put("second", patch_text(shelf.edit(BUILDER, 11, "eleven\n", first), subject="builder: more"))
    launcher = patch_text(shelf.edit(LAUNCHER, 3, "three\n", below=""), "flashinfer", "==0.6.*", "launcher: é")
    shelf.put("third", launcher, "flashinfer")
    assert patches.lint(shelf.root), "the accent makes git add headers"
    shelf.put("third", patches.normal_form(parsed(launcher, "flashinfer")), "flashinfer", listed=False)
    (shelf.overrides / "include/sm120kit").mkdir(parents=True)
    (shelf.overrides / "include/sm120kit/sf.hpp").write_text("#pragma once\n")


def parsed(content: bytes, project: str = "cutlass") -> patches.Patch:
    patch, _ = patches.form.parse(project, Path("x.patch"), content)
    assert patch is not None
    return patch


def text_at(tree: PatchedTree, path: str) -> str:
    return Repository(tree.checkout.repository).read(tree.tree, path).decode()


def snapshot(repository: Path) -> str:
    return Repository(repository).git("for-each-ref").stdout


def test_series_applies_in_order_with_overrides_below(shelf: Shelf, tmp_path: Path) -> None:
    two_projects(shelf)
    checkout = checkout_of(tmp_path / "r", BASE)
    tree = patches.apply(checkout, inside(), shelf.root, shelf.overrides)
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
    assert tree.commit in snapshot(checkout.repository)
    assert tree.tree == Repository(checkout.repository).tree_of(tree.commit)


def test_commits_depend_on_pin_and_series_alone(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    two_projects(shelf)
    here = patches.apply(checkout_of(tmp_path / "r", BASE), inside(), shelf.root, shelf.overrides)
    home = request.getfixturevalue("hostile_git")
    with (home / ".gitconfig").open("a") as config:
        config.write(
            "[apply]\nwhitespace = fix\nignoreWhitespace = change\n"
            "[diff]\nnoprefix = true\nmnemonicPrefix = true\ncontext = 1\n"
        )
    monkeypatch.setenv("TZ", "Pacific/Chatham")
    monkeypatch.chdir(home)
    there = patches.apply(checkout_of(tmp_path / "elsewhere/r", BASE), inside(), shelf.root, shelf.overrides)
    assert (there.commit, there.tree, there.patches) == (here.commit, here.tree, here.patches)


def test_conflict_names_file_line_and_hunk_and_leaves_no_trace(shelf: Shelf, tmp_path: Path) -> None:
    two_projects(shelf)
    checkout = checkout_of(tmp_path / "r", {**BASE, BUILDER: changed(KERNEL, 9, "other\n")})
    before = snapshot(checkout.repository)
    with pytest.raises(PatchConflict) as conflict:
        patches.apply(checkout, inside(), shelf.root, shelf.overrides)
    said = conflict.value.message
    assert "cutlass/first does not apply to cutlass 4.2.1" in said
    assert "include/cutlass/builder.inl:7: hunk 1 @@ -7,7 +7,7 @@" in said
    assert "cutlass/second" in said, "all conflicts are told at once"
    assert "(line 21 of first.patch) does not fit" in said
    assert (shelf.root / "cutlass/first.patch").read_text().splitlines()[20].startswith("@@ -7,7 +7,7 @@")
    assert snapshot(checkout.repository) == before
    states = {item.slug: item.state for item in patches.status(checkout, inside(), shelf.root)}
    assert states == {"first": PatchState.CONFLICTS, "second": PatchState.CONFLICTS, "third": PatchState.APPLIES}


def test_no_fuzz_but_offsets_are_told(shelf: Shelf, tmp_path: Path) -> None:
    shelf.put("first", patch_text(shelf.edit(BUILDER, 10, "ten\n")))
    moved = {**BASE, BUILDER: "new\nnew\n" + KERNEL}
    (status,) = patches.status(checkout_of(tmp_path / "r", moved), inside(), shelf.root)
    assert status.state is PatchState.APPLIES
    assert status.detail == "include/cutlass/builder.inl: hunk 1 lies 2 lines further down"
    before = {path: path.read_bytes() for path in shelf.root.rglob("*") if path.is_file()}
    checkout = checkout_of(tmp_path / "m", moved)
    parts = patches.parts_of(checkout.pin, inside())
    tree = patches.apply(checkout, inside(), shelf.root, shelf.overrides)
    exported = export.export(Repository(checkout.repository), checkout.commit, tree.commit, parts)
    assert exported[0].content != before[shelf.root / "cutlass/first.patch"]
    assert export.write_back(exported, parts, shelf.root) == [], "the same change somewhere else is no news"
    for line in (7, 8, 9, 11, 12, 13):
        fuzzy = {**BASE, BUILDER: changed(KERNEL, line, "changed\n")}
        (status,) = patches.status(checkout_of(tmp_path / f"f{line}", fuzzy), inside(), shelf.root)
        assert status.state is PatchState.CONFLICTS


@pytest.mark.parametrize("change", [{BUILDER: None}, {f"{CUTLASS}/include/new.h": "mine\n"}])
def test_missing_and_existing_files_conflict(shelf: Shelf, tmp_path: Path, change: dict[str, str | None]) -> None:
    edited = changed(KERNEL, 10, "ten\n")
    shelf.put("first", patch_text(shelf.diff(BASE, {BUILDER: edited, f"{CUTLASS}/include/new.h": "ours\n"})))
    files = {name: text for name, text in {**BASE, **change}.items() if text is not None}
    (status,) = patches.status(checkout_of(tmp_path / "r", files), inside(), shelf.root)
    assert status.state is PatchState.CONFLICTS
    assert "there is no such file" in status.detail or "the file is there already" in status.detail


def test_already_upstream_names_the_patch_and_the_way_out(shelf: Shelf, tmp_path: Path) -> None:
    two_projects(shelf)
    checkout = checkout_of(tmp_path / "r", {**BASE, LAUNCHER: changed(KERNEL, 3, "three\n")})
    with pytest.raises(PatchAlreadyUpstream, match=r"flashinfer/third is already in flashinfer 0\.6\.6") as error:
        patches.apply(checkout, inside(), shelf.root, shelf.overrides)
    assert "Applies-To" in error.value.hint
    assert [item.state for item in patches.status(checkout, inside(), shelf.root)][2] is PatchState.ALREADY_UPSTREAM


def test_added_lines_are_not_added_twice(shelf: Shelf, tmp_path: Path) -> None:
    """Repetitive code takes an addition a second time some lines on; what is there must still be found."""
    blocks = "".join("a\nb\nc\nx\ny\nz\n" for _ in range(4))
    before = {**BASE, BUILDER: blocks}
    after = {**BASE, BUILDER: blocks.replace("c\nx\n", "c\nnew\nx\n", 2).replace("new\n", "", 1)}
    shelf.put("first", patch_text(shelf.diff(before, {BUILDER: after[BUILDER]})))
    for files, state in ((before, PatchState.APPLIES), (after, PatchState.ALREADY_UPSTREAM)):
        (status,) = patches.status(checkout_of(tmp_path / state, files), inside(), shelf.root)
        assert status.state is state


def test_variants_choose_by_version(shelf: Shelf, tmp_path: Path) -> None:
    newer = {**BASE, BUILDER: changed(KERNEL, 9, "nine\n")}
    shelf.put("first", patch_text(shelf.edit(BUILDER, 10, "ten\n")))
    shelf.put("first--4.4.2", patch_text(shelf.edit(BUILDER, 10, "ten\n", newer), versions=">=4.4.2"))
    for files, version, slug in ((BASE, "4.2.1", "first"), (newer, "4.5.0", "first--4.4.2")):
        checkout = checkout_of(tmp_path / version, files)
        tree = patches.apply(checkout, inside(version), shelf.root, shelf.overrides)
        assert [patch.slug for patch in tree.patches] == [slug]
        states = [item.state for item in patches.status(checkout, inside(version), shelf.root) if item.slug != slug]
        assert states == [PatchState.NOT_FOR_THIS_VERSION]


@pytest.mark.parametrize(
    ("one", "other", "shared"),
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
def test_overlap_of_ranges(one: str, other: str, shared: str) -> None:
    from packaging.specifiers import SpecifierSet

    assert patches.form.overlap(SpecifierSet(one), SpecifierSet(other)) == shared
    assert bool(patches.form.overlap(SpecifierSet(other), SpecifierSet(one))) == bool(shared)


def test_every_problem_is_told_at_once_with_file_and_line(shelf: Shelf) -> None:
    good = patch_text(shelf.edit(BUILDER, 10, "ten\n"))
    shelf.put("bare", good.replace(b"Origin: seen in a table of tiles\nMatters-For: everybody with a\n  small GPU\n", b""))
    shelf.put("wrong", good.replace(b"Pending", b"Perhaps").replace(b"Drop-When", b"Drop-Wen").replace(b">=4.2,", b">=4.2;"))
    shelf.put("alien", good.replace(b"Applies-To: cutlass", b"Applies-To: nccl"))
    shelf.put("twin", good)
    shelf.put("twin--b", good.replace(b">=4.2,<4.4.2", b">=4.4"))
    shelf.put("orphan", good, listed=False)
    (shelf.root / "cutlass/series").open("a").write("# comment\nghost\ntwin\nNot A Slug\n")
    said = "\n".join(str(problem).removeprefix(f"{shelf.root}/cutlass/") for problem in patches.lint(shelf.root))
    for expected in [
        "bare.patch:12: no trailer Origin",
        "bare.patch:12: no trailer Matters-For",
        "wrong.patch:8: Applies-To has '>=4.2;<4.4.2', which is no version range",
        "wrong.patch:9: Upstream-Status is 'Perhaps'",
        "wrong.patch:15: unknown trailer Drop-Wen; did you mean Drop-When?",
        "wrong.patch:15: no trailer Drop-When",
        "alien.patch:8: Applies-To is about 'nccl'",
        "twin--b.patch:8: Applies-To overlaps that of twin: both hold for cutlass 4.4",
        "orphan.patch:1: not in",
        "series:7: there is no file ghost.patch",
        "series:8: twin is in line 4 already",
        "series:9: 'Not A Slug' is no slug",
    ]:
        assert expected in said, said
    assert len(said.splitlines()) == 12, said
    with pytest.raises(BadPatch, match="12 problems"):
        patches.load(shelf.root, "cutlass")


ESCAPES = [
    (b"include/cutlass/builder.inl", b"../builder.inl", "leaves the project's tree"),
    (b"include/cutlass/builder.inl", b"/etc/passwd", "is absolute|not in its shortest form|leaves"),
    (b"include/cutlass/builder.inl", b".git/config", "is git's own"),
    (b"include/cutlass/builder.inl", b".GIT/config", "is git's own"),
    (b"include/cutlass/builder.inl", b"include//builder.inl", "shortest form"),
    (b"b/include/cutlass/builder.inl\nindex", b"b/other\nindex", "one and the same plain PATH"),
    (b"+++ b/include/cutlass/builder.inl", b"+++ b/../../x", "expected '\\+\\+\\+ b/include"),
    (b" 100644\n", b" 120000\n", "mode 120000"),
    (b"index ", b"old mode 100644\nnew mode 120000\nindex ", "mode 120000"),
    (b"index ", b"new file mode 160000\nindex ", "mode 160000"),
    (b"index ", b"rename from a\nrename to ../b\nindex ", "renamed or copied"),
    (b"index ", b"GIT binary patch\nindex ", "binary"),
    (b"@@ -7,7 +7,7 @@", b"@@ -7,7 +7,8 @@", "ends early"),
    (b"@@ -7,7 +7,7 @@", b"@@ -7,5 +7,5 @@", "not part of a git diff"),
    (b" line 13\n", b" line 13\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-x\n+y\n", "not part of a git diff"),
    (b"Why it", b"Why\r\nit", "carriage return"),
    (b"Why it", b"Why \xff it", "not UTF-8"),
    (b"Subject: ", b"Subject: [PATCH] ", "starts with \\[PATCH\\]"),
    (b"From 0000000", b"From 0000001", "not in normal form"),
    (b"Date: Mon, ", b"Date: ", "not in normal form"),
    (b"Date: ", b"Date: some ", "Date is"),
    (b"Jo Doe <jo@example.invalid>", b"nobody", "From is"),
    (b"\nWhy", b"X-Mailer: me\n\nWhy", "unexpected header"),
    (b" line 13\n", b" line 13\n-- \n2.39.5\n", "not in normal form"),
]


@pytest.mark.parametrize(("old", "new", "says"), ESCAPES)
def test_malformed_patches_are_refused(shelf: Shelf, tmp_path: Path, old: bytes, new: bytes, says: str) -> None:
    good = patch_text(shelf.edit(BUILDER, 10, "ten\n"))
    assert old in good
    shelf.put("first", good)
    assert patches.lint(shelf.root) == []
    (shelf.root / "cutlass/first.patch").write_bytes(good.replace(old, new))
    with pytest.raises(BadPatch, match=says):
        patches.apply(checkout_of(tmp_path / "r", BASE), inside(), shelf.root, shelf.overrides)


def test_links_in_the_tree_do_not_lead_out(shelf: Shelf, tmp_path: Path) -> None:
    """Git follows no link and rewrites none, although the text of the patch looks harmless."""
    shelf.put("first", patch_text(shelf.edit(BUILDER, 10, "ten\n")))
    for name, link in (("dir", f"{CUTLASS}/include/cutlass"), ("file", BUILDER)):
        checkout = checkout_of(tmp_path / name, {key: text for key, text in BASE.items() if not key.startswith(link)})
        repository = Repository(checkout.repository)
        with repository.index(checkout.tree) as index:
            target = "../../../csrc" if name == "dir" else KERNEL
            index.git("update-index", "--add", "--cacheinfo", f"120000,{repository.write(target.encode())},{link}")
            tree = index.write_tree()
        linked = Checkout(checkout.pin, checkout.repository, repository.commit_tree(tree, None, "b"), tree)
        with pytest.raises((BadPatch, PatchConflict)):
            patches.apply(linked, inside(), shelf.root, shelf.overrides)


def test_a_patch_stays_in_its_project(shelf: Shelf, tmp_path: Path) -> None:
    text = patch_text(shelf.edit(BUILDER, 10, "ten\n", below=""), "flashinfer", ">=0.6")
    shelf.put("greedy", text, "flashinfer")
    with pytest.raises(BadPatch, match=r"builder\.inl is not a file of flashinfer but of cutlass"):
        patches.apply(checkout_of(tmp_path / "r", BASE), inside(), shelf.root, shelf.overrides)


def test_an_override_hides_no_upstream_header(shelf: Shelf, tmp_path: Path) -> None:
    (shelf.overrides / "include/cutlass").mkdir(parents=True)
    (shelf.overrides / "include/cutlass/version.h").write_text("mine\n")
    with pytest.raises(BadPatch, match=r"would hide 3rdparty/cutlass/include/cutlass/version\.h"):
        patches.apply(checkout_of(tmp_path / "r", BASE), inside(), shelf.root, shelf.overrides)


def test_a_wrong_path_in_the_recipe_is_said(shelf: Shelf, tmp_path: Path) -> None:
    with pytest.raises(BadRecipe, match="no directory elsewhere"):
        patches.status(checkout_of(tmp_path / "r", BASE), (Inside("cutlass", "elsewhere", "1"),), shelf.root)


def plain_tree(path: Path, files: dict[str, str]) -> PatchedTree:
    checkout = checkout_of(path, files)
    return PatchedTree(checkout, (), checkout.commit, checkout.tree, ())


def files_below(directory: Path) -> dict[str, str]:
    return {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*") if path.is_file()}


def age(directory: Path) -> dict[str, int]:
    """Make every file old and return the times."""
    for path in directory.rglob("*"):
        if path.is_file():
            os.utime(path, ns=(10**18, 10**18))
    return times(directory)


def times(directory: Path) -> dict[str, int]:
    return {str(path.relative_to(directory)): path.stat().st_mtime_ns for path in directory.rglob("*") if path.is_file()}


def test_materialise_touches_only_what_differs(tmp_path: Path) -> None:
    one = plain_tree(tmp_path / "r1", {**BASE, "gone/file": "x\n"})
    two = plain_tree(tmp_path / "r2", {**BASE, "setup.py": "two\n", "new/file": "y\n"})
    work = tmp_path / "work"
    patches.materialise(one, work)
    assert files_below(work) == {**BASE, "gone/file": "x\n"}
    assert not (work / ".git").exists()
    old = age(work)
    patches.materialise(one, work)
    assert times(work) == old
    patches.materialise(two, work)
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
    (work / "stray/file").write_text("from a tree that was never finished\n")
    (work / ".gitignore").write_text("*\n")
    (tmp_path / ".work.index.lock").write_text("left behind\n")
    (tmp_path / ".work.index").write_bytes(b"DIRC cut o")
    patches.materialise(tree, work)
    assert files_below(work) == BASE
    assert not (work / "stray").exists()
    assert not (work / BUILDER).stat().st_mode & stat.S_IXUSR
    assert {name for name, when in times(work).items() if when != old[name]} <= {"setup.py", LAUNCHER, BUILDER}


@pytest.mark.parametrize("links", ["csrc", "csrc/launcher.cu"])
def test_materialise_follows_no_link(tmp_path: Path, links: str) -> None:
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


def test_materialise_leaves_other_peoples_directories_alone(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis").write_text("years\n")
    with pytest.raises(StateUnwritable, match="not made by sm120kit"):
        patches.materialise(plain_tree(tmp_path / "r", BASE), home)
    assert files_below(home) == {"thesis": "years\n"}


def test_export_gives_the_series_back(shelf: Shelf, tmp_path: Path) -> None:
    two_projects(shelf)
    shelf.put("first--later", patch_text(shelf.edit(BUILDER, 20, "x\n"), versions=">=4.4.2"))
    checkout = checkout_of(tmp_path / "r", BASE)
    tree = patches.apply(checkout, inside(), shelf.root, shelf.overrides)
    before = {path: path.read_bytes() for path in shelf.root.rglob("*") if path.is_file()}
    parts = patches.parts_of(checkout.pin, inside())
    exported = export.export(Repository(checkout.repository), f"{tree.patches[0].commit}^", tree.commit, parts)
    assert [item.slug for item in exported] == ["first", "second", "third"]
    assert export.write_back(exported, parts, shelf.root) == []
    assert {path: path.read_bytes() for path in shelf.root.rglob("*") if path.is_file()} == before
    (shelf.root / "cutlass/series").write_text("# why\nfirst  # and this\n\nsecond\nfirst--later\n# end\n")
    wrote = export.write_back(exported[1:], parts, shelf.root)
    assert {path.name for path in wrote} == {"first.patch", "series"}
    assert (shelf.root / "cutlass/series").read_text() == "\nsecond\nfirst--later\n# end\n"
    assert patches.lint(shelf.root) == []


def test_normal_form_is_what_git_writes(shelf: Shelf, tmp_path: Path) -> None:
    two_projects(shelf)
    checkout = checkout_of(tmp_path / "r", BASE)
    tree = patches.apply(checkout, inside(), shelf.root, shelf.overrides)
    options = (
        "-1 --stdout -p --zero-commit --no-signature --full-index -N --subject-prefix= --no-renames --no-encode-email-headers"
    )
    for applied, below in zip(tree.patches, (CUTLASS, CUTLASS, ""), strict=True):
        relative = [f"--relative={below}"] if below else []
        said = Repository(checkout.repository).git("format-patch", *options.split(), *relative, applied.commit).raw
        file = shelf.root / applied.project / f"{applied.slug}.patch"
        assert said.replace(f"Patch: {applied.project}/{applied.slug}\n".encode(), b"") == file.read_bytes()


LINES = st.lists(
    st.sampled_from(["a", "b", "", "-- ", "--- a/x", "+++ b/x", "@@ -1 +1 @@", "é\r", "diff --git a/x b/x"]), max_size=12
)


EDITS = st.lists(st.tuples(LINES, LINES, st.sampled_from(["", "\n"]), st.booleans()), min_size=1, max_size=8)


@settings(max_examples=5, deadline=None)
@given(edits=EDITS)
def test_any_edit_survives_the_round_trip(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[list[str], list[str], str, bool]]
) -> None:
    path = tmp_path_factory.mktemp("edit")
    shelf, old, new = Shelf(path), dict(BASE), dict(BASE)
    for number, (before, after, end, created) in enumerate(edits):
        name = f"{CUTLASS}/include/cutlass/a file {number}.h"
        new[name] = "\n".join(after) + end
        if not created:
            old[name] = "\n".join(before) + "\n"
    if old == new:
        return
    content = patch_text(shelf.diff(old, new))
    shelf.put("edit", content)
    checkout = checkout_of(path / "r", old)
    tree = patches.apply(checkout, inside(), shelf.root, shelf.overrides)
    repository = Repository(checkout.repository)
    assert tree.tree == trees(repository, new)[0]
    exported = export.export(repository, checkout.commit, tree.commit, patches.parts_of(checkout.pin, inside()))
    assert [(item.slug, item.content) for item in exported] == [("edit", content)]


def test_edit_and_take_back(shelf: Shelf, tmp_path: Path) -> None:
    two_projects(shelf)
    checkout = checkout_of(tmp_path / "r", BASE)
    tree = patches.apply(checkout, inside(), shelf.root, shelf.overrides)
    desk, parts = tmp_path / "desk", patches.parts_of(checkout.pin, inside())
    patches.edit(tree, desk)
    assert patches.take_back(desk, parts, shelf.root) == []
    (desk / LAUNCHER).write_text(changed(changed(KERNEL, 3, "three\n"), 4, "four\n"))
    with pytest.raises(BadPatch, match=r"in no commit:\n M csrc/launcher\.cu"):
        patches.take_back(desk, parts, shelf.root)

    def commit(message: str) -> None:
        identity = ("-c", "user.name=A. B.", "-c", "user.email=a@example.invalid")
        Repository(desk / ".git").git(f"--work-tree={desk}", *identity, "commit", "-qam", message)

    commit("launcher: New thing\n\nBecause.")
    with pytest.raises(BadPatch, match=r"flashinfer/launcher-new-thing\.patch:6: no trailer Applies-To"):
        patches.take_back(desk, parts, shelf.root)
    Repository(desk / ".git").git("reset", "-q", "--soft", "HEAD^")
    commit("launcher: New thing\n\nBecause.\n\n" + TRAILERS.format(project="flashinfer", versions="==0.6.6"))
    wrote = patches.take_back(desk, parts, shelf.root)
    assert {path.name for path in wrote} == {"launcher-new-thing.patch", "series"}
    assert (shelf.root / "flashinfer/series").read_text() == "third\nlauncher-new-thing\n"
    again = patches.apply(checkout, inside(), shelf.root, shelf.overrides)
    assert text_at(again, LAUNCHER) == (desk / LAUNCHER).read_text()
    assert again.patches[:3] == tree.patches
    (desk / LAUNCHER).write_text("x\n")
    (desk / BUILDER).write_text("y\n")
    commit("both\n\n" + TRAILERS.format(project="flashinfer", versions="==0.6.6"))
    with pytest.raises(BadPatch, match="touches cutlass and flashinfer"):
        patches.take_back(desk, parts, shelf.root)
    with pytest.raises(BadPatch, match="not made by"):
        patches.take_back(tmp_path, parts, shelf.root)
    with pytest.raises(StateUnwritable, match="not empty"):
        patches.edit(tree, desk)


def test_fix_writes_the_normal_form(shelf: Shelf) -> None:
    good = patch_text(shelf.edit(BUILDER, 10, "ten\n"))
    loose = (
        good.replace(b"From 0000", b"From 1111").replace(b"\ndiff --git", b"---\n include/x | 2 +-\n\ndiff --git")
        + b"-- \n2.39.5\n\n"
    )
    file = shelf.put("first", loose.replace(b"Subject: builder: count", b"Subject: [PATCH 1/2] builder:\n count"))
    assert len(patches.lint(shelf.root)) == 1
    assert patches.fix(shelf.root) == [file]
    assert file.read_bytes() == good
    assert patches.fix(shelf.root) == [] == patches.lint(shelf.root)


def test_command_line(shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    from typer.testing import CliRunner

    from sm120kit.cli.patch import app

    monkeypatch.setenv("SM120KIT_DATA", str(tmp_path))
    (tmp_path / "recipes").mkdir()
    file = shelf.put("first", patch_text(shelf.edit(BUILDER, 10, "ten\n")))
    ask = CliRunner()
    assert ask.invoke(app, ["check"]).exit_code == 0
    (told,) = json.loads(ask.invoke(app, ["list", "--json"]).stdout)
    assert (told["slug"], told["Matters-For"]) == ("first", "everybody with a small GPU")
    file.write_bytes(file.read_bytes().replace(b"Origin", b"Orgin"))
    said = ask.invoke(app, ["check", "--json"])
    assert said.exit_code == 1
    assert [problem["line"] for problem in json.loads(said.stdout)["problems"]] == [15, 10]


def test_our_own_patches_are_well_formed() -> None:
    root = Path(__file__).parents[2] / "patches"
    assert patches.lint(root) == []
    assert patches.projects(root) == ["cutlass", "flashinfer", "vllm"]
