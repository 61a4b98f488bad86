"""The Python files of a commit, of a project or a fork of it, on the binaries of a wheel of the nearest release.

That is right only while everything that is compiled is equal. Which files changed since the release is read from the tree of
its tag in the same repository. Git's ids of files are compared, not their contents.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sm120kit.core import reporting
from sm120kit.core.archives import MAX_MEMBERS
from sm120kit.core.errors import BadInput, Mismatch, NotFound
from sm120kit.core.urls import redacted
from sm120kit.sources import _archive, _commits
from sm120kit.sources.git import Repository
from sm120kit.sources.source_records import GitPin, WheelCommitPin

BESIDE = {"test", "tests", "doc", "docs", "benchmark", "benchmarks", "example", "examples", ".github", ".buildkite"}
"""Directories of a repository that distributions often lack, and that nothing of a distribution is compiled from."""

_NATIVE = re.compile(
    r"(.*\.(c|cc|cpp|cxx|cu|cuh|h|hh|hpp|hip|inl|S|asm|cmake|rs|pyx|pxd|proto|so)"
    r"|CMakeLists\.txt|Makefile|meson\.build|setup\.(py|cfg)|pyproject\.toml|MANIFEST\.in|Cargo\.(toml|lock)|build\.rs)"
)
"""Names of files that binaries are compiled from, and of those that describe how."""

_VERSION = re.compile(r"(.*/)?_*version_*\.py")
"""Files that a build may write into a wheel."""

_LISTED = 20
_SUBMODULE, _LINK = "160000", "120000"
_BY_PATCH = "pin another commit, or import its other changes with sm120kit patch import"


@dataclass(frozen=True)
class _Entry:
    """A file of a tree: mode, id of its content, and size in bytes."""

    mode: str
    id: str
    size: int

    @property
    def regular(self) -> bool:
        return self.mode not in (_SUBMODULE, _LINK)


_ABSENT = _Entry("", "", 0)


@dataclass(frozen=True)
class _Source:
    """A tree of the project, and its directory that has the package: empty for the root, ``python/`` for SGLang.

    ``name`` is where it is from.
    """

    files: Mapping[str, _Entry]
    top: str
    name: str

    def distributed(self) -> dict[str, _Entry]:
        """The files below the directory of the package, by their paths there."""
        return {path.removeprefix(self.top): entry for path, entry in self.files.items() if path.startswith(self.top)}


def import_wheel_commit(pin: WheelCommitPin, packed: Path, repository: Repository, ref: str, mirror: str | None) -> None:
    """Commit the content of a wheel, and above it the Python files of a commit, as ``ref`` of an empty repository.

    Symbolic links, submodules and files outside the package are left out.

    Raises:
        Mismatch: files that are compiled are not those of the release, or the wheel is not of the release.
        NotFound: the repository has no tag of the release.
        BadInput: the commit has no such package, or files that are too large or too many.
        FetchFailed, NotTrusted: see :func:`sm120kit.sources._commits.fetch_commit`.
    """
    _archive.import_wheel(pin, packed, repository, ref)
    wheel, below = _tree(repository, ref), repository.git("rev-parse", ref).stdout.strip()
    url = _commits.fetch_commit(GitPin(pin.project, pin.url, pin.commit, pin.version), repository, mirror)
    commit = _source(pin, repository, pin.commit, f"{pin.commit} of {redacted(pin.url)}")
    release = _release(pin, repository, url)
    _require_release(pin, release, wheel)
    _require_equal_binaries(pin, commit, release, wheel)
    changes = _changes(pin, commit.distributed(), release.distributed(), wheel)
    message = f"{pin.project} {pin.version} with files of another commit\n\ncommit: {pin.commit}\nsha256: {pin.sha256}\n"
    repository.set_ref(ref, repository.commit_tree(_replaced(repository, below, changes), below, message))
    reporting.info(
        f"{pin.commit[:12]} changes {len(changes)} files of {pin.filename}; what is compiled is that of {release.name}"
    )


def _replaced(repository: Repository, below: str, changes: Mapping[str, _Entry | None]) -> str:
    """The tree of a commit with other files; None removes one."""
    rows = (f"{new.mode} {new.id}\t{path}" if new else f"0 {'0' * 40}\t{path}" for path, new in changes.items())
    with repository.index(below) as index:
        index.git("update-index", "-z", "--index-info", stdin=b"".join(os.fsencode(row) + b"\0" for row in rows))
        return index.write_tree()


def _tree(repository: Repository, commit: str) -> dict[str, _Entry]:
    """The files of a commit by path."""
    listed = {}
    for row in repository.git("ls-tree", "-r", "-l", "-z", commit).raw.split(b"\0"):
        if row:
            fields, _, name = row.partition(b"\t")
            mode, _, id_, size = fields.decode().split()
            listed[os.fsdecode(name)] = _Entry(mode, id_, 0 if size == "-" else int(size))
    if len(listed) > MAX_MEMBERS:
        raise BadInput(f"{commit} has {len(listed)} files; at most {MAX_MEMBERS} are read", "pin another commit")
    return listed


def _source(pin: WheelCommitPin, repository: Repository, commit: str, name: str) -> _Source:
    files, package = _tree(repository, commit), f"{pin.project}/__init__.py"
    tops = [path.removesuffix(package) for path in files if f"/{path}".endswith(f"/{package}")]
    highest = [top for top in tops if top.count("/") == min(map(str.count, tops, "/" * len(tops)))]
    if len(highest) != 1:
        found = " and ".join(highest) or "none"
        raise BadInput(f"{name}: one directory with {package} is expected, not {found}", f"pin a commit of {pin.project}")
    return _Source(files, highest[0], name)


def _release(pin: WheelCommitPin, repository: Repository, url: str) -> _Source:
    """The source of the wheel's release: that of its tag."""
    for tag in (f"v{pin.version}", pin.version):
        ref = f"refs/release/{tag}"
        fetched = repository.fetch(url, f"+refs/tags/{tag}:{ref}", options=("--depth=1",), check=False, network=True)
        if fetched.returncode == 0:
            return _source(pin, repository, ref, f"tag {tag}")
    raise NotFound(
        f"{redacted(pin.url)} has no tag v{pin.version}: whether its compiled files are those of the wheel is unknown",
        f"push the tag of the release to it: git push URL v{pin.version}",
    )


def _require_release(pin: WheelCommitPin, release: _Source, wheel: Mapping[str, _Entry]) -> None:
    """Require that the wheel has the Python files of the release: then its binaries are those of the release."""
    package = {path: entry for path, entry in release.distributed().items() if path.startswith(f"{pin.project}/")}
    other = [
        path
        for path, entry in package.items()
        if path.endswith(".py")
        and entry.regular
        and path in wheel
        and wheel[path].id != entry.id
        and not _VERSION.fullmatch(path)
    ]
    if other:
        raise Mismatch(
            _listed(f"{release.name} is not what {pin.filename} was made from: {len(other)} Python files differ", other),
            "correct version in the recipe, or move the tag to the commit of the release",
        )


def _require_equal_binaries(pin: WheelCommitPin, commit: _Source, release: _Source, wheel: Mapping[str, _Entry]) -> None:
    before, after = release.files, commit.files
    # Beside files of the wheel, sources are a part of the package, such as those that are compiled on first use.
    suffixes = {_kind(path) for path in wheel if not path.endswith(".so")}
    native = [
        path
        for path in sorted({*before, *after})
        if before.get(path, _ABSENT).id != after.get(path, _ABSENT).id
        and _is_compiled(path, after.get(path) or before[path])
        and _kind(path.removeprefix(commit.top)) not in suffixes
    ]
    if native:
        raise Mismatch(
            _listed(f"{pin.commit} of {pin.project} differs from {release.name} in files that are compiled", native),
            "its Python files do not fit the binaries of the wheel: pin a commit without these changes, or apply its "
            "Python files as patches",
        )


def _kind(path: str) -> tuple[str, str]:
    """The directory and the suffix of a file."""
    return str(PurePosixPath(path).parent), PurePosixPath(path).suffix


def _is_compiled(path: str, entry: _Entry) -> bool:
    *directories, name = path.split("/")
    return not BESIDE & {*directories} and (entry.mode == _SUBMODULE or bool(_NATIVE.fullmatch(name)))


def _changes(
    pin: WheelCommitPin, after: Mapping[str, _Entry], before: Mapping[str, _Entry], wheel: Mapping[str, _Entry]
) -> dict[str, _Entry | None]:
    """The files of the package that a commit changes since the release; None for one that it removes."""
    changes: dict[str, _Entry | None] = {}
    for path in sorted(path for path in {*before, *after} if path.startswith(f"{pin.project}/")):
        new, old = after.get(path), before.get(path)
        if (new and old and new.id == old.id) or (old and path not in wheel) or (new and not new.regular):
            continue
        if old and wheel[path].id != old.id:
            raise Mismatch(f"{pin.filename} has another {path} than its release, and {pin.commit} changes it", _BY_PATCH)
        if new and new.size > _archive.MAX_SOURCE_BYTES:
            raise BadInput(
                f"{pin.commit}: {path} has {new.size} bytes; at most {_archive.MAX_SOURCE_BYTES} are read", _BY_PATCH
            )
        changes[path] = new
    return changes


def _listed(message: str, paths: list[str]) -> str:
    more = [f"and {len(paths) - _LISTED} more"] if len(paths) > _LISTED else []
    return "\n  ".join([f"{message}:", *paths[:_LISTED], *more])
