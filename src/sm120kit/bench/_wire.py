"""HTTP connections with the arrival time of their bytes: the kernel's stamp, not the time at which this process reads them.

A process with many streams reads some of them late. Linux stamps each segment on arrival (``SO_TIMESTAMPNS``, socket(7) and the
kernel's Documentation/networking/timestamping.rst) and returns the stamp with the bytes; one read has the stamp of its last
segment. On other systems, with TLS, and for a moment after the first socket has requested stamps, the time is that of the read.

httptools decodes chunked responses as they arrive; httpx gets their heads and ends. Its own parser takes more time for an event
than lies between the events of 64 fast streams.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import httpcore2
import httptools
import httpx2

from sm120kit.core.tls import certificates
from sm120kit.core.urls import Endpoint

SO_TIMESTAMPNS = 35
"""asm-generic/socket.h, on 64-bit Linux; Python's ``socket`` does not name it."""
_TIMESPEC = struct.Struct("@ll")
_READ_BYTES = 64 << 10
_CONTROL_BYTES = socket.CMSG_SPACE(_TIMESPEC.size)
_HEAD_END = b"\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_NO_CHUNK = b"invalid chunk\r\n"
CLOSED_IN_HEAD = "the connection was closed inside the head of the response"
MAX_HEAD_BYTES = 100 << 10
"""Limit of all heads before the content, from which on the HTTP library gets them, whose limit is the same."""


def client(server: Endpoint, timeout: httpx2.Timeout) -> httpx2.AsyncClient:
    """A client for one server, with its credentials, unlimited connections and no proxy, which would be measured too."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    transport = httpx2.AsyncHTTPTransport(verify=certificates(), limits=limits, trust_env=False)
    if httpx2.URL(server.url).scheme == "http":
        transport._pool = httpcore2.AsyncConnectionPool(  # httpx has no argument for a network backend
            max_connections=None, max_keepalive_connections=None, network_backend=_Backend()
        )
    return httpx2.AsyncClient(
        headers={"Accept-Encoding": "identity", **server.headers}, timeout=timeout, transport=transport, trust_env=False
    )


def arrived(response: httpx2.Response) -> float:
    """Arrival time of the bytes that were read last, in seconds of ``time.perf_counter``."""
    stream = response.extensions["network_stream"]
    return stream.arrived if isinstance(stream, _Stream) else time.perf_counter()


def content(response: httpx2.Response, limit_bytes: int) -> list[tuple[float, bytes]]:
    """Reads of the response's content with their arrival times: empty, and filled as a chunked response arrives.

    Chunked content that is longer than ``limit_bytes`` is an error of the HTTP library.
    Reads that ``response`` yields are missing and must be appended: those of TLS and of responses that are not chunked.
    """
    stream = response.extensions["network_stream"]
    if not isinstance(stream, _Stream):
        return []
    stream.response.limit_bytes = limit_bytes
    return stream.response.content


class _Backend(httpcore2.AsyncNetworkBackend):
    """Opens the connections of a pool."""

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> _Stream:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout):
                *first, last = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                for address in first:
                    with suppress(OSError):
                        return await _connected(loop, *address)
                return await _connected(loop, *last)
        except TimeoutError as error:
            raise httpcore2.ConnectTimeout(str(error)) from error
        except OSError as error:
            raise httpcore2.ConnectError(str(error)) from error


async def _connected(
    loop: asyncio.AbstractEventLoop, family: int, kind: int, protocol: int, name: str, address: tuple[Any, ...]
) -> _Stream:
    """A connection to an address in the form of ``getaddrinfo``."""
    connection = socket.socket(family, kind, protocol)
    try:
        connection.setblocking(False)
        await loop.sock_connect(connection, address)
    except BaseException:
        connection.close()
        raise
    return _Stream(connection, loop)


class _Response:
    """A response as it arrives. Chunked content is decoded; what is not chunked is left to the HTTP library.

    ``decoding`` ends with the content, or when the rest is left to the library. The library gets the heads of chunked content
    and its end only: it cannot continue in the middle of a chunk, and would decode a second time what has been decoded. Content
    that httptools rejects is followed by :data:`_NO_CHUNK`, an error of the library.
    """

    def __init__(self) -> None:
        self.content: list[tuple[float, bytes]] = []
        self.decoding = True
        self.limit_bytes = sys.maxsize
        self._arrived = 0.0
        self._head = bytearray()
        self._heads = self._received = 0
        self._has_head = self._chunked = False
        self._parser = httptools.HttpResponseParser(self)
        self._parser.set_dangerous_leniencies(lenient_spaces_after_chunk_size=True)  # as the HTTP library has it

    def feed(self, arrived: float, read: bytes) -> bytes:
        """The bytes for the HTTP library, after the arrival of ``read``."""
        if not self.decoding:
            return read
        self._arrived = arrived
        in_head = not self._has_head
        if in_head:
            self._head += read
        end = _LAST_CHUNK
        try:
            self._parser.feed_data(read)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if not (self._has_head and self._chunked):  # the HTTP library reports it
                self.decoding = False
                return bytes(self._head) or read
            if self.decoding:  # else surplus bytes after the content
                self.decoding, end = False, _NO_CHUNK
        if self._received > self.limit_bytes:
            self.decoding, end = False, _NO_CHUNK
        if in_head and not self._has_head and len(self._head) <= MAX_HEAD_BYTES:
            return b""
        head, self._head = bytes(self._head), bytearray()
        if not self._chunked:
            self.decoding = False
            return head
        head = b"".join(part + _HEAD_END for part in head.split(_HEAD_END, self._heads)[: self._heads]) if head else b""
        return head if self.decoding else head + end

    @property
    def in_head(self) -> bool:
        """Whether a part of a head has arrived."""
        return self.decoding and bool(self._head)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:
            self._chunked |= name.lower() == b"transfer-encoding" and value.lower() == b"chunked"

    def on_headers_complete(self) -> None:
        if not self._has_head:
            self._heads += 1
            self._has_head = self._parser.get_status_code() >= 200
            self._chunked &= self._has_head

    def on_body(self, body: bytes) -> None:
        if self._chunked and self.decoding:
            self.content.append((self._arrived, body))
            self._received += len(body)

    def on_message_complete(self) -> None:
        if self._has_head:
            self.decoding = False


class _Stream(httpcore2.AsyncNetworkStream):
    """A TCP connection that is read as soon as data arrives, independent of calls of :meth:`read`."""

    def __init__(self, connection: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self.arrived = time.perf_counter()
        self.response = _Response()
        self._connection, self._loop = connection, loop
        self._reads: deque[tuple[float, bytes]] = deque()
        self._last_read = self._earliest = self.arrived
        self._waiting: asyncio.Future[None] | None = None
        self._broken: OSError | None = None
        self._ended = self._answered = False
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError):  # not Linux: the time is that of the read
            connection.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        loop.add_reader(connection, self._readable)

    def _readable(self) -> None:
        try:
            read, control, _, _ = self._connection.recvmsg(_READ_BYTES, _CONTROL_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._broken, read, control = error, b"", []
        now, wall_ns = _clocks()
        self._last_read = now
        if read:
            arrived = now - self._age(control, now, wall_ns)
            full = len(read) == _READ_BYTES
            self._earliest = arrived if full else now  # bytes that a full read has left may have arrived before it
            if not (read := self.response.feed(arrived, read)):
                return
            self._reads.append((arrived, read))
        else:
            self._ended = True
            self._loop.remove_reader(self._connection)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _age(self, control: list[tuple[int, int, bytes]], now: float, wall_ns: int) -> float:
        """Seconds since the bytes arrived, at most since ``_earliest``: the stamp is of a clock that may be adjusted."""
        for level, kind, data in control:
            if (level, kind) == (socket.SOL_SOCKET, SO_TIMESTAMPNS):
                seconds, nanoseconds = _TIMESPEC.unpack(data)
                age: float = (wall_ns - seconds * 10**9 - nanoseconds) / 1e9
                return min(max(0.0, age), now - self._earliest)
        return 0.0

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        self._answered = True
        began = time.perf_counter()
        while not self._reads and not self._ended:
            self._waiting = self._loop.create_future()
            left = None if timeout is None else max(began, self._last_read) + timeout - time.perf_counter()
            try:
                async with asyncio.timeout(left):
                    await self._waiting
            except TimeoutError as error:
                if timeout is not None and time.perf_counter() >= max(began, self._last_read) + timeout:
                    raise httpcore2.ReadTimeout from error
        if not self._reads:
            if self._broken:
                raise httpcore2.ReadError(str(self._broken)) from self._broken
            if self.response.in_head:
                raise httpcore2.RemoteProtocolError(CLOSED_IN_HEAD)
            return b""
        self.arrived, read = self._reads.popleft()
        if len(read) > max_bytes:
            self._reads.appendleft((self.arrived, read[max_bytes:]))
        return read[:max_bytes]

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if self._answered:
            self.response, self._answered = _Response(), False
        try:
            async with asyncio.timeout(timeout):
                await self._loop.sock_sendall(self._connection, buffer)
        except TimeoutError as error:
            raise httpcore2.WriteTimeout from error
        except OSError as error:
            raise httpcore2.WriteError(str(error)) from error

    async def aclose(self) -> None:
        if self._connection.fileno() >= 0:
            self._loop.remove_reader(self._connection)
            self._connection.close()

    def get_extra_info(self, info: str) -> Any:
        return bool(self._reads or self._ended) if info == "is_readable" else None


def _clocks() -> tuple[float, int]:
    """``time.perf_counter`` and the wall clock of the stamps at the same moment: within 20 us, in up to three attempts."""
    for _ in range(3):
        before, wall_ns, after = time.perf_counter(), time.time_ns(), time.perf_counter()
        if after - before < 20e-6:
            break
    return (before + after) / 2, wall_ns
