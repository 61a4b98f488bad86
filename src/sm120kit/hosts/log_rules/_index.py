"""The rules that a line may match: all strings of all rules are found in one pass, whatever their number."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate

from ahocorasick_rs import AhoCorasick

from sm120kit.hosts.log_rules import _lines
from sm120kit.hosts.log_rules._rule import Rule, rules


def in_order(needles: Sequence[str], lowered: str) -> bool:
    """Whether a line in lower case has the strings one after another."""
    position = 0
    for needle in needles:
        position = lowered.find(needle, position)
        if position < 0:
            return False
        position += len(needle)
    return True


class Index:
    """Rules by the strings of which each matching line has one."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._rules = tuple(rules)
        self._anchored: dict[str, list[int]] = defaultdict(list)
        for number, rule in enumerate(self._rules):
            for text in (max(rule.match, key=len),) if rule.match else rule.any:
                self._anchored[text].append(number)
        self.contexts = frozenset(text for rule in self._rules for text in rule.log)
        self.unless = frozenset(rule.unless for rule in self._rules if rule.unless)
        of_rules = {text for rule in self._rules for text in (*rule.match, *rule.any, *rule.without, *rule.unless)}
        self._texts = tuple(sorted(of_rules | self.contexts | _lines.WORDS))
        self._automaton = AhoCorasick(self._texts)

    def of_lines(self, lines: Sequence[str]) -> Iterator[tuple[str, frozenset[str]]]:
        """Each line as it is compared with rules, and the strings that it has. Lines contain no newline."""
        joined = "\n".join(lines).lower().translate(_lines.QUOTES)
        lowered = joined.split("\n")[: len(lines)]
        matches = iter(self._automaton.find_matches_as_indexes(joined, overlapping=True))
        text, _, end = next(matches, (0, 0, -1))
        for line, end_of_line in zip(lowered, accumulate(len(line) + 1 for line in lowered), strict=True):
            found = set()
            while 0 < end < end_of_line:
                found.add(self._texts[text])
                text, _, end = next(matches, (0, 0, -1))
            yield line, frozenset(found)

    def matching(self, line: str, lowered: str, found: frozenset[str], frames: str) -> tuple[Rule, ...]:
        """The rules that a line matches, the most specific first, up to the first that depends on nothing else."""
        matched = []
        for number in sorted({number for text in found for number in self._anchored.get(text, ())}):
            rule = self._rules[number]
            if _fits(rule, lowered, found) and names(rule, line, frames) is not None:
                matched.append(rule)
                if not rule.conditional:
                    break
        return tuple(matched)


def _fits(rule: Rule, lowered: str, found: frozenset[str]) -> bool:
    return (
        found.issuperset(rule.match)
        and (not rule.any or not found.isdisjoint(rule.any))
        and found.isdisjoint(rule.without)
        and (len(rule.match) < 2 or in_order(rule.match, lowered))
    )


def names(rule: Rule, line: str, frames: str) -> Mapping[str, str] | None:
    """What the groups of a rule's expressions match; None if one of them does not match."""
    found: dict[str, str] = {}
    for pattern, before in ((rule.frame, f"{frames}\n"), (rule.pattern, "")):
        if not pattern:
            continue
        match = re.search(pattern, before + line[: _lines.KEPT_CHARACTERS].translate(_lines.QUOTES), re.IGNORECASE)
        if not match:
            return None
        found |= {name: (value or "").strip() for name, value in match.groupdict().items()}
    return found


@cache
def index() -> Index:
    """The index of all rules."""
    return Index(rules())
