"""Changes that are wanted and that no series has: ``patches/wanted.toml``, for each project a table of reasons by name."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from sm120kit.core.outside import read_toml


@dataclass(frozen=True)
class Wanted:
    """A change of a project that no series has; ``reason`` has its origin and why it is missing."""

    project: str
    slug: str
    reason: str


def wanted(root: Path, projects: Collection[str]) -> tuple[Wanted, ...]:
    """The wanted changes of ``projects``; none if there is no list below ``root``, the built-in ``patches/``."""
    file = root / "wanted.toml"
    listed = read_toml(file) if file.is_file() else {}
    return tuple(
        Wanted(project, slug, reason) for project in listed if project in projects for slug, reason in listed[project].items()
    )
