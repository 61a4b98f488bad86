"""Requests to a server that users name, without a proxy and with a limit."""

from __future__ import annotations

import functools
import json
import time
from typing import TYPE_CHECKING

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
    received, ends = bytearray(), time.monotonic() + seconds
    with httpx2.stream(
        method, url, headers=headers, content=sent, timeout=seconds, trust_env=False, verify=certificates()
    ) as response:
        for part in response.iter_raw():
            received += part
            if len(received) > limit:
                raise httpx2.HTTPError(f"the response has more than {limit / 2**20:g} MiB")
            if time.monotonic() > ends:
                raise httpx2.HTTPError(f"the response takes more than {seconds:g} s")
        return httpx2.Response(response.status_code, content=bytes(received), request=response.request)
