"""Logs to explain: files and standard input."""

from __future__ import annotations

import errno
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
    try:
        if str(path) == "-":
            if sys.stdin is None:
                raise OSError(errno.EBADF, "standard input is closed")
            return _explained(path, sys.stdin.buffer)
        if path.is_fifo() and not str(path).startswith(("/dev/fd/", "/proc/")):
            raise OSError(errno.EINVAL, "is a FIFO, whose writer may never come")
        with path.open("rb") as stream:
            if stat.S_ISCHR(os.fstat(stream.fileno()).st_mode) and not stream.isatty():
                raise OSError(errno.EINVAL, "is a device")
            return _explained(path, stream)
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}", "name a log file, or - for standard input") from error


def _explained(path: Path, stream: BinaryIO) -> Explanation:
    start = stream.peek(4) if isinstance(stream, io.BufferedReader) else b""
    for magic, program in COMPRESSED.items():
        if start.startswith(magic):
            name, file = ("standard input", "FILE") if str(path) == "-" else (path, shlex.quote(str(path)))
            raise BadInput(f"{name} is compressed", f"{program} {file} | sm120kit explain -")
    return explain(stream)
