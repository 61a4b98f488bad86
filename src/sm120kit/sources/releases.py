"""The releases of a distribution that the package index offers, and locked files that it has withdrawn.

Those are yanked (PEP 592), replaced by other content, or no longer listed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from sm120kit.core import reporting
from sm120kit.core.errors import FetchFailed, OfflineMiss
from sm120kit.core.parallel import in_parallel
from sm120kit.sources import index
from sm120kit.sources.index import ListedFile
from sm120kit.sources.origin import Origin
from sm120kit.sources.source_records import LockedWheel, Pin, SdistPin, WheelPin

if TYPE_CHECKING:
    from unearth.fetchers import PyPIClient

    from sm120kit.sources._settings import Settings

THREADS = 8
"""Index pages that are read at once."""


@dataclass(frozen=True)
class Releases:
    """Releases at the mirror, index and links of ``origin``."""

    origin: Origin

    def files(self, distribution: str) -> list[index.ListedFile]:
        """Every sdist and wheel of a distribution that is listed and not yanked, the newest version first.

        Raises:
            FetchFailed: none is listed, or the mirror is not a directory.
            OfflineMiss: ``origin`` is offline.
        """
        if not self.origin.reachable:
            message = f"the releases of {distribution} are listed by the package index, and --offline is given"
            raise OfflineMiss(message, "leave out --offline, or name a directory with its sdists and wheels with --mirror")
        listed: dict[str, index.ListedFile] = {}
        problems: list[str] = []
        for sdist in (True, False):
            files, new = self._query(distribution, sdist=sdist)
            problems += new
            for file in files:
                with contextlib.suppress(InvalidVersion):
                    Version(file.version)
                    if not file.yanked:
                        listed.setdefault(file.filename, file)
        if not listed:
            raise FetchFailed("\n  ".join([f"no release of {distribution} is at any configured location", *problems]), _HINT)
        for problem in problems:
            reporting.warn(f"releases of {distribution} may be missing: {problem}")
        return sorted(listed.values(), key=lambda file: Version(file.version), reverse=True)

    def every(self, distribution: str, *, sdist: bool) -> list[index.ListedFile]:
        """Every sdist, or else every wheel, that is listed, also if it is yanked; none if no source lists the distribution.

        Raises:
            FetchFailed: a source cannot be read.
        """
        listed, problems = self._query(distribution, sdist=sdist)
        if problems:
            raise FetchFailed("; ".join(problems), _HINT)
        return listed

    def _query(self, distribution: str, *, sdist: bool = True) -> tuple[list[index.ListedFile], list[str]]:
        settings, client = self._connected
        return index.list_files(distribution, self.origin.mirror, settings, client, sdist=sdist)

    @functools.cached_property
    def _connected(self) -> tuple[Settings, PyPIClient]:
        """Connections to an index are kept: a new one for each of 200 distributions takes longer than what it sends."""
        from sm120kit.sources.index_client import connect

        settings = self.origin.settings()
        return settings, connect(settings)


@dataclass
class Withdrawals:
    """Compares locked wheels and sdists with what is listed; the list of a distribution is read once.

    A distribution that is not listed at all is unknown, not withdrawn: it may be at an index that is not configured. When a
    source cannot be read, that is reported, and nothing more is compared.
    """

    releases: Releases
    _listed: dict[tuple[str, bool], list[ListedFile]] = field(default_factory=dict)
    _unreadable: bool = False

    def of(self, files: Iterable[LockedWheel | Pin]) -> Iterator[str]:
        """A line for each file that was withdrawn. A git commit is at no index."""
        pinned = {file.wheel if isinstance(file, WheelPin) else file for file in files}
        known = [file for file in pinned if isinstance(file, LockedWheel | SdistPin)]
        self._read({_list_of(file) for file in known} - self._listed.keys())
        for file in sorted(known, key=_name):
            if reason := _reason(file, self._listed.get(_list_of(file), [])):
                yield f"{_name(file)}: {reason}"

    def _read(self, wanted: Collection[tuple[str, bool]]) -> None:
        jobs = [partial(self.releases.every, distribution, sdist=sdist) for distribution, sdist in wanted]
        try:
            self._listed |= zip(wanted, in_parallel([] if self._unreadable else jobs, THREADS), strict=False)
        except FetchFailed as error:
            reporting.warn(f"locked files are not compared with the package index: {error.message}")
            self._unreadable = True


def _list_of(file: LockedWheel | SdistPin) -> tuple[str, bool]:
    return file.distribution, isinstance(file, SdistPin)


def _name(file: LockedWheel | SdistPin) -> str:
    return file.filename if isinstance(file, LockedWheel) else f"sdist of {file.distribution} {file.version}"


def _is_of(listed: ListedFile, file: LockedWheel | SdistPin) -> bool:
    return listed.filename == file.filename if isinstance(file, LockedWheel) else listed.version == file.version


def _reason(file: LockedWheel | SdistPin, listed: list[ListedFile]) -> str:
    """Why a locked file is withdrawn; empty if it is not. Several sources may list files of one name."""
    same = [each for each in listed if _is_of(each, file)]
    if not same:
        return "no longer listed" if listed else ""
    hashes = {each.location.sha256 for each in same}
    if not hashes & {file.sha256, ""}:
        return f"listed with another sha256 than the locked {file.sha256}: {', '.join(sorted(hashes))}"
    own = [each for each in same if each.location.sha256 in (file.sha256, "")]
    return "yanked" if all(each.yanked for each in own) else ""


_HINT = "check the network, pip's settings, --index-url or --mirror"
