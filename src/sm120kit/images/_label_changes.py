"""Changes between the labels of two images: what a newer image of the same recipe contains."""

from __future__ import annotations

import re
from collections.abc import Mapping

from sm120kit.images.image_records import Image

_LISTS = {
    "wheels": ("wheel", "=="),
    "patches": ("patch", "@"),
    "local": ("local patch", "@"),
    "modules": ("module", "="),
    "archs": ("arch", "="),
}
"""Labels that hold a list: the singular, and the separator between an element's name and its version or hash."""
_DERIVED = ("context", "reference")
"""Labels that differ whenever any other label does."""


def label_changes(before: Image, after: Image) -> tuple[str, ...]:
    """Describe what is new in ``after``, a line each: wheels, patches, modules, base, build id and other labels."""
    old, new = (_elements(image.labels) for image in (before, after))
    lines = [_change(name, old.get(name), new.get(name)) for name in sorted({**old, **new}) if old.get(name) != new.get(name)]
    if not lines and before.content != after.content:
        lines = ["content, for no reason that the labels name"]
    return tuple(lines)


def _elements(labels: Mapping[str, str]) -> dict[str, str]:
    """Each element of the labels by kind and name (``wheel numpy``), with its version, hash or value."""
    elements = {"base": labels.get("org.opencontainers.image.base.digest", "")}
    for key in (key.removeprefix("sm120kit.") for key in labels if key.startswith("sm120kit.")):
        value = labels[f"sm120kit.{key}"]
        if key in _LISTS:
            singular, separator = _LISTS[key]
            parts = (part.partition(separator) for part in value.split(",") if part)
            elements |= {f"{singular} {name}": version for name, _, version in parts}
        elif key not in _DERIVED:
            elements[key] = value
    return elements


def _change(name: str, old: str | None, new: str | None) -> str:
    if old is None or new is None:
        return " ".join(filter(None, (name, _short(old or new or ""), "added" if old is None else "removed")))
    return f"{name} {_short(old)} -> {_short(new)}"


def _short(value: str) -> str:
    """A value with each digest cut to its first 12 digits."""
    return re.sub(r"[0-9a-f]{40,}", lambda digest: digest[0][:12], value)
