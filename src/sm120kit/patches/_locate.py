"""The places where the hunks of a file fit: git apply takes the nearest, which need not be the intended one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from sm120kit.patches.diff import Hunk

MAX_FUZZ = 2
"""Limit for the lines of context at each end of a hunk that may differ, as in ``patch``."""

_LINE = re.compile(rb"[^\n]*\n|[^\n]+")


def places(hunks: Sequence[Hunk], offsets: Mapping[int, int], content: bytes) -> list[list[int]]:
    """For each hunk of a file, the lines (from 1) of ``content`` where it fits, in the order of the hunks and without overlap.

    ``offsets`` has the distance at which git applies a hunk, by its number. A hunk without an offset fits at its own line: the
    line number decides. Context must match exactly. A hunk that starts at line 1 fits only there, and one without lines of
    context after its change only at the end of the file: so does git apply.
    """
    lines = split_lines(content)
    return _in_order(hunks, [fitting_lines(hunk, lines) if hunk.number in offsets else [_line(hunk)] for hunk in hunks], lines)


def _in_order(hunks: Sequence[Hunk], fits: list[list[int]], lines: Sequence[bytes]) -> list[list[int]]:
    """Those of the lines where each hunk fits that leave room for the hunks before and after it."""
    end = 1
    for hunk, starts in zip(hunks, fits, strict=True):
        starts[:] = [start for start in starts if start >= end]
        end = min(starts, default=end) + len(hunk.old)
    end = len(lines) + 2
    for hunk, starts in zip(reversed(hunks), reversed(fits), strict=True):
        starts[:] = [start for start in starts if start + len(hunk.old) <= end]
        end = max(starts, default=end)
    return fits


def split_lines(content: bytes) -> list[bytes]:
    """The lines of a file with their line ends, as git counts them: only LF ends a line."""
    return _LINE.findall(content)


def _line(hunk: Hunk) -> int:
    """The first line of a hunk; git gives a hunk without old lines the line before it."""
    return hunk.start + (not hunk.old)


def ambiguities(hunks: Sequence[Hunk], offsets: Mapping[int, int], content: bytes) -> list[tuple[Hunk, list[int]]]:
    """The hunks of a file that git applies at another line than theirs and that fit elsewhere too, each with its places."""
    ambiguous = []
    for hunk, starts in zip(hunks, places(hunks, offsets, content), strict=True):
        if hunk.number in offsets and starts != [_line(hunk) + offsets[hunk.number]]:
            ambiguous.append((hunk, starts))
    return ambiguous


def fitting_lines(hunk: Hunk, lines: Sequence[bytes]) -> list[int]:
    """The lines where a hunk alone fits."""
    at_end = not (hunk.old and hunk.new and hunk.old[-1] == hunk.new[-1])
    starts = _occurrences(hunk.old, lines) if hunk.old else range(len(lines) + 1)
    last = len(lines) - len(hunk.old)
    return [at + 1 for at in starts if (at == 0 or hunk.start > 1) and (at == last or not at_end)]


def merged(hunks: Sequence[Hunk], content: bytes, same_version: bool) -> tuple[bytes, dict[int, int]] | None:
    """The content with the hunks of a file that git does not apply: without context, or with other context at their ends.

    As in ``patch``, up to ``MAX_FUZZ`` lines of context at each end may differ; returns also by how many, by number of hunk.
    None if a hunk fits no place or several. Lines decide only in the version that the hunks were made for.
    """
    lines = split_lines(content)
    found = [_with_fuzz(hunk, lines, same_version) for hunk in hunks]
    cut = [hunk for hunk, _ in found]
    starts = _in_order(cut, [fits for _, fits in found], lines)
    if any(len(fits) != 1 for fits in starts):
        return None
    result, end = list[bytes](), 0
    for hunk, (start,) in zip(cut, starts, strict=True):
        result += [*lines[end : start - 1], *hunk.new]
        end = start - 1 + len(hunk.old)
    result += lines[end:]
    if not all(line.endswith(b"\n") for line in result[:-1]):
        return None
    return b"".join(result), {h.number: len(h.old) - len(c.old) for h, c in zip(hunks, cut, strict=True) if h != c}


def _with_fuzz(hunk: Hunk, lines: Sequence[bytes], same_version: bool) -> tuple[Hunk, list[int]]:
    """A hunk without the lines of context that differ, and where it fits."""
    head, tail = _context(hunk)
    own = _line(hunk)
    if same_version and tuple(lines[own - 1 : own - 1 + len(hunk.old)]) == hunk.old:
        return hunk, [own]
    for fuzz in range(min(MAX_FUZZ, max(head, tail)) + 1):
        first, last = (max(0, fuzz + length - max(head, tail)) for length in (head, tail))
        cut = replace(hunk, start=hunk.start + first, old=_inner(hunk.old, first, last), new=_inner(hunk.new, first, last))
        starts, last_start = _occurrences(cut.old, lines) if cut.old else [], len(lines) - len(cut.old)
        # As in patch and git: what has context on one side only is at the end of the file on the other one.
        at_begin = tail > fuzz and hunk.old[0] != hunk.new[0]
        at_end = head > fuzz and hunk.old[-1] != hunk.new[-1]
        fits = [at + 1 for at in starts if (at == 0 or not at_begin) and (at == last_start or not at_end)]
        if fits or _occurrences(hunk.new, lines):
            return cut, fits
    return hunk, []


def has_context(hunk: Hunk) -> bool:
    """Whether a hunk has lines beside those that it changes."""
    return any(_context(hunk))


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
