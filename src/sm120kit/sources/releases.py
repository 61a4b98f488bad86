"""The releases of a distribution that the package index offers, and a few files of each sdist as a git repository."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from packaging.version import InvalidVersion, Version

from sm120kit.core import reporting
from sm120kit.core.disk import disk_errors
from sm120kit.core.errors import FetchFailed, OfflineMiss
from sm120kit.core.workspace import Workspace
from sm120kit.sources import archive, download, identity, index
from sm120kit.sources.git import Repository
from sm120kit.sources.origin import Origin
from sm120kit.sources.settings import Settings
from sm120kit.sources.source_records import SdistPin

_KEY = "release"
"""In the names of partial downloads."""


@dataclass(frozen=True)
class Release:
    """An sdist as it is listed; the sha256 of its pin is empty if it is listed without one."""

    pin: SdistPin
    location: index.Location


@dataclass(frozen=True)
class Releases:
    """Releases at the mirror, index and links of ``origin``; if that is offline, those in ``downloads/``."""

    workspace: Workspace
    origin: Origin

    @cached_property
    def _settings(self) -> Settings:
        return self.origin.settings() if self.origin.reachable else Settings(no_index=True)

    def find(self, project: str, distribution: str, since: str, *, every: bool = False) -> list[Release]:
        """The releases with an sdist from version ``since`` on, the oldest first; ``every``: also pre-releases and yanked ones.

        A source that cannot be read is reported. Of a release that several sources list, the first is used.

        Raises:
            FetchFailed: none is listed, or the mirror is not a directory.
            OfflineMiss: ``origin`` is offline and none is cached.
        """
        directory = self.origin.directory
        if not self.origin.reachable:
            directory = self.workspace.downloads
            with disk_errors(directory):
                directory.mkdir(exist_ok=True)
        listed, problems = (list(index.sdists_in(directory, distribution)), []) if directory else self._query(distribution)
        found: dict[Version, Release] = {}
        for sdist in listed:
            with contextlib.suppress(InvalidVersion):
                version = Version(sdist.version)
                if version >= Version(since) and (every or not (version.is_prerelease or sdist.yanked)):
                    pin = SdistPin(project, distribution, sdist.version, sdist.location.sha256)
                    found.setdefault(version, Release(pin, sdist.location))
        if found:
            for problem in problems:
                reporting.warn(f"releases of {distribution} may be missing: {problem}")
            return [found[version] for version in sorted(found)]
        if not self.origin.reachable:
            raise OfflineMiss(
                f"no sdist of {distribution} {since} or newer is cached and --offline is given",
                f"copy sdists to {self.workspace.downloads}/<sha256>/ or name a directory that holds them with --mirror",
            )
        message = f"no sdist of {distribution} {since} or newer is at any configured location"
        raise FetchFailed("\n  ".join([message, *problems]), "check the network, pip's settings, --index-url or --mirror")

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
            message = f"no release of {distribution} is at any configured location"
            raise FetchFailed("\n  ".join([message, *problems]), "check the network, pip's settings, --index-url or --mirror")
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
            raise FetchFailed("; ".join(problems), "check the network, pip's settings, --index-url or --mirror")
        return listed

    def _query(self, distribution: str, *, sdist: bool = True) -> tuple[list[index.ListedFile], list[str]]:
        from sm120kit.sources.index_client import connect

        with contextlib.closing(connect(self._settings)) as client:
            return index.list_files(distribution, self.origin.mirror, self._settings, client, sdist=sdist)

    def sdist(self, release: Release) -> Path:
        """The sdist of a release, from ``downloads/`` or fetched to it. Requires that no other process calls it.

        Raises:
            FetchFailed: it is listed without a sha256, or its location does not deliver it.
            NotTrusted: its location delivers other content.
            OfflineMiss: ``origin`` is offline and its copy is damaged.
        """
        pin, downloads = release.pin, self.workspace.downloads
        if not pin.sha256:
            raise FetchFailed(
                f"{release.location.shown} is listed without a sha256", "download it, and name its directory with --find-links"
            )
        if (cached := download.cached(pin, downloads)) is not None:
            return cached
        if not self.origin.reachable:
            raise OfflineMiss(f"{pin.distribution} {pin.version} is not cached and --offline is given", "leave out --offline")
        from sm120kit.sources.index_client import connect

        for leftover in downloads.glob(f".{_KEY}.*"):  # of a process that was killed
            leftover.unlink()
        with contextlib.closing(connect(self._settings)) as client:
            return download.fetch(pin, downloads, _KEY, index.Locations(client, [release.location]))


def import_files(pin: SdistPin, sdist: Path, paths: Collection[str], repository: Repository, ref: str) -> None:
    """Commit the files at ``paths`` of an sdist as ``ref`` of an empty repository. All members are checked.

    Raises:
        NotTrusted: the sdist is damaged or has a member that cannot be in a tree.
        Mismatch: its ``PKG-INFO`` has another name or version.
    """
    archive.import_sdist(pin, sdist, repository, ref, {*paths, "PKG-INFO"})
    identity.require_identity(pin, repository, ref)
