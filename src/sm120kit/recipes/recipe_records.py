"""Records of a lockfile: every input of a build by hash."""

from dataclasses import dataclass
from typing import Any

from sm120kit.sources.source_records import LockedWheel


@dataclass(frozen=True)
class Closure:
    """Every wheel of an environment on one platform; ``sha256`` is the digest of the list, which detects later edits.

    ``platform`` is a wheel tag such as ``manylinux_2_35_x86_64``; its glibc is the lowest that the base image may have.
    """

    platform: str
    python: str
    wheels: tuple[LockedWheel, ...]
    sha256: str

    @property
    def machine(self) -> str:
        """The machine of its wheels: ``x86_64``, ``aarch64``."""
        return self.platform.split("_", 3)[3]


@dataclass(frozen=True)
class LockedSource:
    """A source and the git ids of its tree before and after its series; a fetched source also has commits.

    ``pinned`` is ``sha256 <digest>`` of an sdist or wheel, ``commit <id>`` of a git source, both of a commit's files in a
    wheel, or ``<project>:<path>`` of one inside another source.
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
    """A file of this repository that is an input of a build."""

    path: str
    sha256: str


@dataclass(frozen=True)
class Replaced:
    """A distribution whose upstream wheel is not installed, because ``recipe`` builds the same version, patched."""

    name: str
    version: str
    recipe: str


@dataclass(frozen=True)
class Lock:
    """Every input of a build; the sha256 of its JSON is the build id. A lockfile may have a part, see ``lockfile.stored``.

    ``recipe`` is the recipe without its prose. ``rests_on`` is the lock of the kernels in an engine's image, ``<recipe>
    <build id>``; empty for a FlashInfer recipe. ``base_image`` is that of the base, ``<base> <build id>``, or
    ``name@sha256:<digest>``, or a note that it is not locked.
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
