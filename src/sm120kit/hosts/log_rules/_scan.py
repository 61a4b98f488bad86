"""Match a log of any size against the rules, in one pass and in bounded memory."""

from __future__ import annotations

import codecs
import io
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import BinaryIO

from sm120kit.hosts.log_rules import _lines, _options
from sm120kit.hosts.log_rules._explanation import Candidate, Explanation, RuleMatch, Versions
from sm120kit.hosts.log_rules._index import in_order, index, names
from sm120kit.hosts.log_rules._lines import KEPT_CHARACTERS, KINDS, shown
from sm120kit.hosts.log_rules._rule import Kind, Remedy, Rule

BLOCK_BYTES = 1 << 20
HANG_SECONDS = 60
"""A line that is younger than this is not the last line of a hang."""
FIRST_LINES, LAST_LINES = 4, 2
"""Numbers of first and last lines of each kind that are shown for an unexplained log."""
TRACEBACK_LINES, FRAMES = 40, 4
"""Maximum number of lines between an exception and its innermost frames, and of these frames."""
_DIGITS = str.maketrans("123456789", "0" * 9)


def explain(stream: BinaryIO, *, ended: bool = False, now: datetime | None = None) -> Explanation:
    """Match a log of any size and encoding against the rules, in one pass.

    ``ended`` states that the program has ended, so that it cannot hang. A line is the last line of a hang only if no failure is
    found, no other line follows, and the time in it is at least ``HANG_SECONDS`` before ``now``.
    """
    scan = _LogScan()
    for lines in _blocks(stream):
        scan.match(lines)
    return scan.explanation(ended, now or datetime.now())


def _blocks(stream: BinaryIO) -> Iterator[list[str]]:
    """Whole lines of a log, and the parts of longer lines than a block. Programs on Windows write UTF-16."""
    chunk = stream.read(BLOCK_BYTES)
    encoding = "utf-16" if chunk.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8"
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder(encoding)(errors="replace"), translate=True)
    rest = ""
    while chunk:
        *lines, rest = (rest + decoder.decode(chunk)).split("\n")
        if len(rest) > BLOCK_BYTES:
            lines, rest = [*lines, rest], ""
        yield lines
        chunk = stream.read(BLOCK_BYTES)
    if rest := rest + decoder.decode(b"", final=True):
        yield rest.removesuffix("\n").split("\n")


@dataclass
class _Group:
    """Lines that match the same rules: the first rule whose condition holds explains all of them."""

    rules: tuple[Rule, ...]
    number: int
    line: str
    frames: str
    count: int = 0
    last: int = 0
    last_line: str = ""

    @property
    def failed(self) -> bool:
        """Whether the line looks like a failure, whatever the rules' conditions say."""
        return self.rules[0].kind is not Kind.HANG and not _lines.lower(self.line)


def _keep(kept: dict[str, Candidate], number: int, line: str) -> None:
    """Add a line to the first and the last different lines of a kind."""
    message = _lines.without_prefix(line)[:KEPT_CHARACTERS].translate(_DIGITS)
    if message not in kept:
        kept[message] = Candidate(number, shown(line))
    if len(kept) > FIRST_LINES + LAST_LINES:
        del kept[[*kept][FIRST_LINES]]


class _LogScan:
    """What was found in the part of a log that was matched."""

    def __init__(self) -> None:
        self._number, self._index = 0, index()
        self._groups: dict[tuple[str, ...], _Group] = {}
        self._contexts: set[str] = set()
        self._revoked: dict[tuple[tuple[str, ...], str], int] = {}
        """Number of the last line with the strings of a rule's ``unless``, by these and the device."""
        self._versions: dict[str, str] = {}
        self._engines: set[str] = set()
        self._condition = ""
        """The condition of an assertion, of which a traceback printed the source code last."""
        self._last_other = 0
        """Number of the last line that matches no rule for hangs."""
        self._before: deque[str] = deque(maxlen=TRACEBACK_LINES)
        self._kept: dict[str, dict[str, Candidate]] = defaultdict(dict)
        """The first and the last different lines of each kind that no rule matches."""
        self._started = False
        self._answered = self._first_error = self._last_error = 0
        """Numbers of the last line with an answer of the server, of the first and of the last unexplained error."""

    def explanation(self, ended: bool, now: datetime) -> Explanation:
        """What is explained so far; parameters as in :func:`explain`."""
        versions = Versions(self._versions, frozenset(self._engines))
        matches = self._matches(versions, ended, now)
        kinds = {match.kind for match in matches}
        if Kind.FAILURE in kinds:
            matches = [match for match in matches if match.kind is not Kind.HANG]
        if not kinds <= {Kind.SLOW, Kind.HARMLESS}:
            matches = [match for match in matches if match.kind is not Kind.HARMLESS]
        order = list(Kind)
        return Explanation(
            tuple(sorted(matches, key=lambda match: (order.index(match.kind), match.number))),
            self._number,
            self._unexplained({match.number for match in matches}),
            self._versions,
            versions.engine,
            self._started and self._answered > self._last_error,
        )

    def _unexplained(self, explained: set[int]) -> tuple[Candidate, ...]:
        """The lines that may matter: errors, and lines of rules whose conditions do not hold; without them, doubtful lines."""
        lines = [line for name in ("raised", "error", "key") for line in self._kept[name].values()]
        left = [group for group in self._groups.values() if group.number not in explained and group.failed]
        lines += [Candidate(group.number, shown(group.line)) for group in left]
        found = lines or self._kept["doubtful"].values() or self._kept["lower"].values()
        return tuple(sorted(found, key=lambda line: line.number))

    def _matches(self, versions: Versions, ended: bool, now: datetime) -> list[RuleMatch]:
        """What groups of lines match. A late failure is the consequence of an error before it."""
        matches: dict[str, RuleMatch] = {}
        for group in sorted(self._groups.values(), key=lambda group: group.number):
            for rule in group.rules:
                if self._applies(rule, group, versions, ended, now) and (match := _filled(rule, group, versions)):
                    previous = matches.get(rule.id)
                    matches[rule.id] = replace(previous, count=previous.count + group.count) if previous else match
                    break
        failures = [match for match in matches.values() if match.kind in (Kind.FAILURE, Kind.GENERAL) and not match.rule.late]
        numbers = [self._first_error, *(match.number for match in failures)]
        first = min(filter(None, numbers), default=self._number)
        cause = f"The error in line {first} is before it; this is its consequence."
        return [
            replace(match, kind=Kind.CONSEQUENCE, cause=cause, fixes=()) if match.rule.late and match.number > first else match
            for match in matches.values()
        ]

    def match(self, lines: Sequence[str]) -> None:
        """Match lines."""
        completed = [self._with_condition(_lines.TERMINAL.sub("", line)) for line in lines]
        for line, (lowered, found) in zip(completed, self._index.of_lines(completed), strict=True):
            self._number += 1
            if line.strip():
                self._note(line, lowered, found)
                self._match_line(line, lowered, found)

    def _with_condition(self, line: str) -> str:
        """An AssertionError without a message, with the condition in the line of source code before it."""
        if " assert " in line and (match := KINDS["condition"].pattern.search(line[:KEPT_CHARACTERS])):
            self._condition = match[1]
        elif self._condition and line.rstrip().endswith("AssertionError"):
            line, self._condition = f"{line.rstrip()}: {self._condition}", ""
        elif not line.endswith(("^", "~")):
            self._condition = ""
        return line

    def _match_line(self, line: str, lowered: str, found: frozenset[str]) -> None:
        frames = self._frames() if not found.isdisjoint(KINDS["error"].words) else ""
        rules = self._index.matching(line, lowered, found, frames)
        if _lines.lower(line):
            rules = tuple(rule for rule in rules if rule.kind is not Kind.GENERAL)
        self._before.append(line[:KEPT_CHARACTERS])
        if not (any(rule.kind is Kind.HANG for rule in rules) or KINDS["watched"].search(line, found)):
            self._last_other = self._number
        if rules:
            self._add(rules, line, frames)
        elif not KINDS["noise"].search(line, found) and not KINDS["frame"].search(line, found):
            self._add_unexplained(line, found)

    def _add(self, rules: tuple[Rule, ...], line: str, frames: str) -> None:
        key = (*(rule.id for rule in rules), _lines.device(line) if any(rule.unless for rule in rules) else "")
        group = self._groups.setdefault(key, _Group(rules, self._number, line[:KEPT_CHARACTERS], frames))
        group.count, group.last, group.last_line = group.count + 1, self._number, line[:KEPT_CHARACTERS]

    def _add_unexplained(self, line: str, found: frozenset[str]) -> None:
        """Keep a line that no rule matches, if it may matter."""
        kind = next((name for name in ("raised", "error", "key", "doubtful") if KINDS[name].search(line, found)), "")
        if not kind:
            return
        kind = "lower" if _lines.lower(line) else kind
        _keep(self._kept[kind], self._number, line)
        if kind in ("raised", "error"):
            self._first_error, self._last_error = self._first_error or self._number, self._number

    def _frames(self) -> str:
        """The innermost frames of the traceback that precedes a line, outside of torch, one per line, the innermost first."""
        frames: list[str] = []
        for line in reversed(self._before):
            if match := KINDS["frame"].pattern.search(line):
                if not _lines.LIBRARY.search(match[1]):
                    frames.append(f"{match[1]} in {match[2] or ''}")
            elif len(frames) == FRAMES or KINDS["raised"].pattern.search(line):
                break
        return "\n".join(frames[:FRAMES])

    def _note(self, line: str, lowered: str, found: frozenset[str]) -> None:
        """Note versions and contexts of a line that has these of the strings."""
        for name, version in _lines.VERSIONS.items():
            if name not in self._versions and (match := version.search(line, found)):
                self._versions[name] = match[1].strip()
        self._engines |= {engine for engine, words in _lines.ENGINES.items() if not words.isdisjoint(found)}
        self._contexts |= self._index.contexts & found
        for unless in self._index.unless:
            if found.issuperset(unless) and in_order(unless, lowered):
                self._revoked[unless, _lines.device(line)] = self._number
        self._started = self._started or bool(KINDS["started"].search(line, found))
        if KINDS["answered"].search(line, found):
            self._answered = self._number

    def _applies(self, rule: Rule, group: _Group, versions: Versions, ended: bool, now: datetime) -> bool:
        if rule.log and self._contexts.isdisjoint(rule.log):
            return False
        if rule.unless and self._revoked.get((rule.unless, _lines.device(group.line)), 0) > group.last:
            return False
        if rule.engines and all(versions.fit(wanted) is False for wanted in rule.engines):
            return False
        if rule.kind is not Kind.HANG:
            return True
        if ended or group.last < self._last_other:
            return False
        time = _lines.time_of(group.last_line, now)
        return time is None or now - time >= timedelta(seconds=HANG_SECONDS)


def _filled(rule: Rule, group: _Group, versions: Versions) -> RuleMatch | None:
    """A rule's cause and remedies with the names in the line; None if the log refutes them: it refuses or has all of them."""
    values = names(rule, group.line, group.frames) or {}
    texts = [(fix, fix.text.format_map(values) if values else fix.text) for fix in rule.fixes]
    if rule.options:
        texts = [(Remedy(text), text) for text in _options.remedies(group.line, versions.engine)]
    useful = tuple(versions.conditional(fix, text) for fix, text in texts if versions.useful(fix, text, group.line))
    if not useful and (rule.options or any(versions.fit(fix.engine) is not False for fix, _ in texts)):
        return None
    cause = rule.cause.format_map(values) if values else rule.cause
    return RuleMatch(rule, group.count, group.number, shown(group.line), cause, useful, rule.kind)
