"""``(Image, Image) -> Difference``: what is different between two images, and why.

A difference counts as explained when both sides are what their own source says: the file of the wheel that is installed there,
the file of the base below, the result of a step of the Dockerfile that is another one. What has no such cause is listed as
unexplained: two builds from one context have no cause but the time at which they were made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from pathlib import PurePosixPath

from sm120kit.daemon import DAEMONS_OWN, EMPTY_LAYER, Daemon
from sm120kit.imagediff.causes import BASE, LABEL, Cause, Judge, label_of
from sm120kit.imagediff.contents import Contents, Entry, read
from sm120kit.records import Image

_FOLLOWS = {f"{LABEL}context", f"{LABEL}reference"}
"""Labels that are others whenever anything else is."""
_TOUCHED = {str(PurePosixPath(path).parent) for path in DAEMONS_OWN}
"""Directories of which an export has the time at which the daemon put something into them."""

_HIDDEN = "a container sees no difference; a layer above hides it: times of directories, or files"


class What(StrEnum):
    """In what two images differ at one place."""

    ADDED = "added"
    REMOVED = "removed"
    CONTENT = "content"
    MODE = "mode"
    OWNER = "owner"
    TIME = "time"
    SETTING = "setting"
    HIDDEN = "hidden"


@dataclass(frozen=True)
class Difference:
    """One difference, seen from the first image; ``detail`` says more of ``what`` or of ``cause``."""

    path: str
    what: What
    cause: Cause
    detail: str = ""


@dataclass(frozen=True)
class Diff:
    """All differences of two images, sorted by path. ``common_layers`` counts the lowest ones, those without files left out."""

    first: Image
    second: Image
    common_layers: int
    differences: tuple[Difference, ...]

    @property
    def unexplained(self) -> tuple[Difference, ...]:
        """Those without a cause."""
        return tuple(one for one in self.differences if one.cause is Cause.UNEXPLAINED)


def diff(first: str, second: str, daemon: Daemon) -> Diff:
    """Compare two images of a daemon. Images with the same layers are not read.

    Raises:
        NoSuchImage: one of them is not here.
        DaemonUnreachable: the daemon went away.
    """
    images = [daemon.find(reference) for reference in (first, second)]
    needed = images[0].layers != images[1].layers
    bases = label_of(images[0], BASE) != label_of(images[1], BASE)
    return compare(*(_contents(image, daemon, files=needed, base=needed and bases) for image in images))


def compare(first: Contents, second: Contents) -> Diff:
    """All differences between what is in two images, each with its cause. Pure."""
    judge = Judge(first, second)
    found = [*_settings(first, second, judge), *_files(first, second, judge)]
    layers = [[layer for layer in side.image.layers if layer != EMPTY_LAYER] for side in (first, second)]
    common = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(*layers, strict=False))))
    if not found and layers[0] != layers[1]:
        found.append(Difference(f"layer {common + 1}", What.HIDDEN, Cause.UNEXPLAINED, _HIDDEN))
    return Diff(first.image, second.image, common, tuple(sorted(found, key=lambda one: (one.path, one.what))))


def _contents(image: Image, daemon: Daemon, *, files: bool, base: bool) -> Contents:
    """What is in an image; without its files where they are not needed, and those of its base only where bases differ."""
    below = daemon.base_of(image) if base else None
    entries, recorded = _read(image, daemon) if files else ({}, {})
    return Contents(
        image,
        daemon.settings(image.id),
        entries,
        recorded,
        _read(below, daemon)[0] if below else None,
    )


def _read(image: Image, daemon: Daemon) -> tuple[dict[str, Entry], dict[str, tuple[str, str, str]]]:
    with daemon.filesystem(image.id) as archive:
        return read(archive)


def _files(first: Contents, second: Contents, judge: Judge) -> Iterator[Difference]:
    inhabited = [{str(parent) for path in side.entries for parent in PurePosixPath(path).parents} for side in (first, second)]
    for path in {**first.entries, **second.entries}:
        one, other = first.entries.get(path), second.entries.get(path)
        if one is None or other is None:
            if path not in inhabited[one is None]:  # else what is in the directory is listed
                yield Difference(path, What.ADDED if one is None else What.REMOVED, *judge.file(path))
            continue
        if (one.kind, one.content) != (other.kind, other.content):
            yield Difference(path, What.CONTENT, *judge.file(path))
        elif one.time != other.time and path not in _TOUCHED:
            yield Difference(path, What.TIME, Cause.TIME, f"{one.time} -> {other.time}")
        for what, before, after in ((What.MODE, f"{one.mode:o}", f"{other.mode:o}"), (What.OWNER, one.owner, other.owner)):
            if before != after:
                yield Difference(path, what, judge.access(path)[0], f"{before} -> {after}")


def _settings(first: Contents, second: Contents, judge: Judge) -> Iterator[Difference]:
    for name in sorted({*first.settings, *second.settings} - {"Labels"}):
        if first.settings.get(name) != second.settings.get(name):
            said = f"{first.settings.get(name)} -> {second.settings.get(name)}"
            yield Difference(f"setting {name}", What.SETTING, judge.setting(name), said)
    for name in sorted(judge.differ - _FOLLOWS):
        said = f"{label_of(first.image, name) or 'none'} -> {label_of(second.image, name) or 'none'}"
        yield Difference(f"label {name}", What.SETTING, judge.label(name), said)
