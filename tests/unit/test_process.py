"""The one door to other programs: what it returns, how it fails, and that nothing outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from sm120kit import process
from sm120kit.errors import CommandFailed, ToolchainMissing


def test_output_and_log_with_a_line_to_paste(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "x.log"
    done = process.run(["/bin/sh", "-c", "echo out; echo err >&2; echo $NAME"], env={"NAME": "a b"}, logfile=log, cwd=tmp_path)
    assert (done.stdout, done.stderr, done.returncode) == ("out\na b\n", "err\n", 0)
    line = log.read_text().splitlines()[0].removeprefix("$ ")
    assert subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True).stdout == "out\na b\n"


def test_failure_names_command_and_last_words(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="exit code 3\nlast words"):
        process.run(["/bin/sh", "-c", "echo last words >&2; exit 3"])
    assert process.run(["/bin/sh", "-c", "exit 3"], check=False).returncode == 3
    with pytest.raises(ToolchainMissing, match="program not found"):
        process.run([tmp_path / "no-such-program"])


def test_dropped_variables_are_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM120KIT_TEST", "seen")
    assert process.run(["/bin/sh", "-c", "echo $SM120KIT_TEST"]).stdout == "seen\n"
    assert process.run(["/bin/sh", "-c", "echo $SM120KIT_TEST"], drop=["SM120KIT_TEST"]).stdout == "\n"


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGINT])
def test_no_child_outlives_this_process(tmp_path: Path, by: signal.Signals) -> None:
    pid_file = tmp_path / "pid"
    program = f"""
import signal
from sm120kit import process
signal.signal(signal.SIGINT, signal.default_int_handler)  # where it is ignored, as in the background of a shell
process.run(['/bin/sh', '-c', 'echo $$ > {pid_file}; exec sleep 60'], tied=True)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], env={**os.environ}, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 20
    while not (pid_file.exists() and pid_file.read_text().strip()):
        assert time.monotonic() < until
        time.sleep(0.01)
    child = psutil.Process(int(pid_file.read_text()))
    parent.send_signal(by)
    parent.wait()
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
