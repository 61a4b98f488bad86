"""Entries of the state directory (``sm120kit cache``): disk usage, references to them, removal.

Only a directory with the marker of a state directory is cleaned, only names that sm120kit creates are considered, and no link
is followed, so that files of others are never removed. An entry is renamed before it is removed: it never exists in part, and
the next removal completes an interrupted removal.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sm120kit import sources
from sm120kit.core.errors import BadInput, Mismatch, NotFound, SystemRefused
from sm120kit.core.outside import parse_json
from sm120kit.core.record_files import read_record
from sm120kit.core.temporary import is_owned
from sm120kit.core.workspace import Workspace
from sm120kit.images import _base
from sm120kit.images.image_inputs import LABEL
from sm120kit.images.image_records import ImageContext
from sm120kit.images.oci import Layout
from sm120kit.patches import checkout, index_file
from sm120kit.patches.patch_records import PatchedTree
from sm120kit.recipes import bases, cross_tools, locked_toolchain, lockfile
from sm120kit.recipes.recipe_records import Lock
from sm120kit.recipes.target import Target
from sm120kit.sources.source_records import GitPin, Pin

_SHA256 = r"[0-9a-f]{64}"
_RECORD = rf"{_SHA256}\.json"


@dataclass(frozen=True)
class EntryKind:
    """A kind of entries of the state directory.

    ``parents`` are globs of the directories that contain the entries; ``names`` is a regular expression of their names.
    ``tracked``: references to an entry can be determined. ``reproducible``: an entry can be created again.
    """

    name: str
    description: str
    parents: tuple[str, ...]
    names: str
    tracked: bool = False
    reproducible: bool = True


KINDS = (
    EntryKind("downloads", "sdists, wheels and Debian packages", ("downloads",), _SHA256, tracked=True),
    EntryKind("checkouts", "git repositories of sources", ("checkouts",), r".+-[0-9a-f]{16}", tracked=True),
    EntryKind("trees", "patched sources", ("cache/trees",), rf"[0-9a-f]{{40}}|{_RECORD}", tracked=True),
    EntryKind("toolchains", "compilers and headers of lockfiles", ("cache/toolchains",), _SHA256, tracked=True),
    EntryKind("generated", "lists of generated kernels", ("cache/generated",), _RECORD, tracked=True),
    EntryKind(
        "work",
        "build directories, reused by the next build",
        ("work",),
        r"kernels-[0-9a-f]{12}|.+-((from-source|overlay)-[0-9a-f]{12}|sm_12\w+(-sm_12\w+)*)",
        tracked=True,
    ),
    EntryKind("builds", "finished wheels with records and logs", ("build/*",), _SHA256, tracked=True),
    EntryKind("images", "build contexts of images", ("images",), _SHA256, tracked=True),
    EntryKind("blobs", "layers, configs and manifests of images and bases", ("oci/blobs/sha256",), _SHA256, tracked=True),
    EntryKind(
        "compressed",
        "digests of layers as they were published",
        ("oci/compressed",),
        rf"{_SHA256}\..+",
        tracked=True,
    ),
    EntryKind("layers", "records of image layers and of wheels", ("cache/layers", "cache/contents"), _RECORD),
    EntryKind("checks", "results of checks that do not depend on kernels", ("cache/checks",), _RECORD),
    EntryKind("bases", "bases of images, unpacked", ("bases",), r".+-[0-9a-f]{16}", tracked=True),
    EntryKind("unpacked", "layers of local images, unpacked to run their checks", ("oci-unpacked",), _SHA256),
    EntryKind("tiles", "measured tiles", ("cache/tiles/units", "cache/tiles/tables"), _RECORD),
    EntryKind("emulations", "emulated tiles, with programs", ("cache/emulate",), _SHA256, tracked=True),
    EntryKind("proofs", "compiled probes of patches", ("cache/prove/*",), _RECORD),
    EntryKind("verification", "programs of `verify kernels`", ("cache/verify/programs",), _SHA256, tracked=True),
    EntryKind("ptxas", "what ptxas reports of PTX for SM12x", ("cache/ptx-native",), _RECORD),
    EntryKind("resolver", "index pages and metadata, kept by uv", ("cache",), "uv"),
    EntryKind("servers", "kernels compiled and tuned by servers", ("caches",), r"[0-9a-f]{16}"),
    EntryKind(
        "records",
        "runs with their logs, verified images",
        ("runs", "images/verified"),
        r".+\.(json|log)",
        reproducible=False,
    ),
    EntryKind("temporary", "files of running or killed commands", ("scratch", "oci/partial"), r"[^.].*", tracked=True),
)
"""All kinds. A file that several entries share is counted for the first of them."""

_PARENTS = tuple(sorted({parent for kind in KINDS for parent in kind.parents} | {"cache/tiles", "cache/prove", "cache/verify"}))
"""Directories in which hidden names are temporary."""


@dataclass(frozen=True)
class StateEntry:
    """Files that are kept or removed together: ``paths``, named by the first. ``used`` is in seconds since 1970.

    ``unreferenced`` is the reason why nothing refers to the entry; empty if it is referenced or references are not tracked.
    """

    kind: str
    name: str
    paths: tuple[Path, ...]
    used: float
    unreferenced: str = ""


@dataclass(frozen=True)
class RemovedImages:
    """Result of :func:`remove_images`: tags, images by the digest of their manifest, and the bytes that this frees."""

    untagged: tuple[str, ...]
    removed: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class Usage:
    """The entries of a kind: number, disk usage in bytes, and the part of it that is unreferenced."""

    kind: EntryKind
    entries: int
    bytes: int
    unreferenced_bytes: int
    last_used: float | None


_BY_NAME = {
    "downloads": "no recipe or lock has this hash",
    "toolchains": "no lock has these wheels",
    "blobs": "no image has it",
    "compressed": "no image has it",
    "bases": "no base has these packages",
    "checkouts": "no recipe pins this source",
}
"""Kinds whose entries are referenced by name, with the reason why another is unreferenced."""


@dataclass(frozen=True)
class References:
    """References of recipes, their locks and series, and built images; ``names`` are those of entries, by kind."""

    names: Mapping[str, Collection[str]]
    recipes: Collection[str]
    trees: Collection[str]
    without_tree: Collection[str]
    build_ids: Collection[str]
    plans: Collection[str]
    images: Collection[str]


def references(workspace: Workspace, targets: Iterable[Target]) -> References:
    """Collect the references of recipes and of the images that were built with this state directory.

    Raises:
        Sm120kitError: a recipe, lock or record cannot be read, so that the references are incomplete.
    """
    names: set[str] = set()
    pins: list[Pin] = []
    locks: dict[str, Lock] = {}
    trees: dict[str, list[PatchedTree | None]] = {}
    for target in targets:
        recipe = target.recipe
        names.add(recipe.name)
        pins += [source.pin for source in target.sources]
        trees[recipe.name] = [
            checkout.cached_tree(source.pin, source.inside, workspace, source.files) for source in target.sources
        ]
        if target.lock_path.is_file():
            locks[recipe.name] = lockfile.read(target.lock_path)
    wheels = {wheel.sha256 for lock in locks.values() for closure in lock.closures for wheel in closure.wheels}
    locked = {tree for lock in locks.values() for source in lock.sources for tree in (source.tree, source.patched_tree)}
    images = dict(_built_images(workspace))
    blobs = {path.name for path in _layout(workspace.root).used()}
    machines = ((base, machine) for base in map(bases.load, bases.names()) for machine in base.machines)
    referenced = {
        "downloads": {pin.sha256 for pin in pins if not isinstance(pin, GitPin)}
        | wheels
        | _packages()
        | {wheel.sha256 for context in images.values() for wheel in context.locked},
        "toolchains": {name for lock in locks.values() for name in locked_toolchain.unpacked_names(lock)}
        | cross_tools.directory_names(),
        "blobs": blobs,
        "compressed": blobs,
        "bases": {_base.directory_name(base, machine) for base, machine in machines},
        "checkouts": {sources.checkout_name(pin) for pin in pins},
    }
    produced = {id_ for each in trees.values() for tree in each if tree for id_ in (tree.tree, tree.checkout.tree)}
    return References(
        names=referenced,
        recipes=names,
        trees=locked | produced,
        without_tree={name for name, each in trees.items() if None in each and name not in locks},
        build_ids=set(map(lockfile.build_id, locks.values())),
        plans={str(ours.origin["plan"]) for context in images.values() for ours in context.ours},
        images={*images},
    )


def _packages() -> set[str]:
    """sha256 of every package of every base."""
    locks = [bases.verify(bases.load(name)) for name in bases.names()]
    return {package.sha256 for lock in locks for closure in lock.closures for package in closure.packages}


def _built_images(workspace: Workspace) -> Iterator[tuple[str, ImageContext]]:
    """The build contexts from which an image was built, by digest."""
    for record in (workspace.root / "images").glob("*/image.json"):
        yield record.parent.name, read_record(ImageContext, record.with_name("context.json"))


def entries(root: Path, referenced: References | None = None) -> list[StateEntry]:
    """List all entries of a state directory; with ``referenced``, mark those that are unreferenced."""
    result = []
    for kind in KINDS:
        for parent in (parent for pattern in kind.parents for parent in _directories(root, pattern)):
            for path in sorted(parent.iterdir()):
                if re.fullmatch(kind.names, path.name) and not path.is_symlink():
                    result.append(_entry(kind, path, referenced))
    temporary = KINDS[-1]
    for parent in (parent for pattern in _PARENTS for parent in _directories(root, pattern)):
        for path in sorted(parent.iterdir()):
            of_tree = path.name.endswith((".index", ".index.lock")) and _tree_of(path).is_dir()
            if path.name.startswith(".") and not of_tree and not path.is_symlink():
                result.append(_entry(temporary, path, referenced))
    return result


def _directories(root: Path, pattern: str) -> list[Path]:
    """The directories of a state directory that match a pattern. Those behind a link are not its own."""
    return [path for path in sorted(root.glob(pattern)) if path.is_dir() and path.resolve() == path]


def _tree_of(index: Path) -> Path:
    """The exported tree that belongs to the index file ``.<tree>.index``."""
    return index.with_name(index.name.removeprefix(".").removesuffix(".lock").removesuffix(".index"))


def _entry(kind: EntryKind, path: Path, referenced: References | None) -> StateEntry:
    name = f"{path.parent.name}/{path.name}" if kind.name == "builds" else path.name
    paths = (path, index_file(path)) if kind.name == "trees" and path.is_dir() else (path,)
    reason = _unreferenced(kind, path, referenced) if referenced is not None and kind.tracked else ""
    return StateEntry(kind.name, name, tuple(path for path in paths if path.exists()), _used(path), reason)


def _used(path: Path) -> float:
    """Time of the last creation, change or use of an entry: commands update the time of what they use."""
    try:
        members = [member.stat(follow_symlinks=False).st_mtime for member in os.scandir(path)] if path.is_dir() else []
        return max([path.stat().st_mtime, *members])
    except OSError:  # removed by another command
        return time.time()


def _unreferenced(kind: EntryKind, path: Path, references: References) -> str:
    """Why nothing refers to an entry; empty if something does."""
    if kind.name in _BY_NAME:
        name = path.name.partition(".")[0] if kind.name == "compressed" else path.name
        return "" if name in references.names[kind.name] else _BY_NAME[kind.name]
    match kind.name:
        case "trees":
            return _of_tree(references, _record(path).get("tree", "") if path.suffix else path.name)
        case "generated":
            return _of_tree(references, _record(path).get("tree", ""))
        case "builds":
            return "" if path.name in references.plans else _of_plan(references, path / "plan.json")
        case "work":
            return _of_work(references, path)
        case "images":
            return _of_image(references, path)
        case "emulations" | "verification":
            return _of_results(references, path)
        case _:
            return "" if is_owned(path) else "left by a command that was killed"


def _record(path: Path) -> dict[str, str]:
    """The text values of a JSON object; empty if it cannot be read."""
    try:
        content = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in content.items() if isinstance(value, str)} if isinstance(content, dict) else {}


def _of_tree(references: References, tree: str, name: str = "") -> str:
    if tree in references.trees or (name in references.without_tree):
        return ""
    return f"no recipe's series produces tree {tree[:12]}" if tree else "written by an earlier version"


def _of_plan(references: References, record: Path) -> str:
    """A build is referenced while its recipe exists and its series produces the tree of the build."""
    plan = _record(record)
    name = plan.get("recipe", "").partition("@")[2] or plan.get("recipe", "")
    if name and name not in references.recipes:
        return f"there is no recipe {name}"
    return _of_tree(references, plan.get("tree", ""), name)


def _of_work(references: References, path: Path) -> str:
    """A build directory is referenced by its recipe, whatever its tree, or by a plan."""
    if re.fullmatch(r"kernels-[0-9a-f]{12}|.+-(from-source|overlay)-[0-9a-f]{12}", path.name):
        return _of_plan(references, path / "plan.json")
    recipe = re.sub(r"(-sm_12[01][af]?)+$", "", path.name)
    return "" if recipe in references.recipes else f"there is no recipe {recipe}"


def _of_results(references: References, path: Path) -> str:
    """Results are referenced by the trees that used them; without such marks, or if a recipe's tree is unknown, by all."""
    trees = {mark.stem for mark in path.glob("*.tree")}
    if not trees or not trees.isdisjoint(references.trees) or references.without_tree:
        return ""
    return "no recipe's series produces a tree that used it"


def _of_image(references: References, path: Path) -> str:
    """A build context is referenced by an image that was built from it, or by the lock that produces it."""
    if path.name in references.images:
        return ""
    try:
        labels = read_record(ImageContext, path / "context.json").labels
    except (OSError, ValueError):
        return "without a record, or with one of an earlier version"
    build_id = labels.get(f"{LABEL}build-id")
    if build_id and build_id not in references.build_ids:
        return "no image was built from it, and its lock has changed"
    return _of_tree(references, labels.get(f"{LABEL}tree", "")) and "no image was built from it, and its series has changed"


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


def usage(entries: Sequence[StateEntry]) -> list[Usage]:
    """Disk usage by kind, in the order of :data:`KINDS`."""
    sized = list(zip(entries, sizes(entries), strict=True))
    of_kind = {kind.name: [(entry, size) for entry, size in sized if entry.kind == kind.name] for kind in KINDS}
    return [
        Usage(
            kind,
            len(members),
            sum(size for _, size in members),
            sum(size for entry, size in members if entry.unreferenced),
            max((entry.used for entry, _ in members), default=None),
        )
        for kind in KINDS
        for members in [of_kind[kind.name]]
    ]


# ---- removal


def older_than(entries: Iterable[StateEntry], seconds: float) -> list[StateEntry]:
    """Entries whose last use is longer ago than ``seconds``."""
    now = time.time()
    return [entry for entry in entries if now - entry.used > seconds]


def removable(root: Path, entries: Iterable[StateEntry]) -> list[StateEntry]:
    """Entries without the blobs of tagged images, which are verified ones and bases by digest."""
    tagged = _layout(root).used(tagged=True)
    return [entry for entry in entries if not tagged.intersection(entry.paths)]


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
