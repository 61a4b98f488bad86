"""Merge the commits of an edited directory with changes of the series since it was made, patch by patch.

A patch that only one side changed, added or removed is taken from that side. Of one that both changed, git merges the trees
that its versions give, and the messages. The result is rebuilt as commits, each of which must apply, before a file is written.
"""

import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.specifiers import SpecifierSet

from sm120kit.core.errors import BadInput, PatchConflict
from sm120kit.patches._apply import commit_patch
from sm120kit.patches._export import Exported
from sm120kit.patches.drift import steps
from sm120kit.patches.format import Patch
from sm120kit.patches.patch_records import PatchState, TreeProject
from sm120kit.sources.git import Repository
from sm120kit.sources.source_records import Checkout, Pin, VendoredProject


class BothChanged(Exception):
    """Both sides changed the same; each line of the message has two leading spaces."""


@dataclass(frozen=True)
class BothVersions:
    """A patch that both sides changed: as it was, as the directory has it, and as the series has it."""

    before: Patch
    edited: Patch
    present: Patch

    @property
    def name(self) -> str:
        """The name of the patch."""
        return self.present.name

    @property
    def project(self) -> str:
        """The project of the patch."""
        return self.present.project


@dataclass(frozen=True)
class Sides:
    """The patches of the directory and of the series, by name and in order: before, and now.

    ``recorded`` has the sha256 of the files of the series when the directory was made or exported.
    """

    before: Mapping[str, Exported]
    edited: Mapping[str, Exported]
    recorded: Mapping[str, str]
    present: Mapping[str, Patch]

    @property
    def own(self) -> list[str]:
        """The commits of the directory whose patch it changed or added."""
        changed = ((name, _content(self.before.get(name))) for name in self.edited)
        return [self.edited[name].commit for name, before in changed if _content(self.edited[name]) != before]

    @property
    def changes(self) -> list[str]:
        """What happened to the series since, a line per patch."""
        lines = [f"{name} was added" for name in self.present if name not in self.recorded]
        lines += [f"{name} was removed" for name in self.recorded if name not in self.present]
        both = [name for name in self.present if name in self.recorded]
        lines += [f"{name} was changed" for name in both if self.recorded[name] != self.present[name].sha256]
        return lines or ["the order of the patches was changed"] * (list(self.present) != list(self.recorded))

    def merged(self) -> list[Patch | BothVersions]:
        """The patches of the merged series, in order.

        Raises:
            BothChanged: a patch was removed on one side and changed on the other, or the order was changed on both.
        """
        names = dict.fromkeys([*self.before, *self.edited, *self.recorded, *self.present])
        taken: dict[str, Patch | BothVersions] = {}
        conflicts = []
        for name in names:
            before, edited = (_content(side.get(name)) for side in (self.before, self.edited))
            present = self.present.get(name)
            theirs = self.recorded.get(name) != (present.sha256 if present else None)
            if edited != before and theirs and edited != (present.content if present else None):
                if present and name in self.edited and name in self.before:
                    taken[name] = BothVersions(self.before[name].patch, self.edited[name].patch, present)
                    continue
                removed = ", which the directory removed" if not edited else ", which the series lacks" if not present else ""
                conflicts.append(f"  {name}{removed}")
            elif edited != before and name in self.edited:
                taken[name] = self.edited[name].patch
            elif edited == before and present:
                taken[name] = present
        if conflicts:
            raise BothChanged("\n".join(conflicts))
        projects = dict.fromkeys(patch.project for patch in taken.values())
        return [taken[name] for project in projects for name in self._order([n for n in taken if taken[n].project == project])]

    def _order(self, names: Collection[str]) -> list[str]:
        """The names of a project's patches in the order of the side that changed it."""
        ours, theirs = ([name for name in side if name in names] for side in (self.edited, self.present))
        ours_moved = _in(self.before, self.edited) != _in(self.edited, self.before)
        theirs_moved = _in(self.recorded, self.present) != _in(self.present, self.recorded)
        if ours_moved and theirs_moved and _in(ours, theirs) != _in(theirs, ours):
            raise BothChanged("  the order of the patches")
        order, others = (ours, theirs) if ours_moved else (theirs, ours)
        order = list(order)
        for number, name in enumerate(others):
            if name not in order:
                before = next((other for other in reversed(others[:number]) if other in order), None)
                order.insert(order.index(before) + 1 if before else 0, name)
        return order


def rebuild(
    repository: Repository, base: str, pin: Pin, inside: tuple[VendoredProject, ...], patches: Sequence[Patch | BothVersions]
) -> str:
    """Commit patches above ``base`` of a repository; returns the last commit. ``base`` is a commit of the source of ``pin``.

    Raises:
        PatchConflict: a patch does not apply above those before it.
        BothChanged: git does not merge the versions of a patch.
    """
    place = Checkout(pin, repository.path, base, repository.tree_of(base))
    for patch in patches:
        if isinstance(patch, BothVersions):
            base = _merged(place, inside, patch, base)
        else:
            base = commit_patch(repository, patch, _applied(place, inside, patch, base), base)
    return base


def _applied(place: Checkout, inside: tuple[VendoredProject, ...], patch: Patch, below: str) -> str:
    """The tree that a patch gives above a commit."""
    # An edited commit may still have the versions of the patch that it was ported from: write_back changes them.
    anywhere, tree = replace(patch, versions=SpecifierSet()), Repository(place.repository).tree_of(below)
    (step,) = steps(place, inside, [anywhere], tree)
    if step.status.state is not PatchState.APPLIES:
        raise PatchConflict(f"{patch.name}: {step.status.state}\n{step.status.detail}".rstrip())
    return step.tree


def _merged(place: Checkout, inside: tuple[VendoredProject, ...], both: BothVersions, below: str) -> str:
    """The commit of a patch that both sides changed, as git merges their trees, and their messages as files."""
    repository = Repository(place.repository)
    trees = [_applied(place, inside, patch, below) for patch in (both.before, both.edited, both.present)]
    base = repository.commit_tree(trees[0], None, "base")
    for side, tree in zip(("edited", "present"), trees[1:], strict=True):
        repository.set_ref(f"refs/heads/merge-{side}", repository.commit_tree(tree, base, side))
    merged = repository.git("merge-tree", "--write-tree", "-z", "--no-messages", "merge-edited", "merge-present", check=False)
    tree, *conflicts = [entry for entry in merged.raw.decode(errors="replace").split("\0") if entry] or [""]
    if merged.returncode != 0:
        files = dict.fromkeys(entry.partition("\t")[2] for entry in conflicts)
        raise BothChanged(f"  {both.name}: both changed the same lines of {', '.join(files) or 'a file'}")
    return commit_patch(repository, _with_message(both), tree, below)


def _with_message(both: BothVersions) -> Patch:
    """The patch in the series with the message that git merges of both."""
    versions = (both.edited, both.before, both.present)
    texts = [f"{patch.subject}\n\n{patch.body}" for patch in versions]
    with tempfile.TemporaryDirectory(prefix="sm120kit-message-") as scratch:
        files = [Path(scratch) / str(number) for number in range(3)]
        for file, text in zip(files, texts, strict=True):
            file.write_text(text)
        merged = Repository.init(Path(scratch) / "repository").git("merge-file", "-p", "--quiet", *files, check=False)
    if merged.returncode != 0:
        raise BothChanged(f"  {both.name}: both changed the same lines of its message")
    subject, _, body = merged.stdout.partition("\n\n")
    return replace(both.present, subject=subject, body=body)


def by_name(exported: Sequence[Exported], series: Sequence[Patch], projects: Sequence[TreeProject]) -> dict[str, Exported]:
    """Exported commits by the name of their file in a series: that of a ported commit is the variant for the tree's version.

    Raises:
        BadInput: two commits have the same name.
    """
    versions = {project.project: project.version for project in projects}
    for_tree = {f"{patch.project}/{patch.family}": patch.name for patch in series if patch.is_for(versions[patch.project])}
    names = {
        patch.name: for_tree.get(f"{patch.project}/{patch.family}", patch.name)
        for patch in series
        if not patch.is_for(versions[patch.project])
    }
    commits: dict[str, Exported] = {}
    for commit in exported:
        name = names.get(commit.patch.name, commit.patch.name)
        if name in commits:
            raise BadInput(f"{commit.title}: two commits are for {name}", "squash them or change a subject")
        commits[name] = commit
    return commits


def _content(exported: Exported | None) -> bytes | None:
    return exported.patch.content if exported else None


def _in(names: Collection[str], others: Collection[str]) -> list[str]:
    """Those of some names that are among others, in their order."""
    return [name for name in names if name in others]
