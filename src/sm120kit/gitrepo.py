"""Git as a place for trees: bare repositories whose commit ids depend on content alone.

Nothing of the user's git reaches in here: not the configuration files, not the ``GIT_*`` variables, hooks, templates or
signing, and not the attributes that an upstream's tree carries. Only ``network=True`` lets the user's settings in, because
proxies, certificates, credentials and ``insteadOf`` are theirs; such a call moves objects and makes none.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sm120kit.errors import CommandFailed, NotEnoughDisk
from sm120kit.process import Completed, run

IDENTITY = "sm120kit <sm120kit@localhost>"
"""Author and committer of what we commit ourselves."""

EPOCH = "@315532800 +0000"
"""1980-01-01, for commits that have no date of their own: the earliest date that a zip, and so a wheel, can give a file."""

_SETTINGS = {
    "core.attributesFile": "/dev/null",
    "core.excludesFile": "/dev/null",
    "core.hooksPath": "/dev/null",
    "core.autocrlf": "false",
    "core.safecrlf": "false",
    "core.fileMode": "true",
    "core.symlinks": "true",
    "core.quotePath": "false",
    "core.fsmonitor": "false",
    "core.compression": "1",  # these repositories are written once and read a few times
    "fastimport.unpackLimit": "0",
    "fetch.unpackLimit": "1",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "commit.gpgSign": "false",
    "safe.directory": "*",  # a state directory on a volume may belong to another user
    "advice.detachedHead": "false",
}
_ATTRIBUTES = "* -text -ident !eol !crlf !filter !working-tree-encoding !diff !merge !whitespace !export-ignore !export-subst\n"
"""Ranks above every ``.gitattributes`` of a tree: files are stored, written and compared byte by byte."""

_PLACES = [
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_COMMON_DIR",
    "GIT_INDEX_FILE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_NAMESPACE",
    "GIT_PREFIX",
    "GIT_SHALLOW_FILE",
    "GIT_GRAFT_FILE",
    "GIT_REPLACE_REF_BASE",
    "GIT_CEILING_DIRECTORIES",
    "GIT_DEFAULT_HASH",
    "GIT_TEMPLATE_DIR",
]
"""Variables that would send git to other files than the ones named to it."""


@dataclass(frozen=True)
class Repository:
    """A bare git repository at ``path``."""

    path: Path

    @classmethod
    def init(cls, path: Path) -> Repository:
        """Make an empty repository at ``path``, which may be an empty directory."""
        repository = cls(path)
        _git(["init", "--quiet", "--bare", "--template=", "--initial-branch=base", "--object-format=sha1", path])
        (path / "info").mkdir(exist_ok=True)
        (path / "info" / "attributes").write_text(_ATTRIBUTES)
        return repository

    def git(
        self,
        *args: str | Path,
        stdin: bytes | Iterable[bytes] | None = None,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        network: bool = False,
        tied: bool = False,
    ) -> Completed:
        """Run git in this repository; ``network`` lets the user's git settings in, ``tied`` ends it with this process.

        Raises:
            CommandFailed: git failed and ``check`` is true.
            ToolchainMissing: there is no git.
            NotEnoughDisk: it could not write what it should.
        """
        return _git([f"--git-dir={self.path}", *args], stdin=stdin, env=env, check=check, network=network, tied=tied)

    def tree_of(self, commit: str) -> str:
        """The tree id of a commit."""
        return self.git("rev-parse", "--verify", "--quiet", f"{commit}^{{tree}}").stdout.strip()

    def subtree(self, commit: str, path: str) -> str:
        """The id of the tree at ``path`` of a commit or tree.

        Raises:
            FileNotFoundError: there is no directory of that name.
        """
        return self._entry(commit, path, "tree")

    def read(self, commit: str, path: str) -> bytes:
        """The content of one file of a commit or tree.

        Raises:
            FileNotFoundError: there is no file of that name.
        """
        return self.git("cat-file", "blob", self._entry(commit, path, "blob")).raw

    def paths(self, commit: str, below: str = "") -> list[str]:
        """Every file of a commit or tree, or those below one of its directories, by full path and in git's order."""
        listed = self.git("ls-tree", "-r", "-z", "--name-only", commit, *([f"{below.rstrip('/')}/"] if below else []))
        return [os.fsdecode(name) for name in listed.raw.split(b"\0") if name]

    def changed(self, before: str, after: str) -> list[str]:
        """Every file in which two commits or trees differ, by full path and in git's order."""
        listed = self.git("diff-tree", "-r", "-z", "--name-only", "--no-renames", before, after)
        return [os.fsdecode(name) for name in listed.raw.split(b"\0") if name]

    def _entry(self, commit: str, path: str, kind: str) -> str:
        asked = self.git(
            "cat-file", "--batch-check=%(objecttype) %(objectname)", stdin=f"{commit}:{path.strip('/')}\n".encode()
        )
        found, _, name = asked.stdout.strip().partition(" ")
        if found != kind:
            raise FileNotFoundError(f"no {kind} {path} in {commit} of {self.path}")
        return name

    def write(self, content: bytes) -> str:
        """Store a file's content and return its blob id."""
        return self.git("hash-object", "-w", "--no-filters", "--stdin", stdin=content).stdout.strip()

    def commit_tree(self, tree: str, parent: str | None, message: str, *, author: str = IDENTITY, date: str = EPOCH) -> str:
        """Commit a tree and return the commit id, which depends on the arguments alone.

        ``author`` is ``Name <address>``; ``date`` is ``@<seconds since 1970> <zone>`` and dates both author and committer.
        """
        name, _, address = author.rpartition(" <")
        if not name or not address.endswith(">"):
            raise ValueError(f"author is not of the form 'Name <address>': {author!r}")
        own_name, own_address = IDENTITY.removesuffix(">").split(" <")
        env = {
            "GIT_AUTHOR_NAME": name,
            "GIT_AUTHOR_EMAIL": address.removesuffix(">"),
            "GIT_AUTHOR_DATE": date,
            "GIT_COMMITTER_NAME": own_name,
            "GIT_COMMITTER_EMAIL": own_address,
            "GIT_COMMITTER_DATE": date,
        }
        above = ["-p", parent] if parent else []
        return self.git("commit-tree", tree, *above, stdin=message.encode(), env=env).stdout.strip()

    def point(self, ref: str, commit: str) -> None:
        """Make ``ref`` (``refs/...``) name ``commit``, so that nothing collects it."""
        self.git("update-ref", ref, commit)

    @contextmanager
    def index(self, tree: str | None = None) -> Iterator[Index]:
        """A throwaway index that starts as ``tree``, to compose another tree without a working directory."""
        with tempfile.TemporaryDirectory(dir=self.path, prefix="index-") as directory:
            index = Index(self, Path(directory) / "index")
            if tree is not None:
                index.git("read-tree", tree)
            yield index

    def export(self, commit: str, directory: Path) -> None:
        """Write the files of a commit or tree below ``directory``, byte by byte as they are stored."""
        directory.mkdir(parents=True, exist_ok=True)
        with self.index(commit) as index:
            index.git(f"--work-tree={directory}", "checkout-index", "--all", "--force", "--quiet")


@dataclass(frozen=True)
class Index:
    """A throwaway index of ``repository``."""

    repository: Repository
    file: Path

    def git(self, *args: str | Path, stdin: bytes | None = None, check: bool = True, tied: bool = False) -> Completed:
        """Run git with this index; ``tied`` ends it when this process is killed, so that it does not go on writing."""
        return self.repository.git(*args, stdin=stdin, env={"GIT_INDEX_FILE": str(self.file)}, check=check, tied=tied)

    def add(self, path: str, content: bytes) -> None:
        """Put a file at ``path``, in place of what is there; nobody may execute it."""
        self.git("update-index", "--add", "--replace", "--cacheinfo", f"100644,{self.repository.write(content)},{path}")

    def graft(self, path: str, tree: str) -> None:
        """Put a whole tree at ``path``, in place of what is there."""
        there = self.git("ls-files", "-z", "--", f":(literal){path.strip('/')}").raw.split(b"\0")
        gone = b"".join(b"0 %s\t%s\0" % (b"0" * 40, name) for name in there if name)
        self.git("update-index", "-z", "--index-info", stdin=gone)
        self.git("read-tree", "-i", f"--prefix={path.strip('/')}/", tree)

    def write_tree(self) -> str:
        """Store the index as a tree and return its id."""
        return self.git("write-tree").stdout.strip()


def _git(
    args: Iterable[str | Path],
    *,
    stdin: bytes | Iterable[bytes] | None = None,
    env: Mapping[str, str] | None = None,
    check: bool = True,
    network: bool = False,
    tied: bool = False,
) -> Completed:
    own = {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"}
    if network:
        drop = list(_PLACES)
    else:
        drop = [name for name in os.environ if name.startswith("GIT_")]
        own |= {
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_NO_REPLACE_OBJECTS": "1",
        }
    settings = [word for name, value in _SETTINGS.items() for word in ("-c", f"{name}={value}")]
    try:
        return run(["git", *settings, *args], env={**own, **(env or {})}, drop=drop, stdin=stdin, check=check, tied=tied)
    except CommandFailed as error:
        if "No space left on device" in error.message or "Out of diskspace" in error.message:
            raise NotEnoughDisk(
                "git found no space left on the file system",
                "free some space, or name another directory with --state or SM120KIT_STATE",
            ) from error
        raise
