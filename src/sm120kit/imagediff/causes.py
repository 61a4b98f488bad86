"""Why two images differ at some place: what went into one is not what went into the other."""

from __future__ import annotations

import re
from enum import StrEnum

from sm120kit.imagediff.contents import Contents, Entry
from sm120kit.records import Image

LABEL = "sm120kit."
BASE = "org.opencontainers.image.base.digest"

_BYTECODE = re.compile(r"(?P<place>.*/)?__pycache__/(?P<module>[^/]+?)\.[^./]+(\.opt-\d)?\.pyc")
_OURS = "+sm120kit."


class Cause(StrEnum):
    """Why they do: what went into one image is not what went into the other."""

    BASE = "base"
    WHEELS = "wheels"
    OUR_WHEEL = "our wheel"
    PATCH = "patch"
    DOCKERFILE = "Dockerfile"
    TIME = "time"
    UNEXPLAINED = "unexplained"


_OF_LABEL = {
    BASE: Cause.BASE,
    "org.opencontainers.image.base.name": Cause.BASE,
    "org.opencontainers.image.created": Cause.TIME,
    f"{LABEL}wheels": Cause.WHEELS,
    f"{LABEL}python": Cause.WHEELS,
    f"{LABEL}patches": Cause.PATCH,
    f"{LABEL}dockerfile": Cause.DOCKERFILE,
    f"{LABEL}kind": Cause.DOCKERFILE,
}
"""What a label says; the others are about our wheel."""


class Judge:
    """Knows what went into two images, and so the causes that there can be."""

    def __init__(self, first: Contents, second: Contents) -> None:
        self.sides = (first, second)
        self.differ = {
            name
            for name in {**first.image.labels, **second.image.labels}
            if first.image.labels.get(name) != second.image.labels.get(name)
        }

    def differs(self, *labels: str) -> bool:
        """Whether any of these labels is another one."""
        return bool({*labels} & self.differ)

    def file(self, path: str) -> tuple[Cause, str]:
        """Why a path is there on one side only, or has another content."""
        if self.same_context():
            return Cause.UNEXPLAINED, "both were made from the same context"
        bytecode = _BYTECODE.fullmatch(path)
        if bytecode:
            source = f"{bytecode['place'] or ''}{bytecode['module']}.py"
            if not _same(*(side.entries.get(source) for side in self.sides)):
                return self.file(source)
            return self._made("compiled by its Python")
        if any(path in side.recorded for side in self.sides):
            return self._wheel(path)
        if self.differs(BASE):
            if any(side.base is None for side in self.sides):
                return Cause.UNEXPLAINED, "the base of one of them is not here"
            if all(_same(side.entries.get(path), (side.base or {}).get(path)) for side in self.sides):
                return Cause.BASE, ""
        return self._made("")

    def access(self, path: str) -> tuple[Cause, str]:
        """Why the same content has another mode or owner."""
        owners = [side.recorded.get(path, ())[:2] for side in self.sides]
        return self._made("") if owners[0] and owners[0] == owners[1] else self.file(path)

    def setting(self, name: str) -> Cause:
        """Why a container starts with another setting."""
        if self.same_context():
            return Cause.UNEXPLAINED
        if name == "Env" and self.differs(f"{LABEL}archs"):
            return Cause.OUR_WHEEL
        return self._made("")[0]

    def label(self, name: str) -> Cause:
        """Why a label is another one: labels are made of what goes in."""
        if self.same_context() or not self.from_context():
            return Cause.UNEXPLAINED
        if name == f"{LABEL}build-id":
            return Cause.WHEELS if self.differs(f"{LABEL}wheels") else Cause.OUR_WHEEL
        return _OF_LABEL.get(name, Cause.OUR_WHEEL)

    def from_context(self) -> bool:
        """Whether both images say from which context they were made."""
        return all(f"{LABEL}context" in side.image.labels for side in self.sides)

    def same_context(self) -> bool:
        """Whether it is the same one."""
        return self.from_context() and not self.differs(f"{LABEL}context")

    def _made(self, by_base: str) -> tuple[Cause, str]:
        """The cause of what steps of a Dockerfile make of a base."""
        if self.same_context():
            return Cause.UNEXPLAINED, "both were made from the same context"
        if self.differs(f"{LABEL}dockerfile"):
            return Cause.DOCKERFILE, ""
        if self.differs(BASE):
            return (Cause.BASE, by_base) if by_base else (Cause.DOCKERFILE, "its steps ran on another base")
        return Cause.UNEXPLAINED, ""

    def _wheel(self, path: str) -> tuple[Cause, str]:
        """Why a file of a wheel differs: its wheel is another one, and on both sides it is the file of that wheel."""
        names, versions = set(), []
        for side in self.sides:
            owner = side.recorded.get(path)
            entry = side.entries.get(path)
            versions.append(owner[1] if owner else "")
            names |= {owner[0]} if owner else set()
            if owner and owner[2] and (entry is None or entry.content != owner[2]):
                return Cause.UNEXPLAINED, f"not the file of {owner[0]} {owner[1]} in {side.image.id}"
            if not owner and entry is not None:
                return Cause.UNEXPLAINED, f"belongs to no wheel in {side.image.id}"
        if len(names) == 1 and versions[0] == versions[1]:
            return Cause.UNEXPLAINED, f"{'/'.join(names)} {versions[0]} is in both"
        said = f"{'/'.join(sorted(names))} {versions[0] or 'none'} -> {versions[1] or 'none'}"
        if not any(_OURS in version for version in versions):
            return Cause.WHEELS, said
        inputs = [name for name in ("recipe", "patches", "archs", "modules") if self.differs(f"{LABEL}{name}")]
        if inputs == ["patches"]:
            return Cause.PATCH, ", ".join(sorted(set.symmetric_difference(*map(self._patches, self.sides))))
        return Cause.OUR_WHEEL, f"{said}: {', '.join(inputs) or 'its plan'}"

    @staticmethod
    def _patches(side: Contents) -> set[str]:
        return {*filter(None, label_of(side.image, f"{LABEL}patches").split(","))}


def _same(one: Entry | None, other: Entry | None) -> bool:
    """Whether two entries are the same but for their time."""
    return (one and (one.kind, one.content, one.mode, one.owner)) == (
        other and (other.kind, other.content, other.mode, other.owner)
    )


def label_of(image: Image, name: str) -> str:
    """A label, or an empty string."""
    return image.labels.get(name, "")
