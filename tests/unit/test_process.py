"""Running programs: output, failures, and that no child outlives its parent."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import psutil
import pytest

from sm120kit.core import console, process, reporting
from sm120kit.core.errors import CommandFailed, RequirementMissing

INSIDE = ("images/checks/suites/",)
"""Code that runs in an image."""


def test_programs_are_found_by_one_function() -> None:
    source = Path(process.__file__).parents[1]
    names = re.compile(r"shutil\.which|\bPopen\(")
    found = {path.relative_to(source).as_posix() for path in source.rglob("*.py") if names.search(path.read_text())}
    assert {name for name in found if not name.startswith(INSIDE)} == {"core/process.py"}


def test_program_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some program").write_text("#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert process.find_program("some program") is None, "it cannot be run"
    (tmp_path / "some program").chmod(0o755)
    assert process.find_program("some program") == tmp_path / "some program"


def test_output_and_log_with_shell_line(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "x.log"
    done = process.run(["/bin/sh", "-c", "echo out; echo err >&2; echo $NAME"], env={"NAME": "a b"}, logfile=log, cwd=tmp_path)
    assert (done.stdout, done.stderr, done.returncode) == ("out\na b\n", "err\n", 0)
    line = log.read_text().splitlines()[0].removeprefix("$ ")
    assert subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True).stdout == "out\na b\n"


def test_failure_names_command_and_last_lines(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="exit code 3\nlast words"):
        process.run(["/bin/sh", "-c", "echo last words >&2; exit 3"])
    assert process.run(["/bin/sh", "-c", "exit 3"], check=False).returncode == 3
    with pytest.raises(RequirementMissing, match="program not found"):
        process.run([tmp_path / "no-such-program"])


def test_program_that_cannot_be_run(tmp_path: Path) -> None:
    """Neither a file that may not be executed, nor one that is no program, nor one whose interpreter is absent is a bug."""
    odd = tmp_path / "nvidia-smi"
    for content, mode, message in (
        (b"", 0o644, "Permission denied"),
        (b"\x7fELF of another CPU", 0o755, "Exec format error"),
        (b"#!/no/such/interpreter\n", 0o755, "program not found"),
    ):
        odd.write_bytes(content)
        odd.chmod(mode)
        with pytest.raises(RequirementMissing, match=message):
            process.run_within([odd], None)
    with pytest.raises(RequirementMissing, match="Permission denied"):
        process.run([tmp_path])  # a directory


def test_unreadable_directory_on_path(tmp_path: Path) -> None:
    """A directory on PATH without search permission: exec(3) reports EACCES for every program that it does not find."""
    script = "from sm120kit.core import process\nfrom sm120kit.core.errors import RequirementMissing\n"
    script += "try: process.run(['no-such-program'])\nexcept RequirementMissing as error: print(error.message)"
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o000)
    env = {**os.environ, "PATH": f"{closed}:{os.environ['PATH']}", "PYTHONPATH": process.own_python_path()}
    user = 65534 if os.getuid() == 0 else None  # root may search any directory
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, user=user, cwd="/")
    assert "cannot run no-such-program: Permission denied" in done.stdout, done.stderr


def test_variable_set_to_none_is_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM120KIT_TEST", "seen")
    assert process.run(["/bin/sh", "-c", "echo $SM120KIT_TEST"]).stdout == "seen\n"
    assert process.run(["/bin/sh", "-c", "echo $SM120KIT_TEST"], env={"SM120KIT_TEST": None}).stdout == "\n"


def test_run_lines_while_program_runs(tmp_path: Path) -> None:
    lines: list[str] = []

    def on_line(line: str) -> None:
        lines.append(line)
        (tmp_path / "go").touch()  # the program waits for it

    script = f"echo first; until [ -e {tmp_path}/go ]; do :; done; echo second >&2; exit 3"
    with pytest.raises(CommandFailed, match="exit code 3\nfirst\nsecond"):
        process.run_lines(["/bin/sh", "-c", script], on_line)
    assert lines == ["first", "second"]


def test_memory_does_not_grow_with_the_lines_of_a_program() -> None:
    script = "yes 'a line of a log of a server that runs for weeks' | head -n 200000"
    tracemalloc.start()
    process.run_lines(["/bin/sh", "-c", script], lambda line: None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_stop_event() -> None:
    assert process.run_within(["/bin/sh", "-c", "exit 3"], None).returncode == 3
    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()
    with pytest.raises(process.Stopped):
        process.run_within(["/bin/sh", "-c", "exec sleep 60"], None, stop)


def test_time_limit() -> None:
    assert process.run_within(["/bin/sh", "-c", "cat; exit 3"], 60).returncode == 3
    with pytest.raises(process.Stopped):
        process.run_within(["/bin/sh", "-c", "exec sleep 60"], 0.1)


def test_input_in_pieces_when_a_thousand_files_are_open() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1200:
        pytest.skip("this system permits fewer files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        assert process.run([sys.executable, "-c", "print(input())"], stdin=iter([b"one ", b"two"])).stdout == "one two\n"
        with pytest.raises(process.Stopped):
            process.run_within(["/bin/sh", "-c", "exec sleep 60"], 0.1, stdin=iter([bytes(2**20)]))
    finally:
        for file in opened:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGINT])
def test_tied_child_ends_with_parent(tmp_path: Path, by: signal.Signals) -> None:
    pid_file = tmp_path / "pid"
    program = f"""
import signal
from sm120kit.core import console, process, reporting
signal.signal(signal.SIGINT, signal.default_int_handler)  # where it is ignored, as in the background of a shell
process.run(['/bin/sh', '-c', 'echo $$ > {pid_file}; exec sleep 600'], tied=True)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], env={**os.environ}, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not (pid_file.exists() and pid_file.read_text().strip()):
        assert time.monotonic() < until
        time.sleep(0.01)
    child = psutil.Process(int(pid_file.read_text()))
    parent.send_signal(by)
    parent.wait()
    psutil.wait_procs([child], timeout=60)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_verbose_prints_programs_without_passwords(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["/bin/sh", "-c", "exit 0", "https://user:secret@host/x y"]
    process.run(argv, env={"TOKEN": "secret"}, cwd=tmp_path)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sm120kit.core.console.verbose", True)
    with reporting.use(console):
        process.run(argv, env={"TOKEN": "secret"}, cwd=tmp_path)
    assert capsys.readouterr().err == f"running cd {tmp_path} && /bin/sh -c 'exit 0' 'https://host/x y'\n"
