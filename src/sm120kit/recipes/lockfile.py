"""Lockfiles: every input of a build by hash, in ``<recipe>.lock.json`` beside its recipe.

``recipe lock`` creates a lockfile, and every build verifies it. It names no host: each file is known by its hash and can come
from any index or directory. What lies in the same repository, as the patches beside a built-in recipe do, is not in the file;
the build id is the sha256 of the lock with these.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from difflib import unified_diff
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version

from sm120kit import patches, recipes, sources
from sm120kit.core.atomic_writes import write_atomic
from sm120kit.core.data_roots import data_root, require_writable
from sm120kit.core.digests import digest_of
from sm120kit.core.errors import BadInput, Mismatch, ResolutionFailed
from sm120kit.core.record_files import record_json
from sm120kit.patches.patch_records import PatchedTree
from sm120kit.recipes import FlashInferRecipe, Recipe, bases
from sm120kit.recipes.added_files import read_added
from sm120kit.recipes.load import read_locked
from sm120kit.recipes.recipe_records import Closure, Lock, LockedFile, LockedSource, Replaced
from sm120kit.sources.git import Repository
from sm120kit.sources.source_records import GitPin, LockedWheel, WheelCommitPin

if TYPE_CHECKING:
    from sm120kit.recipes.target import Target

FORMAT = 1
"""Raised when the form of a lockfile changes; older lockfiles must then be created again."""

FLASHINFER = "flashinfer-python"
"""The distribution whose upstream wheel is replaced by the patched one."""

BASE_IMAGE_OPEN = "not locked: given at build time; the build record has its digest"


def text(lock: Lock) -> str:
    """The text of a lock's file."""
    return record_json(lock)


def build_id(lock: Lock) -> str:
    """The build id: the sha256 of a lock with every input, patches included, in hexadecimal."""
    return hashlib.sha256(text(lock).encode()).hexdigest()


def read(path: Path) -> Lock:
    """Read a lockfile.

    Raises:
        Mismatch: the file does not exist, or its text is not what ``recipe lock`` writes.
    """
    return read_locked(Lock, path)[0]


def stored(lock: Lock, path: Path) -> Lock:
    """A lock as its file at ``path`` has it: a built-in one leaves out what lies beside it in the same repository.

    Those are patches, headers and the lockfile of the kernels, and what follows from them and the locked wheels.
    """
    if not Path(os.path.realpath(path)).is_relative_to(data_root() / "recipes"):
        return lock
    wheels = {f"sha256 {wheel.sha256}" for closure in lock.closures for wheel in closure.wheels}
    pinned = (source for source in lock.sources if source.pinned not in wheels)
    sources = tuple(replace(source, patched_tree="", patched_commit="") for source in pinned)
    return replace(lock, sources=sources, patches=(), overrides=(), rests_on=lock.rests_on.partition(" ")[0])


def create(target: Target, *, upgrade: bool = False, renewed: Collection[str] = ()) -> Lock:
    """Lock a recipe and write the lockfile beside it; returns the lock with every input.

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
    write_atomic(path, text(stored(lock, path)).encode())
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
                "lock the recipe again with `sm120kit recipe lock`, which leaves that version out",
            )


def require_patched(target: Target, closures: Sequence[Closure]) -> None:
    """Require that the wheels which are to be patched are among the locked ones.

    Raises:
        BadInput: one is not.
    """
    locked = {(wheel.filename, wheel.sha256) for closure in closures for wheel in closure.wheels}
    for patched in target.recipe.patched:
        if closures and (patched.wheel, patched.sha256) not in locked:
            raise BadInput(
                f"{target.recipe.name}: patched names {patched.wheel}, sha256 {patched.sha256}, not one of its locked wheels",
                f"pin that version in environment.requires, or correct the table; then: {target.lock_command}",
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


def verify(target: Target) -> Lock:
    """Read the lockfile of a recipe and require that locking again would not change it. Offline once sources are cached.

    Returns the lock with every input.

    Raises:
        Mismatch: the lockfile is missing, edited or outdated; the message has every line that differs.
    """
    lock = target.read_lock
    current = current_lock(target, lock.closures)
    changes = differences(lock, stored(current, target.lock_path))
    if changes:
        raise Mismatch(
            "\n  ".join([f"the lockfile of {target.recipe.name} is outdated or was edited (-) and would be (+):", *changes]),
            f"if the change is intended, lock it again: {target.lock_command}; otherwise undo it",
        )
    return current


def current_lock(target: Target, closures: Sequence[Closure]) -> Lock:
    """The lock of a recipe with its present patches, overrides and sources; ``closures`` are taken as they are.

    Raises:
        Mismatch: the FlashInfer recipe or the base of an engine is not locked, or its lockfile is outdated.
        BadInput, Mismatch: a file that the recipe adds to the image does not exist, or is another.
        BadInput: the base has another Python than the recipe, or a wheel that is to be patched is not locked.
    """
    flashinfer = target.flashinfer
    require_patched(target, closures)
    read_added(target.recipe)
    rests_on = "" if target is flashinfer else f"{flashinfer.recipe.name} {flashinfer.build_id}"
    trees = flashinfer.source.series_tree, *target.python_trees(closures)
    lock = assemble(target.recipe, flashinfer.recipe, trees, flashinfer.overrides, closures, rests_on)
    return replace(lock, base_image=_base(target.recipe, target.recipe.base)) if target.recipe.base else lock


def _base(recipe: Recipe, name: str) -> str:
    """Name and build id of the base of a recipe."""
    base = bases.load(name)
    if recipe.environment and base.python != recipe.environment.python:
        raise BadInput(
            f"{recipe.name}: its base {base.name} has Python {base.python}, its environment {recipe.environment.python}",
            "name another base, or change environment.python",
        )
    bases.verify(base)
    return f"{base.name} {bases.lock_id(base.name)}"


def differences(lock: Lock, current: Lock) -> tuple[str, ...]:
    """The lines in which the text of a lock differs from the ``current`` one, and closures whose wheels were edited."""
    before, now = (text(replace(each, closures=())).splitlines() for each in (lock, current))
    changes = [line for line in unified_diff(before, now, n=2, lineterm="") if not line.startswith(("---", "+++"))]
    for closure in lock.closures:
        if closure.sha256 != digest_of(closure.wheels):
            changes.append(f"closures.{closure.platform}: its wheels are not those that were resolved: they were edited")
    platforms = (lock.recipe.get("environment") or {}).get("platforms", [])
    locked = [closure.platform for closure in lock.closures]
    changes += [f"closures.{platform}: not in the lockfile" for platform in platforms if platform not in locked]
    return tuple(changes)


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
