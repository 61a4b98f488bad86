"""Read the files of a host below a root directory, and the output of a few programs.

Below ``/`` the programs run. Below any other root, their output is read from ``commands/`` there. A fact that cannot be read
never raises: it is None, and ``unread`` has the reason.
"""

import errno
import os
import re
import stat
from dataclasses import dataclass, field
from glob import escape
from itertools import islice
from pathlib import Path

from sm120kit.core.errors import Sm120kitError
from sm120kit.core.process import Stopped, find_program, run_within

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
"""Directories that are searched for programs below another root."""
CHUNK_BYTES, MAX_BYTES = 16 << 10, 4 << 20


@dataclass
class HostReader:
    """Reads below ``root``. ``unread`` maps each path or command that could not be read to the reason."""

    root: Path
    unread: dict[str, str] = field(default_factory=dict)
    timed_out: set[str] = field(default_factory=set)
    """Programs that exceeded the time limit; they are not run again."""
    home: str = "/root"
    """The user's home directory."""

    def real(self, path: str) -> Path:
        """The location of a host's path below the root. Symbolic links in recorded trees must be relative."""
        return self.root / path.lstrip("/")

    def raw(self, path: str) -> bytes | None:
        """A file's bytes; None when it cannot be read."""
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
            return tuple(sorted(entry.name for entry in self.real(path).iterdir()))
        except OSError as error:
            self.unread[path] = error.strerror or type(error).__name__
            return None

    def glob(self, pattern: str) -> tuple[str, ...]:
        """Existing paths that match a pattern, as absolute paths of the host, sorted."""
        try:
            found = self.root.glob(pattern.lstrip("/"))
            return tuple(sorted("/" + path.relative_to(self.root).as_posix() for path in found))
        except OSError as error:
            self.unread[pattern] = error.strerror or type(error).__name__
            return ()

    def glob_home(self, pattern: str) -> tuple[str, ...]:
        """Existing paths below the home directory that match a pattern, as ``~/...``, sorted."""
        return tuple(f"~{path.removeprefix(self.home)}" for path in self.glob(f"{escape(self.home)}/{pattern}"))

    def exists(self, path: str) -> bool:
        """Whether a path exists and is visible to this user."""
        try:
            return self.real(path).exists()
        except OSError:
            return False

    def program(self, name: str) -> bool:
        """Whether a program is on PATH; below another root, in one of ``DIRECTORIES``."""
        if self.root != Path("/"):
            return any(self.exists(f"{directory}/{name}") for directory in DIRECTORIES)
        return find_program(name) is not None

    def target(self, path: str) -> str | None:
        """The file name that a symbolic link resolves to."""
        return self.real(path).resolve().name if self.exists(path) else None

    def command_output(self, name: str) -> str | None:
        """Standard output of a command of ``COMMANDS``; None when it fails or exceeds the time limit."""
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
            process = run_within(argv, COMMAND_SECONDS)
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
        return _plain(process.raw)


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
