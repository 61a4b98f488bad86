"""Import an sdist or wheel as a git commit. Members are never written to the file system, so none can leave its directory."""

from __future__ import annotations

import bz2
import gzip
import lzma
import math
import os
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from sm120kit.core.archives import MAX_MEMBERS, max_unpacked_bytes, open_wheel
from sm120kit.core.disk import require_disk
from sm120kit.core.errors import NotTrusted
from sm120kit.core.outside import open_found
from sm120kit.sources.git import DATE, IDENTITY, Repository
from sm120kit.sources.source_records import SdistPin, WheelPin

MAX_HEADER_BYTES = 2**16
"""Limit for the header of one member with the records before it (long names, PAX, sparse maps), which are read into memory."""
MAX_HEADER_RECORDS = 64
MAX_PATH_BYTES, MAX_DEPTH = 1024, 64

MAX_SOURCE_BYTES = 4 * 2**20
"""Files of wheels that are larger are libraries and programs, of which an engine has a gigabyte: they are not imported."""

_CHUNK = 2**20
_OPENERS: dict[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
    b"\x5d\0\0": lzma.open,
}
"""Functions that open an archive, by its first bytes."""
_DAMAGE = (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError, OSError)

_Member = tuple[str, tarfile.TarInfo, IO[bytes] | None]
"""Path in the tree, header, and content of a file; None for a symbolic link."""


def import_sdist(pin: SdistPin, packed: Path, repository: Repository, ref: str) -> None:
    """Commit the content of an sdist, without its top-level directory, as ``ref`` of an empty repository.

    Files get mode 644 or 755. Empty directories cannot be in a git tree and are dropped.

    Raises:
        NotTrusted: it is damaged or too large, or has a member that cannot be in a tree or points out of it.
    """
    _import(pin, packed, repository, ref, _sdist_members(packed))


def import_wheel(pin: WheelPin, packed: Path, repository: Repository, ref: str) -> None:
    """Commit the content of a wheel as ``ref`` of an empty repository, with ``.dist-info``, without files above 4 MiB.

    Raises:
        NotTrusted: it is damaged or has a member that cannot be in a tree.
        BadInput: it is too large, or uses a compression that wheels may not use.
    """
    _import(pin, packed, repository, ref, _wheel_members(packed))


def _import(pin: SdistPin | WheelPin, packed: Path, repository: Repository, ref: str, members: Iterator[_Member]) -> None:
    require_disk(repository.path, 3 * packed.stat().st_size, f"importing {packed.name}")
    stream = _stream(pin, packed, ref, members)
    repository.git("fast-import", "--quiet", "--done", "--date-format=raw", "--depth=0", stdin=stream, tied=True)


def _stream(pin: SdistPin | WheelPin, packed: Path, ref: str, members: Iterator[_Member]) -> Iterator[bytes]:
    """Input for ``git fast-import``; every member is checked before it is written."""
    message = f"{pin.distribution} {pin.version}\n\nsha256: {pin.sha256}\n".encode()
    yield f"commit {ref}\ncommitter {IDENTITY} {DATE.removeprefix('@')}\ndata {len(message)}\n".encode() + message
    try:
        for path, member, content in members:
            name = b'"' + os.fsencode(path).replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n") + b'"'
            if content is None:
                target = os.fsencode(member.linkname)
                yield b"M 120000 inline %s\ndata %d\n%s\n" % (name, len(target), target)
                continue
            yield b"M %d inline %s\ndata %d\n" % (100755 if member.mode & 0o100 else 100644, name, member.size)
            left = member.size
            while left:
                piece = content.read(min(left, _CHUNK))
                if not piece:
                    raise EOFError(f"{member.name} ends {left} bytes early")
                left -= len(piece)
                yield piece
            yield b"\n"
    except _DAMAGE as error:
        raise NotTrusted(
            f"{packed.name} is damaged: {error or type(error).__name__}",
            "its sha256 matches the pin, so it was published damaged: pin another release",
        ) from error
    yield b"done\n"


def _sdist_members(packed: Path) -> Iterator[_Member]:
    checks = _Checks(packed)
    with _Unpacked(packed) as unpacked, unpacked.archive() as archive:
        while (member := unpacked.next(archive)) is not None:
            path = checks.accept(member)
            if path is not None:
                yield path, member, None if member.issym() else archive.extractfile(member)
    checks.finish()


def _wheel_members(packed: Path) -> Iterator[_Member]:
    checks = _Checks(packed, top=False)
    with open_wheel(packed) as wheel:
        for listed in wheel.infolist():
            member, mode = tarfile.TarInfo(listed.filename), listed.external_attr >> 16
            member.size, member.mode = listed.file_size, stat.S_IMODE(mode)
            if listed.is_dir():
                member.type = tarfile.DIRTYPE
            elif stat.S_IFMT(mode) not in (0, stat.S_IFREG):
                raise checks.error(listed.filename, "is a link or special file, which a wheel cannot contain")
            if (path := checks.accept(member)) is not None and listed.file_size <= MAX_SOURCE_BYTES:
                with wheel.open(listed) as content:
                    yield path, member, content
                    if content.read(1):
                        raise EOFError(f"{listed.filename} is longer than its header states")
    checks.finish()


class _Unpacked:
    """The unpacked bytes of an archive. Limits what :mod:`tarfile` reads for a header, whose size the archive states itself."""

    def __init__(self, packed: Path) -> None:
        self._name = packed.name
        with open_found(packed) as file:
            start = file.read(8)
        opener = next((opener for magic, opener in _OPENERS.items() if start.startswith(magic)), Path.open)
        self._file: IO[bytes] = opener(packed, "rb")
        self._left: float = 0
        self._last = b""
        self.seek, self.tell = self._file.seek, self._file.tell

    def __enter__(self) -> _Unpacked:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def archive(self) -> tarfile.TarFile:
        """Open the archive; this reads the first header."""
        self._left = MAX_HEADER_BYTES
        return tarfile.TarFile(fileobj=self, errors="surrogateescape", encoding="utf-8")  # type: ignore[arg-type]

    def next(self, archive: tarfile.TarFile) -> tarfile.TarInfo | None:
        """The next member, or None at the end; its content can be read until the next call.

        An archive ends with its file or a block of zeros; tarfile also ends it silently at an invalid header.
        """
        self._left = MAX_HEADER_BYTES
        archive.members.clear()  # type: ignore[attr-defined]  # saves memory
        member = archive.next()
        if member is None and self._last.strip(b"\0"):
            raise tarfile.ReadError("a header is not valid")
        self._left = math.inf
        return member

    def read(self, size: int) -> bytes:
        """Read bytes, as :mod:`tarfile` requires of a file object."""
        self._left -= size
        if self._left < 0:
            limit = f"{MAX_HEADER_BYTES // 2**10} KiB"
            raise NotTrusted(f"{self._name} has a header of more than {limit}", "nothing was stored; pin another release")
        self._last = self._file.read(size)
        return self._last


class _Checks:
    """Which members may be in a tree. Every member is checked in order, and symbolic links again after the last one.

    ``top``: all members are below one directory, which is no part of the tree.
    """

    def __init__(self, packed: Path, *, top: bool = True) -> None:
        self.archive = packed.name
        self.depth = int(top)
        self.max_bytes = max_unpacked_bytes(packed.stat().st_size)
        self.bytes = self.members = 0
        self.top = ""
        self.links: dict[str, str] = {}
        self.files: set[str] = set()
        self.directories: set[str] = set()

    def error(self, member: str, problem: str) -> NotTrusted:
        return NotTrusted(f"{self.archive}: member {member!r} {problem}", "nothing was stored; pin another release")

    def accept(self, member: tarfile.TarInfo) -> str | None:
        """The path of a file or link in the tree; None for a directory."""
        name = member.name
        self.members += 1
        if self.members > MAX_MEMBERS:
            raise self.error(name, f"exceeds the limit of {MAX_MEMBERS} members")
        if len(os.fsencode(name)) > MAX_PATH_BYTES or name.count("/") > MAX_DEPTH or len(member.linkname) > MAX_PATH_BYTES:
            raise self.error(f"{name[:80]}...", f"has a path of more than {MAX_PATH_BYTES} bytes or {MAX_DEPTH} directories")
        if len(member.pax_headers) > MAX_HEADER_RECORDS:
            raise self.error(name, f"has more than {MAX_HEADER_RECORDS} header records")
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if name.startswith("/"):
            raise self.error(name, "has an absolute path")
        if ".." in parts:
            raise self.error(name, "has '..' in its path")
        if "\0" in name:
            raise self.error(name, "has a NUL in its path")
        if any(part.lower() in (".git", "git~1") for part in parts):
            raise self.error(name, "is reserved by git and cannot be in a tree")
        if not (member.isreg() or member.isdir() or member.issym()) or member.issparse() or member.size < 0:
            kind = "hard link" if member.islnk() else "sparse file" if member.issparse() else "device or other special file"
            raise self.error(name, f"is a {kind}; only files, directories and symbolic links can be in a tree")
        if not parts:
            return None
        self.top = self.top or parts[0]
        if self.depth and parts[0] != self.top:
            raise self.error(name, f"is not below the top-level directory {self.top!r}")
        self.bytes += member.size
        if self.bytes > self.max_bytes:
            raise self.error(name, f"makes the unpacked size exceed {self.max_bytes / 2**20:.0f} MiB")
        path = "/".join(parts[self.depth :])
        if member.isdir():
            self._enter(name, path)
            return None
        if not path:
            raise self.error(name, "has the path of the top-level directory")
        if path in self.files or path in self.directories:
            raise self.error(name, "occurs twice")
        self._enter(name, "/".join(parts[self.depth : -1]))
        self.files.add(path)
        if member.issym():
            self.links[path] = member.linkname
        return path

    def _enter(self, name: str, directory: str) -> None:
        """Record a directory and its parents; none may be a file or link."""
        while directory and directory not in self.directories:
            if directory in self.files:
                raise self.error(name, f"is below {directory!r}, which is not a directory")
            self.directories.add(directory)
            directory = directory.rpartition("/")[0]

    def finish(self) -> None:
        """Check symbolic links and the archive as a whole, after the last member."""
        if not self.files:
            raise NotTrusted(f"{self.archive} has no files", "pin another release")
        for path, target in self.links.items():
            parts = [part for part in target.split("/") if part not in ("", ".")]
            up = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
            # Behind a name, which may be another link, ".." could lead out.
            if target.startswith("/") or ".." in parts[up:] or up > path.count("/"):
                raise self.error(f"{self.top}/{path}", f"is a symbolic link out of the tree: {target!r}")
