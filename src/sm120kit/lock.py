"""``(Recipe, PatchedTree, closures) -> Lock``, and in what a lock differs from what is there now.

A lock is a JSON file beside its recipe, sorted and byte-stable; ``sha256sum`` of it is the build id. It names no host: what it
lists can be had from any index or directory, because every file is known by its hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from packaging.version import Version
from pydantic import TypeAdapter, ValidationError

from sm120kit.errors import BadRecipe, LockDiffers
from sm120kit.gitrepo import Repository
from sm120kit.recipe import EngineRecipe, Recipe
from sm120kit.records import Closure, GitPin, Lock, LockedFile, LockedSource, LockedWheel, PatchedTree, Replaced
from sm120kit.workspace import digest_of, record_json

FORMAT = 1
"""Raised when a lock's form changes; older locks are then made anew."""

FLASHINFER = "flashinfer-python"
"""The distribution whose official wheel is replaced by the patched one."""

BASE_IMAGE_OPEN = "not locked: given at build time; the build record has its digest"


def make(
    item: Recipe | EngineRecipe,
    kernels: Recipe,
    tree: PatchedTree,
    overrides: Sequence[LockedFile],
    closures: Sequence[Closure],
    rests_on: str = "",
    source: PatchedTree | None = None,
) -> Lock:
    """The lock of a recipe. ``kernels`` is the recipe itself or the one that an engine rests on, ``tree`` its patched tree.

    ``source`` is that of the engine itself, when a part of it can be built here.

    Raises:
        BadRecipe: a closure has a version that is known to be bad.
    """
    engine = isinstance(item, EngineRecipe)
    trees = (tree, source) if source else (tree,)
    for closure in closures:
        for bad in item.known_bad if isinstance(item, EngineRecipe) else ():
            if any(
                wheel.name == bad.distribution and Version(wheel.version) == Version(bad.version) for wheel in closure.wheels
            ):
                raise BadRecipe(
                    f"{item.name}: {bad.distribution} {bad.version} is known to be bad: {bad.reason}",
                    f"lock it again: sm120kit recipe lock {item.name}",
                )
    return Lock(
        format=FORMAT,
        recipe=item.inputs(),
        sources=tuple(line for one in trees for line in _sources(one)),
        patches=tuple(LockedFile(f"{patch.project}/{patch.slug}", patch.sha256) for one in trees for patch in one.patches),
        overrides=tuple(overrides),
        closures=tuple(sorted(closures, key=lambda closure: closure.platform)),
        rests_on=rests_on,
        replaced=(Replaced(FLASHINFER, kernels.version, kernels.name),) if engine else (),
        base_image=(item.base_image or BASE_IMAGE_OPEN) if isinstance(item, EngineRecipe) else "",
    )


def _sources(tree: PatchedTree) -> Iterator[LockedSource]:
    pin, repository = tree.checkout.pin, Repository(tree.checkout.repository)
    pinned = f"commit {pin.commit}" if isinstance(pin, GitPin) else f"sha256 {pin.sha256}"
    yield LockedSource(
        pin.project, pin.version, pinned, tree.checkout.tree, tree.tree, commit=tree.checkout.commit, patched_commit=tree.commit
    )
    for inside in tree.inside:
        before, after = (repository.subtree(commit, inside.path) for commit in (tree.checkout.commit, tree.commit))
        yield LockedSource(inside.project, inside.version, f"{pin.project}:{inside.path}", before, after)


def wanted(item: Recipe | EngineRecipe, kernels: Recipe) -> tuple[str, ...]:
    """The requirements of a recipe's environment. An engine's must come to the FlashInfer version that the recipe rests on."""
    asked = item.environment.requires if item.environment else ()
    return (*asked, f"{FLASHINFER}=={kernels.version}") if isinstance(item, EngineRecipe) else asked


def constraints(item: Recipe | EngineRecipe, kernels: Recipe) -> tuple[str, ...]:
    """What must hold of the wheels besides: none is known to be bad, and none is older than what the kernels are built with."""
    if isinstance(item, Recipe):
        return ()
    built_with = kernels.environment.requires if kernels.environment else ()
    ffi = [line.replace("==", ">=") for line in built_with if line.startswith("apache-tvm-ffi==")]
    return (*(f"{bad.distribution}!={bad.version}" for bad in item.known_bad), *ffi)


def closure(platform: str, python: str, wheels: Sequence[LockedWheel], *, replaced: bool) -> Closure:
    """The wheels that are installed, without the one that is ``replaced`` by ours."""
    kept = tuple(wheel for wheel in wheels if not (replaced and wheel.name == FLASHINFER))
    return Closure(platform, python, kept, digest_of(kept))


def usable(held: Lock | None, item: Recipe | EngineRecipe, platform: str) -> Closure | None:
    """A closure of a lock that still answers the recipe: the same environment is asked for, and nobody edited the wheels."""
    if held is None or held.recipe.get("environment") != item.inputs().get("environment"):
        return None
    return next((one for one in held.closures if one.platform == platform and one.sha256 == digest_of(one.wheels)), None)


def text(lock: Lock) -> str:
    """A lock as it is written."""
    return record_json(lock)


def build_id(lock: Lock) -> str:
    """The sha256 of a lock as it is written."""
    return hashlib.sha256(text(lock).encode()).hexdigest()


def read(path: Path) -> Lock:
    """A lock from its file.

    Raises:
        LockDiffers: there is none, or it is not what ``recipe lock`` writes.
    """
    name = path.name.removesuffix(".lock.json")
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise LockDiffers(f"{name} is not locked: there is no {path}", f"lock it: sm120kit recipe lock {name}") from error
    try:
        lock = TypeAdapter(Lock).validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise LockDiffers(
            f"{path} is not a lock: {where}{': ' * bool(where)}{first['msg']}", f"write it again: sm120kit recipe lock {name}"
        ) from error
    if text(lock).encode() != content:
        raise LockDiffers(
            f"{path} was edited: it has keys or spaces that `recipe lock` does not write",
            f"write it again: sm120kit recipe lock {name}",
        )
    return lock


def differences(held: Lock, now: Lock) -> tuple[str, ...]:
    """Every field in which a lock is not what would be written now, and closures whose wheels were edited."""
    found = list(_compare("", asdict(held) | {"closures": []}, asdict(now) | {"closures": []}))
    for one in held.closures:
        if one.sha256 != digest_of(one.wheels):
            found.append(f"closures.{one.platform}: its wheels are not those that were resolved: they were edited")
    asked = (held.recipe.get("environment") or {}).get("platforms", [])
    for platform in asked:
        if platform not in [one.platform for one in held.closures]:
            found.append(f"closures.{platform}: not in the lock")
    return tuple(found)


def _compare(place: str, held: Any, now: Any) -> Iterator[str]:
    if isinstance(held, dict) and isinstance(now, dict):
        for key in sorted({*held, *now}):
            here = f"{place}.{key}".lstrip(".")
            if key not in held:
                yield f"{here}: not in the lock; now {_short(now[key])}"
            elif key not in now:
                yield f"{here}: in the lock, no longer there"
            else:
                yield from _compare(here, held[key], now[key])
    elif isinstance(held, list | tuple) and isinstance(now, list | tuple) and held != now:
        yield from _compare(place, _keyed(held), _keyed(now))
    elif held != now:
        yield f"{place}: the lock has {_short(held)}, now {_short(now)}"


def _keyed(items: Sequence[Any]) -> dict[str, Any]:
    """A list as a mapping by what names its items, so that one that is added or gone does not shift the others."""
    keys = ("path", "project", "platform", "name")
    named = {}
    for number, item in enumerate(items):
        key = next((str(item[key]) for key in keys if key in item), str(number)) if isinstance(item, dict) else str(item)
        named[key] = item
    return named


def _short(value: Any) -> str:
    words = str(value)
    return words if len(words) <= 80 else f"{words[:77]}..."


def requirements(closure: Closure) -> str:
    """A closure as a requirements file with hashes, for ``pip install --require-hashes --no-deps -r`` or ``uv pip install``."""
    return "".join(f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n" for wheel in closure.wheels)
