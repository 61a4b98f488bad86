"""Records of pinned sources, checkouts and locked wheels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SdistPin:
    """A source distribution on a Python index, with its sha256."""

    project: str
    distribution: str
    version: str
    sha256: str


@dataclass(frozen=True)
class GitPin:
    """A commit of a git repository, without submodules."""

    project: str
    url: str
    commit: str
    version: str


@dataclass(frozen=True)
class WheelPin:
    """A wheel on a Python index, with its file name and sha256: the source of a project that publishes no sdist."""

    project: str
    distribution: str
    version: str
    sha256: str
    filename: str

    @property
    def wheel(self) -> LockedWheel:
        """The file to fetch."""
        return LockedWheel(self.distribution, self.version, self.filename, self.sha256)


@dataclass(frozen=True)
class WheelCommitPin(WheelPin):
    """A wheel with the Python files of a commit of its project, or of a fork, at ``url``."""

    url: str
    commit: str


# The type with the most fields first: records are read as the first type that fits.
Pin = WheelCommitPin | WheelPin | SdistPin | GitPin


@dataclass(frozen=True)
class VendoredProject:
    """A project inside another project, with a patch series of its own: CUTLASS below ``path`` of FlashInfer."""

    project: str
    path: str
    version: str


@dataclass(frozen=True)
class Checkout:
    """A pinned source as a git repository with one deterministic base commit."""

    pin: Pin
    repository: Path
    commit: str
    tree: str

    @property
    def released(self) -> str:
        """The commit of the released files: below that of a :class:`WheelCommitPin`, the wheel's."""
        return f"{self.commit}^" if isinstance(self.pin, WheelCommitPin) else self.commit


@dataclass(frozen=True)
class LockedWheel:
    """The wheel of a distribution that is installed on a platform."""

    name: str
    version: str
    filename: str
    sha256: str

    @property
    def distribution(self) -> str:
        """The name, under the attribute that :class:`SdistPin` has."""
        return self.name


@dataclass(frozen=True)
class DebianPackage:
    """A binary package of Debian. ``filename`` is its path below an archive, ``pool/...``; ``size`` is in bytes."""

    name: str
    version: str
    architecture: str
    filename: str
    size: int
    sha256: str

    @property
    def distribution(self) -> str:
        """The name, under the attribute that :class:`SdistPin` has."""
        return self.name


@dataclass(frozen=True)
class DebianArchives:
    """Where Debian packages come from: this machine's apt sources, unless ``mirrors`` are given.

    A mirror is the URL or directory of an archive, which contains ``dists/`` and ``pool/``. The signature of an index must be
    of a key in ``keyring``; None for Debian's own keyring on this machine.
    """

    mirrors: tuple[str, ...] = ()
    keyring: Path | None = None


APT_SOURCES = DebianArchives()
"""The apt sources of this machine, with Debian's own keyring."""
