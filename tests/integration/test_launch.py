"""Launch small servers from start to stop, as plain processes and in a container."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
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
import synthetic_hosts

from sm120kit import serving
from sm120kit.core.errors import NotFound, ResourceUnavailable, ServerFailed
from sm120kit.core.workspace import Workspace
from sm120kit.hosts.facts import probe
from sm120kit.hosts.facts._fact_records import LaunchedContainer
from sm120kit.images.image_records import Image, VerifiedImage
from sm120kit.images.published_images import Source
from sm120kit.recipes import configurations
from sm120kit.serving import Ending, ServerProcess, launch
from sm120kit.serving import server_containers as serving_containers
from sm120kit.serving._container import Mount, Scratch
from sm120kit.serving.resolve import ServerLocation, resolve
from sm120kit.serving.server_containers import in_use

ROOT = Path(__file__).parents[2]

SERVER = '''
"""Serve on PORT: PORT MODE. Health is 503 until `ready` lies beside this file, in the modes never and die always.

die: exit with 3. stubborn: ignore SIGTERM.
"""
import http.server, pathlib, signal, subprocess, sys, threading, time

port, mode, here = int(sys.argv[1]), sys.argv[2], pathlib.Path(__file__).parent
worker = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"])
print("worker", worker.pid, flush=True)
def stop(*arguments):
    print("goodbye", flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "stubborn" else stop)

class Health(http.server.BaseHTTPRequestHandler):
    def log_message(self, *arguments):  # no other last line than those below
        pass

    def do_GET(self):
        ready = mode not in ("never", "die") and (here / "ready").exists()
        self.send_response(200 if ready else 503)
        self.end_headers()

server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Health)
threading.Thread(target=server.serve_forever, daemon=True).start()
print("Loading safetensors checkpoint shards:  50% Completed | 1/2\\rLoading safetensors checkpoint shards: 100%", flush=True)
if mode == "die":
    print("RuntimeError: Failed to initialize cutlass TMA WS grouped gemm. Error: Error Internal", flush=True)
    sys.exit(3)
time.sleep(600)
'''

DRIVER = """
import sys, time
from pathlib import Path
from sm120kit.cli import entry
from sm120kit.core import console, reporting
from sm120kit.core.workspace import Workspace
from sm120kit.images.published_images import Source
from sm120kit.images.image_records import Image, VerifiedImage
from sm120kit.recipes import configurations
from sm120kit.serving import Service, launch
from sm120kit.serving._container import Mount

state, port, wait, *argv = sys.argv[1:]
image = VerifiedImage(Image("sha256:1", "c" * 64, "linux/amd64", (), {}, "", 1), "some/image:tag", "", (), {})
mounts = (Mount(Path("/models/x"), "/model", True),)
service = Service("s", "sha256:1", (), {"HF_TOKEN": "hunter2"}, mounts, (0,), 1, False, {}, int(port))
configuration = configurations.load("qwen3.5-27b-fp8-1x-rtx-pro-6000")
prepared = launch.PreparedLaunch(configuration, image, None, None, service, (), Source(Path("none")))
def progress(seconds, line):
    console.info(f"progress: {line}")
options = launch.LaunchOptions(Workspace.open(Path(state)), float(wait), progress)
with reporting.use(console):
    sys.exit(entry.run(lambda: launch.serve(prepared, tuple(argv), options, lambda run: time.sleep(600))))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def alive(pid: int) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "time limit exceeded"
        time.sleep(0.05)


@dataclass
class Launcher:
    """A launcher in a process of its own, whose messages go to a file."""

    child: subprocess.Popen[bytes]
    messages: Path
    state: Path
    port: int

    @property
    def output(self) -> str:
        return self.messages.read_text()

    @property
    def record(self) -> dict[str, Any]:
        (path,) = (self.state / "runs").glob("*.json")
        return dict(json.loads(path.read_text()))

    @property
    def log(self) -> str:
        (path,) = (self.state / "runs").glob("*.log")
        return path.read_text()


def start_launcher(directory: Path, port: int, wait: float, *argv: object) -> subprocess.Popen[bytes]:
    """A launcher in a process of its own, for any server's command line."""
    arguments = [sys.executable, "-c", DRIVER, directory / "state", port, wait, *argv]
    with (directory / "messages").open("wb") as messages:
        return subprocess.Popen(list(map(str, arguments)), stderr=messages, env=os.environ | {"PYTHONPATH": str(ROOT / "src")})


def start(directory: Path, mode: str, *, ready: bool = True, wait: float = 60) -> Launcher:
    (directory / "server.py").write_text(SERVER)
    if ready:
        (directory / "ready").touch()
    port = free_port()
    child = start_launcher(directory, port, wait, sys.executable, directory / "server.py", port, mode)
    return Launcher(child, directory / "messages", directory / "state", port)


def worker_of(launcher: Launcher) -> int:
    return int(launcher.log.split("worker ")[1].split()[0])


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_server_runs_until_a_signal_stops_it(kind: int, tmp_path: Path) -> None:
    launcher = start(tmp_path, "serve", ready=False)
    wait_until(lambda: "progress: Loading safetensors checkpoint shards: 100%" in launcher.output)
    assert launcher.record["healthy_seconds"] is None
    (tmp_path / "ready").touch()
    wait_until(lambda: "serving " in launcher.output)
    assert "healthy after" in launcher.output and "unverified on SM120" in launcher.output
    running = launcher.record
    assert running["ending"] == "" and running["healthy_seconds"] > 0 and running["seconds"] is None
    with urllib.request.urlopen(f"{running['url']}/health", timeout=60) as answer:
        assert answer.status == 200 and running["url"] == f"http://127.0.0.1:{launcher.port}"
    worker = worker_of(launcher)
    assert alive(worker)
    launcher.child.send_signal(kind)
    assert launcher.child.wait(60) == 128 + kind, launcher.output
    stopped = launcher.record
    assert stopped["ending"] == "stopped" and stopped["seconds"] >= stopped["healthy_seconds"]
    assert stopped["environment"] == ["HF_TOKEN"] and "hunter2" not in json.dumps(stopped)
    assert stopped["argv"][-1] == "serve" and stopped["image"] == "c" * 64 and stopped["model"] == "/models/x"
    assert launcher.log.rstrip().endswith("goodbye")
    wait_until(lambda: not alive(worker))
    assert serving.port_is_free(launcher.port)


def test_death_while_loading_is_explained_from_the_log(tmp_path: Path) -> None:
    launcher = start(tmp_path, "die")
    assert launcher.child.wait(60) == ServerFailed.exit_code
    assert (launcher.record["ending"], launcher.record["exit_code"]) == ("died", 3)
    assert all(part in launcher.output for part in ("exit code 3", "cause:", "TMA WS", str(tmp_path / "state")))
    wait_until(lambda: not alive(worker_of(launcher)))


def test_server_that_is_not_healthy_in_time_is_stopped(tmp_path: Path) -> None:
    launcher = start(tmp_path, "never", wait=1)
    assert launcher.child.wait(60) == ServerFailed.exit_code
    assert launcher.record["ending"] == "not healthy in time" and launcher.record["healthy_seconds"] is None
    assert re.search(r"was not healthy after \d+ s and was stopped", launcher.output)
    assert serving.port_is_free(launcher.port)


def test_server_ends_when_its_launcher_is_killed(tmp_path: Path) -> None:
    launcher = start(tmp_path, "serve")
    wait_until(lambda: "healthy after" in launcher.output)
    launcher.child.kill()
    wait_until(lambda: launcher.log.rstrip().endswith("goodbye"))
    wait_until(lambda: serving.port_is_free(launcher.port))
    os.kill(worker_of(launcher), signal.SIGKILL)


def test_server_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "ready").touch()
    port = free_port()
    argv = [sys.executable, str(tmp_path / "server.py"), str(port), "stubborn"]
    server = ServerProcess(argv, f"http://127.0.0.1:{port}", tmp_path / "log", wait_seconds=60, patience_seconds=0.5)
    outcome = serving.serve(server, lambda: None)
    assert outcome.ending is Ending.STOPPED and outcome.exit_code == -signal.SIGKILL
    assert serving.port_is_free(port)


def test_port_in_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docker").write_text("#!/bin/sh\n")  # it lists no server
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        service = serving.Service("s", "i", (), {}, (), (0,), 1, False, {}, port)
        configuration = configurations.load("qwen3.5-27b-fp8-1x-rtx-pro-6000")
        source = Source(tmp_path / "none")
        prepared = launch.PreparedLaunch(configuration, None, None, None, service, (), source)
        with pytest.raises(ResourceUnavailable, match=str(port)):
            launch.run(prepared, launch.LaunchOptions(Workspace(tmp_path), 1), lambda run: None)


def test_patch_builds_nothing_without_docker(tmp_path: Path) -> None:
    """The diff, which is none, is not read yet."""
    (tmp_path / "x.diff").write_text("no diff")
    words = ("serve", "qwen3.5-27b-fp8-1x-rtx-pro-6000", "--patch", tmp_path / "x.diff", "--state", tmp_path / "state")
    argv = [sys.executable, "-m", "sm120kit", *map(str, words)]
    done = subprocess.run(argv, env=os.environ | {"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 40 and "docker" in done.stderr, done.stderr


STATIC = r"""
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
static int written(const char* path) { return open(path, O_CREAT | O_WRONLY, 0600) < 0 ? errno : 0; }
// ST_NOEXEC is 8, which glibc names for GNU sources only.
static int noexec(const char* path) { struct statvfs facts; statvfs(path, &facts); return !!(facts.f_flag & 8); }
static void privileges(void) {
  char line[256];
  FILE* status = fopen("/proc/self/status", "r");
  while (fgets(line, sizeof line, status))
    if (!strncmp(line, "Cap", 3) || !strncmp(line, "NoNewPrivs", 10)) fputs(line, stdout);
  printf("root %d, scratch %d %d\n", written("/escaped"), written("/tmp/x"), written("/root/x"));
  printf("noexec %d %d\n", noexec("/tmp"), noexec("/root"));
  errno = 0; mknod("/tmp/device", S_IFCHR | 0600, 0x103); printf("mknod %d", errno);
  errno = 0; mount("none", "/tmp", "tmpfs", 0, ""); printf(", mount %d", errno);
  errno = 0; chown("/tmp/x", 1, 1); printf(", chown %d", errno);
  errno = 0; setuid(1); printf(", setuid %d\n", errno);
}
static void stop(int number) { (void)number; write(1, "goodbye\n", 8); _exit(0); }
int main(int count, char** arguments) {
  signal(SIGTERM, count > 2 ? SIG_IGN : stop);
  const char* value = getenv("HF_TOKEN");
  printf("model %d, token %s, pid %d\n", access("/model/config.json", R_OK), value ? value : "none", getpid());
  printf("writable %d %d\n", access("/model", W_OK), access("/cache", W_OK));
  privileges();
  fflush(stdout);
  struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  at.sin_port = htons(atoi(arguments[count - 1]));
  int listener = socket(AF_INET, SOCK_STREAM, 0), on = 1;
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(listener, (struct sockaddr*)&at, sizeof at) || listen(listener, 8)) return 9;
  for (char request[4096];;) {
    int connection = accept(listener, 0, 0);
    read(connection, request, sizeof request);
    write(connection, "HTTP/1.0 200 OK\r\n\r\n", 19);
    close(connection);
  }
}
"""


@pytest.mark.containers
@pytest.mark.skipif(bool(containers.why_not()), reason=containers.why_not())
def test_launch_in_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "server.c").write_text(STATIC)
    (tmp_path / "root").mkdir()
    subprocess.run(["gcc", "-static", "-O1", "-o", tmp_path / "root" / "server", tmp_path / "server.c"], check=True)
    subprocess.run(["tar", "-C", tmp_path / "root", "-cf", tmp_path / "image.tar", "."], check=True)
    (tmp_path / "a, model").mkdir()
    (tmp_path / "a, model" / "config.json").write_text("{}")
    (tmp_path / "cache").mkdir()
    with containers.dockerd() as daemon, contextlib.ExitStack() as stack:
        monkeypatch.setenv("DOCKER_HOST", daemon.socket)
        # A container outlives its daemon: remove the one that a failed test leaves.
        stack.callback(subprocess.run, ["docker", "rm", "--force", "launched"], capture_output=True, check=False)
        image = docker("import", str(tmp_path / "image.tar"))
        mounts = (Mount(tmp_path / "a, model", "/model", True), Mount(tmp_path / "cache", "/cache", False))
        limits = {"stack": 67108864}  # a sandbox may forbid memlock
        service = serving.Service(
            "launched", image, ("/server", str(free_port())), {"HF_TOKEN": "hunter2"}, mounts, (0,), 1, False, limits, 0
        )
        configuration = configurations.load("qwen3.5-27b-fp8-1x-rtx-pro-6000")
        service = replace(service, port=int(service.argv[1]), scratch=(Scratch("/tmp", 1), Scratch("/root", 1)))
        verified = VerifiedImage(Image(image, "c" * 64, "linux/amd64", (), {}, "", 1), "some/image:tag", "", (), {})
        # This daemon has no network of its own and no GPUs; everything else is as in a launch.
        source = Source(tmp_path / "none")
        prepared = launch.PreparedLaunch(configuration, verified, None, None, service, (), source)  # type: ignore[arg-type]
        options = launch.LaunchOptions(Workspace.open(tmp_path / "state"), 60)
        record = launch.RunRecord(prepared, options)
        labelled = replace(launch.labelled_service(prepared.service, prepared.configuration, record.path), name="launched")

        def without_gpus(service: serving.Service) -> tuple[str, ...]:
            argv = serving.docker_run(service, values=False)
            index = argv.index("--gpus")
            return (*argv[:index], "--network=host", *argv[index + 2 :])

        argv = without_gpus(labelled)
        attended = LaunchedContainer("launched", configuration.name, (0,), attended=True)

        def look(run: serving.Run) -> None:
            # A server may answer before the daemon lists its container as running.
            wait_until(lambda: probe().launched == (attended,))
            assert in_use() == {tmp_path / "a, model", tmp_path / "cache", record.path, record.log}
            assert serving_containers.state(record.path) == "running"

        run = launch.serve(prepared, argv, options, look, record=record)
        assert serving_containers.state(record.path) == ""
        log = Path(run.log).read_text()
        assert (run.ending, run.exit_code) == ("stopped", 0), log
        assert "model 0, token hunter2" in log and "pid 1\n" not in log and log.rstrip().endswith("goodbye")
        for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb"):
            assert f"Cap{kind}:\t{0:016x}\n" in log, "no capability, and none that a program could gain"
        assert "NoNewPrivs:\t1\n" in log
        read_only, refused = errno.EROFS, errno.EPERM
        assert f"root {read_only}, scratch 0 0\nnoexec 0 0\n" in log
        assert f"mknod {refused}, mount {refused}, chown {refused}, setuid {refused}\n" in log
        assert "writable -1 0" in log and "hunter2" not in json.dumps(run.argv)
        assert docker("ps", "--all", "--quiet") == ""

        monkeypatch.setattr(launch, "PATIENCE_SECONDS", 0.5)
        stubborn = (*argv[:-1], "stubborn", argv[-1])
        with serving_containers.removed_at_end(record.path):
            run = launch.serve(prepared, stubborn, options, lambda run: None)
        assert run.exit_code == -signal.SIGKILL and docker("ps", "--all", "--quiet") == "", "its container is removed, too"

        orphan = replace(labelled, labels=labelled.labels | {"sm120kit.launcher": "1.1"})
        for mode in ((), ("stubborn",)):
            arguments = (*without_gpus(orphan)[:-1], *mode, service.argv[-1])
            launcher = start_launcher(tmp_path, service.port, 60, *arguments)
            wait_until(lambda: "healthy after" in (tmp_path / "messages").read_text())
            launcher.kill()
            launcher.wait()
            if not mode:
                wait_until(lambda: docker("ps", "--all", "--quiet") == "")
        left = LaunchedContainer("launched", configuration.name, (0,), attended=False)
        assert probe().launched == (left,), "a container that ignores SIGTERM is identified by its labels"
        with pytest.raises(ResourceUnavailable, match=r"launched serves .* on GPU 0") as taken:
            launch.run(prepared, options, lambda run: None)
        assert taken.value.hint == "sm120kit stop launched"
        docker("kill", "launched")
        wait_until(lambda: docker("ps", "--all", "--quiet") == "")

        with pytest.raises(NotFound, match=image):  # the daemon has it, the state directory does not
            root = synthetic_hosts.build("turin-8", tmp_path / "host")
            resolve(configuration, image, source, ServerLocation(service.port), options.workspace, root=root, planned=True)
        with pytest.raises(ServerFailed) as caught:
            launch.run(prepared, options, lambda run: None)
        assert "no-device-driver" in caught.value.message and "nvidia-container-toolkit" in caught.value.hint
        assert docker("ps", "--all", "--quiet") == "", "the container of a failed start is removed"


def docker(*arguments: str) -> str:
    return subprocess.run(["docker", *arguments], check=True, capture_output=True, text=True).stdout.strip()
