"""Anchors: lines of text that decide where a hunk belongs whose context fits at several places.

The value of a trailer ``Hunk-Below`` or ``Hunk-Above`` is ``PATH#NUMBER TEXT``: hunk NUMBER of PATH belongs at the only place
where it fits and changes lines below or above TEXT, whatever its line number. TEXT is a line that the file has once; spaces at
its ends do not matter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sm120kit.patches.diff import Hunk
from sm120kit.patches.locate import fitting_lines, split_lines

_FORM = re.compile(r"(.+?)#([1-9][0-9]{0,4}) (.+)")
_HUNK = re.compile(rb"@@ -\d+((?:,\d+)?) \+\d+((?:,\d+)?) @@")


TRAILERS = ("Hunk-Below", "Hunk-Above")


@dataclass(frozen=True)
class Anchor:
    """Hunk ``number`` of ``path`` belongs below or above the line ``text``; ``trailer`` is that of :data:`TRAILERS`."""

    trailer: str
    path: str
    number: int
    text: str


class Unplaced(Exception):
    """Anchors do not decide where a hunk belongs; the message has the reason."""


def parse(trailer: str, value: str) -> Anchor | None:
    """Parse the value of a trailer; None if it has another form."""
    match = _FORM.fullmatch(value)
    return Anchor(trailer, match[1], int(match[2]), match[3].strip()) if match else None


def place(hunk: Hunk, anchors: Sequence[Anchor], content: bytes) -> int:
    """The line of ``content`` at which a hunk belongs.

    Raises:
        Unplaced: a line of text does not occur exactly once, or the hunk does not fit at exactly one place.
    """
    lines = split_lines(content)
    begin, end, where = 0, len(lines) + 1, []
    for anchor in anchors:
        rows = [number for number, line in enumerate(lines, 1) if line.strip() == anchor.text.encode()]
        if len(rows) != 1:
            places = f"lines {', '.join(map(str, rows[:20]))} are" if rows else "no line is"
            raise Unplaced(f"{places} {anchor.text!r}, which its {anchor.trailer} names")
        where.append(f"{anchor.trailer.removeprefix('Hunk-').lower()} line {rows[0]} {anchor.text!r}")
        if anchor.trailer == "Hunk-Below":
            begin = max(begin, rows[0])
        else:
            end = min(end, rows[0])
    before = _common(hunk.old, hunk.new)
    after = min(_common(hunk.old[::-1], hunk.new[::-1]), len(hunk.old) - before)
    length = len(hunk.old) - after
    starts = [start for start in fitting_lines(hunk, lines) if start + before > begin and start + length <= end]
    if len(starts) != 1:
        fits = f"it fits at lines {', '.join(map(str, starts[:20]))}" if starts else "it does not fit"
        raise Unplaced(f"{fits} {' and '.join(where)}")
    return starts[0]


def _common(left: Sequence[bytes], right: Sequence[bytes]) -> int:
    """The number of equal lines that two sequences start with."""
    return next((n for n, (old, new) in enumerate(zip(left, right, strict=False)) if old != new), min(len(left), len(right)))


def reversed_hunk(hunk: Hunk) -> Hunk:
    """The hunk that undoes a hunk."""
    return replace(hunk, old=hunk.new, new=hunk.old)


def renumbered(diff: bytes, hunks: Sequence[Hunk], starts: Sequence[int | None], *, reverse: bool) -> bytes:
    """A diff with other line numbers for the hunks of one file after another; None leaves those of a hunk.

    git looks for a hunk from its line in the new file on. To undo a diff, it exchanges the sides.
    """
    lines = diff.split(b"\n")
    headers = [number for number, line in enumerate(lines) if line.startswith(b"@@ ")]
    moved: dict[str, int] = {}
    for at, hunk, start in zip(headers, hunks, starts, strict=True):
        sides = [(hunk.old, 0), (hunk.new, moved.get(hunk.path, 0))]
        if reverse:
            sides = [(hunk.old, -moved.get(hunk.path, 0)), (hunk.new, 0)]
        if start is not None:
            old, new = (max(start + offset - (not side), 0) for side, offset in sides)
            lines[at] = _HUNK.sub(rb"@@ -%d\1 +%d\2 @@" % (old, new), lines[at], count=1)
        moved[hunk.path] = moved.get(hunk.path, 0) + len(hunk.new) - len(hunk.old)
    return b"\n".join(lines)
