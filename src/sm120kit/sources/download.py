"""Bytes become a file only when they are the pinned ones."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sm120kit import console
from sm120kit.errors import FetchFailed, HashMismatch
from sm120kit.records import LockedWheel
from sm120kit.sources.places import ATTEMPTS, Place, Places, Wanted, pause
from sm120kit.workspace import disk_errors, file_sha256

_CHUNK = 2**18


class _Refused(Exception):
    """A place does not deliver; asking it again may help when ``again`` is true."""

    def __init__(self, message: str, *, again: bool) -> None:
        super().__init__(message)
        self.again = again


def cached(wanted: Wanted, downloads: Path) -> Path | None:
    """The file that was fetched before. A file that is no longer what it was is removed."""
    directory = downloads / wanted.sha256
    for file in sorted(directory.iterdir()) if directory.is_dir() else []:
        if file_sha256(file) == wanted.sha256:
            return file
        console.say(f"{file} is not what was fetched (its sha256 differs): removing it")
        with disk_errors(file):
            file.unlink()
    return None


def fetch(wanted: Wanted, downloads: Path, key: str, places: Places) -> Path:
    """Fetch a file from the first of its places that delivers what is pinned, to ``downloads/<sha256>/<file>``.

    Bytes on the way are ``.<key>.*`` beside it and go when the way ends.

    Raises:
        HashMismatch: a place delivered other bytes and no other place has the right ones.
        FetchFailed: no place delivered anything.
    """
    wrong: list[str] = []
    failed: list[str] = list(places.problems)
    for place in places.found:
        if place.sha256 and place.sha256 != wanted.sha256:
            wrong.append(f"{place.shown} says of itself that it is {place.sha256}")
            continue
        name = (place.file.name if place.file else place.url.split("?")[0].rpartition("/")[2]) or f"{key}.tar.gz"
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with _landing(downloads, key) as part:
                    got, size = _stream(place, places, part, f"fetching {wanted.distribution} {wanted.version}")
                    if got != wanted.sha256:
                        wrong.append(f"{place.shown} delivered {size} bytes with {got}")
                        break
                    target = downloads / wanted.sha256 / name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    part.chmod(0o644)
                    part.replace(target)
                    return target
            except _Refused as refused:
                if not refused.again or attempt == ATTEMPTS:
                    failed.append(f"{place.shown}: {refused}")
                    break
                console.say(f"{place.shown}: {refused}; asking again ({attempt + 1} of {ATTEMPTS})")
                pause(attempt)
    what = f"{wanted.distribution} {wanted.version}"
    if wrong:
        raise HashMismatch(
            "\n  ".join([f"{what} is pinned to sha256 {wanted.sha256}, but", *wrong]),
            "nothing was kept; if the release was replaced on purpose, check it and pin its new sha256",
        )
    if failed:
        raise FetchFailed(
            "\n  ".join([f"{what} could not be fetched:", *failed]), "check the network, pip's settings or --mirror"
        )
    file = wanted.filename if isinstance(wanted, LockedWheel) else "sdist"
    raise FetchFailed(
        f"no {file} of {what} at any configured place",
        "see 'pip config list'; name a directory that holds it with --mirror",
    )


@contextmanager
def _landing(downloads: Path, key: str) -> Iterator[Path]:
    with disk_errors(downloads):
        downloads.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=downloads, prefix=f".{key}.")
        os.close(handle)
        part = Path(name)
        try:
            yield part
        finally:
            part.unlink(missing_ok=True)


def _stream(place: Place, places: Places, part: Path, label: str) -> tuple[str, int]:
    """Write what a place delivers to ``part``; its sha256 and size in bytes."""
    digest, size = hashlib.sha256(), 0
    with part.open("wb") as out, _pieces(place, places) as (total, pieces), console.progress(transfer=True) as display:
        task = display.add_task(label, total=total)
        for piece in pieces:
            out.write(piece)
            digest.update(piece)
            size += len(piece)
            display.update(task, completed=size)
    if total is not None and size != total:
        raise _Refused(f"ended after {size} of {total} bytes", again=True)
    return digest.hexdigest(), size


@contextmanager
def _pieces(place: Place, places: Places) -> Iterator[tuple[int | None, Iterator[bytes]]]:
    """The size, where it is known, and the content of what a place delivers, as it is on the wire."""
    if place.file is not None:
        try:
            file = place.file.open("rb")
        except OSError as error:
            raise _Refused(error.strerror or str(error), again=False) from error
        with file:
            yield place.file.stat().st_size, iter(lambda: file.read(_CHUNK), b"")
        return
    import httpx2

    try:
        with places.client.get_stream(place.url, headers={"Accept-Encoding": "identity"}) as answer:
            if answer.status_code >= 400:
                again = answer.status_code in (408, 425, 429) or answer.status_code >= 500
                raise _Refused(f"answered {answer.status_code} {answer.reason_phrase}", again=again)
            length = answer.headers.get("Content-Length", "")
            yield int(length) if length.isdigit() else None, answer.iter_raw(_CHUNK)
    except httpx2.HTTPError as error:
        raise _Refused(str(error) or type(error).__name__, again=isinstance(error, httpx2.TransportError)) from error
