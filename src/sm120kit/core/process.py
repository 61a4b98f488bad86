"""Run other programs: lists of arguments, never shell strings. The only module that imports subprocess.

Every program is a process group of its own, which is ended when this process is interrupted, so that Ctrl-C leaves no compiler
behind. With ``tied`` it is ended even when this process is killed, at the price of a slower start.
"""

import contextlib
import ctypes
import functools
import itertools
import os
import select
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from sm120kit.core import reporting
from sm120kit.core.disk import too_large
from sm120kit.core.errors import CommandFailed, RequirementMissing
from sm120kit.core.secrets import masked

Environment = Mapping[str, str | None]
"""Variables added to this process's environment; None removes one."""

LAST_LINES = 1000
"""Lines of a program's output that are kept for its error, while it prints without end."""


class Stopped(Exception):
    """A program was ended because another thread set its stop event, or at its time limit."""


@dataclass(frozen=True)
class Completed:
    """Exit code and output of a program. ``raw`` is stdout as bytes, for programs that print files."""

    argv: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str
    raw: bytes = field(default=b"", repr=False)


def own_python_path() -> str:
    """``PYTHONPATH`` with which another Python imports this package."""
    import sm120kit

    return os.pathsep.join(filter(None, [str(Path(sm120kit.__file__).parents[1]), os.environ.get("PYTHONPATH")]))


def find_program(name: str) -> Path | None:
    """The file of a program on ``PATH``, or of a path with a ``/``; None if there is none that can be run."""
    found = shutil.which(name)
    return Path(found) if found else None


def shell_line(argv: Sequence[str | Path], env: Environment | None = None, cwd: Path | None = None) -> str:
    """A command as one line that can be pasted into a shell."""
    words = [f"{name}={shlex.quote(value)}" for name, value in sorted((env or {}).items()) if value is not None]
    words += [shlex.quote(str(argument)) for argument in argv]
    line = " ".join(words)
    return f"cd {shlex.quote(str(cwd))} && {line}" if cwd else line


def run(
    argv: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Environment | None = None,
    stdin: bytes | Iterable[bytes] | None = None,
    logfile: Path | None = None,
    check: bool = True,
    tied: bool = False,
) -> Completed:
    """Run a program to its end and return its output.

    A ``stdin`` in pieces is written piece by piece, for input that should not be in memory as a whole; the program must not
    print more than a pipe holds (64 KiB) before it has read all of it. With ``logfile``, the command line and all output are
    appended to that file, without secrets.

    Raises:
        RequirementMissing: the program does not exist or cannot be run.
        CommandFailed: its exit code is not 0 and ``check`` is true.
    """
    with _child(argv, cwd=cwd, env=env, stdin=stdin is not None, tied=tied) as child:
        if stdin is not None and not isinstance(stdin, bytes):
            _feed(child, stdin)
            stdin = None
        out, err = child.communicate(stdin)
    completed = _completed(argv, child, out, err)
    if logfile is not None:
        logfile.parent.mkdir(parents=True, exist_ok=True)
        with logfile.open("a") as log:
            output = f"{completed.stdout}{completed.stderr}"
            log.write(masked(f"$ {shell_line(argv, env, cwd)}\n{output}\n[exit {child.returncode}]\n"))
    if check:
        _require_success(completed, f"log: {logfile}" if logfile else f"command: {shell_line(argv, env, cwd)}")
    return completed


def run_within(
    argv: Sequence[str | Path],
    seconds: float | None,
    stop: threading.Event | None = None,
    *,
    stdin: Iterable[bytes] | None = None,
    env: Environment | None = None,
    output: IO[bytes] | None = None,
    check: bool = False,
) -> Completed:
    """Run a program to its end, tied to this process, and return its output; with ``output`` all of it goes to that file.

    Ctrl-C reaches only the main thread: a program that another thread waits for is ended by ``stop``.

    Raises:
        RequirementMissing: the program does not exist or cannot be run.
        CommandFailed: its exit code is not 0 and ``check`` is true.
        Stopped: ``stop`` was set; or for ``seconds``, it took no piece of its input, or did not end after it. It was ended.
    """
    with _child(argv, env=env, stdin=stdin is not None, tied=True, output=output) as child:
        if stdin is not None:
            _feed(child, stdin, seconds)
        end = time.monotonic() + (float("inf") if seconds is None else seconds)
        while True:
            left = max(0.0, end - time.monotonic())
            try:
                out, err = child.communicate(timeout=min(left, 0.2) if stop else None if seconds is None else left)
                break
            except subprocess.TimeoutExpired:
                if (stop and stop.is_set()) or time.monotonic() >= end:
                    raise Stopped from None
    completed = _completed(argv, child, out or b"", err)
    if check:
        _require_success(completed, f"command: {shell_line(argv, env)}")
    return completed


def run_lines(
    argv: Sequence[str | Path], on_line: Callable[[str], None], *, env: Environment | None = None, tied: bool = False
) -> None:
    """Run a program to its end and pass each line of its output, stderr included, to ``on_line`` as soon as it is printed.

    Raises:
        RequirementMissing: the program does not exist or cannot be run.
        CommandFailed: its exit code is not 0.
    """
    lines: deque[str] = deque(maxlen=LAST_LINES)
    with _child(argv, env=env, stderr=subprocess.STDOUT, tied=tied) as child:
        assert child.stdout is not None
        for raw in child.stdout:
            line = raw.decode(errors="replace").rstrip("\n")
            lines.append(line)
            on_line(line)
        child.wait()
    _require_success(_completed(argv, child, "\n".join(lines).encode(), b""), f"command: {shell_line(argv, env)}")


def run_attached(argv: Sequence[str | Path], *, env: Environment | None = None) -> int:
    """Run a program to its end with the input and output of this process, and return its exit code: 128 + N after signal N.

    Raises:
        RequirementMissing: the program does not exist or cannot be run.
    """
    child = _spawn(argv, env=env, stdin=0, stdout=1, stderr=2, tied=True)
    try:
        code = child.wait()
    except BaseException:
        _end_group(child)
        raise
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def background(
    argv: Sequence[str | Path], log: Path, *, env: Environment | None = None, patience: float = 5
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program while the block runs, with its output appended to ``log``.

    Its process group ends with the block: SIGTERM, and SIGKILL after ``patience`` seconds, also for processes that it left
    behind. When this process is killed, the program itself gets SIGTERM.

    Raises:
        RequirementMissing: the program does not exist or cannot be run.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        child = _spawn(argv, env=env, stdout=file, stderr=subprocess.STDOUT, tied=True)
    try:
        yield child
    finally:
        if child.poll() is None:
            _end_group(child, patience)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


@contextlib.contextmanager
def _child(
    argv: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Environment | None = None,
    stdin: bool = False,
    stderr: int = subprocess.PIPE,
    tied: bool = False,
    output: IO[bytes] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """A program whose output is read in the block; an exception in the block ends it."""
    given = subprocess.PIPE if stdin else subprocess.DEVNULL
    stdout, stderr = (output, subprocess.STDOUT) if output else (subprocess.PIPE, stderr)
    child = _spawn(argv, cwd=cwd, env=env, stdin=given, stdout=stdout, stderr=stderr, tied=tied)
    try:
        with reporting.working():
            yield child
    except BaseException:
        _end_group(child)
        raise


def _spawn(
    argv: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Environment | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: int | IO[bytes] = subprocess.PIPE,
    stderr: int = subprocess.PIPE,
    tied: bool = False,
) -> subprocess.Popen[bytes]:
    # Its environment may hold passwords and is not printed.
    reporting.detail(f"running {shell_line(argv, cwd=cwd)}")
    variables = {name: value for name, value in {**os.environ, **(env or {})}.items() if value is not None}
    try:
        return subprocess.Popen(
            [str(argument) for argument in argv],
            cwd=cwd,
            env=variables,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=functools.partial(_end_with_parent, os.getpid()) if tied else None,
        )
    except FileNotFoundError as error:
        if cwd is not None and not cwd.is_dir():
            raise
        raise RequirementMissing(f"program not found: {argv[0]}", "install it or put it on PATH") from error
    except OSError as error:
        if cwd is not None and not cwd.is_dir():
            raise
        # EACCES without such a program in any readable directory; ENOEXEC: neither a binary for this CPU nor a script.
        raise RequirementMissing(
            f"cannot run {argv[0]}: {error.strerror}",
            "check the file's type and permissions, and those of the directories on PATH",
        ) from error


_GATHERED_BYTES = 2**16


def _feed(child: subprocess.Popen[bytes], pieces: Iterable[bytes], seconds: float | None = None) -> None:
    """Write ``pieces`` to a child; a child that ends early is judged by its exit code, not by the broken pipe."""
    assert child.stdin is not None
    pipe, ready = child.stdin.fileno(), select.poll()
    os.set_blocking(pipe, False)
    ready.register(pipe, select.POLLOUT)
    with contextlib.suppress(BrokenPipeError):
        gathered = bytearray()  # a write for each of 50,000 pieces takes seconds
        for piece in itertools.chain(pieces, (None,)):
            gathered += piece or b""
            if piece is None or len(gathered) >= _GATHERED_BYTES:
                rest = memoryview(bytes(gathered))
                while rest:
                    if not ready.poll(None if seconds is None else seconds * 1000):
                        raise Stopped
                    rest = rest[os.write(pipe, rest) :]
                gathered.clear()


def _completed(argv: Sequence[str | Path], child: subprocess.Popen[bytes], out: bytes, err: bytes | None) -> Completed:
    stderr = (err or b"").decode(errors="replace")
    return Completed(tuple(map(str, argv)), child.returncode, out.decode(errors="replace"), stderr, out)


def _require_success(completed: Completed, hint: str) -> None:
    if completed.returncode == -signal.SIGXFSZ:
        raise too_large(f"a file that {completed.argv[0]} writes")
    if completed.returncode != 0:
        tail = "\n".join((completed.stderr or completed.stdout).strip().splitlines()[-8:])
        raise CommandFailed(f"{completed.argv[0]} failed with exit code {completed.returncode}\n{tail}", hint)


_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def _end_with_parent(parent: int) -> None:
    """In the child: request SIGTERM when the parent dies, even by SIGKILL, so that no compiler outlives its build."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it has died already
        os.kill(os.getpid(), signal.SIGTERM)


def _end_group(child: subprocess.Popen[bytes], patience: float = 5) -> None:
    """End a child and everything it started: SIGTERM, then SIGKILL after ``patience`` seconds."""
    for sig, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 5)):
        try:
            os.killpg(child.pid, sig)
        except ProcessLookupError:
            break
        try:
            child.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            continue
        break
