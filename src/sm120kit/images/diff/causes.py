"""Causes of differences between two images: which of their inputs differs."""

from __future__ import annotations

import re
from dataclasses import replace
from enum import StrEnum
from fnmatch import fnmatchcase

from sm120kit.images import b12x
from sm120kit.images.context import LEFT_OUT, patterns
from sm120kit.images.diff.contents import Contents, FileEntry
from sm120kit.images.records import Image

LABEL = "sm120kit."
BASE = "org.opencontainers.image.base.digest"

_BYTECODE = re.compile(r"(?P<directory>.*/)?__pycache__/(?P<module>[^/]+?)\.[^./]+(\.opt-\d)?\.pyc")
_OURS = "+sm120kit."


class Cause(StrEnum):
    """The input that differs."""

    BASE = "base"
    WHEELS = "wheels"
    OUR_WHEEL = "our wheel"
    LEFT_OUT = "left out"
    PATCH = "patch"
    DOCKERFILE = "Dockerfile"
    TIME = "time"
    UNEXPLAINED = "unexplained"


_B12X = (f"{b12x.DIRECTORY}/entries/", f"{b12x.DIRECTORY}/kernels.json")
_CAUSE_OF_LABEL = {
    BASE: Cause.BASE,
    "org.opencontainers.image.base.name": Cause.BASE,
    "org.opencontainers.image.created": Cause.TIME,
    f"{LABEL}wheels": Cause.WHEELS,
    f"{LABEL}python": Cause.WHEELS,
    f"{LABEL}left-out": Cause.LEFT_OUT,
    f"{LABEL}wrong-record": Cause.WHEELS,
    f"{LABEL}patches": Cause.PATCH,
    f"{LABEL}dockerfile": Cause.DOCKERFILE,
    f"{LABEL}kind": Cause.DOCKERFILE,
}
"""The input that a label describes. All other labels describe our wheel."""


class CauseFinder:
    """Finds the causes of differences between two images from their labels, wheels and bases."""

    def __init__(self, first: Contents, second: Contents) -> None:
        self.sides = (first, second)
        self.differ = {
            name
            for name in {**first.image.labels, **second.image.labels}
            if first.image.labels.get(name) != second.image.labels.get(name)
        }

    def differs(self, *labels: str) -> bool:
        """Whether any of these labels differs."""
        return bool({*labels} & self.differ)

    def of_file(self, path: str) -> tuple[Cause, str]:
        """The cause why a path exists on one side only, or differs in content."""
        if self.same_context():
            return Cause.UNEXPLAINED, "both were built from the same context"
        bytecode = _BYTECODE.fullmatch(path)
        if bytecode:
            source = f"{bytecode['directory'] or ''}{bytecode['module']}.py"
            if not _same(*(side.entries.get(source) for side in self.sides)):
                return self.of_file(source)
            return self._of_step("compiled by its Python")
        if any(path in side.recorded for side in self.sides):
            return self._of_wheel(path)
        if path.startswith(_B12X) and self.differs(f"{LABEL}wheels") and not self.differs(f"{LABEL}dockerfile"):
            return Cause.WHEELS, "kernels that its b12x compiled"
        if self.differs(BASE):
            if any(side.base is None for side in self.sides):
                return Cause.UNEXPLAINED, "the base of an image is missing in the daemon"
            if all(_same(side.entries.get(path), (side.base or {}).get(path)) for side in self.sides):
                return Cause.BASE, ""
        return self._of_step("")

    def of_access(self, path: str) -> tuple[Cause, str]:
        """The cause why mode or owner of the same content differ."""
        owners = [side.recorded[path][:2] if path in side.recorded else () for side in self.sides]
        return self._of_step("") if owners[0] and owners[0] == owners[1] else self.of_file(path)

    def of_setting(self, name: str) -> Cause:
        """The cause why a setting of the container differs."""
        if self.same_context():
            return Cause.UNEXPLAINED
        if name == "Env" and self.differs(f"{LABEL}archs"):
            return Cause.OUR_WHEEL
        return self._of_step("")[0]

    def of_label(self, name: str) -> Cause:
        """The cause why a label differs: labels describe the inputs."""
        if self.same_context() or not self.from_context():
            return Cause.UNEXPLAINED
        if name == f"{LABEL}build-id":
            return Cause.WHEELS if self.differs(f"{LABEL}wheels") else Cause.OUR_WHEEL
        return _CAUSE_OF_LABEL.get(name, Cause.OUR_WHEEL)

    def from_context(self) -> bool:
        """Whether both images name their build context."""
        return all(f"{LABEL}context" in side.image.labels for side in self.sides)

    def same_context(self) -> bool:
        """Whether both were built from the same context."""
        return self.from_context() and not self.differs(f"{LABEL}context")

    def _of_step(self, detail: str) -> tuple[Cause, str]:
        """The cause of a difference in the result of a Dockerfile's step; ``detail`` if the result depends on the base."""
        if self.same_context():
            return Cause.UNEXPLAINED, "both were built from the same context"
        if self.differs(f"{LABEL}dockerfile"):
            return Cause.DOCKERFILE, ""
        if self.differs(BASE):
            return (Cause.BASE, detail) if detail else (Cause.DOCKERFILE, "its steps ran on another base")
        return Cause.UNEXPLAINED, ""

    def _of_wheel(self, path: str) -> tuple[Cause, str]:
        """The cause why a wheel's file differs: its wheel differs, and each side has the file of its own wheel."""
        names, versions, left = set(), [], False
        for side in self.sides:
            owner = side.recorded.get(path)
            entry = side.entries.get(path)
            versions.append(owner.version if owner else "")
            names |= {owner.name} if owner else set()
            if owner and entry is None and _is_left_out(path, owner.name, side.image):
                left = True
                continue
            if owner and owner.sha256 and (entry is None or entry.content != owner.sha256):
                return Cause.UNEXPLAINED, f"not the file of {owner.name} {owner.version} in {side.image.id}"
            if not owner and entry is not None:
                return Cause.UNEXPLAINED, f"belongs to no wheel in {side.image.id}"
        if left:
            return Cause.LEFT_OUT, f"of {'/'.join(sorted(names))}"
        if len(names) == 1 and versions[0] == versions[1]:
            return Cause.UNEXPLAINED, f"{'/'.join(names)} {versions[0]} is in both"
        change = f"{'/'.join(sorted(names))} {versions[0] or 'none'} -> {versions[1] or 'none'}"
        if not any(_OURS in version for version in versions):
            return Cause.WHEELS, change
        inputs = [name for name in ("recipe", "patches", "archs", "modules") if self.differs(f"{LABEL}{name}")]
        if inputs == ["patches"]:
            return Cause.PATCH, ", ".join(sorted(set.symmetric_difference(*map(self._patches, self.sides))))
        return Cause.OUR_WHEEL, f"{change}: {', '.join(inputs) or 'plan'}"

    @staticmethod
    def _patches(side: Contents) -> set[str]:
        return {*filter(None, label_of(side.image, f"{LABEL}patches").split(","))}


def _is_left_out(path: str, name: str, image: Image) -> bool:
    """Whether an image leaves out the file ``path`` of the distribution ``name``."""
    listed = patterns(image.labels, LEFT_OUT).get(re.sub(r"[-_.]+", "-", name).lower(), ())
    return any(fnmatchcase(path, f"*/site-packages/{pattern}") for pattern in listed)


def _same(first: FileEntry | None, second: FileEntry | None) -> bool:
    """Whether two entries are equal except for their time."""
    return (first and replace(first, time=0)) == (second and replace(second, time=0))


def label_of(image: Image, name: str) -> str:
    """A label, or an empty string."""
    return image.labels.get(name, "")
