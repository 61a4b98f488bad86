"""Entries of the state directory (``sm120kit cache``): disk usage, last use, removal.

Only a directory with the marker of a state directory is cleaned, only names that sm120kit creates are considered, and no link
is followed, so that files of others are never removed. An entry is renamed before it is removed: it never exists in part, and
the next removal completes an interrupted removal.
"""

import os
import re
import shlex
import shutil
import stat
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm120kit.core.errors import BadInput, Mismatch, NotFound, SystemRefused
from sm120kit.core.temporary import is_owned
from sm120kit.images.image_inputs import LABEL
from sm120kit.images.oci import Layout
from sm120kit.patches import index_file

_SHA256 = r"[0-9a-f]{64}"
_RECORD = rf"{_SHA256}\.json"


@dataclass(frozen=True)
class EntryKind:
    """A kind of entries of the state directory.

    ``parents`` are globs of the directories that contain the entries; ``names`` is a regular expression of their names.
    ``reproducible``: an entry can be created again.
    """

    name: str
    description: str
    parents: tuple[str, ...]
    names: str
    reproducible: bool = True


_WORK = r".+-((from-source|overlay)-[0-9a-f]{12}|none|sm_12\w+(-sm_12\w+)*(-aarch64)?)"
KINDS = (
    EntryKind("downloads", "sdists, wheels and Debian packages", ("downloads",), _SHA256),
    EntryKind("checkouts", "git repositories of sources", ("checkouts",), r".+-[0-9a-f]{16}"),
    EntryKind("trees", "patched sources", ("cache/trees",), rf"[0-9a-f]{{40}}|{_RECORD}"),
    EntryKind("toolchains", "compilers and headers of lockfiles", ("cache/toolchains",), _SHA256),
    EntryKind("generated", "lists of generated kernels", ("cache/generated",), _RECORD),
    EntryKind("work", "build directories, reused by the next build", ("work",), _WORK),
    EntryKind("builds", "finished wheels with records and logs", ("build/*",), _SHA256),
    EntryKind("images", "build contexts of images", ("images",), _SHA256),
    EntryKind("blobs", "layers, configs and manifests of images and bases", ("oci/blobs/sha256",), _SHA256),
    EntryKind("layers", "records of layers, wheels and builds", ("cache/layers", "cache/contents", "cache/finished"), _RECORD),
    EntryKind("unpacked", "layers of local images, unpacked to run their checks", ("oci-unpacked",), _SHA256),
    EntryKind("tiles", "measured tiles", ("cache/tiles/units", "cache/tiles/tables"), _RECORD),
    EntryKind("emulations", "emulated tiles, with programs", ("cache/emulate",), _SHA256),
    EntryKind("proofs", "compiled probes of patches", ("cache/prove/*",), _RECORD),
    EntryKind("verification", "programs of `verify kernels`", ("cache/verify/programs",), _SHA256),
    EntryKind("ptxas", "what ptxas reports of PTX for SM12x", ("cache/ptx-native",), _RECORD),
    EntryKind("resolver", "index pages and metadata, kept by uv", ("cache",), "uv"),
    EntryKind("servers", "kernels compiled and tuned by servers", ("caches",), r"[0-9a-f]{16}"),
    EntryKind("records", "runs with their logs, verified images", ("runs", "images/verified"), r".+\.(json|log)", False),
    EntryKind("temporary", "files of killed commands", ("scratch", "oci/partial"), r"[^.].*"),
)
"""All kinds. A file that several entries share is counted for the first of them."""

_PARENTS = tuple(sorted({parent for kind in KINDS for parent in kind.parents} | {"cache/tiles", "cache/prove", "cache/verify"}))
"""Directories in which hidden names are temporary."""


@dataclass(frozen=True)
class StateEntry:
    """Files that are kept or removed together: ``paths``, named by the first. ``used`` is in seconds since 1970."""

    kind: str
    name: str
    paths: tuple[Path, ...]
    used: float


@dataclass(frozen=True)
class RemovedImages:
    """Result of :func:`remove_images`: tags, images by the digest of their manifest, and the bytes that this frees."""

    untagged: tuple[str, ...]
    removed: tuple[str, ...]
    bytes: int


def entries(root: Path) -> list[StateEntry]:
    """List all entries of a state directory, without temporary files of running commands."""
    result = []
    for kind in KINDS:
        for path in _children(root, kind.parents):
            if re.fullmatch(kind.names, path.name) and not (kind is KINDS[-1] and is_owned(path)):
                result.append(_entry(kind.name, path))
    for path in _children(root, _PARENTS):
        of_tree = path.name.endswith((".index", ".index.lock")) and _tree_of(path).is_dir()
        if path.name.startswith(".") and not of_tree and not is_owned(path):
            result.append(_entry(KINDS[-1].name, path))
    return result


def _children(root: Path, patterns: Iterable[str]) -> Iterator[Path]:
    """The entries of the directories that match patterns, without links. Directories behind a link are not the state's own."""
    for pattern in patterns:
        for parent in sorted(root.glob(pattern)):
            if parent.is_dir() and parent.resolve() == parent:
                yield from (path for path in sorted(parent.iterdir()) if not path.is_symlink())


def _tree_of(index: Path) -> Path:
    """The exported tree that belongs to the index file ``.<tree>.index``."""
    return index.with_name(index.name.removeprefix(".").removesuffix(".lock").removesuffix(".index"))


def _entry(kind: str, path: Path) -> StateEntry:
    name = f"{path.parent.name}/{path.name}" if kind == "builds" else path.name
    paths = (path, index_file(path)) if kind == "trees" and path.is_dir() else (path,)
    return StateEntry(kind, name, tuple(path for path in paths if path.exists()), _used(path))


def _used(path: Path) -> float:
    """Time of the last creation, change or use of an entry: commands update the time of what they use."""
    try:
        members = [member.stat(follow_symlinks=False).st_mtime for member in os.scandir(path)] if path.is_dir() else []
        return max([path.stat().st_mtime, *members])
    except OSError:  # removed by another command
        return time.time()


# ---- sizes


def _files(paths: Iterable[Path]) -> Iterator[os.stat_result]:
    """Status of every file and directory; those that another command removes are skipped."""
    pending = [str(path) for path in paths]
    while pending:
        path = pending.pop()
        try:
            status = os.lstat(path)
            if stat.S_ISDIR(status.st_mode):
                pending += [entry.path for entry in os.scandir(path)]
        except OSError:
            continue
        yield status


def sizes(entries: Sequence[StateEntry]) -> list[int]:
    """Disk usage of each entry in bytes. A file that several entries share by hard links counts for the first."""
    counted: set[tuple[int, int]] = set()
    result = []
    for entry in entries:
        bytes_ = 0
        for file in _files(entry.paths):
            if (file.st_dev, file.st_ino) not in counted:
                counted.add((file.st_dev, file.st_ino))
                bytes_ += file.st_blocks * 512
        result.append(bytes_)
    return result


def freed(entries: Iterable[StateEntry]) -> int:
    """Bytes that the removal of all these entries frees. A file with hard links elsewhere frees nothing."""
    links: Counter[tuple[int, int]] = Counter()
    files = {}
    for file in _files(path for entry in entries for path in entry.paths):
        links[file.st_dev, file.st_ino] += 1
        files[file.st_dev, file.st_ino] = file
    return sum(file.st_blocks * 512 for key, file in files.items() if stat.S_ISDIR(file.st_mode) or links[key] >= file.st_nlink)


def usage(entries: Sequence[StateEntry]) -> list[dict[str, Any]]:
    """The keys of each kind, in the order of :data:`KINDS`: kind, what, number of entries, disk usage in bytes, last_used."""
    of_kind: dict[str, list[tuple[StateEntry, int]]] = {kind.name: [] for kind in KINDS}
    for entry, size in zip(entries, sizes(entries), strict=True):
        of_kind[entry.kind].append((entry, size))
    return [
        {"kind": kind.name, "what": kind.description, "entries": len(members), "bytes": sum(size for _, size in members)}
        | {"last_used": max((entry.used for entry, _ in members), default=None)}
        for kind in KINDS
        for members in [of_kind[kind.name]]
    ]


# ---- removal


def removable(root: Path, entries: Iterable[StateEntry], seconds: float) -> list[StateEntry]:
    """Entries that were not used for ``seconds``, and temporary ones of any age.

    Blobs and build contexts of tagged images, which are checked ones, are kept.

    Raises:
        Mismatch, BadInput: an image is damaged, so that its blobs cannot be determined.
    """
    layout, now = _layout(root), time.time()
    tagged = layout.used()
    for manifest, tags in layout.images():
        if tags and (context := layout.image(manifest.digest).labels.get(f"{LABEL}context")):
            tagged.add(root / "images" / context)
    unused = (entry for entry in entries if entry.kind == KINDS[-1].name or now - entry.used > seconds)
    return [entry for entry in unused if not tagged.intersection(entry.paths)]


def without(entries: Iterable[StateEntry], used: Collection[Path]) -> list[StateEntry]:
    """Entries that neither are nor contain one of the ``used`` files, which are resolved paths."""
    return [entry for entry in entries if not any(file.is_relative_to(path.resolve()) for path in entry.paths for file in used)]


def detach(root: Path, removed: Iterable[StateEntry]) -> None:
    """Remove images from the index of ``<state>/oci`` that lose one of their blobs; none of them has a tag."""
    paths = {path for entry in removed if entry.kind == "blobs" for path in entry.paths}
    if paths:
        _layout(root).detach(paths)


def remove_images(root: Path, references: Iterable[str]) -> RemovedImages:
    """Remove tags, and each image that has none left with its blobs and unpacked layers that no other image has.

    An image by id or digest loses all its tags. Call it only while no other command uses the state directory.

    Raises:
        NotFound: the state directory does not have one of the images. Nothing is removed.
        Mismatch, BadInput: none has the id ``sha256:...``, unless it is that of a damaged image.
    """
    layout = _layout(root)
    listed = {reference: layout.find(reference) for reference in references}
    if absent := [reference for reference, manifest in listed.items() if manifest is None]:
        hint = "sm120kit image list lists the images; `docker image rm` removes those of the daemon"
        raise NotFound(f"the state directory has no image {', '.join(absent)}", hint)
    tags = {manifest.digest: set(listed_tags) for manifest, listed_tags in layout.images()}
    untagged: list[str] = []
    for reference, manifest in listed.items():
        assert manifest is not None
        names = tags[manifest.digest]
        gone = {reference} & names or names
        tags[manifest.digest] = names - gone
        untagged += sorted(gone)
    removed = tuple(dict.fromkeys(manifest.digest for manifest in listed.values() if manifest and not tags[manifest.digest]))
    layers = _layers(layout, removed)
    freed_bytes = layout.remove(*removed)
    kept = _layers(layout, (manifest.digest for manifest, _ in layout.images()))
    paths = tuple(root / "oci-unpacked" / layer.removeprefix("sha256:") for layer in sorted(layers - kept))
    unpacked = StateEntry("unpacked", "", paths, 0)
    freed_bytes += freed([unpacked])
    remove(unpacked)
    for reference in untagged:
        layout.untag(reference)
    return RemovedImages(tuple(untagged), removed, freed_bytes)


def _layers(layout: Layout, manifests: Iterable[str]) -> set[str]:
    """The digests of the layers of images, without those of damaged ones."""
    found: set[str] = set()
    for manifest in manifests:
        with suppress(Mismatch, BadInput):
            found.update(layer.digest for layer in layout.layers(manifest))
    return found


def _layout(root: Path) -> Layout:
    return Layout(root / "oci")


def remove(entry: StateEntry) -> None:
    """Remove an entry. It is renamed first, so that no command uses a part of it.

    Call it only while no other command uses the state, see :meth:`Workspace.maintenance`.

    Raises:
        SystemRefused: a file in it belongs to another user, such as one that a container wrote.
    """
    for path in entry.paths:
        hidden = path if path.name.startswith(".") else path.with_name(f".{path.name}.{os.getpid()}")
        try:
            if path != hidden:
                path.rename(hidden)
            if hidden.is_dir():
                shutil.rmtree(hidden)
            else:
                hidden.unlink()
        except FileNotFoundError:
            continue
        except OSError as error:
            message = f"cannot remove {error.filename or hidden}: {error.strerror}"
            raise SystemRefused(message, f"as a user with permission: rm -r {shlex.quote(str(hidden))}") from error
