"""Bare repositories: commit ids depend on content alone, and no configuration runs a program."""

from __future__ import annotations

from pathlib import Path

import pytest

from sm120kit.core.errors import UnsafeSource
from sm120kit.sources.git import IDENTITY, Repository

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
def test_commit_id_with_hostile_user_git_config(tmp_path: Path) -> None:
    repository, commit = small_commit(tmp_path / "r")
    assert commit == COMMIT
    repository.set_ref("refs/heads/base", commit)
    assert repository.tree_of("refs/heads/base") == repository.tree_of(commit)


def plant(git_dir: Path, mark: Path) -> None:
    """A configuration that runs a program wherever git offers it; the programs create ``mark``."""
    program = mark.with_name("program")
    program.write_text(f'#!/bin/sh\necho "$0 $@" >> {mark}\nexit 1\n')
    program.chmod(0o755)
    hooks = mark.with_name("hooks")
    hooks.mkdir(exist_ok=True)
    for name in ("reference-transaction", "post-index-change", "post-checkout", "pre-commit"):
        (hooks / name).write_text(program.read_text())
        (hooks / name).chmod(0o755)
    (git_dir / "hooks").mkdir(exist_ok=True)
    (git_dir / "hooks" / "reference-transaction").write_text(program.read_text())
    (git_dir / "hooks" / "reference-transaction").chmod(0o755)
    extensions = "[extensions]\n\tpartialClone = origin\n\tworktreeConfig = true\n"
    config = f"""[core]
	repositoryformatversion = 1
	bare = true
	fsmonitor = {program}
	sshCommand = {program}
	gitProxy = {program}
	hooksPath = {hooks}
	pager = {program}
	editor = {program}
	askPass = {program}
	alternateRefsCommand = {program}
	attributesFile = {mark.with_name("attributes")}
[log]
	showSignature = true
[commit]
	gpgSign = true
[gpg]
	program = {program}
[diff]
	external = {program}
[diff "evil"]
	textconv = {program}
	command = {program}
[filter "evil"]
	clean = {program}
	smudge = {program}
	process = {program}
	required = true
[merge "evil"]
	driver = {program}
[uploadpack]
	packObjectsHook = {program}
[remote "origin"]
	url = {mark.parent}
	promisor = true
	uploadpack = {program}
	vcs = evil
[credential]
	helper = {program}
[alias]
	log = !{program}
	status = !{program}
[include]
	path = {mark.with_name("included")}
{extensions}"""
    mark.with_name("attributes").write_text("* filter=evil diff=evil merge=evil\n")
    mark.with_name("included").write_text(f"[gpg]\n\tprogram = {program}\n")
    (git_dir / "config").write_text(config)
    (git_dir / "config.worktree").write_text(config)
    (git_dir / "info" / "attributes").write_text("* filter=evil diff=evil merge=evil\n")


def sign(repository: Repository, commit: str) -> str:
    """Store the commit again with a signature, which git would pass to gpg."""
    raw = repository.git("cat-file", "commit", commit).raw
    head, blank, body = raw.partition(b"\n\n")
    signature = b"\ngpgsig -----BEGIN PGP SIGNATURE-----\n \n x\n -----END PGP SIGNATURE-----"
    stored = repository.git("hash-object", "-t", "commit", "-w", "--stdin", stdin=head + signature + blank + body)
    return stored.stdout.strip()


def test_planted_configuration_runs_no_program(tmp_path: Path) -> None:
    """All operations on a repository with a hostile configuration."""
    mark = tmp_path / "ran"
    repository, commit = small_commit(tmp_path / "r")
    signed = sign(repository, commit)

    def planted() -> Repository:
        plant(repository.path, mark)
        return repository

    planted().set_ref("refs/heads/base", signed)
    assert planted().git("log", "-1", "--format=%H %T", "refs/heads/base").stdout.split()[0] == signed
    assert planted().paths(signed) == [".gitattributes", "a.txt", "bin/run", "\u00fc/name with space"]
    assert planted().commit_tree(repository.tree_of(signed), None, "base\n\nbody\n") == COMMIT
    planted().export(signed, tmp_path / "out")
    assert (tmp_path / "out/a.txt").read_bytes() == b"one\r\ntwo\r\n"
    with planted().index(signed) as index:
        plant(repository.path, mark)
        (tmp_path / "out/a.txt").write_text("changed\n")
        assert index.git(f"--work-tree={tmp_path / 'out'}", "status", "--porcelain").stdout
        plant(repository.path, mark)
        index.git(f"--work-tree={tmp_path / 'out'}", "read-tree", "--reset", "-u", repository.tree_of(signed))
    planted().git("fetch", "--quiet", "--", repository.path, f"{signed}:refs/heads/again", network=True)
    planted().git("cat-file", "-e", "1" * 40, check=False)
    assert not mark.exists(), mark.read_text()


def test_symlink_as_configuration_is_not_followed(tmp_path: Path) -> None:
    repository, _ = small_commit(tmp_path / "r")
    config = repository.path / "config"
    theirs = tmp_path / "theirs"
    config.rename(theirs)
    config.symlink_to(theirs)
    repository.git("rev-parse", "--git-dir")
    assert config.is_file() and not config.is_symlink() and config.read_bytes() == theirs.read_bytes()


def test_planted_commondir_is_ignored(tmp_path: Path) -> None:
    repository, commit = small_commit(tmp_path / "r")
    other, _ = small_commit(tmp_path / "other")
    plant(other.path, tmp_path / "ran")
    (repository.path / "commondir").write_text(f"{other.path}\n")
    repository.set_ref("refs/heads/base", sign(repository, commit))
    repository.git("log", "-1", "refs/heads/base")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("revision", ["--output=x", "-x"])
def test_revision_with_dash_is_rejected(tmp_path: Path, revision: str) -> None:
    repository, commit = small_commit(tmp_path / "r")
    for use in (
        lambda: repository.tree_of(revision),
        lambda: repository.paths(revision),
        lambda: repository.changed(revision, commit),
        lambda: repository.changed(commit, revision),
        lambda: repository.set_ref("refs/heads/x", revision),
        lambda: repository.export(revision, tmp_path / "out"),
    ):
        with pytest.raises(UnsafeSource, match="is not a git revision"):
            use()


@pytest.mark.usefixtures("hostile_git")
def test_export_writes_stored_bytes(tmp_path: Path) -> None:
    repository, commit = small_commit(tmp_path / "r")
    repository.export(commit, tmp_path / "out")
    assert (tmp_path / "out/a.txt").read_bytes() == b"one\r\ntwo\r\n" == repository.read(commit, "a.txt")
    assert (tmp_path / "out/\u00fc/name with space").read_bytes() == b"$Id$"
    assert (tmp_path / "out/bin/run").stat().st_mode & 0o111
    assert not (tmp_path / "out/a.txt").stat().st_mode & 0o111


def test_read_files_and_subtrees(tmp_path: Path) -> None:
    repository, commit = small_commit(tmp_path / "r")
    assert repository.paths(commit) == [".gitattributes", "a.txt", "bin/run", "\u00fc/name with space"]
    assert repository.paths(commit, "bin") == ["bin/run"]
    assert repository.paths(repository.subtree(commit, "bin")) == ["run"]
    for wrong in (repository.read, repository.subtree):
        with pytest.raises(FileNotFoundError, match="nowhere"):
            wrong(commit, "nowhere")
    with pytest.raises(FileNotFoundError, match="no blob bin"):
        repository.read(commit, "bin")


def test_graft_replaces_existing_entries(tmp_path: Path) -> None:
    repository, commit = small_commit(tmp_path / "r")
    with repository.index(commit) as index:
        index.graft("bin", repository.subtree(commit, "\u00fc"))
        index.graft("a.txt", repository.subtree(commit, "bin"))
        tree = index.write_tree()
    assert repository.paths(tree) == [".gitattributes", "a.txt/run", "bin/name with space", "\u00fc/name with space"]


def test_author_without_address_is_rejected(tmp_path: Path) -> None:
    repository, commit = small_commit(tmp_path / "r")
    with pytest.raises(ValueError, match="Name <address>"):
        repository.commit_tree(repository.tree_of(commit), commit, "x", author="nobody")
    child = repository.commit_tree(
        repository.tree_of(commit), commit, "x", author="A B <a@example.invalid>", date="@1700000000 +0200"
    )
    shown = repository.git("show", "-s", "--format=%an|%ae|%at|%cn <%ce>|%cI|%P", child).stdout.strip()
    assert shown == f"A B|a@example.invalid|1700000000|{IDENTITY}|2023-11-15T00:13:20+02:00|{commit}"
