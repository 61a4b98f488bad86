"""Space, permission and limits of the places that are written to."""

import errno
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sm120kit.core._users import user_label
from sm120kit.core.errors import BadInput, ResourceUnavailable, Sm120kitError, SystemRefused

UNWRITABLE_HINT = "choose a writable directory: --state or SM120KIT_STATE, or the option for the output"


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an OSError for a write below ``path`` into ResourceUnavailable or SystemRefused, which have a remedy."""
    try:
        yield
    except OSError as error:
        if explained := disk_error(error, path):
            raise explained from error
        raise


def disk_error(error: OSError, path: Path) -> ResourceUnavailable | SystemRefused | None:
    """The error for a write below ``path`` that failed for lack of space or permission; None if it failed otherwise."""
    if error.errno == errno.ENOSPC:
        return ResourceUnavailable(
            full(path, os.statvfs(_existing(path))), "free some space or name another directory with --state or SM120KIT_STATE"
        )
    if error.errno == errno.EDQUOT:
        message = f"the disk quota of {user_label(os.geteuid())} on the file system of {path} is used up"
        return ResourceUnavailable(message, "remove files, or name another directory with --state or SM120KIT_STATE")
    if error.errno == errno.EFBIG and error.strerror == os.strerror(errno.EFBIG):  # others are the readers' of core.outside
        return too_large(f"a file of {path}")
    if isinstance(error, PermissionError | NotADirectoryError) or error.errno == errno.EROFS:
        return SystemRefused(f"cannot write below {path}: {error.strerror}", UNWRITABLE_HINT)
    return None


def too_large(file: str) -> ResourceUnavailable:
    """The error for a file that exceeds the limit of this process for files (``ulimit -f``), or that of its file system."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY:
        message = f"{file} would have more than {limit / 2**20:.1f} MiB, the limit for files in this shell"
        return ResourceUnavailable(message, "raise it: ulimit -f unlimited")
    message = f"{file} would be larger than its file system permits"
    return ResourceUnavailable(message, "name a directory on another file system with --state or SM120KIT_STATE")


def full(path: Path, status: os.statvfs_result) -> str:
    """What the file system of ``path`` lacks when it refuses a write: bytes, or inodes."""
    if status.f_files and not status.f_favail:
        return f"no inodes left on the file system of {path}: it cannot contain more than {status.f_files} files"
    return f"no space left on the file system of {path} ({status.f_bavail * status.f_frsize // 2**20} MiB free)"


def require_disk(path: Path, needed_bytes: int, work: str) -> None:
    """Require free space for ``work`` on the file system of ``path``.

    Raises:
        ResourceUnavailable: fewer than ``needed_bytes`` are free.
    """
    free = shutil.disk_usage(_existing(path)).free
    if free < needed_bytes:
        raise ResourceUnavailable(
            f"{work} needs {needed_bytes / 2**30:.1f} GiB; the file system of {path} has {free / 2**30:.1f} GiB free",
            "free some space or name another directory with --state or SM120KIT_STATE",
        )


def require_writable(path: Path, option: str = "--output") -> None:
    """Require, before work of minutes, that a file can be written.

    Raises:
        SystemRefused: the path is a directory, or its parent is missing or not writable.
    """
    try:
        reason = "is a directory" if path.is_dir() else ""
        if not reason:
            with tempfile.TemporaryFile(dir=path.parent):  # permission bits are not enough: root, read-only disks, /proc
                pass
    except OSError as error:
        reason = f"{path.parent}: {error.strerror}"
    if reason:
        raise SystemRefused(f"cannot write {path}: {reason}", f"choose another file with {option}")


def require_output_directory(path: Path) -> None:
    """Require, before work of minutes, that files can be written to the directory of ``--output``, which need not exist.

    Raises:
        SystemRefused: it is a file or a link to nothing, or it or the directory that would contain it is not writable.
    """
    try:
        with tempfile.TemporaryFile(dir=path if path.is_symlink() else _existing(path)):
            pass
    except OSError as error:
        message = f"cannot write to {path}: {error.strerror}"
        raise SystemRefused(message, "choose another directory with --output") from error


def require_new(path: Path, option: str, overwrite: bool) -> None:
    """Require, before the work, that a file does not exist, unless it may be overwritten. Devices may exist.

    Raises:
        SystemRefused: the file exists, or its directory cannot be read.
    """
    with disk_errors(path):
        exists = path.is_file()
    if exists and not overwrite:
        raise SystemRefused(f"{path} exists", f"choose another file with {option}, or add --overwrite to replace it")


def _existing(path: Path) -> Path:
    with suppress(PermissionError):  # below an unreadable directory
        if path.exists():
            return path
    return _existing(path.parent)


def size(bytes_: int) -> str:
    """A number of bytes with its unit: ``5.2 GB``."""
    value, unit = float(bytes_), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit in ("B", "kB") or value >= 99.95 else f"{value:.1f} {unit}"


def unexpected(failure: OSError | UnicodeError | RecursionError, trace: str) -> Sm120kitError:
    """The error for a failure of the system or of Python that no code has handled; ``trace`` is how to see where."""
    if isinstance(failure, RecursionError):
        return BadInput("input is nested too deeply", trace)
    if isinstance(failure, UnicodeError):
        return BadInput(
            f"text cannot be converted: {failure}", f"use a UTF-8 locale (LC_ALL=C.UTF-8) and UTF-8 file names; {trace}"
        )
    reason = failure.strerror or str(failure) or type(failure).__name__
    files = ", ".join(_name(path) for path in (failure.filename, failure.filename2) if path is not None)
    message = f"{files}: {reason}" if files else reason
    if failure.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) and (full := disk_error(failure, Path(files or "."))):
        return full
    if failure.errno == errno.ENAMETOOLONG:
        return BadInput(message, "a name has at most 255 bytes, a path at most 4,095")
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
