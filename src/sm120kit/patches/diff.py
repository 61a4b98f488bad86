"""Parse the diffs of a series, which change plain text files.

``git apply`` accepts much more than a series may have: diffs without a git header, renames, symbolic links, binary files. So
each line of a section must belong to its header or to a hunk.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unidiff.patch import Hunk as ParsedHunk

FILE_MODES = ("100644", "100755")
"""Plain and executable files, as git writes their modes."""

_LINE = re.compile(rb"[^\n]*\n|[^\n]+")
_HUNK = re.compile(rb"@@ -\d{1,9}(?:,\d{1,9})? \+\d{1,9}(?:,\d{1,9})? @@[^\n]*\n?")
_IN_HUNK = (b"@", b" ", b"-", b"+", b"\\")
_HEADER = re.compile(
    rb"diff --git a/(?P<path>.{1,4096}) b/(?P=path)\n"
    rb"(?:(?P<kind>new file|deleted file) mode (?P<mode>\d+)\n|old mode (?P<before>\d+)\nnew mode (?P<after>\d+)\n)?"
    rb"(?:index (?P<old>[0-9a-f]{40})\.\.(?P<new>[0-9a-f]{40})(?: (?P<unchanged>\d{6}))?\n)?"
    rb"(?P<names>--- (?:a/(?P=path)|/dev/null)\t?\n\+\+\+ (?:b/(?P=path)|/dev/null)\t?\n)?"  # a tab follows a path with a space
)
_SIDES = {" ": (0, 1), "-": (0,), "+": (1,)}


@dataclass(frozen=True)
class Problem:
    """A problem in a file of a series; ``line`` counts from 1."""

    file: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Hunk:
    """The ``number``-th hunk for the file ``path``, at its line ``start``; the hunk is at ``line`` of the patch file.

    ``old`` and ``new`` are its lines before and after the change, with their line ends.
    """

    path: str
    number: int
    start: int
    header: str
    line: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]


@dataclass(frozen=True)
class FileChange:
    """The blob ids of a file before and after a patch, from its ``index`` line at ``line`` of the patch file.

    An id is 40 zeros if there is no file, and empty if only the mode changes.
    """

    path: str
    old: str
    new: str
    line: int


@dataclass(frozen=True)
class Diff:
    """The files and hunks of a diff, and its ``length`` in bytes: a mail signature may follow it."""

    files: tuple[FileChange, ...]
    hunks: tuple[Hunk, ...]
    length: int


class MalformedDiff(Exception):
    """The diff cannot be parsed further; ``at`` is the number of its line, from 0."""

    def __init__(self, at: int, text: str) -> None:
        super().__init__(text)
        self.at = at


def split_lines(content: bytes) -> list[bytes]:
    """The lines of a file with their line ends, as git counts them: only LF ends a line."""
    return _LINE.findall(content)


def scan(diff: bytes, file: Path, first: int, problems: list[Problem]) -> Diff:
    """Parse a diff of a series whose first line is line ``first`` of ``file``; problems are added to ``problems``."""
    lines, at, end = split_lines(diff), 0, 0
    files: dict[str, FileChange] = {}
    hunks: list[Hunk] = []
    if lines and not lines[-1].endswith(b"\n"):
        problems.append(Problem(file, first + len(lines) - 1, "the last line is cut off"))
    try:
        while at < len(lines) and lines[at] != b"-- \n":
            change, problem, own, at = _section(lines, at, first)
            if change.path in files:
                problem = problem or f"{change.path} is changed twice"
            if problem:
                problems.append(Problem(file, change.line, problem))
            files[change.path], end = change, at
            hunks += own
        behind = (number for number in range(at + 2, len(lines)) if lines[number].strip(b"\n"))
        if (number := next(behind, None)) is not None:  # below a mail signature of one line
            raise MalformedDiff(number, f"text follows the diff: {_shown(lines[number])}")
    except MalformedDiff as error:
        problems.append(Problem(file, first + error.at, str(error)))
    return Diff(tuple(files.values()), tuple(hunks), sum(map(len, lines[:end])))


def _section(lines: list[bytes], at: int, first: int) -> tuple[FileChange, str, list[Hunk], int]:
    """The change of a file, what is wrong with its header, its hunks, and the number of the line after it."""
    match = _HEADER.match(b"".join(lines[at : at + 6]))
    if match is None:
        raise MalformedDiff(at, f"not part of a git diff of a plain path with --full-index: {_shown(lines[at])}")
    try:
        path = match["path"].decode()
    except UnicodeDecodeError:
        raise MalformedDiff(at, "the path is not UTF-8") from None
    at += match[0].count(b"\n")
    old, new = (match[name].decode() if match[name] else "" for name in ("old", "new"))
    change = FileChange(path, old, new, first + at - 1 - 2 * bool(match["names"]))
    modes = {mode.decode() for mode in match.group("mode", "before", "after", "unchanged") if mode}
    problem = f"{path!r} {path_problem(path)}" if path_problem(path) else ""
    if others := sorted(modes.difference(FILE_MODES)):
        problem = problem or f"{path} has mode {others[0]}: not a plain file"
    hunks, at = _hunks(path, lines, at, first)
    if bool(match["names"]) != bool(hunks) or not (hunks or match["kind"] or (match["before"] and not old)):
        rest = _shown(lines[at]) if at < len(lines) else "nothing"
        raise MalformedDiff(at, f"no hunk follows for {path}, which is not renamed, copied or binary, but {rest}")
    if hunks and not old:
        problem = problem or f"no index line for {path}: export with --full-index"
    return change, problem, hunks, at


def _hunks(path: str, lines: list[bytes], at: int, first: int) -> tuple[list[Hunk], int]:
    """The hunks from line ``at`` on, below the two names, and the number of the line after them.

    unidiff parses them, and ignores lines that belong to no hunk: those are left to the caller. Bytes become characters with
    the same numbers, as a file need not be UTF-8.
    """
    from unidiff.errors import UnidiffParseError  # imported here: most commands parse no patch
    from unidiff.patch import PatchSet

    end = next((number for number in range(at, len(lines)) if lines[number][:1] not in _IN_HUNK), len(lines))
    for number in range(at, end):
        if b"\0" in lines[number]:
            raise MalformedDiff(number, "NUL in a hunk: git exports such a file as a binary file; only text can be reviewed")
        if lines[number].startswith(b"@") and not _HUNK.fullmatch(lines[number]):
            raise MalformedDiff(number, f"not the header of a hunk: {_shown(lines[number])}")
    unread = iter([line.decode("latin-1") for line in lines[at - 2 : end]])
    try:
        parsed = [hunk for file in PatchSet(unread) for hunk in file] if end > at else []
    except UnidiffParseError:
        last = end - sum(1 for _ in unread) - 1
        raise MalformedDiff(last, f"a hunk of {path} ends early or has other lines than its header counts") from None
    hunks: list[Hunk] = []
    begin = at - 2
    for number, hunk in enumerate(parsed, 1):
        if not hunk or hunk[0].diff_line_no != at - begin + 2:  # unidiff counts the lines that it is passed from 1
            break
        header = lines[at].decode(errors="replace").rstrip("\r\n")
        try:
            hunks.append(Hunk(path, number, hunk.source_start, header, first + at, *sides(hunk)))
        except ValueError as error:
            raise MalformedDiff(at, str(error)) from None
        at += 1 + len(hunk)
    return hunks, at


def sides(hunk: ParsedHunk) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """The lines of a hunk before and after the change.

    Raises:
        ValueError: it has lines after the end of the file.
    """
    both: tuple[list[bytes], list[bytes]] = ([], [])
    last: tuple[int, ...] = ()
    for line in hunk:
        if line.line_type == "\\" and not last:
            raise ValueError("a line end is missing, but not that of the last line")
        for side in last if line.line_type == "\\" else ():
            both[side][-1] = both[side][-1].removesuffix(b"\n")
        last = _SIDES.get(line.line_type, ())
        for side in last:
            if both[side] and not both[side][-1].endswith(b"\n"):
                raise ValueError("a line follows the end of the file")
            both[side].append(line.value.encode("latin-1"))
    return tuple(both[0]), tuple(both[1])


def _shown(line: bytes) -> str:
    return repr(line[:80].decode(errors="replace").rstrip("\n"))


def blob_id(content: bytes) -> str:
    """The id that git gives the content of a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def path_problem(path: str) -> str:
    """The reason why a path is not allowed in a patch; empty if it is allowed."""
    parts = path.split("/")
    if path.startswith(("/", "\\")) or re.match(r"[A-Za-z]:", path):
        return "is absolute: paths are relative to the project's own root"
    if any(part in ("", ".", "..") for part in parts):
        return "leaves the project's tree or is not in its shortest form"
    if any(part.lower().rstrip(". ") in (".git", "git~1", ".gitmodules") for part in parts):
        return "belongs to git"
    if any(ord(letter) < 32 or letter in '"\\' for letter in path):
        return "has a control character, quote or backslash"
    return ""
