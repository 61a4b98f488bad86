"""Measured servers that launch's own code starts and stops, and what is known of their circumstances."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from sm120kit import launch, launching, measuring
from sm120kit.bench import compare, receipt, workload
from sm120kit.bench.receipt import Receipt
from sm120kit.cli import bench
from sm120kit.errors import BadReceipt, NotComparable, ServerDied
from sm120kit.launch.service import Mount
from sm120kit.recipe import configuration
from sm120kit.records import Image, Run, VerifiedImage
from sm120kit.workspace import Workspace, read_record

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
REVISION = "5" * 40
CONFIGURATION = "qwen3.5-27b-fp8-1x-rtx-pro-6000"
WORKLOAD = """
summary = "x"
prompts = ["a", "b"]
users = [1, 2]
output_tokens = [200]
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Launched:
    """What ``measuring.run`` hands to ``measuring.measure``, with a process where launch has a container."""

    def __init__(self, place: Path, port: int, interval: float = 0.002) -> None:
        self.place, self.port, self.interval, self.pids = place, port, interval, list[int]()
        folder = place / "models--a--b" / "snapshots" / REVISION
        folder.mkdir(parents=True)
        (folder / "tokenizer.json").write_text("{}")
        (place / "mine.toml").write_text(WORKLOAD)
        self.wanted = configuration.load(CONFIGURATION)
        self.kept: list[Receipt] = []

    def start(self, work: measuring.Work) -> None:
        image = VerifiedImage(
            Image("sha256:1", "c" * 64, "linux/amd64", (), {"sm120kit.build-id": "b" * 64}, "", 1), "some/image:tag", "", (), {}
        )
        mounts = (Mount(self.place / "models--a--b", "/model", True),)
        service = launch.Service("s", "sha256:1", (), dict(self.wanted.environment), mounts, (0,), 1, False, {}, self.port)
        # What follows is docker's, and nothing to this server: a name, and where the model is in a container.
        server = (sys.executable, str(HERE / "schedule_server.py"), str(self.port), str(self.interval), "0", "1")
        launching.serve(
            self.wanted,
            image,
            service,
            (*server, "--name", f"s-{len(self.pids)}", f"/model/snapshots/{REVISION}"),
            Workspace(self.place / "state"),
            wait_seconds=20,
            tell=lambda line: None,
            progress=lambda seconds, line: None,
            work=work,
        )

    def measure(self, restarts: int, keep: Any = None) -> Receipt:
        asked = workload.load(str(self.place / "mine.toml"))
        return measuring.measure(
            self.start, self.wanted, asked, restarts=restarts, seed=0, given={}, keep=keep or self.kept.append
        )

    @property
    def records(self) -> list[Run]:
        return [read_record(Run, path) for path in sorted((self.place / "state" / "runs").glob("*.json"))]


def test_each_restart_is_a_server_of_its_own_and_the_receipt_says_which(tmp_path: Path) -> None:
    one = Launched(tmp_path, free_port())
    made = one.measure(restarts=1)
    assert sorted((cell.restart, cell.users) for cell in made.cells) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert [kept.complete for kept in one.kept] == [False, False, False, True] and made.complete
    rates = [sample.decode_tok_s or 0 for cell in made.cells for sample in cell.samples]
    assert len(rates) == 6 and all(350 < rate < 600 for rate in rates), rates
    assert {run.ending for run in one.records} == {"stopped"} and launch.port_is_free(one.port)
    served = made.circumstances.served
    assert (served.image, served.lock, served.revision) == ("c" * 64, "b" * 64, REVISION)
    assert served.tokenizer_sha256 is not None and served.configuration == CONFIGURATION
    assert served.argv is not None and "--name" not in served.argv and "s-0" not in served.argv
    assert served.environment == tuple(f"{name}={value}" for name, value in sorted(one.wanted.environment.items()))
    assert made.circumstances.said == {"id": "schedule", "root": "/nowhere"}
    # Compared with itself: the spread is that between the starts.
    (first, second) = compare.compare(made, made, []).cells
    assert (first.between, second.between) == ("starts", "starts") and first.beyond_spread is False


def test_the_command_launches_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the container, which needs a GPU: where launch would run docker, the server is a process."""
    one = Launched(tmp_path, free_port())
    folder = tmp_path / "models--a--b"
    asked: list[object] = []

    def prepare(*words: object) -> launching.Prepared:
        asked.extend(words[:5])
        return launching.Prepared(one.wanted, None, None, None, None, (), True)  # type: ignore[arg-type]

    monkeypatch.setattr(launching, "prepare", prepare)
    monkeypatch.setattr(launching, "run", lambda prepared, index, workspace, *, work, **rest: one.start(work))
    monkeypatch.chdir(tmp_path)
    words = ["run", CONFIGURATION, "--checkpoint", str(folder), "-w", "mine.toml", "--restarts", "1", "--port", "4711"]
    ran = CliRunner().invoke(bench.app, [*words, "--plot", "-", "--state", str(tmp_path / "state")])
    assert ran.exit_code == 0, ran.output
    assert asked == [CONFIGURATION, folder, "", Path("images.json"), 4711]
    made = receipt.read(tmp_path / "receipt.json")
    assert made.complete and made.circumstances.served.configuration == CONFIGURATION
    assert sorted((cell.restart, cell.users) for cell in made.cells) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert re.search(r"users +output +context +restart", ran.output) and "[4/4]" in ran.output
    assert f"served.lock: {'b' * 64}" in ran.output and "tok/s together by users" in ran.output
    for option in (["--model", "x"], ["--run", "x.json"]):
        refused = CliRunner().invoke(bench.app, [*words, *option])
        assert refused.exit_code == 2 and "is for a server that runs already" in refused.output


def test_a_difference_between_starts_is_within_the_spread(tmp_path: Path) -> None:
    """A server that is slower after a restart: between requests of one start nothing shows it."""
    one = Launched(tmp_path, free_port())

    def slower(made: Receipt) -> None:
        one.interval = 0.004 if len(made.cells) >= 2 else 0.002

    made = one.measure(restarts=1, keep=slower)
    starts = [replace(made, cells=tuple(replace(c, restart=0) for c in made.cells if c.restart == n)) for n in range(2)]
    assert all(cell.beyond_spread for cell in compare.compare(*starts, []).cells)
    assert not any(cell.beyond_spread for cell in compare.compare(made, made, []).cells)
    low, high = (compare.compare(made, made, []).cells[0].before or (0, 0, 0))[1:]
    assert high / low == pytest.approx(2, rel=0.2)


def test_a_server_that_dies_is_explained_and_what_was_measured_stays(tmp_path: Path) -> None:
    one = Launched(tmp_path, free_port())

    def kill(made: Receipt) -> None:
        one.kept.append(made)
        for child in psutil.Process().children():
            child.kill()

    with pytest.raises(ServerDied, match="after it had been healthy"):
        one.measure(restarts=1, keep=kill)
    assert not one.kept[-1].complete and not any(sample.error for sample in one.kept[0].cells[0].samples)
    assert all(sample.error for sample in one.kept[-1].cells[-1].samples)
    assert one.records[-1].ending == "died"


DRIVER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from test_bench_launched import Launched
from sm120kit.bench import receipt
import sm120kit.cli, signal
signal.signal(signal.SIGINT, sm120kit.cli._interrupt)
one = Launched(Path(sys.argv[1]), int(sys.argv[2]), 0.01)
one.measure(2, keep=lambda made: (receipt.write(Path(sys.argv[1]) / "receipt.json", made), print("kept", flush=True)))
"""


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_the_server_and_keeps_the_cells(kind: int, tmp_path: Path) -> None:
    port = free_port()
    argv = [sys.executable, "-c", DRIVER, tmp_path, port, HERE]
    with subprocess.Popen(list(map(str, argv)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=with_source()) as running:
        assert running.stdout and running.stdout.readline() == b"kept\n"
        running.send_signal(kind)
        _, said = running.communicate(timeout=30)
    assert b"_Interrupted" in said, said
    assert launch.port_is_free(port), "no server is left behind"
    made = receipt.read(tmp_path / "receipt.json")
    assert not made.complete and made.cells[0].complete
    (record,) = (tmp_path / "state" / "runs").glob("*.json")
    assert json.loads(record.read_text())["ending"] == "stopped"


# ---- a server that launch started in another terminal, and GPUs that nvidia-smi knows


SMI = '''#!{python}
"""nvidia-smi as its manual has it: -q -x, topo, and queries as CSV, repeated with --loop-ms."""
import sys, time
from pathlib import Path

said = Path("{said}")
words = sys.argv[1:]
files = {{"-q": "q.xml", "topo -m": "topo-m.txt", "topo -p2p": "topo-p2p-r.txt"}}
files["--query-gpu=pci.bus_id,compute_cap"] = "compute-cap.csv"
for start, name in files.items():
    if " ".join(words).startswith(start):
        print((said / f"nvidia-smi-{{name}}").read_text(), end="")
        sys.exit()
values = {{"index": "{{gpu}}", "clocks.sm": "{{clock}}", "power.draw": "{{watts}}", "temperature.gpu": "61",
           "clocks_event_reasons.active": "{{mask}}"}}
fields = words[0].removeprefix("--query-gpu=").split(",")
assert words[1] == "--format=csv,noheader,nounits", words
period = int(words[2].removeprefix("--loop-ms=")) / 1000
look = 0
while True:
    for gpu in range(2):
        told = dict(gpu=gpu, clock=2600 - 100 * look, watts=f"{{300 + look}}.50" if gpu == 0 else "[N/A]",
                    mask="0x0000000000000001" if look % 2 or gpu else "0x0000000000000024")
        print(", ".join(values[field].format(**told) for field in fields), flush=True)
    look += 1
    time.sleep(period)
'''


def with_source(path: str = "") -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": str(ROOT / "src"),
        "PATH": f"{path}{os.pathsep}{os.environ['PATH']}" if path else os.environ["PATH"],
    }


def sm120kit(*words: str | Path, cwd: Path, path: str = "") -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "sm120kit", *map(str, words)]
    return subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=60, env=with_source(path))


def test_the_record_of_launch_and_the_gpus_are_in_the_receipt(tmp_path: Path) -> None:
    runpy.run_path(str(ROOT / "tests" / "unit" / "hosts" / "build.py"))["build"]("node-forced", tmp_path / "host")
    (tmp_path / "bin").mkdir()
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.write_text(SMI.format(python=sys.executable, said=tmp_path / "host" / "commands"))
    smi.chmod(0o755)
    one = Launched(tmp_path, free_port())
    (tmp_path / "mine.toml").write_text(WORKLOAD.replace("[1, 2]", "[2]").replace("[200]", "[600]"))
    ran: list[subprocess.CompletedProcess[str]] = []

    def elsewhere(run: Run) -> None:
        (record,) = (tmp_path / "state" / "runs").glob("*.json")
        words = ("bench", "run", run.url, "-w", "mine.toml", "--run", record)
        ran.append(sm120kit(*words, "-o", "known.json", cwd=tmp_path, path=str(tmp_path / "bin")))
        ran.append(sm120kit("bench", "run", f"http://localhost:{one.port}", "--run", record, cwd=tmp_path))

    one.start(elsewhere)
    known, wrong = ran
    assert known.returncode == 0, known.stderr
    assert wrong.returncode == BadReceipt.exit_code and "is of a server at" in wrong.stderr
    made = receipt.read(tmp_path / "known.json")
    served, machine = made.circumstances.served, made.circumstances.machine
    assert (served.image, served.revision) == ("c" * 64, REVISION)
    assert served.environment == tuple(sorted(one.wanted.environment)), "values are not in the record"
    assert (machine.driver, machine.cuda) == ("580.126.09", "13.0")
    assert machine.gpus == ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition",) * 2
    assert (machine.power_limits_watts, machine.topology) == ((600.0, 600.0), ("0-1 NODE",))
    (cell,) = made.cells
    assert cell.clocks is not None
    first, second = cell.clocks
    assert (first.gpu, second.gpu, first.hottest) == (0, 1, 61)
    assert first.looks in (2, 3, 4), "twice a second for 1.2 seconds"
    assert first.sm_mhz is not None and first.sm_mhz[2] == 2600 and first.sm_mhz[0] == 2600 - 100 * (first.looks - 1)
    assert first.watts is not None and first.watts[0] == 300.5 and second.watts is None
    share = ((first.looks + 1) // 2) / first.looks
    assert first.slowed == {"sw_power_cap": share, "sw_thermal_slowdown": share} and second.slowed == {}
    assert "machine.driver: 580.126.09" in known.stdout and "GPU 1: SM" in known.stdout and "slowed by nothing" in known.stdout
    limited = replace(machine, power_limits_watts=(450.0, 600.0))
    other = replace(made, circumstances=replace(made.circumstances, machine=limited))
    with pytest.raises(NotComparable, match=r"machine\.power_limits_watts: 600\.0, 600\.0 / 450\.0, 600\.0"):
        compare.compare(made, other, [])
    assert "machine.driver" not in compare.compare(made, made, []).unknown


def test_a_server_that_goes_away_ends_the_run(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "mine.toml").write_text(WORKLOAD.replace("[1, 2]", "[1]").replace("[200]", "[500, 501, 502, 503]"))
    with subprocess.Popen([sys.executable, HERE / "schedule_server.py", str(port)], stdout=subprocess.PIPE) as server:
        assert server.stdout and server.stdout.readline()
        argv = [sys.executable, "-m", "sm120kit", "bench", "run", f"http://127.0.0.1:{port}", "-w", "mine.toml"]
        with subprocess.Popen(argv, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=with_source()) as running:
            until = time.monotonic() + 30
            while not (tmp_path / "receipt.json").exists() and time.monotonic() < until:
                time.sleep(0.05)
            time.sleep(0.3)
            server.kill()
            _, said = running.communicate(timeout=30)
    assert running.returncode == 90 and "no longer answers; it went away in cell 2 of 4" in " ".join(said.split()), said
    made = receipt.read(tmp_path / "receipt.json")
    assert not made.complete and [bool(cell.samples[0].error) for cell in made.cells] == [False, True]
    shown = sm120kit("bench", "show", "receipt.json", "--plot", "-", cwd=tmp_path)
    assert "partial" in shown.stdout and "unknown  1 of 1 requests failed" in shown.stdout, shown.stdout
