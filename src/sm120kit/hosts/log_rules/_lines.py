"""What kinds of lines a log has: errors, versions, frames of tracebacks, lines of a server that works."""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass
from datetime import datetime, timedelta

from sm120kit.engines import all_engines

SHOWN_BYTES = 400
"""Maximum length of a line that is kept; some lines of logs are megabytes long."""
PATTERN_BYTES = 600
"""Maximum length of the part of a line that expressions of rules are matched with."""


@dataclass(frozen=True)
class Expression:
    """A regular expression for the start of a line, and lower-case strings of which each matching line has at least one."""

    texts: frozenset[bytes]
    pattern: re.Pattern[bytes]

    @classmethod
    def of(cls, texts: str, pattern: bytes = b"") -> Expression:
        """An expression regardless of case, or one of ``texts``, which are separated by ``|``, at the start of a word."""
        words = texts.encode().split(b"|")
        pattern = pattern or rb"(?<![a-z0-9])(?:%s)" % b"|".join(map(re.escape, words))
        return cls(frozenset(words), re.compile(pattern, re.IGNORECASE))

    def search(self, line: bytes, found: Set[bytes]) -> re.Match[bytes] | None:
        """The first match in a line that has the strings ``found``."""
        return None if self.texts.isdisjoint(found) else self.pattern.search(line[:4096])


FRAME = Expression.of('file "', rb'file "([^"]{1,400})", line \d+(?:, in (\S+))?')
LIBRARY = re.compile(
    rb"(?:^|(?<!safetensors)[/\\])(?:torch|importlib|subprocess|multiprocessing|concurrent)(?:[/\\.])|^<frozen", re.IGNORECASE
)
"""Paths of frames that do not identify a program."""
RAISED = Expression.of(
    "error: |exception: |exit: |interrupt: |unsupported: |failure: |fatal|panic|xid|segfault|what():|oops|error (",
    rb"(?<![\w./])(?:[\w.]{1,120}\.)?\w{0,60}(?:error|exception|exit|interrupt|unsupported|failure): \S"
    rb"|\b(?:fatal|panic|xid|segfault|oops)\b|\bfatal(?:error)? ?:|\bwhat\(\):|\berror \(",
)
"""Lines that state a failure: exceptions and what ends a program or a kernel."""
ERROR = Expression.of(
    "error|exception|fatal|traceback|xid|assert|segfault|core dumped|nvrm|killed|failed|cannot|unsupported|not supported"
    "|out of memory|panic|oops|unexpected",
    rb"(?:error|exception|\b(?:fatal|traceback|xid|assert\w*|segfault|core dumped|nvrm|killed|failed|cannot|unsupported"
    rb"|not supported|out of memory|panic\w*|oops|unexpected))\b",
)
KEY = Expression.of(
    "not found|no such file|failed:|undefined reference|fatal error|permission denied|does not exist|no module named|killed"
    "|not permitted"
)
"""Lines that often have the cause although they do not look like an exception: what a compiler or a shell prints."""
DOUBTFUL = Expression.of(
    "abort|can't|conflict|corrupt|could not|couldn't|crash|denied|died|exceed|expired|fail|illegal|incompatible|insufficient"
    "|invalid|mismatch|missing|refused|stuck|timeout|timed out|unable|undefined|unhealthy|unknown|unrecognized|unreachable"
    "|warning|not support|no attribute|not defined|not available|not allowed|must be|requires|expected|error_|no implementation"
    "|sigterm|too many|is a directory"
)
"""Lines that are shown if a log has no line with a word for errors."""
NOISE = Expression.of(
    'traceback (most recent|during handling of the above|direct cause of the following|file "|^|~|resource_tracker'
    "|stacktrace below might be incorrect|ignored exception|raise ",
    rb"traceback \(most recent|during handling of the above|direct cause of the following|^\s{0,80}file \"|^[\s^~]+$"
    rb"|resource_tracker|stacktrace below might be incorrect|ignored exception|\braise \w",
)
LOWER = re.compile(
    rb"^(?:\([^)\n]{1,80}\) ?)?\[?(?:INFO|DEBUG|WARNING|WARN)\b|(?<!more )\b(?:INFO|DEBUG|WARNING) \d\d-\d\d"
    rb"|\[(?:\d{4}-[\d: -]+)?[^\]\n]{0,20}\] (?:INFO|WARNING)\b|fall(?:s|ing|en)? ?back|will be ignored|will retry|retrying"
    rb"|NCCL INFO|[Ii]gnor(?:e|ing) (?:import )?error"
)
"""Lines of lower levels, and of failures that were handled."""
STARTED = Expression.of("application startup complete|server is fired up and ready")
ANSWERED = Expression.of('"post /', rb'"post /(?:v1/|generate|invocations|score|rerank|inference)[^"\n]{0,200}" 200\b')
ACCESS = Expression.of(
    "/health|/metrics|/v1/models|/ping",
    rb'"(?:get|head) /(?:health|health_generate|metrics|v1/models|ping)\b[^"]{0,200}" \d{3}',
)
"""Requests that watch a server; they do not show that it works."""
CONDITION = re.compile(rb"(?:^|[\]|)]) {0,80}(assert [^\n]{1,400})")
TERMINAL = re.compile(rb"\x1b\[[0-9;?]{0,40}[ -/]{0,4}[@-~]|\x1b\][^\x07\x1b]{0,400}(?:\x07|\x1b\\)|\x08")
"""Terminal escape sequences: colours, cursor movements and titles."""
DEVICE = re.compile(rb"\b[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b")
"""The address of a PCI device."""
_TIME = re.compile(rb"\b(?:(\d{4})-)?(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)")
_PREFIX = re.compile(
    rb"\s{0,80}(?:(?:\([^)\n]{0,80}\)|\[[^\]\n]{0,80}\]:?|(?:INFO|WARNING|ERROR|DEBUG|CRITICAL)\b:?|[-\d:.,TZ]{1,40})\s{1,8}){1,8}"
)
"""Ranks, levels, times and places before the message of a line."""
_QUOTES = tuple(
    (other.encode(), plain)
    for other, plain in (("\u2018", b"'"), ("\u2019", b"'"), ("`", b"'"), ("\u201c", b'"'), ("\u201d", b'"'))
)
_OTHER_QUOTES = re.compile(rb"[`\xe2]")

_VERSION = rb"v?(\d{1,4}\.\d[\w.+]{0,40})"
VERSIONS = {
    **{engine.name: Expression.of(engine.log.texts, engine.log.version + _VERSION) for engine in all_engines()},
    "flashinfer": Expression.of("flashinfer", rb"flashinfer(?:[-_]python)?(?:==| version:? ?| )" + _VERSION),
    "torch": Expression.of("torch", rb"\b(?:py)?torch(?:==| version ?: ?| )" + _VERSION),
    "triton": Expression.of("triton", rb"\btriton(?:==| version ?: ?| )" + _VERSION),
    "transformers": Expression.of("transformers", rb"\btransformers(?:==| version ?: ?| )" + _VERSION),
    "nccl": Expression.of("nccl", rb"nccl(?: version |==)" + _VERSION),
    "driver": Expression.of(
        "driver version|kernel module", rb"(?:driver version ?:|kernel module(?: for \w{1,20})?) {0,9}(\d{3}\.\d[\d.]{0,20})"
    ),
    "cuda": Expression.of("cuda version|cuda runtime version", rb"cuda(?: runtime)? version ?: ?(\d{1,3}\.\d[\d.]{0,20})"),
    "gpu": Expression.of(
        "rtx |gb10", rb"(rtx (?:pro )?\d{4}(?: d| ti)?\b(?: blackwell[\w -]{0,30}edition| blackwell)?|gb10\b)"
    ),
}
"""Versions in lines, by package."""
ENGINES = {engine.name: frozenset(engine.log.words) for engine in all_engines()}
"""Strings of lower-case logs of an engine, by its name."""
_ALL = (FRAME, RAISED, ERROR, KEY, DOUBTFUL, NOISE, STARTED, ANSWERED, ACCESS, *VERSIONS.values())
TEXTS = frozenset().union(*(expression.texts for expression in _ALL))
"""All strings of these expressions."""


def without_prefix(line: bytes) -> bytes:
    """A line without ranks, levels, times and places before its message."""
    match = _PREFIX.match(line[:SHOWN_BYTES])
    return line[match.end() :] if match else line


def plain(line: bytes) -> bytes:
    """A line with the quotation marks that programs print, instead of those of compilers and of Markdown."""
    if _OTHER_QUOTES.search(line):
        for other, mark in _QUOTES:
            line = line.replace(other, mark)
    return line


def shown(line: bytes) -> str:
    """The start of a line, without characters that control a terminal."""
    text = line[:SHOWN_BYTES].decode(errors="replace").replace("\t", " ").strip(" \ufeff\r\x00")
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def time_of(line: bytes, now: datetime) -> datetime | None:
    """The time in a line; a date without year is the latest such date that is not in the future."""
    match = _TIME.search(line[:SHOWN_BYTES])
    if not match:
        return None
    try:
        time = datetime(*(int(text) if text else now.year for text in match.groups()))  # type: ignore[arg-type]
        return time.replace(year=now.year - 1) if match[1] is None and time > now + timedelta(days=1) else time
    except ValueError:
        return None
