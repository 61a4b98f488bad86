"""The wheels that recipes pin and that have a newer release: those that decide what runs on SM12x, and those a recipe names."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from packaging.utils import canonicalize_name
from packaging.version import Version

from sm120kit import recipes
from sm120kit.core import reporting
from sm120kit.core.errors import BadInput, FetchFailed, Mismatch
from sm120kit.recipes import lockfile
from sm120kit.recipes.drafts import distribution
from sm120kit.sources.index import ListedFile
from sm120kit.sources.releases import Releases
from sm120kit.sources.run_options import Options

WATCHED = r"torch|nvidia-cutlass-dsl|nvidia-nccl-cu\d+"
"""Distributions of a closure that are listed although no recipe names them."""

CUTLASS, RELEASED_WITH = "cutlass", "nvidia-cutlass-dsl"
"""The CUTLASS inside FlashInfer, and the distribution with the versions of its releases: the index has no other of it."""

_PINNED = re.compile(r"([\w.-]+)(?:\[[^]]*\])?==([\w.!+]+)")


@dataclass(frozen=True)
class NewerWheel:
    """A distribution whose newest release is newer than the version that recipes pin.

    ``days`` is the age of the newest release; None if the index states no time.
    """

    distribution: str
    pinned: str
    newest: str
    days: int | None
    recipes: tuple[str, ...]


def newer_wheels(options: Options) -> list[NewerWheel]:
    """The pinned wheels with a newer final release on the package index; a distribution that it does not list is reported.

    Raises:
        OfflineMiss: the index may not be read.
    """
    pinned: dict[tuple[str, Version], list[str]] = {}
    for recipe in recipes.names():
        for name, version in sorted({*_pinned_by(recipe)}):
            pinned.setdefault((name, Version(version)), []).append(recipe)
    releases, engines = Releases(options.origin), {*map(distribution, recipes.known_engines())}
    newest = {
        name: _newest(releases, RELEASED_WITH if name == CUTLASS else name)
        for name in sorted({name for name, _ in pinned} - engines)
    }
    return [
        NewerWheel(name, str(version), file.version, _age(file), tuple(by))
        for (name, version), by in sorted(pinned.items())
        if (file := newest.get(name)) and Version(file.version) > version
    ]


def _pinned_by(recipe: str) -> Iterator[tuple[str, str]]:
    """Names and versions that a recipe pins by ``==`` or an override, its CUTLASS, and :data:`WATCHED` in its lockfile."""
    try:
        loaded = recipes.load(recipe)
    except BadInput as error:
        reporting.warn(error.message)
        return
    if CUTLASS in loaded.sources:
        yield CUTLASS, loaded.sources[CUTLASS].version
    if loaded.environment:
        for requirement in loaded.environment.requires:
            if match := _PINNED.match(requirement):
                yield canonicalize_name(match[1]), match[2]
        for name, override in loaded.environment.overrides.items():
            yield canonicalize_name(name), override.version
    try:
        lock = lockfile.read(recipes.lock_path(recipes.locate(recipe)))
    except Mismatch:  # it is not locked
        return
    for closure in lock.closures:
        yield from ((wheel.name, wheel.version) for wheel in closure.wheels if re.fullmatch(WATCHED, wheel.name))


def _newest(releases: Releases, name: str) -> ListedFile | None:
    try:
        return next((file for file in releases.files(name) if not Version(file.version).is_prerelease), None)
    except FetchFailed as error:
        reporting.warn(error.message)
        return None


def _age(file: ListedFile) -> int | None:
    return (datetime.now(UTC) - file.uploaded).days if file.uploaded else None
