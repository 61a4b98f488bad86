"""Read patches of others: diffs, mails, mailboxes, and what ``git show`` and ``git log -p`` print.

Which text is a diff is git's decision, see :mod:`sm120kit.patches.foreign`; here the message is separated from it.
"""

import codecs
import re
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from sm120kit.core import reporting
from sm120kit.core.errors import BadInput
from sm120kit.core.outside import mail_date, read_input
from sm120kit.patches._export import CommitMessage
from sm120kit.patches._message import AUTHOR
from sm120kit.sources.git import Repository

BEGIN = re.compile(rb"^(?:diff --git |Index: |--- [^\n]+\n\+\+\+ )", re.MULTILINE)
"""Where a diff begins, with a header of git, of Subversion, or without any."""

_WINDOWS = re.compile(rb"^(?:---|\+\+\+|\*\*\*|From:|Subject:) [^\n]*\r$", re.MULTILINE)
_INDENTED = re.compile(rb"^([ \t]+)(?:diff --git |--- [^\n]+\n\1\+\+\+ )", re.MULTILINE)
_NAMES = re.compile(rb"^--- ([^\t\n]++)([^\n]*+)\n\+\+\+ ([^\t\n]++)([^\n]*+)\n(?=@@ )", re.MULTILINE)
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
    first, second = (re.sub(rb"(?<=[^/])/(?:\.?/)+", b"/", name) for name in (names[1], names[3]))
    old, new = (PurePosixPath(name.decode("latin-1")) for name in (first, second))
    absolute = old.is_absolute(), new.is_absolute()
    if any(absolute) and PurePosixPath("/dev/null") not in (old, new) and old.parent != new.parent:
        first = second = first if (absolute[1], len(old.parts)) > (absolute[0], len(new.parts)) else second
    return b"--- %b%b\n+++ %b%b\n" % (first, names[2], second, names[4])


MAX_PATCHES, MAX_FILE_BYTES = 200, 2**26
"""Limits for the patches of one file, and for its size."""

_IGNORED = re.compile(rb"^(?:Only in [^:\n]+: |Binary files (?!/dev/null|a/)[^\n]+ and )[^\n]+$", re.MULTILINE)
"""What diff -r prints of files that its diff lacks."""

_MAIL = re.compile(rb"^From [0-9a-f]{40} Mon Sep 17 00:00:00 2001$", re.MULTILINE)
_FROM = re.compile(rb"^From [^\n]*\d:\d\d", re.MULTILINE)
_COMMIT = re.compile(rb"^commit [0-9a-f]{7,40}\b[^\n]*\n(?=(?:Merge|Author): )", re.MULTILINE)
_DATED = re.compile(rb"^(?:Author)?Date: *([^\n]+)", re.MULTILINE)
_BLOBS = re.compile(rb"^index ([0-9a-f]{4,64})\.\.([0-9a-f]{4,64})", re.MULTILINE)
_HEADER = re.compile(rb"(?:From [^\n]*\n)?(?:[A-Za-z-]+: [^\n]*\n(?:[ \t][^\n]*\n)*)+(?=\n)")
_FIELD = re.compile(r"^([A-Za-z][A-Za-z-]*):[ \t]*(.*(?:\n[ \t].*)*)", re.MULTILINE)
_ADDRESS = re.compile(r"[^<>\n]*[^<>\s][^<>\n]* <[^<>\s]+>")


@dataclass(frozen=True)
class ForeignPatch:
    """A diff, with any text around it, and the message that it came with. Its paths are those of its author's tree."""

    file: Path
    message: CommitMessage
    diff: bytes


def read_diffs(file: Path) -> tuple[ForeignPatch, ...]:
    """Read the patches of a file, the first to be applied first.

    Raises:
        BadInput: the file cannot be read, contains no diff, or more than ``MAX_PATCHES``.
    """
    try:
        return split_diffs(read_input(file, MAX_FILE_BYTES), file)
    except OSError as error:
        remedy = "name a file with a diff, or a pull request such as owner/project#123"
        raise BadInput(f"{file} cannot be read: {error.strerror}", remedy) from error


def _require_few(count: int, file: Path) -> None:
    if count > MAX_PATCHES:
        raise BadInput(f"{file} contains {count} patches; at most {MAX_PATCHES} are imported at once", "split the file")


def split_diffs(content: bytes, file: Path) -> tuple[ForeignPatch, ...]:
    """The patches in the content of a file. See :func:`read_diffs`."""
    parts = _split(unified(content, file), file)
    _require_few(len(parts), file)
    for line in _IGNORED.findall(content)[:MAX_PATCHES]:
        reporting.info(f"{file}: no change of it is applied: {line.decode(errors='replace')}")
    found = tuple(patch for patch in (_read(file, part) for part in parts) if BEGIN.search(patch.diff))
    if not found:
        remedy = "make one with git diff --no-color --output=FILE, git format-patch or diff -u"
        raise BadInput(f"{file} contains no diff", remedy)
    return found


def _split(content: bytes, file: Path) -> list[bytes]:
    """The mails of a mailbox, or the commits of a log, the oldest first."""
    if len(starts := [match.start() for match in _MAIL.finditer(content)]) > 1:
        return _parts(content, starts)
    if starts := [match.start() for match in _COMMIT.finditer(content)]:
        commits = _parts(content, starts)
        return commits if _begins_with_oldest(commits) else commits[::-1]
    if not content.startswith(b"From "):
        return [content]
    _require_few(len(_FROM.findall(content)), file)  # git writes a file for each
    with tempfile.TemporaryDirectory(prefix="sm120kit-mails-") as scratch:
        repository = Repository.init(Path(scratch) / "repository")
        mails = Path(scratch) / "mails"
        mails.mkdir()
        split = repository.git("mailsplit", "--keep-cr", f"-o{mails}", stdin=content, check=False)
        return [mail.read_bytes() for mail in sorted(mails.iterdir())] if split.returncode == 0 else [content]


def _begins_with_oldest(commits: list[bytes]) -> bool:
    """Whether a log begins with its oldest commit: others change the files that it left; without such files, by dates."""
    replaced, left, follows = set[bytes](), set[bytes](), 0
    for part in commits:
        old, new = (
            {name for name in names if name.strip(b"0")} for names in zip(*_BLOBS.findall(part) or [(b"", b"")], strict=True)
        )
        follows += len(left & old) - len(replaced & new)
        replaced |= old
        left |= new
    dates = [_date(found[1].decode(errors="replace")) for part in commits if (found := _DATED.search(part))]
    return follows > 0 or (follows == 0 and dates == sorted(dates) != dates[::-1])


def _parts(content: bytes, starts: list[int]) -> list[bytes]:
    return [content[start:end] for start, end in zip(starts, [*starts[1:], len(content)], strict=True)]


def _read(file: Path, content: bytes) -> ForeignPatch:
    if _COMMIT.match(content):
        return ForeignPatch(file, *_read_shown(content))
    header = _HEADER.match(content)
    if header and re.search(rb"^(From|Subject): ", header[0], re.MULTILINE):
        message, below = _read_mail(content)
        return ForeignPatch(file, message, unified(below, file))
    start = _begin(content)
    return ForeignPatch(file, _described(content[:start].decode(errors="replace")), content[start:])


def _begin(content: bytes) -> int:
    """Where the diff begins; at the end if there is none."""
    found = BEGIN.search(content)
    return found.start() if found else len(content)


def _read_mail(content: bytes) -> tuple[CommitMessage, bytes]:
    """The message of a mail and the text below it, decoded as ``git am`` does."""
    with tempfile.TemporaryDirectory(prefix="sm120kit-mail-") as scratch:
        body, below = Path(scratch) / "message", Path(scratch) / "patch"
        repository = Repository.init(Path(scratch) / "repository")
        info = repository.git("mailinfo", "-b", "--encoding=UTF-8", body, below, stdin=content).stdout
        fields = dict(line.partition(": ")[::2] for line in info.splitlines())
        author = _author(f"{fields.get('Author', '')} <{fields.get('Email', '')}>")
        text = _prose(body.read_bytes().decode(errors="replace"))
        return CommitMessage(author, _date(fields.get("Date", "")), fields.get("Subject", ""), text), below.read_bytes()


def _read_shown(content: bytes) -> tuple[CommitMessage, bytes]:
    """The message and the diff of a commit as ``git show`` prints it: fields, then the indented message."""
    start = _begin(content)
    head, _, rest = content[:start].decode(errors="replace").partition("\n\n")
    fields = dict(_FIELD.findall(head))
    indented = re.match(r"(?:    .*\n|\s*\n)*", rest)
    subject, _, body = textwrap.dedent(indented[0] if indented else "").strip().partition("\n")
    author = fields.get("Author", "").strip()
    return CommitMessage(
        _author(author), _date(fields.get("Date") or fields.get("AuthorDate", "")), subject, _prose(body)
    ), content[start:]


def _described(text: str) -> CommitMessage:
    """The message above a plain diff: the fields of Debian's DEP 3 where there are any, else prose."""
    fields = dict(_FIELD.findall(text))
    author = _author(fields.get("Author", "").split("\n")[0].strip())
    described = re.match(r"(?:#[^\n]*\n|[^\S\n]*\n)*+Description:[ \t]*([^\n]*)\n?(.*)", text, re.DOTALL)
    if not described:
        return CommitMessage(author, _now(), "", _prose(textwrap.dedent(text)))
    rest = "\n".join(line.removeprefix(" ") for line in described[2].splitlines())
    return CommitMessage(author, _date(fields.get("Last-Update", "")), described[1].strip(), _prose(rest))


def _prose(text: str) -> str:
    """The text of a message without lines that would end it in a mail."""
    return "\n".join(line for line in text.splitlines() if line.rstrip() != "---").strip()


def _author(text: str) -> str:
    return text if _ADDRESS.fullmatch(text) else AUTHOR


def _date(text: str) -> datetime:
    """The date of a mail or of ``git show``; now where it has none that can be read."""
    for read in (mail_date, datetime.fromisoformat, lambda value: datetime.strptime(value, "%c %z")):
        try:
            date = read(text.strip())
            date = date.replace(tzinfo=date.tzinfo or UTC)
            date.astimezone(UTC)
        except (ValueError, OverflowError):
            continue
        return date
    return _now()


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)
