"""Explain known errors in an engine's log: ``explain(stream) -> Explanation``.

The rules are data: ``system_rules.toml`` for the transport of KV caches, SGLang's caches and devices that do not start,
``vllm_rules.toml`` for messages of vLLM, ``host_rules.toml`` for drivers, containers, installations, networks, SGLang and
TensorRT-LLM, ``program_rules.toml`` for programs around engines, ``part_rules.toml`` for exceptions of Python by the part of
an engine that raised them, ``message_rules.toml`` for topics of messages and ``class_rules.toml`` for classes of failures
without a rule of their own, ``rules.toml`` for the others. What a log shows besides failures, and the advice that depends on
it, is in ``facts.toml``.
"""

from __future__ import annotations

import codecs
import json
import re
import tomllib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cache, lru_cache
from pathlib import Path
from typing import BinaryIO, Literal

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version
from pydantic import TypeAdapter

from sm120kit.hosts.log_rules import facts, options, records
from sm120kit.hosts.log_rules.records import Candidate, ClassEntry, Explanation, Kind, Remedy, Rule, RuleMatch
from sm120kit.hosts.log_rules.strings import Expression, Strings

__all__ = ["Explanation", "Kind", "LogScan", "Rule", "RuleMatch", "explain", "rules"]

NAMES = ("system_rules", "host_rules", "vllm_rules", "rules", "program_rules", "part_rules", "class_rules", "message_rules")
RULES = tuple(Path(__file__).with_name(f"{name}.toml") for name in NAMES)
"""Files of rules; those of a file precede those of the next."""
BLOCK_BYTES = 1 << 20
MAXIMUM_NAMES = 6
"""Maximum number of names, such as libraries, that a finding of a class of failures lists."""
SHOWN_BYTES = 400
"""Maximum length of a line that is kept; some lines of logs are megabytes long."""
HANG_SECONDS = 60
"""A line that is younger than this is not the last line of a hang."""
FIRST_ERRORS, LAST_ERRORS = 4, 2
"""Numbers of first and last lines of each degree that are shown for an unexplained log."""
TRACEBACK_LINES, FRAMES = 40, 4
"""Maximum number of lines between an exception and its innermost frames, and of these frames."""
FRAME = Expression.of('file "', rb'file "([^"]+)", line \d+(?:, in (\S+))?')
TORCH = re.compile(
    rb"(?:^|(?<!safetensors)[/\\])(?:torch|importlib|subprocess|multiprocessing|concurrent)(?:[/\\.])|^<frozen", re.IGNORECASE
)
"""Paths of frames that do not identify a program."""
RAISED = Expression.of(
    "error: |exception: |exit: |interrupt: |unsupported: |failure: |fatal|panic|xid|segfault|what():|oops",
    rb"(?<![\w./])(?:[\w.]+\.)?\w*(?:error|exception|exit|interrupt|unsupported|failure): \S|\bfatal\b|\bpanic\b"
    rb"|\bxid\b|\bsegfault\b|\bfatal(?:error)? *:|\bwhat\(\):|\boops\b",
)
"""Lines that state a failure: exceptions and what ends a program or a kernel."""
DOUBTFUL = Expression.of(
    "abort|can't|conflict|corrupt|could not|couldn't|crash|denied|died|does not exist|exceed|expired|fail|illegal|incompatible"
    "|insufficient|invalid|is a directory|mismatch|missing|no such|not found|not permitted|not allowed|not available"
    "|not installed|refused|stuck|timeout|time out|timed out|timedout|unable|undefined|unexpected|unhealthy|unknown"
    "|unrecognized|unreachable|warning|not support|no module named|no attribute|not defined|must be|requires|expected",
    rb"\b(abort\w*|can't|conflict\w*|corrupt\w*|could not|couldn't|crash\w*|denied|died|does not exist|exceed\w*|expired"
    rb"|fail\w*|illegal|incompatible|insufficient|invalid|is a directory|mismatch\w*|missing|no such"
    rb"|not (?:found|permitted|allowed|available|installed|support|defined)|no (?:module named|attribute)"
    rb"|must be|requires|expected"
    rb"|refused|stuck|timed? ?out|timeout|unable|undefined|unexpected|unhealthy|unknown|unrecognized|unreachable|warning)\b",
)
"""Lines that are shown if a log has no line with a word for errors."""
ERROR = Expression.of(
    "error|exception|fatal|traceback|xid|assert|segfault|core dumped|nvrm|killed|failed|cannot|unsupported|not supported"
    "|out of memory|panic|oops",
    rb"(?:error|exception)\b|\b(?:fatal|traceback|xid|assert\w*|segfault|core dumped|nvrm|killed|failed|cannot|unsupported"
    rb"|not supported|out of memory|panic\w*|oops)\b",
)
NOISE = Expression.of(
    'traceback (most recent|during handling of the above|direct cause of the following|file "|^|~|resource_tracker'
    "|stacktrace below might be incorrect|ignored exception|raise |loading nvidia unix",
    rb"traceback \(most recent|during handling of the above|direct cause of the following|^\s*file \"|^[\s^~]+$"
    rb"|resource_tracker|stacktrace below might be incorrect|ignored exception|\braise \w+|loading nvidia unix",
)
HANDLED = re.compile(
    rb"\b(?:(?<!=)(?<!more )info|(?<!nccl )(?<!=)warn|debug|deprecated)\b"
    rb"|warning(?!\s+(?:failed(?:scheduling|mount|create\w*| {2,})|backoff|unhealthy|evicted|unexpectedadmissionerror))\b"
    rb"|\blevel=(?:info|warn|debug)|(?-i:\[[IW](?:\d{4})? |^\s*[IW]\d{4} \d)"
    rb"|fall(?:s|ing|en)? ?back|[,;] using \w|will be ignored|ignore import error"
    rb"|(?<!marked as )skip(?:ped|ping)\b|will retry|retrying|, chang(?:e|ing) \w+ (?:from \w+ )?to \w|automatically set"
    rb"|unexpected results may|might lead to|is disabled because|; [\w -]{1,40} disabled:|please set your attention"
    rb"|[.;] rounding \w"
    rb"|^\s*(?:raise|return|assert|if|except|import|from) ",
    re.IGNORECASE,
)
"""Lines of lower levels, of failures that were handled, and of source code in tracebacks: no class of failures matches them."""
ACCESS = Expression.of(
    "/health|/metrics|/v1/models|/ping", rb'"(?:get|head) /(?:health|health_generate|metrics|v1/models|ping)\b[^"]*" \d{3}'
)
"""Lines about requests that watch a server; they do not show that it works."""
CRASH = b"fatal python error: "
"""Python's own report of a crash; the stack follows it, the innermost frame first."""
CRASH_STACK = re.compile(
    rb"current thread|python runtime state|<no python frame>|^\s*$|\(most recent call first\)", re.IGNORECASE
)
QUOTES = tuple(
    (other.encode(), plain)
    for other, plain in (("\u2018", b"'"), ("\u2019", b"'"), ("`", b"'"), ("\u201c", b'"'), ("\u201d", b'"'), ('\\"', b'"'))
)
"""Quotation marks of compilers, of Markdown and of text in JSON, with those that programs print."""
OTHER_QUOTES = re.compile(rb"[`\xe2]|\\\\\"")
"""Bytes of lines that may have other quotation marks than those of programs."""
LOGURU = re.compile(rb"^[-\d:., ]*\| *[A-Z]+ *\| *\S+ - ")
"""Time, level and place before the message of a line of loguru."""
STATED = re.compile(
    r"(?:(?<=[.;:!?] )|(?<=[.;:!?]  )|(?<=\()|^)((?:Please|Try|Consider|Use|Set|Unset|Reduce|Increase|Decrease|Lower|Raise"
    r"|Install|Reinstall|Upgrade|Update|Disable|Enable|Remove|Drop|Pass|Add|Specify|Switch|Rebuild|Make sure|Ensure|Provide"
    r"|Choose|Select|please|try|use|set|install|upgrade) (?!(?:check|see|look at) (?:the )?(?:stack|trace|logs?|above)|report"
    r"|file|open|create|submit|contact|raise|refer).{6,220}?)(?=\.(?:\s|$)|[;\n]|\[type=|$)"
)
"""What a message tells its reader to do."""
LEVEL = re.compile(rb"^(?:.{0,60}\W)?(?:ERROR|CRITICAL|FATAL)\b")
"""Lines that a program logs as an error."""
NAMELESS = (
    (rb"No module named ", b"ModuleNotFoundError: "),
    (rb"cannot import name |(?:\S+\.so\S*: )undefined symbol", b"ImportError: "),
    (rb"(?:module )?'[\w.]+'(?: object)? has no attribute ", b"AttributeError: "),
    (rb"name '\w+' is not defined", b"NameError: "),
    (rb"'[\w.]+' object is not |\S+\(\) (?:got an unexpected|missing \d|takes )|\S+ got an unexpected keyword", b"TypeError: "),
    (rb"'[\w.]+'$", b"KeyError: "),
    (rb"assert ", b"AssertionError: "),
)
"""Messages of Python by which exceptions are known, with the name of the exception."""
CONDITION = re.compile(rb"(?:^|[\]|)]) {0,80}(assert .+)")
PATTERN_BYTES = 1000
"""Maximum length of the part of a line that patterns are matched with; their time is quadratic in it."""
TERMINAL = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x08")
"""Terminal escape sequences: colours, cursor movements and titles."""
DEVICE = re.compile(rb"\b[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b")
"""The address of a PCI device."""
TIME = re.compile(rb"\b(?:(\d{4})-)?(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)")
PREFIX = re.compile(rb"^\s*(\([^)]*\)\s*|\[[^\]]*\]:?\s*|(INFO|WARNING|ERROR|DEBUG)\b\s*|[-\d:.T ]+\s+)+")
"""Ranks, levels, times and places before the message of a line."""
_VERSION = rb"v?(\d+\.\d+[\w.+]*)"
VERSIONS = {
    "vllm": Expression.of(
        "vllm==|llm engine (| version",
        rb"(?:vllm api server version|llm engine \(|vllm==|vllm version *:?|\xe2\x96[\x80-\x9f] +version) *" + _VERSION,
    ),
    "sglang": Expression.of("sglang==|sglang version|sglang:", rb"sglang(?:==| version *:?|:) *" + _VERSION),
    "flashinfer": Expression.of(
        "flashinfer==|flashinfer-python==|flashinfer_python==| version",
        rb"flashinfer(?:[-_]python)?(?:==| version:? *)" + _VERSION,
    ),
    "torch": Expression.of("torch==|torch version", rb"torch(?:==| version *: *)" + _VERSION),
    "triton": Expression.of("triton==", rb"triton==" + _VERSION),
    "nccl": Expression.of("nccl version |nccl==", rb"nccl(?: version |==)" + _VERSION),
    "driver": Expression.of(
        "driver version|kernel module", rb"(?:driver version *:|kernel module(?: for \w+)?) *(\d{3}\.\d+[\d.]*)"
    ),
    "cuda": Expression.of("cuda version|cuda runtime version", rb"cuda(?: runtime)? version *: *(\d+\.\d+[\d.]*)"),
    "gpu": Expression.of("rtx |gb10", rb"(rtx (?:pro )?\d{4}(?: d| ti)?\b(?: blackwell[\w -]*?edition| blackwell)?|gb10\b)"),
}
"""Versions in lines, by package."""
EXCEPTIONS = frozenset((b"error", b"exception"))
"""Strings of lines with the name of an exception."""
ENGINES = {
    "vllm": frozenset((b"vllm", b"(enginecore", b"(apiserver pid=")),
    "sglang": frozenset(
        (
            b"sglang",
            b"sgl_kernel",
            b"scheduler hit an exception",
            b"received sigquit from a child process",
            b"server_args=serverargs(",
            b"decode batch, #running-req",
            b"prefill batch, #new-seq",
            b"decode batch. #running-req",
            b"prefill batch. #new-seq",
            b"the server is fired up and ready to roll",
        )
    ),
}
"""Strings of lower-case logs of an engine, by its name."""


@cache
def rules() -> tuple[Rule, ...]:
    """The rules, most specific first.

    Raises:
        ValueError: a file of rules does not have the exact form of :class:`Rule`, which is a bug.
    """
    tables = TypeAdapter(dict[Literal["rule"], list[Rule]])
    contents = [json.dumps(tomllib.loads(path.read_text()), default=str) for path in RULES]
    rules = [rule for content in contents for rule in tables.validate_json(content, strict=True)["rule"]]
    if duplicates := [rule_id for rule_id, count in Counter(rule.id for rule in rules).items() if count > 1]:
        raise ValueError(f"two rules with the same id: {', '.join(duplicates)}")
    return tuple(rules)


def explain(stream: BinaryIO, *, ended: bool = False, now: datetime | None = None) -> Explanation:
    """Match a log of any size and encoding against the rules, in one pass; parameters as in :meth:`LogScan.explanation`."""
    scan = LogScan()
    while chunk := stream.read(BLOCK_BYTES):
        scan.feed(chunk)
    scan.close()
    return scan.explanation(ended=ended, now=now)


@dataclass
class _Group:
    """Lines that match the same rules: the first rule whose condition holds explains all of them."""

    rules: tuple[Rule, ...]
    count: int
    number: int
    line: bytes
    last: int
    last_line: bytes
    frames: str
    """The innermost frames before the first line."""
    lines: dict[str, bytes]
    """The first line with each name, of a class of failures."""


@dataclass
class _Crash:
    """A line in which Python reports that it crashed, and the innermost frames after it."""

    number: int
    line: bytes
    texts: frozenset[bytes]
    frames: list[str] = field(default_factory=list)


class _Degree:
    """The first and the last different lines of a kind."""

    def __init__(self) -> None:
        self._messages: set[bytes] = set()
        self._first: list[Candidate] = []
        self._last: deque[Candidate] = deque(maxlen=LAST_ERRORS)

    def add(self, number: int, line: bytes) -> None:
        message = re.sub(rb"\d+", b"0", PREFIX.sub(b"", line))[:SHOWN_BYTES]
        if message in self._messages:
            return
        candidate = Candidate(number, _shown(line))
        if len(self._first) < FIRST_ERRORS:
            self._messages.add(message)
            self._first.append(candidate)
        elif not any(candidate.line == other.line for other in self._last):
            self._last.append(candidate)

    def __iter__(self) -> Iterator[Candidate]:
        return iter((*self._first, *self._last))


@dataclass(frozen=True)
class _Condition:
    """A rule with the lower-case strings of its conditions on a line."""

    rule: Rule
    match: tuple[bytes, ...]
    any: frozenset[bytes]
    without: frozenset[bytes]

    @property
    def anchors(self) -> Iterable[bytes]:
        """Strings of which each matching line has at least one."""
        return (max(self.match, key=len),) if self.match else self.any

    def requires(self, found: frozenset[bytes]) -> bool:
        """Whether a line with the strings ``found`` may fulfil it, which depends on their order if it has several."""
        return (
            found.issuperset(self.match)
            and (not self.any or not self.any.isdisjoint(found))
            and self.without.isdisjoint(found)
            and (not self.rule.raised or not EXCEPTIONS.isdisjoint(found))
        )


@dataclass(frozen=True)
class _Search:
    """The conditions of all rules, in the order of these, and the strings for which a log is searched."""

    conditions: tuple[_Condition, ...]
    anchored: Mapping[bytes, Sequence[int]]
    """Indexes of the conditions that a line with a string may fulfil."""
    contexts: frozenset[bytes]
    unless: frozenset[tuple[bytes, ...]]
    noted: frozenset[bytes]
    """Strings of lines with versions and contexts."""
    strings: Strings

    @classmethod
    def of(cls, rules: Iterable[Rule]) -> _Search:
        conditions = tuple(
            _Condition(rule, _encoded(rule.match), frozenset(_encoded(rule.any)), frozenset(_encoded(rule.without)))
            for rule in rules
        )
        anchored: dict[bytes, list[int]] = {}
        for index, condition in enumerate(conditions):
            for text in condition.anchors:
                anchored.setdefault(text, []).append(index)
        contexts = frozenset(text for condition in conditions for text in _encoded(condition.rule.log))
        unless = frozenset(_encoded(condition.rule.unless) for condition in conditions if condition.rule.unless)
        noted = contexts.union(facts.by_text(), *unless, *ENGINES.values(), *(version.texts for version in VERSIONS.values()))
        of_rules = (text for rule in conditions for text in (*rule.match, *rule.any, *rule.without))
        of_expressions = (text for expression in (FRAME, RAISED, DOUBTFUL, ERROR, NOISE, ACCESS) for text in expression.texts)
        return cls(
            conditions, anchored, contexts, unless, noted, Strings((*of_rules, *of_expressions, *noted, *EXCEPTIONS, CRASH))
        )


@cache
def _search() -> _Search:
    return _Search.of(rules())


@lru_cache(maxsize=4096)
def _candidates(found: frozenset[bytes]) -> tuple[_Condition, ...]:
    """The conditions that a line with these strings may fulfil, in their order."""
    search = _search()
    indexes = {index for text in found for index in search.anchored.get(text, ())}
    conditions = (search.conditions[index] for index in sorted(indexes))
    return tuple(condition for condition in conditions if condition.requires(found))


class LogScan:
    """A log that is matched while it grows. ``live``: what is fed has just been printed."""

    def __init__(self, *, live: bool = False) -> None:
        self._live = live
        self._fed = datetime.min
        self._decoder: Callable[[bytes], bytes] | None = None
        self._rest = b""
        self._number = 0
        self._groups: dict[tuple[str, ...], _Group] = {}
        self._search = _search()
        self._contexts: set[bytes] = set()
        """Strings of rules' ``log`` that occurred."""
        self._revoked: dict[tuple[tuple[bytes, ...], bytes], int] = {}
        """Number of the last line with the strings of a rule's ``unless``, by these and the device."""
        self._versions: dict[str, str] = {}
        self._engines = dict.fromkeys(ENGINES, False)
        self._facts: dict[str, str] = {}
        """Values of facts, by their ids."""
        self._condition = b""
        """The condition of an assertion, of which a traceback printed the source code last."""
        self._crash: _Crash | None = None
        """A crash of Python, whose stack is being read."""
        self._hang_from: int | None = None
        """Number of the first of the last lines, all of which match rules for hangs."""
        self._before: deque[bytes] = deque(maxlen=TRACEBACK_LINES)
        """The lines before a line, in which its traceback is."""
        self._errors: tuple[_Degree, ...] = (_Degree(), _Degree(), _Degree())
        """Unexplained lines that state a failure, have a word for errors, or may matter if there is no other."""

    def feed(self, chunk: bytes) -> None:
        """Match more of the log; an incomplete last line is kept for the next call."""
        self._fed = datetime.now()
        if self._decoder is None:
            self._decoder = _decoder(chunk)
        block = self._rest + self._decoder(chunk)
        cut = block.rfind(b"\n") + 1 or (len(block) if len(block) > BLOCK_BYTES else 0)
        self._rest = block[cut:]
        if cut:
            self._match(block[:cut].removesuffix(b"\n").removesuffix(b"\r"))

    def close(self) -> None:
        """Match an incomplete last line."""
        rest, self._rest = self._rest, b""
        if rest:
            self._match(rest)
        self._match_crash()

    def explanation(self, *, ended: bool = False, now: datetime | None = None) -> Explanation:
        """What is explained so far.

        ``ended`` states that the program has ended, so that it cannot hang. A line is the last line of a hang only if no
        failure is found, no other line follows, and it is at least ``HANG_SECONDS`` older than ``now``: by the time in the
        line, or since it was fed to a live log.
        """
        now = now or datetime.now()
        matches = self._matches(self._groups.values(), ended, now)
        if all(match.rule.kind in (Kind.CONSEQUENCE, Kind.HARMLESS) for match in matches.values()):
            matches = self._matches(self._reworded(), ended, now) | matches
        if any(match.rule.kind is Kind.FAILURE for match in matches.values()):
            matches = {name: match for name, match in matches.items() if match.rule.kind is not Kind.HANG}
        order = list(Kind)
        ranked = sorted(matches.values(), key=lambda match: (order.index(match.rule.kind), match.number))
        stated, worded, doubtful = self._errors
        errors = {error.number: error for error in (*stated, *worded)} or {error.number: error for error in doubtful}
        return Explanation(tuple(ranked), self._number, tuple(errors[number] for number in sorted(errors)), self._versions)

    def _reworded(self) -> Iterator[_Group]:
        """Unexplained lines that match rules in the form in which a program prints them, for a log without an explanation.

        The name of the exception may be left out in messages that another program or a person repeats, or that are logged.
        """
        candidates = {error.number: error.line.encode() for degree in self._errors for error in degree}
        for number, line in sorted(candidates.items()):
            if HANDLED.search(line):
                continue
            for form in _forms(line):
                texts = next(self._search.strings.of_lines([form]))
                if matched := tuple(self._matching(_candidates(texts), form, texts, "")):
                    names = {_names(matched[-1], form)["name"]: form} if matched[-1].pattern else {}
                    yield _Group(matched, 1, number, form, number, form, "", names)
                    break

    def _matches(self, groups: Iterable[_Group], ended: bool, now: datetime) -> dict[str, RuleMatch]:
        """What groups of lines match, by the id of the rule."""
        matches: dict[str, RuleMatch] = {}
        for group in sorted(groups, key=lambda group: group.number):
            rule = next((rule for rule in group.rules if self._applies(rule, group, ended, now)), None)
            if rule is None:
                continue
            if previous := matches.get(rule.id):
                matches[rule.id] = replace(previous, count=previous.count + group.count)
            else:
                cause, fixes = _filled(rule, group.line, group.frames)
                if others := [name for name, line in group.lines.items() if rule.pattern and line != group.line]:
                    cause = f"{cause} Other lines: {', '.join(others)}."
                    fixes = tuple(
                        dict.fromkeys(fix for line in group.lines.values() for fix in _filled(rule, line, group.frames)[1])
                    )
                if rule.kind is Kind.CLASS and (stated := _stated(group.line)):
                    fixes = (Remedy(f'The message itself: "{stated}".'), *fixes)
                advice = tuple(facts.fitting(rule, self._facts))
                cause = " ".join((cause, *(piece.cause.format_map(self._facts) for piece in advice)))
                remedies = tuple(remedy for piece in advice for remedy in piece.fixes)
                fixes = (*fixes, *remedies) if rule.kind is Kind.FAILURE and not rule.advice else (*remedies, *fixes)
                texts = (*self._accepting(rule, group.line), *self._fixes(fixes))
                matches[rule.id] = RuleMatch(rule, group.count, group.number, _shown(group.line), cause, texts)
        return matches

    def _match(self, block: bytes) -> None:
        if b"\x1b" in block or b"\x08" in block:
            block = TERMINAL.sub(b"", block)
        lines = (block + b"\n").splitlines()
        if block.startswith(b"{") or b"\n{" in block:
            lines = [records.message(line) if line.startswith(b"{") else line for line in lines]
        for line, texts in zip(lines, self._search.strings.of_lines(lines), strict=True):
            self._number += 1
            if self._crash:
                self._add_crash_frame(line)
            if CRASH in texts and not self._crash:
                self._crash = _Crash(self._number, line, texts)
            elif line.strip():
                completed = self._with_condition(line)
                if completed is not line:
                    texts = next(self._search.strings.of_lines([completed]))
                if not self._search.noted.isdisjoint(texts):
                    self._note(line, texts)
                self._match_line(texts, completed)

    def _with_condition(self, line: bytes) -> bytes:
        """An AssertionError without a message, with the condition in the line of source code before it."""
        if b" assert " in line and (match := CONDITION.search(line[:SHOWN_BYTES])):
            self._condition = match[1]
        elif self._condition and line.rstrip().endswith(b"AssertionError"):
            line, self._condition = line.rstrip() + b": " + self._condition[:SHOWN_BYTES], b""
        elif not line.endswith((b"^", b"~")):
            self._condition = b""
        return line

    def _add_crash_frame(self, line: bytes) -> None:
        """Add a frame to the stack of a crash of Python, or match the crash with its stack if the line is no part of it."""
        crash = self._crash
        assert crash is not None
        if match := FRAME.pattern.search(line):
            if not TORCH.search(match[1]):
                crash.frames.append(match[1].decode(errors="replace"))
        elif crash.frames or not CRASH_STACK.search(line):
            self._match_crash()
        if len(crash.frames) == FRAMES:
            self._match_crash()

    def _match_crash(self) -> None:
        if crash := self._crash:
            self._crash = None
            self._note(crash.line, crash.texts)
            self._match_line(crash.texts, crash.line, number=crash.number, frames="\n".join(crash.frames))

    def _match_line(self, texts: frozenset[bytes], line: bytes, *, number: int = 0, frames: str = "") -> None:
        """Match a line that has these of the strings; a crash of Python has an earlier number, and frames after it."""
        number = number or self._number
        candidates = _candidates(texts)
        if not frames and any(condition.rule.frame for condition in candidates):
            frames = self._frames()
        matched = tuple(self._matching(candidates, line, texts, frames)) if candidates else ()
        if OTHER_QUOTES.search(line) and (plain := _plain(line[:PATTERN_BYTES])) != line:
            texts_of_plain = next(self._search.strings.of_lines([plain]))
            other = tuple(self._matching(_candidates(texts_of_plain), plain, texts_of_plain, frames))
            if other and (not matched or _rank(other[0]) < _rank(matched[0])):
                matched, line, texts = other, plain, texts_of_plain
        self._before.append(line[:SHOWN_BYTES])
        if any(rule.kind is Kind.HANG for rule in matched):
            self._hang_from = self._hang_from or number
        elif not ACCESS.search(line, texts):
            self._hang_from = None
        if matched:
            key = tuple(rule.id for rule in matched)
            if any(rule.unless for rule in matched):
                key = (*key, _device(line).decode())
            group = self._groups.setdefault(key, _Group(matched, 0, number, _excerpt(line, matched[0]), 0, b"", frames, {}))
            if matched[-1].pattern and len(group.lines) < MAXIMUM_NAMES:
                group.lines.setdefault(_names(matched[-1], line)["name"], line[:PATTERN_BYTES])
            group.count, group.last, group.last_line = group.count + 1, number, line[:SHOWN_BYTES]
        elif not NOISE.search(line, texts) and not FRAME.search(line, texts):
            self._add_error(line, texts)

    def _matching(self, candidates: Sequence[_Condition], line: bytes, texts: frozenset[bytes], frames: str) -> Iterable[Rule]:
        """The rules that match a line, up to the first that depends on nothing else."""
        lowered = line.lower()
        handled: bool | None = None
        for condition in candidates:
            rule = condition.rule
            if len(condition.match) > 1 and not _in_order(condition.match, lowered):
                continue
            if rule.frame and not _compiled(rule.frame).search(frames):
                continue
            if rule.pattern:
                if handled is None:
                    handled = bool(HANDLED.search(line) or NOISE.search(line, texts))
                if handled or not _member(rule, line):
                    continue
            yield rule
            if not rule.conditional:
                return

    def _add_error(self, line: bytes, texts: frozenset[bytes]) -> None:
        part = line[:PATTERN_BYTES]
        raised = RAISED.search(part, texts)
        if raised or ERROR.search(part, texts):
            self._errors[2 if HANDLED.search(part) else 0 if raised else 1].add(self._number, line)
        elif DOUBTFUL.search(part, texts):
            self._errors[2].add(self._number, line)

    def _frames(self) -> str:
        """The innermost frames of the traceback that precedes a line, outside of torch, one per line, the innermost first."""
        frames: list[str] = []
        for line in reversed(self._before):
            if match := FRAME.pattern.search(line):
                if not TORCH.search(match[1]):
                    frames.append(f"{match[1].decode(errors='replace')} in {(match[2] or b'').decode(errors='replace')}")
            elif len(frames) == FRAMES or RAISED.pattern.search(line):
                break
        return "\n".join(frames[:FRAMES])

    def _note(self, line: bytes, texts: frozenset[bytes]) -> None:
        """Note versions and contexts of a line that has these of the strings."""
        for name, version in VERSIONS.items():
            if name not in self._versions and (match := version.search(line, texts)):
                self._versions[name] = match[1].decode(errors="replace").strip()
        for engine, seen in self._engines.items():
            self._engines[engine] = seen or not ENGINES[engine].isdisjoint(texts)
        facts.note(self._facts, line, texts)
        self._contexts |= self._search.contexts & texts
        for unless in self._search.unless:
            if texts.issuperset(unless) and _in_order(unless, line.lower()):
                self._revoked[unless, _device(line)] = self._number

    def _applies(self, rule: Rule, group: _Group, ended: bool, now: datetime) -> bool:
        if rule.log and self._contexts.isdisjoint(_encoded(rule.log)):
            return False
        if group.count < rule.least:
            return False
        if rule.unless and self._revoked.get((_encoded(rule.unless), _device(group.line)), 0) > group.last:
            return False
        if rule.engines and all(self._fits(versions) is False for versions in rule.engines):
            return False
        if rule.kind is not Kind.HANG:
            return True
        if ended or self._hang_from is None or group.last < self._hang_from:
            return False
        time = self._fed if self._live else _time(group.last_line, now)
        return time is None or now - time >= timedelta(seconds=HANG_SECONDS)

    def _fits(self, versions: str) -> bool | None:
        """Whether the log is of a package in these versions; None if it does not show that."""
        required = Requirement(versions)
        version = self._versions.get(required.name)
        if version is None and required.name in ENGINES:
            others = [name for name in ENGINES if name != required.name and name in self._versions]
            words = [name for name, seen in self._engines.items() if seen]
            return False if others or (words and required.name not in words) else None
        try:
            return None if version is None else required.specifier.contains(Version(version), prereleases=True)
        except InvalidVersion:
            return None

    def _accepting(self, rule: Rule, line: bytes) -> tuple[str, ...]:
        """Versions that accept the options which a line refuses, of the log's engine if it shows only one."""
        if not rule.options:
            return ()
        engines = [name for name, seen in self._engines.items() if seen]
        return options.recorded(line.decode(errors="replace"), engines[0] if len(engines) == 1 else "")

    def _fixes(self, fixes: tuple[Remedy, ...]) -> Iterable[str]:
        for fix in fixes:
            fits = self._fits(fix.engine) if fix.engine else True
            if fits is not False:
                yield fix.text if fits else f"{fix.engine}: {fix.text}"


def _plain(line: bytes) -> bytes:
    """A line with the quotation marks that programs print."""
    for other, mark in QUOTES:
        line = line.replace(other, mark)
    return line


@cache
def _ranks() -> Mapping[str, int]:
    return {rule.id: rank for rank, rule in enumerate(rules())}


def _rank(rule: Rule) -> int:
    """The place of a rule: more specific ones are first."""
    return _ranks()[rule.id]


def _forms(line: bytes) -> Iterator[bytes]:
    """Forms in which a program prints a line's message: other quotation marks, and the name of an exception before it."""
    for form in dict.fromkeys((line, _plain(line))):
        message = PREFIX.sub(b"", LOGURU.sub(b"", form))
        if form != line:
            yield form
        name = next((name for pattern, name in NAMELESS if re.match(pattern, message)), b"")
        if name:
            yield name + message
        elif LEVEL.search(form) and not RAISED.pattern.search(message):
            yield b"Error: " + message


def _device(line: bytes) -> bytes:
    match = DEVICE.search(line.lower())
    return match[0] if match else b""


def _encoded(texts: tuple[str, ...]) -> tuple[bytes, ...]:
    return tuple(text.lower().encode() for text in texts)


def _in_order(needles: tuple[bytes, ...], lowered: bytes) -> bool:
    position = 0
    for needle in needles:
        position = lowered.find(needle, position)
        if position < 0:
            return False
        position += len(needle)
    return True


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE)


def _names(rule: Rule, line: bytes) -> dict[str, str]:
    """What the groups of a rule's pattern match in a line; empty if it does not match."""
    match = _compiled(rule.pattern).search(line[:PATTERN_BYTES].decode(errors="replace"))
    return {name: (text or "").strip() for name, text in match.groupdict().items()} if match else {}


def _stated(line: bytes) -> str:
    """What the message of a line tells its reader to do; "" if nothing."""
    message = PREFIX.sub(b"", line[:PATTERN_BYTES]).decode(errors="replace")
    match = STATED.search(message)
    return match[1].strip() if match else ""


def _entry(rule: Rule, name: str) -> ClassEntry | None:
    """The entry of a rule's table with the longest name that ``name`` starts with; of numbers, the one that it is."""
    fits = str.__eq__ if name.isdigit() else str.startswith
    fitting = [entry for entry in rule.table if fits(name.lower(), entry.name)]
    return max(fitting, key=lambda entry: len(entry.name), default=None)


def _member(rule: Rule, line: bytes) -> bool:
    """Whether a line that no program handled is of a rule's class."""
    if rule.failed and not ERROR.pattern.search(line):
        return False
    names = _names(rule, line)
    return bool(names) and (bool(rule.fixes) or _entry(rule, names["name"]) is not None)


def _filled(rule: Rule, line: bytes, frames: str) -> tuple[str, tuple[Remedy, ...]]:
    """Cause and remedies of a rule, with the names in the line and in the traceback before it."""
    names = _names(rule, line) if rule.pattern else {}
    if rule.frame and (match := _compiled(rule.frame).search(frames)):
        names |= {name: text or "" for name, text in match.groupdict().items()}
    if not names:
        return rule.cause, rule.fixes
    entry = _entry(rule, names["name"]) if rule.table else None
    fixes = (*((Remedy(entry.fix),) if entry else ()), *rule.fixes)
    cause = entry.cause if entry and entry.cause else rule.cause
    return cause.format_map(names), tuple(replace(fix, text=fix.text.format_map(names)) for fix in fixes)


def _time(line: bytes, now: datetime) -> datetime | None:
    """The time in a line; a date without year is the latest such date that is not in the future."""
    match = TIME.search(line)
    if not match:
        return None
    year, *rest = (int(text) if text else now.year for text in match.groups())
    month, day, hour, minute, second = rest
    try:
        time = datetime(year, month, day, hour, minute, second)
    except ValueError:
        return None
    return time.replace(year=year - 1) if match[1] is None and time > now + timedelta(days=1) else time


def _decoder(first: bytes) -> Callable[[bytes], bytes]:
    """A function from parts of a log to UTF-8. Programs on Windows write UTF-16, which starts with a byte order mark."""
    if not first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return bytes
    decoder = codecs.getincrementaldecoder("utf-16")(errors="replace")
    return lambda chunk: decoder.decode(chunk).encode(errors="replace")


def _shown(line: bytes) -> str:
    """The start of a line, without characters that control a terminal."""
    text = line[:SHOWN_BYTES].decode(errors="replace").replace("\t", " ").strip(" \ufeff\r\x00")
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def _excerpt(line: bytes, rule: Rule) -> bytes:
    """The start of a line, or of what a rule without pattern matches in a line that is too long to be shown."""
    if rule.pattern or len(line) <= SHOWN_BYTES:
        return line[:PATTERN_BYTES]
    lowered = line.lower()
    first = min(start for text in _encoded(rule.match[:1] or rule.any) if (start := lowered.find(text)) >= 0)
    return line[:PATTERN_BYTES] if first < SHOWN_BYTES // 2 else b"... " + line[first - SHOWN_BYTES // 4 :][:PATTERN_BYTES]
