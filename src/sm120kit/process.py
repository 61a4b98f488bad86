"""The one door to other programs: lists, never shell strings; a log holds a line one can paste."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sm120kit.errors import CommandFailed, ToolchainMissing


class Stopped(Exception):
    """A program was ended because another thread said so."""


@dataclass(frozen=True)
class Completed:
    """What a program left behind. ``raw`` is stdout as bytes, for programs that print files."""

    argv: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str
    raw: bytes = field(default=b"", repr=False)


def paste_line(argv: Sequence[str | Path], env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """The command as one line that a shell takes."""
    words = [f"{name}={shlex.quote(value)}" for name, value in sorted((env or {}).items())]
    words += [shlex.quote(str(word)) for word in argv]
    line = " ".join(words)
    return f"cd {shlex.quote(str(cwd))} && {line}" if cwd else line


def run(
    argv: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    drop: Iterable[str] = (),
    stdin: bytes | Iterable[bytes] | None = None,
    logfile: Path | None = None,
    check: bool = True,
    tied: bool = False,
    on_line: Callable[[str], None] | None = None,
    stop: threading.Event | None = None,
) -> Completed:
    """Run a program to its end and return what it said.

    ``env`` is added to this process's environment, from which the variables in ``drop`` are left out. A ``stdin`` in pieces is
    handed over piece by piece, for input that should not lie in memory whole; the program must not say more than a pipe holds
    (64 KiB) before it has read it. With ``logfile``, the command line and all output are appended to it;
    ``on_line`` sees each line of output while it runs (stderr then joins stdout). The program is a process group of its own,
    which is ended when this process is interrupted, so that Ctrl-C leaves no compiler behind; ``tied`` ends it even when this
    process is killed, at the price of a slower start. Ctrl-C reaches the main thread only: ``stop`` ends a program that another
    thread waits for (without ``on_line``).

    Raises:
        ToolchainMissing: there is no such program.
        CommandFailed: it failed and ``check`` is true.
        Stopped: ``stop`` was set; the program was ended.
    """
    words = [str(word) for word in argv]
    merged = on_line is not None
    dropped = set(drop)
    surroundings = {name: value for name, value in os.environ.items() if name not in dropped} | dict(env or {})
    try:
        child = subprocess.Popen(
            words,
            cwd=cwd,
            env=surroundings,
            stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merged else subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_end_with_parent if tied else None,
        )
    except FileNotFoundError as error:
        if cwd is not None and not cwd.is_dir():
            raise
        raise ToolchainMissing(f"program not found: {words[0]}", "install it or put it on PATH") from error
    raw_out = b""
    try:
        if merged:
            assert child.stdout is not None and on_line is not None
            lines = []
            for raw in child.stdout:
                line = raw.decode(errors="replace").rstrip("\n")
                lines.append(line)
                on_line(line)
            child.wait()
            out, err = "\n".join(lines), ""
        else:
            if stdin is not None and not isinstance(stdin, bytes):
                _feed(child, stdin)
                stdin = None
            raw_out, raw_err = _outputs(child, stdin, stop)
            out, err = raw_out.decode(errors="replace"), raw_err.decode(errors="replace")
    except BaseException:
        _end_group(child)
        raise
    if logfile is not None:
        logfile.parent.mkdir(parents=True, exist_ok=True)
        with logfile.open("a") as log:
            log.write(f"$ {paste_line(words, env, cwd)}\n{out}{err}\n[exit {child.returncode}]\n")
    done = Completed(tuple(words), child.returncode, out, err, raw_out)
    if check and child.returncode != 0:
        tail = "\n".join((err or out).strip().splitlines()[-8:])
        raise CommandFailed(
            f"{words[0]} failed with exit code {child.returncode}\n{tail}",
            f"log: {logfile}" if logfile else f"command: {paste_line(words, env, cwd)}",
        )
    return done


@contextlib.contextmanager
def started(
    argv: Sequence[str | Path], log: Path, *, env: Mapping[str, str] | None = None, patience: float = 5
) -> Iterator[subprocess.Popen[bytes]]:
    """A program that runs beside this one while the block does, with all it says appended to ``log``.

    It is a process group of its own, which is ended with the block: SIGTERM, and SIGKILL after ``patience`` seconds. Whatever
    it started and left behind in its group is ended too. When this process is killed, the program itself gets SIGTERM.

    Raises:
        ToolchainMissing: there is no such program.
    """
    words = [str(word) for word in argv]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        try:
            child = subprocess.Popen(
                words,
                env=os.environ | dict(env or {}),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        except FileNotFoundError as error:
            raise ToolchainMissing(f"program not found: {words[0]}", "install it or put it on PATH") from error
    try:
        yield child
    finally:
        if child.poll() is None:
            _end_group(child, patience)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[threading.Event]:
    """An event for ``run``'s ``stop`` that is set when the time is up. Not even a program that cannot be killed holds it."""
    stop = threading.Event()
    timer = threading.Timer(seconds, stop.set)
    timer.start()
    try:
        yield stop
    finally:
        timer.cancel()


def _outputs(child: subprocess.Popen[bytes], stdin: bytes | None, stop: threading.Event | None) -> tuple[bytes, bytes]:
    """What a child says until it ends, or until ``stop``."""
    while True:
        try:
            return child.communicate(stdin, timeout=None if stop is None else 0.2)
        except subprocess.TimeoutExpired:
            stdin = None  # handed over the first time
            if stop is not None and stop.is_set():
                raise Stopped from None


def _feed(child: subprocess.Popen[bytes], pieces: Iterable[bytes]) -> None:
    """Hand ``pieces`` to a child; one that ends early is judged by its exit code, not by the broken pipe."""
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        for piece in pieces:
            child.stdin.write(piece)
        child.stdin.flush()


_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def _end_with_parent() -> None:
    """In the child: ask for SIGTERM when this process dies, even by SIGKILL, so that no compiler outlives its build."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end_group(child: subprocess.Popen[bytes], patience: float = 5) -> None:
    """End a child and everything it started: politely, then for good."""
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
