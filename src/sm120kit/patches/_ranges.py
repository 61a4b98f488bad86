"""Version ranges of ``Applies-To``: end a range before a version, begin one there, or widen it to include a version.

PEP 440 has no union of ranges. So a range that becomes wider includes every version between its old limit and the new one.
"""

from collections.abc import Collection, Iterable, Sequence

from packaging.specifiers import Specifier, SpecifierSet
from packaging.version import Version

_BELOW, _ABOVE = ("<", "<="), (">", ">=")
"""Operators that limit a range from above and from below."""


def split(ranges: str, keep: str, at: str, pinned: Collection[str] = ()) -> tuple[str, str]:
    """Split a range into a part that contains version ``keep`` but not ``at``, and one that contains ``at``.

    The second part reaches from ``at`` away from ``keep`` to the end of the range. If that would take one of the ``pinned``
    versions from the first part, the second part is ``at`` alone.
    """
    specifiers, upwards = _specifiers(ranges), Version(at) > Version(keep)
    limits, open_limits = (_BELOW, _ABOVE) if upwards else (_ABOVE, _BELOW)
    first = _text([s for s in specifiers if s.operator not in limits], f"{limits[0]}{at}")
    second = _text([s for s in specifiers if s.operator not in open_limits and s.operator != "!="], f"{open_limits[1]}{at}")
    taken = (version for version in pinned if version != at and contains(ranges, version) and not contains(first, version))
    if next(taken, None) is not None or not contains(first, keep) or contains(first, at) or not contains(second, at):
        return _text(specifiers, f"!={at}"), f"=={at}"
    return first, second


def widen(ranges: str, version: str) -> str:
    """The range with its limit moved so that it includes ``version`` and what lies between."""
    specifiers = _specifiers(ranges)
    kept = [s for s in specifiers if s.contains(version, prereleases=True)]
    limits = []
    for specifier in specifiers:
        bound = specifier.version.removesuffix(".*")
        if specifier in kept or specifier.operator == "!=":
            continue
        upwards = Version(version) > Version(bound)
        limits.append(f"{'<=' if upwards else '>='}{version}")
        if specifier.operator in ("==", "~="):
            limits.append(f"{'>=' if upwards else '<='}{bound}")
    return _text(kept, *dict.fromkeys(limits))


def contains(ranges: str, version: str) -> bool:
    """Whether a range contains a version, pre-releases included."""
    return SpecifierSet(ranges).contains(version, prereleases=True)


def _specifiers(ranges: str) -> list[Specifier]:
    """The specifiers of a range in their order."""
    return [Specifier(text) for text in ranges.split(",") if text.strip()]


def _text(specifiers: Iterable[Specifier], *added: str) -> str:
    """Specifiers as they are written: lower limits first, then upper ones, then the rest."""
    listed: Sequence[Specifier] = [*specifiers, *map(Specifier, added)]
    order = [_ABOVE, _BELOW]
    ranked = sorted(listed, key=lambda s: next((i for i, operators in enumerate(order) if s.operator in operators), 2))
    return ",".join(str(specifier) for specifier in ranked)
