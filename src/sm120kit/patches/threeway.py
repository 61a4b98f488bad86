"""Move one patch to another version: git's three-way merge, with the tree below the patch as base.

The merge is of whole trees without a working directory. Base and patched tree are those of the old version, with every file
outside the patch's project taken from the new one. So a project may lie at another path there, and git follows renamed files.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from sm120kit.core.errors import CommandFailed
from sm120kit.patches.conflicts import lines_present
from sm120kit.patches.diff import Hunk, Problem, scan
from sm120kit.patches.export import diff
from sm120kit.patches.locate import split_lines
from sm120kit.patches.patch_records import TreeProject
from sm120kit.sources.git import Repository


@dataclass(frozen=True)
class Pick:
    """A commit of a patch on the old version, ``commit``, to be merged into the tree ``onto`` of the new one.

    ``old`` and ``new`` are the projects in the two trees; ``project`` is the name of the patch's own.
    """

    commit: str
    onto: str
    project: str
    old: tuple[TreeProject, ...]
    new: tuple[TreeProject, ...]


@dataclass(frozen=True)
class Merge:
    """The result of merging a :class:`Pick`: the tree, and with conflicts the entries for the index of each such file.

    A file with conflicts has conflict markers in ``tree``. ``entries`` are lines of git's index, ``<mode> <blob> <stage>``, tab
    and path. ``commit`` is that of the patch, with the files of the new version outside its project.
    """

    tree: str
    entries: tuple[str, ...]
    commit: str

    @property
    def conflicts(self) -> list[str]:
        """The paths of the files with conflicts."""
        return list(dict.fromkeys(entry.partition("\t")[2] for entry in self.entries))


class HunkState(StrEnum):
    """The result of merging one hunk of a patch alone."""

    MERGED = "merged"
    UPSTREAM = "already upstream"
    CONFLICTS = "conflicts"
    NO_FILE = "no such file"


def merge(repository: Repository, pick: Pick, labels: tuple[str, str]) -> Merge:
    """Merge a patch. ``labels`` name the new version and the patch in conflict markers; both are names of git branches."""
    base = repository.commit_tree(_transplanted(repository, f"{pick.commit}^", pick), None, "base")
    onto = repository.commit_tree(pick.onto, base, "onto")
    patched = recommit(repository, pick.commit, _transplanted(repository, pick.commit, pick), base)
    for label, commit in zip(labels, (onto, patched), strict=True):
        repository.set_ref(f"refs/heads/{label}", commit)
    arguments = ["merge-tree", "--write-tree", "-z", "--no-messages", *labels]
    merged = repository.git("-c", "merge.conflictStyle=zdiff3", *arguments, check=False)
    if merged.returncode not in (0, 1):
        raise CommandFailed(f"git merge-tree failed: {merged.stderr.strip()}", "git 2.38 or newer is required")
    tree, *entries = [entry for entry in merged.raw.decode(errors="replace").split("\0") if entry]
    return Merge(tree, tuple(entries), patched)


def recommit(repository: Repository, commit: str, tree: str, parent: str) -> str:
    """Commit ``tree`` with the message, author and date of another commit; returns the commit id."""
    form = "%an <%ae>%x00@%at %ad%x00%B"
    log = repository.git("log", "-1", "--encoding=UTF-8", "--date=format:%z", f"--format={form}", commit)
    author, date, message = log.raw.decode(errors="replace").split("\0")
    return repository.commit_tree(tree, parent, f"{message.strip()}\n", author=author, date=date)


def hunk_states(repository: Repository, pick: Pick) -> list[tuple[Hunk, HunkState, list[int]]]:
    """What becomes of each hunk of a patch when it is merged alone. The paths are those in the new tree.

    The numbers of lines follow if the new file has all lines that it adds near by: merged, they would be there twice.
    """
    trees = [_transplanted(repository, commit, pick) for commit in (f"{pick.commit}^", pick.commit)]
    problems: list[Problem] = []
    states: list[tuple[Hunk, HunkState, list[int]]] = []
    for hunk in scan(diff(repository, *trees), Path(pick.commit), 1, problems).hunks:
        try:
            contents = [repository.read(tree, hunk.path) for tree in (trees[0], pick.onto)]
        except FileNotFoundError:
            states.append((hunk, HunkState.NO_FILE, []))
            continue
        state = _merge_hunk(repository, hunk, *contents)
        present = [] if state is HunkState.UPSTREAM else lines_present(hunk, split_lines(contents[1]))
        states.append((hunk, state, present))
    return states


def _merge_hunk(repository: Repository, hunk: Hunk, base: bytes, onto: bytes) -> HunkState:
    """Merge a hunk that applies to ``base`` at its line into ``onto``."""
    lines = split_lines(base)
    first = hunk.start - bool(hunk.old)
    patched = b"".join([*lines[:first], *hunk.new, *lines[first + len(hunk.old) :]])
    with tempfile.TemporaryDirectory(prefix="sm120kit-hunk-") as scratch:
        files = [Path(scratch) / name for name in ("onto", "base", "patched")]
        for file, content in zip(files, (onto, base, patched), strict=True):
            file.write_bytes(content)
        merged = repository.git("merge-file", "-p", "-q", *files, check=False)
    if merged.returncode != 0:
        return HunkState.CONFLICTS
    return HunkState.UPSTREAM if merged.raw == onto else HunkState.MERGED


def _transplanted(repository: Repository, commit: str, pick: Pick) -> str:
    """The tree ``pick.onto`` with the files of the patch's project replaced by those of an old commit."""
    old, new = (next(p for p in projects if p.project == pick.project) for projects in (pick.old, pick.new))
    if new.path:
        with repository.index(pick.onto) as index:
            index.graft(new.path, repository.subtree(commit, old.path) if old.path else repository.tree_of(commit))
            return index.write_tree()
    with repository.index(commit) as index:
        for project in pick.old:
            if project.path:
                index.remove(project.path)
        for project in pick.new:
            if project.path:
                index.graft(project.path, repository.subtree(pick.onto, project.path))
        return index.write_tree()
