"""doctor on the real machine, and on one whose nvidia-smi is broken: it always answers, and in time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sm120kit.doctor import measure
from sm120kit.errors import CannotMeasure
from sm120kit.host import probe, source

ROOT = Path(__file__).parents[2]


def sm120kit(*words: str | Path, path: str = "") -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "SECRET_TOKEN": "hunter2", "VLLM_API_KEY": "hunter2"}
    env["PATH"] = f"{path}{os.pathsep}{env['PATH']}" if path else env["PATH"]
    return subprocess.run([sys.executable, "-m", "sm120kit", *map(str, words)], capture_output=True, text=True, env=env)


def test_this_machine_and_its_recording(tmp_path: Path) -> None:
    record = tmp_path / "record"
    here = sm120kit("doctor", "--json", "--record", record)
    assert here.returncode in (0, 1), here.stderr
    told = json.loads(here.stdout)
    assert told["fit"] == (here.returncode == 0)
    if not told["host"]["gpus"]:
        assert "no NVIDIA GPU found" in here.stdout
    there = sm120kit("doctor", "--json", "--root", record)
    assert [one["verdict"]["status"] for one in json.loads(there.stdout)["findings"]] == [
        one["verdict"]["status"] for one in told["findings"]
    ]
    assert "hunter2" not in here.stdout
    assert not any(b"hunter2" in path.read_bytes() for path in record.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("sleep 60", "no answer within 1 s"),
        ("echo NVIDIA-SMI has failed because it could not communicate with the driver; exit 9", "exit code 9"),
        ("echo '<nvidia_smi_log>'", "not XML"),
    ],
)
def test_a_broken_nvidia_smi(script: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(source, "COMMAND_SECONDS", 1)
    started = time.monotonic()
    assert said in probe().unread["nvidia-smi-q.xml"]
    assert time.monotonic() - started < 20


def test_a_root_that_is_no_host(tmp_path: Path) -> None:
    done = sm120kit("doctor", "--root", tmp_path)
    assert done.returncode == 80 and "hint:" in done.stderr and "Traceback" not in done.stderr


def test_the_measuring_program_works_where_there_is_no_gpu() -> None:
    copied = measure.ask("copies", 2, sys.executable, kind="cpu")
    assert [line["wrong"] for line in copied.having("pair")] == [0] and not copied.hung + copied.failed
    reduced = measure.ask("collective", 3, sys.executable, kind="cpu")
    assert sorted((line["rank"], line["wrong"]) for line in reduced.having("rank")) == [(0, 0), (1, 0), (2, 0)]
    assert len(reduced.having("bus")) == 1 and not reduced.hung + reduced.failed


def test_bytes_that_change_on_the_way_are_seen(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        f"""#!{sys.executable}
import runpy, sys, torch
copy = torch.Tensor.copy_
def change_one(self, source, non_blocking=False):
    copy(self, source)
    self.view(-1)[-1] = source.view(-1)[-1].bitwise_xor(1)
    return self
torch.Tensor.copy_ = change_one
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    )
    python.chmod(0o755)
    told = measure.ask("copies", 2, str(python), kind="cpu")
    assert [line["wrong"] for line in told.having("pair")] == [6]  # three sizes, both ways


def test_a_step_that_hangs_ends_with_its_name(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        """#!/bin/sh\ntrap '' TERM\necho '{"about": "the first all-reduce of 2 ranks"}' > "$5"\nsleep 60 & wait\nwait\n"""
    )
    python.chmod(0o755)
    started = time.monotonic()
    assert measure.ask("collective", 2, str(python), seconds=1).hung == "the first all-reduce of 2 ranks"
    assert time.monotonic() - started < 30


def test_measuring_needs_torch(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -S -c 'import torch'\n")
    python.chmod(0o755)
    with pytest.raises(CannotMeasure, match="No module named 'torch'"):
        measure.ask("copies", 2, str(python))
    with pytest.raises(CannotMeasure, match="sees 0 of 64 GPUs"):
        measure.ask("copies", 64, sys.executable)
