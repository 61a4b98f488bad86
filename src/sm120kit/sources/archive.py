"""An sdist's members become a commit without touching the file system: nothing can escape from what is never unpacked."""

from __future__ import annotations

import lzma
import os
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from sm120kit.errors import UnsafeArchive
from sm120kit.gitrepo import EPOCH, IDENTITY, Repository
from sm120kit.records import SdistPin
from sm120kit.workspace import require_disk

MAX_RATIO = 100
MAX_FREE_BYTES = 2**30
"""An archive may unpack to ``MAX_FREE_BYTES``, beyond that to ``MAX_RATIO`` times its packed size (FlashInfer's: 8 times)."""

_CHUNK = 2**20
_DAMAGE = (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError)


def import_sdist(pin: SdistPin, packed: Path, repository: Repository, ref: str) -> None:
    """Commit the content of an sdist, without its top-level directory, as ``ref`` of an empty repository.

    Files have mode 644 or 755. Directories that are empty cannot be in a git tree and are dropped.

    Raises:
        UnsafeArchive: it is damaged, or has a member that cannot be in a tree or points out of it.
    """
    require_disk(repository.path, 3 * packed.stat().st_size, f"importing {packed.name}")
    repository.git("fast-import", "--quiet", "--done", "--date-format=raw", "--depth=0", stdin=_stream(pin, packed, ref))


def _stream(pin: SdistPin, packed: Path, ref: str) -> Iterator[bytes]:
    """What fast-import reads; the members are judged on the way."""
    message = f"{pin.distribution} {pin.version}\n\nsha256: {pin.sha256}\n".encode()
    yield f"commit {ref}\ncommitter {IDENTITY} {EPOCH.removeprefix('@')}\ndata {len(message)}\n".encode() + message
    judge = _Judge(packed)
    try:
        with tarfile.open(packed, "r:*", errors="surrogateescape", encoding="utf-8") as archive:
            for member in archive:
                path = judge.accept(member)
                if path is None:
                    continue
                name = b'"' + os.fsencode(path).replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n") + b'"'
                if member.issym():
                    target = os.fsencode(member.linkname)
                    yield b"M 120000 inline %s\ndata %d\n%s\n" % (name, len(target), target)
                    continue
                content = archive.extractfile(member)
                assert content is not None
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
        raise UnsafeArchive(
            f"{packed.name} is damaged: {error or type(error).__name__}",
            "its sha256 is the pinned one, so it was published like this: pin another release",
        ) from error
    judge.finish()
    yield b"done\n"


class _Judge:
    """What may be in a tree. Sees every member in order; symbolic links are judged at the end, when all of them are known."""

    def __init__(self, packed: Path) -> None:
        self.archive = packed.name
        self.most_bytes = max(MAX_FREE_BYTES, MAX_RATIO * packed.stat().st_size)
        self.bytes = 0
        self.top = ""
        self.links: dict[str, str] = {}
        self.files: set[str] = set()
        self.directories: set[str] = set()

    def refuse(self, member: str, why: str) -> UnsafeArchive:
        return UnsafeArchive(f"{self.archive}: member {member!r} {why}", "nothing of it was kept; pin another release")

    def accept(self, member: tarfile.TarInfo) -> str | None:
        """The path of a file or link below the top-level directory, or None for a directory."""
        name = member.name
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if name.startswith("/"):
            raise self.refuse(name, "has an absolute path")
        if ".." in parts:
            raise self.refuse(name, "has '..' in its path")
        if "\0" in name:
            raise self.refuse(name, "has a NUL in its path")
        if any(part.lower() in (".git", "git~1") for part in parts):
            raise self.refuse(name, "is git's own: a tree cannot hold it")
        if not (member.isreg() or member.isdir() or member.issym()):
            kind = "hard link" if member.islnk() else "device or other special file"
            raise self.refuse(name, f"is a {kind}; only files, directories and symbolic links can be in a tree")
        if not parts:
            return None
        self.top = self.top or parts[0]
        if parts[0] != self.top:
            raise self.refuse(name, f"is not below the one top-level directory {self.top!r}")
        self.bytes += member.size
        if self.bytes > self.most_bytes:
            raise self.refuse(name, f"takes the unpacked size beyond {self.most_bytes / 2**20:.0f} MiB")
        path = "/".join(parts[1:])
        if member.isdir():
            self._enter(name, path)
            return None
        if not path:
            raise self.refuse(name, "stands where the top-level directory should")
        if path in self.files or path in self.directories:
            raise self.refuse(name, "occurs twice")
        self._enter(name, "/".join(parts[1:-1]))
        self.files.add(path)
        if member.issym():
            self.links[path] = member.linkname
        return path

    def _enter(self, name: str, directory: str) -> None:
        """Note a directory and all above it; none may be a file or link."""
        while directory and directory not in self.directories:
            if directory in self.files:
                raise self.refuse(name, f"lies below {directory!r}, which is not a directory")
            self.directories.add(directory)
            directory = directory.rpartition("/")[0]

    def finish(self) -> None:
        """Judge the links and the whole."""
        if not self.files:
            raise UnsafeArchive(f"{self.archive} has no files", "pin another release")
        for path, target in self.links.items():
            if target.startswith("/") or not self._stays_inside(path):
                raise self.refuse(f"{self.top}/{path}", f"is a symbolic link out of the tree: {target!r}")

    def _stays_inside(self, link: str) -> bool:
        """Follow a link as the kernel would, through other links; a loop leads nowhere, so it stays inside."""
        here: list[str] = []
        ahead = link.split("/")
        for _ in range(10_000):
            if not ahead:
                break
            part = ahead.pop(0)
            if part == "..":
                if not here:
                    return False
                here.pop()
            elif part not in ("", "."):
                here.append(part)
                target = self.links.get("/".join(here))
                if target is not None:
                    if target.startswith("/"):
                        return False
                    here.pop()
                    ahead = target.split("/") + ahead
        return True
