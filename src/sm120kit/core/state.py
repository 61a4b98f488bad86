"""The state directory: paths, locks, digests, records, and atomic writes."""

from __future__ import annotations

import errno
import fcntl
import functools
import grp
import hashlib
import json
import os
import pwd
import re
import resource
import secrets
import shlex
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from sm120kit.core import reporting
from sm120kit.core.errors import BadRecord, NotFound, NotTrusted, ResourceUnavailable, SystemRefused
from sm120kit.core.outside import read_input
from sm120kit.core.records import json_default, json_text
from sm120kit.core.secrets import masked_json

T = TypeVar("T")

MARKER = "sm120kit-state.lock"
"""The file that marks a state directory. A directory without it is somebody else's, and nothing in it is removed."""

TEMPORARY = "sm120kit-temporary"
"""The file that marks a directory of :func:`owned_directory`."""

_HOST_LOCK = Path("/run")
"""A directory of root on every Linux (FHS 3.0, 3.15)."""

UNWRITABLE_HINT = "choose a writable directory: --state or SM120KIT_STATE, or the option for the output"


def data_root() -> Path:
    """The directory that holds ``recipes/``, ``patches/`` and ``cutlass_overrides/``.

    The directory in ``SM120KIT_DATA``, else the data in the installed wheel, else the top level of a checkout.

    Raises:
        NotFound: ``SM120KIT_DATA`` names a directory without recipes.
    """
    named = os.environ.get("SM120KIT_DATA")
    if named:
        root = Path(os.path.realpath(named))
        if not (root / "recipes").is_dir():
            problem = "has no recipes/" if root.is_dir() else "is not a directory"
            raise NotFound(f"SM120KIT_DATA names {root}, which {problem}", "unset it, or name a copy of sm120kit's data")
        return root
    package = Path(__file__).resolve().parents[1]
    installed = package / "data"
    return installed if (installed / "recipes").is_dir() else package.parents[1]


def writable_data_root() -> Path:
    """The data directory, for a command that writes recipes, patches, proofs or locks to it.

    Raises:
        SystemRefused: it is part of an installation.
    """
    root = data_root()
    require_not_installed(root)
    return root


def require_not_installed(path: Path) -> None:
    """Require that a file to be written is not in the data of an installation, whose next version deletes it.

    Raises:
        SystemRefused: it is.
    """
    with suppress(NotFound):
        root = data_root()
        if _is_installed(root) and Path(os.path.realpath(path)).is_relative_to(root):
            raise SystemRefused(
                f"{root} is part of an installation of sm120kit, and the next installation deletes what is written there",
                "work in a git clone of sm120kit (pip install -e CLONE), or name a copy of this directory with SM120KIT_DATA",
            )


def _is_installed(root: Path) -> bool:
    return root.is_relative_to(Path(__file__).resolve().parents[1]) or bool({"site-packages", "dist-packages"} & {*root.parts})


@dataclass(frozen=True)
class Workspace:
    """A state directory: ``downloads/``, ``checkouts/``, ``work/``, ``cache/`` and finished results in ``build/``."""

    root: Path
    use: UseLock | None = field(default=None, repr=False, compare=False)

    @classmethod
    def open(cls, root: Path | None = None) -> Workspace:
        """Open the state directory: ``root``, else ``SM120KIT_STATE``, else the user's default; created if it does not exist.

        A new directory is private to its owner, because files in it are run and delivered, and is marked: a directory with
        files of somebody else is never taken for a state directory. While the returned object exists, :meth:`maintenance` of
        other processes waits.

        Raises:
            SystemRefused: it cannot be created or written.
            NotTrusted: it has files and no marker, belongs to another user, or others can write it.
        """
        workspace = cls.at(root)
        root = workspace.root
        try:
            with disk_errors(root):
                root.mkdir(mode=0o700, parents=True, exist_ok=True)
                if any(root.iterdir()):
                    workspace.require_marked()
                _require_own(root)
                use = UseLock(root)  # creates the marker, before any other file, for commands that start at the same time
        except OSError as error:  # file systems such as /proc have other error codes
            raise SystemRefused(f"cannot write below {root}: {error.strerror}", UNWRITABLE_HINT) from error
        use.shared()
        for parent, prefix in ((root / "scratch", ""), (root / "cache" / "tiles", ".work-")):
            remove_abandoned(parent, prefix)
        return cls(root, use)

    @classmethod
    def at(cls, root: Path | None = None) -> Workspace:
        """The state directory that :meth:`open` would open, without opening it: to inspect, or for :meth:`maintenance`.

        Raises:
            SystemRefused: the user has no home directory.
        """
        if root is None:
            named = os.environ.get("SM120KIT_STATE")
            if named:
                root = Path(named)
            else:
                import platformdirs

                try:
                    root = platformdirs.user_state_path("sm120kit")
                except RuntimeError as error:
                    message = "the state directory is unknown: this user has no home directory, and HOME is not set"
                    raise SystemRefused(message, UNWRITABLE_HINT) from error
        return cls(Path(os.path.realpath(root)))  # Path.resolve raises no OSError for circular links

    def is_new(self) -> bool:
        """Whether it does not exist yet.

        Raises:
            NotTrusted: sm120kit did not make it.
        """
        if os.path.lexists(self.root):
            self.require_marked()
            return False
        return True

    def require_marked(self) -> None:
        """Require that sm120kit made the directory.

        Raises:
            NotTrusted: it has no marker.
        """
        marker = self.root / MARKER
        if marker.is_symlink() or not marker.is_file():
            raise NotTrusted(
                f"{self.root} was not made by sm120kit: it has no file {MARKER}",
                f"choose a new or empty directory with --state or SM120KIT_STATE; if all of it is an earlier sm120kit's, whose"
                f" directories had no such file: touch {shlex.quote(str(marker))}",
            )

    @contextmanager
    def maintenance(self) -> Iterator[None]:
        """Exclude all other commands while the block runs. Waits for commands that use the directory, and reports them.

        Raises:
            NotTrusted: sm120kit did not make it.
            SystemRefused: its file system has no locks, so that its users cannot be detected.
        """
        self.require_marked()
        use = UseLock(self.root)
        use.exclusive()
        try:
            yield
        finally:
            use.close()

    @property
    def downloads(self) -> Path:
        """Fetched sdists and wheels, each in a directory named by its sha256."""
        return self.root / "downloads"

    @property
    def checkouts(self) -> Path:
        """Git repositories, one per pin."""
        return self.root / "checkouts"

    @property
    def cache(self) -> Path:
        """Results that can be computed again: tile facts, memory of compiled units."""
        return self.root / "cache"

    def work(self, name: str) -> Path:
        """The build directory of a recipe, kept for incremental builds."""
        return self.root / "work" / name

    def build(self, engine: str, digest: str) -> Path:
        """The directory of the finished result of a plan."""
        return self.root / "build" / engine / digest

    def key(self) -> bytes:
        """The secret of this state directory, for :mod:`sm120kit.core.seal`; made when it is first used."""
        path = self.root / "key"
        with disk_errors(path):
            if not path.is_file():
                with tempfile.NamedTemporaryFile(dir=self.root, prefix=".key.") as new:  # with mode 0600
                    new.write(secrets.token_bytes(32))
                    new.flush()
                    with suppress(FileExistsError):  # of another process
                        path.hardlink_to(new.name)
            return path.read_bytes()

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A temporary directory, removed with the block; if this process is killed, by the next command."""
        parent = self.root / "scratch"
        with disk_errors(parent):
            parent.mkdir(exist_ok=True)
            with owned_directory(parent, "") as directory:
                yield directory

    @contextmanager
    def exclusive(self, name: str) -> Iterator[None]:
        """Exclude other processes from work on ``name``; see :func:`exclusive`."""
        with exclusive(self.root / "locks" / f"{name.replace('/', '-')}.lock", name):
            yield


class UseLock:
    """The flock(2) on the marker of a state directory: shared by commands that use it, exclusive for removals.

    The kernel releases it when the process ends; :meth:`close` and deletion of the object release it too.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        with disk_errors(root):
            self.file: int | None = os.open(root / MARKER, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)

    def shared(self) -> None:
        """Wait until no removal runs. Does nothing on a file system without locks."""
        with suppress(SystemRefused):
            self._acquire(fcntl.LOCK_SH, f"waiting for `sm120kit cache`, which removes files in {self.root}")

    def exclusive(self) -> None:
        """Wait until no other process uses the directory.

        Raises:
            SystemRefused: the file system has no locks.
        """
        self._acquire(fcntl.LOCK_EX, f"waiting for other commands that use {self.root}")

    def _acquire(self, kind: int, waiting: str) -> None:
        assert self.file is not None
        reported = False
        while True:
            try:
                fcntl.flock(self.file, kind | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if not reported:
                    reporting.info(f"{waiting} ({_shown(_holders(self.file))})")
                    reported = True
                time.sleep(0.2)
            except OSError as error:
                message = f"the file system of {self.root} cannot lock: {error.strerror}"
                raise SystemRefused(message, "make sure that no command uses it, and remove files by hand") from error

    def close(self) -> None:
        """Release the lock."""
        if self.file is not None:
            os.close(self.file)
            self.file = None

    def __del__(self) -> None:
        with suppress(AttributeError):  # __init__ failed
            self.close()


def _require_own(root: Path) -> None:
    """Require that the state directory and its entries belong to this user or root, and that others cannot write them.

    Modes of entries do not matter if others cannot enter the directory. For links, their targets are checked.

    Raises:
        NotTrusted: with the first path that violates this.
    """
    accessible = root.stat().st_mode & 0o011
    for path in (root, *sorted(root.iterdir())):
        try:
            status = path.stat()
        except FileNotFoundError:  # removed by another sm120kit, or a dangling link
            continue
        if status.st_uid not in (os.geteuid(), 0):
            raise NotTrusted(
                f"{path} belongs to {_user(status.st_uid)}, not to {_user(os.geteuid())}: its files are run and delivered",
                f"work as that user (containers: --user {status.st_uid}), or choose another with --state or SM120KIT_STATE; "
                f"if you trust all files in it: chown -R {os.geteuid()} {root}",
            )
        writable = status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _private(status.st_gid))
        if writable and stat.S_ISDIR(status.st_mode) and (path == root or accessible):
            mode = f"{stat.S_IMODE(status.st_mode):04o}"
            raise NotTrusted(
                f"{path} can be written by others (mode {mode}): its files are run and delivered",
                f"if nobody else wrote into it: chmod 700 {root}",
            )


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return f"user {uid}"


def _private(gid: int) -> bool:
    """Whether a group is the user's own; many distributions create a group for each user."""
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and {*group.gr_mem} <= {user.pw_name}


@contextmanager
def exclusive(path: Path, name: str, stop: threading.Event | None = None) -> Iterator[None]:
    """Exclude other processes from work on ``name`` with a lock on ``path``; a process that must wait reports it.

    The kernel releases the lock when the process ends.

    Raises:
        Stopped: another thread set ``stop`` while this thread waited.
    """
    from filelock import FileLock, Timeout

    from sm120kit.core.process import Stopped

    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        reporting.info(f"waiting for another sm120kit that works on {name} ({path})")
        with reporting.working():
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
def host_exclusive(name: str, patience_seconds: float = 120) -> Iterator[None]:
    """Exclude other processes of this host, of any user and state directory, from work on ``name``.

    The lock is a flock(2) on a directory of root that every user can read: nobody can remove or replace it, and the kernel
    releases it when the process ends. Every user can hold it, so it is not waited for without end: after
    ``patience_seconds`` its holder is reported, and the block runs.
    """
    lock = os.open(_HOST_LOCK, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline, reported = time.monotonic() + patience_seconds, False
        while not _locked(lock):
            if time.monotonic() > deadline:
                held = f"{_shown(_holders(lock))} has kept others from {name} for {patience_seconds:.0f} s"
                reporting.warn(f"{held}: going on without exclusion; if it hangs, end it")
                break
            if not reported:
                reporting.info(f"waiting for another sm120kit that works on {name}: {_shown(_holders(lock))}")
            reported = True
            time.sleep(0.2)
        yield
    finally:
        os.close(lock)


def _locked(file: int) -> bool:
    """Try to lock a file for this process alone. A file system without locks excludes nobody."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _holders(file: int) -> list[int]:
    """Ids of the other processes that have a flock on a file, from /proc/locks."""
    status = os.fstat(file)
    node = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:
        return []
    return sorted({int(fields[4]) for fields in lines if fields[1] == "FLOCK" and fields[5] == node} - {os.getpid()})


def _shown(processes: Sequence[int]) -> str:
    """Processes with the users that they belong to."""
    shown = []
    for process in processes:
        with suppress(OSError):
            shown.append(f"process {process} of {_user(Path(f'/proc/{process}').stat().st_uid)}")
    return ", ".join(shown) or "another process"


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
        message = f"the disk quota of {_user(os.geteuid())} on the file system of {path} is used up"
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


def digest_of(value: object) -> str:
    """sha256 of a JSON-like value in canonical form."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=json_default)
    return hashlib.sha256(text.encode()).hexdigest()


def is_digest(text: str) -> bool:
    """Whether a text is a sha256 in hexadecimal."""
    return bool(re.fullmatch("[0-9a-f]{64}", text))


def file_sha256(path: Path) -> str:
    """sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def record_json(record: object) -> str:
    """A record in its form on disk: sorted, indented, with a trailing newline."""
    return json_text(record, sort_keys=True) + "\n"


def write_record(path: Path, record: object) -> None:
    """Write a record atomically, without secrets."""
    write_atomic(path, masked_json(record_json(record)).encode())


def read_record(kind: type[T], path: Path, name: str = "") -> T:
    """Read a record as its dataclass. Errors call it ``name`` instead of the name of the class.

    Raises:
        BadRecord: it is damaged, or was written by another version.
        OSError: it cannot be read.
    """
    from pydantic import ValidationError

    try:
        record: T = _adapter(kind).validate_json(read_input(path))  # type: ignore[arg-type]  # a class is hashable
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise BadRecord(
            f"{path} is not {name or f'a {kind.__name__} record'}: {key}{': ' * bool(key)}{first['msg']}",
            "it is damaged or of another version: remove it, and the work that it records is done again",
        ) from error
    return record


@functools.cache
def _adapter(kind: type) -> Any:
    """The validator of a record; it takes longer to make than to use."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def mark_used(path: Path) -> None:
    """Set the time of last use of a path in the state, for ``cache clean --older``."""
    with suppress(OSError):
        os.utime(path)


def mark_tree_used(directory: Path, tree: str) -> None:
    """Record that a directory of results was used for a tree: ``cache gc`` keeps it while a recipe produces that tree."""
    with suppress(OSError):
        (directory / f"{tree}.tree").touch()


def write_atomic(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Replace a file atomically. A device or pipe such as ``/dev/null`` is written to, not replaced by a file."""
    require_not_installed(path)
    with disk_errors(path):
        if path.is_dir():
            raise SystemRefused(f"cannot write {path}: it is a directory", "name a file")
        if path.exists() and not path.is_file():
            with path.open("wb", buffering=0) as device:
                device.write(content)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        temporary = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
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
    staged: dict[Path, tuple[Path | None, Path | None]] = {}
    replaced: list[Path] = []
    temporary: list[Path] = []

    def stage(path: Path, content: bytes) -> Path:
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:50]}.")
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
