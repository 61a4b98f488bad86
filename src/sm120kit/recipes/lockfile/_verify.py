"""Verify a lockfile: compare it with the lock that its recipe, patches and sources give at present."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from sm120kit.core.digests import digest_of
from sm120kit.core.errors import BadInput, Mismatch
from sm120kit.recipes import bases
from sm120kit.recipes.added_files import read_added
from sm120kit.recipes.lockfile._contents import assemble, require_patched
from sm120kit.recipes.recipe_records import Closure, Lock
from sm120kit.recipes.schema import Recipe

if TYPE_CHECKING:
    from sm120kit.recipes.target import Target


def verify(target: Target) -> tuple[Lock, str]:
    """Read the lockfile of a recipe and require that locking again would not change it. Offline once sources are cached.

    Returns the lock and its build id.

    Raises:
        Mismatch: the lockfile is missing, edited or outdated; the message lists every field that differs.
    """
    lock, build_id = target.read_lock
    changes = differences(lock, current_lock(target, lock.closures))
    if changes:
        count = f"{len(changes)} difference{'s' * (len(changes) > 1)}"
        raise Mismatch(
            "\n  ".join([f"the lockfile of {target.recipe.name} is outdated or was edited: {count}", *changes]),
            f"if the change is intended, lock it again: sm120kit recipe lock {target.argument}; otherwise undo it",
        )
    return lock, build_id


def current_lock(target: Target, closures: Sequence[Closure]) -> Lock:
    """The lock of a recipe with its present patches, overrides and sources; ``closures`` are taken as they are.

    Raises:
        Mismatch: the FlashInfer recipe or the base of an engine is not locked, or its lockfile is outdated.
        BadInput, Mismatch: a file that the recipe adds to the image does not exist, or is another.
        BadInput: the base has another Python than the recipe, or a wheel that is to be patched is not locked.
    """
    flashinfer = target.flashinfer
    require_patched(target.recipe, closures)
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
    """Every field in which a lock differs from the ``current`` one, and closures whose wheels were edited."""
    changes = list(_compare("", asdict(replace(lock, closures=())), asdict(replace(current, closures=()))))
    for closure in lock.closures:
        if closure.sha256 != digest_of(closure.wheels):
            changes.append(f"closures.{closure.platform}: its wheels are not those that were resolved: they were edited")
    platforms = (lock.recipe.get("environment") or {}).get("platforms", [])
    locked = [closure.platform for closure in lock.closures]
    changes += [f"closures.{platform}: not in the lockfile" for platform in platforms if platform not in locked]
    return tuple(changes)


def _compare(path: str, locked: Any, current: Any) -> Iterator[str]:
    if isinstance(locked, dict) and isinstance(current, dict):
        for key in sorted({*locked, *current}):
            field = f"{path}.{key}".lstrip(".")
            if key not in locked:
                yield f"{field}: not in the lockfile; now {_shorten(current[key])}"
            elif key not in current:
                yield f"{field}: in the lockfile, but removed since"
            else:
                yield from _compare(field, locked[key], current[key])
    elif isinstance(locked, list | tuple) and isinstance(current, list | tuple) and locked != current:
        yield from _compare(path, _by_name(locked), _by_name(current))
    elif locked != current:
        yield f"{path}: locked {_shorten(locked)}, now {_shorten(current)}"


def _by_name(entries: Sequence[Any]) -> dict[str, Any]:
    """A list as a mapping by the names of its entries, so that an added or removed entry does not shift the others."""
    keys = ("path", "project", "platform", "name")
    named = {}
    for number, entry in enumerate(entries):
        is_table = isinstance(entry, dict)
        name = next((str(entry[key]) for key in keys if key in entry), str(number)) if is_table else str(entry)
        named[name] = entry
    return named


def _shorten(value: Any) -> str:
    shown = str(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
