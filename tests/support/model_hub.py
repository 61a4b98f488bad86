"""A server with the part of the Hugging Face Hub's HTTP interface that ``huggingface_hub`` downloads a model with."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


class ModelHub(http.server.ThreadingHTTPServer):
    """A Hub with one repository at ``COMMIT``, branch main, whose files are those of a folder.

    With ``token``, requests without it are refused. ``sent`` counts the downloads of each file, ``parts`` the requests for a
    range of it; if ``whole`` is set, these are answered with the whole file. While ``slow`` is set, downloads of that file stop
    halfway until the client is gone, and while ``slow_parts`` is, ranges of it. Once it is ``gone``, every request fails.
    """

    daemon_threads = True

    def __init__(self, repository: str, folder: Path, token: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.repository, self.token, self.gone = repository, token, False
        self.slow = self.slow_parts = ""
        self.files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
        self.sent: dict[str, int] = {}
        self.parts: dict[str, int] = {}
        self.whole = False
        self.halfway = threading.Event()

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: clients are killed."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Requests(http.server.BaseHTTPRequestHandler):
    server: ModelHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.server
        if hub.gone:
            self._json(410, {})
            return
        if hub.token and self.headers["Authorization"] != f"Bearer {hub.token}":
            self._json(
                401, {"error": "Invalid credentials"}, {"X-Error-Message": "Invalid credentials in Authorization header"}
            )
            return
        path = unquote(urlsplit(self.path).path).lstrip("/")
        if path == f"api/models/{hub.repository}":
            self._info("")
            return
        for prefix, answer in (
            (f"api/models/{hub.repository}/revision/", self._info),
            (f"api/models/{hub.repository}/tree/", self._tree),
            (f"{hub.repository}/resolve/", self._file),
        ):
            if path.startswith(prefix):
                revision, _, name = path.removeprefix(prefix).partition("/")
                if revision not in ("main", COMMIT):
                    self._json(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
                else:
                    answer(name)
                return
        self._json(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})

    def _info(self, name: str) -> None:
        files = [{"rfilename": file, "size": len(content)} for file, content in self.server.files.items()]
        self._json(200, {"id": self.server.repository, "sha": COMMIT, "siblings": files})

    def _tree(self, name: str) -> None:
        if name:  # the repository has no folders
            self._no_entry()
            return
        entries = [
            {"type": "file", "path": file, "size": len(content), "oid": _oid(content)}
            for file, content in self.server.files.items()
        ]
        self._json(200, entries)

    def _file(self, name: str) -> None:
        content, part = self.server.files.get(name), self.headers["Range"]
        if content is None:
            self._no_entry()
            return
        if part:
            self.server.parts[name] = self.server.parts.get(name, 0) + 1
            if not self.server.whole:
                first, last = map(int, part.removeprefix("bytes=").split("-"))
                content = content[first : last + 1]
        self.send_response(206 if part and not self.server.whole else 200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{_oid(content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "HEAD":
            return
        if not part:
            self.server.sent[name] = self.server.sent.get(name, 0) + 1
        if name != (self.server.slow_parts if part else self.server.slow):
            self.wfile.write(content)
            return
        self.wfile.write(content[: len(content) // 2])
        self.wfile.flush()
        self.server.halfway.set()
        self.connection.settimeout(60)
        with contextlib.suppress(OSError):
            self.connection.recv(1)  # returns when the client is gone
        self.close_connection = True

    def _no_entry(self) -> None:
        self._json(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})

    def _json(self, status: int, content: object, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in ({**headers, "Content-Type": "application/json", "Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0%b" % (len(content), content)).hexdigest()


@contextlib.contextmanager
def model_hub(repository: str, folder: Path, token: str = "") -> Iterator[ModelHub]:
    """A running :class:`ModelHub`."""
    hub = ModelHub(repository, folder, token)
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
