"""The places where the hunks of a file fit: git apply takes the nearest, which need not be the intended one."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from sm120kit.patches.diff import Hunk, split_lines

MAX_FUZZ = 2
"""Limit for the lines of context at each end of a hunk that may differ, as in ``patch``."""

Fit = tuple[Hunk, list[int]]
"""A hunk, without lines of context that differ, and the lines (from 1) of a file where it fits."""


def places(
    hunks: Sequence[Hunk], content: bytes, same_version: bool | None, fit: Callable[[Hunk, Sequence[bytes]], Fit] | None = None
) -> list[Fit]:
    """Where each hunk of a file fits, in the order of the hunks and without overlap: by ``fit``, else :func:`fit_exactly`.

    A hunk that fits at its own line belongs there in the version that it was made for; where the version is not known (None),
    if it has context.
    """
    lines = split_lines(content)
    found = []
    for hunk in hunks:
        own = line_of(hunk)
        if same_version and tuple(lines[own - 1 : own - 1 + len(hunk.old)]) == hunk.old:
            found.append((hunk, [own]))
            continue
        cut, starts = (fit or fit_exactly)(hunk, lines)
        line_decides = same_version is None and cut == hunk and own in starts and any(_context(hunk))
        found.append((cut, [own] if line_decides else starts))
    end = 1
    for hunk, starts in found:
        starts[:] = [start for start in starts if start >= end]
        end = min(starts, default=end) + len(hunk.old)
    end = len(lines) + 2
    for hunk, starts in reversed(found):
        starts[:] = [start for start in starts if start + len(hunk.old) <= end]
        end = max(starts, default=end)
    return found


def changed(found: Sequence[Fit], content: bytes) -> bytes | None:
    """The content with hunks that have one place each; None if one line of it would follow the end of the file."""
    lines, result, end = split_lines(content), list[bytes](), 0
    for hunk, (start,) in found:
        result += [*lines[end : start - 1], *hunk.new]
        end = start - 1 + len(hunk.old)
    result += lines[end:]
    return b"".join(result) if all(line.endswith(b"\n") for line in result[:-1]) else None


def line_of(hunk: Hunk) -> int:
    """The first line of a hunk; git gives a hunk without old lines the line before it."""
    return hunk.start + (not hunk.old)


def fit_exactly(hunk: Hunk, lines: Sequence[bytes]) -> Fit:
    """Where a hunk fits with all of its context.

    One that starts at line 1 fits only there, and one without context after its change only at the end of the file: so does
    git apply.
    """
    at_end = not (hunk.old and hunk.new and hunk.old[-1] == hunk.new[-1])
    starts = _occurrences(hunk.old, lines) if hunk.old else range(len(lines) + 1)
    last = len(lines) - len(hunk.old)
    return hunk, [at + 1 for at in starts if (at == 0 or hunk.start > 1) and (at == last or not at_end)]


def fit_with_fuzz(hunk: Hunk, lines: Sequence[bytes]) -> Fit:
    """Where a hunk fits without lines of context that differ: as in ``patch``, up to ``MAX_FUZZ`` at each end."""
    head, tail = _context(hunk)
    for fuzz in range(min(MAX_FUZZ, max(head, tail)) + 1):
        first, last = (max(0, fuzz + length - max(head, tail)) for length in (head, tail))
        cut = replace(hunk, start=hunk.start + first, old=_inner(hunk.old, first, last), new=_inner(hunk.new, first, last))
        starts, last_start = _occurrences(cut.old, lines) if cut.old else [], len(lines) - len(cut.old)
        # As in patch and git: what has context on one side only is at the end of the file on the other one.
        at_begin = tail > fuzz and hunk.old[0] != hunk.new[0]
        at_end = head > fuzz and hunk.old[-1] != hunk.new[-1]
        fits = [at + 1 for at in starts if (at == 0 or not at_begin) and (at == last_start or not at_end)]
        if fits or (hunk.new and _occurrences(hunk.new, lines)):
            return cut, fits
    return hunk, []


def _inner(lines: tuple[bytes, ...], first: int, last: int) -> tuple[bytes, ...]:
    return lines[first : len(lines) - last]


def _context(hunk: Hunk) -> tuple[int, int]:
    """How many lines of context a hunk starts and ends with."""
    shorter = min(len(hunk.old), len(hunk.new))
    head = next((at for at in range(shorter) if hunk.old[at] != hunk.new[at]), shorter)
    tail = next((at for at in range(shorter - head) if hunk.old[-1 - at] != hunk.new[-1 - at]), shorter - head)
    return head, tail


def _occurrences(pattern: Sequence[bytes], lines: Sequence[bytes]) -> list[int]:
    """Where a sequence of lines starts in others, counted from 0; in linear time (Knuth, Morris, Pratt)."""
    borders = [0]  # for each prefix of the pattern, the length of its longest border
    starts, matched = [], 0
    for at, line in enumerate((*pattern[1:], *lines)):
        in_pattern = at < len(pattern) - 1
        if at == len(pattern) - 1:
            matched = 0
        while matched and (matched == len(pattern) or pattern[matched] != line):
            matched = borders[matched - 1]
        matched += pattern[matched] == line
        if in_pattern:
            borders.append(matched)
        elif matched == len(pattern):
            starts.append(at - 2 * (len(pattern) - 1))
    return starts
