"""Options of a command that do not change its result."""

from __future__ import annotations

from dataclasses import dataclass

from sm120kit.core.state import Workspace
from sm120kit.sources.origin import DEFAULT, Origin


@dataclass(frozen=True)
class Options:
    """State directory, origin of sources, and limits of a command. ``jobs`` is the number of parallel compilers."""

    workspace: Workspace
    origin: Origin = DEFAULT
    jobs: int | None = None
    memory_bytes: int | None = None
