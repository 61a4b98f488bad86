"""doctor on the real machine, with a broken nvidia-smi, and a measuring program that hangs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import synthetic_hosts
from typer.testing import CliRunner

from sm120kit.cli import app
from sm120kit.hosts.doctor import measure
from sm120kit.hosts.facts import _reader, probe

ROOT = Path(__file__).parents[2]


def sm120kit(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "SECRET_TOKEN": "hunter2", "VLLM_API_KEY": "hunter2"}
    return subprocess.run([sys.executable, "-m", "sm120kit", *map(str, argv)], capture_output=True, text=True, env=env)


def test_recording_of_this_machine_has_the_same_findings(tmp_path: Path) -> None:
    record = tmp_path / "record"
    live = sm120kit("doctor", "--json", "--record", record)
    assert live.returncode in (0, 1), live.stderr
    report = json.loads(live.stdout)
    assert report["fit"] == (live.returncode == 0)
    if not report["host"]["gpus"]:
        assert "no NVIDIA GPU found" in live.stdout
    recorded = sm120kit("doctor", "--json", "--root", record)
    assert [finding["verdict"]["status"] for finding in json.loads(recorded.stdout)["findings"]] == [
        finding["verdict"]["status"] for finding in report["findings"]
    ]
    assert "hunter2" not in live.stdout
    assert not any(b"hunter2" in path.read_bytes() for path in record.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("sleep 600", "no result within 1 s"),
        ("echo NVIDIA-SMI has failed because it could not communicate with the driver; exit 9", "exit code 9"),
        ("echo '<nvidia_smi_log>'", "not XML"),
    ],
)
def test_broken_nvidia_smi(script: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(_reader, "COMMAND_SECONDS", 1)
    started = time.monotonic()
    assert reason in probe().unread["nvidia-smi-q.xml"]
    assert time.monotonic() - started < 300


def test_root_that_is_not_a_host(tmp_path: Path) -> None:
    process = sm120kit("doctor", "--root", tmp_path)
    assert process.returncode == 11 and "hint:" in process.stderr and "Traceback" not in process.stderr


def test_hung_step_is_stopped_and_named(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        """#!/bin/sh\ntrap '' TERM\necho '{"step": "the first all-reduce of 2 ranks"}' > "$5"\nsleep 600 & wait\nwait\n"""
    )
    python.chmod(0o755)
    started = time.monotonic()
    assert measure.run_transfers("collective", 2, str(python), seconds=1).hung == "the first all-reduce of 2 ranks"
    assert time.monotonic() - started < 300


@pytest.mark.parametrize("name", ["", "not-executable", "not-elf", "no-interpreter"])
def test_nvidia_smi_that_cannot_be_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command prints findings, with the reason, and no traceback."""
    (tmp_path / "nvidia-smi").write_bytes({"not-elf": b"\x7fELF", "no-interpreter": b"#!/nowhere\n"}.get(name, b"#!/bin/sh\n"))
    (tmp_path / "nvidia-smi").chmod(0o644 if name == "not-executable" else 0o755)
    if not name:
        (tmp_path / "nvidia-smi").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    reasons = json.loads(result.stdout)["host"]["unread"]
    message = {"not-executable": "Permission denied", "not-elf": "Exec format error"}
    assert message.get(name, "program not found") in reasons["nvidia-smi-q.xml"]


@pytest.mark.skipif(shutil.which("cc") is None, reason="requires a C compiler")
def test_gpus_from_nvml(tmp_path: Path) -> None:
    """The driver's library, as far as a stub replaces it: all fields of a GPU, and None for those that it does not support."""
    source = ROOT / "tests" / "support" / "nvml_stub.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libnvidia-ml.so.1", source], check=True)
    env = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    output = subprocess.run(_reader.COMMANDS["nvml.json"], env=env, capture_output=True, text=True, check=True).stdout
    for directory in ("proc", "sys", "commands"):
        (tmp_path / "host" / directory).mkdir(parents=True)
    (tmp_path / "host" / "commands" / "nvml.json").write_text(output)
    host = probe(tmp_path / "host")
    first, second = host.gpus
    assert (host.driver.version, host.driver.cuda) == ("580.126.09", "13.0")
    assert (first.bus, first.name, first.capability) == ("0000:01:00.0", synthetic_hosts.PRO, "12.0")
    assert (first.memory_mib, first.aperture_mib, first.power_limit, first.power_max) == (97887, 131072, 450, 600)
    assert (first.persistence, first.state, first.temperature, first.processes) == (True, "P8", 41, 0)
    assert first.active == ("gpu_idle", "hw_power_brake_slowdown")
    assert (second.bus, second.capability, second.name, second.memory_mib) == ("0000:41:00.0", "12.0", None, None)
    assert (second.persistence, second.state, second.active, second.processes, second.power_max) == (None,) * 5


def test_gpus_without_a_driver_are_those_of_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        """#!/bin/sh\n[ "$2" = -x ] && echo '<log><gpu id="00000000:01:00.0"><product_name>X</product_name></gpu></log>'"""
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    host = probe()
    assert "NVML" in host.unread["nvml.json"] and host.gpus[0].name == "X"
