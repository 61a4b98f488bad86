"""A patch as a file: its one normal form, what it says about itself, and what it may touch.

Everything here is static: no repository is looked at. The parser returns problems instead of raising, because a series is
judged as a whole and every problem of every file is told at once.
"""

from __future__ import annotations

import difflib
import email.utils
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from sm120kit.errors import BadPatch
from sm120kit.patches import probes
from sm120kit.patches.diff import Hunk, Problem, scan
from sm120kit.records import Probe

FIRST_LINE = f"From {'0' * 40} Mon Sep 17 00:00:00 2001"
"""What git writes above every patch, with the commit id left out because it would differ after each export."""

REQUIRED = ("Applies-To", "Upstream-Status", "Origin", "Matters-For", "No-Effect-For", "Evidence", "Drop-When")
OPTIONAL = ("Fixed-In", "Signed-off-by", "Probe")
REPEATABLE = ("Signed-off-by", "Probe")

_Bad = Callable[[int, str], None]
"""Takes a line number and what is wrong there."""

_TRAILER = re.compile(r"([A-Za-z][A-Za-z-]*): *(.*)")
_HEADER = re.compile(r"([A-Za-z][A-Za-z-]*): (.*)")
_SPECIALS = re.compile(r'[()<>\[\]:;@,.\\"]')
_MIME = {"MIME-Version": "1.0", "Content-Type": "text/plain; charset=UTF-8", "Content-Transfer-Encoding": "8bit"}
_UPSTREAM_STATUS = re.compile(
    r"Submitted \[https?://\S+\]|Backport \[(https?://\S+|[0-9a-f]{40})\]|Inappropriate \[.+\]|Pending"
)


@dataclass(frozen=True)
class Patch:
    """One commit as a file. ``body`` ends with the trailers; the paths in ``diff`` are relative to the project's root."""

    project: str
    slug: str
    author: str
    date: datetime
    subject: str
    body: str
    trailers: tuple[tuple[str, str], ...]
    versions: SpecifierSet
    diff: bytes
    hunks: tuple[Hunk, ...]
    content: bytes

    @property
    def name(self) -> str:
        """``project/slug``, as messages name it."""
        return f"{self.project}/{self.slug}"

    @property
    def family(self) -> str:
        """What the variants of one patch for different versions share: the slug before ``--``."""
        return self.slug.partition("--")[0]

    @property
    def sha256(self) -> str:
        """Of the file."""
        return hashlib.sha256(self.content).hexdigest()

    @property
    def hunks_sha256(self) -> str:
        """Of the diff alone: a proof stays true when the prose changes."""
        return hashlib.sha256(self.diff).hexdigest()

    @property
    def probes(self) -> tuple[Probe, ...]:
        """What it names to be proven by."""
        return tuple(probes.parse(value) for key, value in self.trailers if key == "Probe")

    def trailer(self, name: str) -> str:
        """The value of a trailer, empty when it is not there."""
        return next((value for key, value in self.trailers if key == name), "")

    def is_for(self, version: str) -> bool:
        """Whether ``Applies-To`` holds for a version of the project."""
        return self.versions.contains(version, prereleases=True)


def render(author: str, date: datetime, subject: str, body: str, diff: bytes) -> bytes:
    """The normal form: byte by byte what ``git format-patch`` writes with the options in patches/README.md."""
    name, address = author.removesuffix(">").split(" <", 1)
    if _SPECIALS.search(name):
        name = '"' + re.sub(r'(["\\])', r"\\\1", name) + '"'
    stamp = re.sub(r", 0(\d) ", r", \1 ", email.utils.format_datetime(date))
    lines = [FIRST_LINE, f"From: {name} <{address}>", f"Date: {stamp}", f"Subject: {subject}"]
    if not (subject + body).isascii():
        lines += [f"{key}: {value}" for key, value in _MIME.items()]
    lines += ["", body.strip("\n"), "", ""]
    return "\n".join(lines).encode() + diff


def parse(project: str, file: Path, content: bytes) -> tuple[Patch | None, list[Problem]]:
    """Read one patch file: the patch if it can be understood at all, and everything that is wrong with it."""
    problems: list[Problem] = []

    def bad(line: int, text: str) -> None:
        problems.append(Problem(file, line, text))

    start = 0 if content.startswith(b"diff --git ") else content.find(b"\ndiff --git ") + 1
    head, diff = (content[:start], content[start:]) if start else (content, b"")
    if not diff:
        bad(1, "no commit message before the diff" if content.startswith(b"diff --git ") else "no diff")
    if b"\r" in head:
        bad(head[: head.index(b"\r")].count(b"\n") + 1, "carriage return in the commit message: lines end with LF alone")
        head = head.replace(b"\r", b"")
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        bad(head[: error.start].count(b"\n") + 1, "the commit message is not UTF-8")
        return None, problems
    lines = text.split("\n")
    headers, below = _headers(lines, bad)
    body = [line.rstrip() for line in lines[below:]]
    if "---" in body:  # a diffstat follows, which is not part of the message
        del body[body.index("---") :]
    while body and not body[-1]:
        body.pop()
    trailers = _trailers(body, below + 1, bad)
    versions = _check_trailers(project, trailers, below + len(body), bad)
    hunks, length = scan(diff, file, text.count("\n") + 1, problems)
    author, date = _author(headers, bad), _date(headers, bad)
    subject = headers.get("Subject", ("", 1))[0].strip()
    if not subject:
        bad(1, "no Subject")
    elif subject.startswith("["):
        bad(
            headers["Subject"][1],
            f"the subject starts with {subject.partition(' ')[0]}: export it with an empty --subject-prefix",
        )
        subject = re.sub(r"^\[[^]]*\] *", "", subject)
    if not author or not date or versions is None or not subject or not diff:
        return None, problems
    told = tuple((name, value) for name, value, _ in trailers)
    diff = diff[:length]
    message = "\n".join(body).strip("\n")
    patch = Patch(project, file.stem, author, date, subject, message, told, versions, diff, hunks, content)
    normal = render(author, date, subject, message, diff)
    if normal != content and not problems:
        same = next((i for i, pair in enumerate(zip(normal, content, strict=False)) if pair[0] != pair[1]), len(normal))
        bad(content[:same].count(b"\n") + 1, "not in normal form: `sm120kit patch check --fix` writes it")
    return patch, problems


def foreign(file: Path) -> Patch:
    """Somebody else's patch from anywhere: in our form with its project and probes, else any git diff, for no project yet.

    Raises:
        BadPatch: there is no such file, or no diff in it.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise BadPatch(f"{file} cannot be read: {error.strerror}", "name a patch of a series or an existing file") from error
    named = re.search(rb"^Applies-To: *([\w.-]+)", content, re.MULTILINE)
    patch, problems = parse(named[1].decode() if named else "", file, content)
    if patch and not problems:
        return patch
    if named:
        raise BadPatch("\n".join(map(str, problems)), "patches/README.md describes the format")
    start = re.search(rb"^diff --git ", content, re.MULTILINE)
    if not start:
        raise BadPatch(f"{file} has no line 'diff --git': it is no git diff", "make one with git diff or git format-patch")
    epoch = datetime.fromtimestamp(0, UTC)
    return Patch("", file.stem, "", epoch, file.stem, "", (), SpecifierSet(), content[start.start() :], (), content)


def normal_form(patch: Patch) -> bytes:
    """The file as it should be."""
    return render(patch.author, patch.date, patch.subject, patch.body, patch.diff)


def _headers(lines: list[str], bad: _Bad) -> tuple[dict[str, tuple[str, int]], int]:
    """Header fields with their line numbers, unfolded, and the index of the first line of the body."""
    if not re.fullmatch(r"From [0-9a-f]{40} Mon Sep 17 00:00:00 2001", lines[0]):
        bad(1, f"the first line is not {FIRST_LINE!r}")
    found: dict[str, tuple[str, int]] = {}
    name = ""
    for number, line in enumerate(lines[1:], 2):
        if not line:
            return found, number
        match = _HEADER.fullmatch(line)
        if line[0] == " " and name:
            found[name] = (f"{found[name][0]} {line.strip()}", found[name][1])
        elif match is None or match[1] in found or match[1] not in ("From", "Date", "Subject", *_MIME):
            bad(number, f"unexpected header {line!r}: there are From, Date and Subject")
        elif _MIME.get(match[1], match[2]) != match[2]:
            bad(number, f"{match[1]} is {match[2]!r}; the only one that is read is {_MIME[match[1]]!r}")
        else:
            name = match[1]
            found[name] = (match[2], number)
    return found, len(lines)


def _author(headers: dict[str, tuple[str, int]], bad: _Bad) -> str:
    value, line = headers.get("From", ("", 1))
    name, address = email.utils.parseaddr(value)
    if not name or "@" not in address or "=?" in name:
        bad(line, f"From is {value!r}, not 'Name <address>' in plain UTF-8")
        return ""
    return f"{name} <{address}>"


def _date(headers: dict[str, tuple[str, int]], bad: _Bad) -> datetime | None:
    value, line = headers.get("Date", ("", 1))
    try:
        date = email.utils.parsedate_to_datetime(value)
    except ValueError:
        date = None
    if date is None or date.tzinfo is None:
        bad(line, f"Date is {value!r}, not like 'Mon, 5 Jan 2026 01:02:03 +0000'")
        return None
    return date


def _trailers(body: list[str], first: int, bad: _Bad) -> list[tuple[str, str, int]]:
    """Name, value and line number of each trailer: the lines of the last paragraph, with indented lines that go on."""
    begin = max((i + 1 for i, line in enumerate(body) if not line), default=0)
    found: list[tuple[str, str, int]] = []
    for number, line in enumerate(body[begin:], first + begin):
        match = _TRAILER.fullmatch(line)
        if match:
            found.append((match[1], match[2].strip(), number))
        elif found and line.startswith(" "):
            name, value, there = found[-1]
            found[-1] = (name, f"{value} {line.strip()}".strip(), there)
        else:
            if found:
                bad(number, f"not a trailer: {line!r}; a trailer that goes on is indented")
            break
    return found


def _check_trailers(project: str, trailers: list[tuple[str, str, int]], last: int, bad: _Bad) -> SpecifierSet | None:
    names = [name for name, _, _ in trailers]
    for missing in (name for name in REQUIRED if name not in names):
        bad(max(last, 1), f"no trailer {missing}")
    versions: SpecifierSet | None = SpecifierSet()
    seen: set[str] = set()
    for name, value, line in trailers:
        if name not in REQUIRED + OPTIONAL:
            near = difflib.get_close_matches(name, REQUIRED + OPTIONAL, n=1)
            bad(line, f"unknown trailer {name}" + (f"; did you mean {near[0]}?" if near else ""))
        elif name in seen and name not in REPEATABLE:
            bad(line, f"{name} is there twice")
        elif not value:
            bad(line, f"{name} says nothing")
        elif name == "Upstream-Status" and not _UPSTREAM_STATUS.fullmatch(value):
            bad(
                line, f"Upstream-Status is {value!r}, not Submitted [URL], Backport [commit], Inappropriate [reason] or Pending"
            )
        elif name == "Probe":
            _check_probe(value, line, bad)
        elif name == "Applies-To":
            versions = _applies_to(project, value, line, bad)
        seen.add(name)
    return versions


def _check_probe(value: str, line: int, bad: _Bad) -> None:
    try:
        probes.parse(value)
    except probes.BadProbe as problem:
        bad(line, f"Probe is {value!r}: {problem}")


def _applies_to(project: str, value: str, line: int, bad: _Bad) -> SpecifierSet | None:
    named, _, ranges = value.partition(" ")
    if named != project:
        bad(line, f"Applies-To is about {named!r}, but the file is in the series of {project}")
    try:
        versions = SpecifierSet(ranges)
    except InvalidSpecifier:
        bad(line, f"Applies-To has {ranges!r}, which is no version range like '>=4.2,<4.4.2'")
        return None
    if not ranges.strip():
        bad(line, "Applies-To has no version range")
    elif not overlap(versions, versions):
        bad(line, f"Applies-To has {ranges!r}, which holds no version")
    return versions


def overlap(one: SpecifierSet, other: SpecifierSet) -> str:
    """A version that is in both ranges, or nothing.

    The lowest version that two ranges share is a bound of one of them or lies just above one, so only those need to be tried.
    """
    bounds = {specifier.version.removesuffix(".*") for specifier in (*one, *other)} | {"0"}
    just_above = {f"{re.match(r'[0-9.]*[0-9]', bound.removeprefix('v'))[0]}.0.1" for bound in bounds}  # type: ignore[index]
    candidates = sorted(bounds) + sorted(just_above)
    return next((v for v in candidates if one.contains(v, prereleases=True) and other.contains(v, prereleases=True)), "")
