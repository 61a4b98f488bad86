"""Size limits of archives, and reading of wheels within them."""

import csv
import errno
import io
import re
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sm120kit.core.errors import BadInput
from sm120kit.core.outside import open_found

MAX_RATIO = 100
MAX_FREE_BYTES = 2**30
"""An archive may unpack to ``MAX_FREE_BYTES``, beyond that to ``MAX_RATIO`` times its packed size (FlashInfer's: 8 times)."""
MAX_MEMBERS = 100_000
"""Limit for members of an archive; the largest wheels and sdists have some 20,000."""

MAX_METADATA_BYTES = 2**24
"""Limit for a file of ``.dist-info`` that is read as text; RECORD of the largest of 1,075 wheels has 1.9 MB."""
MAX_SCRIPTS_BYTES = 2**20
"""Limit for ``entry_points.txt``: a script is written for each of its lines."""

SOURCE_DATE_EPOCH = 315532800
"""1980-01-01T00:00:00Z in seconds since 1970: the earliest time of a member of a zip file, and so of a wheel.

Commits, wheels and images that have no date of their own get it, so that their content does not depend on when they are made.
"""

UNFIT = (errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ENOENT, errno.EINVAL, errno.EILSEQ)
"""Error numbers of the file system for a member whose path or link cannot be created."""

_CHUNK = 2**20
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_METADATA = re.compile(r"\.dist-info/(METADATA|WHEEL|RECORD|entry_points\.txt)$")
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, UnicodeDecodeError, csv.Error, struct.error)
_HINT = "fetch or build it again, or use another wheel"


def max_unpacked_bytes(packed: int) -> int:
    """Limit in bytes for the unpacked size of an archive of ``packed`` bytes."""
    return max(MAX_FREE_BYTES, MAX_RATIO * packed)


@contextmanager
def open_wheel(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a wheel and check its list of members. Read them with :func:`read_chunks` or :func:`read_member`.

    Raises:
        BadInput: it is damaged, also if this shows where it is read; has too many members or is too large unpacked; or has a
            member that is encrypted, of a compression that wheels may not use, or metadata above ``MAX_METADATA_BYTES``.
        OSError: it cannot be read.
    """
    try:
        with open_found(path) as file, zipfile.ZipFile(file) as wheel:
            if problem := _problem(wheel.infolist(), path.stat().st_size):
                raise BadInput(f"{path} {problem}", _HINT)
            yield wheel
    except _DAMAGE as error:
        raise BadInput(f"{path} is damaged: {error}", _HINT) from error


def _problem(members: Sequence[zipfile.ZipInfo], packed: int) -> str:
    """Why a wheel of ``packed`` bytes is not read; empty if it is."""
    limit, total = max_unpacked_bytes(packed), sum(member.file_size for member in members)
    if len(members) > MAX_MEMBERS:
        return f"has {len(members)} members; the limit is {MAX_MEMBERS}"
    if total > limit:
        return f"unpacks to {total / 2**20:.0f} MiB; the limit for its size is {limit / 2**20:.0f} MiB"
    for member in members:
        if not member.filename:
            return "has a member without a name"
        if member.compress_type not in _COMPRESSIONS or member.flag_bits & 1:
            return f"has a member that is encrypted, or has a compression that wheels may not use: {member.filename}"
        limit = MAX_SCRIPTS_BYTES if member.filename.endswith("/entry_points.txt") else MAX_METADATA_BYTES
        if _METADATA.search(member.filename) and member.file_size > limit:
            return f"has {member.filename} of {member.file_size / 2**20:.1f} MiB; the limit is {limit // 2**20} MiB"
    return ""


def read_chunks(wheel: zipfile.ZipFile, member: str | zipfile.ZipInfo) -> Iterator[bytes]:
    """A member's bytes in chunks of 1 MiB: it may be larger than its header states.

    Raises:
        BadInput: it is damaged, or there is none.
    """
    try:
        with wheel.open(member) as file:
            while chunk := file.read(_CHUNK):
                yield chunk
    except (KeyError, *_DAMAGE) as error:
        raise BadInput(f"{wheel.filename} is damaged: {error}", _HINT) from error


def file_chunks(path: Path) -> Iterator[bytes]:
    """The bytes of a regular file in chunks of 1 MiB."""
    with open_found(path) as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def read_member(wheel: zipfile.ZipFile, member: str | zipfile.ZipInfo) -> bytes:
    """All of a member's bytes."""
    return b"".join(read_chunks(wheel, member))


def copy_member(wheel: zipfile.ZipFile, member: zipfile.ZipInfo, into: zipfile.ZipFile, copy: zipfile.ZipInfo) -> None:
    """Copy a member as it is compressed to the end of another archive, where ``copy`` has its name and mode.

    Contents are the same whatever version of zlib packs them, and nothing is packed again.

    Raises:
        zipfile.BadZipFile: its header is not where the list of members has it.
    """
    source, target = wheel.fp, into.fp
    assert source is not None and target is not None
    source.seek(member.header_offset)
    header = source.read(30)
    if len(header) < 30 or header[:4] != b"PK\x03\x04" or member.flag_bits & 1:
        raise zipfile.BadZipFile(f"{member.filename} cannot be copied")
    name_bytes, extra_bytes = struct.unpack("<HH", header[26:])
    source.seek(name_bytes + extra_bytes, io.SEEK_CUR)
    copy.compress_type, copy.CRC = member.compress_type, member.CRC
    copy.compress_size, copy.file_size, copy.header_offset = member.compress_size, member.file_size, into.start_dir
    target.seek(into.start_dir)
    target.write(copy.FileHeader())
    left = member.compress_size
    while left:
        if not (chunk := source.read(min(left, _CHUNK))):
            raise zipfile.BadZipFile(f"{member.filename} ends {left} bytes early")
        target.write(chunk)
        left -= len(chunk)
    into.filelist.append(copy)
    into.NameToInfo[copy.filename] = copy
    into.start_dir = target.tell()


class ChunkReader(io.RawIOBase):
    """A readable file over chunks of bytes."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = chunk
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count
