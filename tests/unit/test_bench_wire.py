"""When bytes arrived, by the kernel's stamp: whatever its clock says, not before the last look and not after the read."""

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
    """Linux begins to stamp a moment after the first socket asks for it, and goes on while one does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
        asks.setsockopt(socket.SOL_SOCKET, wire.SO_TIMESTAMPNS, 1)
        asks.bind(("127.0.0.1", 0))
        for _ in range(1000):
            asks.sendto(b"x", asks.getsockname())
            time.sleep(0.01)
            read_ns, said = time.time_ns(), asks.recvmsg(1, 100)[1]
            seconds, nanoseconds = wire._TIMESPEC.unpack(said[0][2])
            if seconds * 10**9 + nanoseconds < read_ns:
                break
        yield


async def connected(listening: socket.socket) -> tuple[Any, socket.socket]:
    stream = await wire._Backend().connect_tcp("127.0.0.1", listening.getsockname()[1], timeout=5)
    return stream, listening.accept()[0]


def test_arrival_is_before_the_read(listening: socket.socket, stamping: None) -> None:
    async def late() -> tuple[float, float, float]:
        stream, far = await connected(listening)
        sent = time.perf_counter()
        far.sendall(b"token")
        time.sleep(0.05)
        looked = time.perf_counter()
        assert await stream.read(100, timeout=5) == b"token"
        await stream.aclose()
        far.close()
        return sent, stream.arrived, looked

    sent, arrived, looked = asyncio.run(late())
    assert sent - 1e-4 < arrived < looked - 0.02, "two clocks, compared to 20 us"


@pytest.mark.parametrize(("clock_ahead", "age"), [(0.0, 0.25), (-60.0, 0.0), (60.0, 1.0)])
def test_a_clock_that_is_set_moves_no_stamp_out_of_what_is_possible(
    listening: socket.socket, clock_ahead: float, age: float
) -> None:
    async def aged() -> float:
        stream, far = await connected(listening)
        wall_ns = time.time_ns()
        stamp = wall_ns - round((0.25 + clock_ahead) * 1e9)
        said = [(socket.SOL_SOCKET, wire.SO_TIMESTAMPNS, wire._TIMESPEC.pack(stamp // 10**9, stamp % 10**9))]
        found: float = stream._age(said, stream._looked + 1.0, wall_ns)
        assert stream._age([], stream._looked + 1.0, wall_ns) == 0.0, "without a stamp: the time of the read"
        await stream.aclose()
        far.close()
        return found

    assert asyncio.run(aged()) == pytest.approx(age)


def test_more_than_was_asked_for_waits(listening: socket.socket) -> None:
    async def cut() -> list[bytes]:
        stream, far = await connected(listening)
        far.sendall(b"abcdef")
        far.close()
        reads = [await stream.read(4, timeout=5) for _ in range(3)]
        assert stream.get_extra_info("is_readable"), "the pool keeps no connection that has ended"
        await stream.aclose()
        return reads

    assert asyncio.run(cut()) == [b"abcd", b"ef", b""]


def test_the_next_address_of_a_host_is_tried(listening: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = closed.getsockname()

    async def both() -> bytes:
        async def addresses(*_: object, **__: object) -> list[Any]:
            return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", address) for address in (nobody, listening.getsockname())]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", addresses)
        stream, far = await connected(listening)
        far.sendall(b"here")
        read: bytes = await stream.read(100, timeout=5)
        await stream.aclose()
        far.close()
        return read

    assert asyncio.run(both()) == b"here"


def test_silence_and_no_server_are_errors_of_the_pool(listening: socket.socket) -> None:
    async def silent() -> None:
        stream, far = await connected(listening)
        with pytest.raises(httpcore2.ReadTimeout):
            await stream.read(1, timeout=0.01)
        await stream.aclose()
        far.close()

    async def nobody(port: int) -> None:
        await wire._Backend().connect_tcp("127.0.0.1", port, timeout=5)

    asyncio.run(silent())
    port = listening.getsockname()[1]
    listening.close()
    with pytest.raises(httpcore2.ConnectError, match="failed"):
        asyncio.run(nobody(port))
