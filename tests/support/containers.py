"""A private container daemon and registry for tests, with their own directories, sockets and ports, removed afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("dockerd", "docker-registry", "debootstrap")


def why_not() -> str:
    """Why this machine cannot run a private daemon; empty if it can."""
    if os.geteuid() != 0:
        return "a private container daemon needs root"
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
        """Start the daemon, and wait until it responds."""
        (self.root / "d.pid").unlink(missing_ok=True)
        argv = ["dockerd", "--data-root", self.root / "data", "--exec-root", self.root / "exec", "-H", self.socket]
        argv += ["-p", self.root / "d.pid", "--bridge=none", "--iptables=false", "--ip-forward=false", "--log-level", "warn"]
        with (self.root / "log").open("ab") as log:
            self.child = subprocess.Popen(list(map(str, argv)), stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
                connection.connect(f"{self.root}/d.sock")
                connection.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
                if b"200 OK" in connection.recv(4096):
                    return
            assert self.child.poll() is None and time.monotonic() < deadline, (self.root / "log").read_text()[-2000:]
            time.sleep(0.1)

    def kill(self) -> None:
        """Kill the daemon, like a crash."""
        assert self.child is not None
        self.child.kill()
        self.child.wait()

    def stop(self) -> None:
        """Kill the daemon and its containerd, and unmount their file systems. A regular shutdown takes long."""
        self.kill()
        with contextlib.suppress(OSError, ValueError):
            pid_file = self.root / "exec" / "containerd" / "containerd.pid"
            pid = int(pid_file.read_text())
            pid_file.unlink()  # otherwise the next daemon waits for a containerd that is dead but not reaped
            if str(self.root) in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)
        for line in sorted(Path("/proc/mounts").read_text().splitlines(), reverse=True):
            if line.split()[1].startswith(f"{self.root}/"):
                subprocess.run(["umount", "-l", line.split()[1]], check=False)


@contextlib.contextmanager
def dockerd() -> Iterator[Dockerd]:
    """A running daemon in a directory of its own, whose path is short: that of a socket has at most 104 characters."""
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as root:
        daemon = Dockerd(Path(root))
        try:
            daemon.start()
            yield daemon
        finally:
            daemon.stop()


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
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(_host_and_port(address), timeout=1):
                break
            assert child.poll() is None and time.monotonic() < deadline, (root / "log").read_text()[-2000:]
            time.sleep(0.1)
        yield address
    finally:
        child.terminate()
        child.wait()


def _host_and_port(address: str) -> tuple[str, int]:
    """``host:port`` as the address of a socket."""
    host, _, port = address.rpartition(":")
    return host, int(port)
