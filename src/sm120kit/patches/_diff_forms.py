"""Rewrite what mails, Windows and other tools make of a diff as a plain unified diff, as GNU patch reads it."""

import codecs
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from sm120kit.core.errors import BadInput

BEGIN = re.compile(rb"^(?:diff --git |Index: |--- [^\n]+\n\+\+\+ )", re.MULTILINE)
"""Where a diff begins, with a header of git, of Subversion, or without any."""

_WINDOWS = re.compile(rb"^(?:---|\+\+\+|\*\*\*) [^\n]*\r$", re.MULTILINE)
_INDENTED = re.compile(rb"^([ \t]+)(?:diff --git |--- [^\n]+\n\1\+\+\+ )", re.MULTILINE)
_NAMES = re.compile(rb"^--- ([^\t\n]+)([^\n]*)\n\+\+\+ ([^\t\n]+)([^\n]*)\n(?=@@ )", re.MULTILINE)
_CONTEXT_NAMES = re.compile(rb"^\*\*\* ([^\n]+)\n--- ([^\n]+)\n(?=\*{15})", re.MULTILINE)
_CONTEXT_HUNK = re.compile(
    rb"^\*{15}[^\n]*\n\*\*\* (\d{1,9})(?:,\d{1,9})? \*{4}\n((?:[-! ] [^\n]*\n|\\ [^\n]*\n)*)"
    rb"--- (\d{1,9})(?:,\d{1,9})? -{4}\n((?:[+! ] [^\n]*\n|\\ [^\n]*\n)*)",
    re.MULTILINE,
)
_LINE = re.compile(rb"([-+! ]) ([^\n]*\n(?:\\ [^\n]*\n)?)")


def unified(content: bytes, file: Path) -> bytes:
    """The content of a file with its diffs in unified form, with LF and without indentation or a byte order mark.

    Raises:
        BadInput: a context diff is malformed.
    """
    content = content.removeprefix(codecs.BOM_UTF8)
    if _WINDOWS.search(content):
        content = content.replace(b"\r\n", b"\n")
    if not BEGIN.search(content) and (indented := _INDENTED.search(content)):
        content = re.sub(rb"^%s" % re.escape(indented[1]), b"", content, flags=re.MULTILINE)
    if not content.endswith(b"\n"):
        content += b"\n"
    if _CONTEXT_NAMES.search(content):
        content = _CONTEXT_NAMES.sub(rb"--- \1\n+++ \2\n", content)
        content = _CONTEXT_HUNK.sub(lambda hunk: _unified_hunk(hunk, file), content)
    return _NAMES.sub(_one_name, content)


def _unified_hunk(hunk: re.Match[bytes], file: Path) -> bytes:
    """A hunk of a context diff, in which a side without changes may be left out, in unified form."""
    old, new = ([(line[1], line[2]) for line in _LINE.finditer(side)] for side in (hunk[2], hunk[4]))
    old = old or [line for line in new if line[0] == b" "]
    new = new or [line for line in old if line[0] == b" "]
    lines = b"".join(_merged(iter(old), iter(new)))
    if [text for mark, text in old if mark == b" "] != [text for mark, text in new if mark == b" "]:
        raise BadInput(f"{file}: the sides of a context diff differ in their context", "make it again with diff -u")
    return b"@@ -%d,%d +%d,%d @@\n%b" % (int(hunk[1]), len(old), int(hunk[3]), len(new), lines)


def _merged(old: Iterator[tuple[bytes, bytes]], new: Iterator[tuple[bytes, bytes]]) -> Iterator[bytes]:
    """The lines of both sides as in a unified diff: removed and added ones before each line of context."""
    while True:
        context = b""
        for sign, side in ((b"-", old), (b"+", new)):
            for mark, text in side:
                if mark == b" ":
                    context = b" " + text
                    break
                yield sign + text
        if not context:
            return
        yield context


def _one_name(names: re.Match[bytes]) -> bytes:
    """The names of a file; where one is absolute, as of an edited copy in /tmp, twice the relative or the longer one.

    The source must have a file of this name and the lines of the diff, so that a wrong one is refused.
    """
    old, new = (PurePosixPath(name.decode("latin-1")) for name in (names[1], names[3]))
    absolute = old.is_absolute(), new.is_absolute()
    if not any(absolute) or PurePosixPath("/dev/null") in (old, new) or old.parent == new.parent:
        return names[0]
    chosen = names[1] if (absolute[1], len(old.parts)) > (absolute[0], len(new.parts)) else names[3]
    return b"--- %b%b\n+++ %b%b\n" % (chosen, names[2], chosen, names[4])
