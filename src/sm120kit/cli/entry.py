"""Run a command and turn its result, errors and signals into an exit code and a message."""

import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from sm120kit.core import console, signals
from sm120kit.core.disk import unexpected
from sm120kit.core.errors import Sm120kitError, SystemRefused
from sm120kit.core.secrets import register_environment
from sm120kit.core.standard_streams import StdoutFailed, safe_streams

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
    register_environment(os.environ)
    _close_to_others()
    with safe_streams(console.written):
        try:
            signals.handle()
            with console.heartbeat():
                return _exit_code(command)
        except StdoutFailed as failure:
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
            error = unexpected(failure, f"set {TRACEBACK}=1 to print the traceback")
        except signals.Interrupted as stop:
            message = "interrupted" if stop.signal is signal.SIGINT else f"ended by {stop.signal.name}"
            console.error(message, "finished work is kept; builds and downloads resume with the same command")
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
