"""Contents of an image: its files, and the files that its installed wheels record."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import IO, Any, NamedTuple

from sm120kit.images.records import DAEMON_PATHS, Image, ImageFiles

_RECORD = re.compile(r"(?P<site>.*)/(?P<name>[^/]+)-(?P<version>[^/-]+)\.dist-info/RECORD")


@dataclass(frozen=True)
class FileEntry:
    """A path of an image. ``content`` is the sha256 of a file or the target of a link, ``time`` is in seconds since 1970."""

    kind: str
    content: str
    mode: int
    owner: str
    time: int


class WheelFile(NamedTuple):
    """A file that a wheel records: name and version of the distribution, sha256 or "" if RECORD has none."""

    name: str
    version: str
    sha256: str


@dataclass(frozen=True)
class Contents:
    """Contents of an image.

    ``settings`` are those with which a container starts; ``entries`` and ``recorded`` are by path. ``base`` are the entries of
    the base image, None if the daemon does not have it.
    """

    image: Image
    settings: dict[str, Any]
    entries: dict[str, FileEntry]
    recorded: dict[str, WheelFile] = field(default_factory=dict)
    base: dict[str, FileEntry] | None = None


def read(archive: ImageFiles) -> tuple[dict[str, FileEntry], dict[str, WheelFile]]:
    """Read a file system from a tar stream: its entries, and the files that its installed wheels record, by path."""
    entries: dict[str, FileEntry] = {}
    recorded: dict[str, WheelFile] = {}
    for member in archive:
        path = member.name.removeprefix("./").rstrip("/")
        if path in ("", ".") or any(path == added or path.startswith(f"{added}/") for added in DAEMON_PATHS):
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
        entries[path] = FileEntry(kind, content, member.mode & 0o7777, f"{member.uid}:{member.gid}", int(member.mtime))
    return entries, recorded


def _recorded(record: re.Match[str], text: str) -> dict[str, WheelFile]:
    """The files in a RECORD, by their paths in the image."""
    files = {}
    for row in csv.reader(io.StringIO(text)):
        path = _normal(f"{record['site']}/{row[0]}")
        algorithm, _, digest = row[1].partition("=")
        sha256 = base64.urlsafe_b64decode(f"{digest}=").hex() if algorithm == "sha256" else ""
        files[path] = WheelFile(record["name"], record["version"], sha256)
    return files


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
    while chunk := file.read(2**20):
        digest.update(chunk)
    return digest.hexdigest()
