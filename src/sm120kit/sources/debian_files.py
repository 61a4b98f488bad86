"""Read the files of Debian packages without dpkg and root; maintainer scripts are not run."""

import fnmatch
import functools
import gzip
import io
import lzma
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from sm120kit.core.archives import UNFIT, max_unpacked_bytes
from sm120kit.core.errors import NotTrusted
from sm120kit.core.outside import open_found

MERGED = ("bin", "lib", "lib64", "sbin")
"""Directories that are links into ``/usr``. Packages of Debian 12 have files in both."""

HINT = "fetch the package again; if it is as Debian published it, report this"
"""The remedy for a damaged package."""

_CHUNK = 2**20
_COPYRIGHT = "copyright"
"""Licenses require that these files stay with what they are for."""

AddMember = Callable[[tarfile.TarInfo, Iterable[bytes]], None]
"""Gets each member of a package with the contents of a file."""


@dataclass(frozen=True)
class PackageContents:
    """The paths of a package, as in it, and its control files by name."""

    paths: tuple[str, ...]
    control: Mapping[str, bytes]


def read(deb: Path, add: AddMember, left_out: Iterable[str] = ()) -> PackageContents:
    """Give the members of a package to ``add``: directories, files and links, with paths relative to a root file system.

    ``/bin`` and others become paths below ``/usr``. ``left_out`` are shell-style patterns of paths; files named
    ``copyright`` stay.

    Raises:
        NotTrusted: the package is damaged, or has a path outside its directory or a special file.
    """
    patterns, paths = tuple(left_out), list[str]()
    try:
        parts = _parts(deb)
        with _tar(parts, "control.tar") as archive:
            control = {path: stream.read() for path, _, stream in _members(archive, deb, _CHUNK * 16) if stream}
        if "control" not in control:
            raise ValueError("it has no control file")
        with _tar(parts, "data.tar") as archive:
            for path, member, stream in _members(archive, deb, max_unpacked_bytes(deb.stat().st_size)):
                paths.append(path)
                member.name = _merged(path)
                unread = any(fnmatch.fnmatchcase(member.name, pattern) for pattern in patterns)
                if (path in MERGED and member.issym()) or (unread and path.rpartition("/")[2] != _COPYRIGHT):
                    continue
                if member.islnk():
                    member.linkname = _merged(member.linkname.removeprefix("./"))
                add(member, iter(functools.partial(stream.read, _CHUNK), b"") if stream else ())
    except (ValueError, KeyError, EOFError, lzma.LZMAError, tarfile.TarError, gzip.BadGzipFile) as error:
        raise NotTrusted(f"{deb} is not a Debian package: {error}", HINT) from error
    except OSError as error:
        if error.errno not in UNFIT:
            raise
        raise NotTrusted(f"{deb.name} has a path that cannot exist: {error}", HINT) from error
    return PackageContents(tuple(paths), control)


def _parts(deb: Path) -> dict[str, bytes]:
    """The members of a package, an ar archive: deb(5)."""
    parts = {}
    with open_found(deb) as file:
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
        if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
            raise NotTrusted(f"{deb.name} has {path}, which is no file, directory or link", HINT)
        total += member.size
        if total > limit:
            raise NotTrusted(f"{deb.name} unpacks to more than {limit / 2**20:.0f} MiB", HINT)
        yield path, member, archive.extractfile(member) if member.isreg() else None


def _merged(path: str) -> str:
    """A path as it is where ``/bin`` and others are links into ``/usr``."""
    return f"usr/{path}" if path.partition("/")[0] in MERGED else path
