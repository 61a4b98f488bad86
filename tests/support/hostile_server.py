"""An HTTP server with hostile responses: endless bodies, lengths of terabytes, redirects to other hosts."""

from __future__ import annotations

import contextlib
import http.server
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from loopback import http_served


@dataclass
class HostileServer:
    """Responses by path: status, headers, and the body, or the repeated piece of an endless body."""

    responses: dict[str, tuple[int, dict[str, str], bytes, bool]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    url: str = ""

    def respond(self, path: str, body: bytes = b"", status: int = 200, *, endless: bool = False, **headers: str) -> None:
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        self.responses[path] = (status, fields, body, endless)


@contextmanager
def hostile_server() -> Iterator[HostileServer]:
    """A server on loopback while the block runs."""
    state = HostileServer()

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            state.requests.append(self.path)
            status, headers, body, endless = state.responses.get(self.path, (404, {}, b"", False))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if not endless and "Content-Length" not in headers:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(OSError):  # the client closed the connection, as expected
                self.wfile.write(body)
                while endless:
                    self.wfile.write(body)

    with http_served(Handler) as state.url:
        yield state
