"""Logs to explain: files and standard input."""

import codecs
import io
import os
import shlex
import stat
import sys
from pathlib import Path
from typing import BinaryIO

from sm120kit.core.errors import BadInput
from sm120kit.hosts.log_rules import Explanation, explain
from sm120kit.hosts.log_rules._scan import BLOCK_BYTES, MAX_BLOCKS

_CONTROL = bytes({*range(1, 32), 127} - {*b"\a\b\t\n\v\f\r\x1b"})
"""Control characters that no log has. Crashed hosts leave zeros in logs."""


def of_file(path: Path) -> Explanation:
    """Explain a file, or standard input for ``-``.

    Raises:
        BadInput: the file cannot be read, is no text, is too large, a FIFO, or a device, which does not end.
    """
    name, file = ("standard input", "FILE") if str(path) == "-" else (str(path), shlex.quote(str(path)))
    try:
        with _opened(path) as stream:
            start = stream.peek(4096) if isinstance(stream, io.BufferedReader) else b""
            if _is_binary(start):
                hint = f"name a log; pipe a compressed one: zcat {file} | sm120kit explain -, or zstdcat, xzcat, unzip -p"
                raise BadInput(f"{name} is no text", hint)
            explanation = explain(stream)
            if stream.read(1):
                hint = f"name a part of it: tail -c 500M {file} | sm120kit explain -"
                raise BadInput(f"{name} has more than {MAX_BLOCKS * BLOCK_BYTES >> 30} GiB", hint)
            return explanation
    except OSError as error:
        reason = error.strerror or str(error)
        raise BadInput(f"cannot read {name}: {reason}", "name a log file, or - for standard input") from error


def _is_binary(start: bytes) -> bool:
    """Whether more than 5 % of the first bytes are control characters."""
    text = start.replace(b"\0", b"")
    marked = start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return not marked and len(text.translate(None, _CONTROL)) < 0.95 * len(text)


def _opened(path: Path) -> BinaryIO:
    if str(path) == "-":
        if sys.stdin is None:
            raise OSError("standard input is closed")
        return sys.stdin.buffer
    if path.is_fifo() and not str(path).startswith(("/dev/fd/", "/proc/")):
        raise OSError("is a FIFO, whose writer may never come")
    stream = path.open("rb")
    if stat.S_ISCHR(os.fstat(stream.fileno()).st_mode) and not stream.isatty():
        raise OSError("is a device")
    return stream
