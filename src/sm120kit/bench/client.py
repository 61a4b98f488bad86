"""Streams from an OpenAI-compatible server, any number at once, from one process and one thread."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

from sm120kit.bench.sample import Sample, understand
from sm120kit.errors import ServerUnreachable

if TYPE_CHECKING:
    import httpx2

STALL_SECONDS = 120.0
"""A stream in which nothing comes for so long has stalled: an error of that request."""


Ended = Callable[[], Sample]
"""A request that has ended; calling it understands what came."""


@dataclass(frozen=True)
class Ask:
    """One request to make: ``prompt`` is its number in the workload, ``body`` the JSON that is posted to ``path``."""

    prompt: int
    path: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Watched:
    """What a run came to. ``lag_seconds`` is the longest time for which this process did not get to look at its streams."""

    samples: tuple[Sample, ...]
    lag_seconds: float


def models(url: str) -> tuple[str, ...]:
    """The model ids that a server offers.

    Raises:
        ServerUnreachable: nothing answers there, or not with a list of models.
    """
    return tuple(str(model["id"]) for model in _models(url))


def said(url: str, model: str) -> dict[str, str]:
    """What a server says of a model, such as its folder and its longest context, and the version that it says it has.

    ``/version`` is vLLM's, ``/get_server_info`` SGLang's; others have no version.
    """
    import httpx2

    entry = next((one for one in _models(url) if one["id"] == model), {})
    known = {
        name: str(value) for name, value in entry.items() if name != "created" and isinstance(value, str | int | float | bool)
    }
    for path in ("/version", "/get_server_info"):
        try:
            answer = httpx2.get(f"{url}{path}", timeout=10, trust_env=False)
            answer.raise_for_status()
            known["version"] = str(answer.json()["version"])
            break
        except (httpx2.HTTPError, ValueError, KeyError, TypeError):
            continue
    return known


def _models(url: str) -> list[dict[str, Any]]:
    import httpx2

    try:
        answer = httpx2.get(f"{url}/v1/models", timeout=10, trust_env=False)
        answer.raise_for_status()
        return [{**model, "id": model["id"]} for model in answer.json()["data"]]
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise ServerUnreachable(
            f"{url}/v1/models does not answer with a list of models: {error or type(error).__name__}",
            "start the server, or name its root, such as http://127.0.0.1:8000, without /v1",
        ) from error


def stream_all(
    url: str,
    users: Sequence[Iterable[Ask]],
    *,
    stall_seconds: float = STALL_SECONDS,
    finished: Callable[[Ended], None] = lambda ended: None,
) -> Watched:
    """Let every user make requests one after the other, all users at once; ``finished`` is given each that has ended.

    A request that fails is a sample with an error; the others go on. What came is understood when all is over.
    """
    with _interrupts() as guarded:
        return asyncio.run(guarded(_stream_all(url, users, stall_seconds, finished)))


async def _stream_all(
    url: str, users: Sequence[Iterable[Ask]], stall_seconds: float, finished: Callable[[Ended], None]
) -> Watched:
    import httpx2

    from sm120kit.bench import wire

    began = time.perf_counter()
    timeout = httpx2.Timeout(stall_seconds, connect=30)
    async with wire.client(url, timeout) as client:

        async def user(number: int, asks: Iterable[Ask]) -> list[Ended]:
            streams = []
            for ask in asks:
                streams.append(await _stream(client, number, ask, began))
                finished(streams[-1])
            return streams

        async with _lag() as lag:
            found = await asyncio.gather(*(user(number, asks) for number, asks in enumerate(users)))
    return Watched(tuple(understood() for streams in found for understood in streams), lag())


async def _stream(client: httpx2.AsyncClient, user: int, ask: Ask, began: float) -> Ended:
    """Read one answer to its end; what is returned makes a sample of it."""
    import httpx2

    from sm120kit.bench import wire

    reads: list[tuple[float, bytes]] = []
    status, error = None, ""
    clock = time.perf_counter
    started = clock() - began

    async def trace(event: str, info: dict[str, Any]) -> None:
        nonlocal started
        if event == "http11.send_request_headers.started":
            started = clock() - began  # until here it waited for its connection, and for other users' requests

    try:
        async with client.stream("POST", ask.path, json=ask.body, extensions={"trace": trace}) as response:
            status = response.status_code
            async for read in response.aiter_raw():
                reads.append((wire.arrived(response) - began, read))
        if status != 200:
            body = b"".join(read for _, read in reads)[:200].decode("utf-8", "replace")
            reads, error = [], f"HTTP {status}: {body}"
    except httpx2.TimeoutException:
        error = f"stalled: nothing came for {client.timeout.read:g} s"
    except httpx2.HTTPError as failure:
        error = f"{type(failure).__name__}: {failure}".rstrip(": ")
    ended = clock() - began
    return partial(understand, reads, user=user, prompt=ask.prompt, started=started, ended=ended, status=status, error=error)


@contextmanager
def _interrupts() -> Iterator[Callable[[Coroutine[Any, Any, Watched]], Coroutine[Any, Any, Watched]]]:
    """Signals that interrupt cancel the coroutine that is handed over, and do what they did before when the block has ended.

    What a signal raises while asyncio reads from a connection is an error of that connection to asyncio, which goes on.
    """
    came: list[int] = []
    cancel: Callable[[], object] = lambda: None  # noqa: E731

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        cancel()

    async def guarded(work: Coroutine[Any, Any, Watched]) -> Watched:
        nonlocal cancel
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
        cancel = partial(loop.call_soon_threadsafe, task.cancel)
        if came:
            cancel()
        return await task

    kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {kind: handler for kind in kinds if callable(handler := signal.getsignal(kind))}
    if threading.current_thread() is not threading.main_thread():
        before = {}
    for kind in before:
        signal.signal(kind, note)
    try:
        yield guarded
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
        if came:
            before[signal.Signals(came[0])](came[0], None)


@asynccontextmanager
async def _lag() -> AsyncIterator[Callable[[], float]]:
    """How late this process gets to what is due, in seconds: something is due every 10 ms, and the longest delay counts."""
    worst = 0.0

    async def tick() -> None:
        nonlocal worst
        while True:
            due = time.perf_counter() + 0.01
            await asyncio.sleep(0.01)
            worst = max(worst, time.perf_counter() - due)

    task = asyncio.create_task(tick())
    try:
        yield lambda: worst
    finally:
        task.cancel()
