"""Read the files of Debian packages without dpkg and root; maintainer scripts are not run."""

from __future__ import annotations

import fnmatch
import gzip
import io
import lzma
import os
import shutil
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, cast

from sm120kit.core.archives import UNFIT, max_unpacked_bytes
from sm120kit.core.disk import disk_errors
from sm120kit.core.errors import NotTrusted

MERGED = ("bin", "lib", "lib64", "sbin")
"""Directories that are links into ``/usr``. Packages of Debian 12 have files in both."""

HINT = "fetch the package again; if it is as Debian published it, report this"
"""The remedy for a damaged package."""

_CHUNK = 2**20
_COPYRIGHT = "copyright"
"""Licenses require that these files stay with what they are for."""


@dataclass(frozen=True)
class RootEntry:
    """A path of a root file system, relative to it. ``target`` is that of a link; of a hard link it is a path of a file."""

    path: str
    kind: Literal["directory", "file", "symlink", "hardlink"]
    mode: int = 0o755
    uid: int = 0
    gid: int = 0
    target: str = ""


@dataclass(frozen=True)
class UnpackedPackage:
    """The entries of a package below a root file system, and its control files by name. ``paths`` are as in the package."""

    entries: tuple[RootEntry, ...]
    paths: tuple[str, ...]
    control: Mapping[str, bytes]


def unpack(deb: Path, root: Path, left_out: Iterable[str] = ()) -> UnpackedPackage:
    """Write the files of a package below ``root``, a directory without links, and return all its entries.

    Links are not created: no member can be written through one. Paths are those of a file system with merged ``/usr``.

    Raises:
        NotTrusted: it is damaged, or has a member that cannot be in a layer.
    """
    patterns = tuple(left_out)
    limit = max_unpacked_bytes(deb.stat().st_size)
    entries: list[RootEntry] = []
    paths: list[str] = []
    try:
        parts = _parts(deb)
        with _tar(parts, "control.tar") as archive:
            control = {path: stream.read() for path, _, stream in _members(archive, deb, _CHUNK * 16) if stream}
        with _tar(parts, "data.tar") as archive:
            for path, member, stream in _members(archive, deb, limit):
                paths.append(path)
                if path in MERGED and member.issym():
                    continue
                entry = _entry(_merged(path), member, deb)
                unread = any(fnmatch.fnmatchcase(entry.path, pattern) for pattern in patterns)
                if unread and entry.path.rpartition("/")[2] != _COPYRIGHT:
                    continue
                entries.append(entry)
                target = root / entry.path
                if entry.kind == "directory":
                    target.mkdir(parents=True, exist_ok=True)
                elif stream:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with disk_errors(target), target.open("xb") as file:
                        shutil.copyfileobj(stream, file, _CHUNK)
                        os.fchmod(file.fileno(), entry.mode & 0o777 | 0o600)
        if "control" not in control:
            raise ValueError("it has no control file")
    except (FileExistsError, NotADirectoryError) as error:
        occupied = Path(str(error.filename)).relative_to(root)
        raise NotTrusted(f"{deb.name} has {occupied}, which another package has, too", HINT) from error
    except (ValueError, KeyError, EOFError, lzma.LZMAError, tarfile.TarError, gzip.BadGzipFile) as error:
        raise NotTrusted(f"{deb} is not a Debian package: {error}", HINT) from error
    except OSError as error:
        if error.errno not in UNFIT:
            raise
        raise NotTrusted(f"{deb.name} has a path that cannot exist: {error}", HINT) from error
    return UnpackedPackage(tuple(entries), tuple(paths), control)


def _parts(deb: Path) -> dict[str, bytes]:
    """The members of a package, an ar archive: deb(5)."""
    parts = {}
    with deb.open("rb") as file:
        if file.read(8) != b"!<arch>\n":
            raise ValueError("it is no ar archive")
        while header := file.read(60):
            size = int(header[48:58])
            content = file.read(min(size, deb.stat().st_size))
            if len(content) != size or header[58:] != b"`\n":
                raise ValueError("it is truncated")
            parts[header[:16].decode("ascii").rstrip(" /")] = content
            file.read(size % 2)
    if not parts.get("debian-binary", b"").startswith(b"2."):
        raise ValueError("its format is not 2.x")
    return parts


def _tar(parts: Mapping[str, bytes], name: str) -> tarfile.TarFile:
    """One of the two tar archives in a package."""
    member = next((part for part in parts if part == name or part.startswith(f"{name}.")), None)
    if member is None:
        raise ValueError(f"it has no {name}")
    packed = io.BytesIO(parts[member])
    stream: IO[bytes]
    match member.removeprefix(name):
        case "":
            stream = packed
        case ".xz":
            stream = lzma.LZMAFile(packed)  # noqa: SIM115 - read by the archive
        case ".gz":
            stream = cast(IO[bytes], gzip.GzipFile(fileobj=packed))
        case ".zst":
            import zstandard

            stream = cast(IO[bytes], zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True))
        case other:
            raise ValueError(f"{name} has the unknown compression {other}")
    return tarfile.open(fileobj=stream, mode="r|", encoding="utf-8", errors="surrogateescape")


def _members(archive: tarfile.TarFile, deb: Path, limit: int) -> Iterator[tuple[str, tarfile.TarInfo, IO[bytes] | None]]:
    """Path, header and, of files, the content of every member but the root directory."""
    total = 0
    for member in archive:
        path = member.name.removeprefix("./").rstrip("/")
        if path in ("", "."):
            continue
        if not {"", ".", ".."}.isdisjoint(path.split("/")) or "\n" in path:
            raise NotTrusted(f"{deb.name} has a member outside its directory: {member.name!r}", HINT)
        total += member.size
        if total > limit:
            raise NotTrusted(f"{deb.name} unpacks to more than {limit / 2**20:.0f} MiB", HINT)
        yield path, member, archive.extractfile(member) if member.isreg() else None


def _entry(path: str, member: tarfile.TarInfo, deb: Path) -> RootEntry:
    kinds: dict[bytes, Literal["directory", "file", "symlink", "hardlink"]] = {
        tarfile.DIRTYPE: "directory",
        tarfile.REGTYPE: "file",
        tarfile.AREGTYPE: "file",
        tarfile.SYMTYPE: "symlink",
        tarfile.LNKTYPE: "hardlink",
    }
    kind = kinds.get(member.type)
    if kind is None:
        raise NotTrusted(f"{deb.name} has {path}, which is no file, directory or link", HINT)
    target = _merged(member.linkname.removeprefix("./")) if kind == "hardlink" else member.linkname
    return RootEntry(path, kind, member.mode & 0o7777, member.uid, member.gid, target)


def _merged(path: str) -> str:
    """A path as it is where ``/bin`` and others are links into ``/usr``."""
    return f"usr/{path}" if path.partition("/")[0] in MERGED else path
