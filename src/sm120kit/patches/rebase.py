"""Move a series to another version: ``git rebase`` of its patches in a directory like that of :func:`sm120kit.patches.edit`.

Each patch is a commit above the version that it was made for, which git picks onto the new one. At a conflict git stops,
and the developer goes on with git. The export of the directory writes the files, see :mod:`sm120kit.patches._moved`.
"""

import shlex
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sm120kit.core.disk import disk_errors
from sm120kit.core.errors import BadInput, CommandFailed, PatchConflict, SystemRefused
from sm120kit.core.temporary import publish_directory
from sm120kit.patches._apply import REFS, base_commit, commit_patch
from sm120kit.patches._edits import BASE, SERIES, EditRecord, names_in_commits
from sm120kit.patches.drift import steps
from sm120kit.patches.format import Patch
from sm120kit.patches.patch_records import PatchedTree, PatchState, TreeProject, projects_in_tree
from sm120kit.patches.series import load_for_tree
from sm120kit.sources.git import DATE, GitIndex, Repository
from sm120kit.sources.source_records import Checkout

_OLD = "refs/sm120kit/old"
"""In the directory of a rebase: the old version with its series."""

_COMMITTER = {"GIT_COMMITTER_NAME": "sm120kit", "GIT_COMMITTER_EMAIL": "sm120kit@localhost", "GIT_COMMITTER_DATE": DATE}


@dataclass(frozen=True)
class SeriesMove:
    """The two trees of a rebase and the files of the series.

    ``recipes`` are the recipes of ``old`` and ``onto`` as arguments of commands; ``onto`` is not patched. ``key`` seals the
    record of the directory. ``settled``: the recipe of ``onto`` is built in, and with it the built-in patches for its version.
    """

    old: PatchedTree
    onto: PatchedTree
    recipes: tuple[str, str]
    root: Path
    overrides: Path
    key: bytes
    settled: bool = False

    @property
    def old_projects(self) -> list[TreeProject]:
        """The projects of the old tree."""
        return projects_in_tree(self.old.checkout.pin, self.old.inside)

    @property
    def projects(self) -> dict[str, TreeProject]:
        """The projects of the new tree by name, in the order in which they are patched."""
        return {project.project: project for project in projects_in_tree(self.onto.checkout.pin, self.onto.inside)}

    @property
    def commits(self) -> dict[str, str]:
        """The commit of each patch on the old tree, by name."""
        return {f"{patch.project}/{patch.slug}": patch.commit for patch in self.old.patches}


@dataclass(frozen=True)
class RebaseProgress:
    """What became of each patch, in words, by its name; ``conflicts`` are the files at which git stopped."""

    states: Mapping[str, str]
    conflicts: tuple[str, ...] = ()


def begin(move: SeriesMove, directory: Path) -> RebaseProgress:
    """Make a directory with the new version and pick the patches of the old one onto it, until one conflicts or all are picked.

    Patches that are for the new version and apply there, and variants for it, are taken as they are. Those that are fixed
    upstream in the new version, by ``Fixed-In``, are left out.

    Raises:
        SystemRefused: the directory is not empty.
        BadInput: the new tree lacks a project that has patches.
        PatchConflict: a patch that is for the new version and not for the old one does not apply.
    """
    _require_projects(move)
    with disk_errors(directory):
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise SystemRefused(f"{directory} is not empty", "name a directory that does not exist yet")
    series = load_for_tree(move.onto.checkout.pin, move.onto.inside, move.root)
    skipped = dict(_not_moved(move, series))
    with publish_directory(directory.absolute()) as new:
        repository = Repository.init(new / ".git")
        base = _fetched(repository, move)
        picks = _picks(repository, move, base, [patch for patch in series if patch.name not in skipped])
        conflicts = _rebased(repository, new, picks)
        done = dict.fromkeys(names_in_commits(repository, BASE, "HEAD"), "moved")
        repository.make_worktree()
        versions = {project.project: project.version for project in move.old_projects}
        record = EditRecord.of(move.recipes[1], move.onto.checkout.pin, move.onto.inside, _present(move, series), (), versions)
        record.write(new / ".git", move.key)
    rest = dict.fromkeys(picks, "to be moved" if conflicts else "already upstream: nothing of it is left")
    return RebaseProgress(skipped | rest | done, conflicts)


def _require_projects(move: SeriesMove) -> None:
    """Require that the new tree has every project of the old tree."""
    missing = [project.project for project in move.old_projects if project.project not in move.projects]
    if missing:
        raise BadInput(
            f"recipe {move.recipes[1]} has no source {', '.join(missing)}, whose patches are to be moved",
            f"name a recipe of {move.old.checkout.pin.project}, or add [sources.{missing[0]}] to that one",
        )


def _not_moved(move: SeriesMove, series: list[Patch]) -> Iterator[tuple[str, str]]:
    """The patches of the old tree that are not moved, each with the reason.

    The new version has a fix of its own, a variant is for it, or the patch is built in and its recipe goes without.
    """
    for patch in (patch for patch in series if patch.name in move.commits):
        version = move.projects[patch.project].version
        if patch.is_fixed_in(version):
            yield patch.name, f"already upstream: Fixed-In {patch.project} {patch.trailer('Fixed-In')}"
        elif not patch.is_for(version):
            family = (p for p in series if (p.project, p.family) == (patch.project, patch.family))
            if variant := next((p for p in family if p.is_for(version)), None):
                yield patch.name, f"{variant.name} is for {patch.project} {version}"
            elif move.settled and not (move.root / f"{patch.name}.patch").is_file():
                yield patch.name, f"built-in, and not for {patch.project} {version}"


def _present(move: SeriesMove, series: list[Patch]) -> dict[str, str]:
    """The sha256 of each patch that is for the new version."""
    return {patch.name: patch.sha256 for patch in series if patch.is_for(move.projects[patch.project].version)}


def _fetched(repository: Repository, move: SeriesMove) -> str:
    """Fetch both versions; the new one with our headers is :data:`BASE`, whose commit is returned."""
    repository.fetch(move.old.checkout.repository, f"{REFS}/{move.old.commit}:{_OLD}")
    source = Repository(move.onto.checkout.repository)
    base, _ = base_commit(source, move.onto.checkout, move.onto.inside, move.overrides)
    source.set_ref(f"{REFS}/{base}", base)
    repository.fetch(source.path, f"{REFS}/{base}:{BASE}")
    return base


def _picks(repository: Repository, move: SeriesMove, base: str, series: list[Patch]) -> dict[str, str]:
    """The commit to pick for each patch, by name and in order."""
    tree = repository.tree_of(base)
    place = Checkout(move.onto.checkout.pin, repository.path, base, tree)
    known = [patch for patch in series if patch.is_for(move.projects[patch.project].version)]
    tried = {step.patch.name: step for step in steps(place, move.onto.inside, known, tree)}
    picks = {}
    for patch in series:
        step = tried.get(patch.name)
        if step and step.status.state is PatchState.APPLIES:
            picks[patch.name] = commit_patch(repository, patch, step.tree, repository.commit_tree(tree, None, "base"))
            tree = step.tree
        elif patch.name in move.commits:
            picks[patch.name] = move.commits[patch.name]
        elif step:
            version = move.projects[patch.project].version
            raise PatchConflict(
                f"{patch.name} is for {patch.project} {version} and does not apply to it: {step.status.state}\n"
                + step.status.detail,
                f"recipe {move.recipes[0]} does not have it, so it cannot be merged: correct it first",
            )
    return picks


def _rebased(repository: Repository, directory: Path, picks: Mapping[str, str]) -> tuple[str, ...]:
    """Check out :data:`BASE` as branch ``series`` and pick commits onto it; the files with conflicts if git stops."""
    work_tree = f"--work-tree={directory}"
    repository.set_ref(SERIES, BASE)
    repository.git("symbolic-ref", "HEAD", SERIES)
    repository.git(work_tree, "reset", "--quiet", "--hard")
    if not picks:
        return ()
    with tempfile.TemporaryDirectory(prefix="sm120kit-rebase-") as scratch:
        todo = Path(scratch) / "todo"
        todo.write_text("".join(f"pick {commit} {name}\n" for name, commit in picks.items()))
        env = {**_COMMITTER, "GIT_SEQUENCE_EDITOR": f"cp {shlex.quote(str(todo))}", "GIT_EDITOR": ":"}
        options = ("--interactive", "--empty=drop", "--no-autosquash", "--quiet")
        done = repository.git(
            work_tree, "-c", "merge.conflictStyle=zdiff3", "rebase", *options, BASE, env=env, check=False, tied=True
        )
    listed = GitIndex(repository, repository.path / "index").git("ls-files", "--unmerged", "-z").raw.decode(errors="replace")
    conflicts = tuple(dict.fromkeys(entry.partition("\t")[2] for entry in listed.split("\0") if entry))
    if done.returncode != 0 and not conflicts:
        raise CommandFailed(f"git rebase failed: {done.stderr.strip()}", "git 2.35 or newer is required")
    return conflicts
