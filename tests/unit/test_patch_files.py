"""Single patch files: imported from anybody's diff, shown and removed, without losing anything else."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from patch_series import (
    BASE,
    BUILDER,
    KERNEL,
    KEY,
    LAUNCHER,
    RECIPE,
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
)
from typer.testing import CliRunner

from sm120kit import patches
from sm120kit.core.errors import AlreadyExists, BadInput, NotFound, PatchConflict
from sm120kit.patches import ImportTarget, evidence
from sm120kit.patches.patch_records import PatchedTree, PatchState
from sm120kit.patches.series import wanted
from sm120kit.sources.git import Repository

CHANGED = changed(KERNEL, 20, "twenty\n")
PLACEHOLDERS = ["Upstream-Status", "Origin", "Matters-For", "No-Effect-For", "Evidence", "Drop-When"]


@pytest.fixture
def patch_dir(tmp_path: Path) -> PatchDirectory:
    directory = PatchDirectory(tmp_path / "data")
    two_projects(directory)
    return directory


@pytest.fixture
def tree(patch_dir: PatchDirectory, tmp_path: Path) -> PatchedTree:
    return patches.apply(checkout_of(tmp_path / "r", BASE), inside(), patch_dir.root, patch_dir.overrides)


class Upstream:
    """A git repository of somebody else, in which files are committed and diffs made."""

    def __init__(self, path: Path, files: dict[str, str]) -> None:
        self.path = path
        subprocess.run(["git", "init", "-q", path], check=True)
        self.commit(files, "before")

    def commit(self, files: dict[str, str], message: str) -> None:
        for name, text in files.items():
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            (self.path / name).write_text(text)
        git_in(self.path, "add", "-A")
        git_in(self.path, "commit", "-q", "-m", message)

    def output(self, *arguments: str) -> bytes:
        return subprocess.run(["git", "-C", self.path, *arguments], check=True, capture_output=True).stdout


def cutlass_repository(path: Path) -> Upstream:
    """CUTLASS alone, with line 20 of builder.inl changed in its newest commit."""
    upstream = Upstream(path, {"include/cutlass/builder.inl": KERNEL, "README": "x\n"})
    message = "[SM120] builder: Zählen\n\nIt counted twice.\n\nReviewed-by: Q <q@example.invalid>\nOrigin: a report\n"
    upstream.commit({"include/cutlass/builder.inl": CHANGED}, message)
    return upstream


def imported(tree: PatchedTree, root: Path, file: Path, **target: object) -> tuple[patches.Patch, list[str]]:
    """Import a file; returns the patch in its series, and what is to be filled in."""
    (written,) = patches.import_patches(patches.read_diffs(file), tree, ImportTarget(**target), root)  # type: ignore[arg-type]
    return written_patch(written.file), [problem.text.partition(" ")[0] for problem in written.to_fill_in]


def written_patch(file: Path) -> patches.Patch:
    """The patch of a series whose file this is."""
    (patch,) = (patch for patch in patches.load(file.parents[1], file.parent.name) if patch.slug == file.stem)
    return patch


@pytest.mark.parametrize("encoding", ["8bit", "base64", "a saved mail of base64"])
def test_import_of_a_mail(patch_dir: PatchDirectory, tree: PatchedTree, tmp_path: Path, encoding: str) -> None:
    """Encoded subject, abbreviated ids and a mail signature; other trailers stay as prose, and our own are kept."""
    upstream = cutlass_repository(tmp_path / "cutlass")
    mail = upstream.output("format-patch", "-1", "--stdout")
    assert b"=?UTF-8?q?" in mail and b"index " in mail and b"[PATCH] " in mail
    if "base64" in encoding:  # as mail programs send text that is not ASCII, with CR LF
        head, _, text = mail.partition(b"\n\n")
        head = (
            re.sub(rb"\n(MIME-Version|Content-[\w-]+): .*", b"", head)
            + b"\nMIME-Version: 1.0\nContent-Type: text/plain; charset=UTF-8"
        )
        mail = head + b"\nContent-Transfer-Encoding: base64\n\n" + base64.encodebytes(text.replace(b"\n", b"\r\n"))
    if "saved" in encoding:
        mail = mail.replace(b"\n", b"\r\n")
    (tmp_path / "x.patch").write_bytes(mail)
    patch, missing = imported(tree, patch_dir.root, tmp_path / "x.patch")
    assert (patch.project, patch.slug, patch.subject) == ("cutlass", "sm120-builder-z-hlen", "[SM120] builder: Zählen")
    assert patch.author == "A. B <a@example.invalid>"
    assert patch.body.startswith("It counted twice.\n\nReviewed-by: Q <q@example.invalid>\n\nApplies-To: cutlass ==4.2.1\n")
    assert patch.trailer("Origin") == "a report"
    assert missing == [name for name in PLACEHOLDERS if name != "Origin"]
    assert [slug for _, slug in patches.series.slug_lines(patch_dir.root / "cutlass/series")] == ["first", "second", patch.slug]
    again = patches.apply(tree.checkout, inside(), patch_dir.root, patch_dir.overrides)
    assert text_at(again, BUILDER) == changed(text_at(tree, BUILDER), 20, "twenty\n")
    lint = [problem for problem in patches.lint(patch_dir.root) if "to be filled in" in problem.text]
    assert [problem.line for problem in lint] == [
        number for number, line in enumerate(patch.content.decode().splitlines(), 1) if ": TODO: " in line
    ]
    assert len(lint) == len(missing)


def test_import_of_a_plain_diff(patch_dir: PatchDirectory, tree: PatchedTree, tmp_path: Path) -> None:
    """Author, subject and reason are to be filled in; text above the diff is kept."""
    upstream = cutlass_repository(tmp_path / "cutlass")
    file = tmp_path / "count-once.diff"
    file.write_bytes(b"It counts twice.\n\n" + upstream.output("diff", "HEAD^"))
    patch, missing = imported(tree, patch_dir.root, file)
    assert (patch.name, missing) == ("cutlass/count-once", ["From", "Subject", *PLACEHOLDERS])
    assert patch.body.startswith("It counts twice.\n\nApplies-To")
    again = patches.apply(tree.checkout, inside(), patch_dir.root, patch_dir.overrides)
    assert "twenty\n" in text_at(again, BUILDER)


def test_paths_of_the_whole_tree_and_of_another_one(patch_dir: PatchDirectory, tree: PatchedTree, tmp_path: Path) -> None:
    """A file below 3rdparty/cutlass is one of CUTLASS; the directories of another tree are removed, as by --strip."""
    whole = Upstream(tmp_path / "whole", {BUILDER: KERNEL, LAUNCHER: KERNEL})
    whole.commit({BUILDER: CHANGED}, "builder: in the tree")
    (tmp_path / "x.patch").write_bytes(whole.output("format-patch", "-1", "--stdout"))
    assert imported(tree, patch_dir.root, tmp_path / "x.patch")[0].name == "cutlass/builder-in-the-tree"
    other = Upstream(tmp_path / "other", {"deep/er/csrc/launcher.cu": KERNEL})
    other.commit({"deep/er/csrc/launcher.cu": CHANGED}, "launcher: deeper")
    (tmp_path / "y.patch").write_bytes(other.output("format-patch", "-1", "--stdout"))
    with pytest.raises(BadInput, match=r"deep/er/csrc/launcher\.cu does not exist") as error:
        imported(tree, patch_dir.root, tmp_path / "y.patch", strip=1)
    assert "--strip" in error.value.hint
    patch, _ = imported(tree, patch_dir.root, tmp_path / "y.patch")
    assert [file.path for file in patch.files] == ["csrc/launcher.cu"]
    with pytest.raises(BadInput, match="lacks filename information when removing 5"):
        imported(tree, patch_dir.root, tmp_path / "y.patch", strip=5)


def test_lines_like_headers_inside_a_hunk_are_kept(patch_dir: PatchDirectory, tree: PatchedTree, tmp_path: Path) -> None:
    """A removed line ``-- a/csrc/x`` looks like the header ``--- a/csrc/x``."""
    text = "1\n2\n-- a/deep/x\n++ b/deep/x\n3\n"
    files = {**BASE, "x": text}
    checkout = checkout_of(tmp_path / "with-x", files)
    other = Upstream(tmp_path / "other", {"deep/x": text})
    other.commit({"deep/x": "1\n2\n3\n"}, "x: fewer")
    (tmp_path / "x.patch").write_bytes(other.output("format-patch", "-1", "--stdout"))
    base = patches.apply(checkout, inside(), patch_dir.root, patch_dir.overrides)
    imported(base, patch_dir.root, tmp_path / "x.patch", strip=2)
    assert text_at(patches.apply(checkout, inside(), patch_dir.root, patch_dir.overrides), "x") == "1\n2\n3\n"


def test_project_of_a_diff_that_only_creates_files(patch_dir: PatchDirectory, tree: PatchedTree, tmp_path: Path) -> None:
    """The directory of a new file decides; where it is new too, --project does."""
    upstream = Upstream(tmp_path / "u", {"README": "x\n"})
    upstream.commit({"include/cutlass/fine.h": "fine\n"}, "fine")
    (tmp_path / "fine.patch").write_bytes(upstream.output("format-patch", "-1", "--stdout"))
    assert imported(tree, patch_dir.root, tmp_path / "fine.patch")[0].project == "cutlass"
    upstream.commit({"new/fine.h": "fine\n"}, "new")
    (tmp_path / "new.patch").write_bytes(upstream.output("format-patch", "-1", "--stdout"))
    with pytest.raises(BadInput, match="can be those of cutlass or flashinfer") as error:
        imported(tree, patch_dir.root, tmp_path / "new.patch")
    assert "--project" in error.value.hint
    with pytest.raises(NotFound, match="no project vllm"):
        imported(tree, patch_dir.root, tmp_path / "new.patch", project="vllm")
    assert imported(tree, patch_dir.root, tmp_path / "new.patch", project="flashinfer")[0].name == "flashinfer/new"


def created(path: bytes, mode: bytes = b"100644") -> bytes:
    return b"diff --git a/%s b/%s\nnew file mode %s\n--- /dev/null\n+++ b/%s\n@@ -0,0 +1 @@\n+x\n" % (path, path, mode, path)


def refused_files(tmp_path: Path) -> dict[str, tuple[bytes, str]]:
    upstream = cutlass_repository(tmp_path / "cutlass")
    mail = upstream.output("format-patch", "-1", "--stdout")
    diff = mail[mail.index(b"diff --git") : mail.index(b"-- \n")]
    return {
        "binary": (diff + b"diff --git a/b b/b\nindex 1..2 100644\nGIT binary patch\n", "binary file"),
        "cut": (diff[:-30], "corrupt patch at line"),
        "link": (created(b"csrc/l", b"120000"), "not a plain file"),
        "git": (created(b".git/x"), "belongs to git"),
        "up": (created(b"../x"), "leaves the project's tree"),
        "no context": (b"--- a/csrc/launcher.cu\n+++ b/csrc/launcher.cu\n@@ -4,0 +5 @@\n+x\n", "without context"),
        "absent": (b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n", "x does not exist"),
        "empty": (b"", "contains no diff"),
        "sides": (
            b"*** a/setup.py\n--- b/setup.py\n***************\n*** 1,2 ****\n! line 1\n  x\n--- 1,2 ----\n! y\n  z\n",
            "context",
        ),
        "noise": (bytes(range(256)) * 40, "contains no diff"),
        "docs": (created(b"docs/x.md"), "not in this distribution"),
        "both": (
            diff + b"diff --git a/csrc/launcher.cu b/csrc/launcher.cu\n--- a/csrc/launcher.cu\n+++ b/csrc/launcher.cu\n"
            b"@@ -1 +1 @@\n-line 1\n+x\n",
            "is not for this source",
        ),
    }


def test_refused_imports_write_nothing(patch_dir: PatchDirectory, tree: PatchedTree, tmp_path: Path) -> None:
    before = contents(patch_dir.root)
    for name, (content, problem) in refused_files(tmp_path).items():
        (tmp_path / f"{name}.diff").write_bytes(content)
        with pytest.raises(BadInput) as error:
            pytest.fail(f"{name}: {imported(tree, patch_dir.root, tmp_path / f'{name}.diff')}")
        assert problem in error.value.message and error.value.hint, (name, error.value.message)
    assert contents(patch_dir.root) == before


VARIANTS = {
    "without a header of git": lambda diff: diff[diff.index(b"--- ") :],
    "blank context": lambda diff: diff.replace(b"\n \n", b"\n\n"),
    "no prefix": lambda diff: diff[diff.index(b"--- ") :].replace(b"--- a/", b"--- ").replace(b"+++ b/", b"+++ "),
    "Subversion": lambda diff: b"Index: x\n" + b"=" * 67 + b"\n" + diff[diff.index(b"--- ") :],
    "times": lambda diff: diff[diff.index(b"--- ") :].replace(b".inl\n", b".inl\t2026-01-01 00:00:00 +0000\n"),
    "installation": lambda diff: diff[diff.index(b"--- ") :].replace(b"a/", b"/usr/lib/p/").replace(b"b/", b"/usr/lib/p/"),
    "Windows": lambda diff: diff.replace(b"\n", b"\r\n"),
    "indented": lambda diff: b"Try\n\n" + b"".join(b"    " + line for line in diff.splitlines(keepends=True)),
    "no last newline": lambda diff: diff.removesuffix(b"\n"),
    "text behind it": lambda diff: diff + b"\nand more\n",
    "other lines": lambda diff: diff.replace(b"@@ -17,7 +17,7 @@", b"@@ -12,7 +12,7 @@"),
    "less context": lambda diff: (
        diff.replace(b"@@ -17,7 +17,7 @@", b"@@ -18,5 +18,5 @@").replace(b" line 17\n", b"").replace(b" line 23\n", b"")
    ),
    "no context": lambda diff: diff[: diff.index(b"@@ ")] + b"@@ -20 +20 @@\n-line 20\n+twenty\n",
    "other context": lambda diff: diff.replace(b" line 17\n", b" older\n").replace(b" line 22\n", b" newer\n"),
    "context diff": lambda diff: (
        b"Like this:\n\n*** a/include/cutlass/builder.inl\n--- b/include/cutlass/builder.inl\n***************\n*** 17,21 ****\n"
        b"  line 17\n  \n  line 19\n! line 20\n  line 21\n--- 17,21 ----\n  line 17\n  \n  line 19\n! twenty\n  line 21\n"
    ),
    "byte order mark": lambda diff: b"\xef\xbb\xbf" + diff[diff.index(b"--- ") :],
    "edited copy": lambda diff: diff[diff.index(b"--- ") :].replace(b"+++ b/include/cutlass/", b"+++ /tmp/"),
    "copy of an installed file": lambda diff: (
        diff[diff.index(b"--- ") :].replace(b"--- a/", b"--- /usr/lib/p/").replace(b"+++ b/include/cutlass/", b"+++ /tmp/x/")
    ),
}


@pytest.mark.parametrize("form", VARIANTS)
def test_forms_of_a_diff_that_git_and_patch_take(
    patch_dir: PatchDirectory, tree: PatchedTree, tmp_path: Path, form: str
) -> None:
    kernel = KERNEL.replace("line 18\n", "\n")
    checkout = checkout_of(tmp_path / "with-blank", {**BASE, BUILDER: kernel})
    base = patches.apply(checkout, inside(), patch_dir.root, patch_dir.overrides)
    upstream = Upstream(tmp_path / "u", {"include/cutlass/builder.inl": kernel})
    upstream.commit({"include/cutlass/builder.inl": changed(kernel, 20, "twenty\n")}, "x")
    change = VARIANTS[form](upstream.output("diff", "HEAD^"))
    assert change != upstream.output("diff", "HEAD^")
    (tmp_path / "x.diff").write_bytes(change)
    patch, _ = imported(base, patch_dir.root, tmp_path / "x.diff")
    after = patches.apply(checkout, inside(), patch_dir.root, patch_dir.overrides)
    assert patch.project == "cutlass" and text_at(after, BUILDER) == changed(text_at(base, BUILDER), 20, "twenty\n")


REPEATED = KERNEL.replace("line 10\n", "line 20\n")


@pytest.mark.parametrize(
    ("source", "author", "options", "ids", "taken"),
    [
        (KERNEL, changed(KERNEL, 18, "x\n"), "-U3", True, True),
        (KERNEL, changed(KERNEL, 22, "x\n"), "-U3", False, True),
        (KERNEL, "more\n" * 5 + changed(KERNEL, 17, "x\n"), "-U3", False, True),
        (KERNEL, changed(KERNEL, 19, "x\n"), "-U3", True, False),
        (KERNEL * 2, KERNEL + changed(KERNEL, 18, "x\n"), "-U3", False, False),
        (KERNEL, KERNEL, "-U0", True, True),
        (KERNEL, "more\n" + KERNEL, "-U0", False, True),
        (REPEATED, REPEATED, "-U0", True, True),
        (REPEATED, REPEATED, "-U0", False, False),
        (REPEATED, "more\n" + REPEATED, "-U0", True, False),
    ],
)
def test_hunks_with_other_context_or_none_have_one_place_or_are_refused(
    source: str, author: str, options: str, ids: bool, taken: bool, patch_dir: PatchDirectory, tmp_path: Path
) -> None:
    """As ``patch`` takes them, but never at one of several places; without context, the blob id decides."""
    checkout = checkout_of(tmp_path / "r2", {**BASE, "csrc/mine.cu": source})
    base = patches.apply(checkout, inside(), patch_dir.root, patch_dir.overrides)
    upstream = Upstream(tmp_path / "u", {"csrc/mine.cu": author})

    def twenty(text: str) -> str:
        at = text.rindex("line 20\n")
        return text[:at] + "twenty\n" + text[at + len("line 20\n") :]

    upstream.commit({"csrc/mine.cu": twenty(author)}, "x")
    change = upstream.output("diff", options, "HEAD^")
    (tmp_path / "x.diff").write_bytes(change if ids else change[change.index(b"--- ") :])
    if not taken:
        with pytest.raises(PatchConflict):
            imported(base, patch_dir.root, tmp_path / "x.diff")
        return
    imported(base, patch_dir.root, tmp_path / "x.diff")
    after = patches.apply(checkout, inside(), patch_dir.root, patch_dir.overrides)
    assert text_at(after, "csrc/mine.cu") == twenty(source)


@pytest.mark.parametrize(
    ("source", "changed_to"),
    [("// more\n" + KERNEL, "// first\n" + KERNEL), (KERNEL + "// more\n", KERNEL + "// last\n")],
    ids=["begin", "end"],
)
def test_a_hunk_at_an_end_of_its_file_is_not_applied_inside_another(
    source: str, changed_to: str, patch_dir: PatchDirectory, tmp_path: Path
) -> None:
    """git and ``patch`` refuse it, too."""
    base = patches.apply(checkout_of(tmp_path / "r2", {**BASE, BUILDER: source}), inside(), patch_dir.root, patch_dir.overrides)
    upstream = Upstream(tmp_path / "u", {"include/cutlass/builder.inl": KERNEL})
    upstream.commit({"include/cutlass/builder.inl": changed_to}, "x")
    change = upstream.output("diff", "HEAD^")
    (tmp_path / "x.diff").write_bytes(change[change.index(b"--- ") :])
    with pytest.raises(PatchConflict):
        imported(base, patch_dir.root, tmp_path / "x.diff")


def test_a_hunk_at_its_line_decides_beside_one_that_is_displaced(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    """As ``patch`` takes it; the first hunk would fit at the second block, too."""
    block = "open\na\nb\nc\nclose\n"
    before, source = block * 2 + KERNEL, block * 2 + "more\n" + KERNEL
    checkout = checkout_of(tmp_path / "r2", {**BASE, "csrc/mine.cu": source})
    base = patches.apply(checkout, inside(), patch_dir.root, patch_dir.overrides)
    upstream = Upstream(tmp_path / "u", {"csrc/mine.cu": before})
    upstream.commit({"csrc/mine.cu": changed(before.replace("b\n", "B\n", 1), 20, "twenty\n")}, "x")
    change = upstream.output("diff", "-U1", "HEAD^")
    (tmp_path / "x.diff").write_bytes(change[change.index(b"--- ") :])
    imported(base, patch_dir.root, tmp_path / "x.diff")
    after = patches.apply(checkout, inside(), patch_dir.root, patch_dir.overrides)
    assert text_at(after, "csrc/mine.cu") == changed(source.replace("b\n", "B\n", 1), 20, "twenty\n")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (b"+++ /dev/null\n@@ -1,2 +0,0 @@\n-line 1\n-other\n", "it is deleted, but has other content"),
        (b"+++ b/csrc/launcher.cu\n@@ -5,2 +4,0 @@\n-line 5\n-other\n@@ -9 +7 @@\n-a\n+b\n", "hunk 1 fits no line"),
    ],
)
def test_deletion_of_other_lines_is_refused(
    change: bytes, problem: str, patch_dir: PatchDirectory, tree: PatchedTree, tmp_path: Path
) -> None:
    (tmp_path / "x.diff").write_bytes(b"--- a/csrc/launcher.cu\n" + change)
    with pytest.raises(PatchConflict, match=problem):
        imported(tree, patch_dir.root, tmp_path / "x.diff")


def test_mode_is_not_lost_where_context_differs(patch_dir: PatchDirectory, tree: PatchedTree, tmp_path: Path) -> None:
    upstream = Upstream(tmp_path / "u", {LAUNCHER: changed(KERNEL, 18, "x\n")})
    upstream.commit({LAUNCHER: changed(changed(KERNEL, 18, "x\n"), 20, "twenty\n")}, "x")
    change = upstream.output("diff", "HEAD^")
    file = tmp_path / "x.diff"
    file.write_bytes(
        change.replace(b"index ", b"old mode 100644\nnew mode 100755\nindex ", 1).replace(b" 100644\n---", b"\n---")
    )
    patch, _ = imported(tree, patch_dir.root, file)
    assert b"new mode 100755" in patch.diff and b"+twenty\n" in patch.diff


@pytest.mark.parametrize("line", ["1", "15", "30"])
def test_lines_added_without_context_belong_to_the_version_of_the_blob_id(
    line: str, patch_dir: PatchDirectory, tmp_path: Path
) -> None:
    checkout = checkout_of(tmp_path / "r2", {**BASE, "csrc/mine.cu": KERNEL})
    base = patches.apply(checkout, inside(), patch_dir.root, patch_dir.overrides)
    upstream = Upstream(tmp_path / "u", {"csrc/mine.cu": KERNEL})
    added = "first\n" + KERNEL if line == "1" else KERNEL.replace(f"line {line}\n", f"line {line}\nadded\n")
    upstream.commit({"csrc/mine.cu": added}, "x")
    change = upstream.output("diff", "-U0", "HEAD^")
    plain = tmp_path / "plain.diff"
    plain.write_bytes(change[change.index(b"--- ") :])
    with pytest.raises(BadInput):
        imported(base, patch_dir.root, plain)
    (tmp_path / "x.diff").write_bytes(change)
    imported(base, patch_dir.root, tmp_path / "x.diff")
    after = patches.apply(checkout, inside(), patch_dir.root, patch_dir.overrides)
    assert text_at(after, "csrc/mine.cu") == added


def test_a_rename_becomes_a_new_file_and_a_removed_one(patch_dir: PatchDirectory, tree: PatchedTree, tmp_path: Path) -> None:
    upstream = cutlass_repository(tmp_path / "cutlass")
    git_in(upstream.path, "mv", "README", "include/cutlass/readme.inl")
    (tmp_path / "x.diff").write_bytes(upstream.output("diff", "-M", "--cached"))
    checkout = checkout_of(tmp_path / "r2", {**BASE, "3rdparty/cutlass/README": "x\n"})
    base = patches.apply(checkout, inside(), patch_dir.root, patch_dir.overrides)
    patch, _ = imported(base, patch_dir.root, tmp_path / "x.diff")
    assert sorted(file.path for file in patch.files) == ["README", "include/cutlass/readme.inl"]


@pytest.mark.parametrize("year", [2030, 2000])  # of a rebased branch, the dates may be in any order
def test_import_of_a_mailbox_is_of_all_mails_or_of_none(
    patch_dir: PatchDirectory, tree: PatchedTree, tmp_path: Path, year: int
) -> None:
    upstream = cutlass_repository(tmp_path / "cutlass")
    upstream.commit({"include/cutlass/builder.inl": changed(CHANGED, 21, "twenty-one\n")}, "builder: next")
    git_in(upstream.path, "commit", "--amend", "--no-edit", "-q", f"--date={year}-01-02T03:04:05Z")
    for name, content in {
        "mails": upstream.output("format-patch", "-2", "--stdout"),
        "log": upstream.output("log", "-2", "-p", "--stat"),
        "reverse": upstream.output("log", "-2", "-p", "--reverse"),
    }.items():
        (tmp_path / name).write_bytes(content)
        before = contents(patch_dir.root)
        written = patches.import_patches(patches.read_diffs(tmp_path / name), tree, ImportTarget(), patch_dir.root)
        assert [each.file.stem for each in written] == ["sm120-builder-z-hlen", "builder-next"]
        assert [written_patch(each.file).author for each in written] == ["A. B <a@example.invalid>"] * 2
        after = patches.apply(tree.checkout, inside(), patch_dir.root, patch_dir.overrides)
        assert "twenty\ntwenty-one\n" in text_at(after, BUILDER)
        for path in set(contents(patch_dir.root)) - set(before):
            (patch_dir.root / path).unlink()
        for path, text in before.items():
            (patch_dir.root / path).write_text(text)
    bad = upstream.output("format-patch", "-2", "--stdout").replace(b" twenty\n", b" other\n")
    (tmp_path / "bad").write_bytes(bad)
    with pytest.raises(PatchConflict):
        patches.import_patches(patches.read_diffs(tmp_path / "bad"), tree, ImportTarget(), patch_dir.root)
    assert contents(patch_dir.root) == before


def test_import_of_a_mail_keeps_carriage_returns(patch_dir: PatchDirectory, tree: PatchedTree, tmp_path: Path) -> None:
    windows = KERNEL.replace("\n", "\r\n")
    checkout = checkout_of(tmp_path / "r2", {**BASE, "csrc/windows.cu": windows})
    base = patches.apply(checkout, inside(), patch_dir.root, patch_dir.overrides)
    upstream = Upstream(tmp_path / "u", {"csrc/windows.cu": ""})
    for text, message in ((windows, "a"), (windows.replace("line 20\r", "twenty\r"), "windows: twenty")):
        (upstream.path / "csrc/windows.cu").write_bytes(text.encode())
        upstream.commit({}, message)
    (tmp_path / "x.patch").write_bytes(upstream.output("format-patch", "-1", "--stdout"))
    imported(base, patch_dir.root, tmp_path / "x.patch")
    after = patches.apply(checkout, inside(), patch_dir.root, patch_dir.overrides)
    assert Repository(after.checkout.repository).read(after.tree, "csrc/windows.cu").count(b"twenty\r\n") == 1


def test_import_leaves_out_tests_that_the_source_does_not_have(
    patch_dir: PatchDirectory, tree: PatchedTree, tmp_path: Path
) -> None:
    upstream = Upstream(tmp_path / "u", {"csrc/launcher.cu": KERNEL, "tests/old.py": "1\n", "csrc/gone.cu": "1\n"})
    upstream.commit({"csrc/launcher.cu": changed(KERNEL, 20, "twenty\n"), "tests/old.py": "2\n", "tests/new.py": "3\n"}, "x")
    (tmp_path / "x.diff").write_bytes(upstream.output("diff", "HEAD^"))
    (written,) = patches.import_patches(patches.read_diffs(tmp_path / "x.diff"), tree, ImportTarget(), patch_dir.root)
    assert sorted(written.left_out) == ["tests/new.py", "tests/old.py"]
    assert [file.path for file in written_patch(written.file).files] == ["csrc/launcher.cu"]
    upstream.commit({"csrc/gone.cu": "2\n", "tests/old.py": "4\n"}, "x")
    (tmp_path / "y.diff").write_bytes(upstream.output("diff", "HEAD^"))
    with pytest.raises(BadInput, match=r"csrc/gone\.cu does not exist"):
        imported(tree, patch_dir.root, tmp_path / "y.diff")


def test_directory_is_put_before_paths(patch_dir: PatchDirectory, tree: PatchedTree, tmp_path: Path) -> None:
    upstream = Upstream(tmp_path / "u", {"launcher.cu": KERNEL})
    upstream.commit({"launcher.cu": changed(KERNEL, 20, "twenty\n")}, "x")
    (tmp_path / "x.diff").write_bytes(upstream.output("diff", "HEAD^"))
    with pytest.raises(BadInput, match=r"launcher\.cu does not exist"):
        imported(tree, patch_dir.root, tmp_path / "x.diff")
    patch, _ = imported(tree, patch_dir.root, tmp_path / "x.diff", directory="csrc")
    assert [file.path for file in patch.files] == ["csrc/launcher.cu"]


def test_blob_ids_merge_what_does_not_fit(patch_dir: PatchDirectory, tree: PatchedTree, tmp_path: Path) -> None:
    """A context line differs, and the source has the blob that the diff was made for: another path has it."""
    made_for = changed(KERNEL, 20, "older\n")
    checkout = checkout_of(tmp_path / "r2", {**BASE, "csrc/older.cu": made_for})
    base = patches.apply(checkout, inside(), patch_dir.root, patch_dir.overrides)
    upstream = Upstream(tmp_path / "u", {"csrc/launcher.cu": made_for})
    upstream.commit({"csrc/launcher.cu": changed(made_for, 22, "twenty-two\n")}, "x")
    change = upstream.output("diff", "--full-index", "HEAD^", "-U5")
    (tmp_path / "plain.diff").write_bytes(change[change.index(b"--- ") :])
    with pytest.raises(PatchConflict):
        imported(base, patch_dir.root, tmp_path / "plain.diff")
    (tmp_path / "x.diff").write_bytes(change)
    imported(base, patch_dir.root, tmp_path / "x.diff")
    after = patches.apply(checkout, inside(), patch_dir.root, patch_dir.overrides)
    assert text_at(after, LAUNCHER) == changed(text_at(base, LAUNCHER), 22, "twenty-two\n")


def test_import_does_not_replace_a_patch(patch_dir: PatchDirectory, tree: PatchedTree, tmp_path: Path) -> None:
    file = tmp_path / "first.diff"
    file.write_bytes(cutlass_repository(tmp_path / "cutlass").output("diff", "HEAD^"))
    before = contents(patch_dir.root)
    with pytest.raises(AlreadyExists, match="there is a patch cutlass/first already"):
        imported(tree, patch_dir.root, file)
    for name in ("..", "a/b", "x" * 200):
        with pytest.raises(BadInput):
            imported(tree, patch_dir.root, file, slug=name)
    assert contents(patch_dir.root) == before
    (patch_dir.root / "cutlass/unlisted.patch").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AlreadyExists):
        imported(tree, patch_dir.root, file, slug="unlisted")
    assert not (tmp_path / "elsewhere").exists()


def test_import_of_what_conflicts_or_is_there(patch_dir: PatchDirectory, tree: PatchedTree, tmp_path: Path) -> None:
    upstream = Upstream(tmp_path / "u", {"include/cutlass/builder.inl": changed(KERNEL, 10, "other\n")})
    upstream.commit({"include/cutlass/builder.inl": changed(KERNEL, 10, "mine\n")}, "x")
    (tmp_path / "x.diff").write_bytes(upstream.output("diff", "HEAD^"))
    with pytest.raises(PatchConflict, match=r"builder\.inl:7: hunk 1 fits no line") as error:
        imported(tree, patch_dir.root, tmp_path / "x.diff")
    assert "sm120kit patch edit" in error.value.hint
    (tmp_path / "there.diff").write_bytes(patch_dir.edit(BUILDER, 10, "ten\n"))
    upstream = Upstream(tmp_path / "v", {LAUNCHER: KERNEL})
    upstream.commit({LAUNCHER: changed(KERNEL, 3, "three\n")}, "x")
    (tmp_path / "there.diff").write_bytes(upstream.output("diff", "HEAD^"))
    with pytest.raises(PatchConflict):
        imported(tree, patch_dir.root, tmp_path / "there.diff")


def test_commit_without_trailers_is_exported_with_placeholders(
    patch_dir: PatchDirectory, tree: PatchedTree, tmp_path: Path
) -> None:
    clone = tmp_path / "clone"
    patches.edit(tree, clone, RECIPE, KEY)
    (clone / LAUNCHER).write_text(changed(text_at(tree, LAUNCHER), 20, "mine\n"))
    git_in(clone, "commit", "-q", "-a", "-m", "launcher: mine")
    assert {path.name for path in export_edits(clone, tree.checkout, patch_dir.root)} == {"launcher-mine.patch", "series"}
    patch = patches.find(patch_dir.root, "launcher-mine")
    assert patch.trailer("Applies-To") == "flashinfer ==0.6.6"
    lint = [problem.text for problem in patches.lint(patch_dir.root) if "to be filled in" in problem.text]
    assert [text.partition(" is")[0] for text in lint] == ["the message", *PLACEHOLDERS]
    assert export_edits(clone, tree.checkout, patch_dir.root) == []


def proof_of(patch_dir: PatchDirectory, name: str, hunks: str = "") -> Path:
    """A stored proof of a patch, which its ``Evidence`` names."""
    patch = patches.find(patch_dir.root, name)
    proof = evidence.path_of(patch_dir.root, name)
    proof.parent.mkdir(parents=True, exist_ok=True)
    side = {"error": "", "numbers": "proven"}
    probe = {"text": "collective", "code": True, "numbers": True}
    results = [{"probe": probe, "below": side, "above": side, "effects": ["changes code"]}]
    record = {"hunks_sha256": hunks or patch.hunks_sha256, "patch": name, "recipe": RECIPE, "results": results}
    proof.write_text(json.dumps({"proofs": [record, record | {"recipe": "another"}]}, indent=2) + "\n")
    file = patch_dir.root / f"{name}.patch"
    file.write_bytes(patch.content.replace(b"Evidence: ", f"Evidence: {evidence.PROOFS}/{name}.json, ".encode(), 1))
    return proof


def repository_around(patch_dir: PatchDirectory) -> None:
    """The files that tests name as evidence."""
    root = patch_dir.root.rename(patch_dir.path / "patches")
    assert root == patch_dir.root
    (patch_dir.path / "tests/unit").mkdir(parents=True)
    (patch_dir.path / "tests/unit/test_patches.py").write_text("# cutlass/second is below the third\nsecond\n")
    (patch_dir.path / "docs").mkdir()
    (patch_dir.path / "docs/seconds.md").write_text("seconds, split-second\n")


def test_check_reports_a_proof_of_other_hunks(patch_dir: PatchDirectory) -> None:
    repository_around(patch_dir)
    proof = proof_of(patch_dir, "cutlass/second")
    assert patches.lint(patch_dir.root) == []
    file = patch_dir.root / "cutlass/second.patch"
    file.write_bytes(file.read_bytes().replace(b"Why it exists.", b"Why it still exists."))
    assert patches.lint(patch_dir.root) == [], "the proof is of the hunks, not of the message"
    content = proof.read_text()
    for wrong, text in (
        (content.replace('"hunks_sha256": "', '"hunks_sha256": "0'), "is a proof of other hunks than those of the patch"),
        (content.replace("cutlass/second", "cutlass/first"), "is a proof of cutlass/first"),
        (content.replace('"changes code"', '"no effect"'), "shows no effect of the patch"),
        (
            json.dumps({"proofs": [*json.loads(content)["proofs"][1:], json.loads(content)["proofs"][0] | {"results": []}]}),
            "shows no effect of the patch",
        ),
        (
            content.replace('"changes code"', '"changes code", "no effect seen, code not compared"'),
            "does not compare the machine code of probe 'collective', which is compiled with --code",
        ),
        (content.replace("proven", "not checked", 1), "does not compare the numbers of probe 'collective'"),
        (content.replace('"results"', '"result"'), "is not a proof"),
        ("[]", "has no proof"),
        ('{"proofs": [1]}', "has no proof"),
        ("{", "has no proof"),
        ("[" * 100_000, "has no proof"),
    ):
        proof.write_text(wrong)
        (problem,) = patches.lint(patch_dir.root)
        assert problem.text.partition(": ")[0] == f"{evidence.PROOFS}/cutlass/second.json {text}".partition(": ")[0]
        assert file.read_text().splitlines()[problem.line - 1].startswith("Evidence: ")
    proof.unlink()
    assert [problem.text.partition(", ")[2] for problem in patches.lint(patch_dir.root)] == ["which does not exist"]


def test_drop_removes_file_line_and_proof(patch_dir: PatchDirectory, tree: PatchedTree) -> None:
    repository_around(patch_dir)
    proof = proof_of(patch_dir, "cutlass/second")
    series = patch_dir.root / "cutlass/series"
    series.write_text("# Section\n\n# why first\nfirst\n# Another\n\n# why second\nsecond # really\n")
    second = patches.find(patch_dir.root, "second")
    unpatched = PatchedTree(tree.checkout, tree.inside, tree.checkout.commit, tree.checkout.tree, ())
    assert patches.dependents(second, unpatched, patch_dir.root, patch_dir.overrides) == []
    changed_files = patches.drop(second, patch_dir.root, {RECIPE: []})
    assert {path.name for path in changed_files} == {"second.patch", "series", proof.name}
    assert series.read_text() == "# Section\n\n# why first\nfirst\n# Another\n\n"
    assert not proof.exists()
    assert patches.lint(patch_dir.root) == []


def test_drop_refuses_what_others_need(patch_dir: PatchDirectory, tree: PatchedTree) -> None:
    first = patches.find(patch_dir.root, "cutlass/first")
    unpatched = PatchedTree(tree.checkout, tree.inside, tree.checkout.commit, tree.checkout.tree, ())
    required_by = {RECIPE: patches.dependents(first, unpatched, patch_dir.root, patch_dir.overrides)}
    assert required_by == {RECIPE: ["cutlass/second"]}
    before = contents(patch_dir.root)
    with pytest.raises(PatchConflict, match=r"need cutlass/first:\n  cutlass/second in flashinfer-0\.6\.6"):
        patches.drop(first, patch_dir.root, required_by)
    assert contents(patch_dir.root) == before
    patches.drop(first, patch_dir.root, required_by, dependants=True)
    assert patches.load(patch_dir.root, "cutlass") == ()


def requiring(patch_dir: PatchDirectory, trailer: bytes = b"Requires: cutlass/first") -> None:
    """A patch of FlashInfer that applies without ``cutlass/first`` and is wrong without it, and one that needs that."""
    for slug, path, relation in (("tiles", "tiles.py", trailer), ("tests", "tests.py", b"Requires: flashinfer/tiles")):
        change = (
            patch_dir.edit(LAUNCHER, 3, "three\n", below="") if path == LAUNCHER else patch_dir.diff(BASE, {path: "n\n"}, "")
        )
        content = patch_text(change, "flashinfer", ">=0.6.1", f"launcher: {slug}")
        patch_dir.put(slug, content.replace(b"\nUpstream-Status", b"\n" + relation + b"\nUpstream-Status"), "flashinfer")


def test_drop_refuses_what_others_name_as_required(patch_dir: PatchDirectory) -> None:
    """Tiles of K = 64 apply without the mainloop that computes them right."""
    requiring(patch_dir)
    first, before = patches.find(patch_dir.root, "first"), contents(patch_dir.root)
    with pytest.raises(PatchConflict) as error:
        patches.drop(first, patch_dir.root, {})
    assert {"  flashinfer/tiles requires it", "  flashinfer/tests requires it"} <= {*error.value.message.splitlines()}
    assert contents(patch_dir.root) == before
    patches.drop(first, patch_dir.root, {}, dependants=True)
    assert [patch.slug for patch in patches.load(patch_dir.root, "cutlass")] == ["second"]
    assert [patch.slug for patch in patches.load(patch_dir.root, "flashinfer")] == ["third"] and patches.lint(
        patch_dir.root
    ) == []


def test_series_without_a_required_patch_is_not_applied(patch_dir: PatchDirectory, tree: PatchedTree) -> None:
    requiring(patch_dir)
    again = patches.apply(tree.checkout, inside(), patch_dir.root, patch_dir.overrides)
    assert [patch.slug for patch in again.patches] == ["first", "second", "third", "tiles", "tests"]
    for slug in ("first", "second"):
        (patch_dir.root / f"cutlass/{slug}.patch").unlink()
    (patch_dir.root / "cutlass/series").unlink()
    problems = [problem.text for problem in patches.lint(patch_dir.root)]
    assert "there is no patch cutlass/first" in problems
    patch_dir.put("first", patch_text(patch_dir.edit(BUILDER, 10, "ten\n"), versions=">=4.9"))
    with pytest.raises(PatchConflict, match="it requires cutlass/first, which is not applied"):
        patches.apply(tree.checkout, inside(), patch_dir.root, patch_dir.overrides)


def test_series_with_an_excluded_patch_is_not_applied(patch_dir: PatchDirectory, tree: PatchedTree) -> None:
    requiring(patch_dir, b"Conflicts: cutlass/nothing, cutlass/first")
    assert "there is no patch cutlass/nothing" in [problem.text for problem in patches.lint(patch_dir.root)]
    with pytest.raises(PatchConflict, match="it excludes cutlass/first, which is applied"):
        patches.apply(tree.checkout, inside(), patch_dir.root, patch_dir.overrides)
    states = patches.status(tree.checkout, inside(), patch_dir.root)
    assert {state.slug for state in states if state.state is PatchState.CONFLICTS} == {"tiles"}


def test_required_patch_comes_first_in_a_series(patch_dir: PatchDirectory) -> None:
    file = patch_dir.root / "cutlass/first.patch"
    file.write_bytes(file.read_bytes().replace(b"\nUpstream-Status", b"\nRequires: cutlass/second\nUpstream-Status"))
    assert [p.text for p in patches.lint(patch_dir.root)] == ["it requires cutlass/second, which comes later in the series"]


def test_drop_keeps_a_proof_that_another_patch_names(patch_dir: PatchDirectory) -> None:
    proof = proof_of(patch_dir, "cutlass/second")
    first = patch_dir.root / "cutlass/first.patch"
    first.write_bytes(
        first.read_bytes().replace(b"Evidence: ", f"Evidence: {evidence.PROOFS}/cutlass/second.json, ".encode(), 1)
    )
    patches.drop(patches.find(patch_dir.root, "second"), patch_dir.root, {})
    assert proof.exists()


def test_commands(patch_dir: PatchDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    from sm120kit.cli import app

    repository_around(patch_dir)
    monkeypatch.setenv("SM120KIT_DATA", str(patch_dir.path))
    monkeypatch.setenv("SM120KIT_STATE", str(patch_dir.path / "state"))
    (patch_dir.path / "recipes/engines").mkdir(parents=True)
    runner = CliRunner()
    result = runner.invoke(app, ["patch", "drop", "secondly"])
    assert isinstance(result.exception, NotFound)
    result = runner.invoke(app, ["patch", "drop", "first"])
    assert "removed " in result.stdout and "wrote " in result.stdout
    assert [patch.slug for patch in patches.load(patch_dir.root, "cutlass")] == ["second"]


def test_repository_of_a_tree_stays_as_it_is(patch_dir: PatchDirectory, tree: PatchedTree, tmp_path: Path) -> None:
    """An import makes no ref in the checkout that all commands share."""
    repository = Repository(tree.checkout.repository)
    before = repository.git("for-each-ref").stdout
    (tmp_path / "x.diff").write_bytes(cutlass_repository(tmp_path / "cutlass").output("diff", "HEAD^"))
    imported(tree, patch_dir.root, tmp_path / "x.diff")
    assert repository.git("for-each-ref").stdout == before


def test_wanted_changes_are_of_a_project_and_in_no_series() -> None:
    """Each has its origin; one that a series gets is removed from the list."""
    root = Path(__file__).parents[2] / "patches"
    listed = wanted(root, {"vllm", "sglang", "cutlass"})
    assert {each.project for each in listed} == {"vllm", "sglang", "cutlass"}
    assert {each.project for each in wanted(root, {"cutlass"})} == {"cutlass"}
    for each in listed:
        assert each.reason.startswith("https://github.com/") and len(each.reason.partition(": ")[2]) > 40
        assert not (root / each.project / f"{each.slug}.patch").exists()
    assert wanted(root / "cutlass", {"cutlass"}) == ()


def test_a_long_name_and_a_line_that_only_looks_like_a_mail_are_read_at_once(tmp_path: Path) -> None:
    long = tmp_path / "long.patch"
    long.write_text(f"--- a/{'x' * 15_000}\n+++ b/{'x' * 15_000}\nno hunk\n")
    assert len(patches.read_diffs(long)) == 1
    letter = tmp_path / "letter.patch"
    letter.write_text("From a colleague\n\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n")
    (read,) = patches.read_diffs(letter)
    assert read.diff.startswith(b"--- a/x")


def test_blank_lines_above_a_diff_are_read_in_linear_time(tmp_path: Path) -> None:
    above = tmp_path / "above.patch"
    above.write_text("\n \n" * 10_000 + "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n")
    start = time.process_time()
    (read,) = patches.read_diffs(above)
    assert read.diff.startswith(b"--- a/x") and time.process_time() - start < 5


def test_a_mailbox_of_too_many_mails_is_refused_before_it_is_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mails = tmp_path / "mails.mbox"
    mails.write_text("From a Thu Jan  1 00:00:00 2026\n\n" * 201 + "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(BadInput, match=r"mails\.mbox contains 201 patches"):
        patches.read_diffs(mails)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "large.patch").open("wb") as file:
        file.truncate(2**26 + 1)
    with pytest.raises(BadInput, match=r"large\.patch cannot be read: it has more than 64 MiB"):
        patches.read_diffs(tmp_path / "large.patch")
