"""Arrival times by the kernel's stamps: never before the previous read and never after the read itself."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpcore2
import pytest

from sm120kit.bench import wire


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture
def stamping() -> Iterator[None]:
    """Linux stamps from a moment after the first socket requests it, for as long as a socket does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as requesting:
        requesting.setsockopt(socket.SOL_SOCKET, wire.SO_TIMESTAMPNS, 1)
        requesting.bind(("127.0.0.1", 0))
        for _ in range(1000):
            requesting.sendto(b"x", requesting.getsockname())
            time.sleep(0.01)
            read_ns, control = time.time_ns(), requesting.recvmsg(1, 100)[1]
            seconds, nanoseconds = wire._TIMESPEC.unpack(control[0][2])
            if seconds * 10**9 + nanoseconds < read_ns:
                break
        yield


async def connected(listening: socket.socket) -> tuple[Any, socket.socket]:
    stream = await wire._Backend().connect_tcp("127.0.0.1", listening.getsockname()[1], timeout=5)
    return stream, listening.accept()[0]


def test_arrival_is_before_the_read(listening: socket.socket, stamping: None) -> None:
    async def read_late() -> tuple[float, float, float]:
        stream, peer = await connected(listening)
        sent = time.perf_counter()
        peer.sendall(b"token")
        time.sleep(0.05)
        before_read = time.perf_counter()
        assert await stream.read(100, timeout=5) == b"token"
        await stream.aclose()
        peer.close()
        return sent, stream.arrived, before_read

    sent, arrived, before_read = asyncio.run(read_late())
    assert sent - 1e-4 < arrived < before_read - 0.02, "two clocks, compared to 20 us"


@pytest.mark.parametrize(("clock_ahead", "age"), [(0.0, 0.25), (-60.0, 0.0), (60.0, 1.0)])
def test_age_is_limited_when_the_clock_is_adjusted(listening: socket.socket, clock_ahead: float, age: float) -> None:
    async def aged() -> float:
        stream, peer = await connected(listening)
        wall_ns = time.time_ns()
        stamp = wall_ns - round((0.25 + clock_ahead) * 1e9)
        control = [(socket.SOL_SOCKET, wire.SO_TIMESTAMPNS, wire._TIMESPEC.pack(stamp // 10**9, stamp % 10**9))]
        result: float = stream._age(control, stream._last_read + 1.0, wall_ns)
        assert stream._age([], stream._last_read + 1.0, wall_ns) == 0.0, "without a stamp: the time of the read"
        await stream.aclose()
        peer.close()
        return result

    assert asyncio.run(aged()) == pytest.approx(age)


def test_surplus_bytes_are_kept_for_the_next_read(listening: socket.socket) -> None:
    async def cut() -> list[bytes]:
        stream, peer = await connected(listening)
        peer.sendall(b"abcdef")
        peer.close()
        reads = [await stream.read(4, timeout=5) for _ in range(3)]
        assert stream.get_extra_info("is_readable"), "the pool drops a closed connection"
        await stream.aclose()
        return reads

    assert asyncio.run(cut()) == [b"abcd", b"ef", b""]


def test_next_address_of_a_host_is_tried(listening: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        unreachable = closed.getsockname()

    async def both() -> bytes:
        async def addresses(*_: object, **__: object) -> list[Any]:
            return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", address) for address in (unreachable, listening.getsockname())]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", addresses)
        stream, peer = await connected(listening)
        peer.sendall(b"here")
        read: bytes = await stream.read(100, timeout=5)
        await stream.aclose()
        peer.close()
        return read

    assert asyncio.run(both()) == b"here"


def test_timeout_and_refused_connection_are_pool_errors(listening: socket.socket) -> None:
    async def silent() -> None:
        stream, peer = await connected(listening)
        with pytest.raises(httpcore2.ReadTimeout):
            await stream.read(1, timeout=0.01)
        await stream.aclose()
        peer.close()

    async def connect(port: int) -> None:
        await wire._Backend().connect_tcp("127.0.0.1", port, timeout=5)

    asyncio.run(silent())
    port = listening.getsockname()[1]
    listening.close()
    with pytest.raises(httpcore2.ConnectError, match="failed"):
        asyncio.run(connect(port))
