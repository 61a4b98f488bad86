"""The state directory: its marker, its paths, and what excludes its users from each other."""

from __future__ import annotations

import fcntl
import os
import secrets
import shlex
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from sm120kit.core._users import is_private_group, user_label
from sm120kit.core.disk import UNWRITABLE_HINT, disk_errors
from sm120kit.core.errors import NotFound, NotTrusted, SystemRefused
from sm120kit.core.locks import attempts, exclusive
from sm120kit.core.outside import read_found
from sm120kit.core.temporary import owned_directory, remove_abandoned

MARKER = "sm120kit-state.lock"
"""The file that marks a state directory. A directory without it is somebody else's, and nothing in it is removed."""


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
            NotFound: it does not exist.
            NotTrusted: it has no marker.
        """
        marker = self.root / MARKER
        if not os.path.lexists(self.root):
            raise NotFound(
                f"there is no state directory {self.root}", "nothing was built or pulled; or name another with --state"
            )
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
            NotFound, NotTrusted: see :meth:`require_marked`.
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
        """The secret of this state directory, for seals of records; made when it is first used."""
        path = self.root / "key"
        with disk_errors(path):
            if not path.is_file():
                with tempfile.NamedTemporaryFile(dir=self.root, prefix=".key.") as new:  # with mode 0600
                    new.write(secrets.token_bytes(32))
                    new.flush()
                    with suppress(FileExistsError):  # of another process
                        path.hardlink_to(new.name)
            return read_found(path)

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
        for _ in attempts(self.file, kind, waiting):
            pass

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
    """
    accessible = root.stat().st_mode & 0o011
    for path in (root, *sorted(root.iterdir())):
        try:
            status = path.stat()
        except FileNotFoundError:  # removed by another sm120kit, or a dangling link
            continue
        if status.st_uid not in (os.geteuid(), 0):
            raise NotTrusted(
                f"{path} belongs to {user_label(status.st_uid)}, not to {user_label(os.geteuid())}: its files are run and"
                " delivered",
                f"work as that user (containers: --user {status.st_uid}), or choose another with --state or SM120KIT_STATE; "
                f"if you trust all files in it: chown -R {os.geteuid()} {root}",
            )
        writable = status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not is_private_group(status.st_gid))
        if writable and stat.S_ISDIR(status.st_mode) and (path == root or accessible):
            mode = f"{stat.S_IMODE(status.st_mode):04o}"
            raise NotTrusted(
                f"{path} can be written by others (mode {mode}): its files are run and delivered",
                f"if nobody else wrote into it: chmod 700 {root}",
            )


def mark_used(path: Path) -> None:
    """Set the time of last use of a path in the state, for ``cache --clean --older``."""
    with suppress(OSError):
        os.utime(path)
