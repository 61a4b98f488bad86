"""Standard output and error whose failed writes are told apart from other failures."""

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class StdoutFailed(BaseException):
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
                raise StdoutFailed(error) from error
            return len(memoryview(data))  # type: ignore[arg-type]


class _StderrText(io.TextIOWrapper):
    """Standard error as text that can be shown: warnings and logs of libraries bypass :mod:`sm120kit.core.console`."""

    shown: Callable[[str], str]

    def write(self, text: str, /) -> int:
        super().write(self.shown(text))
        return len(text)


@contextmanager
def safe_streams(shown: Callable[[str], str]) -> Iterator[None]:
    """Replace standard output and error by streams whose failures are distinct from others, unless a caller replaced them.

    ``shown`` is what a terminal may show of a text on standard error.
    """
    before = sys.stdout, sys.stderr
    if sys.stdout is sys.__stdout__:
        sys.stdout = _stream(io.TextIOWrapper, sys.stdout)
        sys.stdout.buffer.raw.ends_command = True
    if sys.stderr is sys.__stderr__:
        sys.stderr = _stream(_StderrText, sys.stderr)
        sys.stderr.shown = shown
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
