"""A strict parser of git diffs: it accepts changes to plain text files and rejects everything else.

``git apply`` accepts much more: diffs without a git header, renames, symbolic links, binary files. A construct that git applies
and this parser skipped could change files outside a project, so nothing is skipped. unidiff parses the hunks; it ignores lines
that belong to no hunk, so each line of a section must belong to its header or to a hunk.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unidiff.patch import Hunk as ParsedHunk

FILE_MODES = ("100644", "100755")
"""Plain and executable files, as git writes their modes."""

_HUNK = re.compile(rb"@@ -\d{1,9}(?:,\d{1,9})? \+\d{1,9}(?:,\d{1,9})? @@.*")
_HEADER = re.compile(
    rb"diff --git a/(?P<path>.{1,4096}) b/(?P=path)\n"
    rb"(?:(?P<kind>new file|deleted file) mode (?P<mode>\d+)\n|old mode (?P<before>\d+)\nnew mode (?P<after>\d+)\n)?"
    rb"(?:index (?P<old>[0-9a-f]+)\.\.(?P<new>[0-9a-f]+)(?: (?P<unchanged>\d{6}))?\n)?"
)
_NO_BLOB = "0" * 40
_NO_NEWLINE = b"\\ No newline at end of file"


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

    ``old`` and ``new`` are its lines before and after the change, with their line ends; ``added`` and ``removed`` count the
    lines that only one of them has.
    """

    path: str
    number: int
    start: int
    header: str
    line: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]
    added: int
    removed: int


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
    """The diff cannot be parsed further; ``line`` is that of the patch file."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line = line


def scan(diff: bytes, file: Path, first: int, problems: list[Problem]) -> Diff:
    """Parse a diff whose first line is line ``first`` of ``file``; problems are added to ``problems``."""
    lines = diff.split(b"\n")
    if lines and not lines[-1]:
        lines.pop()
    elif diff:
        problems.append(Problem(file, first + len(lines) - 1, "the last line is cut off"))
    reader = _Reader(lines, first, file, problems)
    try:
        while reader.at < len(lines) and reader.peek() != b"-- ":
            reader.file_section()
        reader.signature()
    except MalformedDiff as error:
        problems.append(Problem(file, error.line, str(error)))
    return Diff(tuple(reader.files.values()), tuple(reader.hunks), sum(len(line) + 1 for line in lines[: reader.end]))


class _Reader:
    def __init__(self, lines: list[bytes], first: int, file: Path, problems: list[Problem]) -> None:
        self.lines, self.first, self.file, self.problems = lines, first, file, problems
        self.at = 0
        self.end = 0
        """The line after the last section."""
        self.files: dict[str, FileChange] = {}
        self.hunks: list[Hunk] = []

    def peek(self) -> bytes:
        return self.lines[self.at] if self.at < len(self.lines) else b""

    def report(self, text: str) -> None:
        self.problems.append(Problem(self.file, self.first + self.at, text))

    def malformed(self, text: str, at: int | None = None) -> MalformedDiff:
        return MalformedDiff(self.first + (self.at if at is None else at), text)

    def file_section(self) -> None:
        """Parse the section of a file: git header, modes and blob ids, hunks."""
        match = _HEADER.match(b"\n".join(self.lines[self.at : self.at + 4]) + b"\n")
        if match is None:
            is_header = self.peek().startswith(b"diff --git ")
            form = "the two paths of 'diff --git' are not a/PATH and b/PATH with the same plain PATH"
            raise self.malformed(form) if is_header else self.unknown_line()
        try:
            path = match["path"].decode()
        except UnicodeDecodeError:
            raise self.malformed("the path is not UTF-8") from None
        if problem := path_problem(path):
            self.report(f"{path!r} {problem}")
        if path in self.files:
            self.report(f"{path} is changed twice")
        self.at += match[0].count(b"\n")
        kind, old, new = ((match[name] or b"").decode() for name in ("kind", "old", "new"))
        change = self.files[path] = FileChange(path, old, new, self.first + self.at - 1)
        if old and (len(old) != 40 or len(new) != 40):
            self.report("abbreviated blob ids: export with --full-index")
        for mode in filter(None, match.group("mode", "before", "after", "unchanged")):
            if mode.decode() not in FILE_MODES:
                self.report(f"{path} has mode {mode.decode()}: not a plain file")
        self.end_of_header(path)
        first_hunk = len(self.hunks)
        if self.peek().startswith(b"--- "):
            for mark, side, absent in ((b"--- ", b"a/", "new file"), (b"+++ ", b"b/", "deleted file")):
                name = mark + (b"/dev/null" if kind == absent else side + match["path"])
                if self.peek().removesuffix(b"\t") != name:  # git appends a tab to a path with a space
                    raise self.malformed(f"expected {name.decode()!r}")
                self.at += 1
            self.hunks_of(path)
        elif not kind and (old or not match["before"]):
            raise self.malformed(f"no hunk follows for {path}")
        self.check_blobs(change, kind or ("mode" if match["before"] else ""), self.hunks[first_hunk:])
        self.end = self.at

    def end_of_header(self, path: str) -> None:
        """Require that hunks, the next file or the end follow the header of a file."""
        line = self.peek()
        if self.at == len(self.lines) or line.startswith((b"--- ", b"diff --git ")) or line == b"-- ":
            return
        if line.startswith((b"Binary files ", b"GIT binary patch")):
            raise self.malformed(f"{path} is changed as a binary file; only text can be reviewed")
        if line.startswith((b"rename ", b"copy ", b"similarity ", b"dissimilarity ")):
            raise self.malformed(f"{path} is renamed or copied; export with --no-renames")
        if line.startswith((b"index ", b"old mode ", b"new mode ", b"new file mode ", b"deleted file mode ")):
            raise self.malformed(f"the header of {path} is contradictory or repeats a line")
        raise self.unknown_line()

    def unknown_line(self) -> MalformedDiff:
        return self.malformed(f"not part of a git diff: {self.peek().decode(errors='replace')!r}")

    def check_blobs(self, change: FileChange, kind: str, hunks: list[Hunk]) -> None:
        """Require blob ids that fit the content of a file that is created or deleted, and two others for any other change."""

        def report(text: str) -> None:
            self.problems.append(Problem(self.file, change.line, text))

        if not change.old:
            if hunks or kind != "mode":
                report(f"no index line for {change.path}: export with --full-index")
            return
        if len(change.old) != 40 or len(change.new) != 40:
            return  # abbreviated
        if kind in ("new file", "deleted file"):
            old = b"".join(line for hunk in hunks for line in hunk.old)
            new = b"".join(line for hunk in hunks for line in hunk.new)
            content, blob, rest, other = (new, change.new, old, change.old)
            if kind == "deleted file":
                content, blob, rest, other = (old, change.old, new, change.new)
            actual = blob_id(content)
            if rest or other != _NO_BLOB or len(hunks) > 1:
                report(f"{change.path} is a {kind}, but its diff has two sides")
            elif blob != actual:
                report(f"the content of {change.path} has blob id {actual}, its index line has {blob}")
            return
        if _NO_BLOB in (change.old, change.new) or change.old == change.new:
            report(f"the index line of {change.path} does not name two different blobs")

    def hunks_of(self, path: str) -> None:
        from unidiff.errors import UnidiffParseError  # imported here: most commands parse no patch
        from unidiff.patch import PatchSet

        begin = self.at
        try:
            files = PatchSet(self.hunk_lines())
        except UnidiffParseError:
            number = sum(line.startswith(b"@@") for line in self.lines[begin : self.at])
            raise self.malformed(f"hunk {number} of {path} ends early or has other lines than its header counts") from None
        self.at = begin
        moved = 0  # by how many lines the hunks before move what follows them
        for number, parsed in enumerate(files[0], 1):
            # unidiff counts the lines that it is passed from 1; the two names precede the hunks
            if not parsed or parsed[0].diff_line_no != self.at - begin + 4:
                break
            try:
                old, new = sides(parsed)
            except ValueError as error:
                raise self.malformed(str(error)) from None
            header = self.peek().decode(errors="replace").rstrip("\r")
            self.check_hunk(path, number, parsed, moved)
            if old == new:
                self.report(f"hunk {number} of {path} changes nothing")
            self.hunks.append(
                Hunk(path, number, parsed.source_start, header, self.first + self.at, old, new, parsed.added, parsed.removed)
            )
            moved += parsed.target_length - parsed.source_length
            self.at += 1 + len(parsed)
        if self.at == begin:
            raise self.malformed(f"no hunk follows for {path}")

    def hunk_lines(self) -> Iterator[str]:
        """The names of a file and the lines after them that can belong to its hunks; ``at`` is the line that is parsed.

        Bytes become the characters with the same numbers: a file need not be UTF-8.
        """
        yield from (line.decode("latin-1") + "\n" for line in self.lines[self.at - 2 : self.at])
        while self.peek().startswith((b"@@", b" ", b"-", b"+", b"\\")):
            line = self.peek()
            if line.startswith(b"@@") and not _HUNK.fullmatch(line):
                raise self.malformed(f"not the header of a hunk: {line[:80].decode(errors='replace')!r}")
            if line.startswith(b"\\") and line != _NO_NEWLINE:
                raise self.malformed(f"expected {_NO_NEWLINE.decode()!r}")
            if b"\0" in line:
                raise self.malformed("NUL in a hunk: git exports such a file as a binary file; only text can be reviewed")
            yield line.decode("latin-1") + "\n"
            self.at += 1

    def check_hunk(self, path: str, number: int, parsed: ParsedHunk, moved: int) -> None:
        """Require hunks in the order of their lines; git gives an empty side the line before it."""
        first_old = parsed.source_start + (parsed.source_length == 0)
        first_new = parsed.target_start + (parsed.target_length == 0)
        if min(first_old, first_new) < 1 or first_new != first_old + moved:
            self.report(f"hunk {number} of {path} has line numbers that contradict each other or those of the hunk before it")
        before = self.hunks[-1] if number > 1 else None
        if before and first_old < before.start + max(len(before.old), 1):
            self.report(f"hunk {number} of {path} overlaps the hunk before it")

    def signature(self) -> None:
        """Require that only a mail signature of one line and empty lines follow the last section."""
        for number, line in enumerate(self.lines[self.at + 1 :], 1):
            if line and number > 1:
                raise self.malformed(f"text follows the diff: {line[:80].decode(errors='replace')!r}", self.at + number)


def sides(parsed: ParsedHunk) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """The lines of a hunk before and after the change.

    Raises:
        ValueError: it has lines after the end of the file.
    """
    old: list[bytes] = []
    new: list[bytes] = []
    last: list[list[bytes]] = []
    for line in parsed:
        if line.line_type == "\\":
            if not last:
                raise ValueError(f"{_NO_NEWLINE.decode()!r} follows no line of the file")
            for side in last:
                side[-1] = side[-1].removesuffix(b"\n")
            last = []
            continue
        last = {" ": [old, new], "-": [old], "+": [new]}[line.line_type]
        for side in last:
            if side and not side[-1].endswith(b"\n"):
                raise ValueError("a line follows the end of the file")
            side.append(line.value.encode("latin-1"))
    return tuple(old), tuple(new)


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
