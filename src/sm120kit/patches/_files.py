"""Find and remove patches of a series."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from sm120kit.core.atomic_writes import write_together
from sm120kit.core.errors import NotFound, PatchConflict, nearest
from sm120kit.patches import evidence
from sm120kit.patches._apply import compose
from sm120kit.patches.format import Patch
from sm120kit.patches.patch_records import PatchedTree, PatchState
from sm120kit.patches.series import (
    load,
    load_for_tree,
    projects,
    require_own,
    requiring,
    series_content,
    slug_lines,
)


def find(root: Path, name: str) -> Patch:
    """Find a patch of a series by ``project/slug`` or by a unique slug.

    Raises:
        NotFound: no series has it, or those of several projects.
    """
    every = [patch for project in projects(root) for patch in load(root, project)]
    matches = [patch for patch in every if name in (patch.name, patch.slug)]
    if len(matches) > 1:
        names = ", ".join(patch.name for patch in matches)
        raise NotFound(f"{len(matches)} projects have a patch {name}", f"choose from {names}")
    if not matches:
        near = nearest(name, [patch.name for patch in every])
        raise NotFound(f"no series has a patch {name!r}", f"nearest: {near}; `sm120kit patch list` lists all; or a file")
    return matches[0]


def dependents(patch: Patch, tree: PatchedTree, root: Path, overrides: Path) -> list[str]:
    """The names of the patches that apply to the source of ``tree`` with a patch, but not without it."""
    series = load_for_tree(tree.checkout.pin, tree.inside, root)
    without = [other for other in series if other.name != patch.name]
    (_, before), (_, after) = (compose(tree.checkout, tree.inside, chosen, overrides) for chosen in (series, without))
    applied = {step.patch.name for step in before if step.status.state is PatchState.APPLIES}
    return [s.patch.name for s in after if s.patch.name in applied and s.status.state is not PatchState.APPLIES]


def drop(patch: Patch, root: Path, required_by: Mapping[str, Sequence[str]], *, dependants: bool = False) -> list[Path]:
    """Remove a patch: its file, its line in the series and its proof; returns the files that changed.

    ``required_by`` has by recipe the patches that do not apply without it. With ``dependants``, those and the patches that name
    it as required are removed with it. A proof that another patch names as its evidence stays.

    Raises:
        PatchConflict: there are such patches, and they are not to be removed.
    """
    require_own(root, patch)
    lines = [f"  {name} in {recipe} does not apply without it" for recipe, names in required_by.items() for name in names]
    named = requiring(patch, root)
    lines += [f"  {name} requires it" for name in named]
    if lines and not dependants:
        raise PatchConflict(
            "\n".join([f"other patches need {patch.name}:", *lines]),
            "drop or change them first, or remove them with it: --with-dependants",
        )
    gone = {patch.name, *named, *(name for names in required_by.values() for name in names)}
    every = [other for project in projects(root) for other in load(root, project)]
    for other in every:
        if other.name in gone:
            require_own(root, other)
    kept = [other for other in every if other.name not in gone]
    files: dict[Path, bytes | None] = {}
    for name in sorted(gone):
        directory, slug = (root / name).parent, name.partition("/")[2]
        files[directory / f"{slug}.patch"] = None
        slugs = [each for _, each in slug_lines(directory / "series") if f"{directory.name}/{each}" not in gone]
        files[directory / "series"] = series_content(directory / "series", slugs)
        proof = evidence.path_of(root, name)
        if proof.is_file() and not any(f"{name}.json" in other.trailer("Evidence") for other in kept):
            files[proof] = None
    write_together(files)
    return list(files)
