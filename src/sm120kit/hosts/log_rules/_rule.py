"""Rules as data: one TOML file per topic in ``rules/``. The order of files, and of rules in them, has no meaning."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from sm120kit.hosts.log_rules._lines import QUOTES


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


@dataclass(frozen=True)
class Remedy:
    """A way to fix or avoid a failure. ``engine`` restricts it to versions of a package, such as ``vllm>=0.20,<0.33``, whose
    options ``text`` may contain."""

    text: str
    engine: str | None = None


@dataclass(frozen=True)
class Rule:
    """A line with a known cause. CONTRIBUTING.md has what each condition means.

    ``late``: an earlier failure in the log is the cause, and this its consequence. ``options``: the line refuses options, for
    which replacements are looked up. ``consequence`` is the effect of an error of the host, which doctor finds in the kernel
    log by this rule; "" for all other lines. ``confidence``: ``confirmed`` by the source code that prints the line, or by
    maintainers; ``reported`` by owners whose problem the fix solved; ``inferred``: the usual of several causes.
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
