"""Starts of servers that fail, or meet other servers, with a docker program of this test."""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sm120kit import serving
from sm120kit.core.errors import DaemonUnreachable, NoAnswer, ResourceUnavailable, ServerFailed, Sm120kitError
from sm120kit.core.locks import host_turn
from sm120kit.core.record_files import write_record
from sm120kit.core.workspace import Workspace
from sm120kit.images.image_records import Image, VerifiedImage
from sm120kit.images.published_images import Source
from sm120kit.recipes import configurations
from sm120kit.serving import Device, Run, launch
from sm120kit.serving._container import Mount

CONFIGURATION = "qwen3.5-27b-fp8-1x-rtx-pro-6000"
DOCKER = r"""#!{python}
import http.server, pathlib, sys
at, argv = pathlib.Path(__file__).parent, sys.argv[1:]
own = any("label=sm120kit.record=" in word for word in argv)

class Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

code = 0
if argv[0] == "ps" and own:
    print("our-id" if (at / "started").exists() else "", end="")
elif argv[0] == "ps":
    print("an-id")
elif argv[0] == "run" and (at / "refuses").exists():
    print("Conflict. The container name is already in use", file=sys.stderr)
    code = 125
elif argv[0] == "run":
    (record,) = (word.partition("=")[2] for word in argv if word.startswith("sm120kit.record="))
    (at / "started").write_text(pathlib.Path(record).read_text())
elif argv[0] == "inspect" and "an-id" in argv:
    record = next(at.parent.glob("state/runs/*.json"), pathlib.Path("none")).as_posix()
    files = ["inspected", *["meanwhile"] * (at / "started").exists()]
    print("".join((at / name).read_text() for name in files).replace("RECORD", record), end="")
elif argv[0] == "inspect" and "our-id" in argv:
    print('["/ours", "running", "", {}, []]')
elif argv[0] == "inspect":
    print(0)
with (at / "calls").open("a") as calls:
    print(*argv, file=calls, flush=True)
if argv[0] == "logs" or (argv[0] == "run" and "--detach" not in argv):
    http.server.HTTPServer(("127.0.0.1", int((at / "port").read_text())), Server).serve_forever()
sys.exit(code)
"""


class Docker:
    """A docker program, the launches that use it, and the records that they write."""

    def __init__(self, directory: Path) -> None:
        self.at = directory / "bin"
        self.at.mkdir()
        (self.at / "docker").write_text(DOCKER.replace("{python}", sys.executable))
        (self.at / "docker").chmod(0o755)
        for name in ("calls", "inspected", "meanwhile"):
            (self.at / name).touch()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        (self.at / "port").write_text(str(self.port))
        self.workspace = Workspace.open(directory / "state")
        self.name = f"s-{self.port}"

    def launch(self, gpus: int = 1) -> tuple[launch.PreparedLaunch, launch.LaunchOptions]:
        image = VerifiedImage(Image("sha256:1", "c" * 64, "linux/amd64", (), {}, "", 1), "some/image:tag", "", (), {})
        mounts = (Mount(Path("/models/x"), "/model", True),)
        service = serving.Service("s", "sha256:1", ("serve",), {}, mounts, (0,), 1, False, {}, self.port)
        devices = tuple(Device(number, "RTX PRO 6000", 96 << 30) for number in range(gpus))
        configuration = configurations.load(CONFIGURATION)
        prepared = launch.PreparedLaunch(configuration, image, None, None, service, (), Source(Path("none")), devices=devices)
        return prepared, launch.LaunchOptions(self.workspace, 60, on_answer=lambda endpoint, answer: None)

    def has(self, name: str, state: str, gpus: str, *, url: str = "", started: str = "01", record: str = "") -> None:
        """Let docker have one more container; one with a ``record`` from the start of ours on."""
        keys = ("configuration", "gpus", "record", "url")
        labels = {f"sm120kit.{key}": value for key, value in zip(keys, ("c", gpus, record, url), strict=True)}
        with (self.at / ("meanwhile" if record else "inspected")).open("a") as rows:
            rows.write(json.dumps([f"/{name}", state, f"2026-01-01T00:00:{started}Z", labels, []]) + "\n")

    @property
    def calls(self) -> list[list[str]]:
        return [line.split() for line in (self.at / "calls").read_text().splitlines()]

    @property
    def removed(self) -> list[str]:
        return [call[-1] for call in self.calls if call[0] == "rm"]

    @property
    def path(self) -> Path:
        (path,) = (self.workspace.root / "runs").glob("*.json")
        return path

    @property
    def record(self) -> dict[str, Any]:
        return dict(json.loads(self.path.read_text()))


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Docker:
    made = Docker(tmp_path)
    monkeypatch.setenv("PATH", f"{made.at}:{os.environ['PATH']}")
    return made


def test_failed_start_removes_no_other_container(docker: Docker) -> None:
    (docker.at / "refuses").touch()
    with pytest.raises(ServerFailed, match="exit code 125"):
        launch.start(*docker.launch())
    assert docker.removed == [] and (docker.record["ending"], docker.record["exit_code"]) == ("died", 125)


@pytest.mark.parametrize("state", ["created", "paused", "running"])
def test_name_of_a_container_that_has_not_ended(state: str, docker: Docker) -> None:
    url = f"http://127.0.0.2:{docker.port}"
    docker.has(docker.name, state, "7", url=url)
    with pytest.raises(ResourceUnavailable, match=f"{docker.name} exists and serves {url}"):
        launch.start(*docker.launch())
    assert {call[0] for call in docker.calls} == {"ps", "inspect"}


def test_server_without_an_answer_is_removed_and_recorded(docker: Docker) -> None:
    docker.has(docker.name, "exited", "0", url="u")
    with pytest.raises(NoAnswer):
        launch.start(*docker.launch())
    assert docker.removed == [docker.name, "our-id"], "the one that had ended, and the new one"
    assert docker.record["ending"] == "no answer" and docker.record["seconds"] > 0
    assert docker.record["healthy_seconds"] is not None


def test_record_of_a_server_that_outlives_its_start(docker: Docker) -> None:
    """It is written before the container exists, and nothing that is cleaned up later takes the start for a failure."""
    prepared, options = docker.launch()
    run = launch.start(prepared, replace(options, on_answer=None))
    del prepared, options
    gc.collect()
    assert (run.ending, docker.record["ending"], docker.removed) == ("", "", []) and run.healthy_seconds is not None
    before = json.loads((docker.at / "started").read_text())
    assert before == docker.record | {"healthy_seconds": None}
    assert f"sm120kit.record={docker.path}" in before["argv"] and before["argv"][:3] == ["docker", "run", "--detach"]


def test_records_of_one_second_are_different(docker: Docker) -> None:
    records = []
    for _ in range(3):
        records.append(launch.RunRecord(*docker.launch()))
        records[-1].write()
    assert len({record.path for record in records}) == len({record.log for record in records}) == 3


def test_server_that_is_stopped_while_it_starts(docker: Docker) -> None:
    """Its launcher keeps the ending that `stop` recorded, and does not take the server for one that died."""
    record = launch.RunRecord(*docker.launch())
    record.write()
    write_record(record.path, replace(record.run, ending="stopped"))
    record.write(ending="died", seconds=1.0)
    assert (docker.record["ending"], docker.record["seconds"]) == ("stopped", 1.0)


def test_gpus_that_another_server_got_meanwhile(docker: Docker) -> None:
    failures: list[Sm120kitError] = []

    def start() -> None:
        try:
            launch.start(*docker.launch())
        except Sm120kitError as error:
            failures.append(error)

    with host_turn(launch.STARTS):
        waiting = threading.Thread(target=start)
        waiting.start()
        deadline = time.monotonic() + 60
        while not docker.calls:  # GPU 0 was free before the image was loaded
            assert time.monotonic() < deadline
            time.sleep(0.02)
        docker.has("other", "running", "0")
    waiting.join()
    (failure,) = failures
    assert isinstance(failure, ResourceUnavailable) and failure.message == "other serves c on GPU 0"
    assert {call[0] for call in docker.calls} == {"ps", "inspect"}


def test_gpus_are_not_given_away_if_docker_lists_no_servers(docker: Docker) -> None:
    program = (docker.at / "docker").read_text()
    (docker.at / "docker").write_text(program.replace('elif argv[0] == "ps":', 'elif argv[0] == "ps":\n    sys.exit(1)', 1))
    with pytest.raises(DaemonUnreachable, match="cannot be listed"):
        launch.start(*docker.launch())
    assert not (docker.workspace.root / "runs").exists()


def test_another_gpu_is_used_if_there_is_one(docker: Docker) -> None:
    docker.has("other", "running", "0")
    with pytest.raises(NoAnswer):
        launch.start(*docker.launch(gpus=2))
    (run,) = (call for call in docker.calls if call[0] == "run")
    assert run[run.index("--gpus") + 1] == '"device=1"' and "sm120kit.gpus=1" in run


def _unanswered(run: Run) -> None:
    raise NoAnswer("no answer", "")


@pytest.mark.parametrize("begin", [launch.start, partial(launch.run, work=_unanswered)])
@pytest.mark.parametrize(("started", "taken"), [("05.1", True), ("05", True), ("05.120000001", False), ("05.2", False)])
def test_two_users_on_one_gpu(started: str, taken: bool, begin: Any, docker: Docker) -> None:
    """Whoever goes on without the lock of the host: the container that docker started first keeps its GPU."""
    docker.has("ours", "running", "0", started="05.12", record="RECORD")
    docker.has("theirs", "running", "1,0", started=started, record="/x\t")
    docker.has("beside", "running", "2")
    with pytest.raises(ResourceUnavailable if taken else NoAnswer, match="theirs was started on GPU 0" if taken else None):
        begin(*docker.launch())
    assert docker.removed == ["our-id"] and docker.record["ending"]
