"""Read the METADATA and the list of members of a wheel where it is, without fetching the rest of it."""

from __future__ import annotations

import contextlib
import io
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from sm120kit.core.archives import MAX_METADATA_BYTES
from sm120kit.core.errors import FetchFailed, NotTrusted
from sm120kit.core.outside import open_found
from sm120kit.core.urls import redacted
from sm120kit.sources.index import Location
from sm120kit.sources.origin import Origin

if TYPE_CHECKING:
    from unearth.fetchers import PyPIClient

MAX_READ_BYTES = 2**26
"""Limit for what is fetched of a wheel: its list of members, too."""

_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, OverflowError, IndexError)
"""What zipfile raises for damaged archives, and for members that are encrypted or compressed by methods that it lacks."""

_BLOCK = 2**16
"""Bytes of a request: the list of members of vLLM's wheel is read with two."""


@dataclass(frozen=True)
class WheelMetadata:
    """``Requires-Dist`` and ``Provides-Extra`` of a wheel, and the paths of its members. Its sha256 was not verified."""

    requires: tuple[str, ...]
    extras: tuple[str, ...]
    members: tuple[str, ...]


def read_contents(filename: str, location: Location, origin: Origin) -> WheelMetadata:
    """Read the metadata of the wheel ``filename`` at a location, from a server with range requests (RFC 9110).

    Raises:
        FetchFailed: the location does not deliver it, or the server has no range requests.
        NotTrusted: it is damaged, or has no METADATA or a too large one.
    """
    try:
        with opened(location, origin) as file, zipfile.ZipFile(file) as wheel:
            entry = next(info for info in wheel.infolist() if info.filename.endswith(".dist-info/METADATA"))
            if entry.file_size > MAX_METADATA_BYTES:
                raise NotTrusted(f"{location.shown}: its METADATA has {entry.file_size} bytes", "use another release")
            message = message_from_bytes(wheel.read(entry))
            members = tuple(wheel.namelist())
    except (*_DAMAGE, StopIteration, OSError) as error:
        reason = str(error) or "no METADATA"
        raise NotTrusted(f"{location.shown} is not a wheel: {reason}", "use another release, or another index") from error
    return WheelMetadata(
        tuple(map(str, message.get_all("Requires-Dist", []))), tuple(map(str, message.get_all("Provides-Extra", []))), members
    )


@contextlib.contextmanager
def opened(location: Location, origin: Origin) -> Iterator[BinaryIO]:
    """A wheel, of which only the parts that are read are fetched."""
    if location.file is not None:
        with open_found(Path(location.file)) as file:
            yield file
        return
    from sm120kit.sources.index_client import connect

    with contextlib.closing(connect(origin.settings())) as client:
        yield io.BufferedReader(_RemoteFile(client, location), _BLOCK)


class _RemoteFile(io.RawIOBase):
    """A file on a server, of which the ranges that are read are requested."""

    def __init__(self, client: PyPIClient, location: Location) -> None:
        self._client, self._location, self._position, self._left = client, location, 0, MAX_READ_BYTES
        _, self._size = self._request(0, 0)

    def _request(self, first: int, last: int) -> tuple[bytes, int]:
        """Bytes ``first`` to ``last``, and the size of the file."""
        import httpx2

        from sm120kit.sources import index_client as client

        shown = self._location.shown
        try:
            with client.stream(self._client, self._location.url, {"Range": f"bytes={first}-{last}"}) as response:
                total = client.whole_length(response)
                if response.status_code != 206 or total is None:
                    problem = f"HTTP status {response.status_code} instead of a part of the file"
                    raise FetchFailed(f"{shown}: {problem}", "name an index with range requests, or a directory with --mirror")
                content = bytearray()
                for chunk in response.iter_raw():
                    content += chunk
                    self._left -= len(chunk)
                    if self._left < 0 or len(content) > last + 1 - first:
                        raise client.Exceeded("it sends more than the part that was requested, or too many of them")
                return bytes(content), total
        except (httpx2.HTTPError, client.Exceeded, client.RefusedRedirect) as error:
            raise FetchFailed(redacted(f"{shown}: {error}"), "check the network, or name a directory with --mirror") from error

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        last = min(self._position + len(buffer), self._size) - 1
        if last < self._position:
            return 0
        content, _ = self._request(self._position, last)
        content = content[: len(buffer)]
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)
