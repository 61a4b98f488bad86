"""Explain conflicts: every hunk that does not fit, upstream's text there, and the release that changed it.

An sdist has no history, so the file is compared in the other releases of the project that are in the state directory.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Sequence

from packaging.version import Version

from sm120kit import sources
from sm120kit.patches._locate import fitting_lines, split_lines
from sm120kit.patches.diff import Hunk
from sm120kit.patches.format import Patch
from sm120kit.patches.patch_records import HunkConflict, TreeProject
from sm120kit.sources.git import GitIndex, Repository
from sm120kit.sources.source_records import Checkout

MAX_LINES = 16
"""Limit for the lines of an excerpt; the first difference and what follows it is shown."""

MAX_COLUMNS = 180
_SLACK = 8
"""By how many lines upstream's text at a place may be longer than the patch's."""


def explain(
    index: GitIndex, checkout: Checkout, patch: Patch, project: TreeProject, paths: frozenset[str]
) -> list[HunkConflict]:
    """The hunks of a patch that do not fit files of a tree, which are in an index; ``paths`` are those with a conflict."""
    conflicts = []
    releases = list(_releases(checkout))
    for path in dict.fromkeys(hunk.path for hunk in patch.hunks if hunk.path in paths):
        blob = index.git("cat-file", "blob", f":0:{project.prefix}{path}", check=False)
        if blob.returncode != 0:
            continue
        lines = split_lines(blob.raw)
        failing = [hunk for hunk in patch.hunks if hunk.path == path and hunk.old and not fitting_lines(hunk, lines)]
        history = [(name, _lines_in(repository, f"{project.prefix}{path}")) for name, repository in releases] if failing else []
        for hunk in failing:
            place = _place(hunk, lines)
            added = _added(hunk)
            present = [number for line in added if (number := _nearest(line, lines, place or hunk.start))]
            conflicts.append(
                HunkConflict(
                    path,
                    hunk.number,
                    place,
                    tuple(_excerpt(hunk, lines, place)) if place else (),
                    len(added),
                    tuple(sorted(set(present))),
                    *_changed_in(hunk, history, checkout.pin.version),
                )
            )
    return conflicts


def describe(conflict: HunkConflict, project: str, version: str) -> Iterator[str]:
    """Lines that explain a conflict, below the line that names the hunk."""
    if conflict.excerpt:
        yield f"    {project} {version} from line {conflict.place} (-: expected by the patch, +: present instead):"
        yield from (f"    {line}" for line in conflict.excerpt)
    else:
        yield "    none of its lines are in the file"
    if conflict.present:
        numbers = ", ".join(map(str, conflict.present[:MAX_LINES]))
        yield f"    of the {conflict.added} lines that it adds, the file has {len(conflict.present)} already: {numbers}"
    if conflict.fits_release:
        yield f"    fits {conflict.fits_release}" + (f"; changed in {conflict.changed_in}" if conflict.changed_in else "")


def _releases(checkout: Checkout) -> Iterator[tuple[str, Repository]]:
    """Name and repository of each release of the fetched project in the state directory, oldest first."""
    repositories = sources.other_versions(checkout)
    for version in sorted(repositories, key=Version):
        yield version, Repository(repositories[version])


def _lines_in(repository: Repository, path: str) -> list[bytes]:
    try:
        return split_lines(repository.read(sources.BASE, path))
    except FileNotFoundError:
        return []


def _changed_in(hunk: Hunk, history: Sequence[tuple[str, list[bytes]]], present: str) -> tuple[str, str]:
    """The release nearest to ``present`` that a hunk fits, older ones first, and the next one after an older one."""
    older = [entry for entry in history if Version(entry[0]) < Version(present)]
    newer = [entry for entry in history if Version(entry[0]) > Version(present)]
    fitting = [number for number, (_, lines) in enumerate(older) if fitting_lines(hunk, lines)]
    if fitting:
        last = fitting[-1]
        return older[last][0], older[last + 1][0] if last + 1 < len(older) else present
    return next((name for name, lines in newer if fitting_lines(hunk, lines)), ""), ""


def _added(hunk: Hunk) -> list[bytes]:
    """The lines that a hunk adds, without indentation; lines of punctuation alone are in every file and are left out."""
    changes = difflib.SequenceMatcher(None, hunk.old, hunk.new, autojunk=False).get_opcodes()
    added = [line.strip() for kind, _, _, begin, end in changes if kind != "equal" for line in hunk.new[begin:end]]
    return [line for line in added if sum(character.isalnum() for character in line.decode(errors="replace")) > 2]


def _nearest(line: bytes, lines: Sequence[bytes], place: int) -> int:
    """The number of the line nearest to a place that is ``line`` but for its indentation; 0 if there is none."""
    numbers = (number for number, other in enumerate(lines, 1) if other.strip() == line)
    return min(numbers, key=lambda number: abs(number - place), default=0)


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
