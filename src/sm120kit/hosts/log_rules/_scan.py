"""Match a log of any size against the rules, in one pass and in bounded memory."""

import codecs
import io
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import BinaryIO

from sm120kit.hosts.log_rules import _lines
from sm120kit.hosts.log_rules._explanation import Candidate, Explanation, LineGroup, RuleMatch, Versions, filled
from sm120kit.hosts.log_rules._lines import KEPT_CHARACTERS, KINDS, shown
from sm120kit.hosts.log_rules._rule import Kind, Rule, in_order, matching, of_lines, rules

BLOCK_BYTES, MAX_BLOCKS = 1 << 20, 1 << 10
"""Part of a log that is matched at once, and how many of them are."""
HANG_SECONDS = 60
"""A line that is younger than this is not the last line of a hang."""
FIRST_LINES, LAST_LINES = 4, 2
"""Numbers of first and last lines of each kind that are shown for an unexplained log."""
TRACEBACK_LINES, FRAMES, MAX_GROUPS = 40, 4, 1000
"""Maximum numbers of lines between an exception and its innermost frames, of these frames, and of different findings."""
_ONE_YEAR = datetime(2400, 12, 31)
"""In which times of lines are compared, of which some have no year."""
_DIGITS = str.maketrans("123456789", "0" * 9)


def explain(stream: BinaryIO, *, ended: bool = False, now: datetime | None = None) -> Explanation:
    """Match the first GiB of a log of any encoding against the rules, in one pass.

    ``ended`` states that the program has ended, so that it cannot hang. A line is the last line of a hang only if no failure is
    found, no other line follows, and the time in it is at least ``HANG_SECONDS`` before ``now``.
    """
    scan = _LogScan()
    for lines in _blocks(stream):
        scan.match(lines)
    return scan.explanation(ended, now or datetime.now())


def _blocks(stream: BinaryIO) -> Iterator[list[str]]:
    """Whole lines, and parts of longer lines than a block. Programs on Windows write UTF-16, crashed hosts leave zeros."""
    chunk = stream.read(BLOCK_BYTES)
    wide = chunk.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    decode = codecs.getincrementaldecoder("utf-16" if wide else "utf-8")(errors="replace").decode
    decoder, rest = io.IncrementalNewlineDecoder(None, translate=True), ""
    for _ in range(MAX_BLOCKS):
        text = decode(chunk if wide else chunk.translate(None, b"\0"), final=not chunk)
        *lines, rest = (rest + decoder.decode(text, final=not chunk)).split("\n")
        if len(rest) > BLOCK_BYTES or not chunk:
            lines, rest = [*lines, *filter(None, [rest])], ""
        yield lines
        if not chunk:
            return
        chunk = stream.read(BLOCK_BYTES)


class _LogScan:
    """What was found in the part of a log that was matched."""

    def __init__(self) -> None:
        self._number = 0
        self._groups: dict[tuple[str, ...], LineGroup] = {}
        self._seen: set[str] = set()
        """The strings of rules and kinds of lines that the log has."""
        self._unless = {rule.unless for rule in rules() if rule.unless}
        self._revoked: dict[tuple[tuple[str, ...], str], int] = {}
        """Number of the last line with the strings of a rule's ``unless``, by these and the device."""
        self._timed = {text: "" for rule in rules() if rule.within for text in rule.log}
        """The last line with each string of a rule that depends on how long ago it was."""
        self._versions: dict[str, str] = {}
        self._last_other = 0
        """Number of the last line that matches no rule for hangs."""
        self._frames: deque[tuple[int, str]] = deque(maxlen=FRAMES)
        """The frames outside of torch since the last exception, the innermost first, with the numbers of their lines."""
        self._kept: dict[str, dict[str, Candidate]] = defaultdict(dict)
        """The first and the last different lines of each kind that no rule matches."""
        self._answered = self._first_error = self._last_error = 0
        """Numbers of the last line with an answer of the server, of the first unexplained error of a rank, and of the last."""

    def explanation(self, ended: bool, now: datetime) -> Explanation:
        """What is explained so far; parameters as in :func:`explain`."""
        seen = (engine for engine, words in _lines.ENGINES.items() if not words.isdisjoint(self._seen))
        named = [name for name in _lines.ENGINES if name in self._versions] or sorted(seen)
        versions = Versions(self._versions, named[0] if len(named) == 1 else "")
        matches = self._matches(versions, ended, now)
        kinds = {match.kind for match in matches}
        if kinds & {Kind.FAILURE, Kind.GENERAL}:
            matches = [match for match in matches if match.kind is not Kind.HANG]
        if not kinds <= {Kind.SLOW, Kind.HARMLESS}:
            matches = [match for match in matches if match.kind is not Kind.HARMLESS]
        return Explanation(
            tuple(sorted(matches, key=lambda match: ([*Kind].index(match.kind), match.number))),
            self._number,
            self._unexplained({match.number for match in matches}),
            self._versions,
            versions.engine,
            not _lines.STARTED.isdisjoint(self._seen) and self._answered > self._last_error,
        )

    def _unexplained(self, explained: set[int]) -> tuple[Candidate, ...]:
        """The lines that may matter: errors, and lines of rules whose conditions do not hold; without them, doubtful lines."""
        lines = [line for name in ("raised", "error", "key") for line in self._kept[name].values()]
        for group in self._groups.values():
            if not (group.number in explained or group.rules[0].kind is Kind.HANG or _lines.lower(group.line)):
                lines.append(Candidate(group.number, shown(group.line)))
        found = lines or self._kept["doubtful"].values() or self._kept["lower"].values()
        return tuple(sorted(found, key=lambda line: line.number))

    def _matches(self, versions: Versions, ended: bool, now: datetime) -> list[RuleMatch]:
        """What groups of lines match, in the order of their first lines."""
        matches: dict[str, RuleMatch] = {}
        for group in sorted(self._groups.values(), key=lambda group: group.number):
            for rule in group.rules:
                if self._applies(rule, group, versions, ended, now):
                    before = matches.get(rule.id)
                    found = filled(rule, group, versions)
                    matches[rule.id] = replace(before, count=before.count + group.count) if before else found
                    break
        return [*self._with_consequences(sorted(matches.values(), key=lambda match: match.number))]

    def _with_consequences(self, matches: Sequence[RuleMatch]) -> Iterator[RuleMatch]:
        """Matches in their order; late failures are consequences of an error before them.

        Not of one of vLLM's API server, which serves on and takes part in no collective, but for what states that the engine
        ended; and that may be a consequence of a timeout before it.
        """
        error, timeout = self._first_error, False
        for match in matches:
            if match.rule.late:
                timeout = timeout or not 0 < error < match.number
                cause = f"The error in line {error} is before it; this is its consequence."
                yield replace(match, kind=Kind.CONSEQUENCE, cause=cause, fixes=()) if 0 < error < match.number else match
                continue
            failed = match.kind in (Kind.FAILURE, Kind.GENERAL) and not _lines.of_server(match.line)
            if failed or (match.kind is Kind.CONSEQUENCE and not timeout):
                error = min(error or match.number, match.number)
            yield match

    def match(self, lines: Sequence[str]) -> None:
        """Match lines."""
        plain = [_lines.TERMINAL.sub("", line) if "\x1b" in line or "\x08" in line else line for line in lines]
        for line, (lowered, found) in zip(plain, of_lines(plain), strict=True):
            self._number += 1
            if found:
                self._seen |= found
                self._note(line, lowered, found)
                self._match_line(line, lowered, found)
            elif line.strip():
                self._last_other = self._number

    def _note(self, line: str, lowered: str, found: frozenset[str]) -> None:
        """Note versions, answers, and what revokes rules."""
        if not _lines.VERSIONS.every.isdisjoint(found):
            for name in _lines.VERSIONS.words.keys() - self._versions:
                if version := _lines.VERSIONS.match(name, line, found):
                    self._versions[name] = version[1].strip()
        for unless in self._unless:
            if found.issuperset(unless) and in_order(unless, lowered):
                self._revoked[unless, _lines.device(lowered)] = self._number
        for text in self._timed.keys() & found:
            self._timed[text] = line
        if KINDS.match("answered", line, found):
            self._answered = self._number

    def _match_line(self, line: str, lowered: str, found: frozenset[str]) -> None:
        frames = "\n".join([frame for number, frame in self._frames if number >= self._number - TRACEBACK_LINES])
        rules = tuple(rule for rule in matching(line, lowered, found, frames) if not rule.within or self._follows(rule, line))
        if any(rule.kind is Kind.GENERAL for rule in rules) and _lines.lower(line):
            rules = tuple(rule for rule in rules if rule.kind is not Kind.GENERAL)
        if not (any(rule.kind is Kind.HANG for rule in rules) or KINDS.match("watched", line, found)):
            self._last_other = self._number
        frame = KINDS.match("frame", line, found)
        if frame and not _lines.LIBRARY.search(frame[1]):
            self._frames.appendleft((self._number, f"{frame[1]} in {frame[2] or ''}"))
        elif not frame and KINDS.match("raised", line, found):
            self._frames.clear()
        if rules:
            self._add(rules, line, frames)
        elif not frame and not KINDS.match("noise", line, found):
            self._add_unexplained(line, found)

    def _follows(self, rule: Rule, line: str) -> bool:
        """Whether a line with one of a rule's ``log`` is before this one, at most ``within`` seconds if both have a time."""
        before = [self._timed[text] for text in rule.log if self._timed[text]]
        found = (_lines.time_of(each, _ONE_YEAR) for each in (*before[-1:], line))
        times = [time.replace(year=_ONE_YEAR.year) for time in found if time]
        ago = times[1] - times[0] if len(times) == 2 else timedelta(0)
        return bool(before) and timedelta(0) <= ago <= timedelta(seconds=rule.within)

    def _add(self, rules: tuple[Rule, ...], line: str, frames: str) -> None:
        key = (*[rule.id for rule in rules], _lines.device(line) if any(rule.unless for rule in rules) else "")
        if key not in self._groups and len(self._groups) < MAX_GROUPS:
            self._groups[key] = LineGroup(rules, self._number, line[:KEPT_CHARACTERS], frames)
        if group := self._groups.get(key):
            group.count, group.last, group.last_line = group.count + 1, self._number, line[:KEPT_CHARACTERS]

    def _add_unexplained(self, line: str, found: frozenset[str]) -> None:
        """Keep a line that no rule matches, if it may matter."""
        kind = next((name for name in ("raised", "error", "key", "doubtful") if KINDS.match(name, line, found)), "")
        if not kind:
            return
        kind = "lower" if _lines.lower(line) else kind
        kept, message = self._kept[kind], _lines.without_prefix(line)[:KEPT_CHARACTERS].translate(_DIGITS)
        kept.setdefault(message, Candidate(self._number, shown(line)))
        if len(kept) > FIRST_LINES + LAST_LINES:
            del kept[[*kept][FIRST_LINES]]
        if kind in ("raised", "error"):
            self._last_error = self._number
            self._first_error = self._first_error or (0 if _lines.of_server(line) else self._number)

    def _applies(self, rule: Rule, group: LineGroup, versions: Versions, ended: bool, now: datetime) -> bool:
        """Whether the conditions of a rule beyond its line hold."""
        revoked = self._revoked.get((rule.unless, _lines.device(group.line)), 0) if rule.unless else 0
        fits = not rule.engines or any(versions.fit(wanted) is not False for wanted in rule.engines)
        if revoked > group.last or not fits or (rule.log and self._seen.isdisjoint(rule.log)):
            return False
        if rule.kind is not Kind.HANG:
            return True
        time = _lines.time_of(group.last_line, now)
        recent = time is not None and now - time < timedelta(seconds=HANG_SECONDS)
        return not (ended or recent or group.last < self._last_other)
