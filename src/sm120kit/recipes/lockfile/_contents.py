"""Assemble the contents of a lockfile from a recipe, its patched trees and its closures. Nothing is read or written."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from packaging.version import Version

from sm120kit.core.digests import digest_of
from sm120kit.core.errors import BadInput
from sm120kit.patches.patch_records import PatchedTree
from sm120kit.recipes import FlashInferRecipe, Recipe
from sm120kit.recipes.recipe_records import Closure, Lock, LockedFile, LockedSource, Replaced
from sm120kit.sources.git import Repository
from sm120kit.sources.source_records import GitPin, LockedWheel, WheelCommitPin

FORMAT = 1
"""Raised when the form of a lockfile changes; older lockfiles must then be created again."""

FLASHINFER = "flashinfer-python"
"""The distribution whose upstream wheel is replaced by the patched one."""

BASE_IMAGE_OPEN = "not locked: given at build time; the build record has its digest"


def assemble(
    recipe: Recipe,
    flashinfer: FlashInferRecipe,
    trees: Sequence[PatchedTree],
    overrides: Sequence[LockedFile],
    closures: Sequence[Closure],
    rests_on: str = "",
) -> Lock:
    """Assemble the lock of a recipe.

    ``flashinfer`` is the recipe of the kernels (for a FlashInfer recipe: itself). ``trees`` are its patched tree, and those of
    the engine and of other packages that have a patch series.

    Raises:
        BadInput: a closure contains a version in the recipe's ``known_bad``.
    """
    _require_no_known_bad(recipe, closures)
    return Lock(
        format=FORMAT,
        recipe=recipe.inputs(),
        sources=tuple(entry for patched in trees for entry in _sources(patched)),
        patches=tuple(
            LockedFile(f"{patch.project}/{patch.slug}", patch.sha256) for patched in trees for patch in patched.patches
        ),
        overrides=tuple(overrides),
        closures=tuple(sorted(closures, key=lambda closure: closure.platform)),
        rests_on=rests_on,
        replaced=(Replaced(FLASHINFER, flashinfer.version, flashinfer.name),) if recipe.delivers_image else (),
        base_image=BASE_IMAGE_OPEN if recipe.delivers_image else "",
    )


def _require_no_known_bad(recipe: Recipe, closures: Sequence[Closure]) -> None:
    locked = {(wheel.name, Version(wheel.version)) for closure in closures for wheel in closure.wheels}
    for bad in recipe.known_bad:
        if (bad.distribution, Version(bad.version)) in locked:
            raise BadInput(
                f"{recipe.name}: {bad.distribution} {bad.version} is known to be bad: {bad.reason}",
                f"lock it again: sm120kit recipe lock {recipe.name}",
            )


def require_patched(recipe: Recipe, closures: Sequence[Closure]) -> None:
    """Require that the wheels which are to be patched are among the locked ones.

    Raises:
        BadInput: one is not.
    """
    locked = {(wheel.filename, wheel.sha256) for closure in closures for wheel in closure.wheels}
    for patched in recipe.patched:
        if closures and (patched.wheel, patched.sha256) not in locked:
            raise BadInput(
                f"{recipe.name}: patched names {patched.wheel}, sha256 {patched.sha256}, which is not among its locked wheels",
                f"pin that version in environment.requires, or correct the table; then: sm120kit recipe lock {recipe.name}",
            )


@cache  # git ids name contents, and an engine's lock has the sources of its FlashInfer recipe
def _sources(tree: PatchedTree) -> tuple[LockedSource, ...]:
    pin, repository = tree.checkout.pin, Repository(tree.checkout.repository)
    hashes = [f"commit {pin.commit}"] if isinstance(pin, GitPin | WheelCommitPin) else []
    pinned = " ".join([*hashes, *([] if isinstance(pin, GitPin) else [f"sha256 {pin.sha256}"])])
    sources = [
        LockedSource(
            pin.project,
            pin.version,
            pinned,
            tree.checkout.tree,
            tree.tree,
            commit=tree.checkout.commit,
            patched_commit=tree.commit,
        )
    ]
    for inside in tree.inside:
        before, after = (repository.subtree(commit, inside.path) for commit in (tree.checkout.commit, tree.commit))
        sources.append(LockedSource(inside.project, inside.version, f"{pin.project}:{inside.path}", before, after))
    return tuple(sources)


def root_requirements(recipe: Recipe, flashinfer: FlashInferRecipe) -> tuple[str, ...]:
    """The requirements from which a recipe's environment is resolved.

    For an engine they include the FlashInfer version of the recipe it uses, so that another version is a conflict.
    """
    requires = recipe.environment.requires if recipe.environment else ()
    return (*requires, f"{FLASHINFER}=={flashinfer.version}") if recipe.delivers_image else requires


def constraints(recipe: Recipe, flashinfer: FlashInferRecipe) -> tuple[str, ...]:
    """Constraints for the resolver: no version in ``known_bad``, and tvm-ffi at least as new as the kernels are built with."""
    if not recipe.delivers_image:
        return ()
    built_with = flashinfer.environment.requires if flashinfer.environment else ()
    ffi = [line.replace("==", ">=") for line in built_with if line.startswith("apache-tvm-ffi==")]
    return (*(f"{bad.distribution}!={bad.version}" for bad in recipe.known_bad), *ffi)


def make_closure(platform: str, python: str, wheels: Sequence[LockedWheel], *, replaced: bool) -> Closure:
    """The closure of an environment; with ``replaced``, without FlashInfer's upstream wheel."""
    installed = tuple(wheel for wheel in wheels if not (replaced and wheel.name == FLASHINFER))
    return Closure(platform, python, installed, digest_of(installed))


def reusable_closure(lock: Lock | None, recipe: Recipe, platform: str) -> Closure | None:
    """The closure of a lock for ``platform`` if the recipe's environment is unchanged and its wheels were not edited."""
    if lock is None or lock.recipe.get("environment") != recipe.inputs().get("environment"):
        return None
    matches = (closure for closure in lock.closures if closure.platform == platform)
    return next((closure for closure in matches if closure.sha256 == digest_of(closure.wheels)), None)
