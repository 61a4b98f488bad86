"""Diffs in the forms that git, GNU diff and editors write: the tree is that of their author, or the diff is refused."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from patch_series import KERNEL, changed, git_in, trees

from sm120kit.core import reporting
from sm120kit.core.errors import BadInput, PatchConflict
from sm120kit.patches.local import apply_local, read_local
from sm120kit.patches.patch_records import PatchedTree
from sm120kit.sources.git import Repository
from sm120kit.sources.origin import DEFAULT
from sm120kit.sources.source_records import Checkout, GitPin

FILES = {
    "vllm/a.py": KERNEL,
    "vllm/b.py": changed(KERNEL, 3, "three\n"),
    "vllm/ü.py": KERNEL,
    "vllm/__init__.py": "",
    "vllm/sub/one.py": "x = 1\n",
    "vllm/sub/two.py": "x = 1\n",
}


class Author:
    """A clone of the source that its author changes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        subprocess.run(["git", "init", "-q", path], check=True)
        for name, text in FILES.items():
            self.write(name, text)
        git_in(path, "add", "-A")
        git_in(path, "commit", "-q", "-m", "before")

    def write(self, name: str, text: str) -> None:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        (self.path / name).write_text(text)

    def move(self, old: str, new: str) -> None:
        (self.path / old).rename(self.path / new)

    def diff(self, *options: str) -> bytes:
        git_in(self.path, "add", "-A")
        return subprocess.run(
            ["git", "-C", self.path, "diff", "--cached", "-M", *options], check=True, capture_output=True
        ).stdout

    def files(self) -> dict[str, str]:
        found = (path for path in self.path.rglob("*") if path.is_file() and ".git" not in path.parts)
        return {str(path.relative_to(self.path)): path.read_text() for path in found}


def source(path: Path, files: dict[str, str]) -> PatchedTree:
    repository = Repository.init(path)
    (tree,) = trees(repository, files)
    commit = repository.commit_tree(tree, None, "base")
    return PatchedTree(Checkout(GitPin("vllm", "file:///nowhere", "0" * 40, "1.0"), path, commit, tree), (), commit, tree, ())


def patched(diff: bytes, root: Path) -> dict[str, str]:
    """The files of the source with a diff."""
    (root / "x.diff").write_bytes(diff)
    (after,) = apply_local(read_local([root / "x.diff"], DEFAULT), [source(root / "source.git", FILES)])
    Repository(after.checkout.repository).export(after.tree, root / "after")
    return {str(path.relative_to(root / "after")): path.read_text() for path in (root / "after").rglob("*") if path.is_file()}


def plain(diff: bytes) -> bytes:
    return re.sub(rb"(?m)^(diff --git|index) .*\n", b"", diff)


def displaced(diff: bytes) -> bytes:
    """A diff with the hunks of an older version, in which the change of a.py was at other lines."""
    return diff.replace(b"@@ -17,7 +17,7 @@", b"@@ -12,7 +12,7 @@")


def twenty(author: Author, name: str = "vllm/a.py") -> None:
    author.write(name, changed(FILES[name], 20, "twenty\n"))


def quoted(author: Author) -> bytes:
    twenty(author, "vllm/ü.py")
    return displaced(author.diff())


def quoted_rename(author: Author) -> bytes:
    author.move("vllm/ü.py", "vllm/ö.py")
    return author.diff()


def exchanged_names(author: Author) -> bytes:
    author.write("vllm/a.py", FILES["vllm/b.py"])
    author.write("vllm/b.py", FILES["vllm/a.py"])
    return author.diff("-B")


def filled(author: Author) -> bytes:
    author.write("vllm/__init__.py", "x = 1\n")
    return plain(author.diff())


def filled_beside(author: Author) -> bytes:
    twenty(author)
    return displaced(filled(author))


def empty_beside(author: Author) -> bytes:
    """As the ``__init__.py`` of a new package, in a diff of another version."""
    twenty(author)
    author.write("vllm/new/__init__.py", "")
    return displaced(author.diff())


def renamed_beside(author: Author) -> bytes:
    twenty(author)
    author.move("vllm/b.py", "vllm/b[1]*.py")
    return displaced(author.diff())


def double_slash(author: Author) -> bytes:
    twenty(author)
    return plain(author.diff("--src-prefix=a//", "--dst-prefix=b/./"))


def time_after_a_space(author: Author) -> bytes:
    twenty(author)
    return re.sub(rb"(?m)^((?:---|\+\+\+) .+)$", rb"\1 2026-01-05 10:00:00 +0100", displaced(plain(author.diff())))


def removed_without_context(author: Author) -> bytes:
    """As ``diff -U0``: reversed, it fits anywhere, but the source does not contain it."""
    author.write("vllm/a.py", changed(KERNEL, 20, ""))
    return displaced(plain(author.diff("-U0")))


def file_for_directory(author: Author) -> bytes:
    shutil.rmtree(author.path / "vllm/sub")
    author.write("vllm/sub", "x\n")
    return author.diff()


PICTURE = b"""\
diff --git a/docs/x.png b/docs/x.png
new file mode 100644
index 0000000..2222222
Binary files /dev/null and b/docs/x.png differ
"""


def link_beside(author: Author) -> bytes:
    """As a pull request with a link and a picture in the documentation, which the distribution does not have."""
    twenty(author)
    return PICTURE + displaced(author.diff()) + created("docs/link", "120000")


@pytest.mark.parametrize(
    "form",
    [
        link_beside,
        quoted,
        quoted_rename,
        exchanged_names,
        filled,
        filled_beside,
        empty_beside,
        renamed_beside,
        double_slash,
        time_after_a_space,
        removed_without_context,
        file_for_directory,
    ],
)
def test_tree_is_that_of_the_author(form: Callable[[Author], bytes], tmp_path: Path) -> None:
    author = Author(tmp_path / "author")
    assert patched(form(author), tmp_path) == author.files() != FILES


def created(path: str, mode: str = "100644") -> bytes:
    return f"diff --git a/{path} b/{path}\nnew file mode {mode}\n--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+x\n".encode()


COMBINED = b"""\
diff --cc vllm/b.py
index 1111111,2222222..3333333
--- a/vllm/b.py
+++ b/vllm/b.py
@@@ -1,1 -1,1 +1,1 @@@
- line 1
 -line one
++line both
"""


RENAMED = b"""\
diff --git a/vllm/gone.py b/vllm/other.py
similarity index 100%
rename from vllm/gone.py
rename to vllm/other.py
"""


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (RENAMED, "vllm/gone.py"),
        (created("vllm/link", "120000"), "vllm/link has mode 120000"),
        (created("vllm/module", "160000"), "vllm/module has mode 160000"),
        (PICTURE.replace(b"docs/", b"vllm/"), "vllm/x.png is a binary file"),
        (COMBINED, "combined diff of a merge"),
        (created("vllm/sub"), "in place of vllm/sub/"),
        (created("vllm/b.py/inner.py"), "in place of vllm/b.py"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_part_that_is_not_applied_as_it_stands_is_refused(more: bytes, problem: str, first: bool, tmp_path: Path) -> None:
    author = Author(tmp_path / "author")
    twenty(author)
    with pytest.raises((BadInput, PatchConflict)) as error:
        patched(more + author.diff() if first else author.diff() + more, tmp_path)
    assert problem in error.value.message and error.value.hint


def test_what_no_project_can_take_is_no_matter_of_the_recipe(tmp_path: Path) -> None:
    author = Author(tmp_path / "author")
    twenty(author)
    (tmp_path / "x.diff").write_bytes(author.diff("--word-diff"))
    several = [source(tmp_path / "one.git", FILES), source(tmp_path / "two.git", {"flashinfer/x.py": "x\n"})]
    with pytest.raises(BadInput) as error:
        apply_local(read_local([tmp_path / "x.diff"], DEFAULT), several)
    assert "corrupt patch at line" in error.value.message and "recipe" not in error.value.hint


def test_new_file_that_is_there_is_no_matter_of_the_recipe_either(tmp_path: Path) -> None:
    """As a diff of a new file that is given twice; other sources are not named."""
    (tmp_path / "x.diff").write_bytes(created("vllm/a.py"))
    several = [source(tmp_path / "one.git", FILES), source(tmp_path / "two.git", {"flashinfer/x.py": "x\n"})]
    with pytest.raises(BadInput) as error:
        apply_local(read_local([tmp_path / "x.diff"], DEFAULT), several)
    assert error.value.message.splitlines()[1:] == ["vllm:", "  vllm/a.py exists already"]
    assert "applied already" in error.value.hint


def test_files_that_a_diff_of_directories_lacks_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    author = Author(tmp_path / "author")
    twenty(author)
    said: list[str] = []
    monkeypatch.setattr(reporting, "info", said.append)
    lines = b"Only in eager mode.\nBinary files are no patch.\n"
    lines += b"Only in new/vllm: extra.py\nBinary files old/vllm/c.pyc and new/vllm/c.pyc differ\n"
    assert patched(plain(author.diff()) + lines, tmp_path) == author.files()
    assert [line.rpartition(": ")[2] for line in said if "no change" in line] == [
        "extra.py",
        "Binary files old/vllm/c.pyc and new/vllm/c.pyc differ",
    ]


def test_git_runs_as_often_for_many_new_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    run = Repository.git
    for count in (3, 60):
        author = Author(tmp_path / f"{count}/author")
        twenty(author)
        for number in range(count):
            author.write(f"vllm/new{number}.py", "x\n")
        runs.append(0)

        def counted(self: Repository, *arguments: object, **options: object) -> object:
            runs[-1] += 1
            return run(self, *arguments, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(Repository, "git", counted)
        assert patched(displaced(author.diff()), tmp_path / str(count)) == author.files()
    assert runs[0] == runs[1]


def test_nothing_is_written_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As git does for an empty file that is there already."""
    author = Author(tmp_path / "author")
    twenty(author)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    empty = b"diff --git a/vllm/__init__.py b/vllm/__init__.py\nnew file mode 100644\nindex 0000000..e69de29\n"
    assert patched(empty + author.diff(), tmp_path) == author.files()
    assert not [*(tmp_path / "cwd").iterdir()]
