"""Post a request on a connection of its own, and note when each part of the answer arrives.

Linux stamps TCP segments as they arrive (SO_TIMESTAMPNS): a late read of a busy client has the time of the bytes, not its own.
With TLS, and on other systems, it is that of the read.

httptools parses the answer: the parser of the HTTP library takes more time for an event than lies between the events of 64 fast
streams. A connection serves one request, so that none meets one that the server is closing; connecting is not measured.
"""

import asyncio
import json
import re
import socket
import struct
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httptools
import httpx2

import sm120kit
from sm120kit.core.server_requests import certificates
from sm120kit.core.urls import Endpoint

CONNECT_SECONDS = 30.0
MAX_HEAD_BYTES = 100 << 10
"""Limit of everything before the content, interim responses included."""
SO_TIMESTAMPNS = 35
"""asm-generic/socket.h, on 64-bit Linux; Python's ``socket`` does not name it."""
TIMESPEC = struct.Struct("@ll")
SILENCE = re.compile(rb"(?:[\r\n]++|:[^\r\n]*+)*+")
"""Comments of a stream of events, and empty lines: they keep a connection, and are no data of an answer."""
UNPACKED = ("gzip", "x-gzip", "deflate")
"""Compressions that are decoded: a proxy may compress although nothing was offered. Limits are of the decoded content."""


class StampedSocket(socket.socket):
    """A TCP socket whose bytes that were read last ``arrived`` at this time, in seconds of ``time.perf_counter``."""

    arrived = _read = 0.0

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        """Read bytes with the stamp of the last segment."""
        data, control, _, _ = self.recvmsg(bufsize, socket.CMSG_SPACE(TIMESPEC.size), flags)
        now, wall = time.perf_counter(), time.time_ns()
        age = 0.0
        for level, kind, stamp in control:
            if (level, kind) == (socket.SOL_SOCKET, SO_TIMESTAMPNS):
                seconds, nanoseconds = TIMESPEC.unpack(stamp)
                age = (wall - seconds * 10**9 - nanoseconds) / 1e9
        self.arrived = now - min(max(0.0, age), now - self._read)  # the clock of the stamps may have been adjusted
        self._read = now
        return data


async def connected(host: str, port: int) -> StampedSocket:
    """A connection to the first address of a host that accepts one.

    Raises:
        OSError: none does.
    """
    loop = asyncio.get_running_loop()
    failure = OSError("no address")
    for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        connection = StampedSocket(family, kind, protocol)
        try:
            connection.setblocking(False)
            await loop.sock_connect(connection, address)
        except BaseException as error:
            connection.close()
            if not isinstance(error, OSError):
                raise
            failure = error
        else:
            with suppress(OSError):  # not Linux
                connection.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
            return connection
    raise failure


class StreamedAnswer(asyncio.Protocol):
    """An answer as it arrives.

    ``reads`` are parts of its content with the times of ``arrived``, in seconds of ``time.perf_counter``; so are ``started``,
    when the request was sent, and ``ended``. ``error`` is why there is no more of it, "" for a whole answer.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.reads: list[tuple[float, bytes]] = []
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.error = ""
        self.arrived: Callable[[], float] = time.perf_counter
        self.started = self.ended = self._read_at = time.perf_counter()
        self._left, self._head = limit_bytes, 0
        self._limit = limit_bytes
        self._over = asyncio.Event()
        self._parser = httptools.HttpResponseParser(self)
        self._parser.set_dangerous_leniencies(
            lenient_spaces_after_chunk_size=True, lenient_optional_cr_before_lf=True, lenient_chunked_length=True
        )
        self._unpack: Callable[[bytes, int], bytes] | None = None

    def send(self, transport: asyncio.WriteTransport, request: bytes) -> None:
        """Send the request, whose answer this is."""
        self.started = self._read_at = time.perf_counter()
        transport.write(request)

    async def whole(self, stall_seconds: float) -> None:
        """Wait for its end: that of its content, a failure, or ``stall_seconds`` without data, comments aside."""
        while not self._over.is_set():
            left = self._read_at + stall_seconds - time.perf_counter()
            if left <= 0:
                self.end(f"stalled: no data for {stall_seconds:g} s, the limit of --timeout")
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._over.wait()

    def end(self, error: str = "") -> None:
        """Take no more of it; the first error counts."""
        if not self._over.is_set():
            self.error, self.ended = error, time.perf_counter()
            self._over.set()

    def data_received(self, data: bytes) -> None:
        if self._over.is_set():
            return
        self._arrived = self.arrived()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.end("RemoteProtocolError: the server switched to another protocol")
        except httptools.HttpParserError as error:
            self.end(f"RemoteProtocolError: {error}")
        if self.status is None:
            self._head += len(data)
            if self._head > MAX_HEAD_BYTES:
                self.end(f"RemoteProtocolError: the head has more than {MAX_HEAD_BYTES >> 10} KiB")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.status is None:
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self.status is None and (status := self._parser.get_status_code()) >= 200:
            self.status, self._read_at = status, time.perf_counter()  # not of each read: a head that drips has stalled
            encoding = self.headers.get("content-encoding", "").lower()
            if encoding in UNPACKED:
                self._unpack = zlib.decompressobj(wbits=47).decompress  # gzip or zlib, by its header
            elif encoding not in ("", "identity") and status == 200:
                self.end(f"the server compressed the answer as {encoding[:40]!r}, which was not offered")

    def on_body(self, body: bytes) -> None:
        if self._over.is_set():
            return
        try:
            read = self._unpack(body, self._left + 1) if self._unpack else body
        except zlib.error as error:
            self.end(f"the answer cannot be decompressed: {error}")
            return
        if not SILENCE.fullmatch(read):
            self._read_at = time.perf_counter()
        self.reads.append((self._arrived, read))
        self._left -= len(read)
        if self._left < 0:
            self.end(f"the answer has more than {self._limit >> 20} MiB")

    def on_message_complete(self) -> None:
        if self.status is not None:
            self.end()

    def connection_lost(self, error: Exception | None) -> None:
        until_closed = self.status is not None and not {"content-length", "transfer-encoding"} & self.headers.keys()
        if error:
            self.end(f"ReadError: {error}")
        else:
            self.end("" if until_closed else "RemoteProtocolError: the connection was closed before the end of the answer")


async def post(server: Endpoint, path: str, body: dict[str, Any], stall_seconds: float, answer: StreamedAnswer) -> None:
    """Post a request, without a proxy, which would be measured too, and wait for its ``answer``."""
    url = httpx2.URL(server.request_url(path))
    tls = certificates() if url.scheme == "https" else None
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            connection = await connected(url.host, url.port or (443 if tls else 80))
            transport, _ = await asyncio.get_running_loop().create_connection(
                lambda: answer, sock=connection, ssl=tls, server_hostname=url.host if tls else None
            )
    except (OSError, ValueError) as error:  # a timeout is an OSError
        reason = str(error) or f"not within {CONNECT_SECONDS:g} s"
        answer.end(f"ConnectError: {reason}")
        return
    if not tls:
        answer.arrived = lambda: connection.arrived
    try:
        answer.send(transport, _request(server, url, json.dumps(body).encode()))
        await answer.whole(stall_seconds)
    finally:
        transport.abort()


def _request(server: Endpoint, url: httpx2.URL, content: bytes) -> bytes:
    headers = httpx2.Headers(
        {
            "Host": url.netloc.decode(),
            "User-Agent": f"sm120kit/{sm120kit.__version__}",
            "Accept": "*/*",
            "Accept-Encoding": "identity",
            "Connection": "close",
            "Content-Type": "application/json",
            "Content-Length": str(len(content)),
        }
    )
    headers.update(server.headers)
    lines = [b"POST " + url.raw_path + b" HTTP/1.1", *(name + b": " + value for name, value in headers.raw)]
    return b"\r\n".join([*lines, b"", content])
