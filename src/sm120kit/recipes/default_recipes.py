"""The recipes that a bare engine name builds, and the patches in them that nothing proves."""

from __future__ import annotations

from collections.abc import Iterator

from sm120kit import recipes
from sm120kit.core.data_roots import top_root
from sm120kit.patches import evidence
from sm120kit.patches.checkout import PATCHES, series_of
from sm120kit.patches.diff import Problem
from sm120kit.recipes.target import PatchSource, resolve_each
from sm120kit.sources.run_options import Options


def default_sources(options: Options) -> dict[tuple[str, str], PatchSource]:
    """The sources of the recipes that a bare engine name selects, with those of their FlashInfer, by recipe and project."""
    engines = dict.fromkeys(name.partition("-")[0] for name in recipes.names())
    targets = [*resolve_each(engines, options)]
    every = (source for target in targets for source in (*target.flashinfer.sources, *target.sources))
    return {(source.recipe, source.pin.project): source for source in every}


def unproven(options: Options) -> Iterator[Problem]:
    """The patches of default recipes without a proof on the version that the recipe has. Nothing is fetched."""
    root = top_root() / PATCHES
    for (recipe, _), source in default_sources(options).items():
        for patch in filter(source.has_version_of, series_of(source.pin, source.inside)):
            yield from evidence.unproven(root, patch, recipe)
