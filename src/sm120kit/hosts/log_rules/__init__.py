"""Explain known errors in an engine's log: ``explain(stream) -> Explanation``. The rules are data in ``rules.toml``."""

from __future__ import annotations

import json
import re
import tomllib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

from pydantic import ConfigDict, Field, StringConstraints, TypeAdapter

RULES = Path(__file__).with_name("rules.toml")
BLOCK_BYTES = 1 << 20
SHOWN_BYTES = 400
"""Maximum length of a line that is kept; some lines of logs are megabytes long."""
LAST_LINES = 5
"""Number of non-empty lines at the end of a log that rules with ``last`` apply to."""
LOOKS_LIKE_ERROR = re.compile(rb"\b(error|exception|fatal|traceback|xid|assert\w*|segfault|core dumped)\b", re.IGNORECASE)
TERMINAL = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x08")
"""Terminal escape sequences: colours, cursor movements and titles."""

Text = Annotated[str, StringConstraints(min_length=1)]


@dataclass(frozen=True)
class Rule:
    """A known line. ``match``: strings that must occur in it, in this order, case-insensitively; see ``rules.toml``."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    id: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
    match: Annotated[tuple[Text, ...], Field(min_length=1)]
    cause: Text
    fix: Text
    source: Text
    sample: Text
    harmless: bool = False
    last: bool = False


@dataclass(frozen=True)
class RuleMatch:
    """A rule that matched: the number of matching lines, and the first of them with its line number from 1."""

    rule: Rule
    count: int
    number: int
    line: str


@dataclass(frozen=True)
class Explanation:
    """Matches in the order of the rules, the most specific first. ``errors`` are the last unexplained lines with an error."""

    found: tuple[RuleMatch, ...]
    lines: int
    errors: tuple[str, ...]

    @property
    def known(self) -> bool:
        """Whether a failure is explained; harmless lines explain none."""
        return any(not match.rule.harmless for match in self.found)


@cache
def rules() -> tuple[Rule, ...]:
    """The rules, most specific first.

    Raises:
        ValueError: ``rules.toml`` does not have the exact form of :class:`Rule`, which is a bug.
    """
    content = json.dumps(tomllib.loads(RULES.read_text()))
    tables = TypeAdapter(dict[Literal["rule"], list[Rule]]).validate_json(content, strict=True)
    if len({rule.id for rule in tables["rule"]}) != len(tables["rule"]):
        raise ValueError(f"{RULES}: two rules with the same id")
    return tuple(tables["rule"])


def explain(stream: BinaryIO) -> Explanation:
    """Match a log of any size and encoding against the rules, in one pass."""
    matches: dict[str, RuleMatch] = {}
    anywhere = [rule for rule in rules() if not rule.last]
    needles = {rule.id: tuple(text.lower().encode() for text in rule.match) for rule in rules()}
    tail: deque[tuple[int, bytes]] = deque(maxlen=LAST_LINES)
    errors: deque[str] = deque(maxlen=3)
    number = 0
    for block in _blocks(stream):
        lowered = block.lower()
        candidates = [rule for rule in anywhere if all(needle in lowered for needle in needles[rule.id])]
        for line in re.split(rb"\r\n|\n|\r", block):
            number += 1
            if not line.strip():
                continue
            tail.append((number, line))
            rule = _first_match(candidates, needles, line)
            if rule:
                _add(matches, rule, number, line)
            elif LOOKS_LIKE_ERROR.search(line):
                errors.append(_shown(line))
    at_end = [rule for rule in rules() if rule.last]
    for line_number, line in tail:
        rule = _first_match(at_end, needles, line)
        if rule and not _first_match(anywhere, needles, line):
            _add(matches, rule, line_number, line)
    order = [rule.id for rule in rules()]
    return Explanation(tuple(sorted(matches.values(), key=lambda match: order.index(match.rule.id))), number, tuple(errors))


def _blocks(stream: BinaryIO) -> Iterator[bytes]:
    """Blocks of complete lines of about ``BLOCK_BYTES``, without terminal escape sequences; a longer line is split."""
    rest = b""
    while chunk := stream.read(BLOCK_BYTES):
        block = rest + chunk
        cut = block.rfind(b"\n") + 1 or (len(block) if len(block) > BLOCK_BYTES else 0)
        rest = block[cut:]
        if cut:
            yield TERMINAL.sub(b"", block[:cut]).removesuffix(b"\n").removesuffix(b"\r")
    if rest:
        yield TERMINAL.sub(b"", rest)


def _first_match(candidates: list[Rule], needles: dict[str, tuple[bytes, ...]], line: bytes) -> Rule | None:
    """The first rule whose strings occur in a line, in their order."""
    if not candidates:
        return None
    lowered = line.lower()
    for rule in candidates:
        position = 0
        for needle in needles[rule.id]:
            position = lowered.find(needle, position)
            if position < 0:
                break
            position += len(needle)
        else:
            return rule
    return None


def _add(matches: dict[str, RuleMatch], rule: Rule, number: int, line: bytes) -> None:
    previous = matches.get(rule.id)
    if previous:
        matches[rule.id] = replace(previous, count=previous.count + 1)
    else:
        matches[rule.id] = RuleMatch(rule, 1, number, _shown(line))


def _shown(line: bytes) -> str:
    return line[:SHOWN_BYTES].decode(errors="replace").strip()
