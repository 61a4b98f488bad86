"""The parser of patch files: what it accepts, and the problems that it reports for everything else."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import pytest
from patch_series import write_blob

from sm120kit import patches
from sm120kit.core.errors import BadInput, PatchConflict
from sm120kit.patches._locate import places
from sm120kit.patches.diff import Problem
from sm120kit.patches.format import Patch, parse
from sm120kit.patches.patch_records import PatchedTree
from sm120kit.sources.git import Repository
from sm120kit.sources.source_records import Checkout, GitPin, VendoredProject

HEAD = f"""\
From {"0" * 40} Mon Sep 17 00:00:00 2001
From: Jo Doe <jo@example.invalid>
Date: Mon, 5 Jan 2026 01:02:03 +0200
Subject: builder: count

Why it exists.

Applies-To: cutlass >=4.2,<4.4.2
Upstream-Status: Pending
Origin: a table
Matters-For: everybody
No-Effect-For: the rest
Evidence: tests/unit/test_patches.py
Drop-When: never

""".encode()

OLD, NEW = "1" * 40, "2" * 40
HUNKS = b"""\
@@ -1,3 +1,3 @@
 a
-b
+B
 c
@@ -11,3 +11,4 @@ void f()
 k
+l
 m
 n
"""


def section(hunks: bytes, path: bytes = b"x", header: bytes = f"index {OLD}..{NEW} 100644\n".encode()) -> bytes:
    """The section of a file in a diff."""
    tab = b"\t" if b" " in path else b""
    names = b"--- a/%s%s\n+++ b/%s%s\n" % (path, tab, path, tab)
    return b"diff --git a/%s b/%s\n" % (path, path) + header + names + hunks


def parsed(content: bytes) -> tuple[Patch | None, list[Problem]]:
    return parse("cutlass", Path("x.patch"), content)


def well_formed(diff: bytes) -> Patch:
    patch, problems = parsed(HEAD + diff)
    assert problems == []
    assert patch is not None
    assert patch.content == HEAD + diff
    assert patch.diff == diff
    return patch


def report(content: bytes) -> str:
    """All problems of a patch, one per line."""
    return "\n".join(map(str, parsed(content)[1]))


def test_hunks_have_lines_of_both_sides() -> None:
    first, second = well_formed(section(HUNKS)).hunks
    assert (first.path, first.number, first.start, first.header, first.line) == ("x", 1, 1, "@@ -1,3 +1,3 @@", 20)
    assert (first.old, first.new) == ((b"a\n", b"b\n", b"c\n"), (b"a\n", b"B\n", b"c\n"))
    assert (second.number, second.start, second.header, second.line) == (2, 11, "@@ -11,3 +11,4 @@ void f()", 25)
    assert second.new == (b"k\n", b"l\n", b"m\n", b"n\n")


@pytest.mark.parametrize("path", [b"a b/a", b"a", b"b/b b/b", "é/ü".encode(), b"x y", b"diff --git a", b"-- ", b"http://x"])
def test_unusual_paths(path: bytes) -> None:
    diff = section(HUNKS, path)
    if b"//" in path:
        assert "not in its shortest form" in report(HEAD + diff)
    else:
        assert [hunk.path for hunk in well_formed(diff).hunks] == [path.decode()] * 2


@pytest.mark.parametrize(
    "text", [b"\xff\xfe", b"\x85\xa0", b"\x1c\x0b\x0c", "\u2028".encode(), b"r\r", b"\r", b"", b"- ", b"-- x"]
)
def test_content_in_any_encoding(text: bytes) -> None:
    (hunk,) = well_formed(section(b"@@ -1 +1 @@\n-%s\n+y\n" % text)).hunks
    assert hunk.old == (text + b"\n",)
    (hunk,) = well_formed(section(b"@@ -1 +1 @@\n-y\n+%s\n\\ No newline at end of file\n" % text)).hunks
    assert hunk.new == (text,)


def test_files_without_hunks() -> None:
    header = b"new file mode 100644\nindex %s..e69de29bb2d1d6434b8b29ae775ad8c2e48c5391\n" % (b"0" * 40)
    empty = b"diff --git a/e b/e\n" + header
    mode = b"diff --git a/m b/m\nold mode 100644\nnew mode 100755\n"
    assert [hunk.path for hunk in well_formed(empty + mode + section(HUNKS)).hunks] == ["x", "x"]


MALFORMED = [
    (b"+l\n", b"", "x.patch:28: a hunk of x ends early"),
    (b" c\n", b" c\n c\n", "x.patch:26: a hunk of x"),
    (b" c\n", b"", "x.patch:24: a hunk of x ends early"),
    (b" c\n", b"\n", "x.patch:23: a hunk of x ends early"),
    (b" n\n", b" n\n o\n", "x.patch:30: not part of a git diff"),
    (b" n\n", b" n\n\n", "x.patch:30: not part of a git diff"),
    (b" n\n", b" n\n--- a/x\n", "x.patch:30: not part of a git diff"),
    (b"@@ -11", b"+++ b/x\n@@ -11", "x.patch:25: not part of a git diff"),
    (b"@@ -11,3 +11,4 @@", b"@@@ -11,3 -11,3 +11,4 @@@", "x.patch:25: not the header of a hunk"),
    (b"@@ -11,3 +11,4 @@", b"@@ -11,3 +11,4 @", "x.patch:25: not the header of a hunk"),
    (b"@@ -11,3 +11,4 @@ void f()\n k\n+l\n m\n n\n", b"@@ -11,0 +11,0 @@\n k\n", "x.patch:26: a hunk of x"),
    (b"+B\n", b"+B\n\\ No newline at end of file\n", "a line follows the end of the file"),
    (b"+B\n", b"+B\n\\ No newline at end of file\n\\ No newline at end of file\n", "x.patch:20: a line end is missing"),
    (b" a\n", b"\\ No newline at end of file\n a\n", "x.patch:20: a line end is missing"),
    (b"index", b"old mode 100644\nindex", "no hunk follows for x"),
    (b"index", b"rename from y\nrename to x\nindex", "no hunk follows for x"),
    (b"index", f"index {OLD}..{NEW} 100644\nindex".encode(), "no hunk follows for x"),
    (OLD.encode(), OLD[:9].encode(), "no hunk follows for x"),
    (b"index", b"old mode 120000\nnew mode 100644\nindex", "x has mode 120000: not a plain file"),
    (f"index {OLD}..{NEW} 100644\n".encode(), b"", "no index line for x"),
    (b" n\n", b" n\n" + section(HUNKS), "x is changed twice"),
    (b" n\n", b" n\n-- \n2.39.5\n\nFrom 1\n---\n" + section(HUNKS, b"y"), "x.patch:33: text follows the diff: 'From 1'"),
    (b" n\n", b" n\ndiff --git a/y b/y\nindex %s..%s 100644\n" % (b"3" * 40, b"4" * 40), "no hunk follows for y"),
    (b" n\n", b" n\ndiff --git a/y b/y\n", "no hunk follows for y"),
    (b"a/x b/x", b"a/x b/\xff", "not part of a git diff of a plain path"),
]


@pytest.mark.parametrize(("old", "new", "problem"), MALFORMED)
def test_malformed_diffs_are_reported(old: bytes, new: bytes, problem: str) -> None:
    good = section(HUNKS)
    assert old in good
    assert problem in report(HEAD + good.replace(old, new))


def test_malformed_diff_keeps_the_sections_before_it() -> None:
    """The diff of a patch with problems ends after the last section that is understood."""
    diff = section(HUNKS) + section(HUNKS.replace(b" c\n", b""), b"y")
    patch, problems = parsed(HEAD + diff)
    assert patch is not None
    assert problems
    assert patch.diff == section(HUNKS)


def applied(tmp_path: Path, diff: bytes, content: bytes) -> PatchedTree:
    """Apply a patch to a tree whose CUTLASS has a file ``x`` with this content."""
    root = tmp_path / "patches"
    (root / "cutlass").mkdir(parents=True, exist_ok=True)
    (root / "cutlass/series").write_text("edit\n")
    (root / "cutlass/edit.patch").write_bytes(HEAD + diff)
    repository = Repository.init(tmp_path / "r")
    with repository.index() as index:
        index.add("cutlass/x", content)
        version = "".join(f"#define CUTLASS_{name} {n}\n" for name, n in (("MAJOR", 4), ("MINOR", 2), ("PATCH", 1)))
        index.add("cutlass/include/cutlass/version.h", version.encode())
        tree = index.write_tree()
    pin = GitPin("flashinfer", "file:///nowhere", "0" * 40, "0.6.6")
    checkout = Checkout(pin, tmp_path / "r", repository.commit_tree(tree, None, "b"), tree)
    return patches.apply(checkout, (VendoredProject("cutlass", "cutlass", "4.2.1"),), root, tmp_path / "none")


def blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


BEFORE = b"a\nb\nc\n"
AFTER = b"a\nB\nc\n"
EDIT = b"@@ -1,3 +1,3 @@\n a\n-b\n+B\n c\n"


def edit_diff(old: str, new: str, hunks: bytes = EDIT) -> bytes:
    return section(hunks, header=f"index {old}..{new} 100644\n".encode())


def test_blob_ids_are_compared_with_the_tree(tmp_path: Path) -> None:
    old, new = blob_id(BEFORE), blob_id(AFTER)
    assert len(applied(tmp_path / "same", edit_diff(old, new), BEFORE).patches) == 1
    assert len(applied(tmp_path / "later", edit_diff(old, new), BEFORE + b"more\n").patches) == 1, "another version of the file"
    for name, ids in (("old", ("1" * 40, new)), ("new", (old, "2" * 40))):
        with pytest.raises(
            BadInput, match=f"cutlass/x: the index line .line 17 of edit.patch. was made for the version with blob {ids[0]}"
        ):
            applied(tmp_path / name, edit_diff(*ids), BEFORE)


LINES = b"".join(b"l%d\n" % number for number in range(30))


def change_of(line: int, stated: int) -> bytes:
    return b"@@ -%d,3 +%d,3 @@\n l%d\n-l%d\n+L\n l%d\n" % (stated, stated, line - 1, line, line + 1)


@pytest.mark.parametrize(
    ("hunks", "blob"),
    [
        (change_of(20, 20) + change_of(5, 5), "1" * 40),
        (change_of(5, 5) + change_of(6, 6), "1" * 40),
        (change_of(5, 0), "1" * 40),
        (change_of(20, 20) + change_of(5, 5), blob_id(LINES)),
        (change_of(5, 5), blob_id(LINES)),
    ],
    ids=["order", "overlap", "line 0", "order in its own version", "result"],
)
def test_hunks_that_contradict_each_other_or_their_blobs_change_nothing(tmp_path: Path, hunks: bytes, blob: str) -> None:
    """The parser accepts them."""
    diff = edit_diff(blob, "2" * 40, hunks)
    well_formed(diff)
    with pytest.raises((BadInput, PatchConflict), match="cutlass/edit"):
        applied(tmp_path, diff, LINES)


def test_conflict_names_the_version_of_the_file(tmp_path: Path) -> None:
    old, new, other = blob_id(BEFORE), blob_id(AFTER), b"a\nx\nc\n"
    expected = f"x: the patch was made for the version with blob {old[:12]}; cutlass 4.2.1 has blob {blob_id(other)[:12]}"
    with pytest.raises(PatchConflict, match=expected):
        applied(tmp_path / "other", edit_diff(old, new), other)
    corrupt = edit_diff(old, new, EDIT.replace(b" a", b" A"))
    with pytest.raises(
        PatchConflict, match=f"blob {old[:12]}, which is that of the tree: its hunks or its index line are corrupt"
    ):
        applied(tmp_path / "corrupt", corrupt, BEFORE)


DATE = b"Mon, 5 Jan 2026 01:02:03 +0200"
HEAD_PROBLEMS = [
    (DATE, b"Mon, 5 Jan 99999999999999999999 01:02:03 +0200", "x.patch:3: Date is"),
    (DATE, b"Mon, 5 Jan 2026 01:02:03 +" + b"9" * 30, "x.patch:3: Date is"),
    (DATE, b"Mon, 5 Jan " + b"9" * 5000 + b" 01:02:03 +0200", "x.patch:3: Date is"),
    (DATE, b"Mon, " + b"9" * 5000 + b" Jan 2026 01:02:03 +0200", "x.patch:3: Date is"),
    (DATE, b"Wed, 31 Dec 1969 23:59:59 +0000", "no dates before 1970"),
    (DATE, b"Thu, 1 Jan 1970 01:00:00 +0200", "no dates before 1970"),
    (DATE, b"Fri, 1 Jan 0100 00:00:00 +2359", "Date is"),
    (b">=4.2,<4.4.2", b"===foo", "'===' and numbers of ten digits are not supported"),
    (b">=4.2,<4.4.2", b"===4.2.1", "'===' and numbers of ten digits are not supported"),
    (b">=4.2,<4.4.2", b">=" + b"9" * 5000, "'===' and numbers of ten digits are not supported"),
    (b">=4.2,<4.4.2", ",".join(f"!=4.{n}" for n in range(3000)).encode(), "has 3000 version specifiers: 100 are allowed"),
    (b"Jo Doe", b"Jo\0Doe", "x.patch:2: NUL in the commit message"),
    (b"Why", b"Why\0", "x.patch:6: NUL in the commit message"),
    (b"Jo Doe", b'"."', "git removes"),
    (b"Jo Doe", b'"Jo Jr."', "git removes"),
    (b"Jo Doe", b'"J<o"', "git removes"),
    (b"Subject: ", b"Subject: [PATCH] ", "the subject starts with [PATCH]: export"),
    (b"Subject: ", b"Subject: [RFC PATCH v2 1/3] ", "the subject starts with [RFC PATCH v2 1/3]: export"),
    (b"Subject: ", b"Subject: [PATCH] [Kernel] ", "the subject starts with [PATCH]: export"),
]


@pytest.mark.parametrize(("old", "new", "problem"), HEAD_PROBLEMS, ids=[problem[:40] for _, _, problem in HEAD_PROBLEMS])
def test_malformed_heads_are_reported(old: bytes, new: bytes, problem: str) -> None:
    assert old in HEAD
    assert problem in report(HEAD.replace(old, new, 1) + section(HUNKS))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"Subject: ", b"Subject: [Kernel] "),
        (b"Subject: ", b"Subject: [Bugfix][CI/Build] "),
        (b">=4.2,<4.4.2", b">=V4.2"),
        (b">=4.2,<4.4.2", ",".join(f"!=4.{n}" for n in range(100)).encode()),
        (b">=4.2,<4.4.2", b">=1!4.2,<1!5"),
        (DATE, b"Thu, 1 Jan 1970 00:00:00 +0000"),
    ],
    ids=["[Kernel]", "[Bugfix][CI/Build]", "V4.2", "100 specifiers", "epoch", "1970"],
)
def test_unusual_heads(old: bytes, new: bytes) -> None:
    patch, problems = parsed(HEAD.replace(old, new, 1) + section(HUNKS))
    assert patch is not None
    assert problems == []


def test_subject_in_brackets_is_kept_by_apply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.HEAD", HEAD.replace(b"Subject: ", b"Subject: [Kernel] "))
    tree = applied(tmp_path, edit_diff(blob_id(BEFORE), blob_id(AFTER)), BEFORE)
    assert Repository(tmp_path / "r").git("log", "-1", "--format=%s", tree.commit).stdout == "[Kernel] builder: count\n"


def test_series_with_invalid_names(tmp_path: Path) -> None:
    directory = tmp_path / "cutlass"
    directory.mkdir()
    (directory / "series").write_text("a" * 300 + "\n")
    assert "300" in str(patches.lint(tmp_path)[0])
    (directory / "series").write_bytes(b"\xe9\n")
    with pytest.raises(BadInput, match="series is not text"):
        patches.lint(tmp_path)


def test_files_with_nul_are_refused_by_check_apply_and_export(tmp_path: Path) -> None:
    """git exports a file with NUL among its first 8,000 bytes as a binary file."""
    in_hunk = edit_diff(blob_id(BEFORE), blob_id(AFTER), EDIT.replace(b"+B", b"+B\0"))
    assert "x.patch:23: NUL in a hunk" in report(HEAD + in_hunk)
    with pytest.raises(BadInput, match="NUL in a hunk"):
        applied(tmp_path / "hunk", in_hunk, BEFORE)
    tail = b"d\n" * 9 + b"\0\n"
    elsewhere = edit_diff(blob_id(BEFORE + tail), blob_id(AFTER + tail), EDIT)
    well_formed(elsewhere)
    with pytest.raises(BadInput, match="cutlass/x is a binary file: only text can be reviewed"):
        applied(tmp_path / "elsewhere", elsewhere, BEFORE + tail)
    far = b"d\n" * 9000 + b"\0\n"
    applied(tmp_path / "far", edit_diff(blob_id(BEFORE + far), blob_id(AFTER + far), EDIT), BEFORE + far)
    repository = Repository(tmp_path / "far/r")
    before, after = (write_blob(repository, content) for content in (BEFORE + far, AFTER + far))
    text = repository.git("diff", before, after).raw
    assert b"+B\n" in text, "export accepts what apply accepts"
    assert b"Binary files" not in text


BLOCK = b"".join(b"%s\n" % letter for letter in (b"start", b"a", b"b", b"c", b"end"))
CHANGE = b"@@ -%d,3 +%d,3 @@\n a\n-b\n+B\n c\n"


def changes_at(*lines: int) -> bytes:
    """A diff that changes ``b`` in the blocks whose line ``a`` has these numbers."""
    return edit_diff("1" * 40, "2" * 40, b"".join(CHANGE % (line, line) for line in lines))


def patched(tmp_path: Path, diff: bytes, content: bytes) -> bytes:
    tree = applied(tmp_path, diff, content)
    return Repository(tmp_path / "r").read(tree.tree, "cutlass/x")


def test_line_number_decides_where_a_hunk_fits_twice_in_its_own_version(tmp_path: Path) -> None:
    """In another version, which the blob id tells, the line may be that of another block."""
    content, after = BLOCK * 3, BLOCK + BLOCK.replace(b"b", b"B") + BLOCK
    before, changed = (blob_id(each).encode() for each in (content, after))
    diff = changes_at(7)
    own = diff.replace(b"1" * 40, before).replace(b"2" * 40, changed)
    assert patched(tmp_path / "own", own, content) == after
    with pytest.raises(PatchConflict, match=r"x:7: hunk 1 .* is ambiguous: it fits at lines 2, 7, 12"):
        applied(tmp_path / "other", diff, content)


def test_hunk_that_fits_at_other_lines_is_refused(tmp_path: Path) -> None:
    moved = b"new\n" + BLOCK * 3
    expected = r"x:7: hunk 1 @@ -7,3 \+7,3 @@ .*is ambiguous: it fits at lines 3, 8, 13"
    with pytest.raises(PatchConflict, match=expected):
        applied(tmp_path, changes_at(7), moved)


def test_moved_hunk_that_fits_once_is_applied(tmp_path: Path) -> None:
    content = b"new\n" + BLOCK.replace(b"c", b"C") + BLOCK
    assert patched(tmp_path, changes_at(7), content) == content[: -len(BLOCK)] + BLOCK.replace(b"b", b"B")


def test_order_of_hunks_decides(tmp_path: Path) -> None:
    """Two changes of two equal blocks have only one place each; two of three blocks have more."""
    assert patched(tmp_path / "two", changes_at(2, 7), b"new\n" + BLOCK * 2) == b"new\n" + BLOCK.replace(b"b", b"B") * 2
    with pytest.raises(PatchConflict, match=r"it fits at lines 3, 8.*\n.*it fits at lines 8, 13"):
        applied(tmp_path / "three", changes_at(2, 7), b"new\n" + BLOCK * 3)


def test_hunk_that_git_would_apply_before_the_one_above_it_is_refused(tmp_path: Path) -> None:
    """Its only place in the order of the hunks is further from its own line than one above the first hunk."""
    content = BLOCK + b"%d\n" * 5 % (*range(5),) + b"u\nv\nw\n" + b"-\n" * 40 + BLOCK
    first = b"@@ -5,3 +5,3 @@\n u\n-v\n+V\n w\n"
    diff = edit_diff("1" * 40, "2" * 40, first + CHANGE % (12, 12))
    with pytest.raises(PatchConflict, match=r"x: its hunks fit in their order at lines 11, 55, but git"):
        applied(tmp_path, diff, content)


def test_exact_hunk_limits_the_places_of_others(tmp_path: Path) -> None:
    content = BLOCK + BLOCK.replace(b"start", b"start\nnew")
    result = patched(tmp_path, changes_at(2, 7), content)
    assert result == content.replace(b"b", b"B")


def test_places_in_repetitive_files_are_found_quickly() -> None:
    """A hunk of 20,000 equal lines in a file of 50,000; a deletion at the end of a file fits only there."""
    (hunk,) = well_formed(
        edit_diff("1" * 40, "2" * 40, b"@@ -2,20000 +2,20001 @@\n" + b" a\n" * 10000 + b"+b\n" + b" a\n" * 10000)
    ).hunks
    began = time.process_time()
    assert places([hunk], b"a\n" * 50000, False) == [(hunk, list(range(1, 30002)))]
    assert time.process_time() - began < 10
    (hunk,) = well_formed(edit_diff("1" * 40, "2" * 40, b"@@ -5,2 +5 @@\n a\n-b\n")).hunks
    assert places([hunk], b"a\nb\na\nb\n", False) == [(hunk, [3])]
    assert places([hunk], b"xa\nb\na\nb", False) == [(hunk, [])]
