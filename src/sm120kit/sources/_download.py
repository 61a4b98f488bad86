"""Download pinned files: a file is stored only when its sha256 is the pinned one."""

import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

from sm120kit.core import reporting
from sm120kit.core.digests import file_sha256
from sm120kit.core.disk import disk_errors
from sm120kit.core.errors import FetchFailed, NotTrusted
from sm120kit.core.outside import file_problem
from sm120kit.core.reporting import Advance
from sm120kit.core.retry import ATTEMPTS, pause
from sm120kit.core.workspace import Workspace, mark_used
from sm120kit.sources.index import Location, Locations, PinnedFile
from sm120kit.sources.source_records import DebianPackage, LockedWheel, SdistPin

_CHUNK = 2**18


class _NotDelivered(Exception):
    """A location does not deliver the file. ``retry``: a repeated request may succeed. ``absent``: it lacks the file."""

    def __init__(self, message: str, *, retry: bool, absent: bool = False) -> None:
        super().__init__(message)
        self.retry = retry
        self.absent = absent


class NowhereListed(FetchFailed):
    """Every location responded that it does not have the file."""


PARALLEL = 8
"""Files that are looked up or fetched at the same time."""

File = TypeVar("File", LockedWheel, DebianPackage)


def fetch_all(
    files: Sequence[File], key: str, workspace: Workspace, fetch_absent: Callable[[list[File]], Mapping[File, Path]]
) -> tuple[Path, ...]:
    """The path of every file, in their order, those that are not in ``downloads/`` as ``fetch_absent`` has them."""
    with workspace.exclusive(f"{key}s"):
        for leftover in workspace.downloads.glob(f".{key}-*"):  # of a killed run
            leftover.unlink()
        paths: dict[File, Path | None] = {file: cached(file, workspace.downloads) for file in files}
        if absent := [file for file, path in paths.items() if path is None]:
            paths |= fetch_absent(absent)
    return tuple(path for file in files if (path := paths[file]))


def cached(pinned: PinnedFile, downloads: Path) -> Path | None:
    """The file in ``downloads/<sha256>/``, or None. A file whose sha256 no longer matches is removed."""
    directory = downloads / pinned.sha256
    for file in sorted(directory.iterdir()) if directory.is_dir() else []:
        if file_sha256(file) == pinned.sha256:
            mark_used(directory)
            return file
        reporting.info(f"the sha256 of {file} does not match: removing it")
        with disk_errors(file):
            file.unlink()
    return None


def fetch(pinned: PinnedFile, downloads: Path, key: str, locations: Locations, advance: Advance | None = None) -> Path:
    """Fetch a file to ``downloads/<sha256>/<file>``, from the first location that delivers the pinned content.

    Partial downloads are ``downloads/.<key>.*`` and are removed afterwards. With ``advance``, received bytes are counted in the
    caller's task, which may be that of several files at once.

    Raises:
        NotTrusted: a location delivered other content, and no other location the pinned content.
        FetchFailed: no location delivered the file.
    """
    mismatches: list[str] = []
    failures: list[str] = list(locations.problems)
    absent = not failures
    for location in locations.candidates:
        if location.sha256 and location.sha256 != pinned.sha256:
            mismatches.append(f"{location.shown} is listed with sha256 {location.sha256}")
            continue
        name = location.file.name if location.file else unquote(location.url.split("?")[0].rpartition("/")[2])
        if not re.fullmatch(r"\w[\w.+!~-]*", name):
            name = f"{key}.tar.gz"
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with _partial_file(downloads, key) as part:
                    label = f"fetching {pinned.distribution} {pinned.version}"
                    sha256, size = _download(location, locations, part, label, advance)
                    if sha256 != pinned.sha256:
                        mismatches.append(f"{location.shown} delivered {size} bytes with sha256 {sha256}")
                        break
                    target = downloads / pinned.sha256 / name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    part.chmod(0o644)
                    part.replace(target)
                    return target
            except _NotDelivered as failure:
                if not failure.retry or attempt == ATTEMPTS:
                    failures.append(f"{location.shown}: {failure}")
                    absent = absent and failure.absent
                    break
                reporting.info(f"{location.shown}: {failure}; retrying ({attempt + 1} of {ATTEMPTS})")
                pause(attempt)
    release = f"{pinned.distribution} {pinned.version}"
    if mismatches:
        raise NotTrusted(
            "\n  ".join([f"{release} is pinned to sha256 {pinned.sha256}, but", *mismatches]),
            "nothing was stored; if the release was replaced on purpose, check it and pin its new sha256",
        )
    if failures:
        raise (NowhereListed if absent else FetchFailed)(
            "\n  ".join([f"{release} could not be fetched:", *failures]), "check the network, pip's settings or --mirror"
        )
    file = "sdist" if isinstance(pinned, SdistPin) else pinned.filename
    raise FetchFailed(
        f"no {file} of {release} at any configured location",
        "see 'pip config list'; name a directory that holds it with --mirror",
    )


@contextmanager
def _partial_file(downloads: Path, key: str) -> Iterator[Path]:
    """A temporary file in ``downloads``, removed with the block unless it was renamed."""
    with disk_errors(downloads):
        downloads.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=downloads, prefix=f".{key}.")
        os.close(handle)
        part = Path(name)
        try:
            yield part
        finally:
            part.unlink(missing_ok=True)


def _download(location: Location, locations: Locations, part: Path, label: str, advance: Advance | None) -> tuple[str, int]:
    """Write the content of a location to ``part``, and return its sha256 and size in bytes."""
    digest, size = hashlib.sha256(), 0
    reporting.detail(f"{label} from {location.shown}")
    with (
        part.open("wb") as out,
        _content(location, locations) as (total, chunks),
        nullcontext(advance) if advance else reporting.task(label, total, transfer=True) as received,
    ):
        for chunk in chunks:
            out.write(chunk)
            digest.update(chunk)
            size += len(chunk)
            received(len(chunk))
    if total is not None and size != total:
        raise _NotDelivered(f"ended after {size} of {total} bytes", retry=True)
    return digest.hexdigest(), size


@contextmanager
def _content(location: Location, locations: Locations) -> Iterator[tuple[int | None, Iterator[bytes]]]:
    """Size in bytes (None: unknown) and content of a file, without decompression."""
    if location.file is not None:
        if problem := file_problem(location.file):
            raise _NotDelivered(problem, retry=False, absent=not location.file.exists())
        try:
            file = location.file.open("rb")
        except OSError as error:
            raise _NotDelivered(error.strerror or str(error), retry=False) from error
        with file:
            yield location.file.stat().st_size, iter(lambda: file.read(_CHUNK), b"")
        return
    import httpx2

    from sm120kit.sources import index_client

    try:
        with index_client.stream(locations.client, location.url) as response:
            if response.status_code >= 400:
                retry = response.status_code in (408, 425, 429) or response.status_code >= 500
                status = f"HTTP status {response.status_code} {response.reason_phrase}"
                raise _NotDelivered(status, retry=retry, absent=response.status_code in (404, 410))
            yield index_client.content_length(response), response.iter_raw(_CHUNK)
    except index_client.RefusedRedirect as error:
        raise _NotDelivered(str(error), retry=False) from error
    except index_client.Exceeded as error:
        raise FetchFailed(
            f"{location.shown}: {error}; the download was stopped",
            "check the URL; a file that is meant to be so large can be fetched by hand: name its directory with --mirror",
        ) from error
    except httpx2.HTTPError as error:
        retry = isinstance(error, httpx2.TransportError)
        raise _NotDelivered(str(error) or type(error).__name__, retry=retry) from error
