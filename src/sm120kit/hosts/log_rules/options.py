"""Which engine versions accept the options that a line names, by the recorded parsers of engine recipes."""

from __future__ import annotations

import re
from collections.abc import Iterable

from sm120kit.engines import parser

CHOICE = re.compile(r"argument (?P<names>-[\w/,-]+): invalid choice: '(?P<value>[^']*)'")
UNKNOWN = re.compile(r"(?:unrecognized arguments?|no such option):?(?P<rest>.*)", re.IGNORECASE)
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]+", re.IGNORECASE)
MAXIMUM = 4
"""Maximum number of options of a line that are looked up."""


def recorded(line: str, engine: str = "") -> tuple[str, ...]:
    """A sentence for each option that a line refuses: the recipes whose parser accepts it, and those whose parser does not.

    ``engine`` restricts the recipes to those of an engine.
    """
    return tuple(_sentence(name, value, engine) for name, value in _refused(line))


def _refused(line: str) -> Iterable[tuple[str, str]]:
    if match := CHOICE.search(line):
        return [(re.split(r"[/,]", match["names"])[0], match["value"])]
    match = UNKNOWN.search(line)
    return [(name, "") for name in dict.fromkeys(OPTION.findall(match["rest"]))][:MAXIMUM] if match else ()


def _sentence(name: str, value: str, engine: str) -> str:
    records = [record for record in parser.recorded() if record.recipe.startswith(engine)]
    answers = {record.recipe: parser.accepts(record, name, value) for record in records}
    accepting, others, open_values = (
        ", ".join(recipe for recipe, answer in answers.items() if answer is kind) for kind in (True, False, None)
    )
    text = f"{name} {value}".strip()
    rest = f" {open_values}: `{name}` has no recorded list of values." if open_values else ""
    if not accepting:
        return f"No recorded parser accepts `{text}` ({others}).{rest}" if others else rest.strip()
    return f"`{text}` is accepted in {accepting}{f'; not in {others}' if others else ''} (recorded parsers).{rest}"
