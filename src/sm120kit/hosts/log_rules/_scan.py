"""Match a log of any size against the rules, in one pass and in bounded memory."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import BinaryIO

from sm120kit.hosts.log_rules import _lines, _options
from sm120kit.hosts.log_rules._explanation import Candidate, Explanation, RuleMatch, Versions
from sm120kit.hosts.log_rules._index import encoded, in_order, index, names
from sm120kit.hosts.log_rules._lines import CONDITION, DEVICE, SHOWN_BYTES, shown
from sm120kit.hosts.log_rules._rule import Kind, Remedy, Rule

BLOCK_BYTES = 1 << 20
HANG_SECONDS = 60
"""A line that is younger than this is not the last line of a hang."""
FIRST_LINES, LAST_LINES = 4, 2
"""Numbers of first and last lines of each kind that are shown for an unexplained log."""
TRACEBACK_LINES, FRAMES = 40, 4
"""Maximum number of lines between an exception and its innermost frames, and of these frames."""


def explain(stream: BinaryIO, *, ended: bool = False, now: datetime | None = None) -> Explanation:
    """Match a log of any size and encoding against the rules, in one pass.

    ``ended`` states that the program has ended, so that it cannot hang. A line is the last line of a hang only if no failure is
    found, no other line follows, and the time in it is at least ``HANG_SECONDS`` before ``now``.
    """
    scan = _LogScan()
    for block in _blocks(stream):
        scan.match(block)
    return scan.explanation(ended, now or datetime.now())


def _blocks(stream: BinaryIO) -> Iterator[bytes]:
    """Whole lines of a log, and the parts of longer lines than a block, in UTF-8.

    Programs on Windows write UTF-16, which starts with a byte order mark.
    """
    chunk = stream.read(BLOCK_BYTES)
    utf16 = chunk.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    decoder = codecs.getincrementaldecoder("utf-16")(errors="replace") if utf16 else None
    rest = b""
    while chunk:
        block = rest + (decoder.decode(chunk).encode(errors="replace") if decoder else chunk)
        cut = block.rfind(b"\n") + 1 or (len(block) if len(block) > BLOCK_BYTES else 0)
        rest = block[cut:]
        if cut:
            yield block[:cut].removesuffix(b"\n").removesuffix(b"\r")
        chunk = stream.read(BLOCK_BYTES)
    if rest:
        yield rest


@dataclass
class _Group:
    """Lines that match the same rules: the first rule whose condition holds explains all of them."""

    rules: tuple[Rule, ...]
    count: int
    number: int
    line: bytes
    frames: str
    last: int
    last_line: bytes

    @property
    def failed(self) -> bool:
        """Whether the line looks like a failure, whatever the rules' conditions say."""
        return self.rules[0].kind is not Kind.HANG and not _lines.LOWER.search(self.line)


class _Kept:
    """The first and the last different lines of a kind."""

    def __init__(self) -> None:
        self._messages: set[bytes] = set()
        self._first: list[Candidate] = []
        self._last: deque[Candidate] = deque(maxlen=LAST_LINES)

    def add(self, number: int, line: bytes) -> None:
        message = bytes(48 if 48 <= byte < 58 else byte for byte in _lines.without_prefix(line)[:SHOWN_BYTES])
        if message in self._messages:
            return
        if len(self._first) < FIRST_LINES:
            self._messages.add(message)
            self._first.append(Candidate(number, shown(line)))
        else:
            self._last.append(Candidate(number, shown(line)))

    def __iter__(self) -> Iterator[Candidate]:
        return iter((*self._first, *self._last))


class _LogScan:
    """What was found in the part of a log that was matched."""

    def __init__(self) -> None:
        self._number, self._index = 0, index()
        self._groups: dict[tuple[str, ...], _Group] = {}
        self._contexts: set[bytes] = set()
        self._revoked: dict[tuple[tuple[bytes, ...], bytes], int] = {}
        """Number of the last line with the strings of a rule's ``unless``, by these and the device."""
        self._versions: dict[str, str] = {}
        self._engines: set[str] = set()
        self._condition = b""
        """The condition of an assertion, of which a traceback printed the source code last."""
        self._hang_from: int | None = None
        """Number of the first of the last lines, all of which match rules for hangs."""
        self._before: deque[bytes] = deque(maxlen=TRACEBACK_LINES)
        self._raised, self._errors, self._keys, self._doubtful, self._lower = (_Kept() for _ in range(5))
        self._started = False
        self._answered = self._last_error = 0
        """Numbers of the last line with an answer of the server, and with an unexplained error."""
        self._first_error: int | None = None

    def explanation(self, ended: bool, now: datetime) -> Explanation:
        """What is explained so far; parameters as in :func:`explain`."""
        versions = Versions(self._versions, frozenset(self._engines))
        matches = self._matches(versions, ended, now)
        kinds = {match.kind for match in matches}
        if Kind.FAILURE in kinds:
            matches = [match for match in matches if match.kind is not Kind.HANG]
        if not kinds.isdisjoint((Kind.FAILURE, Kind.HANG, Kind.GENERAL, Kind.CONSEQUENCE)):
            matches = [match for match in matches if match.kind is not Kind.HARMLESS]
        order = list(Kind)
        found = tuple(sorted(matches, key=lambda match: (order.index(match.kind), match.number)))
        kept = {line.number: line for line in (*self._raised, *self._errors, *self._keys)}
        left = [group for group in self._groups.values() if group.number not in {match.number for match in matches}]
        kept |= {group.number: Candidate(group.number, shown(group.line)) for group in left if group.failed}
        for doubtful in (self._doubtful, self._lower):
            kept = kept or {line.number: line for line in doubtful}
        return Explanation(
            found,
            self._number,
            tuple(kept[number] for number in sorted(kept)),
            self._versions,
            versions.engine,
            self._started and self._answered > self._last_error,
        )

    def _matches(self, versions: Versions, ended: bool, now: datetime) -> list[RuleMatch]:
        """What groups of lines match. A late failure is the consequence of an error before it."""
        matches: dict[str, RuleMatch] = {}
        for group in sorted(self._groups.values(), key=lambda group: group.number):
            for rule in group.rules:
                if self._applies(rule, group, versions, ended, now) and (match := _filled(rule, group, versions)):
                    previous = matches.get(rule.id)
                    matches[rule.id] = replace(previous, count=previous.count + group.count) if previous else match
                    break
        early = [
            match.number for match in matches.values() if match.kind in (Kind.FAILURE, Kind.GENERAL) and not match.rule.late
        ]
        first = min([*early, *([self._first_error] if self._first_error else [])], default=self._number)
        return [_consequence(match, first) if match.rule.late and match.number > first else match for match in matches.values()]

    def match(self, block: bytes) -> None:
        """Match lines."""
        if b"\x1b" in block or b"\x08" in block:
            block = _lines.TERMINAL.sub(b"", block)
        lines = (block + b"\n").splitlines()
        for line, texts in zip(lines, self._index.of_lines(lines), strict=True):
            self._number += 1
            if not line.strip():
                continue
            completed = self._with_condition(line)
            if completed is not line:
                texts = next(self._index.of_lines([completed]))
            self._note(line, texts)
            self._match_line(completed, texts)

    def _with_condition(self, line: bytes) -> bytes:
        """An AssertionError without a message, with the condition in the line of source code before it."""
        if b" assert " in line and (match := CONDITION.search(line[:SHOWN_BYTES])):
            self._condition = match[1]
        elif self._condition and line.rstrip().endswith(b"AssertionError"):
            line, self._condition = line.rstrip() + b": " + self._condition[:SHOWN_BYTES], b""
        elif not line.endswith((b"^", b"~")):
            self._condition = b""
        return line

    def _match_line(self, line: bytes, texts: frozenset[bytes]) -> None:
        frames = self._frames() if b"error" in texts or not _lines.ERROR.texts.isdisjoint(texts) else ""
        rules = self._index.matching(line, texts, frames)
        if not rules and (other := _lines.plain(line[:SHOWN_BYTES])) != line[:SHOWN_BYTES]:
            rules = self._index.matching(other, next(self._index.of_lines([other])), frames)
        if _lines.LOWER.search(line[:SHOWN_BYTES]):
            rules = tuple(rule for rule in rules if rule.kind is not Kind.GENERAL)
        self._before.append(line[:SHOWN_BYTES])
        if any(rule.kind is Kind.HANG for rule in rules):
            self._hang_from = self._hang_from or self._number
        elif not _lines.ACCESS.search(line, texts):
            self._hang_from = None
        if rules:
            self._add(rules, line, frames)
        elif not _lines.NOISE.search(line, texts) and not _lines.FRAME.search(line, texts):
            self._add_error(line, texts)

    def _add(self, rules: tuple[Rule, ...], line: bytes, frames: str) -> None:
        key = tuple(rule.id for rule in rules)
        if any(rule.unless for rule in rules):
            key = (*key, _device(line).decode())
        group = self._groups.setdefault(key, _Group(rules, 0, self._number, _excerpt(line, rules[0]), frames, 0, b""))
        group.count, group.last, group.last_line = group.count + 1, self._number, line[:SHOWN_BYTES]

    def _add_error(self, line: bytes, texts: frozenset[bytes]) -> None:
        lower = _lines.LOWER.search(line[:SHOWN_BYTES])
        if (not lower and (raised := _lines.RAISED.search(line, texts))) or (not lower and _lines.ERROR.search(line, texts)):
            (self._raised if raised else self._errors).add(self._number, line)
            self._first_error, self._last_error = self._first_error or self._number, self._number
        elif not lower and _lines.KEY.search(line, texts):
            self._keys.add(self._number, line)
        elif _lines.DOUBTFUL.search(line, texts) or _lines.ERROR.search(line, texts):
            (self._lower if lower else self._doubtful).add(self._number, line)

    def _frames(self) -> str:
        """The innermost frames of the traceback that precedes a line, outside of torch, one per line, the innermost first."""
        frames: list[str] = []
        for line in reversed(self._before):
            if match := _lines.FRAME.pattern.search(line):
                if not _lines.LIBRARY.search(match[1]):
                    frames.append(f"{match[1].decode(errors='replace')} in {(match[2] or b'').decode(errors='replace')}")
            elif len(frames) == FRAMES or _lines.RAISED.pattern.search(line):
                break
        return "\n".join(frames[:FRAMES])

    def _note(self, line: bytes, texts: frozenset[bytes]) -> None:
        """Note versions and contexts of a line that has these of the strings."""
        for name, version in _lines.VERSIONS.items():
            if name not in self._versions and (match := version.search(line, texts)):
                self._versions[name] = match[1].decode(errors="replace").strip()
        self._engines |= {engine for engine, words in _lines.ENGINES.items() if not words.isdisjoint(texts)}
        self._contexts |= self._index.contexts & texts
        for unless in self._index.unless:
            if texts.issuperset(unless) and in_order(unless, line.lower()):
                self._revoked[unless, _device(line)] = self._number
        self._started = self._started or bool(_lines.STARTED.search(line, texts))
        if _lines.ANSWERED.search(line, texts):
            self._answered = self._number

    def _applies(self, rule: Rule, group: _Group, versions: Versions, ended: bool, now: datetime) -> bool:
        if rule.log and self._contexts.isdisjoint(encoded(rule.log)):
            return False
        if rule.unless and self._revoked.get((encoded(rule.unless), _device(group.line)), 0) > group.last:
            return False
        if rule.engines and all(versions.fit(wanted) is False for wanted in rule.engines):
            return False
        if rule.kind is not Kind.HANG:
            return True
        if ended or self._hang_from is None or group.last < self._hang_from:
            return False
        time = _lines.time_of(group.last_line, now)
        return time is None or now - time >= timedelta(seconds=HANG_SECONDS)


def _filled(rule: Rule, group: _Group, versions: Versions) -> RuleMatch | None:
    """A rule's cause and remedies with the names in the line; None if the log refutes them: it refuses or has all of them."""
    values = names(rule, group.line, group.frames) or {}
    texts = [(fix, fix.text.format_map(values) if values else fix.text) for fix in rule.fixes]
    if rule.options:
        texts = [(Remedy(text), text) for text in _options.remedies(group.line.decode(errors="replace"), versions.engine)]
    fixes = [text for fix, text in texts if versions.fit(fix.engine) is not False]
    useful = tuple(versions.conditional(fix, text) for fix, text in texts if versions.useful(fix, text, group.line))
    if (fixes or rule.options) and not useful:
        return None
    cause = rule.cause.format_map(values) if values else rule.cause
    return RuleMatch(rule, group.count, group.number, shown(group.line), cause, useful, rule.kind)


def _consequence(match: RuleMatch, first: int) -> RuleMatch:
    """A late failure, whose own remedies do not help after the error in line ``first``."""
    return replace(
        match, kind=Kind.CONSEQUENCE, cause=f"The error in line {first} is before it; this is its consequence.", fixes=()
    )


def _device(line: bytes) -> bytes:
    match = DEVICE.search(line[: _lines.PATTERN_BYTES].lower())
    return match[0] if match else b""


def _excerpt(line: bytes, rule: Rule) -> bytes:
    """The start of a line, or of what a rule without pattern matches in a line that is too long to be shown."""
    if rule.pattern or len(line) <= SHOWN_BYTES:
        return line[: _lines.PATTERN_BYTES]
    lowered = line.lower()
    first = max(0, *(lowered.find(text) for text in encoded(rule.match[:1] or rule.any)))
    return (
        line[: _lines.PATTERN_BYTES] if first < SHOWN_BYTES // 2 else b"... " + line[first - SHOWN_BYTES // 4 :][:SHOWN_BYTES]
    )
