"""What kinds of lines a log has, after ``line_kinds.toml``: errors, versions, frames of tracebacks, answers of a server."""

import re
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

from sm120kit.engines import all_engines

KEPT_CHARACTERS = 600
"""Length of the part of a line that is kept, shown, and matched with expressions; some lines of logs are megabytes long."""
QUOTES = str.maketrans("\u2018\u2019`\u201c\u201d", "'''\"\"")
"""The quotation marks of compilers and of Markdown, as other programs print them."""
LIBRARY = re.compile(
    r"(?:^|(?<!safetensors)[/\\])(?:torch|importlib|subprocess|multiprocessing|concurrent)(?:[/\\.])|^<frozen", re.IGNORECASE
)
"""Paths of frames that do not identify a program."""
TERMINAL = re.compile(r"\x1b\[[0-9;?]{0,40}[ -/]{0,4}[@-~]|\x1b\][^\x07\x1b]{0,400}(?:\x07|\x1b\\)|\x08")
"""Terminal escape sequences: colours, cursor movements and titles."""
_DEVICE = re.compile(r"\b[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b", re.IGNORECASE)
_TIME = re.compile(r"(?:\b(?:(\d{4})-)?(\d\d)-|\b[IWEF](\d\d))(\d\d)[ T](\d\d):(\d\d):(\d\d)")
"""As engines and torch's logger print it."""
_PREFIX = re.compile(
    r"\s{0,80}(?:(?:\([^)\n]{0,80}\)|\[[^\]\n]{0,80}\]:?|(?:INFO|WARNING|ERROR|DEBUG|CRITICAL)\b:?|[-\d:.,TZ]{1,40})\s{1,8}){1,8}"
)
"""Ranks, levels, times and places before the message of a line."""
_VERSION = r"v?(\d{1,4}\.\d[\w.+]{0,40})"
_DATA = tomllib.loads(Path(__file__).with_name("line_kinds.toml").read_text("utf-8"))


class Expressions:
    """Regular expressions by name. A table has lower-case ``words``, of which each matching line has one, and a ``pattern``.

    Without a pattern, a word at the start of a word matches; with ``before``, that expression and a version.
    """

    def __init__(self, tables: Mapping[str, Mapping[str, Iterable[str]]]) -> None:
        self.words = {name: frozenset(table.get("words", ())) for name, table in tables.items()}
        self.every = frozenset[str]().union(*self.words.values())
        self.patterns = {}
        for name, table in tables.items():
            words, before = "|".join(map(re.escape, self.words[name])), table.get("before", "")
            pattern = table.get("pattern") or (before and f"{before}{_VERSION}") or f"(?<![a-z0-9])(?:{words})"
            self.patterns[name] = re.compile(str(pattern), re.IGNORECASE | re.ASCII)

    def match(self, name: str, line: str, found: frozenset[str]) -> re.Match[str] | None:
        """The first match of an expression in a line that has the strings ``found``."""
        return None if self.words[name].isdisjoint(found) else self.patterns[name].search(line[:4096])


STARTED = frozenset(_DATA["started"]["words"])
"""Strings of lines of a server that has started."""
KINDS = Expressions(_DATA["kind"])
VERSIONS = Expressions(
    {engine.name: {"words": engine.log.texts, "before": engine.log.version} for engine in all_engines()} | _DATA["version"]
)
"""Versions in lines, by package."""
ENGINES = {engine.name: frozenset(engine.log.words) for engine in all_engines()}
"""Strings of lower-case logs of an engine, by its name."""
WORDS = STARTED.union(KINDS.every, VERSIONS.every, *ENGINES.values())
"""All strings of these expressions."""


def lower(line: str) -> bool:
    """Whether a line has a level below an error, or states a failure that was handled."""
    return bool(KINDS.patterns["lower"].search(line[:KEPT_CHARACTERS]))


def without_prefix(line: str) -> str:
    """A line without ranks, levels, times and places before its message."""
    match = _PREFIX.match(line[:KEPT_CHARACTERS])
    return line[match.end() :] if match else line


def of_server(line: str) -> bool:
    """Whether vLLM's API server printed a line, which is no rank."""
    return "(APIServer" in line[:80]


def shown(line: str) -> str:
    """The start of a line, without characters that control a terminal."""
    text = line[:KEPT_CHARACTERS].replace("\t", " ").strip(" \ufeff\r\x00")
    return text if text.isprintable() else "".join(each if each.isprintable() else "\ufffd" for each in text)


def device(line: str) -> str:
    """The address of the PCI device in a line; "" if there is none."""
    match = _DEVICE.search(line[:KEPT_CHARACTERS])
    return match[0].lower() if match else ""


def time_of(line: str, now: datetime) -> datetime | None:
    """The time in a line; a date without year is the latest such date that is not in the future."""
    match = _TIME.search(line[:KEPT_CHARACTERS])
    with suppress(ValueError):  # no such day
        if match:
            year, *texts = match.groups()
            time = datetime(int(year or now.year), *(int(text) for text in texts if text))  # type: ignore[arg-type]
            return time.replace(year=now.year - 1) if not match[1] and time > now + timedelta(days=1) else time
    return None
