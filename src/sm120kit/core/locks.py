"""Exclusion of other processes, by locks that the kernel releases."""

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sm120kit.core import reporting
from sm120kit.core._users import user_label
from sm120kit.core.disk import UNWRITABLE_HINT, disk_errors
from sm120kit.core.errors import SystemRefused
from sm120kit.core.process import Stopped

_HOST_LOCK = Path("/run")
"""A directory of root on every Linux (FHS 3.0, 3.15)."""


@contextmanager
def exclusive(path: Path, name: str, stop: threading.Event | None = None) -> Iterator[None]:
    """Exclude other processes from work on ``name`` with a lock on ``path``; a process that must wait reports it.

    The kernel releases the lock when the process ends.

    Raises:
        Stopped: another thread set ``stop`` while this thread waited.
        SystemRefused: the file system has no locks.
    """
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with reporting.working():
            for _ in attempts(lock, fcntl.LOCK_EX, f"waiting for another sm120kit that works on {name}"):
                if stop is not None and stop.is_set():
                    raise Stopped
        yield
    finally:
        os.close(lock)


@contextmanager
def host_turn(name: str, patience_seconds: float = 30) -> Iterator[None]:
    """Wait until no other process of this host, of any user and state directory, is at work on ``name``; not without end.

    The lock is a flock(2) on a directory of root that every user can read: nobody can remove or replace it, and the kernel
    releases it when the process ends. But every user can hold it, so after ``patience_seconds`` its holders are reported and
    the work is done without it: what it protects must be checked afterwards.
    """
    lock = os.open(_HOST_LOCK, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + patience_seconds
        with suppress(SystemRefused):  # a file system without locks excludes nobody
            for _ in attempts(lock, fcntl.LOCK_EX, f"waiting for another sm120kit that works on {name}"):
                if time.monotonic() > deadline:
                    reporting.warn(f"{holders(lock)} has kept others from {name} for {patience_seconds:.0f} s; going on")
                    break
        yield
    finally:
        os.close(lock)


def attempts(file: int, kind: int, waiting: str) -> Iterator[None]:
    """Try to get a flock(2) of this ``kind`` until it is there; yields after each vain attempt, of which the first is reported.

    Raises:
        SystemRefused: the file system has no locks.
    """
    reported = False
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not reported:
                reporting.info(f"{waiting} ({holders(file)})")
            reported = True
        except OSError as error:
            message = f"the file system of {Path(f'/proc/self/fd/{file}').readlink()} cannot lock: {error.strerror}"
            raise SystemRefused(message, UNWRITABLE_HINT) from error
        yield
        time.sleep(0.2)


def holders(file: int) -> str:
    """The other processes that have a flock on a file, from /proc/locks, with the users that they belong to."""
    status = os.fstat(file)
    node = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    lines = []
    with suppress(OSError):
        lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    shown = []
    for process in sorted({int(line[4]) for line in lines if line[1] == "FLOCK" and line[5] == node} - {os.getpid()}):
        with suppress(OSError):
            shown.append(f"process {process} of {user_label(Path(f'/proc/{process}').stat().st_uid)}")
    return ", ".join(shown) or "another process"
