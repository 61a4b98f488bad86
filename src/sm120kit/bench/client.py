"""Stream answers of an OpenAI-compatible server, any number at once, in one process and one thread."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

from sm120kit.bench.sample import Exchange, Sample, parse_sample
from sm120kit.core.errors import ServerUnreachable
from sm120kit.core.state import parse_json
from sm120kit.core.urls import Endpoint, redacted

if TYPE_CHECKING:
    import httpx2

STALL_SECONDS = 120.0
"""A stream without data for this long has stalled, an error of its request."""


MAX_RESPONSE_BYTES = 64 * 2**20
"""Limit of a response that is not a stream: lists of models and counters have some kilobytes."""


EndedRequest = Callable[[], Sample]
"""A request that has ended. Calling it parses what was received."""


@dataclass(frozen=True)
class StreamRequest:
    """A request: ``prompt`` is the prompt's number in the workload, ``body`` the JSON to post to ``path``."""

    prompt: int
    path: str
    body: dict[str, Any]


def counted(request: StreamRequest) -> StreamRequest:
    """The request with ``continuous_usage_stats``: the server counts the tokens until each chunk in its event."""
    options = {**request.body.get("stream_options", {}), "continuous_usage_stats": True}
    return replace(request, body={**request.body, "stream_options": options})


@dataclass(frozen=True)
class StreamResult:
    """Samples of all requests. ``lag_seconds`` is the longest time for which this process did not read its streams."""

    samples: tuple[Sample, ...]
    lag_seconds: float


def get(server: Endpoint, path: str) -> httpx2.Response:
    """The response to a GET request, sent without a proxy.

    Raises:
        httpx2.HTTPError: no response, a status other than success, or more than ``MAX_RESPONSE_BYTES``.
    """
    import httpx2

    headers = {**server.headers, "Accept-Encoding": "identity"}
    with httpx2.stream("GET", server.request_url(path), headers=headers, timeout=10, trust_env=False) as response:
        if not response.is_success:  # not raise_for_status: its message contains the URL with credentials
            status = f"HTTP {response.status_code} {response.reason_phrase}"
            raise httpx2.HTTPStatusError(status, request=response.request, response=response)
        content = bytearray()
        for chunk in response.iter_raw():
            content += chunk
            if len(content) > MAX_RESPONSE_BYTES:
                raise httpx2.HTTPError(f"the response has more than {MAX_RESPONSE_BYTES / 2**20:g} MiB")
        kind = {"Content-Type": response.headers.get("Content-Type", "")}
        return httpx2.Response(response.status_code, headers=kind, content=bytes(content), request=response.request)


def models(server: Endpoint) -> tuple[str, ...]:
    """The model ids that a server offers.

    Raises:
        ServerUnreachable: no server answers, or not with a list of models.
    """
    return tuple(str(model["id"]) for model in _models(server))


def server_info(server: Endpoint, model: str) -> dict[str, str]:
    """The server's entry for a model, such as its folder and longest context, and the server's version.

    The version comes from ``/version`` (vLLM) or ``/get_server_info`` (SGLang); it is absent for other servers.
    """
    import httpx2

    entry = next((listed for listed in _models(server) if listed["id"] == model), {})
    info = {
        name: redacted(str(value))
        for name, value in entry.items()
        if name != "created" and isinstance(value, str | int | float | bool)
    }
    for path in ("/version", "/get_server_info"):
        try:
            info["version"] = str(parse_json(get(server, path).content)["version"])
            break
        except (httpx2.HTTPError, ValueError, KeyError, TypeError):
            continue
    return info


def _models(server: Endpoint) -> list[dict[str, Any]]:
    import httpx2

    try:
        return [{**model, "id": model["id"]} for model in parse_json(get(server, "/v1/models").content)["data"]]
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, KeyError, TypeError) as error:
        reason = server.without_secrets(str(error)) or type(error).__name__
        hint = "start the server, or check its root URL, such as http://127.0.0.1:8000"
        if isinstance(error, httpx2.HTTPStatusError) and error.response.status_code in (401, 403):
            hint = "the server requires an API key: set SM120KIT_API_KEY, or --api-key @FILE"
        raise ServerUnreachable(f"{server.url}/v1/models does not answer with a list of models: {reason}", hint) from error


def stream_all(
    server: Endpoint,
    users: Sequence[Iterable[StreamRequest]],
    *,
    stall_seconds: float = STALL_SECONDS,
    on_end: Callable[[EndedRequest], None] = lambda request: None,
) -> StreamResult:
    """Send the requests of each user in sequence, all users concurrently; ``on_end`` gets each request that has ended.

    A failed request is a sample with an error and does not stop the others. Answers are parsed after all streams have ended.
    """
    with _interrupts() as guarded:
        return asyncio.run(guarded(_stream_all(server, users, stall_seconds, on_end)))


async def _stream_all(
    server: Endpoint, users: Sequence[Iterable[StreamRequest]], stall_seconds: float, on_end: Callable[[EndedRequest], None]
) -> StreamResult:
    import httpx2

    from sm120kit.bench import wire

    began = time.perf_counter()
    timeout = httpx2.Timeout(stall_seconds, connect=30)
    async with wire.client(server, timeout) as client:

        async def stream_user(number: int, requests: Iterable[StreamRequest]) -> list[EndedRequest]:
            ended = []
            for request in requests:
                ended.append(await _stream(client, server, number, request, began))
                on_end(ended[-1])
            return ended

        async with _measured_lag() as lag:
            by_user = await asyncio.gather(*(stream_user(number, requests) for number, requests in enumerate(users)))
    return StreamResult(tuple(request() for ended in by_user for request in ended), lag())


async def _stream(
    client: httpx2.AsyncClient, server: Endpoint, user: int, request: StreamRequest, began: float
) -> EndedRequest:
    """Send a request and read its answer to the end."""
    import httpx2

    from sm120kit.bench import wire

    reads: list[tuple[float, bytes]] = []
    status, error = None, ""
    clock = time.perf_counter
    started = clock() - began

    async def trace(event: str, info: dict[str, Any]) -> None:
        nonlocal started
        if event == "http11.send_request_headers.started":
            started = clock() - began  # before, the request waited for its connection and for other users' requests

    try:
        async with client.stream(
            "POST", server.request_url(request.path), json=request.body, extensions={"trace": trace}
        ) as response:
            status = response.status_code
            async for read in response.aiter_raw():
                reads.append((wire.arrived(response) - began, read))
        if status != 200:
            body = b"".join(read for _, read in reads)[:200].decode("utf-8", "replace")
            reads, error = [], server.without_secrets(f"HTTP {status}: {body}")
    except httpx2.TimeoutException:
        error = f"stalled: no data for {client.timeout.read:g} s"
    except httpx2.HTTPError as failure:
        error = server.without_secrets(f"{type(failure).__name__}: {failure}".rstrip(": "))
    ended = clock() - began
    max_tokens = request.body.get("max_tokens")
    return partial(parse_sample, reads, Exchange(user, request.prompt, started, ended, status, max_tokens, error))


@contextmanager
def _interrupts() -> Iterator[Callable[[Coroutine[Any, Any, StreamResult]], Coroutine[Any, Any, StreamResult]]]:
    """Make SIGINT, SIGTERM and SIGHUP cancel a coroutine, and call the previous handler when the block has ended.

    An exception that a signal handler raises while asyncio reads a connection would only close that connection.
    """
    received: list[int] = []
    cancel: Callable[[], object] = lambda: None  # noqa: E731

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        cancel()

    async def guarded(work: Coroutine[Any, Any, StreamResult]) -> StreamResult:
        nonlocal cancel
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
        cancel = partial(loop.call_soon_threadsafe, task.cancel)
        if received:
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
        if received:
            before[signal.Signals(received[0])](received[0], None)


@asynccontextmanager
async def _measured_lag() -> AsyncIterator[Callable[[], float]]:
    """The longest delay of a task that is due every 10 ms, in seconds: how late this process reads its streams."""
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
