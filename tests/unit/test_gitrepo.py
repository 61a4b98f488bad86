"""Commit ids depend on content alone, whatever the user's git is set to."""

from __future__ import annotations

from pathlib import Path

import pytest

from sm120kit.gitrepo import IDENTITY, Repository

COMMIT = "88f0974db18be98788498faf81c2b9b4706bfcd0"


def small_commit(path: Path) -> tuple[Repository, str]:
    repository = Repository.init(path)
    with repository.index() as index:
        index.add("a.txt", b"one\r\ntwo\r\n")
        program = repository.write(b"#!/bin/sh\n")
        index.git("update-index", "--add", "--cacheinfo", f"100755,{program},bin/run")
        index.add(".gitattributes", b"* text=auto eol=crlf\n*.txt ident filter=lfs working-tree-encoding=UTF-16\n")
        index.add("\u00fc/name with space", b"$Id$")
        tree = index.write_tree()
    return repository, repository.commit_tree(tree, None, "base\n\nbody\n")


def test_commit_id_is_a_constant(tmp_path: Path) -> None:
    _, commit = small_commit(tmp_path / "r")
    assert commit == COMMIT


@pytest.mark.usefixtures("hostile_git")
def test_commit_id_ignores_the_users_git(tmp_path: Path) -> None:
    repository, commit = small_commit(tmp_path / "r")
    assert commit == COMMIT
    repository.point("refs/heads/base", commit)
    assert repository.tree_of("refs/heads/base") == repository.tree_of(commit)


@pytest.mark.usefixtures("hostile_git")
def test_export_writes_what_is_stored(tmp_path: Path) -> None:
    repository, commit = small_commit(tmp_path / "r")
    repository.export(commit, tmp_path / "out")
    assert (tmp_path / "out/a.txt").read_bytes() == b"one\r\ntwo\r\n" == repository.read(commit, "a.txt")
    assert (tmp_path / "out/\u00fc/name with space").read_bytes() == b"$Id$"
    assert (tmp_path / "out/bin/run").stat().st_mode & 0o111
    assert not (tmp_path / "out/a.txt").stat().st_mode & 0o111


def test_reading(tmp_path: Path) -> None:
    repository, commit = small_commit(tmp_path / "r")
    assert repository.paths(commit) == [".gitattributes", "a.txt", "bin/run", "\u00fc/name with space"]
    assert repository.paths(commit, "bin") == ["bin/run"]
    assert repository.paths(repository.subtree(commit, "bin")) == ["run"]
    for wrong in (repository.read, repository.subtree):
        with pytest.raises(FileNotFoundError, match="nowhere"):
            wrong(commit, "nowhere")
    with pytest.raises(FileNotFoundError, match="no blob bin"):
        repository.read(commit, "bin")


def test_graft_replaces_what_was_there(tmp_path: Path) -> None:
    repository, commit = small_commit(tmp_path / "r")
    with repository.index(commit) as index:
        index.graft("bin", repository.subtree(commit, "\u00fc"))
        index.graft("a.txt", repository.subtree(commit, "bin"))
        tree = index.write_tree()
    assert repository.paths(tree) == [".gitattributes", "a.txt/run", "bin/name with space", "\u00fc/name with space"]


def test_author_must_be_an_identity(tmp_path: Path) -> None:
    repository, commit = small_commit(tmp_path / "r")
    with pytest.raises(ValueError, match="Name <address>"):
        repository.commit_tree(repository.tree_of(commit), commit, "x", author="nobody")
    child = repository.commit_tree(
        repository.tree_of(commit), commit, "x", author="A B <a@example.invalid>", date="@1700000000 +0200"
    )
    shown = repository.git("show", "-s", "--format=%an|%ae|%at|%cn <%ce>|%cI|%P", child).stdout.strip()
    assert shown == f"A B|a@example.invalid|1700000000|{IDENTITY}|2023-11-15T00:13:20+02:00|{commit}"
