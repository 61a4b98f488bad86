"""TLS of requests to a server."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl


@functools.cache
def certificates() -> ssl.SSLContext:
    """The certificates that are trusted, also those that ``SSL_CERT_FILE`` names. Reading them takes a third of a second."""
    import httpx2

    return httpx2.create_ssl_context()
