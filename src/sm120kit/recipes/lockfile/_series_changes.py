"""What changed in the patch series since a recipe was locked, as an upgrade of sm120kit does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sm120kit import patches
from sm120kit.recipes.recipe_records import Lock


def series_changes(lock: Lock, root: Path) -> Iterator[str]:
    """A line for each patch that the series below ``root`` and a lockfile do not have in common. Nothing is fetched.

    Raises:
        BadInput: a series is not well-formed.
    """
    locked = {file.path: file.sha256 for file in lock.patches}
    series = (patch for source in lock.sources for patch in patches.load(root, source.project) if patch.is_for(source.version))
    present = {patch.name: patch.sha256 for patch in series}
    for name in sorted({*locked, *present}):
        if name not in locked:
            yield f"added {name}"
        elif name not in present:
            yield f"removed {name}"
        elif locked[name] != present[name]:
            yield f"changed {name}"
