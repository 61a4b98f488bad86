"""Logs to explain: files, standard input, containers and the kernel's log, complete or followed."""

from __future__ import annotations

import errno
import io
import os
import shlex
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from sm120kit.core import process
from sm120kit.core.errors import BadInput, RequirementMissing
from sm120kit.hosts.log_rules import BLOCK_BYTES, LogScan

POLL_SECONDS = 0.5
COMPRESSED = {
    b"\x1f\x8b": "zcat",
    b"\x28\xb5\x2f\xfd": "zstdcat",
    b"\xfd7zX": "xzcat",
    b"BZh": "bzcat",
    b"PK\x03\x04": "unzip -p",
}
"""First bytes of gzip, zstd, xz, bzip2 and zip files, and the program that prints their content."""
Changed = Callable[[], None]
"""Called after each part of a log, and while it does not grow."""


def read_file(path: Path, scan: LogScan, changed: Changed, *, follow: bool = False) -> None:
    """Match a file, or standard input for ``-``; with ``follow`` until the program is interrupted.

    Raises:
        BadInput: the file cannot be read, is compressed, is a FIFO, or a device such as ``/dev/zero``, which does not end.
    """
    try:
        if str(path) == "-":
            if sys.stdin is None:
                raise OSError(errno.EBADF, "standard input is closed")
            _require_plain(path, sys.stdin.buffer)
            read_stream(sys.stdin.buffer, scan, changed, growing=lambda: False)
        else:
            if path.is_fifo() and not str(path).startswith(("/dev/fd/", "/proc/")):
                raise OSError(errno.EINVAL, "is a FIFO, whose writer may never come")
            with path.open("rb") as stream:
                if stat.S_ISCHR(os.fstat(stream.fileno()).st_mode) and not stream.isatty():
                    raise OSError(errno.EINVAL, "is a device")
                _require_plain(path, stream)
                read_stream(stream, scan, changed, growing=lambda: follow)
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}", "name a log file, or - for standard input") from error


def _require_plain(path: Path, stream: BinaryIO) -> None:
    start = stream.peek(4) if isinstance(stream, io.BufferedReader) else b""
    for magic, program in COMPRESSED.items():
        if start.startswith(magic):
            name, file = ("standard input", "FILE") if str(path) == "-" else (path, shlex.quote(str(path)))
            raise BadInput(f"{name} is compressed", f"{program} {file} | sm120kit explain -")


def read_container(name: str, scan: LogScan, changed: Changed, *, follow: bool = False) -> None:
    """Match the log of a Docker container.

    Raises:
        BadInput: there is no such container, or Docker cannot be used.
    """
    read_program(["docker", "logs", *(["--follow"] if follow else []), name], scan, changed)


def read_kernel(scan: LogScan, changed: Changed, *, follow: bool = False) -> None:
    """Match the kernel's log since boot, from journalctl or dmesg.

    Raises:
        BadInput: neither program can read it.
    """
    try:
        read_program(["journalctl", "-k", "-b", "--no-pager", "-o", "short-iso", *(["-f"] if follow else [])], scan, changed)
    except BadInput:
        read_program(["dmesg", *(["--follow"] if follow else [])], scan, changed)


def read_stream(stream: BinaryIO, scan: LogScan, changed: Changed, *, growing: Callable[[], bool]) -> None:
    """Match a stream to its end, and what is appended to it as long as ``growing`` returns true."""
    while True:
        last = not growing()
        while chunk := (stream.read1(BLOCK_BYTES) if hasattr(stream, "read1") else stream.read(BLOCK_BYTES)):
            scan.feed(chunk)
            changed()
        if last:
            scan.close()
            return
        time.sleep(POLL_SECONDS)
        changed()


def read_program(argv: Sequence[str], scan: LogScan, changed: Changed) -> None:
    """Match what a program prints, which may be more than memory holds, through a temporary file.

    Raises:
        BadInput: the program cannot be run, or fails.
    """
    with tempfile.TemporaryDirectory(prefix="sm120kit-log-") as directory:
        output = Path(directory, "output")
        try:
            with process.background(argv, output) as child, output.open("rb") as stream:
                read_stream(stream, scan, changed, growing=lambda: child.poll() is None)
        except RequirementMissing as error:
            raise BadInput(f"{' '.join(argv)}: program not found", "give a log file instead") from error
        except OSError as error:
            raise BadInput(f"{' '.join(argv)}: {error.strerror}", "give a log file instead") from error
        if child.returncode != 0:
            tail = output.read_bytes()[-400:].decode(errors="replace").strip()
            raise BadInput(f"{' '.join(argv)} failed: {tail or 'no output'}", "check the name and your permissions")
