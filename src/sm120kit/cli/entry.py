"""Run a command and turn its result, errors and signals into an exit code and a message."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from sm120kit.core import console, signals
from sm120kit.core.errors import BadInput, Sm120kitError, SystemRefused
from sm120kit.core.secrets import register_environment

TRACEBACK = "SM120KIT_TRACEBACK"
"""The environment variable that keeps the traceback of an operating system error."""


def print_usage_error(error: Any) -> None:
    """Print an error of typer's parser, or the help of a group that was called without a command."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return
    message, _, suggestion = error.format_message().removesuffix(".").partition(". Did you mean ")
    path = error.ctx.command_path if error.ctx else "sm120kit COMMAND"
    help_ = f"`{path} --help` lists what it accepts{_known_names(error)}"
    if type(error).__name__ == "NoSuchOption" and hasattr(error.ctx.command, "commands"):
        help_ = f"options follow the name of a command; {help_}"
    hint = f"did you mean {suggestion}" if suggestion else help_
    console.failure("usage", 2, message[:1].lower() + message[1:], hint)


def _known_names(error: Any) -> str:
    """The names that a missing argument can be, where the shell completes them."""
    if type(error).__name__ != "MissingParameter" or error.param is None:
        return ""
    names = [item.value for item in error.param.shell_complete(error.ctx, "")]
    return "\n  ".join(["; names:", *names]) if names else ""


def report_bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The hook for an exception that is a bug: its traceback, in which texts from outside cannot control the terminal."""
    if sys.stderr is not None:
        print(console.printable("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)


def require_utf8() -> None:
    """Start the program again in Python's UTF-8 mode where the locale has another encoding, such as ASCII with ``LC_ALL=C``.

    Files, names and arguments are UTF-8. Python 3.15 makes this mode the default.
    """
    if sys.getfilesystemencoding() != "utf-8" and not sys.flags.utf8_mode and sys.executable:
        os.environ["PYTHONUTF8"] = "1"  # of Python programs that this one runs, too
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def run(command: Callable[[], object]) -> int:
    """Run ``command`` and return its exit code: 128 + n after signal n, the error's own code, else the code it exits with.

    When the reader of standard output has ended, as ``head`` does, the command ends silently, as if by SIGPIPE.
    """
    signals.handle()
    register_environment(os.environ)
    _close_to_others()
    with _streams():
        try:
            with console.heartbeat():
                return _exit_code(command)
        except _StdoutFailed as failure:
            if failure.reason.errno == errno.EPIPE:
                return 128 + signal.SIGPIPE
            error: Sm120kitError = SystemRefused(
                f"cannot write to standard output: {failure.reason.strerror}", "the printed output is incomplete"
            )
        except Sm120kitError as failure:
            error = failure
        except (OSError, UnicodeError, RecursionError) as failure:
            if os.environ.get(TRACEBACK):
                raise
            error = explained(failure)
        except signals.Interrupted as stop:
            message = "interrupted" if stop.signal is signal.SIGINT else f"ended by {stop.signal.name}"
            console.error(message, "finished work is kept; run the same command again to resume")
            return 128 + stop.signal
        console.failure(error.kind, error.exit_code, error.message, error.hint)
        return error.exit_code


def _close_to_others() -> None:
    """Create no file or directory that everybody can write, whatever the umask: such files are run and delivered."""
    mask = os.umask(0o022)
    os.umask(mask if mask & 0o002 else mask | 0o022)


def _exit_code(command: Callable[[], object]) -> int:
    try:
        command()
    except SystemExit as exit_:
        if exit_.code is not None and not isinstance(exit_.code, int):
            raise
        return exit_.code or 0
    finally:
        sys.stdout.flush()
    return 0


def explained(failure: OSError | UnicodeError | RecursionError) -> Sm120kitError:
    """The error for a failure of the operating system or of Python that no other code has handled."""
    trace = f"set {TRACEBACK}=1 to print the traceback"
    if isinstance(failure, RecursionError):
        return BadInput("input is nested too deeply", trace)
    if isinstance(failure, UnicodeError):
        return BadInput(
            f"text cannot be converted: {failure}", f"use a UTF-8 locale (LC_ALL=C.UTF-8) and UTF-8 file names; {trace}"
        )
    reason = failure.strerror or str(failure) or type(failure).__name__
    files = ", ".join(_name(path) for path in (failure.filename, failure.filename2) if path is not None)
    message = f"{files}: {reason}" if files else reason
    if failure.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        from sm120kit.core.disk import disk_error

        if full := disk_error(failure, Path(files or ".")):
            return full
    if isinstance(failure, FileNotFoundError) and not files and not _has_current_directory():
        return SystemRefused("the current directory no longer exists", "change to another directory")
    if isinstance(failure, PermissionError):
        return SystemRefused(message, f"check its owner and permissions; {trace}")
    return SystemRefused(message, trace)


def _name(path: str | bytes | int) -> str:
    return f"file descriptor {path}" if isinstance(path, int) else os.fsdecode(path)


def _has_current_directory() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return False
    return True


class _StdoutFailed(BaseException):
    """A write to standard output failed. Not an OSError: typer and rich turn a broken pipe into exit code 1."""

    def __init__(self, reason: OSError) -> None:
        super().__init__(str(reason))
        self.reason = reason


class _Stream(io.FileIO):
    """A standard stream. Failed writes are dropped; the first one of standard output ends the command."""

    ends_command = False

    def write(self, data: object, /) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            ends, self.ends_command = self.ends_command, False
            if ends:
                raise _StdoutFailed(error) from error
            return len(memoryview(data))  # type: ignore[arg-type]


class _StderrText(io.TextIOWrapper):
    """Standard error as text that can be shown: warnings and logs of libraries bypass :mod:`sm120kit.core.console`."""

    def write(self, text: str, /) -> int:
        super().write(console.written(text))
        return len(text)


@contextmanager
def _streams() -> Iterator[None]:
    """Replace standard output and error by streams whose failures are distinct from others, unless a caller replaced them."""
    before = sys.stdout, sys.stderr
    if sys.stdout is sys.__stdout__:
        sys.stdout = _stream(io.TextIOWrapper, sys.stdout)
        sys.stdout.buffer.raw.ends_command = True
    if sys.stderr is sys.__stderr__:
        sys.stderr = _stream(_StderrText, sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _stream(kind: type[io.TextIOWrapper], original: TextIO | None) -> Any:
    """Open a stream anew. What its encoding lacks, such as bytes of file names that are not UTF-8, is printed as escapes."""
    if original is None:  # closed: every write fails, as to a file that is open for reading only
        return kind(io.BufferedWriter(_Stream(os.open(os.devnull, os.O_RDONLY), "w")), "utf-8")
    original.flush()
    assert isinstance(original, io.TextIOWrapper)
    return kind(
        io.BufferedWriter(_Stream(original.fileno(), "w", closefd=False)),
        original.encoding,
        "backslashreplace",
        line_buffering=original.line_buffering,
        write_through=original.write_through,
    )
