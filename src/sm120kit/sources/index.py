"""Find the locations of sdists and wheels: the mirror, or the indexes and find-links of the user's pip and uv."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from sm120kit.core.digests import file_sha256
from sm120kit.core.errors import FetchFailed
from sm120kit.core.retry import ATTEMPTS, pause
from sm120kit.core.urls import redacted
from sm120kit.sources._settings import Settings
from sm120kit.sources.source_records import DebianPackage, LockedWheel, SdistPin

if TYPE_CHECKING:
    from unearth import Link, Package, PackageFinder
    from unearth.fetchers import PyPIClient

ARCHIVES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


PinnedFile = SdistPin | LockedWheel | DebianPackage
"""A file of an index or archive with its sha256."""


@dataclass(frozen=True)
class Location:
    """A URL or a local file.

    ``shown`` has no credentials, ``file`` is set for a local file, ``sha256`` is that of the index page, or empty.
    """

    shown: str
    file: Path | None = None
    url: str = ""
    sha256: str = ""


@dataclass(frozen=True)
class ListedFile:
    """An sdist or wheel that an index, a page or a directory lists; ``uploaded`` is None if it states no time."""

    version: str
    location: Location
    yanked: bool = False
    filename: str = ""
    uploaded: datetime | None = None


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
    from unearth import PackageFinder

    locations = Locations(client)
    sources = _sources(mirror, settings, PackageFinder, pinned.sha256)
    if mirror and local_directory(mirror) is None:
        name = (
            pinned.filename
            if isinstance(pinned, LockedWheel)
            else f"{re.sub(r'[-_.]+', '_', pinned.distribution).lower()}-{pinned.version}.tar.gz"
        )
        for url in (f"{mirror.rstrip('/')}/{name}", f"{mirror.rstrip('/')}/{pinned.sha256}/{name}"):
            locations.candidates.append(Location(redacted(url), url=url))
    for kind, url in sources:
        requirement = f"{pinned.distribution}=={pinned.version}"
        for package in _query(requirement, not isinstance(pinned, LockedWheel), (kind, url), client, locations.problems):
            if not isinstance(pinned, LockedWheel) or package.link.filename == pinned.filename:
                locations.candidates.append(_location(package.link))
    locations.candidates.sort(key=lambda location: location.file is None)
    return locations


def size_of(locations: Locations) -> int | None:
    """The size of a file in bytes as the first of its locations states it; None if none does."""
    from sm120kit.sources import index_client as client

    for location in locations.candidates:
        if location.file is None:
            size = client.size_of(locations.client, location.url)
        else:
            size = location.file.stat().st_size if location.file.is_file() else None
        if size is not None:
            return size
    return None


def list_files(
    distribution: str, mirror: str | None, settings: Settings, client: PyPIClient, *, sdist: bool = True
) -> tuple[list[ListedFile], list[str]]:
    """Every sdist, or else every wheel, of a distribution that is listed, in the order of the sources, and the problems.

    A local file that is listed without a sha256 has that of its content.
    """
    from unearth import PackageFinder

    listed: list[ListedFile] = []
    problems: list[str] = []
    for source in _sources(mirror, settings, PackageFinder):
        for package in _query(distribution, sdist, source, client, problems):
            link, location = package.link, _location(package.link)
            if not location.sha256 and location.file is not None and location.file.is_file():
                location = replace(location, sha256=file_sha256(location.file))
            listed.append(ListedFile(str(package.version), location, link.is_yanked, link.filename, link.upload_time))
    return listed, problems


def _location(link: Link) -> Location:
    address, file = link.url_without_fragment, link.file_path if link.is_file else None
    hashes = link.hash_option if isinstance(link.hashes or {}, dict) else {}  # JSON may have something else in its place
    sha256 = "".join(map(str, (hashes or {}).get("sha256", [])[:1])).lower()
    return Location(redacted(address), file, address, sha256)


def _query(requirement: str, sdist: bool, source: tuple[str, str], client: PyPIClient, problems: list[str]) -> list[Package]:
    """The sdists or wheels that an index or a find-links page lists. See :func:`_sources` for ``source``."""
    import httpx2
    from unearth import PackageFinder

    kind, url = source
    name = requirement.partition("==")[0]
    options: dict[str, Any] = {"session": client, kind: [url if "://" in url else str(Path(url).expanduser())]}
    options["no_binary" if sdist else "only_binary"] = [name]
    local = "://" not in url or url.startswith("file:")
    with _warnings(problems):
        for attempt in range(1, ATTEMPTS + 1):
            try:
                finder = PackageFinder(ignore_compatibility=True, **options)
                matches = list(finder.find_matches(requirement, allow_yanked=True, allow_prereleases=True))
                break
            except Exception as error:  # whatever fails here, the other sources are queried
                if attempt == ATTEMPTS or not isinstance(error, httpx2.TransportError):
                    problems.append(redacted(f"{url}: {error}"))
                    return []
                pause(attempt)
    listed = []
    for package in matches:
        link = package.link
        if link.is_file and not local:
            problems.append(redacted(f"{url}: lists {link.url_without_fragment}, a local file"))
        elif sdist and not link.filename.endswith(ARCHIVES):
            problems.append(redacted(f"{link.url_without_fragment}: not a tar archive"))
        else:
            listed.append(package)
    return listed


def _existing(mirror: Path) -> Path:
    if not mirror.is_dir():
        raise FetchFailed(f"the mirror {mirror} is not a directory", "name an existing one with --mirror")
    return mirror


def _sources(
    mirror: str | None, settings: Settings, finder: Callable[[], PackageFinder], sha256: str = ""
) -> list[tuple[str, str]]:
    """Kind (``index_urls`` or ``find_links``) and URL of each source: only the mirror where there is one, else all others.

    In a directory, a file may be in a directory named by its ``sha256``.
    """
    directory = local_directory(mirror)
    if directory is not None:
        return [
            ("find_links", str(path)) for path in dict.fromkeys((_existing(directory), directory / sha256)) if path.is_dir()
        ]
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
            if record.thread == thread:
                problems.append(redacted(record.getMessage()))

    thread = threading.get_ident()
    logger, collector = logging.getLogger("unearth"), Collector(logging.WARNING)
    logger.propagate = False
    logger.addHandler(collector)
    try:
        yield
    finally:
        logger.removeHandler(collector)
