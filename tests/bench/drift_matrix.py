"""Time of ``sm120kit patch drift``: cold, warm, and the ratio of cold to the bare ``git apply --check`` calls.

    python tests/bench/drift_matrix.py [PROJECT...]

Needs the sdists in the state directory of the environment, where a first run of the command downloads and imports them.
The bare calls are one ``git apply --cached --check`` for each patch and release, on an index that has the release's files;
reading the trees into the indexes is not counted. Cold is the same work done by the command's function, without stored states,
and includes reading the records. Both run in this process, in turn, so that other work on the machine affects them alike.
Warm is the whole command. Prints a table, asserts nothing.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from sm120kit.cli.patch_drift import _upstreams
from sm120kit.core.data_roots import data_root
from sm120kit.core.workspace import Workspace
from sm120kit.patches import matrix
from sm120kit.patches.drift import git_apply
from sm120kit.patches.format import Patch
from sm120kit.patches.patch_records import TreeProject
from sm120kit.patches.series import load
from sm120kit.sources.git import GitIndex, Repository
from sm120kit.sources.origin import Origin
from sm120kit.sources.releases import Releases

ROUNDS = 7
ROOT = data_root() / "patches"


def remove_states(workspace: Workspace) -> None:
    """Remove the stored states; the imported files stay."""
    for record in (workspace.cache / "drift").glob("*.json"):
        record.unlink()


UPSTREAMS = _upstreams()


@contextlib.contextmanager
def indexes(workspace: Workspace, wanted: list[str]) -> Iterator[list[tuple[GitIndex, Patch, TreeProject]]]:
    """An index for each imported release, and the arguments of every bare call."""
    calls = []
    with contextlib.ExitStack() as stack:
        for upstream in UPSTREAMS:
            patches = [patch for name in upstream.projects if name in wanted for patch in load(ROOT, name)]
            for directory in sorted((workspace.cache / "drift").glob("*/repository")):
                repository = Repository(directory)
                subject = repository.git("log", "-1", "--format=%s", "refs/heads/base").stdout
                if subject.startswith(f"{upstream.distribution} ") and patches:
                    index = stack.enter_context(repository.index("refs/heads/base"))
                    for patch in patches:
                        path = "" if patch.project == upstream.project else upstream.cutlass
                        calls.append((index, patch, TreeProject(patch.project, path, "0")))
        yield calls


def main() -> None:
    """Print medians and ranges."""
    wanted = sys.argv[1:] or matrix.with_releases(ROOT, UPSTREAMS)
    workspace = Workspace.open()
    releases = Releases(workspace, Origin(offline=True))
    rows = matrix.drift_matrix(UPSTREAMS, wanted, ROOT, releases)
    bare, cold, warm = [], [], []
    with indexes(workspace, wanted) as calls:
        for _ in range(ROUNDS):
            started = time.perf_counter()
            for index, patch, project in calls:
                git_apply(index, patch, project, "--check")
            bare.append(time.perf_counter() - started)
            remove_states(workspace)
            started = time.perf_counter()
            matrix.drift_matrix(UPSTREAMS, wanted, ROOT, releases)
            cold.append(time.perf_counter() - started)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    argv = [sys.executable, "-m", "sm120kit", "patch", "drift", *sys.argv[1:]]
    for _ in range(ROUNDS + 1):
        started = time.perf_counter()
        subprocess.run(argv, stdout=subprocess.DEVNULL, check=True)
        warm.append(time.perf_counter() - started)
    ratios = [c / b for c, b in zip(cold, bare, strict=True)]
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {ROUNDS} rounds; {Path(workspace.root)}")
    print(f"{len(rows)} releases, {sum(len(row.cells) for row in rows)} states, {len(calls)} bare calls")
    for name, figures, unit in (("bare", bare, "s"), ("cold", cold, "s"), ("cold / bare", ratios, ""), ("warm", warm[1:], "s")):
        print(f"{name:12} {statistics.median(figures):6.2f}{unit}  {min(figures):.2f} to {max(figures):.2f}")


if __name__ == "__main__":
    main()
