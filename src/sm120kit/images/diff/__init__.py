"""Compare two images (``(Image, Image) -> ImageDiff``): all differences, each with its cause.

A difference has a cause if an input of the images differs and each side agrees with its own input: the file is that of the
wheel installed there, or of the base, or the result of a step of a different Dockerfile. All other differences are unexplained.
For two builds of the same context, time is the only possible cause.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from pathlib import PurePosixPath

from sm120kit.images.diff.causes import BASE, LABEL, Cause, CauseFinder, label_of
from sm120kit.images.diff.contents import Contents, FileEntry, WheelFile, read
from sm120kit.images.records import DAEMON_PATHS, EMPTY_LAYER, Image, ImageStore

_DERIVED = {f"{LABEL}context", f"{LABEL}reference"}
"""Labels that differ whenever any other label does."""
_TOUCHED = {str(PurePosixPath(path).parent) for path in DAEMON_PATHS}
"""Directories to which the daemon adds entries, so that their time is that of the container."""

_HIDDEN = "not visible in a container: times of directories, or files below those of a higher layer"


class DifferenceKind(StrEnum):
    """Kind of a difference between two images."""

    ADDED = "added"
    REMOVED = "removed"
    CONTENT = "content"
    MODE = "mode"
    OWNER = "owner"
    TIME = "time"
    SETTING = "setting"
    HIDDEN = "hidden"


@dataclass(frozen=True)
class ImageDifference:
    """A difference from the first image to the second; ``detail`` describes ``what`` or ``cause``."""

    path: str
    what: DifferenceKind
    cause: Cause
    detail: str = ""


@dataclass(frozen=True)
class ImageDiff:
    """All differences of two images, sorted by path. ``common_layers`` counts equal lowest layers, empty ones excluded."""

    first: Image
    second: Image
    common_layers: int
    differences: tuple[ImageDifference, ...]

    @property
    def unexplained(self) -> tuple[ImageDifference, ...]:
        """Differences without a cause."""
        return tuple(difference for difference in self.differences if difference.cause is Cause.UNEXPLAINED)


def diff(first: str, second: str, store: ImageStore) -> ImageDiff:
    """Compare two images of a store. The files of images with the same layers are not read.

    Raises:
        NoSuchImage: the store does not have one of them.
        DaemonUnreachable: the daemon stopped responding.
    """
    images = [store.find(reference) for reference in (first, second)]
    layers_differ = images[0].layers != images[1].layers
    bases_differ = label_of(images[0], BASE) != label_of(images[1], BASE)
    return compare(*(_contents(image, store, files=layers_differ, base=layers_differ and bases_differ) for image in images))


def compare(first: Contents, second: Contents) -> ImageDiff:
    """All differences between the contents of two images, each with its cause. Pure."""
    causes = CauseFinder(first, second)
    differences = [*_settings(first, second, causes), *_files(first, second, causes)]
    layers = [[layer for layer in side.image.layers if layer != EMPTY_LAYER] for side in (first, second)]
    common = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(*layers, strict=False))))
    if not differences and layers[0] != layers[1]:
        differences.append(ImageDifference(f"layer {common + 1}", DifferenceKind.HIDDEN, Cause.UNEXPLAINED, _HIDDEN))
    return ImageDiff(
        first.image, second.image, common, tuple(sorted(differences, key=lambda difference: (difference.path, difference.what)))
    )


def _contents(image: Image, store: ImageStore, *, files: bool, base: bool) -> Contents:
    """Read the contents of an image: settings, with ``files`` also its files, with ``base`` also those of its base."""
    base_image = store.base_of(image) if base else None
    entries, recorded = _read(image, store) if files else ({}, {})
    return Contents(
        image,
        store.settings(image.id),
        entries,
        recorded,
        _read(base_image, store)[0] if base_image else None,
    )


def _read(image: Image, store: ImageStore) -> tuple[dict[str, FileEntry], dict[str, WheelFile]]:
    with store.filesystem(image.id) as archive:
        return read(archive)


def _files(first: Contents, second: Contents, causes: CauseFinder) -> Iterator[ImageDifference]:
    parents = [{str(parent) for path in side.entries for parent in PurePosixPath(path).parents} for side in (first, second)]
    for path in {**first.entries, **second.entries}:
        before, after = first.entries.get(path), second.entries.get(path)
        if before is None or after is None:
            if path not in parents[before is None]:  # otherwise the entries below the directory are listed
                kind = DifferenceKind.ADDED if before is None else DifferenceKind.REMOVED
                yield ImageDifference(path, kind, *causes.of_file(path))
            continue
        if (before.kind, before.content) != (after.kind, after.content):
            yield ImageDifference(path, DifferenceKind.CONTENT, *causes.of_file(path))
        elif before.time != after.time and path not in _TOUCHED:
            yield ImageDifference(path, DifferenceKind.TIME, Cause.TIME, f"{before.time} -> {after.time}")
        for kind, old, new in (
            (DifferenceKind.MODE, f"{before.mode:o}", f"{after.mode:o}"),
            (DifferenceKind.OWNER, before.owner, after.owner),
        ):
            if old != new:
                yield ImageDifference(path, kind, causes.of_access(path)[0], f"{old} -> {new}")


def _settings(first: Contents, second: Contents, causes: CauseFinder) -> Iterator[ImageDifference]:
    for name in sorted({*first.settings, *second.settings} - {"Labels"}):
        before, after = first.settings.get(name), second.settings.get(name)
        if before != after:
            yield ImageDifference(f"setting {name}", DifferenceKind.SETTING, causes.of_setting(name), f"{before} -> {after}")
    for name in sorted(causes.differ - _DERIVED):
        detail = f"{label_of(first.image, name) or 'none'} -> {label_of(second.image, name) or 'none'}"
        yield ImageDifference(f"label {name}", DifferenceKind.SETTING, causes.of_label(name), detail)
