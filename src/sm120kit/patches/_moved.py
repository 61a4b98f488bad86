"""Write the patches that a rebase moved: with wider ranges, or as variants for the new version."""

import re
import shutil
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.specifiers import Specifier, SpecifierSet
from packaging.version import Version

from sm120kit.core.atomic_writes import write_atomic, write_together
from sm120kit.core.data_roots import REPOSITORY_FILE, built_in_below
from sm120kit.patches import evidence
from sm120kit.patches._export import Exported, has_effect, with_versions, write_back
from sm120kit.patches.format import Patch, normal_form, overlap
from sm120kit.patches.patch_records import TreeProject
from sm120kit.patches.series import load, series_content, slug_lines
from sm120kit.sources.git import Repository

_BELOW, _ABOVE = ("<", "<="), (">", ">=")
"""Operators that limit a range from above and from below."""


def split(ranges: str, keep: str, at: str, pinned: Collection[str] = ()) -> tuple[str, str]:
    """Split a range into a part that contains version ``keep`` but not ``at``, and one that contains ``at``.

    The second part reaches from ``at`` away from ``keep`` to the end of the range. If that would take one of the ``pinned``
    versions from the first part, the second part is ``at`` alone.
    """
    specifiers, upwards = _specifiers(ranges), Version(at) > Version(keep)
    limits, open_limits = (_BELOW, _ABOVE) if upwards else (_ABOVE, _BELOW)
    first = _text([s for s in specifiers if s.operator not in limits], f"{limits[0]}{at}")
    second = _text([s for s in specifiers if s.operator not in open_limits and s.operator != "!="], f"{open_limits[1]}{at}")
    taken = (version for version in pinned if version != at and contains(ranges, version) and not contains(first, version))
    if next(taken, None) is not None or not contains(first, keep) or contains(first, at) or not contains(second, at):
        return _text(specifiers, f"!={at}"), f"=={at}"
    return first, second


def widen(ranges: str, version: str) -> str:
    """The range with its limit moved so that it includes ``version`` and what lies between."""
    specifiers = _specifiers(ranges)
    kept = [s for s in specifiers if s.contains(version, prereleases=True)]
    limits = []
    for specifier in specifiers:
        bound = specifier.version.removesuffix(".*")
        if specifier in kept or specifier.operator == "!=":
            continue
        upwards = Version(version) > Version(bound)
        limits.append(f"{'<=' if upwards else '>='}{version}")
        if specifier.operator in ("==", "~="):
            limits.append(f"{'>=' if upwards else '<='}{bound}")
    return _text(kept, *dict.fromkeys(limits))


def contains(ranges: str, version: str) -> bool:
    """Whether a range contains a version, pre-releases included."""
    return SpecifierSet(ranges).contains(version, prereleases=True)


def _specifiers(ranges: str) -> list[Specifier]:
    """The specifiers of a range in their order."""
    return [Specifier(text) for text in ranges.split(",") if text.strip()]


def _text(specifiers: Iterable[Specifier], *added: str) -> str:
    """Specifiers as they are written: lower limits first, then upper ones, then the rest."""
    listed: Sequence[Specifier] = [*specifiers, *map(Specifier, added)]
    order = [_ABOVE, _BELOW]
    ranked = sorted(listed, key=lambda s: next((i for i, operators in enumerate(order) if s.operator in operators), 2))
    return ",".join(str(specifier) for specifier in ranked)


@dataclass(frozen=True)
class Moved:
    """The projects of the new version, the old version of each by name, and the versions of each that recipes pin."""

    projects: Sequence[TreeProject]
    old: Mapping[str, str]
    pinned: Mapping[str, Collection[str]]

    @property
    def new(self) -> dict[str, TreeProject]:
        """The projects of the new version by name."""
        return {project.project: project for project in self.projects}


def write_moved(repository: Repository, exported: Sequence[Exported], moved: Moved, root: Path) -> list[Path]:
    """Write the commits of a rebase to the series below ``root``, all or none; returns the files that changed.

    What the series is for the old version does not change. See :func:`sm120kit.patches._export.write_back` for errors.
    """
    with tempfile.TemporaryDirectory(prefix="sm120kit-series-") as scratch:
        copy = Path(scratch) / root.name
        if built_in_below(root):
            shutil.copyfile(root.parent / REPOSITORY_FILE, copy.parent / REPOSITORY_FILE)
        for project in moved.projects:
            if (root / project.project).is_dir():
                shutil.copytree(root / project.project, copy / project.project)
        final, overwrite = _final_patches(repository, moved, exported, copy)
        write_back(repository, final, moved.projects, copy, overwrite)
        names = {path.relative_to(each) for each in (root, copy) for path in each.glob("*/*") if path.is_file()}
        own = [name for name in sorted(names) if name.parts[0] in moved.new]
        files = {root / name: _content(copy / name) for name in own if _content(copy / name) != _content(root / name)}
    write_together(files)
    return list(files)


def _final_patches(
    repository: Repository, moved: Moved, exported: Sequence[Exported], root: Path
) -> tuple[list[Exported], list[str]]:
    """The exported patches with their final file names and version ranges, and the names of those that replace a file.

    A patch that applies unchanged needs at most a wider range. A patch that was merged becomes a variant for the new version;
    if the old patch was for that version as well, its range ends there, in its file below ``root``.
    """
    existing = {patch.name: patch for project in moved.projects for patch in load(root, project.project)}
    final, overwrite, kept = [], [], set()
    for commit in exported:
        patch, before = commit.patch, existing.get(commit.patch.name)
        if before is None or patch.trailer("Applies-To") != before.trailer("Applies-To"):
            final.append(commit)
            continue
        project, pinned = moved.new[patch.project], moved.pinned.get(patch.project, ())
        unchanged = has_effect(repository, before, commit, project)
        if before.is_for(project.version) and (unchanged or not before.is_for(moved.old[patch.project])):
            kept.add(before.name)
            final.append(commit)
        elif unchanged and (wider := _widened(before, project.version, pinned, existing.values())):
            overwrite.append(before.name)
            final.append(replace(commit, patch=with_versions(patch, patch.slug, f"{patch.project} {wider}")))
        else:
            final.append(replace(commit, patch=_variant(patch, before, moved)))
    _end_ranges(moved, [patch for patch in existing.values() if patch.name not in kept], root)
    return final, overwrite


def _variant(patch: Patch, before: Patch, moved: Moved) -> Patch:
    """A merged patch as the variant for the new version."""
    version, versions = moved.new[patch.project].version, ""
    if before.is_for(version):
        versions = split(_range(before), moved.old[patch.project], version, moved.pinned.get(patch.project, ()))[1]
    slug = f"{patch.family}--{re.sub('[^a-z0-9.]+', '-', version)}"
    proof = f"{evidence.PROOFS}/{patch.project}"
    body = patch.body.replace(f"{proof}/{patch.slug}.json", f"{proof}/{slug}.json")
    return with_versions(replace(patch, body=body), slug, f"{patch.project} {versions or f'=={version}'}")


def _end_ranges(moved: Moved, patches: Iterable[Patch], root: Path) -> None:
    """End the ranges of patches that are for both versions before the new one, in their files below ``root``."""
    for patch in patches:
        version, old = moved.new[patch.project].version, moved.old.get(patch.project, "")
        if old and patch.is_for(version) and patch.is_for(old):
            first = split(_range(patch), old, version, moved.pinned.get(patch.project, ()))[0]
            directory = root / patch.project
            listed = [slug for _, slug in slug_lines(directory / "series")]
            if patch.slug not in listed:  # a built-in patch below a user's series
                write_atomic(directory / "series", series_content(directory / "series", [*listed, patch.slug]))
            shortened = with_versions(patch, patch.slug, f"{patch.project} {first}")
            write_atomic(directory / f"{patch.slug}.patch", normal_form(shortened))


def _widened(patch: Patch, version: str, pinned: Collection[str], patches: Collection[Patch]) -> str:
    """The range of a patch with a version added; empty if it would add another version that matters.

    Those are versions that recipes pin and versions of other variants.
    """
    wider = widen(_range(patch), version)
    added = [other for other in pinned if other != version and contains(wider, other) and not patch.is_for(other)]
    family = [p for p in patches if (p.project, p.family) == (patch.project, patch.family) and p.slug != patch.slug]
    taken = any(overlap(other.versions, SpecifierSet(wider)) for other in family)
    return "" if added or taken or not contains(wider, version) else wider


def _range(patch: Patch) -> str:
    """The version range in ``Applies-To``."""
    return patch.trailer("Applies-To").partition(" ")[2]


def _content(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None
