"""What a log shows besides failures: settings, features, machines. Advice is chosen by them; the data are in ``facts.toml``."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter

from sm120kit.hosts.log_rules.records import Advice, Fact, Rule

PATH = Path(__file__).with_name("facts.toml")
MAXIMUM_ADVICE = 3
"""Maximum number of pieces of advice for a finding: a longer list names nothing."""
LINE_BYTES = 16_000
"""Lengths of lines that are searched: engines print all of their settings in a line."""


@dataclass(frozen=True)
class Facts:
    """The contents of ``facts.toml``."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    fact: tuple[Fact, ...]
    advice: tuple[Advice, ...]


@cache
def facts() -> Facts:
    """The facts and the advice for symptoms, the most specific first."""
    contents = json.dumps(tomllib.loads(PATH.read_text()))
    return TypeAdapter(Facts).validate_json(contents, strict=True)


@cache
def by_text() -> Mapping[bytes, tuple[Fact, ...]]:
    """Facts by the lower-case strings of their lines."""
    table: dict[bytes, tuple[Fact, ...]] = {}
    for fact in facts().fact:
        for text in fact.any:
            table[text.lower().encode()] = (*table.get(text.lower().encode(), ()), fact)
    return table


def note(noted: dict[str, str], line: bytes, texts: Iterable[bytes]) -> None:
    """Add the facts of a line that has these strings to those noted before, each with its value."""
    for text in texts:
        for fact in by_text().get(text, ()):
            if fact.id not in noted and (value := _value(fact, line)) is not None:
                noted[fact.id] = value


def fitting(rule: Rule, noted: Mapping[str, str]) -> Iterator[Advice]:
    """Advice for a rule's match by the facts of the log: its own before that for its symptom, each fact once."""
    general = [advice for advice in facts().advice if rule.symptom in advice.symptoms]
    used: set[str] = set()
    count = 0
    for advice in (*rule.advice, *general):
        if count == MAXIMUM_ADVICE:
            return
        if noted.keys() >= set(advice.facts) and noted.keys().isdisjoint(advice.absent) and used.isdisjoint(advice.facts):
            used.update(advice.facts)
            count += 1
            yield advice


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE)


def _value(fact: Fact, line: bytes) -> str | None:
    """The value of a fact that a line with one of its strings states; None if the line does not state it."""
    if not fact.pattern:
        return ""
    match = _compiled(fact.pattern).search(line[:LINE_BYTES].decode(errors="replace"))
    return None if match is None else (match.groupdict().get("value") or "")
