"""Create a lockfile: resolve the wheels of a recipe's environment and write every input by hash."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version

from sm120kit import recipes, sources
from sm120kit.core.atomic_writes import write_atomic
from sm120kit.core.data_roots import require_writable
from sm120kit.core.errors import Mismatch, ResolutionFailed
from sm120kit.recipes.lockfile._contents import FLASHINFER, constraints, make_closure, reusable_closure, root_requirements
from sm120kit.recipes.lockfile._read import read, text
from sm120kit.recipes.lockfile._verify import current_lock
from sm120kit.recipes.recipe_records import Closure, Lock
from sm120kit.recipes.schema import FlashInferRecipe, Recipe

if TYPE_CHECKING:
    from sm120kit.recipes.target import Target


def create(target: Target, *, upgrade: bool = False, renewed: Collection[str] = ()) -> Lock:
    """Lock a recipe and write the lockfile beside it.

    The wheels of an existing lockfile stay while the recipe's environment is unchanged. When it changed, versions stay where
    they satisfy it. With ``upgrade``, all wheels are resolved anew; of the distributions in ``renewed``, the newest versions
    that fit are taken.

    Raises:
        SystemRefused: it is that of an installation.
        ResolutionFailed, FetchFailed, OfflineMiss: the wheels could not be resolved.
        Mismatch: the FlashInfer recipe of an engine is not locked, or its lockfile is outdated.
    """
    path = recipes.writable_lock_path(target.path)
    require_writable(path)
    recipe = target.recipe
    previous = _read_if_valid(target.lock_path)
    closures = []
    for platform in recipe.environment.platforms if recipe.environment else ():
        reused = None if upgrade or renewed else reusable_closure(previous, recipe, platform)
        closures.append(reused or _resolve(target, platform, None if upgrade else previous, renewed))
    lock = current_lock(target, closures)
    write_atomic(path, text(lock).encode())
    return lock


def _read_if_valid(path: Path) -> Lock | None:
    try:
        return read(path)
    except Mismatch:
        return None


def _resolve(target: Target, platform: str, previous: Lock | None, renewed: Collection[str]) -> Closure:
    """Resolve the environment of a recipe for a platform; prefer the versions of a ``previous`` lock, but for ``renewed``."""
    recipe, flashinfer, options = target.recipe, target.flashinfer.recipe, target.options
    assert recipe.environment is not None
    preferred = [closure.wheels for closure in previous.closures if closure.platform == platform] if previous else []
    requirements = sources.Requirements(
        tuple(root_requirements(recipe, flashinfer)),
        recipe.environment.python,
        platform,
        overrides={name: table.version for name, table in recipe.environment.overrides.items()},
        constraints=tuple(constraints(recipe, flashinfer)),
        as_of=recipe.environment.as_of,
        preferred=tuple(wheel for wheel in preferred[0] if wheel.name not in renewed) if preferred else (),
    )
    try:
        wheels = sources.resolve_wheels(requirements, options.workspace, options.origin)
    except ResolutionFailed as error:
        raise _with_missing_recipe(error, recipe, flashinfer) from error
    return make_closure(platform, recipe.environment.python, wheels, replaced=recipe is not flashinfer)


def _with_missing_recipe(error: ResolutionFailed, recipe: Recipe, flashinfer: FlashInferRecipe) -> ResolutionFailed:
    """The error, with a hint at the FlashInfer recipe that the engine requires if that is not the one it names."""
    text = re.sub(r"\s+", " ", error.message)
    depends = re.search(
        rf"\b{recipe.engine}(?:\[[^\]]*\])?[=<>]=?\S+ depends on {FLASHINFER}(?:\[[^\]]*\])?==([\w.+]*\w)", text
    )
    if depends is None or Version(depends[1]) == Version(flashinfer.version):
        return error
    present = [name for name in recipes.names(FlashInferRecipe) if Version(recipes.load(name).version) == Version(depends[1])]
    if present:
        remedy = f'write flashinfer = "{present[0]}" in the recipe'
    else:
        remedy = f"it has no recipe yet: sm120kit recipe new flashinfer@{depends[1]}"
    return ResolutionFailed(error.message, f"{recipe.engine} {recipe.version} requires FlashInfer {depends[1]}: {remedy}")
