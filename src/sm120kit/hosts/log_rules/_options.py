"""Options that a parser refuses: what replaces them. Spellings that an engine rewrites before it parses are left out."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

RENAMED: Mapping[str, Mapping[str, str]] = tomllib.loads(Path(__file__).with_name("renamed_options.toml").read_text("utf-8"))
"""By engine, what replaces an option."""
_REFUSED = re.compile(r"(?:unrecognized arguments?|no such option):?(.*)", re.IGNORECASE)
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w.-]*", re.IGNORECASE)
_PLAIN = re.compile(r"--(?!no-)[a-z][a-z0-9-]+")
"""Names that no engine rewrites: no negation, underscore, capital or dotted key."""


def remedies(line: str, engine: str) -> tuple[str, ...]:
    """A sentence for each option that a line refuses; none if its spelling may be one that the engine accepts."""
    match = _REFUSED.search(line)
    given = list(dict.fromkeys(_OPTION.findall(match[1]))) if match else []
    names = [name for name in given if _PLAIN.fullmatch(name)]
    known = RENAMED.get(engine, {})
    replaced = [f"`{name}`: here `{known[name]}`." for name in names if name in known]
    others = ", ".join(f"`{name}`" for name in names if name not in known)
    rest = f"{others}: not in this version's parser; --help lists its options." if others else ""
    return (*replaced, *([rest] if rest else []))
