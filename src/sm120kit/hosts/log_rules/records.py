"""Rules for logs, what they match, and the messages of JSON lines."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from enum import StrEnum
from typing import Annotated

from packaging.requirements import InvalidRequirement, Requirement
from pydantic import AfterValidator, ConfigDict, Field, StringConstraints


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


def _pattern(text: str) -> str:
    if _expression(text) and "name" not in re.compile(text).groupindex:
        raise ValueError(f"{text!r} has no group `name`")
    return text


Text = Annotated[str, StringConstraints(min_length=1)]
Versions = Annotated[str, AfterValidator(_requirement)]
"""A package and its versions, as in ``vllm>=0.20,<0.33``."""


def message(line: bytes) -> bytes:
    """The message of a JSON object that Docker, journalctl or a program with structured logs wrote; other lines as they are.

    Docker's files have it in ``log``, ``journalctl -o json`` in ``MESSAGE``, which is a list of bytes if it is not printable.
    """
    try:
        table = json.loads(line)
    except (ValueError, RecursionError):
        return line
    for name in ("log", "MESSAGE", "message", "msg"):
        match table.get(name) if isinstance(table, dict) else None:
            case str(text):
                return " ".join(text.encode(errors="replace").decode().split("\n")).rstrip().encode()
            case list(numbers) if all(isinstance(number, int) and 0 <= number < 256 for number in numbers):
                return bytes(numbers).replace(b"\n", b" ")
    return line


class Kind(StrEnum):
    """What a matched line means. The order is that of findings."""

    FAILURE = "failure"
    HANG = "hang"
    """The last line before nothing is printed any more: the rule applies only if no other line follows."""
    GENERAL = "general"
    """A failure that many causes have: an illegal access, a missing module. Precise failures anywhere in the log precede it."""
    SLOW = "slow"
    CLASS = "class"
    """A failure of a class that has no rule of its own, with names from its line. Every other failure precedes it. If its cause
    is inferred, the finding states what the message means, and the cause counts as not determined."""
    VERSION = "version"
    """A version that is too old for the GPU that the log names, whatever failed. Every failure precedes it, and an unknown
    failure may have another cause."""
    CONSEQUENCE = "consequence"
    """Reports that something failed before; does not explain the log."""
    HARMLESS = "harmless"


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
    """A way to fix or avoid a failure. ``engine`` restricts it to an engine, whose options ``text`` may then contain."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    text: Text
    engine: Versions | None = None


class Symptom(StrEnum):
    """What a failure looks like that settings and hardware have a part in, of which the line does not name the part."""

    FAULT = "fault"
    """A kernel accesses an illegal address, asserts or does not start."""
    OUTPUT = "output"
    """NaN, or text without meaning."""
    HANG = "hang"
    MEMORY = "memory"
    """Memory is exhausted."""
    ATTENTION = "attention"
    """No attention backend is suitable; the reasons may be in other lines."""


@dataclass(frozen=True)
class Fact:
    """Something that a log shows in lines other than that of the failure: a setting, a feature, a machine.

    ``any`` are strings of which a line has one, ``pattern`` a regular expression that this line also matches; its group
    ``value`` replaces ``{id}`` in the texts of advice.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    id: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+(_[a-z0-9]+)*$")]
    any: Annotated[tuple[Text, ...], Field(min_length=1)]
    pattern: Annotated[str, AfterValidator(_expression)] = ""


@dataclass(frozen=True)
class Advice:
    """What is added to cause and fixes if a log shows all of ``facts`` and none of ``absent``."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    facts: Annotated[tuple[Text, ...], Field(min_length=1)]
    cause: Text
    fixes: tuple[Remedy, ...] = ()
    absent: tuple[Text, ...] = ()
    symptoms: tuple[Symptom, ...] = ()
    """The symptoms that it is for; none for the advice of a rule."""


@dataclass(frozen=True)
class ClassEntry:
    """Cause and remedy of the members of a class whose name starts with ``name``, in lower case."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: Text
    fix: Text
    cause: str = ""


@dataclass(frozen=True)
class Rule:
    """A line with a known cause.

    ``match`` are strings that must occur in the line, in this order, case-insensitively; ``any``, strings of which at least
    one must; ``without``, strings that must not; ``log``, strings of which at least one must occur anywhere in the log;
    ``unless``, strings that must not occur, in this order, in a later line of the same PCI device; ``frame``, a regular
    expression that the innermost frames of the traceback before the line match, whose groups replace ``{name}`` in cause and
    fixes.
    ``engines`` are packages and versions, one of which the log must be of, as far as it shows. ``consequence`` is the effect
    of an error of the host, which doctor finds in the kernel log by this rule; "" for all other lines.

    A rule for a class of failures has a ``pattern``, a regular expression whose groups (`name` and others) replace ``{name}``
    in cause and fixes. The entry of ``table`` with the longest fitting name precedes the fixes and may replace the cause; with
    a table and without fixes, other names do not match. ``failed`` restricts the class to lines with a word for errors,
    because its pattern has none; ``raised`` to lines with the name of an exception, which its pattern has. ``options`` marks
    lines that refuse options, for which the recorded parsers are looked up.

    ``advice`` depends on what the rest of the log shows; advice for the ``symptom`` follows it. ``least`` is the number of
    lines that must match.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

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
    frame: Annotated[str, AfterValidator(_expression)] = ""
    pattern: Annotated[str, AfterValidator(_pattern)] = ""
    table: tuple[ClassEntry, ...] = ()
    failed: bool = False
    raised: bool = False
    options: bool = False
    symptom: Symptom | None = None
    advice: tuple[Advice, ...] = ()
    least: int = 1

    def __post_init__(self) -> None:
        if not self.match and not self.any:
            raise ValueError("a rule requires strings in `match` or `any`")
        if bool(self.pattern) != (self.kind in (Kind.CLASS, Kind.VERSION)) or (self.failed and not self.pattern):
            raise ValueError("rules of kind class and version have a pattern, no others")

    @property
    def conditional(self) -> bool:
        """Whether the rule depends on more than one line."""
        return bool(self.log or self.unless or self.engines or self.kind is Kind.HANG or self.least > 1)

    @property
    def names_cause(self) -> bool:
        """Whether the cause is that of the line; a class whose cause is inferred has only the meaning of its message."""
        return self.kind is not Kind.CLASS or self.confidence is not Confidence.INFERRED


@dataclass(frozen=True)
class RuleMatch:
    """A rule that matched: the number of matching lines, the first of them with its number from 1, its cause and remedies."""

    rule: Rule
    count: int
    number: int
    line: str
    cause: str
    fixes: tuple[str, ...]


@dataclass(frozen=True)
class Candidate:
    """An unexplained line that looks like an error, with its number from 1."""

    number: int
    line: str


@dataclass(frozen=True)
class Explanation:
    """Findings in the order in which they matter; ``errors`` are unexplained lines that look like errors.

    ``versions`` are those that the log names, by package; "gpu" and "driver" are among the keys.
    """

    found: tuple[RuleMatch, ...]
    lines: int
    errors: tuple[Candidate, ...]
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def known(self) -> bool:
        """Whether the meaning of a failure is known; consequences and harmless lines are no failures."""
        return any(match.rule.kind not in (Kind.CONSEQUENCE, Kind.HARMLESS) for match in self.found)

    @property
    def determined(self) -> bool:
        """Whether a cause is known, and not only what a message means in general, or that a version is old."""
        return any(
            match.rule.kind not in (Kind.VERSION, Kind.CONSEQUENCE, Kind.HARMLESS) and match.rule.names_cause
            for match in self.found
        )
