"""``materialise`` repairs a directory after it was killed at any moment."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from sm120kit import patches
from sm120kit.core.record_files import write_record
from sm120kit.patches.patch_records import PatchedTree
from sm120kit.sources.git import Repository
from sm120kit.sources.source_records import Checkout, GitPin

FILES = 3000
SWITCH = """
import sys
from pathlib import Path
from sm120kit import patches
from sm120kit.patches.patch_records import PatchedTree
from sm120kit.core.record_files import read_record
patches.materialise(read_record(PatchedTree, Path(sys.argv[1])), Path(sys.argv[2]))
"""


def tree_of(path: Path, letter: str) -> PatchedTree:
    """A tree of many files: a third exist only in it, a third have their own content, a third are the same in every tree."""
    repository = Repository.init(path)
    stream = b"commit refs/heads/base\ncommitter a <a> 0 +0000\ndata 0\n"
    for number in range(FILES):
        name = f"{letter if number % 3 == 0 else 'all'}/{number % 50}/{number}"
        content = f"{letter if number % 3 == 1 else ''}{number}\n".encode() * 50
        stream += f"M 100644 inline {name}\ndata {len(content)}\n".encode() + content + b"\n"
    repository.git("fast-import", "--quiet", stdin=stream)
    commit = repository.git("rev-parse", "base").stdout.strip()
    checkout = Checkout(GitPin("p", "file:///nowhere", commit, "1"), path, commit, repository.tree_of(commit))
    return PatchedTree(checkout, (), commit, checkout.tree, ())


def content_of(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_materialise_survives_sigkill(tmp_path: Path) -> None:
    trees = {letter: tree_of(tmp_path / f"{letter}.git", letter) for letter in "ab"}
    expected = {}
    for letter, tree in trees.items():
        write_record(tmp_path / f"{letter}.json", tree)
        patches.materialise(tree, tmp_path / f"reference-{letter}")
        expected[letter] = content_of(tmp_path / f"reference-{letter}")
    work, interrupted = tmp_path / "work", 0
    for attempt in range(8):
        letter = "ab"[attempt % 2]
        argv = [sys.executable, "-c", SWITCH, str(tmp_path / f"{letter}.json"), str(work)]
        child = subprocess.Popen(argv)
        while child.poll() is None and (work / "a").exists() != (letter == "a"):  # until it writes
            time.sleep(0.001)
        time.sleep(0.004 * attempt)
        child.send_signal(signal.SIGKILL)
        child.wait()
        interrupted += content_of(work) not in expected.values()
        if attempt == 4:  # not after each attempt, so that leftovers accumulate
            patches.materialise(trees["b"], work)
            assert content_of(work) == expected["b"]
            patches.materialise(trees["a"], work)
    assert interrupted > 1
    patches.materialise(trees["a"], work)
    assert content_of(work) == expected["a"]
