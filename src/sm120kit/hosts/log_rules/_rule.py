"""Rules as data: one TOML file per topic in ``rules/``. The order of files, and of rules in them, has no meaning."""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from packaging.requirements import InvalidRequirement, Requirement
from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, TypeAdapter

RULES = Path(__file__).with_name("rules")
_STRICT = ConfigDict(extra="forbid")


def _requirement(text: str) -> str:
    try:
        Requirement(text)
    except InvalidRequirement as error:
        raise ValueError(f"{text!r} is not a requirement such as vllm>=0.20,<0.33: {error}") from error
    return text


def _expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from error
    return text


Text = Annotated[str, StringConstraints(min_length=1)]
Versions = Annotated[str, AfterValidator(_requirement)]
"""A package and its versions, as in ``vllm>=0.20,<0.33``."""
Pattern = Annotated[str, AfterValidator(_expression)]


class Kind(StrEnum):
    """What a matched line means. The order is that of findings."""

    FAILURE = "failure"
    HANG = "hang"
    """The last line before nothing is printed any more: the rule applies only if no other line follows."""
    GENERAL = "general"
    """A failure that many causes have, such as an illegal access. Precise failures anywhere in the log precede it."""
    SLOW = "slow"
    CONSEQUENCE = "consequence"
    """Reports that something failed before; does not explain the log."""
    HARMLESS = "harmless"
    """A line that looks like a failure, for a log without one."""


class Confidence(StrEnum):
    """How certain a cause is."""

    CONFIRMED = "confirmed"
    """By the source code that prints the line, or by maintainers."""
    REPORTED = "reported"
    """By owners whose problem the fix solved."""
    INFERRED = "inferred"
    """The usual of several causes of this line."""


@dataclass(frozen=True)
class Remedy:
    """A way to fix or avoid a failure. ``engine`` restricts it to versions of a package, whose options ``text`` may contain."""

    __pydantic_config__ = _STRICT

    text: Text
    engine: Versions | None = None


@dataclass(frozen=True)
class Rule:
    """A line with a known cause.

    ``match`` are strings that must occur in the line, in this order, case-insensitively; ``any``, strings of which at least one
    must; ``without``, strings that must not; ``log``, strings of which at least one must occur anywhere in the log; ``unless``,
    strings that must not occur, in this order, in a later line of the same PCI device. ``engines`` are packages and versions,
    one of which the log must be of, as far as it shows. ``frame`` is a regular expression for the innermost frames of the
    traceback before the line, with the line after them; ``pattern``, one for the line. Their groups replace ``{name}`` in cause
    and fixes. Of the rules that match a line, that with the higher ``priority``, then the more specific one explains it.
    ``late``: an earlier failure in the log is the cause, and this its consequence. ``options``: the line refuses options, for
    which replacements are looked up. ``consequence`` is the effect of an error of
    the host, which doctor finds in the kernel log by this rule; "" for all other lines.
    """

    __pydantic_config__ = _STRICT

    id: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
    cause: Text
    fixes: tuple[Remedy, ...]
    sources: Annotated[tuple[Text, ...], Field(min_length=1)]
    sample: Text
    confidence: Confidence
    checked: date
    kind: Kind = Kind.FAILURE
    consequence: str = ""
    match: tuple[Text, ...] = ()
    any: tuple[Text, ...] = ()
    without: tuple[Text, ...] = ()
    log: tuple[Text, ...] = ()
    unless: tuple[Text, ...] = ()
    engines: tuple[Versions, ...] = ()
    frame: Pattern = ""
    pattern: Pattern = ""
    priority: int = 0
    late: bool = False
    options: bool = False

    def __post_init__(self) -> None:
        if not self.match and not self.any:
            raise ValueError("a rule requires strings in `match` or `any`")

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
    """The rules, most specific first.

    Raises:
        ValueError: a file of rules does not have the exact form of :class:`Rule`, which is a bug.
    """
    tables = TypeAdapter(dict[Literal["rule"], list[Rule]])
    contents = [json.dumps(tomllib.loads(path.read_text("utf-8")), default=str) for path in RULES.glob("*.toml")]
    read = [rule for content in contents for rule in tables.validate_json(content, strict=True)["rule"]]
    if duplicates := [rule_id for rule_id, count in Counter(rule.id for rule in read).items() if count > 1]:
        raise ValueError(f"two rules with the same id: {', '.join(duplicates)}")
    return tuple(sorted(read, key=lambda rule: (rule.specificity, rule.id)))
