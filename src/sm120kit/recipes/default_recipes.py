"""The recipes that a bare engine name builds, and the patches in them that nothing proves."""

from collections.abc import Iterator
from contextlib import suppress

from sm120kit import recipes
from sm120kit.core.data_roots import top_root
from sm120kit.core.errors import NotFound
from sm120kit.patches import evidence
from sm120kit.patches.checkout import PATCHES, series_of
from sm120kit.patches.diff import Problem
from sm120kit.recipes.target import PatchSource, Target, resolve
from sm120kit.sources.run_options import Options


def default_targets(options: Options) -> Iterator[Target]:
    """The recipes that a bare engine name selects, of the engines that have one."""
    names = recipes.names()
    for engine in dict.fromkeys(name.partition("-")[0] for name in names):
        if recipes.DEFAULT_RECIPES.get(engine, engine) in (engine, *names):
            with suppress(NotFound):  # none is verified
                yield resolve(engine, options)


def unproven(options: Options) -> Iterator[Problem]:
    """The patches of default recipes without a proof on the version that the recipe has. Nothing is fetched."""
    root = top_root() / PATCHES
    for recipe, source in _sources(options):
        for patch in filter(source.has_version_of, series_of(source.pin, source.inside)):
            yield from evidence.unproven(root, patch, recipe)


def _sources(options: Options) -> list[tuple[str, PatchSource]]:
    """The sources of the default recipes and of their FlashInfer, each once, with the recipe that has it."""
    targets = [*default_targets(options)]
    every = (source for target in targets for source in (*target.flashinfer.sources, *target.sources))
    return [(recipe, source) for (recipe, _), source in {(each.recipe, each.pin.project): each for each in every}.items()]
