"""A server on two machines: the second is an sshd on loopback, with another file system or container daemon."""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import containers
import pytest

from sm120kit import serving
from sm120kit.core.errors import RequirementMissing, ResourceUnavailable, ServerFailed
from sm120kit.core.workspace import Workspace
from sm120kit.engines import Node
from sm120kit.images.image_records import VerifiedImage
from sm120kit.images.oci import LAYER, Layout
from sm120kit.images.published_images import Source
from sm120kit.recipes import configurations
from sm120kit.serving import _remote_nodes, launch, server_containers
from sm120kit.serving._container import Mount
from sm120kit.serving._remote_nodes import RemoteMachine

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
pytestmark = [
    pytest.mark.containers,
    pytest.mark.skipif(not SSHD or not shutil.which("rsync"), reason="not installed: openssh-server and rsync"),
    pytest.mark.skipif(not shutil.which("docker"), reason="not installed: docker"),
]
HERE, THERE = "192.0.2.6", "192.0.2.7"
CONFIGURATION = "qwen3.5-27b-fp8-1x-rtx-pro-6000"
DOCKER = """#!{python}
import os, sys

argv = sys.argv[1:]
if "--gpus" in argv:
    del argv[argv.index("--gpus") : argv.index("--gpus") + 2]
os.execv({docker!r}, ["docker", *argv])
"""

Start = Callable[..., RemoteMachine]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts an sshd that runs ``command`` with the requested one in SSH_ORIGINAL_COMMAND; its address is THERE."""
    programs, keys = tmp_path / "bin", tmp_path / "keys"
    programs.mkdir()
    keys.mkdir(mode=0o700)
    if os.geteuid() == 0:  # sshd requires it then; Debian's service creates it, and in a container no service starts
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / name], check=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (keys / "client").write_text(
        f"Host {THERE}\n  HostName 127.0.0.1\n  Port {port}\n  User {getpass.getuser()}\n  IdentityFile {keys / 'user'}\n"
        "  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
    )
    (programs / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {keys / "client"} "$@"\n')
    (programs / "docker").write_text(DOCKER.format(python=sys.executable, docker=shutil.which("docker")))
    for program in programs.iterdir():
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    children = []

    def start(command: str = "", **variables: str) -> RemoteMachine:
        given = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")} | variables
        settings = [
            f"Port {port}",
            "ListenAddress 127.0.0.1",
            f"HostKey {keys / 'host'}",
            f"AuthorizedKeysFile {keys / 'user.pub'}",
            "PidFile none",
            "StrictModes no",
            "PasswordAuthentication no",
            "SetEnv " + " ".join(f'"{name}={value}"' for name, value in given.items()),
            *([f"ForceCommand {command}"] if command else []),
        ]
        (keys / "server").write_text("\n".join(settings) + "\n")
        log = (keys / "log").open("w")
        assert SSHD
        children.append(subprocess.Popen([SSHD, "-D", "-e", "-f", keys / "server"], stderr=log))
        found, deadline = RemoteMachine(THERE), time.monotonic() + 60
        while True:
            try:
                found.shell("true")
                return found
            except ResourceUnavailable:
                assert children[-1].poll() is None and time.monotonic() < deadline, (keys / "log").read_text()
                time.sleep(0.2)

    yield start
    for child in children:
        child.terminate()
        child.wait()


def service(folder: Path, node: Node, *, script: str = "echo up; sleep 600") -> serving.Service:
    mounts = (Mount(folder, "/model", True), Mount(Path("/usr"), "/usr", True))
    argv = ("/bin/sh", "-c", script)
    return serving.Service("s", "none", argv, {"NAME": "a b"}, mounts, (0,), 1, False, {}, 8000, node=node)


def test_model_arrives_with_what_its_links_lead_to(machine: Start, tmp_path: Path) -> None:
    """The other machine has an empty directory where this one has its models: in a mount namespace of each command."""
    models, theirs = tmp_path / "models", tmp_path / "theirs"
    blobs, snapshot = models / "models--a--b" / "blobs", models / "models--a--b" / "snapshots" / "f00"
    for directory in (blobs, snapshot / "folder", theirs):
        directory.mkdir(parents=True)
    (models / "blobs").mkdir()
    (models / "blobs" / "shared").write_bytes(b"x" * 100_000)
    (blobs / "other").write_text("of another revision")
    (blobs / "linked").symlink_to("../../blobs/shared")
    (snapshot / "a b.safetensors").symlink_to("../../blobs/linked")
    (snapshot / "folder" / "config.json").write_text("{}")
    enter = tmp_path / "enter"
    mount = f'mount --bind {theirs} {models} && exec sh -c "$SSH_ORIGINAL_COMMAND"'
    enter.write_text(f"#!/bin/sh\nexec unshare --user --map-root-user --mount sh -c {shlex.quote(mount)}\n")
    enter.chmod(0o755)
    remote = machine(str(enter))
    remote.require()
    files = list(dict.fromkeys(_remote_nodes.model_files(service(snapshot, Node(1, (HERE, THERE), "eth0")), ())))
    remote.copy(files)
    copied = theirs / "models--a--b"
    assert (copied / "snapshots" / "f00" / "a b.safetensors").readlink() == Path("../../blobs/linked")
    assert (theirs / "blobs" / "shared").read_bytes() == b"x" * 100_000
    assert (copied / "snapshots" / "f00" / "folder" / "config.json").read_text() == "{}"
    assert not (copied / "blobs" / "other").exists(), "only what the model's links lead to"
    before = (theirs / "blobs" / "shared").stat()
    remote.copy(files)
    assert (theirs / "blobs" / "shared").stat().st_ino == before.st_ino, "what is there is not sent again"
    total, available = remote.memory()
    assert total > available > 0


def test_machines_that_cannot_serve_are_refused(machine: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = machine(PATH="/nowhere")
    with pytest.raises(ResourceUnavailable, match=f"^{THERE}: .*not found"):
        remote.require()
    with pytest.raises(ResourceUnavailable, match=f"{HERE} is not an address of this machine"):
        _remote_nodes.require_first((HERE, THERE))
    _remote_nodes.require_first(("127.0.0.1",))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RequirementMissing, match="no program rsync on this machine"):
        remote.require()


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """An image with only the directories that programs in ``/usr`` require."""
    layout, archive = Layout(Workspace.open(tmp_path / "state").root / "oci"), tmp_path / "layer.tar"
    with tarfile.open(archive, "w") as tar:
        for name, target in (("tmp", ""), ("usr", ""), ("bin", "usr/bin"), ("lib", "usr/lib"), ("lib64", "usr/lib64")):
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.mode = (tarfile.SYMTYPE if target else tarfile.DIRTYPE), target, 0o755
            tar.addfile(member)
    with layout.writer() as blob:
        blob.write(archive.read_bytes())
        layer = blob.commit(LAYER)
    layout.add_image([layer], {"os": "linux", "architecture": "amd64", "config": {"Labels": {}}})
    return layout


@pytest.mark.skipif(bool(containers.why_not()), reason=containers.why_not())
def test_containers_start_and_stop_together(
    machine: Start, layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    ((entry, _),) = layout.images()
    image = VerifiedImage(layout.image(entry.digest), "some/image:tag", "", (), {})
    both = [service(folder, Node(rank, ("127.0.0.1", THERE), "lo")) for rank in range(2)]
    configuration = configurations.load(CONFIGURATION)
    launches = [
        launch.PreparedLaunch(configuration, image, None, None, each, (), Source(Path("none")))  # type: ignore[arg-type]
        for each in both
    ]
    options = launch.LaunchOptions(Workspace(tmp_path / "state"), 60)
    with (
        containers.dockerd() as here,
        containers.dockerd() as there,
    ):
        monkeypatch.setenv("DOCKER_HOST", here.socket)
        remote = machine(DOCKER_HOST=there.socket)

        def listed() -> list[str]:
            return remote.docker("ps", "--format", '{{.Names}} {{.Label "sm120kit.configuration"}}').stdout.splitlines()

        with launch.with_machines(launches, options) as (first, watching):
            assert listed() == [f"s-8000 {CONFIGURATION}"]
            assert "up" in remote.docker("logs", "s-8000").stdout
            assert "NAME=a b" in remote.docker("exec", "s-8000", "env").stdout
            watching.progress(0.0, "")
            name = _start(first, image.image.id, layout)
        assert listed(), "kept"
        server_containers.stop(server_containers.find(name))
        assert listed() == [] and server_containers.listed() == ()

        with pytest.raises(ResourceUnavailable), launch.with_machines(launches, options):
            raise ResourceUnavailable("the first one fails", "")
        assert listed() == [], "a start that fails leaves nothing"

        monkeypatch.setattr(_remote_nodes, "LOOK_SECONDS", 0.0)
        ends = service(folder, Node(1, ("127.0.0.1", THERE), "lo"), script="echo out of luck; exit 3")
        dying = replace(launches[1], service=ends)
        with (
            pytest.raises(ServerFailed, match=f"(?s)the container on {THERE} ended:.*out of luck"),
            launch.with_machines([launches[0], dying], options) as (_, watching),
        ):
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                watching.progress(0.0, "")


def _start(first: launch.PreparedLaunch, image: str, layout: Layout) -> str:
    """Start the container of the first machine as a launch does, and return its name."""
    from sm120kit.images import loading
    from sm120kit.images.docker import Daemon

    loaded = loading.load(layout, layout.require(image).digest, Daemon())
    record = layout.directory.parent / "runs" / "none.json"
    labelled = launch.labelled_service(replace(first.service, image=loaded.id), first.configuration, record, detached=True)
    subprocess.run(serving.docker_run(labelled, detach=True), check=True, stdout=subprocess.DEVNULL)
    return labelled.name
