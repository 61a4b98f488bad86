"""The places where the hunks of a file fit: git apply takes the nearest, which need not be the intended one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from sm120kit.patches.diff import Hunk

_LINE = re.compile(rb"[^\n]*\n|[^\n]+")


def places(hunks: Sequence[Hunk], offsets: Mapping[int, int], content: bytes) -> list[list[int]]:
    """For each hunk of a file, the lines (from 1) of ``content`` where it fits, in the order of the hunks and without overlap.

    ``offsets`` has the distance at which git applies a hunk, by its number. A hunk without an offset fits at its own line: the
    line number decides. Context must match exactly. A hunk that starts at line 1 fits only there, and one without lines of
    context after its change only at the end of the file: so does git apply.
    """
    lines = split_lines(content)
    fits = [fitting_lines(hunk, lines) if hunk.number in offsets else [_line(hunk)] for hunk in hunks]
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
