"""Requests to a server that users name, without a proxy and with a limit."""

from __future__ import annotations

import functools
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from sm120kit.core.urls import Endpoint

if TYPE_CHECKING:
    import ssl

    import httpx2


@functools.cache
def certificates() -> ssl.SSLContext:
    """The certificates that are trusted, also those that ``SSL_CERT_FILE`` names. Reading them takes a third of a second."""
    import httpx2

    return httpx2.create_ssl_context()


def request(server: Endpoint, method: str, path: str, body: object = None, *, seconds: float, limit: int) -> httpx2.Response:
    """The response to a request, whatever its status; ``body`` is sent as JSON.

    Raises:
        httpx2.HTTPError: there is none, or it has more than ``limit`` bytes or takes more than ``seconds``.
    """
    import httpx2

    headers = {**server.headers, "Accept-Encoding": "identity", "Content-Type": "application/json"}
    sent, url = None if body is None else json.dumps(body).encode(), server.request_url(path)
    received = bytearray()
    with (
        _within(seconds) as extensions,
        httpx2.Client(timeout=seconds, trust_env=False, verify=certificates()) as client,
        client.stream(method, url, headers=headers, content=sent, extensions=extensions) as response,
    ):
        for part in response.iter_raw():
            received += part
            if len(received) > limit:
                raise httpx2.HTTPError(f"the response has more than {limit / 2**20:g} MiB")
    return httpx2.Response(response.status_code, content=bytes(received), request=response.request)


@contextmanager
def _within(seconds: float) -> Iterator[dict[str, Any]]:
    """End the connection of a request in the block after ``seconds``: a server may also send heads without end."""
    import httpx2

    ends, sockets = time.monotonic() + seconds, list[socket.socket]()

    def trace(event: str, info: dict[str, Any]) -> None:
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            sockets.append(info["return_value"].get_extra_info("socket"))
            if time.monotonic() >= ends:
                end()

    def end() -> None:
        with suppress(OSError, IndexError):
            socket.socket.shutdown(sockets[-1], socket.SHUT_RDWR)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield {"trace": trace}
    except httpx2.HTTPError:
        if time.monotonic() < ends:
            raise
    finally:
        timer.cancel()
    if time.monotonic() >= ends:
        raise httpx2.HTTPError(f"the response takes more than {seconds:g} s")
