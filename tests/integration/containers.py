"""A private container daemon and registry for tests: own directories, sockets and ports; nothing stays behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("dockerd", "docker-registry", "debootstrap")


def why_not() -> str:
    """Why no daemon can be started here, or an empty string."""
    if os.geteuid() != 0:
        return "a container daemon of its own needs root"
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: docker.io, docker-registry, debootstrap)"
    return ""


class Dockerd:
    """A daemon below ``root``, with its own containerd."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.socket = f"unix://{root}/d.sock"
        self.child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self.root.mkdir(exist_ok=True)
        (self.root / "d.pid").unlink(missing_ok=True)
        argv = ["dockerd", "--data-root", self.root / "data", "--exec-root", self.root / "exec", "-H", self.socket]
        argv += ["-p", self.root / "d.pid", "--bridge=none", "--iptables=false", "--ip-forward=false", "--log-level", "warn"]
        with (self.root / "log").open("ab") as log:
            self.child = subprocess.Popen(list(map(str, argv)), stdout=log, stderr=log, start_new_session=True)
        until = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as asked:
                asked.connect(f"{self.root}/d.sock")
                asked.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
                if b"200 OK" in asked.recv(4096):
                    return
            assert self.child.poll() is None and time.monotonic() < until, (self.root / "log").read_text()[-2000:]
            time.sleep(0.1)

    def kill(self) -> None:
        """As a crash does: no goodbye."""
        assert self.child is not None
        self.child.kill()
        self.child.wait()

    def stop(self) -> None:
        """End it and its containerd, and unmount what they left: nobody needs a goodbye, and a polite one takes long."""
        self.kill()
        with contextlib.suppress(OSError, ValueError):
            noted = self.root / "exec" / "containerd" / "containerd.pid"
            pid = int(noted.read_text())
            noted.unlink()  # a daemon that finds it takes a dead one for alive as long as nobody reaps it
            if str(self.root) in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)
        for line in sorted(Path("/proc/mounts").read_text().splitlines(), reverse=True):
            if line.split()[1].startswith(f"{self.root}/"):
                subprocess.run(["umount", "-l", line.split()[1]], check=False)


@contextlib.contextmanager
def dockerd(root: Path) -> Iterator[Dockerd]:
    """A running daemon below ``root``, removed with everything it holds."""
    daemon = Dockerd(root)
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.stop()
        shutil.rmtree(root, ignore_errors=True)


@contextlib.contextmanager
def registry(root: Path) -> Iterator[str]:
    """A registry on a free loopback port, as ``host:port``; its storage is ``root/store``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    (root / "store").mkdir(parents=True)
    (root / "config.yml").write_text(
        f"version: 0.1\nstorage:\n  filesystem:\n    rootdirectory: {root / 'store'}\n"
        f"  cache:\n    blobdescriptor: ''\n  delete:\n    enabled: true\nhttp:\n  addr: {address}\n"
    )
    with (root / "log").open("wb") as log:
        child = subprocess.Popen(["docker-registry", "serve", str(root / "config.yml")], stdout=log, stderr=log)
    try:
        until = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError), socket.create_connection(tuple_of(address), timeout=1):
                break
            assert child.poll() is None and time.monotonic() < until, (root / "log").read_text()[-2000:]
            time.sleep(0.1)
        yield address
    finally:
        child.terminate()
        child.wait()


def tuple_of(address: str) -> tuple[str, int]:
    """``host:port`` as sockets want it."""
    host, _, port = address.rpartition(":")
    return host, int(port)


def debian(place: Path, *packages: str) -> Path:
    """A small Debian with Python, and with ``packages``, as a tar file: what an image's base is imported from."""
    root = place / "root"
    done = subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={','.join(['python3', *packages])}", "bookworm", str(root)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    for junk in ("var/cache/apt", "var/lib/apt/lists", "var/log"):
        shutil.rmtree(root / junk)
        (root / junk).mkdir()
    packed = place / "base.tar"
    subprocess.run(["tar", "-C", root, "--sort=name", "--mtime=@0", "--numeric-owner", "-cf", packed, "."], check=True)
    shutil.rmtree(root)
    return packed
