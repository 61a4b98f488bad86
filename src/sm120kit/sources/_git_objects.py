"""Create commits through GitPython.

GitPython reads variables, ``.git`` files and configuration that :mod:`sm120kit.sources.git` excludes, and starts git with the
environment of this process. Here it opens a repository without reading them and can start only ``git cat-file``, which runs as
every git of sm120kit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
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
    from git.db import GitCmdObjectDB
    from gitdb.utils.encoding import force_text


class _CatFile(git.Git):
    """Starts ``git cat-file`` in a repository, and no other program."""

    def __init__(self, repository: Repository) -> None:
        super().__init__(repository.path)
        self.repository = repository

    def execute(self, command: str | Sequence[Any], *_: Any, **options: Any) -> Any:
        """Start a command that GitPython composed."""
        if command[1] != "cat-file" or not options.get("as_process"):
            raise NotImplementedError(f"GitPython may start only git cat-file: {command}")
        return self.AutoInterrupt(self.repository.start(*command[1:]), command)


class _Database(GitCmdObjectDB):
    """Objects, read by :class:`_CatFile` and written by ``git hash-object``."""

    def __init__(self, repository: Repository, cat_file: _CatFile) -> None:
        super().__init__(repository.path / "objects", cat_file)
        self.repository = repository

    def store(self, istream: IStream) -> IStream:
        """Write an object, which git checks; GitPython passes ``--literally``, which also writes malformed ones."""
        written = self.repository.git("hash-object", "-w", "-t", force_text(istream.type), "--stdin", stdin=istream.read())
        istream.binsha = bytes.fromhex(written.stdout.strip())
        return istream


class Objects(git.Repo):
    """The objects of a bare repository.

    It starts git when it first reads, and ends it when it is closed or deleted. Only one thread may use it at a time.
    """

    def __init__(self, path: Path) -> None:  # not that of the base class, which reads GIT_*, `.git` and the configuration
        repository = Repository(path)
        self.git_dir = self.working_dir = str(path)
        self.git = _CatFile(repository)
        self.odb = _Database(repository, self.git)

    def config_reader(self, config_level: Any = None) -> git.GitConfigParser:
        """An empty configuration; the user's could name an encoding for commits."""
        return git.GitConfigParser([], read_only=True)

    def create_commit(self, tree: str, parent: str | None, message: str, actors: tuple[str, str], date: str) -> str:
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
        commit = git.Commit.create_from_tree(
            self,
            git.Tree(self, self._require(tree, "tree")),
            message,
            [git.Commit(self, self._require(parent, "commit"))] if parent else [],
            author=author,
            committer=committer,
            author_date=date,
            commit_date=date,
        )
        return commit.hexsha

    def _require(self, revision: str, kind: str) -> bytes:
        """The binary id of an object of a type."""
        try:
            name, actual = map(force_text, self.git.get_object_header(revision)[:2])
        except (ValueError, BrokenPipeError) as error:
            raise CommandFailed(f"git: {revision} does not exist in {self.git_dir}") from error
        if actual != kind:
            raise CommandFailed(f"git: {revision} in {self.git_dir} is a {actual}, not a {kind}")
        return bytes.fromhex(name)


def _actor(text: str) -> git.Actor:
    """Parse ``Name <address>``.

    Raises:
        ValueError: it has another form, or git removes characters of it.
    """
    name, _, address = text.rpartition(" <")
    if not name or not address.endswith(">"):
        raise ValueError(f"author is not of the form 'Name <address>': {text!r}")
    address = address.removesuffix(">")
    if any(part != part.strip(_EDGES) or {*"<>\n\0"} & {*part} for part in (name, address)):
        raise ValueError(f"author has characters that git removes: {text!r}")
    return git.Actor(name, address)
