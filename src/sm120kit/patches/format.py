"""Parse and write patch files: header, trailers, normal form.

Nothing here reads a repository. The parser returns problems instead of raising, so that every problem of every file in a
series is reported at once.
"""

import difflib
import email.utils
import hashlib
import re
from collections.abc import Callable, Container
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from sm120kit.core.errors import BadInput
from sm120kit.core.outside import mail_date, read_input
from sm120kit.patches.diff import FileChange, Hunk, Problem, scan
from sm120kit.patches.patch_records import BadProbe, Probe, parse_probe

FIRST_LINE = f"From {'0' * 40} Mon Sep 17 00:00:00 2001"
"""git's first line of a patch, with zeros for the commit id, which would differ after each export."""

REQUIRED = ("Applies-To", "Upstream-Status", "Origin", "Matters-For", "No-Effect-For", "Evidence", "Drop-When")
RELATIONS = ("Requires", "Conflicts")
"""Trailers with names of patches, ``project/slug``, separated by commas; that of a family names every variant of it."""

OPTIONAL = ("Fixed-In", *RELATIONS, "Signed-off-by", "Probe")
REPEATABLE = ("Signed-off-by", "Probe")

PLACEHOLDER = "TODO"
"""What a text starts with that is still to be written."""

MAX_SPECIFIERS, MAX_PATCH_BYTES = 100, 2**24
"""Limits for the version specifiers of an ``Applies-To``, as disjoint ranges are tried on the bounds of both; for a file."""

_EPOCH = datetime.fromtimestamp(0, UTC)
_Report = Callable[[int, str], None]
"""Takes the line number and the text of a problem."""

TRAILER = re.compile(r"([A-Za-z][A-Za-z-]*): *(.*)")
_FIELD = re.compile(r"^(From|Date|Subject): (.*(?:\n .*)*)", re.MULTILINE)
_PREFIX = re.compile(r"\[[^]]*PATCH[^]]*\] *", re.IGNORECASE)
"""What ``git format-patch`` puts before a subject; other brackets, ``[Kernel] ...``, are the author's."""

_NAME_EDGES = "".join(map(chr, range(33))) + ".,:;<>\"\\'"
"""Characters that git removes from both ends of names and addresses."""

_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_NUMBER = re.compile(r"\d{10}")
_SPECIALS = re.compile(r'[()<>\[\]:;@,.\\"]')
_MIME = {"MIME-Version": "1.0", "Content-Type": "text/plain; charset=UTF-8", "Content-Transfer-Encoding": "8bit"}
_UPSTREAM_STATUS = re.compile(
    r"Submitted \[https?://\S+\]|Backport \[(https?://\S+|[0-9a-f]{40})\]|Inappropriate \[.+\]|Pending"
)


@dataclass(frozen=True)
class Patch:
    """A commit as a file. ``body`` ends with the trailers; paths in ``diff`` are relative to the project's root.

    ``versions`` is the range in ``Applies-To``, ``content`` the whole file.
    """

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
    files: tuple[FileChange, ...] = ()

    @property
    def name(self) -> str:
        """``project/slug``."""
        return f"{self.project}/{self.slug}"

    @property
    def family(self) -> str:
        """The slug before ``--``, which all variants of a patch for different versions share."""
        return self.slug.partition("--")[0]

    @property
    def sha256(self) -> str:
        """The sha256 of the file."""
        return hashlib.sha256(self.content).hexdigest()

    @property
    def hunks_sha256(self) -> str:
        """The sha256 of the diff alone: a proof stays valid when the message changes."""
        return hashlib.sha256(self.diff).hexdigest()

    @property
    def probes(self) -> tuple[Probe, ...]:
        """The probes in its ``Probe`` trailers."""
        return tuple(parse_probe(value) for key, value in self.trailers if key == "Probe")

    @property
    def requires(self) -> tuple[str, ...]:
        """The names of the patches without which this one is wrong, even where it applies."""
        return names_in(self.trailer("Requires"))

    @property
    def excludes(self) -> tuple[str, ...]:
        """The names of the patches with which this one is wrong, even where it applies."""
        return names_in(self.trailer("Conflicts"))

    def is_named(self, names: Container[str]) -> bool:
        """Whether a trailer with these names means this patch: they have it or its family."""
        return self.name in names or f"{self.project}/{self.family}" in names

    def trailer(self, name: str) -> str:
        """The value of a trailer; empty if there is none of this name."""
        return next((value for key, value in self.trailers if key == name), "")

    def is_fixed_in(self, version: str) -> bool:
        """Whether ``Fixed-In`` names a version of the project, or one before it: upstream has a fix of its own there."""
        fixed = self.trailer("Fixed-In")
        return bool(fixed) and Version(version) >= Version(fixed)

    def is_for(self, version: str) -> bool:
        """Whether ``Applies-To`` holds for a version of the project."""
        return self.versions.contains(version, prereleases=True)


def names_in(value: str) -> tuple[str, ...]:
    """The names in the value of a trailer of :data:`RELATIONS`."""
    return tuple(name.strip() for name in value.split(",") if name.strip())


def render(author: str, date: datetime, subject: str, body: str, diff: bytes) -> bytes:
    """Write a patch in normal form: byte by byte what ``git format-patch`` writes with the options in patches/README.md."""
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
    """Parse a patch file: the patch, or None if an essential part is missing, and every problem in it."""
    problems: list[Problem] = []
    if len(content) > MAX_PATCH_BYTES:
        return None, [Problem(file, 1, f"it has more than {MAX_PATCH_BYTES >> 20} MiB")]

    def report(line: int, text: str) -> None:
        problems.append(Problem(file, line, text))

    start = 0 if content.startswith(b"diff --git ") else content.find(b"\ndiff --git ") + 1
    head, diff = (content[:start], content[start:]) if start else (content, b"")
    if not diff:
        report(1, "no commit message before the diff" if content.startswith(b"diff --git ") else "no diff")
    if b"\0" in head:
        report(head[: head.index(b"\0")].count(b"\n") + 1, "NUL in the commit message: git cannot store it")
        return None, problems
    try:
        text = head.replace(b"\r", b"").decode()
    except UnicodeDecodeError as error:
        report(head[: error.start].count(b"\n") + 1, "the commit message is not UTF-8")
        return None, problems
    header, _, message = text.partition("\n\n")
    headers, below = _headers(header), header.count("\n") + 2
    body = [line.rstrip() for line in message.split("\n")]
    if "---" in body:  # a diffstat follows; it is not part of the message
        del body[body.index("---") :]
    while body and not body[-1]:
        body.pop()
    trailers = _trailers(body, below + 1, report)
    versions = _check_trailers(project, trailers, below + len(body), report)
    scanned = scan(diff, file, text.count("\n") + 1, problems)
    author, date = _author(headers, report), _date(headers, report)
    subject = headers.get("Subject", ("", 1))[0].strip()
    if not subject:
        report(1, "no Subject")
    elif _PREFIX.match(subject):
        report(
            headers["Subject"][1],
            f"the subject starts with {subject.partition(']')[0]}]: export it with an empty --subject-prefix",
        )
        subject = _PREFIX.sub("", subject, count=1)
    if not author or not date or versions is None or not subject or not diff:
        return None, problems
    pairs = tuple((name, value) for name, value, _ in trailers)
    diff = diff[: scanned.length]
    message = "\n".join(body).strip("\n")
    patch = Patch(
        project, file.stem, author, date, subject, message, pairs, versions, diff, scanned.hunks, content, scanned.files
    )
    normal = render(author, date, subject, message, diff)
    if normal != content and not problems:
        different = (i for i, pair in enumerate(zip(normal, content, strict=False)) if pair[0] != pair[1])
        report(
            content[: next(different, len(normal))].count(b"\n") + 1,
            "not in normal form: export it from a directory of `sm120kit patch edit`",
        )
    return patch, problems


def read_foreign(file: Path) -> Patch:
    """Read a patch file that is in no series.

    A file with an ``Applies-To`` trailer must be in normal form. Any other git diff becomes a patch without project, trailers
    and probes.

    Raises:
        BadInput: the file cannot be read, contains no diff, or has ``Applies-To`` and is not well-formed.
    """
    try:
        content = read_input(file)
    except OSError as error:
        raise BadInput(f"{file} cannot be read: {error.strerror}", "name a patch of a series or an existing file") from error
    applies_to = re.search(rb"^Applies-To: *([\w.-]+)", content, re.MULTILINE)
    patch, problems = parse(applies_to[1].decode() if applies_to else "", file, content)
    if patch and not problems:
        return patch
    if applies_to:
        raise BadInput("\n".join(map(str, problems)), "patches/README.md describes the format")
    start = re.search(rb"^diff --git ", content, re.MULTILINE)
    if not start:
        raise BadInput(f"{file} has no line 'diff --git': it is not a git diff", "make one with git diff or git format-patch")
    return Patch("", file.stem, "", _EPOCH, file.stem, "", (), SpecifierSet(), content[start.start() :], (), content)


def normal_form(patch: Patch) -> bytes:
    """The content of a patch's file in normal form."""
    return render(patch.author, patch.date, patch.subject, patch.body, patch.diff)


def _headers(head: str) -> dict[str, tuple[str, int]]:
    """The fields of a header that a patch consists of, unfolded, each with the number of its line."""
    fields = {match[1]: match for match in reversed([*_FIELD.finditer(head)])}
    return {name: (re.sub("\n +", " ", found[2]), head.count("\n", 0, found.start()) + 1) for name, found in fields.items()}


def _author(headers: dict[str, tuple[str, int]], report: _Report) -> str:
    value, line = headers.get("From", ("", 1))
    try:
        name, address = email.utils.parseaddr(value)
    except RecursionError:  # thousands of nested comments
        name = address = ""
    if not name or "@" not in address or "=?" in name:
        report(line, f"From is {value!r}, not 'Name <address>' in plain UTF-8")
        return ""
    if any(text != text.strip(_NAME_EDGES) or set("<>\n") & set(text) for text in (name, address)):
        report(line, f"From is {value!r}: git removes '<' and '>', and punctuation and spaces at both ends")
        return ""
    return f"{name} <{address}>"


def _date(headers: dict[str, tuple[str, int]], report: _Report) -> datetime | None:
    value, line = headers.get("Date", ("", 1))
    try:
        date = mail_date(value)
    except ValueError:
        date = None
    if date is None or date.tzinfo is None:
        report(line, f"Date is {value!r}, not like 'Mon, 5 Jan 2026 01:02:03 +0000'")
        return None
    if date < _EPOCH:
        report(line, f"Date is {value!r}: git has no dates before 1970")
        return None
    return date


def _trailers(body: list[str], first: int, report: _Report) -> list[tuple[str, str, int]]:
    """Name, value and line number of each trailer: the lines of the last paragraph; indented lines continue a trailer."""
    begin = max((i + 1 for i, line in enumerate(body) if not line), default=0)
    trailers: list[tuple[str, str, int]] = []
    for number, line in enumerate(body[begin:], first + begin):
        match = TRAILER.fullmatch(line)
        if match:
            trailers.append((match[1], match[2].strip(), number))
        elif trailers and line.startswith(" "):
            name, value, begin_line = trailers[-1]
            trailers[-1] = (name, f"{value} {line.strip()}".strip(), begin_line)
        else:
            if trailers:
                report(number, f"not a trailer: {line!r}; indent a line that continues a trailer")
            break
    return trailers


def _check_trailers(project: str, trailers: list[tuple[str, str, int]], last: int, report: _Report) -> SpecifierSet | None:
    names = [name for name, _, _ in trailers]
    for missing in (name for name in REQUIRED if name not in names):
        report(max(last, 1), f"no trailer {missing}")
    versions: SpecifierSet | None = SpecifierSet()
    seen: set[str] = set()
    for name, value, line in trailers:
        if name not in REQUIRED + OPTIONAL:
            near = difflib.get_close_matches(name, REQUIRED + OPTIONAL, n=1)
            report(line, f"unknown trailer {name}" + (f"; did you mean {near[0]}?" if near else ""))
        elif name in seen and name not in REPEATABLE:
            report(line, f"{name} is repeated")
        elif not value:
            report(line, f"{name} is empty")
        elif value.startswith(PLACEHOLDER) and name not in ("Applies-To", "Probe"):
            pass  # reported by series.lint
        elif name == "Upstream-Status" and not _UPSTREAM_STATUS.fullmatch(value):
            report(
                line, f"Upstream-Status is {value!r}, not Submitted [URL], Backport [commit], Inappropriate [reason] or Pending"
            )
        elif name == "Probe":
            _check_probe(value, line, report)
        elif name in RELATIONS:
            for each in names_in(value):
                if not _NAME.fullmatch(each):
                    report(line, f"{name} has {each!r}, which is no name like cutlass/stage-count")
        elif name == "Applies-To":
            versions = _applies_to(project, value, line, report)
        seen.add(name)
    return versions


def _check_probe(value: str, line: int, report: _Report) -> None:
    try:
        parse_probe(value)
    except BadProbe as problem:
        report(line, f"Probe is {value!r}: {problem}")


def _applies_to(project: str, value: str, line: int, report: _Report) -> SpecifierSet | None:
    named, _, ranges = value.partition(" ")
    if named != project:
        report(line, f"Applies-To names {named!r}, but the file is in the series of {project}")
    if ranges.count(",") >= MAX_SPECIFIERS:
        report(line, f"Applies-To has {ranges.count(',') + 1} version specifiers: {MAX_SPECIFIERS} are allowed")
        return None
    if "===" in ranges or _NUMBER.search(ranges):
        report(line, f"Applies-To has {ranges[:80]!r}: '===' and numbers of ten digits are not supported")
        return None
    try:
        versions = SpecifierSet(ranges)
    except InvalidSpecifier:
        report(line, f"Applies-To has {ranges!r}, which is not a version range like '>=4.2,<4.4.2'")
        return None
    if not ranges.strip():
        report(line, "Applies-To has no version range")
    elif not overlap(versions, versions):
        report(line, f"Applies-To has {ranges!r}, which contains no version")
    return versions


def overlap(left: SpecifierSet, right: SpecifierSet) -> str:
    """A version that is in both ranges; empty if they are disjoint.

    The lowest version that two ranges share is a bound of either or lies just above a bound, so only those are tried.
    """
    bounds = {specifier.version.removesuffix(".*") for specifier in (*left, *right)} | {"0"}
    just_above = {f"{Version(bound).base_version}.0.1" for bound in bounds}
    candidates = sorted(bounds) + sorted(just_above)
    return next((v for v in candidates if left.contains(v, prereleases=True) and right.contains(v, prereleases=True)), "")
