"""Our own headers in a tree with CUTLASS: files of ``cutlass_overrides/`` below its ``include/``, which no patch changes.

A commit of an edited directory that changes them is exported to ``cutlass_overrides/``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sm120kit.core.errors import BadInput, Mismatch
from sm120kit.patches.apply import OVERRIDES_MESSAGE
from sm120kit.patches.patch_records import TreeProject
from sm120kit.sources.git import Repository

_OWN = "include/sm120kit/"
"""The directory in CUTLASS that contains our headers only."""


@dataclass(frozen=True)
class OwnHeaders:
    """Our headers in a tree: the files in ``paths``, and every file in our directory below ``prefix``, that of CUTLASS."""

    prefix: str = ""
    paths: frozenset[str] = frozenset()
    has_cutlass: bool = False

    @classmethod
    def of(cls, repository: Repository, base: str, projects: Sequence[TreeProject]) -> OwnHeaders:
        """The headers in a commit below a series."""
        cutlass = next((project for project in projects if project.project == "cutlass"), None)
        if cutlass is None:
            return cls()
        message = repository.git("log", "-1", "--format=%B", base).stdout
        added = repository.changed(f"{base}^", base) if message.strip() == OVERRIDES_MESSAGE.strip() else []
        return cls(cutlass.prefix, frozenset(added), True)

    def __contains__(self, path: object) -> bool:
        own = f"{self.prefix}{_OWN}"
        return self.has_cutlass and isinstance(path, str) and (path in self.paths or path.startswith(own))

    def edited(self, repository: Repository, commits: tuple[str, str], overrides: Path) -> dict[Path, bytes | None]:
        """The content of each file of ``overrides`` that differs between two commits; None if it was removed.

        Raises:
            BadInput: a header is a link, executable or hidden.
            Mismatch: a file of ``overrides`` has the content of neither commit.
        """
        files: dict[Path, bytes | None] = {}
        for path in repository.changed(*commits):
            if path not in self:
                continue
            file = overrides / path.removeprefix(self.prefix)
            mode = repository.git("ls-tree", commits[1], "--", path).stdout.partition(" ")[0]
            if mode not in ("", "100644") or file.name.startswith("."):
                kind = "hidden" if file.name.startswith(".") else f"of mode {mode}"
                raise BadInput(f"{path} is {kind}", "our headers are plain files: git update-index --chmod=-x, or rename it")
            content = _read(repository, commits[1], path)
            present = file.read_bytes() if file.is_file() else None
            if content == present:
                continue
            if present != _read(repository, commits[0], path):
                raise Mismatch(
                    f"{file} was changed since the directory was made, and the directory changes it, too",
                    f"merge the two by hand into {file}, and commit its content in the directory",
                )
            files[file] = content
        return files


def _read(repository: Repository, commit: str, path: str) -> bytes | None:
    try:
        return repository.read(commit, path)
    except FileNotFoundError:
        return None
