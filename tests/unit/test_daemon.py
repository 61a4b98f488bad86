"""Errors of a container daemon that does not run are legible."""

from __future__ import annotations

import hashlib
import http.server
import json
import socketserver
import threading
from pathlib import Path

import pytest

from sm120kit.core.errors import DaemonUnreachable
from sm120kit.images.docker import Daemon


def select_context(monkeypatch: pytest.MonkeyPatch, directory: Path, name: str, selected: str) -> None:
    """Select a context of docker by its variable or in its configuration, in a directory with nothing else."""
    (directory / "config.json").write_text(json.dumps({"currentContext": name} if selected == "file" else {}))
    monkeypatch.setenv("DOCKER_CONFIG", str(directory))
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.delenv("DOCKER_CONTEXT", raising=False)
    if selected == "variable":
        monkeypatch.setenv("DOCKER_CONTEXT", name)


@pytest.mark.parametrize("selected", ["variable", "file"])
def test_daemon_is_that_of_the_docker_context(selected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rootless docker and Docker Desktop have a context instead of the default socket."""
    requests: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
            content = b'{"ApiVersion": "1.45"}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            pass

    meta = tmp_path / "contexts" / "meta" / hashlib.sha256(b"rootless").hexdigest() / "meta.json"
    meta.parent.mkdir(parents=True)
    host = {"Host": f"unix://{tmp_path}/docker.sock", "SkipTLSVerify": False}
    meta.write_text(json.dumps({"Name": "rootless", "Metadata": {}, "Endpoints": {"docker": host}}))
    select_context(monkeypatch, tmp_path, "rootless", selected)
    with socketserver.ThreadingUnixStreamServer(f"{tmp_path}/docker.sock", Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        Daemon()
        server.shutdown()
    assert requests == ["/version"]


@pytest.mark.parametrize("selected", ["variable", "file"])
def test_docker_context_that_does_not_exist_is_not_the_default_socket(
    selected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    select_context(monkeypatch, tmp_path, "absent", selected)
    with pytest.raises(DaemonUnreachable, match="docker context absent does not exist"):
        Daemon()


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ('{"Name": "rootless", "Metadata": {}}', "is damaged"),
        ('{"Metadata": {}, "Endpoints": {"docker": {}}}', "is damaged"),
        ('{"Name": "rootless", "Metadata": {}, "Endpoints": {"kubernetes": {}}}', "has no endpoint of docker"),
    ],
)
def test_docker_context_that_cannot_be_used_is_an_error(
    meta: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "contexts" / "meta" / hashlib.sha256(b"rootless").hexdigest() / "meta.json"
    file.parent.mkdir(parents=True)
    file.write_text(meta)
    select_context(monkeypatch, tmp_path, "rootless", "variable")
    with pytest.raises(DaemonUnreachable, match=f"docker context rootless {message}"):
        Daemon()


@pytest.mark.parametrize("content", ["[]", "{", '"text"'])
def test_damaged_configuration_of_docker_is_named(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(content)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no-daemon")
    with pytest.raises(DaemonUnreachable, match=r"config\.json cannot be used"):
        Daemon()


def test_missing_daemon_is_named_without_the_exceptions_of_the_sdk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no-daemon")
    with pytest.raises(DaemonUnreachable, match=r"the container daemon does not respond: No such file or directory$"):
        Daemon()
