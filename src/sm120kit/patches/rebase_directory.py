"""The directory of a rebase: its record, its files, and what a developer changed in them.

git never works with the configuration of such a directory, which may name programs: it works in a scratch repository that has
the same objects.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from sm120kit.core.atomic_writes import write_atomic
from sm120kit.core.errors import BadInput, Mismatch
from sm120kit.core.records import json_default
from sm120kit.core.seal import is_sealed, seal
from sm120kit.core.temporary import owned_directory
from sm120kit.patches.edits import SERIES, config_section
from sm120kit.sources.git import GitIndex, Repository

_STATE = "sm120kit.rebase.state"
"""Key of the git configuration with a :class:`RebaseRecord` as JSON."""

_SEAL = "sm120kit.rebase.seal"
"""Key of the git configuration with the seal of that."""

_START = "start with `sm120kit patch rebase RECIPE --onto RECIPE --into DIR`"
ANEW = "rebase into a new directory; there, `git fetch` this one and `git cherry-pick` the commits of its resolutions"
"""The hint if a directory and the series no longer fit."""


class MoveState(StrEnum):
    """What became of a patch in a rebase."""

    APPLIES = "applies unchanged"
    MERGED = "merged"
    PARTLY_UPSTREAM = "partly upstream"
    UPSTREAM = "already upstream"
    CONFLICTS = "conflicts"
    RESOLVED = "resolved"
    LEFT_OUT = "left out"
    HAS_VARIANT = "has a variant"


@dataclass(frozen=True)
class PatchMove:
    """A patch and what became of it; ``detail`` has a line for each file with hunks that were not merged."""

    name: str
    state: MoveState
    detail: str = ""


@dataclass(frozen=True)
class FileWrite:
    """A file of a series to write: its path below the patch directory, and its blobs before and after; empty for no file."""

    path: str
    before: str
    after: str


@dataclass(frozen=True)
class RebaseRecord:
    """The state of a rebase, recorded in the git configuration of its directory.

    ``head`` is the commit of the patches moved so far and ``tree`` the tree of the directory's files. With ``entries`` (see
    :class:`sm120kit.patches.threeway.Merge`), the first patch of ``todo`` has conflicts, ``pick`` is its commit and ``tree``
    has conflict markers. ``before`` is the tree that is being replaced by ``tree``; empty when that is done. ``writes`` are the
    files of the series that are being written; then ``head`` replaces ``rewritten``, a commit with the same tree.
    """

    recipes: tuple[str, str]
    pins: str
    series: str
    base: str
    head: str
    tree: str
    todo: tuple[str, ...]
    moves: tuple[PatchMove, ...] = ()
    entries: tuple[str, ...] = ()
    pick: str = ""
    before: str = ""
    writes: tuple[FileWrite, ...] = ()
    rewritten: str = ""

    @property
    def conflicts(self) -> list[str]:
        """The paths of the files with conflicts."""
        return list(dict.fromkeys(entry.partition("\t")[2] for entry in self.entries))

    def with_move(self, move: PatchMove) -> RebaseRecord:
        """The record with one more patch moved."""
        return replace(self, moves=(*self.moves, move))


def set_files(repository: Repository, directory: Path, record: RebaseRecord) -> None:
    """Make files, index and branch of a directory those of the record. May be interrupted at any time and repeated."""
    gitdir, work_tree = directory / ".git", f"--work-tree={directory}"
    index = GitIndex(repository, gitdir / "index")
    index.git(work_tree, "update-index", "-q", "--really-refresh", check=False, tied=True)
    index.git(work_tree, "read-tree", "--reset", "-u", record.tree, tied=True)
    message = {"CHERRY_PICK_HEAD": b"", "MERGE_MSG": b""}
    if record.entries:
        removals = [f"0 {'0' * 40}\t{path}" for path in record.conflicts]
        entries = "".join(f"{entry}\0" for entry in (*removals, *record.entries))
        index.git("update-index", "-z", "--index-info", stdin=entries.encode())
        text = repository.git("log", "-1", "--encoding=UTF-8", "--format=%B", record.pick).raw
        message = {"CHERRY_PICK_HEAD": f"{record.pick}\n".encode(), "MERGE_MSG": text}
    for name, content in message.items():
        if content:
            write_atomic(gitdir / name, content)
        else:
            (gitdir / name).unlink(missing_ok=True)
    write_atomic(gitdir / SERIES, f"{record.head}\n".encode())


def switched(directory: Path, record: RebaseRecord, key: bytes) -> RebaseRecord:
    """Record that the files of a directory are those of the record."""
    record = replace(record, before="")
    write_state(directory / ".git", record, key)
    return record


def head_of(repository: Repository, directory: Path) -> str:
    """The commit of branch ``series``, which HEAD must name; the scratch repository gets the same HEAD."""
    gitdir = directory / ".git"
    if (gitdir / "HEAD").read_text(errors="replace").strip() != f"ref: {SERIES}":
        raise BadInput(
            f"HEAD of {directory} is not branch series",
            f"`git switch series`, then sm120kit patch rebase --continue {directory}",
        )
    listed = repository.git("ls-remote", "--quiet", "--", gitdir, SERIES).stdout.split()
    if not listed:
        raise Mismatch(f"{directory} has no branch series", ANEW)
    repository.set_ref(SERIES, listed[0])
    repository.git("symbolic-ref", "HEAD", SERIES)
    return listed[0]


def changes_in(repository: Repository, index: GitIndex, directory: Path) -> list[tuple[str, str]]:
    """State and path of each changed file, as ``git status --porcelain`` prints them; HEAD is that of the repository."""
    index.git(f"--work-tree={directory}", "update-index", "-q", "--refresh", check=False)
    arguments = ["status", "--porcelain", "-z", "--no-renames", "--untracked-files=all"]
    listed = index.git(f"--work-tree={directory}", *arguments).raw.decode(errors="replace")
    return [(entry[:2], entry[3:]) for entry in listed.split("\0") if entry]


def unknown_files(repository: Repository, directory: Path, trees: Sequence[str]) -> list[str]:
    """The files of a directory that are in none of some trees with this content."""
    unknown: set[str] | None = None
    for tree in trees:
        with repository.index(tree) as index:
            changed = {path for state, path in changes_in(repository, index, directory) if state[1] != " "}
        unknown = changed if unknown is None else unknown & changed
    return sorted(path for path in unknown or () if (directory / path).exists() or (directory / path).is_symlink())


def require_known_files(repository: Repository, directory: Path, trees: Sequence[str]) -> None:
    """Require that an interrupted switch between two trees can be repeated without loss."""
    if unknown := unknown_files(repository, directory, trees):
        raise BadInput(
            "\n".join(
                [
                    f"{directory} was interrupted; files that are neither as before nor as after it:",
                    *(f"  {path}" for path in unknown),
                ]
            ),
            f"move them elsewhere, then sm120kit patch rebase --continue {directory}",
        )


@contextmanager
def opened(directory: Path) -> Iterator[Repository]:
    """A scratch repository with the objects of that in a directory, but with refs and configuration of its own.

    Raises:
        Mismatch: the directory contains no repository.
    """
    gitdir = directory / ".git"
    if gitdir.is_symlink() or not (gitdir / "objects").is_dir():
        raise Mismatch(f"no rebase is in progress in {directory}", _START)
    with owned_directory(gitdir, "sm120kit-") as scratch:
        repository = Repository.init(scratch / "repository")
        shutil.rmtree(repository.path / "objects")
        (repository.path / "objects").symlink_to(gitdir / "objects")
        yield repository


def read_record(repository: Repository, directory: Path, key: bytes) -> RebaseRecord:
    """The record in the configuration of a directory, of which git reads nothing else.

    Raises:
        Mismatch: there is none that was sealed with the key.
    """
    from pydantic import TypeAdapter, ValidationError

    config = directory / ".git/config"
    if config.is_file() and not config.is_symlink():
        arguments = ("config", "--file", config, "--no-includes", "-z", "--get")
        listed = [repository.git(*arguments, name, check=False).raw.rstrip(b"\0") for name in (_STATE, _SEAL)]
        state, found = (value.decode(errors="replace") for value in listed)
        if state and not is_sealed(key, _STATE, state, found):
            raise Mismatch(
                f"the rebase in {directory} was not begun with this state directory, so its record is not followed",
                f"name the state directory with --state; if it is somebody else's, {_START} of your own",
            )
        try:
            return TypeAdapter(RebaseRecord).validate_json(state)
        except ValidationError:
            pass
    raise Mismatch(f"no rebase is in progress in {directory}", _START)


def write_state(gitdir: Path, record: RebaseRecord | None, key: bytes, more: str = "") -> None:
    """Replace the record in the configuration of a repository, sealed; ``more`` is added to the configuration."""
    with tempfile.TemporaryDirectory(prefix="sm120kit-config-") as scratch:
        repository = Repository.init(Path(scratch) / "repository")
        config = Path(scratch) / "config"
        config.write_bytes((gitdir / "config").read_bytes())
        repository.git("config", "--file", config, "--remove-section", _STATE.rpartition(".")[0], check=False)
        state = json.dumps(record, sort_keys=True, separators=(",", ":"), default=json_default)
        section = config_section('sm120kit "rebase"', [("state", state), ("seal", seal(key, _STATE, state))]) if record else ""
        write_atomic(gitdir / "config", config.read_bytes() + section.encode() + more.encode())
