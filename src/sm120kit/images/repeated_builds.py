"""Recognize a build whose image exists, before recipes and patches are read: from the bytes of all that a build reads.

A recognized build is what the stages would find, each by its own record. Anything that is unknown or differs is not recognized,
and then the stages decide.
"""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from sm120kit.core import toolchain
from sm120kit.core.data_roots import FOLDERS, REPOSITORY_FILE, data_root, user_repository
from sm120kit.core.digests import digest_of, file_sha256
from sm120kit.core.errors import Sm120kitError
from sm120kit.core.outside import read_found
from sm120kit.core.record_files import read_record, write_record
from sm120kit.core.workspace import Workspace, mark_used
from sm120kit.images.oci import Layout

_DATA = (REPOSITORY_FILE, *FOLDERS, "cutlass_overrides", "image_programs")
_MAX_FILES, _MAX_BYTES = 20_000, 2**28
_OF_SHELLS = {"_", "COLUMNS", "LINES", "OLDPWD", "PWD", "SHLVL"}
"""Variables that change between two commands of a shell. What follows from the working directory is compared itself."""


@dataclass(frozen=True)
class RepeatedBuild:
    """A finished build: the name of its image, the digest of the image's manifest, and files of the state by relative path.

    ``records`` are those of the image and of its checks with their sha256, ``wheels`` those that are copied with their size.
    """

    reference: str
    manifest: str
    records: Mapping[str, str]
    wheels: Mapping[str, int]


def inputs_of(request: Sequence[object]) -> str:
    """The digest of what decides a build: the request, variables, programs, and the bytes of sm120kit and of its data.

    Programs are the compilers, and the distributions in this environment: cmake builds modules, others add engines. It is empty
    if that is unknown: a directory is a link, or a file cannot be read.
    """
    package = Path(__file__).resolve().parents[1]
    try:
        roots = [root / name for root in (user_repository(), data_root()) if root for name in _DATA]
        files = [*islice((file for root in (package, *roots) for file in _files(root)), _MAX_FILES + 1)]
        if len(files) > _MAX_FILES or sum(file.stat().st_size for file in files) > _MAX_BYTES:
            return ""
        contents = [(str(file), hashlib.sha256(read_found(file)).hexdigest()) for file in files]
        entries = (entry for place in {*map(Path, sys.path)} if place.is_dir() for entry in place.iterdir())
        distributions = sorted(entry.name for entry in entries if entry.suffix in (".dist-info", ".egg-info"))
    except (OSError, Sm120kitError):
        return ""
    variables = sorted(item for item in os.environ.items() if item[0] not in _OF_SHELLS)
    machine = [platform.machine(), sys.prefix, sys.version, toolchain.installed(), distributions]
    return digest_of([[repr(value) for value in request], variables, machine, contents])


def _files(root: Path) -> Iterator[Path]:
    """The files at and below a path, in order.

    Raises:
        OSError: a directory is a link or cannot be read.
    """
    if not root.is_dir():
        yield from [root] if os.path.lexists(root) else []
        return
    for entry in sorted(os.scandir(root), key=lambda entry: entry.name):
        if entry.is_dir() and entry.name != "__pycache__":
            if entry.is_symlink():
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), entry.path)
            yield from _files(Path(entry.path))
        elif not entry.is_dir():
            yield Path(entry.path)


def recognized(inputs: str, output: Path, workspace: Workspace) -> RepeatedBuild | None:
    """The finished build with these inputs, if its image is whole, passed its checks, and has its name.

    ``output`` has the copies of its wheels.
    """
    if not inputs:
        return None
    try:
        found = read_record(RepeatedBuild, _record(inputs, workspace))
        whole = _is_whole(found, Layout(workspace.root / "oci"))
        same = all(file_sha256(workspace.root / path) == sha256 for path, sha256 in found.records.items())
        copied = all(_is_copied(workspace.root / path, size, output) for path, size in found.wheels.items())
    except (OSError, Sm120kitError):
        return None
    if not (whole and same and copied):
        return None
    mark_used(_record(inputs, workspace))
    for path in (*found.records, *found.wheels):
        mark_used((workspace.root / path).parent)
    return found


def _is_whole(build: RepeatedBuild, layout: Layout) -> bool:
    manifest = layout.find(build.reference)
    if manifest is None or manifest.digest != build.manifest:
        return False
    layout.config(manifest.digest)  # is read, and compared with its digest
    return all(layout.has(layer.digest, layer.size) for layer in layout.layers(manifest.digest))


def _is_copied(wheel: Path, size: int, output: Path) -> bool:
    """Whether a directory has the copy of a wheel with its size and time."""
    status, copy = wheel.stat(), (output / wheel.name).stat()
    return status.st_size == size and (copy.st_size, copy.st_mtime_ns) == (size, status.st_mtime_ns)


def remember(inputs: str, reference: str, records: Sequence[Path], wheels: Sequence[Path], workspace: Workspace) -> None:
    """Record a finished build, with ``inputs`` from before it and the name of its image; files are those of the state."""
    manifest = Layout(workspace.root / "oci").require(reference).digest
    hashes = {str(path.relative_to(workspace.root)): file_sha256(path) for path in records}
    sizes = {str(path.relative_to(workspace.root)): path.stat().st_size for path in wheels}
    write_record(_record(inputs, workspace), RepeatedBuild(reference, manifest, hashes, sizes))


def _record(inputs: str, workspace: Workspace) -> Path:
    return workspace.cache / "finished" / f"{inputs}.json"
