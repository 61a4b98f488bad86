"""Explain conflicts: every hunk that does not fit, and upstream's text there."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Sequence

from sm120kit.patches._locate import fitting_lines, split_lines
from sm120kit.patches.diff import Hunk
from sm120kit.patches.format import Patch
from sm120kit.patches.patch_records import HunkConflict, TreeProject
from sm120kit.sources.git import GitIndex

MAX_LINES = 16
"""Limit for the lines of an excerpt; the first difference and what follows it is shown."""

MAX_COLUMNS = 180
_SLACK = 8
"""By how many lines upstream's text at a place may be longer than the patch's."""


def explain(index: GitIndex, patch: Patch, project: TreeProject, paths: frozenset[str]) -> Iterator[HunkConflict]:
    """The hunks of a patch that do not fit files of a tree, which are in an index; ``paths`` are those with a conflict."""
    for path in dict.fromkeys(hunk.path for hunk in patch.hunks if hunk.path in paths):
        blob = index.git("cat-file", "blob", f":0:{project.prefix}{path}", check=False)
        lines = split_lines(blob.raw)
        for hunk in patch.hunks if blob.returncode == 0 else ():
            if hunk.path == path and hunk.old and not fitting_lines(hunk, lines):
                place = _place(hunk, lines)
                yield HunkConflict(path, hunk.number, place, tuple(_excerpt(hunk, lines, place)) if place else ())


def describe(conflict: HunkConflict, project: str, version: str) -> Iterator[str]:
    """Lines that explain a conflict, below the line that names the hunk."""
    if conflict.excerpt:
        yield f"    {project} {version} from line {conflict.place} (-: expected by the patch, +: present instead):"
        yield from (f"    {line}" for line in conflict.excerpt)
    else:
        yield "    none of its lines are in the file"


def _place(hunk: Hunk, lines: Sequence[bytes]) -> int:
    """The line at which most lines of a hunk are where it expects them; 0 if none is. Frequent lines count less."""
    numbers: dict[bytes, list[int]] = {}
    for number, line in enumerate(lines, 1):
        numbers.setdefault(line.strip(), []).append(number)
    votes: Counter[int] = Counter()
    weights: dict[int, float] = {}
    for offset, line in enumerate(hunk.old):
        at = numbers.get(line.strip(), [])
        for number in at if line.strip() else ():
            start = number - offset
            votes[start] += 1
            weights[start] = weights.get(start, 0) + 1 / len(at)
    best = max(weights, key=lambda start: (weights[start], -abs(start - hunk.start)), default=0)
    return max(best, 1) if best else 0


def _excerpt(hunk: Hunk, lines: Sequence[bytes], place: int) -> Iterator[str]:
    """The difference between what a hunk expects at a place and what is there, with numbers of lines."""
    there = lines[place - 1 : place - 1 + len(hunk.old) + _SLACK]
    changes = difflib.SequenceMatcher(None, hunk.old, there, autojunk=False).get_opcodes()
    while changes and changes[-1][0] == "insert":
        changes.pop()
    rows = []
    for kind, begin, end, first, last in changes:
        if kind == "equal":
            rows += [(place + at, " ", there[at]) for at in range(first, last)]
            continue
        rows += [(0, "-", line) for line in hunk.old[begin:end]]
        rows += [(place + at, "+", there[at]) for at in range(first, last)]
    start = max(next((at for at, row in enumerate(rows) if row[1] != " "), 0) - 1, 0)
    for number, mark, line in rows[start : start + MAX_LINES]:
        text = line.decode(errors="replace").rstrip()
        yield f"{number or '':>6} {mark} {text[:MAX_COLUMNS]}{'…' * (len(text) > MAX_COLUMNS)}".rstrip()
    if len(rows) > start + MAX_LINES:
        yield f"       … {len(rows) - start - MAX_LINES} more lines"
