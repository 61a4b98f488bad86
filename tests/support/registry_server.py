"""A registry on loopback whose responses tests can replace: the OCI distribution API with blobs in memory."""

from __future__ import annotations

import functools
import hashlib
import http.server
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


@dataclass
class RegistryServer:
    """The state of a registry. ``fault`` is called first for every request; it returns true if it has responded."""

    address: str = ""
    blobs: dict[str, bytes] = field(default_factory=dict)
    owners: dict[str, set[str]] = field(default_factory=dict)
    manifests: dict[tuple[str, str], tuple[str, bytes]] = field(default_factory=dict)
    uploads: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    fault: Callable[[Handler], bool] = lambda handler: False

    def count(self, method: str, pattern: str = "") -> int:
        """How many requests had a method and a path that contains a pattern."""
        return sum(m == method and bool(re.search(pattern, path)) for m, path in self.requests)


class Handler(http.server.BaseHTTPRequestHandler):
    """A request to the registry."""

    protocol_version = "HTTP/1.1"
    server_state: RegistryServer

    def log_message(self, *args: object) -> None:
        pass

    def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        for name, value in ({"Content-Length": str(len(body))} | fields).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def drop(self) -> None:
        """Close the connection without a complete response."""
        self.wfile.flush()
        self.close_connection = True

    def handle_request(self) -> None:
        state, url = self.server_state, urlsplit(self.path)
        state.requests.append((self.command, self.path))
        state.headers.append(dict(self.headers))
        if state.fault(self):
            return
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        if match := re.fullmatch(r"/v2/(.+)/manifests/(.+)", url.path):
            self._manifest(match[1], match[2])
        elif match := re.fullmatch(r"/v2/(.+)/blobs/uploads/(.*)", url.path):
            self._upload(match[1], match[2], query)
        elif match := re.fullmatch(r"/v2/(.+)/blobs/(.+)", url.path):
            self._blob(match[1], match[2])
        else:
            self.reply(404)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = handle_request

    def _manifest(self, name: str, reference: str) -> None:
        state = self.server_state
        if self.command == "PUT":
            content = self.body()
            kind = self.headers["Content-Type"]
            state.manifests[name, reference] = state.manifests[name, digest_of(content)] = (kind, content)
            self.reply(201, Docker_Content_Digest=digest_of(content))
        elif (name, reference) in state.manifests:
            kind, content = state.manifests[name, reference]
            self.reply(200, content, Content_Type=kind, Docker_Content_Digest=digest_of(content))
        else:
            self.reply(404, b'{"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]}')

    def _blob(self, name: str, digest: str) -> None:
        content = self.server_state.blobs.get(digest)
        if content is None or name not in self.server_state.owners[digest]:
            self.reply(404)
            return
        start = int((re.match(r"bytes=(\d+)-", self.headers.get("Range", "")) or [0, 0])[1])
        span = {"Content_Range": f"bytes {start}-{len(content) - 1}/{len(content)}"} if start else {}
        self.reply(206 if start else 200, content[start:], **span)

    def _upload(self, name: str, session: str, query: dict[str, str]) -> None:
        state = self.server_state
        location = f"/v2/{name}/blobs/uploads/{session or len(state.uploads)}"
        if self.command == "POST":
            if query.get("from") in state.owners.get(query.get("mount", ""), ()):
                state.owners[query["mount"]].add(name)
                self.reply(201, Location=f"/v2/{name}/blobs/{query['mount']}")
                return
            state.uploads[str(len(state.uploads))] = b""
            self.reply(202, Location=location)
        elif self.command == "PATCH":
            state.uploads[session] += self.body()
            self.reply(202, Location=location, Range=f"0-{len(state.uploads[session]) - 1}")
        elif self.command == "GET":
            self.reply(204, Location=location, Range=f"0-{max(0, len(state.uploads[session]) - 1)}")
        elif self.command == "PUT":
            content = state.uploads[session] + self.body()
            if digest_of(content) != query["digest"]:
                self.reply(400, b'{"errors": [{"code": "DIGEST_INVALID", "message": "provided digest did not match"}]}')
                return
            self.store(name, content)
            self.reply(201, Docker_Content_Digest=query["digest"])
        else:
            self.reply(204)

    def store(self, name: str, content: bytes) -> None:
        self.server_state.blobs[digest_of(content)] = content
        self.server_state.owners.setdefault(digest_of(content), set()).add(name)


@contextmanager
def registry_server() -> Iterator[RegistryServer]:
    """A registry while the block runs."""
    state = RegistryServer()
    handler = type("BoundHandler", (Handler,), {"server_state": state})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        server.handle_error = lambda *details: None  # type: ignore[method-assign] # dropped connections
        state.address = f"127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=functools.partial(server.serve_forever, poll_interval=0.01))
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()
