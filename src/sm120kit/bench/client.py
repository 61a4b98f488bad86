"""Stream answers of an OpenAI-compatible server, any number at once, in one process and one thread."""

from __future__ import annotations

import asyncio
import re
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

from sm120kit.bench.sample import MOST_CHARACTERS, Exchange, Reads, Sample, parse_sample
from sm120kit.core import server_requests
from sm120kit.core.errors import ServerFailed
from sm120kit.core.outside import parse_json
from sm120kit.core.urls import Endpoint, redacted
from sm120kit.engines import all_engines

if TYPE_CHECKING:
    import httpx2

    from sm120kit.bench._wire import StreamedAnswer

STALL_SECONDS = 120.0
"""A stream without data for this long has stalled, an error of its request."""


MAX_RESPONSE_BYTES = 64 * 2**20
"""Limit of a response that is not a stream: lists of models and counters have some kilobytes."""


MAX_CONTENT_BYTES = 256 << 20
"""Limit of an answer: one of 100,000 tokens has some 30 MB."""
MAX_ANSWER_SECONDS = 6 * 3600.0
"""Limit of an answer that goes on, be it with comments only: one of 100,000 tokens at 5 tok/s takes 5.6 hours."""
MAX_MASKED_BYTES = 2**16
"""Part of an error's body that is searched for secrets; 200 characters of it are shown."""
REQUIRES_KEY = "the server requires an API key: set SM120KIT_API_KEY, or --api-key @FILE; other credentials: --header"
NOT_STREAMED = "the server ignored stream: true and sent one JSON document"
NO_TLS = "the server does not speak TLS: use http:// instead of https://"
TLS_HINTS = {
    "CERTIFICATE_VERIFY_FAILED": "name the CA of the server's certificate: SSL_CERT_FILE=FILE",
    "WRONG_VERSION_NUMBER": NO_TLS,
    "handshake operation timed out": NO_TLS,
}
"""Reasons of OpenSSL (ssl.SSLError) and their remedies."""


EndedRequest = tuple[Reads, Exchange]
"""A request that has ended: the bytes received, with seconds since the run began; :func:`parse_sample` parses them."""


@dataclass(frozen=True)
class StreamRequest:
    """A request: ``prompt`` is the prompt's number in the workload, ``body`` the JSON to post to ``path``.

    ``at`` is the earliest time to send it, in seconds since the first request. An answer of more than ``limit_bytes``, or that
    has not ended after ``limit_seconds``, is an error.
    """

    prompt: int
    path: str
    body: dict[str, Any]
    at: float = 0.0
    limit_seconds: float = MAX_ANSWER_SECONDS
    limit_bytes: int = MAX_CONTENT_BYTES


def counted(request: StreamRequest) -> StreamRequest:
    """The request with ``continuous_usage_stats``: the server counts the tokens until each chunk in its event."""
    options = {**request.body.get("stream_options", {}), "continuous_usage_stats": True}
    return replace(request, body={**request.body, "stream_options": options})


@dataclass(frozen=True)
class StreamResult:
    """Samples of all requests. ``lag_seconds`` is the longest time for which this process did not read its streams."""

    samples: tuple[Sample, ...]
    lag_seconds: float


def get(server: Endpoint, path: str, seconds: float = 10) -> httpx2.Response:
    """The response to a GET request, sent without a proxy.

    Raises:
        httpx2.HTTPError: no response, a status other than success, more than ``MAX_RESPONSE_BYTES``, or more than ``seconds``.
    """
    import httpx2

    response = server_requests.request(server, "GET", path, seconds=seconds, limit=MAX_RESPONSE_BYTES)
    if not response.is_success:  # not raise_for_status: its message contains the URL with credentials
        status = f"HTTP {response.status_code} {response.reason_phrase}"
        raise httpx2.HTTPStatusError(status, request=response.request, response=response)
    return response


def models(server: Endpoint) -> tuple[str, ...]:
    """The model ids that a server offers.

    Raises:
        ServerFailed: no server answers, or not with a list of models.
    """
    return tuple(str(model["id"]) for model in _models(server))


def server_info(server: Endpoint, model: str, seconds: float = 10) -> dict[str, str]:
    """The server's entry for a model, such as its folder and longest context, and the server's version.

    The version is that at the ``info_path`` of an engine; absent for other servers, and after ``seconds``.
    """
    import httpx2

    entry = next((listed for listed in _models(server) if listed["id"] == model), {})
    info = {
        name: redacted(str(value))[:MOST_CHARACTERS]
        for name, value in entry.items()
        if name != "created" and isinstance(value, str | int | float | bool)
    }
    for path in dict.fromkeys(engine.info_path for engine in all_engines()):
        try:
            info["version"] = str(parse_json(get(server, path, seconds).content)["version"])[:MOST_CHARACTERS]
            break
        except (httpx2.HTTPError, ValueError, KeyError, TypeError):
            continue
    return info


def _models(server: Endpoint) -> list[dict[str, Any]]:
    import httpx2

    try:
        listed = [{**model, "id": model["id"]} for model in parse_json(get(server, "/v1/models").content)["data"]]
        if any(len(str(model["id"])) > MOST_CHARACTERS for model in listed):
            raise ValueError(f"a model's id has more than {MOST_CHARACTERS:,} characters")
        return listed
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, KeyError, TypeError) as error:
        reason = server.without_secrets(str(error)) or type(error).__name__
        remedy = "start the server, or check its root URL, such as http://127.0.0.1:8000"
        if any(problem in reason for problem in TLS_HINTS) or (
            isinstance(error, httpx2.HTTPStatusError) and error.response.status_code != 404
        ):
            remedy = hint(reason)
        raise ServerFailed(f"{server.url}/v1/models does not answer with a list of models: {reason}", remedy) from error


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
    began = time.perf_counter()

    async def stream_user(number: int, requests: Iterable[StreamRequest]) -> list[EndedRequest]:
        ended = []
        for request in requests:
            await asyncio.sleep(max(0.0, began + request.at - time.perf_counter()))
            ended.append(await _stream(server, number, request, stall_seconds, began))
            on_end(ended[-1])
        return ended

    async with _measured_lag() as lag:
        by_user = await asyncio.gather(*(stream_user(number, requests) for number, requests in enumerate(users)))
    return StreamResult(tuple(parse_sample(*request) for ended in by_user for request in ended), lag())


async def _stream(server: Endpoint, user: int, request: StreamRequest, stall_seconds: float, began: float) -> EndedRequest:
    """Send a request and read its answer to the end; whatever fails is in the error."""
    from sm120kit.bench import _wire

    answer = _wire.StreamedAnswer(request.limit_bytes)
    try:
        async with asyncio.timeout(request.limit_seconds):
            await _wire.post(server, request.path, request.body, stall_seconds, answer)
    except TimeoutError:
        answer.end(f"not ended after {request.limit_seconds:g} s")
    refused = "" if answer.error else _refusal(server, request, answer)
    reads = [] if refused else [(arrived - began, read) for arrived, read in answer.reads]
    error = refused or server.without_secrets(answer.error)
    times = (answer.started - began, answer.ended - began)
    return reads, Exchange(user, request.prompt, *times, answer.status, request.body.get("max_tokens"), error)


def _refusal(server: Endpoint, request: StreamRequest, answer: StreamedAnswer) -> str:
    """Why a whole answer is none to the request, "" if it is one."""
    if answer.status != 200:
        body = b"".join(read for _, read in answer.reads)[:MAX_MASKED_BYTES].decode("utf-8", "replace")
        shown = server.without_secrets(body)[:200]  # cut afterwards: a part of a secret is not recognized
        return f"HTTP {answer.status}: {shown}"
    streamed = request.body.get("stream") is not False
    return NOT_STREAMED if streamed and answer.headers.get("content-type", "").startswith("application/json") else ""


def hint(error: str) -> str:
    """The remedy for the error of a request."""
    status = int(error[5:8]) if re.match(r"HTTP \d{3}", error) else 0
    if status in (401, 403):
        return REQUIRES_KEY
    if status in (502, 503, 504):
        return "a proxy answers, but not the server behind it: it may be starting or have ended; see its log"
    if status == 404:
        return "the URL is the root of the server, without the path of an endpoint; a workload may need the other endpoint"
    if status == 429:
        return "the server limits the rate of requests: raise its limit, or choose a workload with fewer users"
    if 300 <= status < 400:
        return "redirects are not followed: use the URL that the server redirects to"
    for problem, remedy in TLS_HINTS.items():
        if problem in error:
            return remedy
    if error == NOT_STREAMED:
        return "a proxy in between may collect streams: measure the server itself, or enable streaming in the proxy"
    if error.startswith("stalled"):
        return "allow more time with --timeout, or a context or answer that the server processes faster"
    return "the server's log may show why: sm120kit explain LOG"


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
