"""Where facts come from: files below a root directory, and what a few programs say.

Below ``/`` the programs run. Below any other root, their output is read from ``commands/`` there. With ``record``, everything
that is read is also written below that directory, which then can be such a root. Nothing here raises for a fact that cannot
be had: it is None, with the reason kept.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from sm120kit.errors import Sm120kitError
from sm120kit.host.reduce import REDUCE
from sm120kit.process import Stopped, deadline, run

COMMANDS = {
    "nvidia-smi-q.xml": ("nvidia-smi", "-q", "-x"),
    "nvidia-smi-compute-cap.csv": ("nvidia-smi", "--query-gpu=pci.bus_id,compute_cap", "--format=csv,noheader"),
    "nvidia-smi-topo-m.txt": ("nvidia-smi", "topo", "-m"),
    "nvidia-smi-topo-p2p-r.txt": ("nvidia-smi", "topo", "-p2p", "r"),
    "docker-ps.txt": (
        "docker",
        "ps",
        "--filter=label=sm120kit.launcher",
        '--format={{.Names}}\t{{.Label "sm120kit.configuration"}}\t{{.Label "sm120kit.gpus"}}\t{{.Label "sm120kit.launcher"}}',
    ),
}
COMMAND_SECONDS = 30
"""nvidia-smi never answers on a wedged GPU, docker not when its daemon hangs."""
PIECE, MAX_BYTES = 16 << 10, 4 << 20


@dataclass
class Source:
    """Reads below ``root`` and remembers what it could not read in ``unread``: path or command -> why."""

    root: Path
    record: Path | None = None
    unread: dict[str, str] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    """Programs that did not answer in time; they are not asked again."""

    def real(self, path: str) -> Path:
        """Where a path of the host lies. Symbolic links in recorded trees must be relative."""
        return self.root / path.lstrip("/")

    def raw(self, path: str) -> bytes | None:
        """A file's bytes; None, noted with the reason, when it cannot be read."""
        try:
            with self.real(path).open("rb") as file:
                # /proc/sys takes as much kernel memory as a read asks for, and refuses what it cannot have.
                content = b"".join(islice(iter(lambda: file.read1(PIECE), b""), MAX_BYTES // PIECE))
        except OSError as error:
            self.unread[path] = error.strerror or type(error).__name__
            return None
        if path in REDUCE:
            content = REDUCE[path](content.decode(errors="replace")).encode()
        self._keep(path, content)
        return content

    def text(self, path: str) -> str | None:
        """A file's text without the white space around it."""
        content = self.raw(path)
        return None if content is None else content.decode(errors="replace").strip()

    def number(self, path: str) -> float | None:
        """A file that holds a number, perhaps with a unit."""
        found = re.match(r"-?\d+(\.\d+)?", self.text(path) or "")
        return float(found[0]) if found else None

    def names(self, path: str) -> tuple[str, ...] | None:
        """What a directory holds, sorted."""
        try:
            found = tuple(sorted(entry.name for entry in self.real(path).iterdir()))
        except OSError as error:
            self.unread[path] = error.strerror or type(error).__name__
            return None
        self._keep(path)
        for name in found:
            self._keep(f"{path}/{name}")
        return found

    def glob(self, pattern: str) -> tuple[str, ...]:
        """Paths that are there, as absolute paths of the host, sorted."""
        found = sorted("/" + path.relative_to(self.root).as_posix() for path in self.root.glob(pattern.lstrip("/")))
        for path in found:
            self._keep(path)
        return tuple(found)

    def exists(self, path: str) -> bool:
        """Whether a path is there, as far as this user can see."""
        try:
            there = self.real(path).exists()
        except OSError:
            return False
        if there:
            self._keep(path)
        return there

    def target(self, path: str) -> str | None:
        """The name of what a link points to."""
        return self.real(path).resolve().name if self.exists(path) else None

    def said(self, name: str) -> str | None:
        """What the command of this name in ``COMMANDS`` prints."""
        kept = f"commands/{name}"
        if self.root != Path("/"):
            recorded = self.text(kept)
            if recorded is None:
                self.unread[name] = self.unread.pop(kept)
            return recorded
        argv = COMMANDS[name]
        if argv[0] in self.silent:
            self.unread[name] = f"{argv[0]} was silent before"
            return None
        try:
            with deadline(COMMAND_SECONDS) as stop:
                done = run(argv, check=False, stop=stop)
        except Stopped:
            self.silent.add(argv[0])
            self.unread[name] = f"no answer within {COMMAND_SECONDS} s"
            return None
        except Sm120kitError as error:
            self.unread[name] = error.message
            return None
        if done.returncode:
            self.unread[name] = f"exit code {done.returncode}: {' '.join((done.stdout + done.stderr).split())[:200]}"
            return None
        text = REDUCE[kept](done.stdout) if kept in REDUCE else done.stdout
        self._keep(kept, text.encode())
        return text

    def _keep(self, path: str, content: bytes | None = None) -> None:
        """Record a path with the links on its way; without ``content``, only that it is there."""
        if self.record is None:
            return
        here, rest, followed = Path(), path.strip("/").split("/"), set[Path]()
        while rest:
            here /= rest.pop(0)
            here = Path(os.path.normpath(f"/{here}")).relative_to("/")
            real = self.root / here
            if real.is_symlink() and not (link := real.readlink()).is_absolute():
                if here in followed:
                    return  # links in a circle
                followed.add(here)
                beside = self.record / here
                beside.parent.mkdir(parents=True, exist_ok=True)
                if not beside.is_symlink():
                    beside.symlink_to(link)
                here, rest = here.parent, [*link.parts, *rest]
        kept = self.record / here
        if content is None and (self.root / here).is_dir():
            kept.mkdir(parents=True, exist_ok=True)
        elif content is not None or not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_bytes(content or b"")
