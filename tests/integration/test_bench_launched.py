"""Servers that the launch code starts and stops, measured; and the environment in their results."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import synthetic_hosts
from typer.testing import CliRunner

from sm120kit import serving
from sm120kit.bench import Measurement, compare_results, launched, result_file, workload
from sm120kit.bench.launched import LaunchedConfiguration
from sm120kit.bench.result_file import Result
from sm120kit.cli import app
from sm120kit.core.errors import BadInput, NotComparable, NotFound, ServerFailed, SystemRefused
from sm120kit.core.record_files import read_record
from sm120kit.core.workspace import Workspace
from sm120kit.hosts.facts import LAUNCHER_LABEL
from sm120kit.images.image_records import Image, VerifiedImage
from sm120kit.images.published_images import Source
from sm120kit.recipes import configurations
from sm120kit.recipes.configurations import Configuration
from sm120kit.serving import Run, launch, resolve
from sm120kit.serving._container import Mount
from sm120kit.serving.launch import LaunchOptions

SUPPORT = Path(__file__).parents[1] / "support"
ROOT = SUPPORT.parents[1]
REVISION = "5" * 40
CONFIGURATION = "qwen3.5-27b-fp8-1x-rtx-pro-6000"
WORKLOAD = """
summary = "x"
prompts = ["a", "b"]
concurrency = [1, 2]
output_tokens = [200]
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def prepared_launch(configuration: Configuration, image: Any, service: Any) -> launch.PreparedLaunch:
    """A launch whose checks were skipped."""
    return launch.PreparedLaunch(configuration, image, None, None, service, (), Source(Path("none")))  # type: ignore[arg-type]


class LaunchedServers:
    """Servers started through ``launch.serve`` as plain processes, as :mod:`sm120kit.bench.launched` starts containers."""

    def __init__(self, directory: Path, port: int, interval: float = 0.002) -> None:
        self.directory, self.port, self.interval = directory, port, interval
        snapshot = directory / "models--a--b" / "snapshots" / REVISION
        snapshot.mkdir(parents=True)
        (snapshot / "tokenizer.json").write_text("{}")
        (directory / "mine.toml").write_text(WORKLOAD)
        self.configuration = configurations.load(CONFIGURATION)
        self.saved: list[Result] = []
        self.starts = 0

    def start(self, work: Callable[[Run], None]) -> None:
        image = VerifiedImage(
            Image("sha256:1", "c" * 64, "linux/amd64", (), {"sm120kit.build-id": "b" * 64}, "", 1), "some/image:tag", "", (), {}
        )
        mounts = (Mount(self.directory / "models--a--b" / "snapshots" / REVISION, f"/model/snapshots/{REVISION}", True),)
        environment = dict(self.configuration.environment)
        service = serving.Service("s", "sha256:1", (), environment, mounts, (0,), 1, False, {}, self.port)
        # The server ignores the remaining arguments: options of docker, the image, and the path of a model in a container.
        server = (sys.executable, str(SUPPORT / "schedule_server.py"), str(self.port), str(self.interval), "0", "1")
        options = ("--name", f"s-{self.starts}", "--label", f"{LAUNCHER_LABEL}={os.getpid()}.{time.monotonic_ns()}")
        argv = (*server, *options, service.image, f"/model/snapshots/{REVISION}", "--label", "of-the-server")
        self.starts += 1
        state = LaunchOptions(Workspace(self.directory / "state"), 20)
        launch.serve(prepared_launch(self.configuration, image, service), argv, state, work=work)

    def measure(self, restarts: int, save: Callable[[Result], None] | None = None) -> Result:
        named = workload.load(str(self.directory / "mine.toml"))
        measurement = Measurement(named, save or self.saved.append)
        (result,) = launched.measure([LaunchedConfiguration(self.start, self.configuration, measurement)], restarts)
        return result

    @property
    def records(self) -> list[Run]:
        return [read_record(Run, path) for path in sorted((self.directory / "state" / "runs").glob("*.json"))]


def test_result_has_cases_of_every_restart(tmp_path: Path) -> None:
    servers = LaunchedServers(tmp_path, free_port())
    result = servers.measure(restarts=1)
    assert sorted((case.restart, case.concurrency) for case in result.cases) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert [saved.complete for saved in servers.saved] == [False, False, False, True] and result.complete
    rates = [sample.decode_tok_s for case in result.cases for sample in case.samples]
    assert len(rates) == 6 and all(rates)
    assert {run.ending for run in servers.records} == {"stopped"} and serving.port_is_free(servers.port)
    served = result.environment.served
    assert (served.image, served.lock, served.revision) == ("c" * 64, "b" * 64, REVISION)
    assert served.tokenizer_sha256 is not None and served.configuration == CONFIGURATION
    assert served.argv is not None and served.argv[-4:] == (
        "sha256:1",
        f"/model/snapshots/{REVISION}",
        "--label",
        "of-the-server",
    )
    assert not [word for word in served.argv[:-4] if word in ("--name", "s-0", "--label") or LAUNCHER_LABEL in word]
    assert served.variables == tuple(f"{name}={value}" for name, value in sorted(servers.configuration.environment.items()))
    assert result.environment.reported == {"id": "schedule", "root": "/nowhere"}
    gains = compare_results.compare(result, result, []).gains
    assert gains and all(len(gain.before) == 2 for gain in gains)
    assert all(gain.ratio in (None, pytest.approx(1)) for gain in gains), "on a busy machine chunks arrive together: times of 0"


def test_bench_run_launches_and_measures_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the container, which needs a GPU: a process serves where launch would run docker."""
    servers = LaunchedServers(tmp_path, free_port())
    folder = tmp_path / "models--a--b"
    prepared: list[Any] = []

    def prepare(*arguments: object) -> launch.PreparedLaunch:
        prepared.extend(arguments[:2])
        return prepared_launch(servers.configuration, None, None)

    monkeypatch.setattr(launch, "require_model", lambda configuration, folder: None)
    monkeypatch.setattr("sm120kit.cli.serve.resolve", lambda *arguments: arguments[:4])
    monkeypatch.setattr(launch, "prepare", prepare)
    monkeypatch.setattr(launch, "run", lambda prepared, options, work: servers.start(work))
    monkeypatch.chdir(tmp_path)
    arguments = ["run", CONFIGURATION, "--model", str(folder), "-w", "mine.toml", "--restarts", "1"]
    arguments += ["--trust", "key.pub"]
    ran = CliRunner().invoke(app, ["bench", *arguments, "--state", str(tmp_path / "state")])
    assert ran.exit_code == 0, ran.output
    source = Source(Path("images.json"), Path("key.pub"))
    resolved, model = prepared
    assert resolved[:3] == (servers.configuration, "", source) and model == folder
    result = result_file.read(tmp_path / "result.json")
    assert result.complete and result.environment.served.configuration == CONFIGURATION
    assert sorted((case.restart, case.concurrency) for case in result.cases) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert re.search(r"concurrency +output +context +restart", ran.output) and "[4/4]" in ran.output
    assert re.search(f"served.lock +{'b' * 64}", ran.output) and "total tok/s" in ran.output
    for option in (["--served-model-name", "x"], ["--run", "x.json"]):
        refused = CliRunner().invoke(app, ["bench", *arguments, *option])
        assert refused.exit_code == 2 and option[0] in refused.output


def test_ablation_restarts_with_and_without_the_option_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers, order = LaunchedServers(tmp_path, free_port()), []

    def run(prepared: launch.PreparedLaunch, options: LaunchOptions, work: Callable[[Run], None]) -> None:
        configuration = prepared.configuration
        order.append(drafts := configuration.speculation is not None)
        monkeypatch.setenv("WORD", "tok " if drafts or len(order) > 3 else "kot ")
        servers.configuration = configuration
        servers.start(work)

    monkeypatch.setattr(launch, "require_model", lambda configuration, folder: None)
    monkeypatch.setattr("sm120kit.cli.serve.resolve", lambda configuration, *arguments: configuration)
    monkeypatch.setattr(launch, "prepare", lambda configuration, *arguments: prepared_launch(configuration, None, None))
    monkeypatch.setattr(launch, "run", run)
    monkeypatch.chdir(tmp_path)
    configuration = "qwen3.8-27b-fp8-1x-rtx-pro-6000"
    arguments = ["run", configuration, "--model", str(tmp_path), "-w", "mine.toml", "--state", str(tmp_path / "state")]
    unknown = CliRunner().invoke(app, ["bench", *arguments, "--ablate", "no-speculatoin"])
    assert isinstance(unknown.exception, NotFound) and "no-speculation" in str(unknown.exception) and not order
    ran = CliRunner().invoke(app, ["bench", *arguments, "--ablate", "no-speculation", "--json"])
    assert ran.exit_code == 0, ran.output
    assert order == [True, False, False, True, True, False], "three starts each, in turn"
    (effect,) = json.loads(ran.stdout)
    assert (effect["name"], effect["option"]) == ("no-speculation", "without --speculative-config")
    gains = {(gain["concurrency"], gain["figure"]): gain for gain in effect["gains"]}
    assert {1, 2} == {concurrency for concurrency, _ in gains} and len(gains[1, "decode_tok_s"]["after"]) == 3
    low, high = gains[1, "decode_tok_s"]["interval"]
    assert low <= gains[1, "decode_tok_s"]["ratio"] <= high
    assert effect["answers"] == {"changed": 6, "compared": 9, "changed_without": 0, "compared_without": 6, "unknown": ""}
    without, having = (result_file.read(tmp_path / name) for name in ("result.json", "result.no-speculation.json"))
    assert without.complete and having.complete and [case.restart for case in having.cases] == [0, 0, 1, 1, 2, 2]
    again = CliRunner().invoke(app, ["bench", *arguments, "--ablate", "no-speculation"])
    assert isinstance(again.exception, SystemRefused) and len(order) == 6


@pytest.mark.parametrize(("option", "all_reduce"), [("pcie-ipc", "default"), ("no-speculation", "auto")])
def test_what_tune_found_is_not_used_where_the_all_reduce_is_compared(
    option: str, all_reduce: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []

    def resolved(
        configuration: Configuration, image: str, source: object, location: resolve.ServerLocation, _: object
    ) -> object:
        used.append(location.allreduce)
        return configuration

    def run(*arguments: object) -> None:
        raise NotFound("no server is started", "")

    LaunchedServers(tmp_path, free_port())
    monkeypatch.setattr(launch, "require_model", lambda configuration, folder: None)
    monkeypatch.setattr("sm120kit.cli.serve.resolve", resolved)
    monkeypatch.setattr(launch, "prepare", lambda configuration, *arguments: prepared_launch(configuration, None, None))
    monkeypatch.setattr(launch, "run", run)
    monkeypatch.chdir(tmp_path)
    configuration = "qwen3.5-397b-nvfp4-4x-rtx-pro-6000-vllm"
    arguments = ["bench", "run", configuration, "--model", str(tmp_path), "-w", "mine.toml", "--state", str(tmp_path / "state")]
    done = CliRunner().invoke(app, [*arguments, "--ablate", option])
    assert used == [all_reduce] * 2, done.output


def test_partial_result_is_saved_when_the_server_dies(tmp_path: Path) -> None:
    servers = LaunchedServers(tmp_path, free_port())

    def save_and_kill(partial: Result) -> None:
        servers.saved.append(partial)
        for child in psutil.Process().children():
            child.kill()

    with pytest.raises(ServerFailed, match="after it had been healthy"):
        servers.measure(restarts=1, save=save_and_kill)
    assert not servers.saved[-1].complete and not any(sample.error for sample in servers.saved[0].cases[0].samples)
    assert all(sample.error for sample in servers.saved[-1].cases[-1].samples)
    assert servers.records[-1].ending == "died"


DRIVER = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from test_bench_launched import LaunchedServers
from sm120kit.bench import result_file
from sm120kit.core import signals
signals.handle()
directory = Path(sys.argv[1])
def save(partial):
    result_file.write(directory / "result.json", partial)
    print("saved", flush=True)
LaunchedServers(directory, int(sys.argv[2]), 0.01).measure(2, save)
"""


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_stops_the_server_and_keeps_measured_cases(kind: int, tmp_path: Path) -> None:
    port = free_port()
    argv = [sys.executable, "-c", DRIVER, tmp_path, port, Path(__file__).parent, SUPPORT]
    with subprocess.Popen(list(map(str, argv)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=with_source()) as running:
        assert running.stdout and running.stdout.readline() == b"saved\n"
        running.send_signal(kind)
        _, stderr = running.communicate(timeout=60)
    assert b"Interrupted" in stderr, stderr
    assert serving.port_is_free(port), "the server was stopped"
    partial = result_file.read(tmp_path / "result.json")
    assert not partial.complete and partial.cases[0].complete
    (record,) = (tmp_path / "state" / "runs").glob("*.json")
    assert json.loads(record.read_text())["ending"] == "stopped"


# ---- a server that launch started in another process, with GPUs


SMI = '''#!{python}
"""nvidia-smi by its manual: -q -x, topo, and a CSV query."""
import sys
from pathlib import Path

recorded = Path("{recorded}")
arguments = sys.argv[1:]
files = {{"-q": "q.xml", "topo -m": "topo-m.txt", "topo -p2p": "topo-p2p-r.txt"}}
files["--query-gpu=pci.bus_id,compute_cap"] = "compute-cap.csv"
for start, name in files.items():
    if " ".join(arguments).startswith(start):
        print((recorded / f"nvidia-smi-{{name}}").read_text(), end="")
        sys.exit()
'''


def with_source(path: str = "") -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": str(ROOT / "src"),
        "PATH": f"{path}{os.pathsep}{os.environ['PATH']}" if path else os.environ["PATH"],
    }


def sm120kit(*arguments: str | Path, cwd: Path, path: str = "") -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "sm120kit", *map(str, arguments)]
    return subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=60, env=with_source(path))


def test_result_has_the_launch_record_and_the_machine(tmp_path: Path) -> None:
    synthetic_hosts.build("node-forced", tmp_path / "host")
    (tmp_path / "bin").mkdir()
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.write_text(SMI.format(python=sys.executable, recorded=tmp_path / "host" / "commands"))
    smi.chmod(0o755)
    docker = tmp_path / "bin" / "docker"
    docker.write_text(
        f"""#!/bin/sh
        case "$*" in
        *"label=sm120kit.record={tmp_path}"*) cat {tmp_path}/docker-state ;;
        inspect*) printf '["/s", "%s", "", {{}}, []]' "$(cat {tmp_path}/docker-state)" ;;
        esac"""
    )
    docker.chmod(0o755)
    servers = LaunchedServers(tmp_path, free_port())
    (tmp_path / "mine.toml").write_text(WORKLOAD.replace("[1, 2]", "[2]").replace("[200]", "[20]"))
    ran: list[subprocess.CompletedProcess[str]] = []

    def measure_from_outside(run: Run) -> None:
        (record,) = (tmp_path / "state" / "runs").glob("*.json")
        arguments = ("bench", "run", run.url, "-w", "mine.toml", "--run", record)
        for state in ("exited", "", "running"):
            (tmp_path / "docker-state").write_text(state)
            if state != "running":
                ran.append(sm120kit(*arguments, cwd=tmp_path, path=str(tmp_path / "bin")))
        ran.append(sm120kit(*arguments, "-o", "known.json", cwd=tmp_path, path=str(tmp_path / "bin")))
        ran.append(sm120kit("bench", "run", f"http://localhost:{servers.port}", "--run", record, cwd=tmp_path))

    servers.start(measure_from_outside)
    exited, gone, known, other_url = ran
    for refused, reason in ((exited, "exited"), (gone, "its container is gone")):
        assert refused.returncode == BadInput.exit_code and reason in refused.stderr, refused.stderr
    assert known.returncode == 0, known.stderr
    assert other_url.returncode == BadInput.exit_code and other_url.stderr.count("http://") == 2
    result = result_file.read(tmp_path / "known.json")
    served, machine = result.environment.served, result.environment.machine
    assert (served.image, served.revision) == ("c" * 64, REVISION)
    assert served.variables == tuple(sorted(servers.configuration.environment)), "the record has no values"
    assert (machine.driver, machine.cuda) == ("580.126.09", "13.0")
    assert machine.gpus == ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition",) * 2
    assert (machine.power_limits_watts, machine.topology) == ((600.0, 600.0), ("0-1 NODE",))
    assert re.search(r"machine\.driver +580\.126\.09", known.stdout)
    limited = replace(machine, power_limits_watts=(450.0, 600.0))
    other = replace(result, environment=replace(result.environment, machine=limited))
    with pytest.raises(NotComparable, match=r"machine\.power_limits_watts: 600\.0, 600\.0 / 450\.0, 600\.0"):
        compare_results.compare(result, other, [])
    assert "machine.driver" not in compare_results.compare(result, result, []).unknown


def test_run_ends_when_the_server_goes_away(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "mine.toml").write_text(WORKLOAD.replace("[1, 2]", "[1]").replace("[200]", "[500, 9000, 9001, 9002]"))
    with subprocess.Popen([sys.executable, SUPPORT / "schedule_server.py", str(port)], stdout=subprocess.PIPE) as server:
        assert server.stdout and server.stdout.readline()
        argv = [sys.executable, "-m", "sm120kit", "bench", "run", f"http://127.0.0.1:{port}", "-w", "mine.toml"]
        with subprocess.Popen(argv, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=with_source()) as running:
            deadline = time.monotonic() + 60
            while not (tmp_path / "result.json").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(0.3)
            server.kill()
            _, stderr = running.communicate(timeout=60)
    assert running.returncode == 70 and "case 2 of 4" in " ".join(stderr.split()), stderr
    partial = result_file.read(tmp_path / "result.json")
    assert not partial.complete and [bool(case.samples[0].error) for case in partial.cases] == [False, True]
    shown = sm120kit("bench", "show", "result.json", cwd=tmp_path)
    assert "partial" in shown.stdout and "1 of 1" in shown.stdout, shown.stdout
