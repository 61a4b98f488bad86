"""Bare repositories: commit ids depend on content alone, and no configuration runs a program."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patch_series import write_blob

from sm120kit.core.errors import CommandFailed, NotTrusted
from sm120kit.sources.git import DATE, IDENTITY, Repository

COMMIT = "88f0974db18be98788498faf81c2b9b4706bfcd0"


def small_commit(path: Path) -> tuple[Repository, str]:
    repository = Repository.init(path)
    with repository.index() as index:
        index.add("a.txt", b"one\r\ntwo\r\n")
        program = write_blob(repository, b"#!/bin/sh\n")
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
        with pytest.raises(NotTrusted, match="is not a git revision"):
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


def test_author_without_address_is_rejected(tmp_path: Path) -> None:
    repository, commit = small_commit(tmp_path / "r")
    with pytest.raises(ValueError, match="Name <address>"):
        repository.commit_tree(repository.tree_of(commit), commit, "x", author="nobody")
    child = repository.commit_tree(
        repository.tree_of(commit), commit, "x", author="A B <a@example.invalid>", date="@1700000000 +0200"
    )
    shown = repository.git("show", "-s", "--format=%an|%ae|%at|%cn <%ce>|%cI|%P", child).stdout.strip()
    assert shown == f"A B|a@example.invalid|1700000000|{IDENTITY}|2023-11-15T00:13:20+02:00|{commit}"


def commit_by_git(repository: Repository, tree: str, message: str, author: str, date: str) -> str:
    """The id of a commit that ``git commit-tree`` creates."""
    env = {}
    for role, actor in (("AUTHOR", author), ("COMMITTER", IDENTITY)):
        name, _, address = actor.removesuffix(">").rpartition(" <")
        env |= {f"GIT_{role}_NAME": name, f"GIT_{role}_EMAIL": address, f"GIT_{role}_DATE": date}
    return repository.git("commit-tree", tree, stdin=message.encode(), env=env).stdout.strip()


AUTHORS = (IDENTITY, "J\u00fcrgen \u9648 <j@\u00fc.example>", "A\tB O'C. D <a b>", "No Address <>", "A\x01B <a@b>")
DATES = (DATE, "@0 -0000", "@1700000000 -0030", "@4000000000 +1345", "@99999999999 -1200", "@1 +0001")
MESSAGES = ("", "x", "x\n\n\nbody  \n \n", "\n\nx", "\u00fc\r\n#c\n", "x\x01")


def test_commit_ids_equal_those_of_git_commit_tree(tmp_path: Path) -> None:
    repository, commit = small_commit(tmp_path / "r")
    tree = repository.tree_of(commit)
    cases = {*zip(AUTHORS, itertools.cycle(DATES), itertools.cycle(MESSAGES))}
    cases |= {(AUTHORS[1], date, message) for date, message in zip(DATES, MESSAGES, strict=True)}
    for author, date, message in sorted(cases):
        created = repository.commit_tree(tree, None, message, author=author, date=date)
        assert created == commit_by_git(repository, tree, message, author, date), (author, date, message)
    assert repository.git("fsck", "--full").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"author": "nobody"}, "Name <address>"),
        ({"author": "A. <a@b>"}, "removes"),
        ({"author": "A\nparent 1 <a@b>"}, "removes"),
        ({"author": "A <b> <a@b>"}, "removes"),
        ({"author": "A\0 <a@b>"}, "removes"),
        ({"author": "J\udcfcrgen <a@b>"}, "surrogates"),
        ({"message": "a\0b"}, "NUL"),
        ({"message": "a\udcfcb"}, "surrogates"),
        ({"date": "@-1 +0000"}, "date"),
        ({"date": "yesterday"}, "date"),
        ({"date": "@1 +0060"}, "date"),
    ],
)
def test_commit_that_versions_of_git_store_differently_is_rejected(
    tmp_path: Path, arguments: dict[str, str], problem: str
) -> None:
    repository, commit = small_commit(tmp_path / "r")
    before = repository.git("count-objects").stdout
    with pytest.raises(ValueError, match=problem):
        repository.commit_tree(repository.tree_of(commit), None, **{"message": "x", **arguments})
    assert repository.git("count-objects").stdout == before


def test_commit_of_absent_or_wrong_objects_is_rejected(tmp_path: Path) -> None:
    repository, commit = small_commit(tmp_path / "r")
    tree = repository.tree_of(commit)
    for wrong, parent in (
        ("1" * 40, None),
        (commit, None),
        (write_blob(repository, b"x"), None),
        ("a\nb", None),
        (tree, "1" * 40),
        (tree, tree),
    ):
        with pytest.raises(CommandFailed, match=r"is no (tree|commit) in"):
            repository.commit_tree(wrong, parent, "x")
    assert repository.commit_tree(tree, commit, "x") == repository.commit_tree(tree, commit, "x"), "usable afterwards"
    (repository.path / "HEAD").unlink()
    with pytest.raises(CommandFailed):
        Repository(repository.path).commit_tree(tree, None, "x")


def test_tree_with_submodule_link_and_bytes_in_names(tmp_path: Path) -> None:
    repository, commit = small_commit(tmp_path / "r")
    blob = write_blob(repository, b"a.txt")
    entries = (
        b"120000 %s\tlink\0" % blob.encode(),
        b"160000 %s\tsubmodule\0" % commit.encode(),
        b"100644 %s\td\xff/\xe9\n\0" % blob.encode(),
    )
    with repository.index(commit) as index:
        index.git("update-index", "-z", "--index-info", stdin=b"".join(entries))
        tree = index.write_tree()
    child = repository.commit_tree(tree, commit, "x")
    names = [".gitattributes", "a.txt", "bin/run", "d\udcff/\udce9\n", "link", "submodule", "\u00fc/name with space"]
    assert repository.paths(child) == names and repository.tree_of(child) == tree
    assert repository.changed(commit, child) == ["d\udcff/\udce9\n", "link", "submodule"]
    assert repository.read(child, "link") == b"a.txt"
    with pytest.raises(FileNotFoundError):
        repository.subtree(child, "submodule")


def test_objects_that_git_writes_or_packs_later_are_found(tmp_path: Path) -> None:
    repository, commit = small_commit(tmp_path / "r")
    first = repository.commit_tree(repository.tree_of(commit), commit, "first\n")
    repository.set_ref("refs/heads/base", first)
    repository.git("repack", "-adq")
    repository.git("prune-packed", "-q")
    with repository.index(commit) as index:
        index.add("later", b"later")
        tree = index.write_tree()
    second = repository.commit_tree(tree, first, "second\n")
    repository.set_ref("refs/heads/base", second)
    repository.git("repack", "-adq")
    assert repository.commit_tree(repository.tree_of(second), second, "third\n")
    assert repository.git("rev-list", "--count", second).stdout == "3\n"


ALL_METHODS = """
import sys
from pathlib import Path
from sm120kit.sources.git import Repository
path, out = map(Path, sys.argv[1:])
repository = Repository(path)
tree = repository.tree_of("refs/heads/base")
assert repository.subtree(tree, "bin") and repository.read(tree, "a.txt") and repository.paths(tree)
with repository.index(tree) as index:
    index.add("b.txt", b"b")
    other = index.write_tree()
assert repository.changed(tree, other)
assert "git" not in sys.modules, "reading loads no GitPython"
commit = repository.commit_tree(tree, None, "base\\n\\nbody\\n")
repository.commit_tree(other, commit, "other\\n")
assert "git" in sys.modules
repository.set_ref("refs/heads/again", commit)
repository.export(commit, out)
print(commit)
"""


def test_planted_variables_run_no_program_and_redirect_nothing(tmp_path: Path) -> None:
    """Also none of GitPython's own variables, which it reads when it is imported: in another process."""
    mark, elsewhere = tmp_path / "ran", tmp_path / "elsewhere"
    repository, commit = small_commit(tmp_path / "r")
    repository.set_ref("refs/heads/base", commit)
    theirs, _ = small_commit(elsewhere)
    plant(repository.path, mark)
    plant(theirs.path, mark)
    program = mark.with_name("program")
    (repository.path / ".git").write_text(f"gitdir: {elsewhere}\n")
    (repository.path / "commondir").write_text(f"{elsewhere}\n")
    (repository.path / "objects/info/alternates").write_text(f"{elsewhere}/objects\n")
    for name in ("git-cat-file", "git-hash-object", "git-commit-tree"):
        (tmp_path / name).symlink_to(program)
    (tmp_path / ".gitconfig").write_text((elsewhere / "config").read_text())
    programs = (
        "GIT_PYTHON_GIT_EXECUTABLE GIT_EXTERNAL_DIFF GIT_SSH GIT_SSH_COMMAND GIT_PROXY_COMMAND GIT_ASKPASS GIT_EDITOR GIT_PAGER"
    )
    variables = {
        **dict.fromkeys(programs.split(), str(program)),
        **dict.fromkeys(["GIT_DIR", "GIT_COMMON_DIR", "GIT_WORK_TREE"], str(elsewhere)),
        **dict.fromkeys(["GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES"], str(elsewhere / "objects")),
        **dict.fromkeys(["GIT_TRACE", "GIT_TRACE2", "GIT_TRACE_SETUP"], str(tmp_path / "trace")),
        "GIT_CONFIG_COUNT": "2",
        "GIT_CONFIG_KEY_0": "core.fsmonitor",
        "GIT_CONFIG_VALUE_0": str(program),
        "GIT_CONFIG_KEY_1": "gpg.program",
        "GIT_CONFIG_VALUE_1": str(program),
        "GIT_CONFIG_PARAMETERS": f"'diff.external={program}'",
        "GIT_EXEC_PATH": str(tmp_path),
        "GIT_PYTHON_TRACE": "full",
        "GIT_AUTHOR_NAME": "Somebody Else",
        "GIT_COMMITTER_DATE": "@1 +0000",
        "HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path),
    }
    before = sorted(path for path in elsewhere.rglob("*"))
    script = [sys.executable, "-c", ALL_METHODS, repository.path, tmp_path / "out"]
    done = subprocess.run(script, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{COMMIT}\n" and done.stderr == ""
    assert (tmp_path / "out/a.txt").read_bytes() == b"one\r\ntwo\r\n"
    assert sorted(path for path in elsewhere.rglob("*")) == before
    assert not (tmp_path / "trace").exists()
    assert not mark.exists(), mark.read_text()


def test_planted_program_is_not_run_by_commits(tmp_path: Path) -> None:
    """Also when the configuration is planted while the process that reads objects is running."""
    mark = tmp_path / "ran"
    repository, commit = small_commit(tmp_path / "r")
    tree = repository.tree_of(commit)
    for parent in (sign(repository, commit), None, commit):
        plant(repository.path, mark)
        repository.commit_tree(tree, parent, "x\n")
    assert not mark.exists(), mark.read_text()
