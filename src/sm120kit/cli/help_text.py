"""Help pages: usage, text, and lists of arguments, options and commands. No word is cut and no line overflows."""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

MAX_COLUMNS = 100
TERM_COLUMNS = 26
"""The widest first column of a list; a longer term takes a line of its own."""
TEXT_COLUMNS = 44
"""The narrowest second column of a list, which the longest variable fits; if narrower, text is printed below its term."""

CONFIGURED = "Options can also be set by environment variables and in a configuration file: docs/configuration.md."


def usage(command: Any, ctx: Any) -> str:
    """The usage line: the command's path and its arguments."""
    parts = ["[OPTIONS]", *(_argument(param) for param in command.params if param.param_type_name == "argument")]
    if hasattr(command, "commands"):
        parts += ["COMMAND", "[ARGS]..."]
    lead = f"Usage: {ctx.command_path} "
    indent = len(lead) if len(lead) + max(map(len, parts)) < _columns() else 4
    return _wrapped(lead + " ".join(parts), "", " " * indent) + "\n"


def page(command: Any, ctx: Any, commands: Mapping[str, Mapping[str, str]] | None = None) -> str:
    """A help page. ``commands`` are the summaries of a group's commands, by heading and name."""
    parts = [usage(command, ctx)]
    parts += [f"{_wrapped(text, '  ', '  ')}\n" for text in _paragraphs(command.help or "")]
    params = [param for param in command.get_params(ctx) if not param.hidden]
    arguments = [(_name(param), _text(param)) for param in params if param.param_type_name == "argument"]
    groups = [(title, list(summaries.items())) for title, summaries in (commands or {}).items()]
    lists = (("Arguments", arguments), *groups, *_options(params).items())
    parts += [f"{title}:\n{_definitions(rows)}" for title, rows in lists if rows]
    return "\n".join([*parts, f"{_wrapped(_configured(params), '', '')}\n"])


def _options(params: Iterable[Any]) -> dict[str, list[tuple[str, str]]]:
    """The options by heading: the common ones first, then the rare ones."""
    common: dict[str, list[tuple[str, str]]] = {"Options": []}
    rare: dict[str, list[tuple[str, str]]] = {}
    for param in params:
        if param.param_type_name == "option":
            heading = getattr(param, "rich_help_panel", None)
            rows = rare.setdefault(heading, []) if heading else common["Options"]
            rows.append((_term(param), _text(param)))
    return common | rare


def _configured(params: Iterable[Any]) -> str:
    """How options can be set as well, with the variable of one that is not shared by commands as an example."""
    own = next((param for param in params if isinstance(param.envvar, list) and len(param.envvar) == 1), None)
    if own is None:
        return CONFIGURED
    long = next(text for text in own.opts if text.startswith("--"))
    return CONFIGURED.replace("environment variables", f"environment variables, such as {own.envvar[0]} for {long},")


def _columns() -> int:
    return min(shutil.get_terminal_size().columns, MAX_COLUMNS)


def _wrapped(text: str, first: str, rest: str) -> str:
    """Text wrapped to the width of the terminal. A no-break space keeps two words on one line."""
    filled = textwrap.fill(
        text,
        _columns(),
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return filled.replace("\N{NO-BREAK SPACE}", " ")


def _paragraphs(text: str) -> list[str]:
    return [" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n") if part.strip()]


def _definitions(rows: Iterable[tuple[str, str]]) -> str:
    """Terms and texts in two columns, or, on a narrow terminal, each text below its term."""
    rows = list(rows)
    column = min(max(len(term) for term, _ in rows), TERM_COLUMNS) + 4
    if _columns() - column < TEXT_COLUMNS:
        return "".join(f"  {term}\n{_wrapped(text, ' ' * 6, ' ' * 6)}\n" for term, text in rows)
    lines = []
    for term, text in rows:
        if len(term) > TERM_COLUMNS:
            lines.append(f"  {term}")
            term = ""
        lines.append(_wrapped(text, f"  {term:<{column - 2}}", " " * column))
    return "".join(f"{line}\n" for line in lines)


def _name(param: Any) -> str:
    """The placeholder of a value: the metavar, else the parameter's name in capitals."""
    return str(param.metavar or param.name.upper().rstrip("_").replace("_", "-"))


def _argument(param: Any) -> str:
    name = _name(param) if param.required else f"[{_name(param)}]"
    return name if param.nargs == 1 else f"{name}..."


def _term(param: Any) -> str:
    """``-j, --jobs N``, ``--patched / --unpatched``."""
    names = ", ".join(sorted(param.opts, key=lambda text: text.startswith("--")))
    if param.secondary_opts:
        names += f" / {', '.join(param.secondary_opts)}"
    return names if param.is_flag or param.count else f"{names} {_name(param)}"


def _text(param: Any) -> str:
    """The help of a parameter, with its default, its range, and the environment variable that sets it in all commands."""
    default = _default(param)
    notes = [
        f"env:\N{NO-BREAK SPACE}{param.envvar[1]}" if isinstance(param.envvar, list) and param.envvar[1:] else "",
        f"default: {default}" if default else "",
        _range(param),
        "required" if param.required and param.param_type_name == "option" else "",
    ]
    note = "; ".join(filter(None, notes))
    return f"{param.help or ''} {f'[{note}]' if note else ''}".strip()


def _default(param: Any) -> str:
    value = param.default
    if not getattr(param, "show_default", True) or callable(value) or value in (None, False, "", (), []):
        return ""
    if value is True:
        return str(param.opts[0].lstrip("-")) if param.secondary_opts else ""
    return f"{value:g}" if isinstance(value, float) else str(value.value if isinstance(value, Enum) else value)


def _range(param: Any) -> str:
    low, high = (getattr(param, name, None) for name in ("min", "max"))
    if high is None:
        return "" if low in (None, 0, 1) else f"at least {low}"
    return f"{low} to {high}"
