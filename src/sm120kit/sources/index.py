"""Find the locations of sdists and wheels: the mirror, or the indexes and find-links of the user's pip and uv."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from sm120kit.core.errors import FetchFailed
from sm120kit.core.retry import ATTEMPTS, pause
from sm120kit.core.urls import redacted
from sm120kit.sources.records import LockedWheel, SdistPin
from sm120kit.sources.settings import Settings

if TYPE_CHECKING:
    from unearth import PackageFinder
    from unearth.fetchers import PyPIClient

ARCHIVES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


PinnedFile = SdistPin | LockedWheel
"""A file of an index with its sha256."""


@dataclass(frozen=True)
class Location:
    """A URL or a local file.

    ``shown`` has no credentials, ``file`` is set for a local file, ``sha256`` is that of the index page, or empty.
    """

    shown: str
    file: Path | None = None
    url: str = ""
    sha256: str = ""


@dataclass
class Locations:
    """The locations of a file, local ones first, the problems that occurred while finding them, and the client to use."""

    client: PyPIClient
    candidates: list[Location] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def local_directory(mirror: str | None) -> Path | None:
    """The directory of a mirror on this machine; None for a URL of another machine."""
    if not mirror:
        return None
    if mirror.startswith("file:"):
        return Path(unquote(urlsplit(mirror).path))
    return None if "://" in mirror else Path(mirror).expanduser().absolute()


def repository_name(url: str) -> str:
    """The last part of a git URL, which is also the name of its bare clone: ``cutlass.git``."""
    return re.split(r"[/:]", url.rstrip("/"))[-1].removesuffix(".git") + ".git"


def find(pinned: PinnedFile, mirror: str | None, settings: Settings, client: PyPIClient) -> Locations:
    """Find the locations of a file. An index that is broken or unreachable is listed in ``problems``.

    Raises:
        FetchFailed: the mirror is not a directory.
    """
    import httpx2
    from unearth import PackageFinder

    locations = Locations(client)
    sources = _sources(pinned, mirror, settings, PackageFinder)
    if mirror and local_directory(mirror) is None:
        name = (
            pinned.filename
            if isinstance(pinned, LockedWheel)
            else f"{re.sub(r'[-_.]+', '_', pinned.distribution).lower()}-{pinned.version}.tar.gz"
        )
        for url in (f"{mirror.rstrip('/')}/{name}", f"{mirror.rstrip('/')}/{pinned.sha256}/{name}"):
            locations.candidates.append(Location(redacted(url), url=url))
    for kind, url in sources:
        with _warnings(locations.problems):
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    locations.candidates += _query(pinned, kind, url, locations)
                    break
                except Exception as error:  # whatever fails here, the other sources are queried
                    if attempt == ATTEMPTS or not isinstance(error, httpx2.TransportError):
                        locations.problems.append(redacted(f"{url}: {error}"))
                        break
                    pause(attempt)
    locations.candidates.sort(key=lambda location: location.file is None)
    return locations


def _query(pinned: PinnedFile, kind: str, url: str, locations: Locations) -> list[Location]:
    """The locations that an index or a find-links page lists. ``kind`` is ``index_urls`` or ``find_links``."""
    from unearth import PackageFinder

    source: dict[str, Any] = {"session": locations.client, kind: [url if "://" in url else str(Path(url).expanduser())]}
    name = pinned.distribution
    source |= {"only_binary": [name]} if isinstance(pinned, LockedWheel) else {"no_binary": [name]}
    finder = PackageFinder(ignore_compatibility=True, **source)
    listed = []
    local = "://" not in url or url.startswith("file:")
    for package in finder.find_matches(f"{name}=={pinned.version}", allow_yanked=True, allow_prereleases=True):
        link = package.link
        if link.is_file and not local:
            locations.problems.append(redacted(f"{url}: lists {link.url_without_fragment}, a local file"))
            continue
        if isinstance(pinned, LockedWheel) and link.filename != pinned.filename:
            continue
        if isinstance(pinned, SdistPin) and not link.filename.endswith(ARCHIVES):
            locations.problems.append(redacted(f"{link.url_without_fragment}: not a tar archive"))
            continue
        address, file = link.url_without_fragment, link.file_path if link.is_file else None
        sha256 = "".join((link.hash_option or {}).get("sha256", [])[:1]).lower()
        listed.append(Location(redacted(address), file, address, sha256))
    return listed


def _sources(
    pinned: PinnedFile, mirror: str | None, settings: Settings, finder: Callable[[], PackageFinder]
) -> list[tuple[str, str]]:
    """Kind and URL of each source: only the mirror where there is one, else find-links and indexes."""
    directory = local_directory(mirror)
    if directory is not None:
        if not directory.is_dir():
            raise FetchFailed(f"the mirror {directory} is not a directory", "name an existing one with --mirror")
        return [("find_links", str(path)) for path in (directory, directory / pinned.sha256) if path.is_dir()]
    if mirror:
        return [("find_links", f"{mirror.rstrip('/')}/")]
    sources = [("find_links", link) for link in settings.find_links]
    if not settings.no_index:
        default = settings.index or tuple(str(source["url"]) for source in finder().sources)
        sources += [("index_urls", index) for index in dict.fromkeys([*default, *settings.extra_index])]
    return sources


@contextlib.contextmanager
def _warnings(problems: list[str]) -> Iterator[None]:
    """Collect warnings that unearth only logs: which source could not be read, and why."""

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            problems.append(redacted(record.getMessage()))

    logger, collector = logging.getLogger("unearth"), Collector(logging.WARNING)
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(collector)
    try:
        yield
    finally:
        logger.removeHandler(collector)
        logger.propagate = propagate
