"""What known lines in an engine's log mean: ``read(stream) -> Explanation``, by rules that are data (``rules.toml``)."""

from __future__ import annotations

import json
import re
import tomllib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

from pydantic import ConfigDict, Field, StringConstraints, TypeAdapter

RULES = Path(__file__).with_name("rules.toml")
PIECE_BYTES = 1 << 20
SHOWN_BYTES = 400
"""So much of a line is kept; some lines of logs are megabytes long."""
LAST_LINES = 5
LOOKS_LIKE_ERROR = re.compile(rb"\b(error|exception|fatal|traceback|xid|assert\w*|segfault|core dumped)\b", re.IGNORECASE)
TERMINAL = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x08")
"""Colours, cursor moves and titles."""


Text = Annotated[str, StringConstraints(min_length=1)]


@dataclass(frozen=True)
class Rule:
    """A known line. ``match`` are pieces that must occur in it, in this order, in any case; see ``rules.toml``."""

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
class Explained:
    """A rule that matched: how often, and the first line with its number, which counts from 1."""

    rule: Rule
    count: int
    number: int
    line: str


@dataclass(frozen=True)
class Explanation:
    """What a log says, in the order of the rules: the most specific first. ``errors`` are its last unexplained error lines."""

    found: tuple[Explained, ...]
    lines: int
    errors: tuple[str, ...]

    @property
    def known(self) -> bool:
        """Whether a failure is explained; lines that are expected explain none."""
        return any(not one.rule.harmless for one in self.found)


@cache
def rules() -> tuple[Rule, ...]:
    """The rules, most specific first. A file that is not exactly of their form is a bug and raises."""
    content = json.dumps(tomllib.loads(RULES.read_text()))
    tables = TypeAdapter(dict[Literal["rule"], list[Rule]]).validate_json(content, strict=True)
    if len({rule.id for rule in tables["rule"]}) != len(tables["rule"]):
        raise ValueError(f"{RULES}: two rules with the same id")
    return tuple(tables["rule"])


def read(stream: BinaryIO) -> Explanation:
    """Go through a log once, whatever its size and encoding."""
    found: dict[str, Explained] = {}
    always = [rule for rule in rules() if not rule.last]
    needles = {rule.id: tuple(piece.lower().encode() for piece in rule.match) for rule in rules()}
    tail: deque[tuple[int, bytes]] = deque(maxlen=LAST_LINES)
    errors: deque[str] = deque(maxlen=3)
    number = 0
    for block in _blocks(stream):
        lowered = block.lower()
        present = [rule for rule in always if all(piece in lowered for piece in needles[rule.id])]
        for line in re.split(rb"\r\n|\n|\r", block):
            number += 1
            if not line.strip():
                continue
            tail.append((number, line))
            rule = _first(present, needles, line)
            if rule:
                _note(found, rule, number, line)
            elif LOOKS_LIKE_ERROR.search(line):
                errors.append(_shown(line))
    endings = [rule for rule in rules() if rule.last]
    for at, line in tail:
        rule = _first(endings, needles, line)
        if rule and not _first(always, needles, line):
            _note(found, rule, at, line)
    order = [rule.id for rule in rules()]
    return Explanation(tuple(sorted(found.values(), key=lambda one: order.index(one.rule.id))), number, tuple(errors))


def _blocks(stream: BinaryIO) -> Iterator[bytes]:
    """Whole lines in blocks of about ``PIECE_BYTES``, without terminal codes; a longer line is cut."""
    rest = b""
    while piece := stream.read(PIECE_BYTES):
        block = rest + piece
        cut = block.rfind(b"\n") + 1 or (len(block) if len(block) > PIECE_BYTES else 0)
        rest = block[cut:]
        if cut:
            yield TERMINAL.sub(b"", block[:cut]).removesuffix(b"\n").removesuffix(b"\r")
    if rest:
        yield TERMINAL.sub(b"", rest)


def _first(candidates: list[Rule], needles: dict[str, tuple[bytes, ...]], line: bytes) -> Rule | None:
    """The first rule whose pieces occur in a line, in their order."""
    if not candidates:
        return None
    lowered = line.lower()
    for rule in candidates:
        at = 0
        for piece in needles[rule.id]:
            at = lowered.find(piece, at)
            if at < 0:
                break
            at += len(piece)
        else:
            return rule
    return None


def _note(found: dict[str, Explained], rule: Rule, number: int, line: bytes) -> None:
    before = found.get(rule.id)
    if before:
        found[rule.id] = Explained(rule, before.count + 1, before.number, before.line)
    else:
        found[rule.id] = Explained(rule, 1, number, _shown(line))


def _shown(line: bytes) -> str:
    return line[:SHOWN_BYTES].decode(errors="replace").strip()
