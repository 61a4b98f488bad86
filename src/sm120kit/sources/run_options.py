"""Options of a command that do not change its result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sm120kit.core.workspace import Workspace
from sm120kit.sources.origin import DEFAULT, Origin


class RemoteCache(Protocol):
    """Finished results that several machines share, each by a key that is a digest of its inputs.

    It fails softly: what cannot be used is reported and counts as absent. ``repository`` is where it is in a registry,
    ``pushes`` whether this command may store entries, and ``publisher`` the digest of the key or identity that must have signed
    an entry, empty if none is required.
    """

    @property
    def repository(self) -> str: ...

    @property
    def pushes(self) -> bool: ...

    @property
    def publisher(self) -> str: ...

    def fetch(self, key: str, directory: Path) -> bool:
        """Write the files of an entry into an empty directory; false if there is no entry that may be used."""
        ...

    def push(self, key: str, directory: Path) -> None:
        """Store the files of a directory, if this command may and there is no such entry yet."""
        ...


@dataclass(frozen=True)
class Options:
    """State directory, origin of sources, and limits of a command.

    ``jobs`` is the number of parallel compilers, ``launcher`` the program that starts them, such as ccache. ``remote`` is where
    results are looked up that the state directory lacks.
    """

    workspace: Workspace
    origin: Origin = DEFAULT
    jobs: int | None = None
    memory_bytes: int | None = None
    remote: RemoteCache | None = None
    launcher: Path | None = None
