"""Time of operations on a repository by git, as :class:`sm120kit.sources.git.Repository` runs it, and by GitPython.

    python tests/bench/bench_gitpython.py CHECKOUT

CHECKOUT is a directory of FlashInfer below ``checkouts/`` of a state directory, with a patched commit; a copy of it is used.
Prints the medians of 20 calls in one process, after a first call, and of 5 imports of GitPython. Asserts nothing.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from sm120kit.sources.git import Repository
from sm120kit.sources.git_objects import git

CUTLASS = "3rdparty/cutlass/include"
IMPORT = "import time, sm120kit.patches.edits; t = time.perf_counter(); import git; print(time.perf_counter() - t)"


def milliseconds(call: Callable[[], object], calls: int = 20) -> float:
    """The median time of a call."""
    call()
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


def main() -> None:
    """Print a row per operation."""
    imports = [subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, check=True).stdout for _ in range(5)]
    print(f"import git: {1e3 * statistics.median(map(float, imports)):.1f} ms")
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(shutil.copytree(sys.argv[1], Path(scratch) / "copy"))
        repository, repo = Repository(copy), git.Repo(copy, expand_vars=False)
        base = repository.git("rev-parse", "refs/heads/base").stdout.strip()
        tip = repository.git("for-each-ref", "--count=1", "--format=%(objectname)", "refs/sm120kit/patched").stdout.strip()
        tree, file = repository.tree_of(base), f"{CUTLASS}/cutlass/version.h"
        env = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "b"}

        def files(below: git.Tree) -> list[object]:
            return [entry.path for entry in below.traverse() if entry.type == "blob"]

        rows: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "tree_of": (lambda: repository.tree_of(base), lambda: repo.commit(base).tree.hexsha),
            "subtree": (lambda: repository.subtree(base, CUTLASS), lambda: repo.commit(base).tree[CUTLASS].hexsha),
            "read": (lambda: repository.read(base, file), lambda: repo.commit(base).tree[file].data_stream.read()),
            "paths": (lambda: repository.paths(base), lambda: files(repo.commit(base).tree)),
            "changed": (lambda: repository.changed(base, tip), lambda: repo.commit(base).diff(tip)),
            "commit_tree": (
                lambda: repository.git("commit-tree", tree, "-p", base, stdin=b"x", env=env),
                lambda: repository.commit_tree(tree, base, "x"),
            ),
            "set_ref": (
                lambda: repository.set_ref("refs/x/git", base),
                lambda: git.Reference(repo, "refs/x/gitpython").set_object(base),
            ),
        }
        print(f"{'ms':12} {'git':>7} {'GitPython':>9}")
        for name, (own, other) in rows.items():
            print(f"{name:12} {milliseconds(own):7.2f} {milliseconds(other):9.2f}")
        print(len(repository.paths(base)), "files,", len(repository.changed(base, tip)), "changed")
        repo.close()


if __name__ == "__main__":
    main()
