"""Logs to explain: files and standard input."""

from __future__ import annotations

import io
import os
import shlex
import stat
import sys
from pathlib import Path
from typing import BinaryIO

from sm120kit.core.errors import BadInput
from sm120kit.hosts.log_rules import Explanation, explain

COMPRESSED = {
    b"\x1f\x8b": "zcat",
    b"\x28\xb5\x2f\xfd": "zstdcat",
    b"\xfd7zX": "xzcat",
    b"BZh": "bzcat",
    b"PK\x03\x04": "unzip -p",
}
"""First bytes of gzip, zstd, xz, bzip2 and zip files, and the program that prints their content."""


def of_file(path: Path) -> Explanation:
    """Explain a file, or standard input for ``-``.

    Raises:
        BadInput: the file cannot be read, is compressed, is a FIFO, or a device such as ``/dev/zero``, which does not end.
    """
    name, file = ("standard input", "FILE") if str(path) == "-" else (str(path), shlex.quote(str(path)))
    try:
        with _opened(path) as stream:
            start = stream.peek(4) if isinstance(stream, io.BufferedReader) else b""
            for program in (program for magic, program in COMPRESSED.items() if start.startswith(magic)):
                raise BadInput(f"{name} is compressed", f"{program} {file} | sm120kit explain -")
            return explain(stream)
    except OSError as error:
        reason = error.strerror or str(error)
        raise BadInput(f"cannot read {name}: {reason}", "name a log file, or - for standard input") from error


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
