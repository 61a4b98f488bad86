"""The rules that a line may match: all strings of all rules are found in one pass, whatever their number."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from ahocorasick_rs import BytesAhoCorasick

from sm120kit.hosts.log_rules import _lines
from sm120kit.hosts.log_rules._rule import Rule, rules

NONE: frozenset[bytes] = frozenset()


def encoded(texts: Iterable[str]) -> tuple[bytes, ...]:
    """Strings as they are searched for: lower case."""
    return tuple(text.lower().encode() for text in texts)


def in_order(needles: Sequence[bytes], lowered: bytes) -> bool:
    """Whether a line in lower case has the strings one after another."""
    position = 0
    for needle in needles:
        position = lowered.find(needle, position)
        if position < 0:
            return False
        position += len(needle)
    return True


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    """A rule's expression; the case of letters is ignored."""
    return re.compile(pattern, re.IGNORECASE)


@dataclass(frozen=True)
class _Condition:
    """A rule with the strings of its conditions on a line."""

    rule: Rule
    match: tuple[bytes, ...]
    any: frozenset[bytes]
    without: frozenset[bytes]

    def fits(self, found: frozenset[bytes], line: bytes) -> bool:
        return (
            found.issuperset(self.match)
            and (not self.any or not self.any.isdisjoint(found))
            and self.without.isdisjoint(found)
            and (len(self.match) < 2 or in_order(self.match, line.lower()))
        )


class Index:
    """The conditions of rules by the strings of which each matching line has one."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._conditions = tuple(
            _Condition(rule, encoded(rule.match), frozenset(encoded(rule.any)), frozenset(encoded(rule.without)))
            for rule in rules
        )
        self._anchored: dict[bytes, list[int]] = {}
        for number, condition in enumerate(self._conditions):
            for text in (max(condition.match, key=len),) if condition.match else condition.any:
                self._anchored.setdefault(text, []).append(number)
        self.contexts = frozenset(text for one in self._conditions for text in encoded(one.rule.log))
        self.unless = frozenset(encoded(one.rule.unless) for one in self._conditions if one.rule.unless)
        of_rules = {text for one in self._conditions for text in (*one.match, *one.any, *one.without)}
        noted = self.contexts.union(*self.unless, *_lines.ENGINES.values())
        self._texts = tuple(sorted(of_rules | noted | _lines.TEXTS))
        self._automaton = BytesAhoCorasick(self._texts)

    def of_lines(self, lines: Sequence[bytes]) -> Iterator[frozenset[bytes]]:
        """The strings that each line has, regardless of case. Lines contain no newline."""
        matches = iter(self._automaton.find_matches_as_indexes(b"\n".join(lines).lower(), overlapping=True))
        text, _, end = next(matches, (0, 0, -1))
        for end_of_line in accumulate(len(line) + 1 for line in lines):
            found = set()
            while 0 < end < end_of_line:
                found.add(self._texts[text])
                text, _, end = next(matches, (0, 0, -1))
            yield frozenset(found) if found else NONE

    def matching(self, line: bytes, found: frozenset[bytes], frames: str) -> tuple[Rule, ...]:
        """The rules that a line matches, the most specific first, up to the first that depends on nothing else."""
        matched = []
        for number in sorted({number for text in found for number in self._anchored.get(text, ())}):
            condition = self._conditions[number]
            if condition.fits(found, line) and names(condition.rule, line, frames) is not None:
                matched.append(condition.rule)
                if not condition.rule.conditional:
                    break
        return tuple(matched)


def names(rule: Rule, line: bytes, frames: str) -> Mapping[str, str] | None:
    """What the groups of a rule's expressions match; None if one of them does not match."""
    text = line[: _lines.PATTERN_BYTES].decode(errors="replace")
    found: dict[str, str] = {}
    for pattern, subject in ((rule.frame, f"{frames}\n{text}"), (rule.pattern, text)):
        if pattern and not (match := compiled(pattern).search(subject)):
            return None
        if pattern and match:
            found |= {name: (value or "").strip() for name, value in match.groupdict().items()}
    return found


@cache
def index() -> Index:
    """The index of all rules."""
    return Index(rules())
