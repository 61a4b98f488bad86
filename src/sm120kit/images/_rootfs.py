"""Files of images without a daemon: layers unpacked once each into the state directory, and read as one file system.

An unpacked layer is a directory of its files with their modes and times. They belong to this user. Device files and pipes are
left out: containers have devices of their own. A layer of sm120kit removes no file of lower ones: the names of whiteouts (OCI
image-spec, layer.md) are refused.
"""

import hashlib
import json
import os
import re
import shutil
import tarfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from sm120kit.core import archives, reporting
from sm120kit.core.disk import disk_errors, require_disk
from sm120kit.core.errors import BadInput, Mismatch, NotTrusted
from sm120kit.core.outside import open_found, parse_json, read_found
from sm120kit.core.parallel import in_parallel
from sm120kit.core.process import Stopped
from sm120kit.core.temporary import publish_directory
from sm120kit.core.unpacking import FileDigest, Unpacking
from sm120kit.core.workspace import Workspace, mark_used
from sm120kit.images.oci import Descriptor, Layout

_BUFFER = 2**20
_DIGESTS = "digests.json"
_HINT = "sm120kit builds no such image: build or pull it again"


def layers(layout: Layout, manifest: str, workspace: Workspace) -> tuple[Path, ...]:
    """The files of the layers of an image, lowest first, each unpacked in ``<state>/oci-unpacked`` if it is not yet.

    They may be shared with other images and must not be changed.

    Raises:
        Mismatch: a layer is missing or was changed.
        NotTrusted: a layer is damaged, or a path leads out of it.
        ResourceUnavailable, SystemRefused: it cannot be unpacked.
    """
    # Of a layer that an image has twice, the higher one counts.
    last = {layer.digest: layer for layer in reversed(layout.layers(manifest))}
    parent = workspace.root / "oci-unpacked"
    missing = [layer for digest, layer in last.items() if not _target(parent, digest).is_dir()]
    if missing:
        total = sum(layer.size for layer in missing)
        require_disk(parent, total, "unpacking the layers")
        stop = threading.Event()
        with reporting.task(f"unpacking {len(missing)} of {len(last)} layers", total, transfer=True) as advance:

            def unpack_one(layer: Descriptor) -> None:
                _unpack_layer(layout, layer.digest, workspace, stop)
                advance(layer.size)

            in_parallel([partial(unpack_one, layer) for layer in missing], 2, stop.set)
    return tuple(_unpacked(_target(parent, digest)) for digest in reversed(last))


def tree_of(layer: Descriptor, layout: Layout, workspace: Workspace) -> Path:
    """The directory of the files of one layer, which is unpacked if it is not yet. See :func:`layers` for errors."""
    _unpack_layer(layout, layer.digest, workspace, threading.Event())
    return _unpacked(_target(workspace.root / "oci-unpacked", layer.digest))


def unpacked(diff_ids: Iterable[str], workspace: Workspace) -> list[Path]:
    """Layers that are unpacked, see :func:`is_unpacked`, by their digests."""
    return [_unpacked(_target(workspace.root / "oci-unpacked", diff_id)) for diff_id in diff_ids]


def is_unpacked(diff_id: str, workspace: Workspace) -> bool:
    """Whether the files of a layer are in ``<state>/oci-unpacked``."""
    return _target(workspace.root / "oci-unpacked", diff_id).is_dir()


def _target(parent: Path, diff_id: str) -> Path:
    return parent / diff_id.removeprefix("sha256:")


def _unpacked(target: Path) -> Path:
    mark_used(target)
    return target / "tree"


def _unpack_layer(layout: Layout, diff_id: str, workspace: Workspace, stop: threading.Event) -> None:
    """Unpack a layer, unless another process did it meanwhile."""
    target = _target(workspace.root / "oci-unpacked", diff_id)
    with workspace.exclusive(f"unpack-{target.name}"):
        if target.is_dir():
            return
        path = layout.path(diff_id)
        with publish_directory(target) as directory, disk_errors(directory):
            (directory / "tree").mkdir(mode=0o755)
            with _opened(path) as stream:
                reader = _HashingReader(stream, stop)
                digests = unpack(cast(IO[bytes], reader), directory / "tree", path)
                if f"sha256:{reader.finish()}" != diff_id:
                    raise Mismatch(
                        f"{path} is not the layer {diff_id}: it was changed",
                        f"rm {path}, then build or pull the image again",
                    )
            _write_digests(directory, digests)


def _write_digests(directory: Path, digests: Mapping[str, FileDigest | None]) -> None:
    (directory / _DIGESTS).write_text(json.dumps(digests, sort_keys=True))


class LayerFiles:
    """The files of a layer that is being written, which is then unpacked; see :func:`layer_files`."""

    def __init__(self, directory: Path, workspace: Workspace) -> None:
        self._directory, self._workspace, self.tree = directory, workspace, directory / "tree"
        self.tree.mkdir(mode=0o755)
        self._unpacking = Unpacking(self.tree, directory)

    def add(self, member: tarfile.TarInfo, chunks: Iterable[bytes]) -> None:
        """Write an entry; ``chunks`` are the contents of a file. A full disk is not an error of the wheel that is read."""
        with disk_errors(self._directory):
            self._unpacking.add(member, chunks)

    def publish(self, diff_id: str) -> None:
        """Keep the files as those of the layer ``diff_id``, unless it is unpacked already."""
        target = _target(self._workspace.root / "oci-unpacked", diff_id)
        _write_digests(self._directory, self._unpacking.finish())
        with self._workspace.exclusive(f"unpack-{target.name}"), disk_errors(target):
            target.parent.mkdir(exist_ok=True)
            if not target.is_dir():
                self._directory.rename(target)


@contextmanager
def layer_files(workspace: Workspace) -> Iterator[LayerFiles]:
    """Unpack a layer in the pass in which it is written: :attr:`LayerFiles.add` gets its entries.

    The checks of an image then need not read its layers again. Nothing is kept if the block fails.
    """
    with workspace.scratch() as scratch, disk_errors(scratch):
        directory = scratch / "layer"
        directory.mkdir(mode=0o755)
        yield LayerFiles(directory, workspace)


def _opened(path: Path) -> IO[bytes]:
    try:
        return open_found(path)
    except FileNotFoundError as error:
        raise Mismatch(f"{path} is missing", "build or pull the image again") from error


class _HashingReader:
    """Reads a stream front to back and hashes it, until another thread sets ``stop``."""

    def __init__(self, stream: IO[bytes], stop: threading.Event) -> None:
        self._stream = stream
        self._stop = stop
        self._hash = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        if self._stop.is_set():
            raise Stopped
        piece = self._stream.read(size)
        self._hash.update(piece)
        return piece

    def finish(self) -> str:
        """Read to the end; returns the sha256 of everything."""
        while self.read(_BUFFER):
            pass
        return self._hash.hexdigest()


def unpack(stream: IO[bytes], tree: Path, origin: Path) -> dict[str, FileDigest | None]:
    """Write the files of a layer below ``tree``, an empty directory. ``origin`` is named in errors.

    Returns the digest of each file by path, of links None.

    A member's parents must be directories of this layer, or are created: no path leads through a link. Modes of files and
    directories include permission for their owner to read and change them.

    Raises:
        NotTrusted: the archive is damaged, or a path or hard link leads out of ``tree``.
    """
    unpacking = Unpacking(tree, origin)
    try:
        with tarfile.open(fileobj=stream, mode="r|", bufsize=_BUFFER) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isreg() else None
                unpacking.add(member, iter(partial(content.read, _BUFFER), b"") if content else ())
                archive.members = []  # type: ignore[attr-defined]  # otherwise the archive keeps every header
    except (tarfile.TarError, ValueError, OverflowError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in archives.UNFIT:
            raise
        raise NotTrusted(f"{origin}: the layer is damaged: {error}", _HINT) from error
    return unpacking.finish()


@dataclass(frozen=True)
class VisibleEntry:
    """A path of combined layers, the layer that it is from, and the layers that a directory's entries are from."""

    path: str
    layer: Path
    below: tuple[Path, ...]

    @property
    def source(self) -> Path:
        """The unpacked file."""
        return self.layer / self.path


def walk(sources: Sequence[Path], path: str = "") -> Iterator[VisibleEntry]:
    """Everything below a directory of combined layers; directories before their entries, sorted by name."""
    for name in sorted({place.name for layer in sources for place in (layer / path).iterdir()}):
        if entry := _entry(sources, f"{path}/{name}".lstrip("/")):
            yield entry
            yield from walk(entry.below, entry.path)


def find(sources: Sequence[Path], path: str) -> VisibleEntry | None:
    """A path of combined layers; None if it does not exist or leads out of them. Links are not followed."""
    parts, entry = PurePosixPath(path.strip("/")).parts, None
    if ".." in parts:
        return None
    for count in range(1, len(parts) + 1):
        if (entry := _entry(sources, "/".join(parts[:count]))) is None:
            return None
        sources = entry.below
    return entry


def _entry(sources: Sequence[Path], path: str) -> VisibleEntry | None:
    """A path in a directory that ``sources`` have, as the highest layer has it; directories are combined, lowest first."""
    highest, below = None, list[Path]()
    for layer in sources:
        place = layer / path
        if os.path.lexists(place):
            highest = layer
            below = [*below, layer] if place.is_dir() and not place.is_symlink() else []
    return VisibleEntry(path, highest, tuple(below)) if highest else None


def digests(sources: Sequence[Path]) -> dict[str, str]:
    """The sha256 of the files of combined layers, in the form of RECORD, by absolute path, from when they were unpacked.

    None of a file that has another size or time since then, of a path that is a directory in one layer and not in another, nor
    of those below it. None at all if a layer was unpacked by an older sm120kit.
    """
    combined: dict[str, str] = {}
    for layer in sources:
        try:
            recorded = parse_json(read_found(layer.parent / _DIGESTS, 2**28))
        except (OSError, ValueError):
            return {}
        if not isinstance(recorded, dict) or not all(map(_is_digest, recorded.values())):
            return {}
        combined |= {path: _unchanged(layer / path, digest) for path, digest in recorded.items()}

    directories: set[str] = set()
    for path in combined:
        while (path := path.rpartition("/")[0]) and path not in directories:
            directories.add(path)
    mixed = directories & combined.keys()
    return {
        f"/{path}": digest
        for path, digest in combined.items()
        if digest and not any(path == other or path.startswith(f"{other}/") for other in mixed)
    }


def _is_digest(value: object) -> bool:
    """Whether a value of JSON is a :data:`FileDigest` or null. Names of files may not be UTF-8, which strict records refuse."""
    return value is None or (isinstance(value, list) and [type(each) for each in value] == [str, int, int])


def _unchanged(path: Path, digest: FileDigest | None) -> str:
    """The sha256 of a file; empty for links and if it was changed."""
    try:
        status = os.lstat(path)
    except OSError:
        return ""
    return digest[0] if digest and [status.st_size, int(status.st_mtime)] == [*digest[1:]] else ""


def combine(sources: Sequence[Path], into: Path, path: str = "", *, link: bool = True) -> None:
    """Write the files below a directory of combined layers into an existing directory.

    With ``link`` they are hard links where possible, which must not be changed, else copies.
    """
    directories = []
    for entry in walk(sources, path):
        target = into / entry.path[len(path) + 1 if path else 0 :]
        if entry.below:
            target.mkdir()
            directories.append((entry.source, target))
        elif link:
            _link_or_copy(entry.source, target)
        else:
            shutil.copy2(entry.source, target, follow_symlinks=False)
    for source, target in reversed(directories):
        shutil.copystat(source, target)


def _link_or_copy(source: Path, target: Path) -> None:
    """Create a hard link of an unpacked file; a copy on another file system, or one without hard links."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def user_of(sources: Sequence[Path], user: str) -> Mapping[str, Any]:
    """Ids and home directory of a ``User`` setting, ``uid`` or ``uid:gid``; by default root.

    Raises:
        BadInput: it names a user or group, which an image of sm120kit does not.
    """
    if not re.fullmatch(r"([0-9]{1,9}(:[0-9]{1,9})?)?", user):
        raise BadInput(f"the image runs as {user[:64]!r}, no user and group with numbers", _HINT)
    uid, _, gid = (user or "0").partition(":")
    entry = find(sources, "etc/passwd")
    text = entry.source.read_text(errors="replace") if entry and not entry.below and not entry.source.is_symlink() else ""
    homes = {line.split(":")[2]: line.split(":")[5] for line in text.splitlines() if line.count(":") >= 6}
    return {"uid": int(uid), "gid": int(gid or 0), "home": homes.get(uid, "/")}
