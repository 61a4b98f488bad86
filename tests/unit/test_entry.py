"""Exit codes and messages for signals, operating system errors, and standard output that cannot be written."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sm120kit.cli import entry
from sm120kit.core.disk import unexpected
from sm120kit.core.errors import BadInput, ResourceUnavailable, Sm120kitError, SystemRefused

PROGRAM = """
import sys, tempfile, time
from sm120kit.cli import entry

def command():
    with tempfile.TemporaryDirectory(dir=sys.argv[1]):
        print("ready", flush=True)
        time.sleep(30)

sys.exit(entry.run(command))
"""


def start(directory: Path, ignored: int | None = None) -> subprocess.Popen[str]:
    """Start a command with a temporary directory in ``directory`` and with the signal ``ignored`` ignored."""
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: [
            signal.signal(kind, signal.SIG_IGN if kind == ignored else signal.SIG_DFL)
            for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        ],
    )
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    return child


def test_interrupted_import_prints_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text('import time\nprint("importing", flush=True)\ntime.sleep(30)\n')
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    argv = [sys.executable, "-m", "sm120kit", "--version"]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    assert child.stdout is not None and child.stdout.readline() == "importing\n"
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (-signal.SIGINT, "")


@pytest.mark.parametrize(
    ("kind", "message"), [("SIGINT", "interrupted"), ("SIGTERM", "ended by SIGTERM"), ("SIGHUP", "SIGHUP")]
)
def test_signal_removes_temporary_files(kind: str, message: str, tmp_path: Path) -> None:
    child = start(tmp_path)
    number = signal.Signals[kind]
    child.send_signal(number)
    child.send_signal(number)  # as timeout(1) does
    _, err = child.communicate(timeout=60)
    assert child.returncode == 128 + number
    assert message in err and "hint:" in err and "Traceback" not in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGHUP])
def test_signal_ignored_at_start_stays_ignored(kind: signal.Signals, tmp_path: Path) -> None:
    child = start(tmp_path, kind)
    child.send_signal(kind)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(timeout=0.5)
    child.terminate()
    assert child.wait(timeout=60) == 128 + signal.SIGTERM


SHELL = {
    "a full device": ("> /dev/full", 42, "cannot write to standard output: No space left on device"),
    "closed": (">&-", 42, "cannot write to standard output: Bad file descriptor"),
    "all closed": (">&- 2>&- <&-", 42, ""),
    "a reader that ended": ("|", 141, ""),
    "errors to a full device": ("2> /dev/full > /dev/null", 0, ""),
}


@pytest.mark.parametrize("case", SHELL)
@pytest.mark.parametrize("command", ["--help", "recipe list"])
def test_standard_output_unwritable(case: str, command: str, tmp_path: Path) -> None:
    redirection, code, message = SHELL[case]
    program = "import time; from pathlib import Path\nfrom sm120kit.cli import main\n"
    program += "while not Path('go').exists(): time.sleep(0.01)\nmain()"  # with a reader: wait until it has ended
    run = f'"$0" -c "$1" {command} {"" if "2>" in redirection else "2> errors"}'
    line = f"({run} {redirection}; echo $? > code)"
    if "|" in redirection:
        line = f"({run}; echo $? > code) | (exec < /dev/null; touch go)"
    else:
        (tmp_path / "go").touch()
    subprocess.run(["/bin/sh", "-c", line, sys.executable, program], cwd=tmp_path, check=True, timeout=60)
    errors = (tmp_path / "errors").read_text() if (tmp_path / "errors").exists() else ""
    assert int((tmp_path / "code").read_text()) == code, errors
    assert message in errors and bool(errors) == bool(message) and "Traceback" not in errors


def test_output_before_a_failure_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        print("a line")
        raise SystemRefused("a failure", "a remedy")

    assert entry.run(command) == SystemRefused.exit_code
    out, err = capfd.readouterr()
    assert out == "a line\n" and err == "error: a failure\nhint: a remedy\n"


@pytest.mark.parametrize(
    ("failure", "kind", "message"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/a/file"), SystemRefused, "/a/file: Permission denied"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "a" * 300), BadInput, "File name too long"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/a/file"),
            ResourceUnavailable,
            "no space left on the file system of /a/file",
        ),
        (OSError(errno.EXDEV, "Invalid cross-device link", "/a", None, "/b"), SystemRefused, "/a, /b: Invalid cross-device"),
        (ConnectionResetError(), SystemRefused, "ConnectionResetError"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), BadInput, "byte 0xff"),
        (RecursionError("maximum recursion depth exceeded"), BadInput, "nested too deeply"),
    ],
)
def test_operating_system_errors(failure: OSError, kind: type[Sm120kitError], message: str) -> None:
    error = unexpected(failure, "trace")
    assert type(error) is kind and message in error.message and error.hint


@pytest.mark.parametrize("locale", [{"LC_ALL": "C"}, {"LC_ALL": "POSIX", "LANG": "de_DE"}])
@pytest.mark.parametrize("command", [["recipe", "list"], ["config", "list"], ["recipe", "check", "ä"]])
def test_locale_without_utf8(locale: dict[str, str], command: list[str]) -> None:
    """Tables have characters that ASCII lacks. Python's own remedies for such locales are off."""
    program = [sys.executable, "-m", "sm120kit", *command]
    off = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    usual, odd = (
        subprocess.run(program, capture_output=True, env={**os.environ, **more})
        for more in ({"LC_ALL": "C.UTF-8"}, locale | off)
    )
    assert (odd.returncode, odd.stdout, odd.stderr) == (usual.returncode, usual.stdout, usual.stderr)
    assert odd.stdout or "ä".encode() in odd.stderr


UNSEEN = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\u2066\udc9b\x08\u2028"
"""Control sequences in one and two bytes, changes of direction, a byte that is not UTF-8, and a line break of Unicode."""


def shown(*command: str) -> str:
    """Standard error of the program in a process of its own, with a terminal's view of bytes that are not UTF-8."""
    done = subprocess.run([sys.executable, *command], capture_output=True)
    assert not done.stdout
    return done.stderr.decode()


@pytest.mark.parametrize(
    "command",
    [
        ["build", f"a{UNSEEN}b"],
        ["build", f"--a{UNSEEN}b"],
        [f"a{UNSEEN}b"],
        ["build", "flashinfer", "--memory", f"1{UNSEEN}b"],
        ["bench", "run", f"http://[{UNSEEN}"],
        ["explain", f"a{UNSEEN}b"],
    ],
)
def test_arguments_cannot_control_the_terminal(command: list[str]) -> None:
    text = shown("-m", "sm120kit", *command)
    assert "error: " in text and "hint: " in text and all(character in "\n" or character.isprintable() for character in text)


def test_exceptions_cannot_control_the_terminal() -> None:
    bug = "import sys; from sm120kit.cli import entry; sys.excepthook = entry.report_bug; raise TypeError(sys.argv[1])"
    warning = "import sys, warnings; from sm120kit.cli import entry; entry.run(lambda: warnings.warn(sys.argv[1]))"
    for program in (bug, warning):
        text = shown("-c", program, "a\x1b]0;owned\x07\x9b\u202e\udc9b\x08\u2028b http://user:hunter2xyz@host/")
        assert "http://" in text and "hunter2xyz" not in text
        assert all(character in "\n" or character.isprintable() for character in text)


@pytest.mark.parametrize("command", ["frobnicate", "biuld", "build", "build --frob", "build x --jobs 0", "bench run"])
def test_wrong_usage_has_the_form_of_every_error(command: str) -> None:
    done = subprocess.run([sys.executable, "-m", "sm120kit", *command.split()], capture_output=True, text=True)
    error, hint, *_ = done.stderr.splitlines()
    assert done.returncode == 2 and error.startswith("error: ") and hint.startswith("hint: ")


@pytest.mark.parametrize("command", ["--jobs 2 build vllm", "patch --json status"])
def test_an_option_before_the_name_of_a_command_is_told_its_place(command: str) -> None:
    done = subprocess.run([sys.executable, "-m", "sm120kit", *command.split()], capture_output=True, text=True)
    assert done.returncode == 2 and "follow the name of a command" in done.stderr


@pytest.mark.parametrize(
    ("command", "kind", "code"),
    [
        ("config show nothing --json", "not-found", 10),
        ("config show nothing --json --frob", "usage", 2),
        ("bench show /dev/null --json", "bad-input", 11),
        ("tiles nothing --json", "not-found", 10),
    ],
)
def test_json_has_the_kind_of_an_error(command: str, kind: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-m", "sm120kit", *command.split()], capture_output=True, text=True)
    error = json.loads(done.stdout)["error"]
    assert done.returncode == error["exit_code"] == code and error["kind"] == kind
    assert done.stderr == f"error: {error['message']}\nhint: {error['hint']}\n"


def test_bug_keeps_its_traceback() -> None:
    def command() -> None:
        raise TypeError("a bug")

    with pytest.raises(TypeError):
        entry.run(command)


def test_traceback_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def command() -> None:
        raise ConnectionResetError

    assert entry.run(command) == SystemRefused.exit_code
    monkeypatch.setenv("SM120KIT_TRACEBACK", "1")
    with pytest.raises(ConnectionResetError):
        entry.run(command)


def test_current_directory_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(FileNotFoundError) as refused:
        Path.cwd()
    assert "current directory no longer exists" in unexpected(refused.value, "trace").message
