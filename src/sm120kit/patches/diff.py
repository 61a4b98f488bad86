"""A strict reader of git diffs: it knows the few things a patch may hold and refuses everything else.

``git apply`` takes much more: diffs without a git header, renames, symbolic links, binary files. What it takes and this reader
does not see could reach outside a project, so there is no leniency here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FILE_MODES = ("100644", "100755")
"""Plain and executable files, as git writes their modes."""

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@.*")
_INDEX = re.compile(rb"index ([0-9a-f]+)\.\.([0-9a-f]+)(?: (\d{6}))?")
_MODE = re.compile(rb"(?:new file|deleted file|old|new) mode (\d+)")


@dataclass(frozen=True)
class Problem:
    """Something wrong with a file of a series."""

    file: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Hunk:
    """The ``number``-th hunk of the file ``path``, written for line ``start`` of it; it is at ``line`` of the patch file."""

    path: str
    number: int
    start: int
    header: str
    line: int


class Refused(Exception):
    """The reader cannot go on."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line = line


def scan(diff: bytes, file: Path, first: int, problems: list[Problem]) -> tuple[tuple[Hunk, ...], int]:
    """Read a diff whose first line is line ``first`` of ``file``; adds to ``problems``.

    Returns the hunks, and the length in bytes of what belongs to the diff: a mail signature may follow.
    """
    lines = diff.split(b"\n")
    if lines and not lines[-1]:
        lines.pop()
    elif diff:
        problems.append(Problem(file, first + len(lines) - 1, "the last line is cut off"))
    reader = _Reader(lines, first, file, problems)
    try:
        while reader.at < len(lines) and reader.peek() != b"-- ":
            reader.file_section()
    except Refused as refused:
        problems.append(Problem(file, refused.line, str(refused)))
    return tuple(reader.hunks), sum(len(line) + 1 for line in lines[: reader.at])


class _Reader:
    def __init__(self, lines: list[bytes], first: int, file: Path, problems: list[Problem]) -> None:
        self.lines, self.first, self.file, self.problems = lines, first, file, problems
        self.at = 0
        self.hunks: list[Hunk] = []
        self.seen: set[str] = set()

    def peek(self) -> bytes:
        return self.lines[self.at] if self.at < len(self.lines) else b""

    def bad(self, text: str) -> None:
        self.problems.append(Problem(self.file, self.first + self.at, text))

    def refuse(self, text: str) -> Refused:
        return Refused(self.first + self.at, text)

    def file_section(self) -> None:
        """One file: its git header, the lines about modes and ids, and its hunks."""
        path = self.path_of(self.peek())
        problem = path_problem(path)
        if problem:
            self.bad(f"{path!r} {problem}")
        if path in self.seen:
            self.bad(f"{path} is changed twice")
        self.seen.add(path)
        self.at += 1
        created = deleted = False
        while self.at < len(self.lines) and not self.peek().startswith((b"--- ", b"diff --git ")):
            line = self.peek()
            if line == b"-- ":
                return
            mode, index = _MODE.fullmatch(line), _INDEX.fullmatch(line)
            if mode:
                created |= line.startswith(b"new file")
                deleted |= line.startswith(b"deleted")
                self.check_mode(path, mode[1])
            elif index:
                if len(index[1]) != 40 or len(index[2]) != 40:
                    self.bad("abbreviated blob ids: export with --full-index")
                self.check_mode(path, index[3] or b"100644")
            elif line.startswith((b"Binary files ", b"GIT binary patch")):
                raise self.refuse(f"{path} is changed as a binary file; only text can be reviewed")
            elif line.startswith((b"rename ", b"copy ", b"similarity ", b"dissimilarity ")):
                raise self.refuse(f"{path} is renamed or copied; export with --no-renames")
            else:
                raise self.refuse(f"not part of a git diff: {line.decode(errors='replace')!r}")
            self.at += 1
        if self.peek().startswith(b"--- "):
            self.names(path.encode(), created, deleted)
            self.hunks_of(path)

    def check_mode(self, path: str, mode: bytes) -> None:
        if mode.decode() not in FILE_MODES:
            self.bad(f"{path} gets mode {mode.decode()}: not a plain file")

    def path_of(self, line: bytes) -> str:
        """The path in ``diff --git a/PATH b/PATH``."""
        names = line.removeprefix(b"diff --git ")
        if names == line:
            raise self.refuse(f"not part of a git diff: {line.decode(errors='replace')!r}")
        half = names[: len(names) // 2]
        if names != half + b" b/" + half[2:] or not half.startswith(b"a/"):
            raise self.refuse("the two paths of 'diff --git' are not a/PATH and b/PATH with one and the same plain PATH")
        try:
            return half[2:].decode()
        except UnicodeDecodeError:
            raise self.refuse("the path is not UTF-8") from None

    def names(self, path: bytes, created: bool, deleted: bool) -> None:
        """The lines ``--- a/PATH`` and ``+++ b/PATH``; git ends a path that has a space in it with a tab."""
        for mark, name in (
            (b"--- ", b"/dev/null" if created else b"a/" + path),
            (b"+++ ", b"/dev/null" if deleted else b"b/" + path),
        ):
            if self.peek().removesuffix(b"\t") != mark + name:
                raise self.refuse(f"expected {(mark + name).decode()!r}")
            self.at += 1

    def hunks_of(self, path: str) -> None:
        number = 0
        while match := _HUNK.fullmatch(self.peek()):
            number += 1
            header = self.peek().decode(errors="replace").rstrip("\r")
            self.hunks.append(Hunk(path, number, int(match[1]), header, self.first + self.at))
            old, new = (int(match[group]) if match[group] is not None else 1 for group in (2, 4))
            self.at += 1
            while old > 0 or new > 0 or self.peek().startswith(b"\\"):
                mark = self.peek()[:1]
                if mark not in (b" ", b"-", b"+", b"\\"):
                    raise self.refuse(f"hunk {number} of {path} ends early: {old} old and {new} new lines are missing")
                old -= mark in (b" ", b"-")
                new -= mark in (b" ", b"+")
                self.at += 1
            if old < 0 or new < 0:
                raise self.refuse(f"hunk {number} of {path} holds other lines than its header counts")
        if number == 0:
            raise self.refuse(f"no hunk follows for {path}")


def path_problem(path: str) -> str:
    """Why a path may not be in a patch, or nothing."""
    parts = path.split("/")
    if path.startswith(("/", "\\")) or re.match(r"[A-Za-z]:", path):
        return "is absolute: paths are relative to the project's own root"
    if any(part in ("", ".", "..") for part in parts):
        return "leaves the project's tree or is not in its shortest form"
    if any(part.lower().rstrip(". ") in (".git", "git~1", ".gitmodules") for part in parts):
        return "is git's own"
    if any(ord(letter) < 32 or letter in '"\\' for letter in path):
        return "has a control character, quote or backslash"
    return ""
