"""Read the files of a host below a root directory, and the output of a few programs.

Below ``/`` the programs run. Below any other root, their output is read from ``commands/`` there. With ``record``, everything
that is read is also written below that directory, which can then serve as a root. A fact that cannot be read never raises: it
is None, and ``unread`` has the reason.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from dataclasses import dataclass, field
from glob import escape
from itertools import islice
from pathlib import Path

from sm120kit.core.errors import BadInput, Sm120kitError
from sm120kit.core.process import Stopped, deadline, find_program, run_until
from sm120kit.hosts.facts._redact import HOME, redacted

COMMANDS = {
    "nvidia-smi-q.xml": ("nvidia-smi", "-q", "-x"),
    "nvidia-smi-compute-cap.csv": ("nvidia-smi", "--query-gpu=pci.bus_id,compute_cap", "--format=csv,noheader"),
    "nvidia-smi-topo-m.txt": ("nvidia-smi", "topo", "-m"),
    "nvidia-smi-topo-p2p-r.txt": ("nvidia-smi", "topo", "-p2p", "r"),
    "dmesg.txt": ("dmesg",),
    "docker-ps.txt": (
        "docker",
        "ps",
        "--filter=label=sm120kit.launcher",
        '--format={{.Names}}\t{{.Label "sm120kit.configuration"}}\t{{.Label "sm120kit.gpus"}}\t{{.Label "sm120kit.launcher"}}',
    ),
}
COMMAND_SECONDS = 30
"""Time limit: nvidia-smi never returns when a GPU is wedged, docker does not when its daemon hangs."""
DIRECTORIES = ("/usr/bin", "/usr/local/bin", "/snap/bin")
"""Directories of a recorded host that are searched for programs."""
CHUNK_BYTES, MAX_BYTES = 16 << 10, 4 << 20


@dataclass
class HostReader:
    """Reads below ``root``. ``unread`` maps each path or command that could not be read to the reason."""

    root: Path
    record: Path | None = None
    unread: dict[str, str] = field(default_factory=dict)
    timed_out: set[str] = field(default_factory=set)
    """Programs that exceeded the time limit; they are not run again."""
    home: str = "/root"
    """The user's home directory, which recordings contain as ``redact.HOME``."""

    def real(self, path: str) -> Path:
        """The location of a host's path below the root. Symbolic links in recorded trees must be relative."""
        return self.root / path.lstrip("/")

    def raw(self, path: str) -> bytes | None:
        """A file's bytes, redacted; None when it cannot be read."""
        try:
            with open(self.real(path), "rb", opener=_without_waiting) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise OSError(errno.EINVAL, "not a regular file")
                # For files of /proc/sys the kernel allocates as much memory as a read requests, and fails when it cannot.
                content = b"".join(islice(iter(lambda: file.read1(CHUNK_BYTES), b""), MAX_BYTES // CHUNK_BYTES))
        except OSError as error:
            self.unread[path] = error.strerror or type(error).__name__
            return None
        if path == "/proc/self/environ" and (home := re.search(rb"(?:^|\0)HOME=/+([^\0]+)", content)):
            self.home = f"/{home[1].decode(errors='replace').rstrip('/')}"
        content = redacted(path, content)
        self._record(path, content)
        return content

    def text(self, path: str) -> str | None:
        """A file's text without surrounding white space; see :func:`_plain`."""
        content = self.raw(path)
        return None if content is None else _plain(content).strip()

    def number(self, path: str) -> float | None:
        """The number at the start of a file; a unit may follow."""
        match = re.match(r"-?\d+(\.\d+)?", self.text(path) or "", re.ASCII)
        return float(match[0]) if match else None

    def names(self, path: str) -> tuple[str, ...] | None:
        """Names of a directory's entries, sorted."""
        try:
            entries = tuple(sorted(entry.name for entry in self.real(path).iterdir()))
        except OSError as error:
            self.unread[path] = error.strerror or type(error).__name__
            return None
        self._record(path)
        for name in entries:
            self._record(f"{path}/{name}")
        return entries

    def glob(self, pattern: str) -> tuple[str, ...]:
        """Existing paths that match a pattern, as absolute paths of the host, sorted."""
        try:
            paths = sorted("/" + path.relative_to(self.root).as_posix() for path in self.root.glob(pattern.lstrip("/")))
        except OSError as error:
            self.unread[pattern] = error.strerror or type(error).__name__
            return ()
        for path in paths:
            self._record(path)
        return tuple(paths)

    def glob_home(self, pattern: str) -> tuple[str, ...]:
        """Existing paths below the home directory that match a pattern, as ``~/...``, sorted."""
        return tuple(f"~{path.removeprefix(self.home)}" for path in self.glob(f"{escape(self.home)}/{pattern}"))

    def exists(self, path: str) -> bool:
        """Whether a path exists and is visible to this user."""
        try:
            exists = self.real(path).exists()
        except OSError:
            return False
        if exists:
            self._record(path)
        return exists

    def program(self, name: str) -> bool:
        """Whether a program is on PATH; of a recorded host, in one of ``DIRECTORIES``, where recordings have each of them."""
        if self.root != Path("/"):
            return any(self.exists(f"{directory}/{name}") for directory in DIRECTORIES)
        found = find_program(name)
        if found:
            self._record(f"{found.parent if str(found.parent) in DIRECTORIES else DIRECTORIES[0]}/{name}")
        return found is not None

    def target(self, path: str) -> str | None:
        """The file name that a symbolic link resolves to."""
        return self.real(path).resolve().name if self.exists(path) else None

    def command_output(self, name: str) -> str | None:
        """Redacted standard output of a command of ``COMMANDS``; None when it fails or exceeds the time limit."""
        recorded = f"commands/{name}"
        if self.root != Path("/"):
            text = self.text(recorded)
            if text is None:
                self.unread[name] = self.unread.pop(recorded)
            return text
        argv = COMMANDS[name]
        if argv[0] in self.timed_out:
            self.unread[name] = f"{argv[0]} exceeded its time limit before"
            return None
        try:
            with deadline(COMMAND_SECONDS) as stop:
                process = run_until(argv, stop)
        except Stopped:
            self.timed_out.add(argv[0])
            self.unread[name] = f"no result within {COMMAND_SECONDS} s"
            return None
        except Sm120kitError as error:
            self.unread[name] = error.message
            return None
        if process.returncode:
            message = " ".join((process.stdout + process.stderr).split())[:200]
            self.unread[name] = f"exit code {process.returncode}: {message}"
            return None
        content = redacted(recorded, process.raw)
        self._record(recorded, content)
        return _plain(content)

    def _record(self, path: str, content: bytes | None = None) -> None:
        """Write a path to the recording, with the symbolic links on its way; without ``content``, only that it exists."""
        if self.record is None:
            return
        try:
            self._write(self.record, path, content)
        except OSError as error:
            raise BadInput(f"cannot record to {self.record}: {error.strerror}", "record to another file system") from error

    def _write(self, record: Path, path: str, content: bytes | None) -> None:
        current, rest, followed = Path(), path.strip("/").split("/"), set[Path]()
        while rest:
            current /= rest.pop(0)
            current = Path(os.path.normpath(f"/{current}")).relative_to("/")
            real = self.root / current
            if real.is_symlink() and not (link := real.readlink()).is_absolute():
                if current in followed:
                    return  # a cycle of links
                followed.add(current)
                copy = record / _anonymous(current, self.home)
                copy.parent.mkdir(parents=True, exist_ok=True)
                if not copy.is_symlink():
                    copy.symlink_to(link)
                current, rest = current.parent, [*link.parts, *rest]
        copy = record / _anonymous(current, self.home)
        if content is None and (self.root / current).is_dir():
            copy.mkdir(parents=True, exist_ok=True)
        elif content is not None or not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(content or b"")


def _without_waiting(path: str, flags: int) -> int:
    """Open a file; a FIFO without a writer too, at once."""
    return os.open(path, flags | os.O_NONBLOCK)


def _plain(content: bytes) -> str:
    """A text whose numbers can be read: in ASCII digits, and none of more digits than a file of the kernel has."""
    text = content.decode(errors="replace")
    if not text.isascii():
        text = "".join("\ufffd" if character.isdigit() and not character.isascii() else character for character in text)
    return _TOO_LONG.sub("\ufffd", text)


_TOO_LONG = re.compile(r"\d{25,}")


def _anonymous(path: Path, home: str) -> Path:
    """A path of the host, relative to its root, with another name for the home directory."""
    own = Path(home).relative_to("/")
    return Path(HOME).relative_to("/") / path.relative_to(own) if path.is_relative_to(own) else path
