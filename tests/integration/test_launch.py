"""Servers from start to stop through launch's own code: small real ones, as plain processes and in a container."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import containers
import pytest
from model_folders import HYBRID, NVFP4, folder

from sm120kit import launch, launching
from sm120kit.errors import GpusTaken, NotHealthy, NotVerified, PortTaken, ServerDied
from sm120kit.host import Launched as Running
from sm120kit.host import probe
from sm120kit.launch import Ending
from sm120kit.launch.service import Mount
from sm120kit.recipe import configuration
from sm120kit.records import Image, VerifiedImage
from sm120kit.workspace import Workspace

ROOT = Path(__file__).parents[2]

SERVER = '''
"""Loads for a while, answering 503, and then serves: PORT SECONDS [die|die-later|stubborn|never]."""
import http.server, signal, subprocess, sys, threading, time

port, seconds, mode = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
worker = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"])
print("worker", worker.pid, flush=True)
def stop(*rest):
    print("goodbye", flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "stubborn" else stop)
until = time.monotonic() + seconds

class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        loading = mode in ("never", "die") or time.monotonic() < until
        self.send_response(503 if loading else 200)
        self.end_headers()

server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Answer)
threading.Thread(target=server.serve_forever, daemon=True).start()
print("Loading safetensors checkpoint shards:  50% Completed | 1/2\\rLoading safetensors checkpoint shards: 100%", flush=True)
time.sleep(seconds)
if mode == "die":
    print("RuntimeError: Failed to initialize cutlass TMA WS grouped gemm. Error: Error Internal", flush=True)
    sys.exit(3)
if mode == "die-later":
    time.sleep(1)
    sys.exit(4)
time.sleep(60)
'''

DRIVER = """
import json, sys
from pathlib import Path
from sm120kit import console, launching
from sm120kit.errors import Sm120kitError
from sm120kit.launch import Service
from sm120kit.recipe import configuration
from sm120kit.records import Image, VerifiedImage
from sm120kit.workspace import Workspace
from sm120kit.launch.service import Mount

state, port, wait, *argv = sys.argv[1:]
image = VerifiedImage(Image("sha256:1", "c" * 64, "linux/amd64", (), {}, "", 1), "some/image:tag", "", (), {})
mounts = (Mount(Path("/models/x"), "/model", True),)
service = Service("s", "sha256:1", (), {"HF_TOKEN": "hunter2"}, mounts, (0,), 1, False, {}, int(port))
try:
    launching.serve(
        configuration.load("qwen3.5-27b-fp8-1x-rtx-pro-6000"), image, service, tuple(argv), Workspace.open(Path(state)),
        wait_seconds=float(wait), tell=console.say, progress=lambda seconds, line: console.say(f"progress: {line}"),
    )
except Sm120kitError as failure:
    console.error(failure.message, failure.hint)
    sys.exit(failure.exit_code)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def alive(pid: int) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def until(true: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)


@dataclass
class Launched:
    """The launcher as a process of its own, whose talk goes to a file."""

    child: subprocess.Popen[bytes]
    talk: Path
    state: Path
    port: int

    @property
    def said(self) -> str:
        return self.talk.read_text()

    @property
    def record(self) -> dict[str, Any]:
        (path,) = (self.state / "runs").glob("*.json")
        return dict(json.loads(path.read_text()))

    @property
    def log(self) -> str:
        (path,) = (self.state / "runs").glob("*.log")
        return path.read_text()


def launched_by(place: Path, port: int, wait: float, *argv: object) -> subprocess.Popen[bytes]:
    """A launcher as a process of its own, for any command line."""
    words = [sys.executable, "-c", DRIVER, place / "state", port, wait, *argv]
    with (place / "talk").open("wb") as talk:
        return subprocess.Popen(list(map(str, words)), stderr=talk, env=os.environ | {"PYTHONPATH": str(ROOT / "src")})


def start(place: Path, mode: str, seconds: float = 0.6, wait: float = 60) -> Launched:
    (place / "server.py").write_text(SERVER)
    port = free_port()
    child = launched_by(place, port, wait, sys.executable, place / "server.py", port, seconds, mode)
    return Launched(child, place / "talk", place / "state", port)


def worker_of(one: Launched) -> int:
    return int(one.log.split("worker ")[1].split()[0])


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_from_start_to_stop(kind: int, tmp_path: Path) -> None:
    one = start(tmp_path, "serve", seconds=2)
    until(lambda: "healthy after" in one.said)
    assert "unverified on SM120" in one.said and "Ctrl-C stops it" in one.said
    assert "progress: Loading safetensors checkpoint shards: 100%" in one.said
    running = one.record
    assert running["ending"] == "running" and running["healthy_seconds"] >= 2 and running["seconds"] is None
    with urllib.request.urlopen(f"{running['url']}/health", timeout=5) as answer:
        assert answer.status == 200 and running["url"] == f"http://127.0.0.1:{one.port}"
    worker = worker_of(one)
    assert alive(worker)
    one.child.send_signal(kind)
    assert one.child.wait(60) == 0, one.said
    stopped = one.record
    assert stopped["ending"] == "stopped" and stopped["exit_code"] == 0 and stopped["seconds"] > stopped["healthy_seconds"]
    assert stopped["environment"] == ["HF_TOKEN"] and "hunter2" not in json.dumps(stopped)
    assert stopped["argv"][-1] == "serve" and stopped["image"] == "c" * 64 and stopped["model"] == "/models/x"
    assert one.log.rstrip().endswith("goodbye")
    until(lambda: not alive(worker), 5)
    assert launch.port_is_free(one.port)


def test_stopped_while_it_loads(tmp_path: Path) -> None:
    one = start(tmp_path, "never")
    until(lambda: "progress: Loading" in one.said)
    one.child.send_signal(signal.SIGTERM)
    assert one.child.wait(60) == 0
    assert one.record["ending"] == "stopped" and one.record["healthy_seconds"] is None and "healthy after" not in one.said


def test_one_that_dies_is_explained(tmp_path: Path) -> None:
    one = start(tmp_path, "die", seconds=0.4)
    assert one.child.wait(60) == ServerDied.exit_code
    assert "while it started, with exit code 3" in one.said and "cause:" in one.said and "TMA WS" in one.said
    assert str(tmp_path / "state") in one.said and one.record["ending"] == "died" and one.record["exit_code"] == 3
    until(lambda: not alive(worker_of(one)), 5)


def test_one_that_dies_later(tmp_path: Path) -> None:
    one = start(tmp_path, "die-later", seconds=0.2)
    assert one.child.wait(60) == ServerDied.exit_code
    assert "after it had been healthy, with exit code 4" in one.said and "nothing in its log looks like an error" in one.said
    assert one.record["healthy_seconds"] is not None


def test_one_that_never_is_healthy(tmp_path: Path) -> None:
    one = start(tmp_path, "never", wait=1)
    assert one.child.wait(60) == NotHealthy.exit_code
    assert one.record["ending"] == "not healthy in time" and one.record["healthy_seconds"] is None
    assert "was not healthy after 1 s and was stopped" in one.said
    assert launch.port_is_free(one.port)


def test_a_server_ends_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    one = start(tmp_path, "serve")
    until(lambda: "healthy after" in one.said)
    one.child.kill()
    until(lambda: one.log.rstrip().endswith("goodbye"))
    until(lambda: launch.port_is_free(one.port))
    os.kill(worker_of(one), signal.SIGKILL)


def test_one_that_will_not_stop_is_killed(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    port = free_port()
    argv = [sys.executable, str(tmp_path / "server.py"), str(port), "0.1", "stubborn"]
    outcome = launch.serve(
        argv,
        f"http://127.0.0.1:{port}",
        tmp_path / "log",
        wait_seconds=20,
        patience_seconds=0.5,
        healthy=lambda seconds: os.kill(os.getpid(), signal.SIGTERM),
    )
    assert outcome.ending is Ending.STOPPED and outcome.exit_code == -signal.SIGKILL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert launch.port_is_free(port)


def test_a_port_that_is_taken_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        service = launch.Service("s", "i", (), {}, (), (0,), 1, False, {}, port)
        wanted = configuration.load("qwen3.5-27b-fp8-1x-rtx-pro-6000")
        prepared = launching.Prepared(wanted, None, None, None, service, (), True)  # type: ignore[arg-type]
        with pytest.raises(PortTaken, match=str(port)):
            launching.run(prepared, tmp_path, None, wait_seconds=1, tell=print, progress=print)  # type: ignore[arg-type]


STATIC = r"""
#include <arpa/inet.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
static void stop(int number) { (void)number; write(1, "goodbye\n", 8); _exit(0); }
int main(int count, char** words) {
  signal(SIGTERM, count > 2 ? SIG_IGN : stop);
  const char* value = getenv("HF_TOKEN");
  printf("model %d, token %s, pid %d\n", access("/model/config.json", R_OK), value ? value : "none", getpid());
  printf("writable %d %d\n", access("/model", W_OK), access("/cache", W_OK));
  fflush(stdout);
  struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  at.sin_port = htons(atoi(words[count - 1]));
  int listener = socket(AF_INET, SOCK_STREAM, 0), on = 1;
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(listener, (struct sockaddr*)&at, sizeof at) || listen(listener, 8)) return 9;
  for (char asked[4096];;) {
    int one = accept(listener, 0, 0);
    read(one, asked, sizeof asked);
    write(one, "HTTP/1.0 200 OK\r\n\r\n", 19);
    close(one);
  }
}
"""


@pytest.mark.containers
@pytest.mark.skipif(bool(containers.why_not()), reason=containers.why_not())
def test_in_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "server.c").write_text(STATIC)
    (tmp_path / "root").mkdir()
    subprocess.run(["gcc", "-static", "-O1", "-o", tmp_path / "root" / "server", tmp_path / "server.c"], check=True)
    subprocess.run(["tar", "-C", tmp_path / "root", "-cf", tmp_path / "image.tar", "."], check=True)
    (tmp_path / "a, model").mkdir()
    (tmp_path / "a, model" / "config.json").write_text("{}")
    (tmp_path / "cache").mkdir()
    with containers.dockerd(Path(f"/tmp/sm120kit-launch-{os.getpid()}")) as daemon, contextlib.ExitStack() as stack:
        monkeypatch.setenv("DOCKER_HOST", daemon.socket)
        # A container outlives its daemon; one that a failed test leaves must not.
        stack.callback(subprocess.run, ["docker", "rm", "--force", "launched"], capture_output=True, check=False)
        image = docker("import", str(tmp_path / "image.tar"))
        mounts = (Mount(tmp_path / "a, model", "/model", True), Mount(tmp_path / "cache", "/cache", False))
        limits = {"stack": 67108864}  # a sandbox may forbid memlock
        service = launch.Service(
            "launched", image, ("/server", str(free_port())), {"HF_TOKEN": "hunter2"}, mounts, (0,), 1, False, limits, 0
        )
        wanted = configuration.load("qwen3.5-27b-fp8-1x-rtx-pro-6000")
        service = replace(service, port=int(service.argv[1]))
        verified = VerifiedImage(Image(image, "c" * 64, "linux/amd64", (), {}, "", 1), "some/image:tag", "", (), {})
        # This daemon has no network of its own and no GPUs; everything else is as launch says it.
        ready = launching.Prepared(wanted, verified, None, None, service, (), published=False)  # type: ignore[arg-type]
        owned = replace(launching.own(ready), name="launched")

        def without_gpus(one: launch.Service) -> tuple[str, ...]:
            argv = launch.docker_run(one, values=False)
            at = argv.index("--gpus")
            return (*argv[:at], "--network=host", *argv[at + 2 :])

        argv = without_gpus(owned)
        told: list[str] = []

        def tell(line: str) -> None:
            told.append(line)
            if line.startswith("healthy"):
                # A server may answer before the daemon has noted that its container runs.
                until(lambda: probe().launched == (Running("launched", wanted.name, (0,), attended=True),))
                os.kill(os.getpid(), signal.SIGTERM)

        workspace = Workspace(tmp_path / "state")
        kept = launching.serve(
            wanted, verified, service, argv, workspace, wait_seconds=60, tell=tell, progress=lambda *rest: None
        )
        log = Path(kept.log).read_text()
        assert (kept.ending, kept.exit_code) == ("stopped", 0), log
        assert "model 0, token hunter2" in log and "pid 1\n" not in log and log.rstrip().endswith("goodbye")
        assert "writable -1 0" in log and "hunter2" not in json.dumps(kept.argv)
        assert docker("ps", "--all", "--quiet") == ""

        monkeypatch.setattr(launching, "PATIENCE_SECONDS", 0.5)
        remove = ("docker", "rm", "--force", "launched")
        stubborn = (*argv[:-1], "stubborn", argv[-1])
        kept = launching.serve(
            wanted,
            verified,
            service,
            stubborn,
            workspace,
            wait_seconds=60,
            tell=tell,
            progress=lambda *rest: None,
            remove=remove,
        )
        assert kept.exit_code == -signal.SIGKILL and docker("ps", "--all", "--quiet") == "", "its container is gone too"

        killed = replace(owned, labels=owned.labels | {"sm120kit.launcher": "1.1"})
        for mode in ((), ("stubborn",)):
            words = (*without_gpus(killed)[:-1], *mode, service.argv[-1])
            launcher = launched_by(tmp_path, service.port, 60, *words)
            until(lambda: "healthy after" in (tmp_path / "talk").read_text())
            launcher.kill()
            launcher.wait()
            if not mode:
                until(lambda: docker("ps", "--all", "--quiet") == "")
        left = Running("launched", wanted.name, (0,), attended=False)
        assert probe().launched == (left,), "one that does not stop when it is asked to is found by its labels"
        with pytest.raises(GpusTaken, match="on GPU 0; the sm120kit launch that started it is gone") as taken:
            launching.run(
                replace(ready, running=(left,)), tmp_path, workspace, wait_seconds=60, tell=tell, progress=lambda *rest: None
            )
        assert taken.value.hint == "docker stop launched"
        docker("kill", "launched")
        until(lambda: docker("ps", "--all", "--quiet") == "")

        folder(tmp_path / "model", HYBRID, NVFP4)
        with pytest.raises(NotVerified, match="is not an image that passed its checks"):
            launching.prepare(wanted.name, tmp_path / "model", image, tmp_path / "none", service.port, Path("/"), workspace)
        with pytest.raises(ServerDied) as caught:
            launching.run(ready, tmp_path, workspace, wait_seconds=60, tell=tell, progress=lambda *rest: None)
        assert "no-device-driver" in caught.value.message and "nvidia-container-toolkit" in caught.value.hint
        assert docker("ps", "--all", "--quiet") == "", "what docker left of a failed start is removed"


def docker(*words: str) -> str:
    return subprocess.run(["docker", *words], check=True, capture_output=True, text=True).stdout.strip()
