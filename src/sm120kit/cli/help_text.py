"""The parts of help pages that click does not have: options and commands below headings of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MORE = (
    "Every command also takes the options that `sm120kit --help` lists. Variables and a configuration file set options as well:"
    " docs/configuration.md."
)


def write_parameters(command: Any, ctx: Any, formatter: Any, hidden: str = "") -> None:
    """Write the arguments, then the options, rare ones last and below their headings; none below the heading ``hidden``."""
    lists: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for param in command.get_params(ctx):
        if param.hidden:
            continue
        if param.param_type_name == "argument":
            lists["Arguments"].append((param.metavar or param.name.upper(), param.help or ""))
        else:
            lists.setdefault(param.rich_help_panel or "Options", []).append(param.get_help_record(ctx))
    for title, rows in lists.items():
        write_list(title, rows if title != hidden else [], formatter)


def write_commands(summaries: Mapping[str, str], sections: Mapping[str, tuple[str, ...]], formatter: Any) -> None:
    """Write the commands of a group by heading; those of no section are below ``Commands``."""
    rest = dict(summaries)
    for title, names in sections.items():
        write_list(title, [(name, rest.pop(name)) for name in names], formatter)
    write_list("Commands", list(rest.items()), formatter)


def write_list(title: str, rows: list[tuple[str, str]], formatter: Any) -> None:
    """Write a list in two columns, if it has rows."""
    if rows:
        with formatter.section(title):
            formatter.write_dl(rows, col_max=26)
