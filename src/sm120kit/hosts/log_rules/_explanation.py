"""What a log shows: findings, the lines that matter, versions, and which remedies they leave."""

import re
import textwrap
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote_plus

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from sm120kit.core.secrets import anonymous
from sm120kit.engines import find
from sm120kit.hosts.log_rules._lines import ENGINES, shown, without_prefix
from sm120kit.hosts.log_rules._rule import Kind, Remedy, Rule, names

RENAMED: Mapping[str, Mapping[str, str]] = tomllib.loads(Path(__file__).with_name("renamed_options.toml").read_text("utf-8"))
"""By engine, what replaces an option that its parser refuses."""
_UNKNOWN_OPTIONS = re.compile(r"(?:unrecognized arguments?|no such option):?(.*)", re.IGNORECASE)
_OPTION = re.compile(r"(?<![\w-])--(?!no-)[a-z][a-z0-9-]+(?![\w.-])")
"""Options that no engine spells otherwise before it parses them: no negation, underscore, capital or dotted key."""
_VARIABLE = re.compile(r"0x[0-9a-f]+|[\w.-]*[/\\][\w./\\-]+|\b\d[\d.,]*\b|[^\w\s.:'_-]+", re.IGNORECASE)
"""Parts of a message that differ from host to host: addresses, paths, numbers, marks."""
_EXCEPTION = re.compile(r"[\w.]{0,80}(?:Error|Exception)\b")


@dataclass
class LineGroup:
    """Lines that match the same rules: the first rule whose condition holds explains all of them."""

    rules: tuple[Rule, ...]
    number: int
    line: str
    frames: str
    count: int = 0
    last: int = 0
    last_line: str = ""


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
    """Versions by package, and the one engine of a log; "" if it does not show one."""

    found: Mapping[str, str]
    engine: str

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


def filled(rule: Rule, group: LineGroup, versions: Versions) -> RuleMatch:
    """A rule's cause and remedies with the names in the line; none of other versions."""
    values = names(rule, group.line, group.frames) or {}
    fixes = _replacements(group.line, versions.engine) if rule.options else rule.fixes
    cause, *texts = (text.format_map(values) if values else text for text in (rule.cause, *(fix.text for fix in fixes)))
    fits = [versions.fit(fix.engine) for fix in fixes]
    useful = (
        text if fit else f"{fix.engine}: {text}" for fix, text, fit in zip(fixes, texts, fits, strict=True) if fit is not False
    )
    return RuleMatch(rule, group.count, group.number, shown(group.line), cause, tuple(useful), rule.kind)


def _replacements(line: str, engine: str) -> tuple[Remedy, ...]:
    """What replaces the options that a line refuses."""
    match, known = _UNKNOWN_OPTIONS.search(line), RENAMED.get(engine, {})
    options = dict.fromkeys(_OPTION.findall(match[1])) if match else {}
    replaced = [Remedy(f"`{option}`: here `{known[option]}`.") for option in options if option in known]
    others = ", ".join(f"`{option}`" for option in options if option not in known)
    return (*replaced, *([Remedy(f"{others}: not in this version's parser; --help lists its options.")] if others else []))


def issue_text(explanation: Explanation) -> str:
    """Markdown with the versions that a log names and the lines that are most likely to matter, for strangers."""
    numbered = {error.number: error.line for error in explanation.errors}
    numbered |= {match.number: match.line for match in explanation.found if match.kind is not Kind.HARMLESS}
    versions = [f"- {name}: {version}" for name, version in sorted(explanation.versions.items())]
    lines = [
        "### Environment",
        *(versions or ["- GPU, driver and versions: (the log does not name them)"]),
        "- command:",
        "",
        f"### Log ({explanation.lines} line{'s' * (explanation.lines != 1)})",
        "```",
        *([numbered[number] for number in sorted(numbered)] or ["(no line looks like an error)"]),
        "```",
    ]
    return anonymous("\n".join(lines))


def search_address(explanation: Explanation) -> str:
    """A search for the first exception, or line that may matter, in the engine's tracker; "" if there is none."""
    if not explanation.errors:
        return ""
    lines = [anonymous(without_prefix(error.line)) for error in explanation.errors]
    message = next(filter(_EXCEPTION.match, lines), lines[0])
    words = textwrap.shorten(_VARIABLE.sub(" ", message), 160, placeholder="")
    repository = getattr(find(explanation.engine), "repository", "")
    place = f"https://github.com/{repository}/issues?" if repository else "https://github.com/search?type=issues&"
    return f"{place}q={quote_plus(words)}"
