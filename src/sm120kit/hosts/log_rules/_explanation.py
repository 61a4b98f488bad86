"""What a log shows: findings, the lines that matter, versions, and which remedies they leave."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from sm120kit.hosts.log_rules._lines import ENGINES
from sm120kit.hosts.log_rules._rule import Kind, Remedy, Rule

_NEWER = re.compile(
    r"\b(vllm|sglang|flashinfer|torch|triton|transformers|nccl|driver)(?:'s)? (\d[\w.]*?)\.? or newer", re.IGNORECASE
)
_REFUSED = re.compile(r"\b([A-Z][A-Z0-9_]{3,}): ?\[|Selected backend (?:\w+\.)?([A-Z]\w+) is not")


@dataclass(frozen=True)
class RuleMatch:
    """A rule that matched: the number of matching lines, the first of them with its number from 1, its cause and remedies.

    ``kind`` is the rule's, or ``consequence`` for a late failure after another one.
    """

    rule: Rule
    count: int
    number: int
    line: str
    cause: str
    fixes: tuple[str, ...]
    kind: Kind


@dataclass(frozen=True)
class Candidate:
    """An unexplained line that may matter, with its number from 1."""

    number: int
    line: str


@dataclass(frozen=True)
class Explanation:
    """Findings in the order in which they matter; ``errors`` are unexplained lines that may matter.

    ``versions`` are those that the log names, by package; "gpu" and "driver" are among the keys. ``engine`` is "" if the log
    does not show one. ``serving``: the server started and answered requests, and no unexplained error follows.
    """

    found: tuple[RuleMatch, ...]
    lines: int
    errors: tuple[Candidate, ...]
    versions: Mapping[str, str] = field(default_factory=dict)
    engine: str = ""
    serving: bool = False

    @property
    def known(self) -> bool:
        """Whether a cause is known; consequences and harmless lines have none."""
        return any(match.kind not in (Kind.CONSEQUENCE, Kind.HARMLESS) for match in self.found)

    @property
    def healthy(self) -> bool:
        """Whether the log is of a server that started and answers, without a failure."""
        return self.serving and all(match.kind in (Kind.SLOW, Kind.HARMLESS) for match in self.found)


@dataclass(frozen=True)
class Versions:
    """Versions by package, and the engines whose words a log has."""

    found: Mapping[str, str]
    engines: frozenset[str]

    @property
    def engine(self) -> str:
        """The one engine of the log; "" if it does not show one."""
        named = [name for name in ENGINES if name in self.found] or sorted(self.engines)
        return named[0] if len(named) == 1 else ""

    def fit(self, requirement: str | None) -> bool | None:
        """Whether the log is of a package in these versions; None if it does not show that."""
        if requirement is None:
            return True
        required = Requirement(requirement)
        if required.name in ENGINES and self.engine and self.engine != required.name:
            return False
        if (version := self.found.get(required.name)) is None:
            return None
        try:
            return required.specifier.contains(Version(version), prereleases=True)
        except InvalidVersion:
            return None

    def useful(self, fix: Remedy, text: str, line: str) -> bool:
        """Whether the log is of a remedy's versions, does not have what it advises, and the line does not refuse it."""
        if self.fit(fix.engine) is False or any(
            self.fit(f"{name.lower()}>={version}") for name, version in _NEWER.findall(text)
        ):
            return False
        refused = {name for names in _REFUSED.findall(line) for name in names if name}
        return refused.isdisjoint(re.findall(r"\w+", text.upper()))

    def conditional(self, fix: Remedy, text: str) -> str:
        """A remedy, with the versions it is for if the log does not show them."""
        return f"{fix.engine}: {text}" if fix.engine and self.fit(fix.engine) is None else text
