"""Logs to explain: files, standard input, containers and the kernel's log."""

from __future__ import annotations

import errno
import io
import os
import shlex
import stat
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from sm120kit.core import process
from sm120kit.core.errors import BadInput, RequirementMissing
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


def of_container(name: str) -> Explanation:
    """Explain the log of a Docker container.

    Raises:
        BadInput: there is no such container, or Docker cannot be used.
    """
    return of_program(["docker", "logs", name])


def of_kernel() -> Explanation:
    """Explain the kernel's log since boot, from journalctl or dmesg.

    Raises:
        BadInput: neither program can read it.
    """
    try:
        return of_program(["journalctl", "-k", "-b", "--no-pager", "-o", "short-iso"])
    except BadInput:
        return of_program(["dmesg"])


def of_program(argv: Sequence[str]) -> Explanation:
    """Explain what a program prints, which may be more than memory holds.

    Raises:
        BadInput: the program cannot be run, or fails.
    """
    with tempfile.TemporaryDirectory(prefix="sm120kit-log-") as directory:
        output = Path(directory, "output")
        try:
            with process.background(argv, output) as child:
                child.wait()
        except RequirementMissing as error:
            raise BadInput(f"{' '.join(argv)}: program not found", "give a log file instead") from error
        except OSError as error:
            raise BadInput(f"{' '.join(argv)}: {error.strerror}", "give a log file instead") from error
        with output.open("rb") as stream:
            if child.returncode != 0:
                stream.seek(-min(400, output.stat().st_size), os.SEEK_END)
                tail = stream.read().decode(errors="replace").strip()
                raise BadInput(f"{' '.join(argv)} failed: {tail or 'no output'}", "check the name and your permissions")
            return explain(stream)
