"""Find strings in lines, all of them in one pass, and expressions only in lines that have a string of theirs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate

from ahocorasick_rs import BytesAhoCorasick

NONE: frozenset[bytes] = frozenset()


class Strings:
    """Strings that lines are searched for; the time does not depend on their number."""

    def __init__(self, texts: Iterable[bytes]) -> None:
        self.texts = tuple(sorted(set(texts)))
        self._automaton = BytesAhoCorasick(self.texts)

    def of_lines(self, lines: Sequence[bytes]) -> Iterator[frozenset[bytes]]:
        """The strings that each line has, regardless of case.

        Neither lines nor strings contain a newline; strings are lower-case.
        """
        matches = iter(self._automaton.find_matches_as_indexes(b"\n".join(lines).lower(), overlapping=True))
        text, _, end = next(matches, (0, 0, -1))
        for end_of_line in accumulate(len(line) + 1 for line in lines):
            found = set()
            while 0 < end < end_of_line:
                found.add(self.texts[text])
                text, _, end = next(matches, (0, 0, -1))
            yield frozenset(found) if found else NONE


@dataclass(frozen=True)
class Expression:
    """A regular expression for bytes, and lower-case strings of which each matching line has at least one."""

    texts: frozenset[bytes]
    pattern: re.Pattern[bytes]

    @classmethod
    def of(cls, texts: str, pattern: bytes) -> Expression:
        """An expression regardless of case; ``texts`` are separated by ``|``."""
        return cls(frozenset(texts.encode().split(b"|")), re.compile(pattern, re.IGNORECASE))

    def search(self, line: bytes, found: Set[bytes]) -> re.Match[bytes] | None:
        """The first match in a line that has the strings ``found``."""
        return None if self.texts.isdisjoint(found) else self.pattern.search(line)
