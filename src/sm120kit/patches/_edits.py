"""Edit a series: a directory with a commit per patch, whose commits become the patch files again.

A file in its ``.git`` records what it was created from: recipe, pin, and the patches of the series.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from sm120kit.core import reporting
from sm120kit.core.atomic_writes import write_atomic
from sm120kit.core.digests import digest_of
from sm120kit.core.disk import disk_errors
from sm120kit.core.errors import BadInput, Mismatch, PatchConflict, SystemRefused
from sm120kit.core.outside import read_found
from sm120kit.core.record_files import record_json
from sm120kit.patches._apply import REFS
from sm120kit.patches._export import export, write_back
from sm120kit.patches._moved import Moved, write_moved
from sm120kit.patches._reconcile import BothChanged, Sides, by_name, rebuild
from sm120kit.patches.format import Patch
from sm120kit.patches.patch_records import PatchedTree, projects_in_tree
from sm120kit.patches.series import load_for_tree
from sm120kit.sources.git import Repository
from sm120kit.sources.source_records import Pin, VendoredProject

BASE = "refs/sm120kit/base"
"""In a repository that :func:`edit` made: the commit below the series."""

_RECORDED = "refs/sm120kit/recorded"
"""In a copy of such a repository: the last commit of the series when it was made or exported."""

SERIES = "refs/heads/series"
"""In a repository that :func:`edit` made: the branch with a commit per patch."""

_FILE = "sm120kit.json"
"""The file below ``.git`` with an :class:`EditRecord` and, in the first line, its seal.

The directory may come from an archive or another person: what its record orders is followed only if the seal, an HMAC (RFC
2104) with the key of the state directory, shows that it was written with that.
"""


def _seal(key: bytes, text: str) -> str:
    return hmac.new(key, f"{_FILE}\0{text}".encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class EditRecord:
    """The origin of a directory that :func:`edit` made.

    ``pin`` is the digest of the recipe's pins, ``series`` that of ``patches``: the sha256 of each applied patch by name, in
    order. ``commits`` are the commits of the series. ``series`` is empty if the directory lacks changes of ``patches``, with
    which its commits were merged. ``moved`` has the version of each project that the commits of a rebase are moved from.
    """

    recipe: str
    pin: str
    series: str
    patches: dict[str, str]
    commits: tuple[str, ...]
    moved: Mapping[str, str]

    @classmethod
    def of(
        cls,
        recipe: str,
        pin: Pin,
        inside: tuple[VendoredProject, ...],
        patches: dict[str, str],
        commits: Sequence[str],
        moved: Mapping[str, str] = MappingProxyType({}),
    ) -> EditRecord:
        """The record of a recipe with these patches."""
        return cls(recipe, digest_of([pin, inside]), digest_of(list(patches.items())), patches, tuple(commits), dict(moved))

    def write(self, git: Path, key: bytes) -> None:
        """Write the record to the directory ``.git`` of a repository, sealed with a key."""
        text = record_json(self)
        write_atomic(git / _FILE, f"{_seal(key, text)}\n{text}".encode())

    @classmethod
    def read(cls, git: Path, key: bytes) -> EditRecord | None:
        """The record in the directory ``.git`` of a repository, or None if there is none that was sealed with the key."""
        file = git / _FILE
        if file.is_symlink() or not file.is_file():
            return None
        from pydantic import TypeAdapter  # imported here: it takes long, and few commands read a record

        found, _, text = read_found(file).decode(errors="replace").partition("\n")
        return (
            TypeAdapter(cls).validate_json(text)
            if hmac.compare_digest(_seal(key, text).encode(), found.encode(errors="replace"))
            else None
        )


def edit(tree: PatchedTree, directory: Path, recipe: str, key: bytes) -> None:
    """Create a git repository in ``directory`` with the series as commits on branch ``series``, for a developer to edit.

    ``recipe`` is the recipe of the tree as an argument of commands; ``key`` seals the record of the directory.

    Raises:
        SystemRefused: the directory is not empty, or a file.
    """
    with disk_errors(directory):
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise SystemRefused(f"{directory} is not empty", "name a directory that does not exist yet")
        directory.mkdir(parents=True, exist_ok=True)
    repository = Repository.init(directory / ".git")
    base = f"{tree.patches[0].commit}^" if tree.patches else tree.commit
    repository.fetch(tree.checkout.repository, f"{REFS}/{tree.commit}:{SERIES}")
    repository.git("update-ref", BASE, base)
    repository.git("symbolic-ref", "HEAD", SERIES)
    repository.git(f"--work-tree={directory}", "reset", "--quiet", "--hard")
    repository.make_worktree()
    patches = {f"{patch.project}/{patch.slug}": patch.sha256 for patch in tree.patches}
    commits = [patch.commit for patch in tree.patches]
    record = EditRecord.of(recipe, tree.checkout.pin, tree.inside, patches, commits)
    record.write(directory / ".git", key)


def names_in_commits(repository: Repository, base: str, tip: str) -> list[str]:
    """The names in the trailers ``Patch`` of the commits above ``base`` up to ``tip``, the first commit first."""
    form = "--format=%(trailers:key=Patch,valueonly)"
    return repository.git("log", "--reverse", form, f"{base}..{tip}").stdout.split()


@dataclass(frozen=True)
class EditedSource:
    """The source of a recipe, which is named as an argument of commands; ``pinned`` are the versions that recipes pin."""

    recipe: str
    pin: Pin
    inside: tuple[VendoredProject, ...]
    pinned: Mapping[str, Collection[str]] = field(default_factory=dict)


def export_edits(directory: Path, source: EditedSource, root: Path, key: bytes, overwrite: Collection[str] = ()) -> list[Path]:
    """Write the commits of a directory of :func:`edit`, or of a rebase, to the series below ``root``; the files that changed.

    If the series changed since, the two are merged patch by patch; the directory stays as it is.
    ``pin`` and ``inside`` are those of ``recipe``; ``key`` is that with which the directory was made. For ``overwrite`` see
    :func:`write_back`.

    Raises:
        Mismatch: ``edit`` did not make the directory with this key, or made it from other pins, or the series changed since
            and cannot be merged.
        BadInput: the directory has uncommitted changes or another branch than ``series``, or see :func:`export`.
        AlreadyExists: see :func:`write_back`.
    """
    recipe, pin, inside = source.recipe, source.pin, source.inside
    edited = directory.absolute() / ".git"
    with tempfile.TemporaryDirectory(prefix="sm120kit-series-") as scratch:
        # The configuration of the edited repository may name programs to run, so git works on a copy.
        repository = Repository.init(Path(scratch) / "repository")
        record = EditRecord.read(edited, key)
        result = repository.fetch(edited, f"{BASE}:{BASE}", f"HEAD:{SERIES}", check=False) if record else None
        if record is None or result is None or result.returncode != 0:
            reason = f": {result.stderr.strip().splitlines()[0]}" if result and result.stderr.strip() else ""
            raise Mismatch(
                f"{directory} was not made by this version's `sm120kit patch edit` with this state directory{reason}",
                "name the state directory that it was made with: --state; or start with `sm120kit patch edit RECIPE --into NEW`"
                f" and pick its commits: in NEW, git fetch {edited} HEAD && git cherry-pick COMMIT; from somebody else's"
                " repository: git format-patch, then sm120kit patch import FILE",
            )
        repository.git("symbolic-ref", "HEAD", SERIES)
        commits = repository.git("rev-list", "--reverse", f"{BASE}..{SERIES}").stdout.split()
        series = load_for_tree(pin, inside, root)
        present = EditRecord.of(recipe, pin, inside, _applied(pin, inside, series), commits)
        _require_same_origin(directory, record, present)
        if (edited / "HEAD").read_text(errors="replace").strip() != f"ref: {SERIES}":
            raise BadInput(
                f"HEAD of {directory} is not branch series: a rebase is not finished, or another branch is checked out",
                "finish with `git rebase --continue`, or `git switch series`; `git branch -f series` moves series to HEAD",
            )
        with repository.index(SERIES) as index:
            if changes := index.git(f"--work-tree={directory}", "status", "--porcelain", "--ignore-submodules=dirty").stdout:
                raise BadInput(f"{directory} has uncommitted changes:\n{changes.rstrip()}", "commit or remove them")
        projects = projects_in_tree(pin, inside)
        exported = export(repository, BASE, SERIES, projects)
        merge = record.series != present.series
        meanwhile: list[str] = []
        if merge and record.moved:
            raise Mismatch(f"the series changed since the rebase in {directory} began", "rebase into a new directory")
        if merge:
            recorded = _recorded_tip(repository, edited, record)
            before = export(repository, BASE, recorded, projects)
            sides = Sides(
                by_name(before, series, projects),
                by_name(exported, series, projects),
                record.patches,
                {patch.name: patch for patch in series if patch.name in present.patches},
            )
            meanwhile = sides.changes
            try:
                if recorded == BASE and record.commits:
                    raise BothChanged("  its commits of that time are gone")
                merged = rebuild(repository, BASE, pin, inside, sides.merged())
            except (BothChanged, PatchConflict) as reason:
                message = f"the series changed since {directory} was made, and cannot be merged with it:\n{reason}"
                listed = "".join(f"\n  {change}" for change in meanwhile)
                raise Mismatch(message + listed, _by_hand(directory, present.recipe, sides.own)) from None
            exported = export(repository, BASE, merged, projects)
        if record.moved:
            changed = write_moved(repository, exported, Moved(projects, record.moved, source.pinned), root)
        else:
            changed = write_back(repository, exported, projects, root, overwrite)
        for change in meanwhile:
            reporting.info(f"kept, although {directory} lacks it: {change}")
        if changed or record.moved:
            after = EditRecord.of(recipe, pin, inside, _applied(pin, inside, load_for_tree(pin, inside, root)), commits)
            (replace(after, series="") if merge else after).write(edited, key)
        return changed


def _recorded_tip(repository: Repository, edited: Path, record: EditRecord) -> str:
    """The last commit of a directory when it was made or exported, fetched from it; its base if that is gone."""
    tip = record.commits[-1] if record.commits else BASE
    if re.fullmatch("[0-9a-f]{40}", tip):
        return _RECORDED if repository.fetch(edited, f"{tip}:{_RECORDED}", check=False).returncode == 0 else BASE
    return BASE


def _applied(pin: Pin, inside: tuple[VendoredProject, ...], patches: Sequence[Patch]) -> dict[str, str]:
    """The sha256 of each patch that is for a tree, by name, in order."""
    versions = {project.project: project.version for project in projects_in_tree(pin, inside)}
    return {patch.name: patch.sha256 for patch in patches if patch.is_for(versions[patch.project])}


def _require_same_origin(directory: Path, record: EditRecord, present: EditRecord) -> None:
    """Require that a directory was made from the pins that are ``present``."""
    if record.pin != present.pin:
        raise Mismatch(
            f"{directory} was made from recipe {record.recipe}, not from {present.recipe}"
            if record.recipe != present.recipe
            else f"{directory} was made from other sources than those that recipe {present.recipe} pins",
            f"sm120kit patch export {record.recipe} --from {directory}"
            if record.recipe != present.recipe
            else f"start with `sm120kit patch edit {present.recipe} --into DIR` and cherry-pick your commits",
        )


def _by_hand(directory: Path, recipe: str, own: Sequence[str]) -> str:
    """The commands that move the changed commits of a directory to a new one."""
    picks = " ".join(commit[:12] for commit in own)
    steps = f"; in NEW: git fetch {directory.absolute()} && git cherry-pick {picks}" if own else ""
    squash = f"; make one commit of those with the same line Patch: git rebase -i {BASE}; export from NEW" if own else ""
    return f"sm120kit patch edit {recipe} --into NEW{steps}{squash}"
