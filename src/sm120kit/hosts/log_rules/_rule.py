"""Rules as data, one TOML file per topic in ``rules/``, and those that a line may match.

The order of files, and of rules in them, has no meaning. All strings of all rules are found in one pass, whatever their number.
"""

import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from functools import cache, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from ahocorasick_rs import AhoCorasick

from sm120kit.hosts.log_rules._lines import KEPT_CHARACTERS, QUOTES, WORDS


class Kind(StrEnum):
    """What a matched line means. The order is that of findings."""

    FAILURE = "failure"
    HANG = "hang"  # the last line before nothing is printed any more: no other line may follow
    GENERAL = "general"  # of many causes, such as an illegal access: precise failures anywhere in the log precede it
    SLOW = "slow"
    CONSEQUENCE = "consequence"  # something failed before; does not explain the log
    HARMLESS = "harmless"  # looks like a failure, for a log without one


@dataclass(frozen=True)
class Remedy:
    """A way to fix or avoid a failure. ``engine`` restricts it to versions of a package, such as ``vllm>=0.20,<0.33``, whose
    options ``text`` may contain."""

    text: str
    engine: str | None = None


@dataclass(frozen=True)
class Rule:
    """A line with a known cause. CONTRIBUTING.md has what each condition means.

    ``within``: a line with ``log`` is before it, at most so many seconds. ``late``: an earlier failure in the log is the cause,
    and this its consequence. ``options``: the line refuses options, for which replacements are looked up. ``consequence`` is
    the effect of an error of the host, which doctor finds in the kernel log by this rule; "" for all other lines.
    ``confidence``: ``confirmed`` by the source code that prints the line, or by maintainers; ``reported`` by owners whose
    problem the fix solved; ``inferred``: the usual of several causes.
    """

    id: str
    cause: str
    fixes: tuple[Remedy, ...]
    sources: tuple[str, ...]
    sample: str
    confidence: str
    checked: date
    kind: Kind = Kind.FAILURE
    consequence: str = ""
    match: tuple[str, ...] = ()
    any: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    log: tuple[str, ...] = ()
    within: int = 0
    unless: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()
    frame: str = ""
    pattern: str = ""
    priority: int = 0
    late: bool = False
    options: bool = False

    @property
    def conditional(self) -> bool:
        """Whether the rule depends on more than one line."""
        return bool(self.log or self.unless or self.engines or self.kind is Kind.HANG)

    @property
    def specificity(self) -> tuple[int, ...]:
        """Sorts rules, the most specific first: conditions beyond the line, then the length of what the line must contain."""
        conditions = bool(self.frame) + bool(self.log) + bool(self.engines)
        length = sum(map(len, self.match)) + min(map(len, self.any), default=0)
        general = self.kind not in (Kind.FAILURE, Kind.HANG)
        return (-self.priority, general, -conditions, -length)


@cache
def rules() -> tuple[Rule, ...]:
    """The rules, most specific first."""
    tables = [
        table for path in Path(__file__).parent.glob("rules/*.toml") for table in tomllib.loads(path.read_text("utf-8"))["rule"]
    ]
    return tuple(sorted(map(_rule, tables), key=lambda rule: (rule.specificity, rule.id)))


def _rule(table: Mapping[str, Any]) -> Rule:
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}
    for name in fields.keys() & {"match", "any", "without", "log", "unless"}:
        fields[name] = tuple(text.lower().translate(QUOTES) for text in fields[name])
    fields["fixes"] = tuple(Remedy(**fix) for fix in table["fixes"])
    fields["kind"] = Kind(table.get("kind", Kind.FAILURE))
    return Rule(**fields)


@cache
def _automaton() -> tuple[AhoCorasick, Sequence[str], Mapping[str, list[int]]]:
    """What finds the strings of rules, these strings, and the rules' numbers by the strings of which each line has one."""
    anchored, of_rules = defaultdict[str, list[int]](list), set[str]()
    for number, rule in enumerate(rules()):
        of_rules.update((*rule.match, *rule.any, *rule.without, *rule.unless, *rule.log))
        for text in (max(rule.match, key=len),) if rule.match else rule.any:
            anchored[text].append(number)
    texts = tuple(of_rules | WORDS)
    return AhoCorasick(texts), texts, anchored


def of_lines(lines: Sequence[str]) -> Iterator[tuple[str, frozenset[str]]]:
    """Each line as it is compared with rules, and the strings that it has. Lines contain no newline."""
    joined = "\n".join(lines).lower().translate(QUOTES)
    lowered, (automaton, texts, _) = joined.split("\n")[: len(lines)], _automaton()
    matches = iter(automaton.find_matches_as_indexes(joined, overlapping=True))
    text, _, end = next(matches, (0, 0, -1))
    for line, end_of_line in zip(lowered, accumulate(len(line) + 1 for line in lowered), strict=True):
        found = []
        while 0 < end < end_of_line:
            found.append(texts[text])
            text, _, end = next(matches, (0, 0, -1))
        yield line, frozenset(found)


def matching(line: str, lowered: str, found: frozenset[str], frames: str) -> tuple[Rule, ...]:
    """The rules that a line matches, the most specific first, up to the first that depends on nothing else."""
    matched = []
    for rule in _having(found):
        if (len(rule.match) < 2 or in_order(rule.match, lowered)) and names(rule, line, frames) is not None:
            matched.append(rule)
            if not rule.conditional:
                break
    return tuple(matched)


@lru_cache(maxsize=4096)
def _having(found: frozenset[str]) -> tuple[Rule, ...]:
    """The rules that a line with these strings can match."""
    every, (_, _, anchored) = rules(), _automaton()
    numbers = sorted({number for text in found for number in anchored.get(text, ())})
    return tuple(
        rule
        for rule in map(every.__getitem__, numbers)
        if found.issuperset(rule.match) and found.isdisjoint(rule.without) and not (rule.any and found.isdisjoint(rule.any))
    )


def in_order(needles: Sequence[str], lowered: str) -> bool:
    """Whether a line in lower case has the strings one after another."""
    position = 0
    for needle in needles:
        position = lowered.find(needle, position) + len(needle)
        if position < len(needle):
            return False
    return True


def names(rule: Rule, line: str, frames: str) -> Mapping[str, str] | None:
    """What the groups of a rule's expressions match; None if one of them does not match."""
    found: dict[str, str] = {}
    for pattern, before in ((rule.frame, f"{frames}\n"), (rule.pattern, "")):
        if pattern:
            match = re.search(pattern, before + line[:KEPT_CHARACTERS].translate(QUOTES), re.IGNORECASE)
            if not match:
                return None
            found |= {name: (value or "").strip() for name, value in match.groupdict().items()}
    return found
