"""Archives from the container daemon are unpacked safely, on every Python; errors of a daemon that does not run are legible."""

from __future__ import annotations

import hashlib
import http.server
import io
import json
import socketserver
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest

from sm120kit.core.errors import DaemonUnreachable, NotTrusted
from sm120kit.images.docker import Daemon
from sm120kit.images.docker.unpacking import unpack


def packed(*members: tuple[str, bytes | None, dict[str, Any]]) -> io.BytesIO:
    """A tar file of (path, content or None for a directory, other attributes)."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, content, more in members:
            member = tarfile.TarInfo(name)
            member.type = tarfile.DIRTYPE if content is None else tarfile.REGTYPE
            member.size = len(content or b"")
            for key, value in more.items():
                setattr(member, key, value)
            archive.addfile(member, io.BytesIO(content or b""))
    file.seek(0)
    return file


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_unpack_writes_files_and_directories(tmp_path: Path) -> None:
    members = (("aot/", None, {"mode": 0}), ("aot/m/m.so", b"code", {"mode": 0o6755}), ("aot/empty", b"", {}))
    unpack(packed(*members), tmp_path, "image")
    assert files(tmp_path) == {"aot/m/m.so": b"code", "aot/empty": b""}
    assert not (tmp_path / "aot/m/m.so").stat().st_mode & 0o7111
    unpack(packed(("aot/empty", b"longer", {})), tmp_path, "image")
    assert files(tmp_path)["aot/empty"] == b"longer"


@pytest.mark.parametrize(
    ("member", "problem"),
    [
        (("/etc/evil", b"x", {}), "leads out of its directory"),
        (("aot/../../evil", b"x", {}), "leads out of its directory"),
        (("../evil", None, {}), "leads out of its directory"),
        (("aot/link", b"", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}), "is a link"),
        (("aot/link", b"", {"type": tarfile.SYMTYPE, "linkname": "first"}), "is a link"),
        (("aot/link", b"", {"type": tarfile.LNKTYPE, "linkname": "aot/first"}), "is a link"),
        (("aot/device", b"", {"type": tarfile.CHRTYPE}), "is a special file"),
        (("aot/pipe", b"", {"type": tarfile.FIFOTYPE}), "is a special file"),
        (("aot/first/below", b"x", {}), "is damaged"),
        (("aot", b"x", {}), "is damaged"),
        (("aot/first", None, {}), "is damaged"),
    ],
)
def test_unpack_refuses_links_special_files_and_paths_outside(
    member: tuple[str, bytes | None, dict[str, Any]], problem: str, tmp_path: Path
) -> None:
    target = tmp_path / "deep" / "target"
    target.mkdir(parents=True)
    with pytest.raises(NotTrusted, match=problem) as refused:
        unpack(packed(("aot/first", b"1", {}), member), target, "sha256:1234")
    assert refused.value.message.startswith("sha256:1234: ") and refused.value.hint
    assert files(tmp_path) == {"deep/target/aot/first": b"1"}


@pytest.mark.parametrize("content", [b"", b"no tar file", packed(("a", b"x" * 600, {})).getvalue()[:700]])
def test_unpack_refuses_a_damaged_archive(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(NotTrusted, match="is damaged"):
        unpack(io.BytesIO(content), tmp_path, "image")


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
