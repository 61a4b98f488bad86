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


class _SparseFile(bytes):
    """A file that has ``size`` bytes, of which only the first exist."""

    size: int

    def __len__(self) -> int:
        return self.size


def huge_shard(size: int, tensor: str = "model.weight") -> bytes:
    """A safetensors file with one tensor of ``size`` bytes, of which only the header exists."""
    header = json.dumps({tensor: {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    file = _SparseFile(len(header).to_bytes(8, "little") + header)
    file.size = 8 + len(header) + size
    return file


class ModelHub(http.server.ThreadingHTTPServer):
    """A Hub with repositories at ``COMMIT``, branch main, whose files are those of folders; ``files`` are the first one's.

    With ``token``, requests without it are refused. ``sent`` counts the downloads of each file, ``parts`` the requests for a
    range of it; if ``whole`` is set, these are answered with the whole file. While ``slow`` is set, downloads of that file stop
    halfway until the client is gone, and while ``slow_parts`` is, ranges of it. Once it is ``gone``, every request fails.
    """

    daemon_threads = True

    def __init__(self, repository: str, folder: Path, token: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.token, self.gone = token, False
        self.slow = self.slow_parts = ""
        self.repositories: dict[str, dict[str, bytes]] = {}
        self._name = repository
        self.publish(repository, folder)
        self.sent: dict[str, int] = {}
        self.parts: dict[str, int] = {}
        self.whole = False
        self.halfway = threading.Event()

    @property
    def repository(self) -> str:
        """The name of the first repository."""
        return self._name

    @repository.setter
    def repository(self, name: str) -> None:
        self.repositories[name] = self.repositories.pop(self._name)
        self._name = name

    @property
    def files(self) -> dict[str, bytes]:
        """The files of the first repository."""
        return self.repositories[self._name]

    @files.setter
    def files(self, files: dict[str, bytes]) -> None:
        self.repositories[self._name] = files

    def publish(self, repository: str, folder: Path) -> None:
        """Add a repository with the files of a folder."""
        self.repositories[repository] = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}

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
        named = "/".join(path.removeprefix("api/models/").split("/")[:2])
        self.repository, self.files = named, hub.repositories.get(named, {})
        if path == f"api/models/{named}" and named in hub.repositories:
            self._info("")
            return
        for prefix, answer in (
            (f"api/models/{named}/revision/", self._info),
            (f"api/models/{named}/tree/", self._tree),
            (f"{named}/resolve/", self._file),
        ):
            if named not in hub.repositories:
                break
            if path.startswith(prefix):
                revision, _, name = path.removeprefix(prefix).partition("/")
                if revision not in ("main", COMMIT):
                    self._json(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
                else:
                    answer(name)
                return
        self._json(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})

    def _info(self, name: str) -> None:
        files = [{"rfilename": file, "size": len(content)} for file, content in self.files.items()]
        self._json(200, {"id": self.repository, "sha": COMMIT, "siblings": files})

    def _tree(self, name: str) -> None:
        if name:  # the repository has no folders
            self._no_entry()
            return
        entries = [
            {"type": "file", "path": file, "size": len(content), "oid": _oid(content)} for file, content in self.files.items()
        ]
        self._json(200, entries)

    def _file(self, name: str) -> None:
        content, part = self.files.get(name), self.headers["Range"]
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
