"""Where a source or a wheel may come from: the mirror, or what the user's pip and uv are set to."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit, urlunsplit

from sm120kit.errors import FetchFailed
from sm120kit.records import LockedWheel, SdistPin
from sm120kit.sources.settings import Settings, read_settings

if TYPE_CHECKING:
    from unearth import PackageFinder
    from unearth.fetchers import PyPIClient

ATTEMPTS = 4
"""How often a place is asked that fails for a reason that may pass."""
PAUSE_SECONDS = 0.5
ARCHIVES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


Wanted = SdistPin | LockedWheel
"""A file on an index, known by its sha256."""


@dataclass(frozen=True)
class Place:
    """Where a file may be had. ``file`` is set for one on this machine; ``sha256`` is what the place says of it, or empty."""

    shown: str
    file: Path | None = None
    url: str = ""
    sha256: str = ""


@dataclass
class Places:
    """The places of one file, best first, what went wrong in finding them, and the client that asks them."""

    client: PyPIClient
    found: list[Place] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def redacted(url: str) -> str:
    """A URL without the name and password in it."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=host)) if parts.netloc else url


def pause(attempt: int) -> None:
    """Wait before asking again, longer each time."""
    time.sleep(PAUSE_SECONDS * 2**attempt)


def local_directory(mirror: str | None) -> Path | None:
    """The directory that a mirror names, unless it is a URL of another machine."""
    if not mirror:
        return None
    if mirror.startswith("file:"):
        return Path(unquote(urlsplit(mirror).path))
    return None if "://" in mirror else Path(mirror).expanduser().absolute()


def is_local(mirror: str | None) -> bool:
    """Whether asking this mirror needs no network."""
    return local_directory(mirror) is not None


def repository_name(url: str) -> str:
    """The last part of a git URL, which is also the name of its bare clone: ``cutlass.git``."""
    return re.split(r"[/:]", url.rstrip("/"))[-1].removesuffix(".git") + ".git"


def settings_for(mirror: str | None) -> Settings:
    """What the user told pip and uv; nothing of it matters for a mirror that is a directory."""
    return Settings(no_index=True) if is_local(mirror) else read_settings()


def find(wanted: Wanted, mirror: str | None, settings: Settings, client: PyPIClient) -> Places:
    """Find a file's places. One that is broken or absent is a problem to report, not the end.

    Raises:
        FetchFailed: the mirror is not a directory.
    """
    import httpx2
    from unearth import PackageFinder

    places = Places(client)
    sources = _sources(wanted, mirror, settings, PackageFinder)
    if mirror and not is_local(mirror):
        name = (
            wanted.filename
            if isinstance(wanted, LockedWheel)
            else f"{re.sub(r'[-_.]+', '_', wanted.distribution).lower()}-{wanted.version}.tar.gz"
        )
        for url in (f"{mirror.rstrip('/')}/{name}", f"{mirror.rstrip('/')}/{wanted.sha256}/{name}"):
            places.found.append(Place(redacted(url), url=url))
    for kind, url in sources:
        with _warnings(places.problems):
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    places.found += _ask(wanted, kind, url, places)
                    break
                except Exception as error:  # whatever one source does must not keep the others from being asked
                    if attempt == ATTEMPTS or not isinstance(error, httpx2.TransportError):
                        places.problems.append(f"{redacted(url)}: {error}")
                        break
                    pause(attempt)
    places.found.sort(key=lambda place: place.file is None)
    return places


def _ask(wanted: Wanted, kind: str, url: str, places: Places) -> list[Place]:
    """The places that one find-links location or index knows."""
    from unearth import PackageFinder

    source: dict[str, Any] = {"session": places.client, kind: [url if "://" in url else str(Path(url).expanduser())]}
    name = wanted.distribution
    source |= {"only_binary": [name]} if isinstance(wanted, LockedWheel) else {"no_binary": [name]}
    finder = PackageFinder(ignore_compatibility=True, **source)
    found = []
    for package in finder.find_matches(f"{name}=={wanted.version}", allow_yanked=True, allow_prereleases=True):
        link = package.link
        if isinstance(wanted, LockedWheel) and link.filename != wanted.filename:
            continue
        if isinstance(wanted, SdistPin) and not link.filename.endswith(ARCHIVES):
            places.problems.append(f"{link.redacted}: not a tar archive")
            continue
        said = "".join((link.hash_option or {}).get("sha256", [])[:1]).lower()
        found.append(Place(link.redacted, link.file_path if link.is_file else None, link.url_without_fragment, said))
    return found


def _sources(
    wanted: Wanted, mirror: str | None, settings: Settings, finder: Callable[[], PackageFinder]
) -> list[tuple[str, str]]:
    """What to ask and how: the mirror alone, else find-links and indexes; the library knows the default index."""
    directory = local_directory(mirror)
    if directory is not None:
        if not directory.is_dir():
            raise FetchFailed(f"the mirror {directory} is not a directory", "name an existing one with --mirror")
        return [("find_links", str(place)) for place in (directory, directory / wanted.sha256) if place.is_dir()]
    if mirror:
        return [("find_links", f"{mirror.rstrip('/')}/")]
    asked = [("find_links", link) for link in settings.find_links]
    if not settings.no_index:
        first = settings.index or tuple(str(source["url"]) for source in finder().sources)
        asked += [("index_urls", index) for index in dict.fromkeys([*first, *settings.extra_index])]
    return asked


def client_for(settings: Settings) -> PyPIClient:
    """A client that talks to indexes as pip would.

    Raises:
        FetchFailed: the certificates named are not a file.
    """
    import ssl

    from unearth.auth import MultiDomainBasicAuth
    from unearth.fetchers import PyPIClient

    verify: bool | ssl.SSLContext = True
    if settings.certificates:
        if not Path(settings.certificates).is_file():
            raise FetchFailed(
                f"there is no certificate bundle {settings.certificates}",
                "pip's setting cert, PIP_CERT or SSL_CERT_FILE names it: correct or unset it",
            )
        verify = ssl.create_default_context(cafile=settings.certificates)
    client = PyPIClient(trusted_hosts=settings.trusted_hosts, verify=verify, timeout=settings.timeout, follow_redirects=True)
    client.auth = MultiDomainBasicAuth(prompting=False, index_urls=[*settings.index, *settings.extra_index])
    return client


@contextlib.contextmanager
def _warnings(problems: list[str]) -> Iterator[None]:
    """Collect what the library only logs: which source could not be read, and why."""

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            problems.append(record.getMessage())

    logger, collector = logging.getLogger("unearth"), Collector(logging.WARNING)
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(collector)
    try:
        yield
    finally:
        logger.removeHandler(collector)
        logger.propagate = propagate
