"""Everything that builds are made of, by hash."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LockedWheel:
    """The one file that is installed of a distribution on a platform."""

    name: str
    version: str
    filename: str
    sha256: str

    @property
    def distribution(self) -> str:
        """The name again, as pins of sources call it."""
        return self.name


@dataclass(frozen=True)
class Closure:
    """Every wheel of an environment on one platform, and the digest of them, by which a later edit is noticed.

    ``platform`` is a wheel tag such as ``manylinux_2_35_x86_64``; its glibc is the least that the base image must have.
    """

    platform: str
    python: str
    wheels: tuple[LockedWheel, ...]
    sha256: str


@dataclass(frozen=True)
class LockedSource:
    """A source and the git ids of its tree before and after its series; a fetched one has commits as well.

    ``pinned`` is ``sha256 <digest>`` of an sdist, ``commit <id>`` of a git source, or ``<project>:<path>`` of one that lies in
    another.
    """

    project: str
    version: str
    pinned: str
    tree: str
    patched_tree: str
    commit: str = ""
    patched_commit: str = ""


@dataclass(frozen=True)
class LockedFile:
    """A file of ours that goes into a build."""

    path: str
    sha256: str


@dataclass(frozen=True)
class Replaced:
    """A distribution of which no official wheel is installed, because a recipe builds it: the same version, patched."""

    name: str
    version: str
    recipe: str


@dataclass(frozen=True)
class Lock:
    """Everything that a build is made of. The sha256 of its JSON is the build id.

    ``recipe`` is the recipe without its prose. ``rests_on`` names the lock of the kernels in an engine's image, ``<recipe>
    <build id>``; kernels rest on nothing. ``base_image`` is ``name@sha256:<digest>``, or says that it is not locked.
    """

    format: int
    recipe: dict[str, Any]
    sources: tuple[LockedSource, ...]
    patches: tuple[LockedFile, ...]
    overrides: tuple[LockedFile, ...]
    closures: tuple[Closure, ...]
    rests_on: str = ""
    replaced: tuple[Replaced, ...] = ()
    base_image: str = ""
