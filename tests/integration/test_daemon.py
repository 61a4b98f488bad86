"""Errors of a container daemon that does not run are legible, and its answers are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from layout_images import add_image

from sm120kit.core.errors import DaemonUnreachable, NotVerified, RequirementMissing, ResourceUnavailable
from sm120kit.core.workspace import Workspace
from sm120kit.images import docker
from sm120kit.images.docker import Daemon
from sm120kit.images.oci import Layout
from sm120kit.serving import server_containers
from sm120kit.serving._remote_nodes import RemoteMachine

IMAGE = {"Id": "sha256:1", "Os": "linux", "Architecture": "amd64", "Size": 7, "Config": {"User": "1000"}, "RootFS": {}}


def program(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Daemon:
    """A daemon whose program is a shell script; it answers ``docker version``."""
    path = directory / "docker"
    path.write_text(f'#!/bin/sh\n[ "$1" = version ] && echo 27 && exit\n{script}\n')
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")
    return Daemon()


def test_images_of_the_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = "echo 'Error response from daemon: No such image: x:1' >&2; exit 1"
    script = f"[ \"$1 $2\" = 'image inspect' ] && [ $4 = x:1 ] && {{ {absent}; }}\necho '{json.dumps([IMAGE])}'"
    daemon = program(tmp_path, monkeypatch, script)
    assert daemon.inspect("x:1") is None
    found = daemon.find("x:2")
    assert (found.id, found.platform, found.bytes, found.user, found.layers) == ("sha256:1", "linux/amd64", 7, "1000", ())


def test_other_content_in_the_daemon_of_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = "[ $1 = load ] && cat >/dev/null && echo 'Loaded image ID: sha256:1' && exit"
    program(tmp_path, monkeypatch, f"{loads}\necho '{json.dumps([IMAGE])}'")
    workspace = Workspace.open(tmp_path / "state")
    layout, (manifest, _) = Layout(workspace.root / "oci"), add_image(workspace, (1,), size=2**10)
    with pytest.raises(NotVerified, match=r"10\.0\.0\.2"):
        RemoteMachine("10.0.0.2").load(layout, manifest)


def test_archive_is_streamed_to_the_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = program(tmp_path, monkeypatch, f"cat > {tmp_path}/archive; echo 'Loaded image ID: sha256:2'")
    assert daemon.load(iter([b"a" * 2**17, b"b"])) == "sha256:2"
    assert (tmp_path / "archive").read_bytes() == b"a" * 2**17 + b"b"


@pytest.mark.parametrize(
    ("printed", "error"),
    [("write: no space left on device", ResourceUnavailable), ("invalid tar header", DaemonUnreachable)],
)
def test_archive_that_the_daemon_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str, error: type[Exception]
) -> None:
    daemon = program(tmp_path, monkeypatch, f"echo '{printed}' >&2; exit 1")
    with pytest.raises(error, match=printed):
        daemon.load(iter([b"a" * 2**20] * 8))


@pytest.mark.parametrize("reads", ["", "cat >/dev/null;"])
def test_daemon_that_hangs_after_the_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: str) -> None:
    for name in ("ANSWER_SECONDS", "LOAD_SECONDS"):
        monkeypatch.setattr(docker, name, 0.5)
    daemon = program(tmp_path, monkeypatch, f"{reads} sleep 60")
    for work in (
        lambda: daemon.inspect("x:1"),
        lambda: daemon.tag("x:1", "x:2"),
        lambda: daemon.load(iter([b"a" * 2**17] * 8)),
        server_containers.listed,
    ):
        with pytest.raises(DaemonUnreachable, match=r"no answer for 0.5 s"):
            work()


def test_missing_program_and_missing_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DaemonUnreachable, match="connecting: docker: cannot connect"):
        _failing(tmp_path, monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(RequirementMissing, match="docker is not on PATH"):
        Daemon()


def _failing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "docker").write_text("#!/bin/sh\necho 'cannot connect to the daemon' >&2\nexit 1\n")
    (directory / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")
    Daemon()
