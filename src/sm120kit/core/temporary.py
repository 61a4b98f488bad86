"""Temporary directories, which the next command removes if their process was killed."""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sm120kit.core.disk import disk_errors

TEMPORARY = "sm120kit-temporary"
"""The file that marks a directory of :func:`owned_directory`."""


@contextmanager
def publish_directory(target: Path) -> Iterator[Path]:
    """Yield a new directory, which is renamed to ``target`` when the block succeeds and removed when it fails.

    Requires a lock on ``target``. Directories of killed runs are removed first.
    """
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with owned_directory(target.parent, f".{target.name}.") as directory:
            directory.chmod(0o755)
            yield directory
            directory.rename(target)


@contextmanager
def owned_directory(parent: Path, prefix: str) -> Iterator[Path]:
    """A temporary directory below ``parent``, removed with the block unless it was renamed.

    It lies in a directory ``<prefix>…`` with a marker, on which its owner has a flock(2) that the kernel releases when the
    process ends. Directories whose owner was killed are removed first; on a file system without locks they remain.
    """
    remove_abandoned(parent, prefix)
    around = Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
    lock = os.open(around, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        with suppress(OSError):  # the file system has no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        (around / TEMPORARY).touch()  # after the lock: others remove what is marked and not locked
        directory = around / "new"
        directory.mkdir(mode=0o700)
        yield directory
    finally:
        shutil.rmtree(around, ignore_errors=True)
        os.close(lock)


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove directories of :func:`owned_directory` whose process has ended. Those without its marker are others'."""
    if not parent.is_dir():
        return
    for directory in [path for path in parent.iterdir() if path.name.startswith(prefix)]:
        with suppress(OSError):  # removed meanwhile, another user's, not a directory, not marked, or its owner runs
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                marker = os.stat(TEMPORARY, dir_fd=lock, follow_symlinks=False)
                if stat.S_ISREG(marker.st_mode) and marker.st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(lock)


def is_owned(directory: Path) -> bool:
    """Whether the process that owns a directory of :func:`owned_directory` runs."""
    try:
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(lock)
    return False
