"""Create commits through GitPython.

GitPython reads variables, ``.git`` files and configuration that :mod:`sm120kit.sources.git` excludes, and starts git with them.
Here it composes the commit only: git itself, as :class:`Repository` runs it, looks up the objects and writes the new one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sm120kit.core.errors import CommandFailed
from sm120kit.sources.git import Repository, environment

if TYPE_CHECKING:
    from gitdb.base import IStream

_EDGES = "".join(map(chr, range(33))) + ".,:;<>\"\\'"
"""Characters that versions of git remove from both ends of names and addresses."""


def _set_variables(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def _own_environment() -> Iterator[None]:
    """Give this process the environment of git while the block runs."""
    variables = environment()
    before = {name: os.environ.get(name) for name in variables}
    _set_variables(variables)
    try:
        yield
    finally:
        _set_variables(before)


with _own_environment():  # the import runs `git version`, with any program that GIT_PYTHON_GIT_EXECUTABLE names
    import git
    from gitdb.utils.encoding import force_text


class _Composer(git.Repo):
    """A repository for which GitPython composes commits; it is its own database, to which objects are written."""

    def __init__(
        self, repository: Repository
    ) -> None:  # not that of the base class, which reads GIT_*, `.git` and the configuration
        self.git_dir = self.working_dir = str(repository.path)
        self.repository = repository
        self.odb = self  # type: ignore[assignment]

    def config_reader(self, config_level: Any = None) -> git.GitConfigParser:
        """An empty configuration; the user's could name an encoding for commits."""
        return git.GitConfigParser([], read_only=True)

    def store(self, istream: IStream) -> IStream:
        """Write an object, which git checks."""
        written = self.repository.git("hash-object", "-w", "-t", force_text(istream.type), "--stdin", stdin=istream.read())
        istream.binsha = bytes.fromhex(written.stdout.strip())
        return istream


def create_commit(
    repository: Repository, tree: str, parent: str | None, message: str, actors: tuple[str, str], date: str
) -> str:
    """Commit a tree and return the commit id, which is that of ``git commit-tree``.

    ``actors`` are author and committer, as ``Name <address>``; ``date`` is ``@<seconds since 1970> <zone>``, for both.

    Raises:
        ValueError: an actor, the date or the message is not in the form in which every version of git stores it.
        CommandFailed: tree or parent does not exist, or git cannot write the commit.
    """
    if not re.fullmatch(r"@\d+ [+-]\d\d[0-5]\d", date, re.ASCII):
        raise ValueError(f"date is not of the form '@<seconds> <zone>': {date!r}")
    if "\0" in message:
        raise ValueError(f"message contains NUL: {message!r}")
    author, committer = map(_actor, actors)
    composer = _Composer(repository)
    commit = git.Commit.create_from_tree(
        composer,
        git.Tree(composer, _require(repository, tree, "tree")),
        message,
        [git.Commit(composer, _require(repository, parent, "commit"))] if parent else [],
        author=author,
        committer=committer,
        author_date=date,
        commit_date=date,
    )
    return commit.hexsha


def _require(repository: Repository, revision: str, kind: str) -> bytes:
    """The binary id of an object of a type."""
    found = repository.git("cat-file", "--batch-check=%(objecttype) %(objectname)", stdin=f"{revision}\n".encode())
    actual, _, name = found.stdout.strip().partition(" ")
    if actual != kind:
        raise CommandFailed(f"git: {revision} is no {kind} in {repository.path}: {found.stdout.strip()}")
    return bytes.fromhex(name)


def _actor(text: str) -> git.Actor:
    """Parse ``Name <address>``."""
    name, _, address = text.rpartition(" <")
    if not name or not address.endswith(">"):
        raise ValueError(f"author is not of the form 'Name <address>': {text!r}")
    address = address.removesuffix(">")
    if any(part != part.strip(_EDGES) or {*"<>\n\0"} & {*part} for part in (name, address)):
        raise ValueError(f"author has characters that git removes: {text!r}")
    return git.Actor(name, address)
