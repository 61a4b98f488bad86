"""doctor on the real machine, with a broken nvidia-smi, and a measuring program that hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sm120kit.cli import app
from sm120kit.hosts.doctor import measure
from sm120kit.hosts.facts import _reader, probe

ROOT = Path(__file__).parents[2]


def sm120kit(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "SECRET_TOKEN": "hunter2", "VLLM_API_KEY": "hunter2"}
    return subprocess.run([sys.executable, "-m", "sm120kit", *map(str, argv)], capture_output=True, text=True, env=env)


def test_facts_of_this_machine_have_the_same_findings_elsewhere(tmp_path: Path) -> None:
    live = sm120kit("doctor", "--json")
    assert live.returncode in (0, 1), live.stderr
    report = json.loads(live.stdout)
    assert report["fit"] == (live.returncode == 0) and "hunter2" not in live.stdout
    if not report["host"]["gpus"]:
        assert "no NVIDIA GPU found" in live.stdout
    (tmp_path / "host.json").write_text(live.stdout)
    assert json.loads(sm120kit("doctor", "--json", "--root", tmp_path / "host.json").stdout) == report


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
