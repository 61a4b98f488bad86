"""Where things lie on disk, digests, and publishing a result whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sm120kit.errors import NotEnoughDisk, StateUnwritable
from sm120kit.records import plain

T = TypeVar("T")

UNWRITABLE_HINT = "name a writable directory with --state or SM120KIT_STATE"


def data_root() -> Path:
    """The directory that holds ``recipes/``, ``patches/`` and ``cutlass_overrides/``.

    ``SM120KIT_DATA`` names another one; else a checkout's top level, else what the wheel carries.
    """
    named = os.environ.get("SM120KIT_DATA")
    if named:
        return Path(named).resolve()
    package = Path(__file__).resolve().parent
    carried = package / "data"
    return carried if (carried / "recipes").is_dir() else package.parents[1]


@dataclass(frozen=True)
class Workspace:
    """A state directory: ``downloads/``, ``checkouts/``, ``work/``, ``cache/`` and finished ``build/`` results."""

    root: Path

    @classmethod
    def open(cls, root: Path | None = None) -> Workspace:
        """The state directory: ``root``, else ``SM120KIT_STATE``, else the user's; made and proven writable.

        Raises:
            StateUnwritable: it cannot be made or written.
        """
        if root is None:
            named = os.environ.get("SM120KIT_STATE")
            if named:
                root = Path(named)
            else:
                import platformdirs

                root = platformdirs.user_state_path("sm120kit")
        root = root.resolve()
        try:
            with disk_errors(root):
                root.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=root):
                    pass
        except OSError as error:  # places such as /proc refuse in words of their own
            raise StateUnwritable(f"cannot write below {root}: {error.strerror}", UNWRITABLE_HINT) from error
        return cls(root)

    @property
    def downloads(self) -> Path:
        """Fetched sdists, each under its sha256."""
        return self.root / "downloads"

    @property
    def checkouts(self) -> Path:
        """Git repositories, one per pin."""
        return self.root / "checkouts"

    @property
    def cache(self) -> Path:
        """What can be computed again: tile facts, learned memory."""
        return self.root / "cache"

    def work(self, name: str) -> Path:
        """The directory in which one recipe is compiled, kept so that depfiles can save work."""
        return self.root / "work" / name

    def build(self, engine: str, digest: str) -> Path:
        """Where the finished result of one plan lies."""
        return self.root / "build" / engine / digest

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """One process at a time works on ``name``; see :func:`locked`."""
        with locked(self.root / "locks" / f"{name.replace('/', '-')}.lock", name):
            yield


@contextmanager
def locked(path: Path, name: str, stop: threading.Event | None = None) -> Iterator[None]:
    """One process at a time works on ``name``; others wait and say so. The lock ends with its process, however it ends.

    Raises:
        Stopped: another thread set ``stop`` while this one waited.
    """
    from filelock import FileLock, Timeout

    from sm120kit import console
    from sm120kit.process import Stopped

    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        console.say(f"waiting for another sm120kit that works on {name} ({path})")
        while not lock.is_locked:
            if stop is not None and stop.is_set():
                raise Stopped from None
            with suppress(Timeout):
                lock.acquire(timeout=1)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's refusals to write below ``path`` into errors that say what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(_existing(path)).free
            raise NotEnoughDisk(
                f"no space left on the file system of {path} ({free // 2**20} MiB free)",
                "free some space or name another directory with --state or SM120KIT_STATE",
            ) from error
        if isinstance(error, PermissionError | NotADirectoryError) or error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise StateUnwritable(
                f"cannot write below {path}: {error.strerror}",
                UNWRITABLE_HINT,
            ) from error
        raise


def require_disk(path: Path, needed_bytes: int, what: str) -> None:
    """Refuse work that would fill the file system of ``path``.

    Raises:
        NotEnoughDisk: fewer than ``needed_bytes`` are free.
    """
    free = shutil.disk_usage(_existing(path)).free
    if free < needed_bytes:
        raise NotEnoughDisk(
            f"{what} needs {needed_bytes / 2**30:.1f} GiB; the file system of {path} has {free / 2**30:.1f} GiB free",
            "free some space or name another directory with --state or SM120KIT_STATE",
        )


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def digest_of(value: object) -> str:
    """sha256 of a JSON-like value in canonical form."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=plain)
    return hashlib.sha256(text.encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def record_json(record: object) -> str:
    """A record as it is written to disk: sorted, indented, one trailing newline."""
    return json.dumps(record, sort_keys=True, indent=2, default=plain) + "\n"


def write_record(path: Path, record: object) -> None:
    """Write a record as a file that is there whole or not at all."""
    write_atomic(path, record_json(record).encode())


def read_record(kind: type[T], path: Path) -> T:
    """Read a record back as its dataclass."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind).validate_json(path.read_bytes())


def write_atomic(path: Path, content: bytes) -> None:
    """Replace a file in one step."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        beside = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            beside.chmod(0o644)
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise


@contextmanager
def publish_directory(target: Path) -> Iterator[Path]:
    """Yield a fresh directory beside ``target``; renamed into place when the block ends well, removed when it does not.

    Call it under a lock on ``target``: what a killed run left beside it is removed first.
    """
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        for left_over in target.parent.glob(f".{target.name}.*"):
            shutil.rmtree(left_over, ignore_errors=True)
        beside = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
        try:
            beside.chmod(0o755)
            yield beside
            beside.rename(target)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
