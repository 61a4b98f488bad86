"""HTTP servers of tests: on a free port of loopback, while a block runs."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def http_served(handler: Callable[..., Any]) -> Iterator[str]:
    """Serve with a class of request handlers; the root of the server's URLs. Requests have ended when the block has."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
