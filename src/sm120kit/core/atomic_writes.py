"""Writes after which a file is old or new, never half."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from sm120kit.core.data_roots import require_not_installed
from sm120kit.core.disk import disk_errors
from sm120kit.core.errors import SystemRefused
from sm120kit.core.outside import file_problem

STREAMS = (Path("/dev"), Path("/proc"))
"""Directories in which a file such as ``stdout`` stands for one that is open, and is written to, not replaced."""


def write_atomic(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Replace a file atomically. A device or pipe such as ``/dev/null`` is written to, not replaced by a file."""
    require_not_installed(path)
    with disk_errors(path):
        if path.is_dir():
            raise SystemRefused(f"cannot write {path}: it is a directory", "name a file")
        with replacing(path, mode) as file:
            file.write(content)


def _is_stream(path: Path) -> bool:
    """Whether a path is a device or pipe, or a name of standard output, which may be a file."""
    parent = path.parent.resolve()
    return path.exists() and (not path.is_file() or parent == STREAMS[0] or parent.is_relative_to(STREAMS[1]))


def _open_stream(path: Path) -> IO[bytes]:
    """Open a device or pipe to write; a FIFO that nobody reads is refused at once."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise SystemRefused(f"cannot write {path}: {error.strerror}", "name a file, or a pipe that is read") from error
    os.set_blocking(handle, True)
    stream = os.fdopen(handle, "wb")
    if stream.seekable():  # a file that others write to before and after
        stream.seek(0, os.SEEK_END)
    return stream


@contextmanager
def replacing(path: Path, mode: int = 0o644) -> Iterator[IO[bytes]]:
    """A new file that replaces ``path`` when the block ends, and is removed if it fails; a device or pipe itself."""
    if _is_stream(path):
        with _open_stream(path) as stream:
            yield stream
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:50]}.", suffix=".partial")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_together(files: Mapping[Path, bytes | None]) -> None:
    """Replace several files, or remove those whose content is None: all of them, or none if an error occurs.

    All contents are on disk before the first rename. Each file is complete at any time; a process that is killed between
    two renames leaves some files old and some new.
    """
    for path in files:
        require_not_installed(path)
        if path.exists() and (problem := file_problem(path)):
            raise SystemRefused(f"cannot write {path}: it {problem}", "remove it, or name a file")
    staged: dict[Path, tuple[Path | None, Path | None]] = {}
    replaced: list[Path] = []
    temporary: list[Path] = []

    def stage(path: Path, content: bytes) -> Path:
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:50]}.", suffix=".partial")
            temporary.append(Path(name))
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            Path(name).chmod(0o644)
        return Path(name)

    try:
        for path, content in files.items():
            before = stage(path, path.read_bytes()) if path.exists() else None
            staged[path] = (before, None if content is None else stage(path, content))
        for path, (_, after) in staged.items():
            with disk_errors(path):
                replaced.append(path)
                if after:
                    after.replace(path)
                else:
                    path.unlink(missing_ok=True)
    except BaseException:
        for path in reversed(replaced):
            before = staged[path][0]
            with suppress(OSError):  # restore the rest
                if before:
                    before.replace(path)
                else:
                    path.unlink(missing_ok=True)
        raise
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)
