"""The releases of a distribution that the package index offers."""

import contextlib
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from sm120kit.core import reporting
from sm120kit.core.errors import FetchFailed, OfflineMiss
from sm120kit.sources import index
from sm120kit.sources.origin import Origin

_HINT = "check the network, pip's settings, --index-url or --mirror"


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
        from sm120kit.sources.index_client import connect

        settings = self.origin.settings()
        with contextlib.closing(connect(settings)) as client:
            return index.list_files(distribution, self.origin.mirror, settings, client, sdist=sdist)
