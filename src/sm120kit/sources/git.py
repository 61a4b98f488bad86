"""Bare git repositories whose commit ids depend on content alone.

The user's git settings have no effect: configuration files, ``GIT_*`` variables, hooks, templates and signing are excluded, and
so are the attributes in an upstream tree. Only ``network=True`` uses the user's settings, for proxies, certificates,
credentials and ``insteadOf``; such a call transfers objects and creates none.

A repository's own configuration can name programs (``gpg.program``, ``filter.*.clean``, ``core.sshCommand``, a promisor's
``uploadpack``), and git has no option to ignore it. It is therefore overwritten before each call.

GitPython creates the commits, see :mod:`sm120kit.sources._git_objects`. The other methods run git once a call: commands read
fewer objects than the import of GitPython costs, its diffs and listings of trees are slower than git's, and it has no
``apply``, no index without a work tree and no limits for a fetch.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sm120kit.core.archives import SOURCE_DATE_EPOCH
from sm120kit.core.atomic_writes import write_atomic
from sm120kit.core.errors import CommandFailed, FetchFailed, NotTrusted, ResourceUnavailable
from sm120kit.core.process import Completed, Environment, Stopped, run, run_within
from sm120kit.sources._git_urls import without_credentials

IDENTITY = "sm120kit <sm120kit@localhost>"
"""Author and committer of our own commits."""

DATE = f"@{SOURCE_DATE_EPOCH} +0000"
"""Date of commits that have no date of their own, as git reads it."""

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
    "log.showSignature": "false",
    "advice.detachedHead": "false",
}
_OPTIONS = [argument for name, value in _SETTINGS.items() for argument in ("-c", f"{name}={value}")]
"""Options of every git."""

PROTOCOLS = ("file", "git", "http", "https", "ssh")
"""Transports that git may use, whatever its configuration: none of them runs a program that a URL names, as ``ext`` does.

:mod:`sm120kit.sources._git_urls` limits URLs further; the user's ``insteadOf`` may replace one transport by another.
"""

MAX_FETCH_BYTES = 8 * 2**30
"""Limit for a file that git writes while it fetches: a server may send without end, and git has no limit of its own."""

MAX_FETCH_SECONDS = 3600.0
"""Limit for a git that uses the network: a server may also send slowly without end."""

_LIMITED = """trap '' XFSZ; ulimit -f "$0" && exec "$@" """
"""``ulimit`` counts blocks of 512 bytes (POSIX). Without the trap, SIGXFSZ would end git before it prints an error."""

_ATTRIBUTES = "* -text -ident !eol !crlf !filter !working-tree-encoding !diff !merge !whitespace !export-ignore !export-subst\n"
"""Takes precedence over every ``.gitattributes`` of a tree: files are stored, written and compared byte by byte."""

_OWN_FILES = {
    "config": "[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = true\n",
    "info/attributes": _ATTRIBUTES,
}
_NO_FILES = ("commondir", "config.worktree", "objects/info/alternates")
"""Files by which git would use another configuration, or objects of another repository."""

_LOCATION_VARIABLES = [
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
"""Variables that would make git use other files than those of its arguments."""


@dataclass(frozen=True)
class Repository:
    """A bare git repository at ``path``."""

    path: Path

    @classmethod
    def init(cls, path: Path) -> Repository:
        """Create an empty repository at ``path``, which may be an empty directory."""
        repository = cls(path)
        arguments = ["init", "--quiet", "--bare", "--template=", "--initial-branch=base", "--object-format=sha1"]
        # Tied: left behind by a killed process, git would create a directory again that was removed meanwhile.
        _git([*arguments, path], env={"GIT_DEFAULT_REF_FORMAT": "files"}, tied=True)
        repository._reset_configuration()
        return repository

    def _reset_configuration(self) -> None:
        """Overwrite the configuration and attributes of the repository with ours."""
        if not (self.path / "HEAD").is_file():
            return  # not a repository: git reports it
        for name in _NO_FILES:
            (self.path / name).unlink(missing_ok=True)
        for name, content in _OWN_FILES.items():
            file = self.path / name
            if file.is_symlink() or not file.is_file() or file.read_bytes() != content.encode():
                write_atomic(file, content.encode())

    def git(
        self,
        *args: str | Path,
        stdin: bytes | Iterable[bytes] | None = None,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        network: bool = False,
        tied: bool = False,
    ) -> Completed:
        """Run git in this repository; ``network`` applies the user's git settings, ``tied`` ends git with this process.

        Raises:
            CommandFailed: git failed and ``check`` is true.
            RequirementMissing: git is not installed.
            ResourceUnavailable: the file system is full.
        """
        self._reset_configuration()
        return _git([f"--git-dir={self.path}", *args], stdin=stdin, env=env, check=check, network=network, tied=tied)

    def fetch(
        self, source: str | Path, *refspecs: str, options: Sequence[str] = (), check: bool = True, network: bool = False
    ) -> Completed:
        """Fetch refs of another repository into this one, without its tags. See :meth:`git`; ``options`` are git fetch's."""
        quiet = ("--quiet", "--no-tags", "--no-write-fetch-head")
        url = without_credentials(str(source)) if network else source
        return self.git("fetch", *quiet, *options, "--", url, *refspecs, check=check, network=network, tied=network)

    def tree_of(self, commit: str) -> str:
        """The tree id of a commit."""
        return self.git("rev-parse", "--verify", "--quiet", f"{_revision(commit)}^{{tree}}").stdout.strip()

    def subtree(self, commit: str, path: str) -> str:
        """The id of the tree at ``path`` of a commit or tree.

        Raises:
            FileNotFoundError: no directory is at ``path``.
        """
        return self._entry(commit, path, "tree")

    def read(self, commit: str, path: str) -> bytes:
        """The content of one file of a commit or tree.

        Raises:
            FileNotFoundError: no file is at ``path``.
        """
        return self.git("cat-file", "blob", self._entry(commit, path, "blob")).raw

    def paths(self, commit: str, below: str = "") -> list[str]:
        """All files of a commit or tree, or those below one of its directories: full paths in git's order."""
        listed = self.git(
            "ls-tree", "-r", "-z", "--name-only", _revision(commit), *([f"{below.rstrip('/')}/"] if below else [])
        )
        return [os.fsdecode(name) for name in listed.raw.split(b"\0") if name]

    def changed(self, before: str, after: str) -> list[str]:
        """All files in which two commits or trees differ: full paths in git's order."""
        listed = self.git("diff-tree", "-r", "-z", "--name-only", "--no-renames", _revision(before), _revision(after))
        return [os.fsdecode(name) for name in listed.raw.split(b"\0") if name]

    def _entry(self, commit: str, path: str, kind: str) -> str:
        entry = f"{commit}:{path.strip('/')}\n"
        checked = self.git("cat-file", "--batch-check=%(objecttype) %(objectname)", stdin=entry.encode())
        object_type, _, name = checked.stdout.strip().partition(" ")
        if object_type != kind:
            raise FileNotFoundError(f"no {kind} {path} in {commit} of {self.path}")
        return name

    def commit_tree(self, tree: str, parent: str | None, message: str, *, author: str = IDENTITY, date: str = DATE) -> str:
        """Commit a tree and return the commit id, which depends on the arguments alone.

        ``author`` is ``Name <address>``; ``date`` is ``@<seconds since 1970> <zone>`` and dates both author and committer.

        Raises:
            ValueError: author, date or message is not in the form in which every version of git stores it.
            CommandFailed: the tree or the parent does not exist.
        """
        from sm120kit.sources._git_objects import create_commit

        return create_commit(self, _revision(tree), parent, message, (author, IDENTITY), date)

    def set_ref(self, ref: str, commit: str) -> None:
        """Set ``ref`` (``refs/...``) to ``commit``, which keeps it from garbage collection."""
        self.git("update-ref", _revision(ref), _revision(commit))

    def make_worktree(self) -> None:
        """Make the repository ordinary, with its parent directory as work tree, for a person to work in."""
        (self.path / "config").write_text(_OWN_FILES["config"].replace("bare = true", "bare = false"))

    @contextmanager
    def index(self, tree: str | None = None) -> Iterator[GitIndex]:
        """A temporary index that starts as ``tree``, to compose another tree without a work tree."""
        with tempfile.TemporaryDirectory(dir=self.path, prefix="index-") as directory:
            index = GitIndex(self, Path(directory) / "index")
            if tree is not None:
                index.git("read-tree", _revision(tree))
            yield index

    def export(self, commit: str, directory: Path) -> None:
        """Write the files of a commit or tree below ``directory``, byte by byte as they are stored."""
        directory.mkdir(parents=True, exist_ok=True)
        with self.index(commit) as index:
            index.git(f"--work-tree={directory}", "checkout-index", "--all", "--force", "--quiet")


Content = tuple[str, bytes] | None
"""A file of an index, its mode and content; None removes it."""


@dataclass(frozen=True)
class GitIndex:
    """A temporary index of ``repository``."""

    repository: Repository
    file: Path

    def git(self, *args: str | Path, stdin: bytes | None = None, check: bool = True, tied: bool = False) -> Completed:
        """Run git with this index; ``tied`` ends git when this process is killed, so that it does not continue to write."""
        return self.repository.git(*args, stdin=stdin, env={"GIT_INDEX_FILE": str(self.file)}, check=check, tied=tied)

    def add(self, path: str, content: bytes, mode: str = "100644") -> None:
        """Put a file at ``path``, in place of an existing entry."""
        self.put({path: (mode, content)})

    def put(self, files: Mapping[str, Content]) -> None:
        """Put or remove files, in place of existing entries; git runs twice for all of them."""
        filled = {path: content for path, content in files.items() if content}
        with tempfile.TemporaryDirectory(dir=self.file.parent) as scratch:
            names = [Path(scratch) / str(number) for number in range(len(filled))]
            for name, (_, content) in zip(names, filled.values(), strict=True):
                name.write_bytes(content)
            listed = "".join(f"{name}\n" for name in names).encode()
            ids = self.git("hash-object", "-w", "--no-filters", "--stdin-paths", stdin=listed).stdout.split()
        rows = dict.fromkeys(files, f"0 {'0' * 40}") | {
            path: f"{mode} {blob}" for (path, (mode, _)), blob in zip(filled.items(), ids, strict=True)
        }
        entries = b"".join(os.fsencode(f"{entry}\t{path}\0") for path, entry in rows.items())
        self.git("update-index", "-z", "--index-info", stdin=entries)

    def write_tree(self) -> str:
        """Store the index as a tree and return its id."""
        return self.git("write-tree").stdout.strip()


def _revision(revision: str) -> str:
    """A commit, tree or ref as an argument of git."""
    if revision.startswith("-"):
        raise NotTrusted(f"{revision!r} is not a git revision", "git would parse it as an option")
    return revision


def environment(network: bool = False) -> dict[str, str | None]:
    """Variables of every git, for :func:`sm120kit.core.process.run`; ``network`` leaves the user's settings as they are."""
    variables: dict[str, str | None] = {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_NO_LAZY_FETCH": "1"}
    if network:
        allowed = os.environ.get("GIT_ALLOW_PROTOCOL", ":".join(PROTOCOLS)).split(":")
        protocols = ":".join(protocol for protocol in PROTOCOLS if protocol in allowed)
        return {**variables, **dict.fromkeys(_LOCATION_VARIABLES), "GIT_ALLOW_PROTOCOL": protocols}
    return {
        **dict.fromkeys(name for name in os.environ if name.startswith("GIT_")),
        **variables,
        "GIT_ALLOW_PROTOCOL": "file",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_NO_REPLACE_OBJECTS": "1",
    }


def _git(
    args: Iterable[str | Path],
    *,
    stdin: bytes | Iterable[bytes] | None = None,
    env: Mapping[str, str] | None = None,
    check: bool = True,
    network: bool = False,
    tied: bool = False,
) -> Completed:
    program = ["/bin/sh", "-c", _LIMITED, str(MAX_FETCH_BYTES // 512), "git"] if network else ["git"]
    argv, variables = [*program, *_OPTIONS, *args], {**environment(network), **(env or {})}
    try:
        if network:
            return _run_limited(argv, variables, check)
        return run(argv, env=variables, stdin=stdin, check=check, tied=tied)
    except CommandFailed as error:
        if "No space left on device" in error.message or "Out of diskspace" in error.message:
            raise ResourceUnavailable(
                "git: no space left on the file system",
                "free some space, or name another directory with --state or SM120KIT_STATE",
            ) from error
        raise


def _run_limited(argv: Sequence[str | Path], variables: Environment, check: bool) -> Completed:
    """Run a git that uses the network, for at most :data:`MAX_FETCH_SECONDS`."""
    try:
        return run_within(argv, MAX_FETCH_SECONDS, env=variables, check=check)
    except Stopped as error:
        raise FetchFailed(
            f"git took more than {MAX_FETCH_SECONDS:g} s, and was ended", "check the network, or use --mirror DIR"
        ) from error
