"""What is in an image: its files, and what the wheels that are installed in it record of theirs."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import tarfile
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import IO, Any

from sm120kit.daemon import DAEMONS_OWN
from sm120kit.records import Image

_RECORD = re.compile(r"(?P<site>.*)/(?P<name>[^/]+)-(?P<version>[^/-]+)\.dist-info/RECORD")


@dataclass(frozen=True)
class Entry:
    """One path of an image. ``content`` is a file's sha256 or where a link points, ``time`` is in seconds since 1970."""

    kind: str
    content: str
    mode: int
    owner: str
    time: int


@dataclass(frozen=True)
class Contents:
    """What is in an image.

    ``recorded`` has for each path that a wheel records the distribution, its version and the sha256, which is empty where
    RECORD has none. ``base`` are the entries of the base image, None when it is not here.
    """

    image: Image
    settings: dict[str, Any]
    entries: dict[str, Entry]
    recorded: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    base: dict[str, Entry] | None = None


def read(archive: tarfile.TarFile) -> tuple[dict[str, Entry], dict[str, tuple[str, str, str]]]:
    """Entries of a file system, and what the wheels that are installed in it record; see :class:`Contents`."""
    entries: dict[str, Entry] = {}
    recorded: dict[str, tuple[str, str, str]] = {}
    for member in archive:
        path = member.name.removeprefix("./").rstrip("/")
        if path in ("", ".") or any(path == own or path.startswith(f"{own}/") for own in DAEMONS_OWN):
            continue
        if member.islnk():
            target = entries[member.linkname.removeprefix("./")]
            entries[path] = target
            continue
        content = member.linkname if member.issym() else ""
        if member.isfile():
            file = archive.extractfile(member)
            assert file is not None
            record = _RECORD.fullmatch(path)
            if record:
                text = file.read()
                content = hashlib.sha256(text).hexdigest()
                recorded |= _recorded(record, text.decode())
            else:
                content = _sha256(file)
        kind = "file" if member.isfile() else "directory" if member.isdir() else "link" if member.issym() else "device"
        entries[path] = Entry(kind, content, member.mode & 0o7777, f"{member.uid}:{member.gid}", int(member.mtime))
    return entries, recorded


def _recorded(record: re.Match[str], text: str) -> dict[str, tuple[str, str, str]]:
    """What a RECORD lists, by paths in the image."""
    found = {}
    for row in csv.reader(io.StringIO(text)):
        path = _normal(f"{record['site']}/{row[0]}")
        algorithm, _, digest = row[1].partition("=")
        known = base64.urlsafe_b64decode(f"{digest}=").hex() if algorithm == "sha256" else ""
        found[path] = (record["name"], record["version"], known)
    return found


def _normal(path: str) -> str:
    parts: list[str] = []
    for part in PurePosixPath(path).parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


def _sha256(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while piece := file.read(2**20):
        digest.update(piece)
    return digest.hexdigest()
