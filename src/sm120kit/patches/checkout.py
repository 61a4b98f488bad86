"""Fetch a source and apply its patch series; both are skipped when a record of the same pin and series exists."""

from collections.abc import Mapping
from pathlib import Path

from sm120kit import sources
from sm120kit.core import reporting
from sm120kit.core.data_roots import data_root, top_root, user_repository
from sm120kit.core.digests import digest_of, file_sha256
from sm120kit.core.record_files import read_record, write_record
from sm120kit.core.workspace import Workspace, mark_used
from sm120kit.patches._apply import apply
from sm120kit.patches.format import Patch
from sm120kit.patches.patch_records import PatchedTree
from sm120kit.patches.series import load_for_tree
from sm120kit.sources.run_options import Options
from sm120kit.sources.source_records import Pin, VendoredProject

_FORMAT = 2
"""Part of a record's key: raised when more is checked than before, so that existing trees are patched again."""

PATCHES, OVERRIDES = "patches", "cutlass_overrides"
"""Directories below the data directory."""


def series_files() -> dict[str, str]:
    """The sha256 of every file of the patch series and of the CUTLASS overrides, by path below the data directory.

    Paths of a user's series begin with ``own/``.
    """
    root, own = data_root(), user_repository()
    files = [("", root, path) for name in (PATCHES, OVERRIDES) for path in sorted((root / name).rglob("*"))]
    files += [("own/", own, path) for path in sorted((own / PATCHES).rglob("*"))] if own else []
    return {f"{prefix}{path.relative_to(base)}": file_sha256(path) for prefix, base, path in files if path.is_file()}


def with_series() -> set[str]:
    """The projects that have a patch series."""
    return {path.parent.name for root in {top_root(), data_root()} for path in (root / PATCHES).glob("*/series")}


def series_of(pin: Pin, inside: tuple[VendoredProject, ...]) -> list[Patch]:
    """The patches of every project in a source. See :func:`sm120kit.patches.series.load` for errors."""
    return load_for_tree(pin, inside, top_root() / PATCHES)


def fetch_patched(pin: Pin, inside: tuple[VendoredProject, ...], options: Options, files: Mapping[str, str]) -> PatchedTree:
    """Fetch a source, apply the series of its project and of the projects inside it, and record the result.

    ``files`` is from :func:`series_files`.

    Raises:
        Mismatch: the source, or a project inside it, is not the project or version that the recipe names.
        PatchConflict, BadInput: see :func:`sm120kit.patches._apply`.
    """
    cached = _cached_tree(pin, inside, options.workspace, files)
    if cached is not None:
        return cached
    checkout = sources.fetch(pin, options.workspace, options.origin)
    with reporting.step(f"applying the patches for {pin.project} {pin.version}"):
        tree = apply(checkout, inside, top_root() / PATCHES, data_root() / OVERRIDES)
    write_record(record_path(pin, inside, options.workspace, files), tree)
    return tree


def _cached_tree(
    pin: Pin, inside: tuple[VendoredProject, ...], workspace: Workspace, files: Mapping[str, str]
) -> PatchedTree | None:
    """The recorded tree of a source with the present series, or None. Needs no network."""
    record = record_path(pin, inside, workspace, files)
    if not record.is_file():
        return None
    tree = read_record(PatchedTree, record)
    repository = workspace.checkouts / sources.checkout_name(pin)
    if tree.checkout.repository != repository or not repository.is_dir():
        return None
    mark_used(record)
    mark_used(repository)
    return tree


def record_path(pin: Pin, inside: tuple[VendoredProject, ...], workspace: Workspace, files: Mapping[str, str]) -> Path:
    """Path of the record of a source's tree. Its name is a digest of the pin, every patch file and every override."""
    key = digest_of([_FORMAT, pin, inside, [list(file) for file in files.items()]])
    return workspace.cache / "trees" / f"{key}.json"
