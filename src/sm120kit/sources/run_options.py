"""Options of a command that do not change its result."""

from dataclasses import dataclass
from pathlib import Path

from sm120kit.core.workspace import Workspace
from sm120kit.sources.origin import DEFAULT, Origin


@dataclass(frozen=True)
class Options:
    """State directory, origin of sources, and limits of a command.

    ``jobs`` is the number of parallel compilers, ``launcher`` the program that starts them, such as ccache. ``cache`` is a
    directory that several machines share, with finished builds; ``cache_push`` stores those of this command there.
    """

    workspace: Workspace
    origin: Origin = DEFAULT
    jobs: int | None = None
    memory_bytes: int | None = None
    launcher: Path | None = None
    cache: Path | None = None
    cache_push: bool = False
