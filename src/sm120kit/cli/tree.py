"""Command classes: groups that import a command when it is chosen, and the options and settings that all commands have."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from sm120kit.cli import config_file, plugins
from sm120kit.cli.options import COMMON, SHARED, common_help, expand_groups, split_common
from sm120kit.core import console
from sm120kit.core.errors import BadInput, InvalidOption
from sm120kit.core.report_page import Page

PREFIX = "SM120KIT"
MOVED = "sm120kit.common"
"""Of a click context: the options of every command that were given before its name."""


@dataclass(frozen=True)
class Leaf:
    """A command: its function as ``module:function``, and its line in its group's help.

    A module without a dot in its name is one of ``sm120kit.cli``. Where another program has the command at another place,
    ``path`` is that in ``sm120kit``, from which its variables and its table in the configuration file follow.
    """

    target: str
    summary: str
    path: tuple[str, ...] = ()


@dataclass(frozen=True)
class Branch:
    """A group of commands; ``sections`` are some of them by heading in the group's help."""

    summary: str
    commands: Mapping[str, Leaf | Branch]
    sections: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def variables(path: tuple[str, ...], name: str) -> list[str]:
    """The environment variables of an option, the most specific first: ``SM120KIT_BUILD_JOBS``, ``SM120KIT_JOBS``.

    ``path`` is the command's: ``("build",)``.
    """
    scopes = [(*path, name), (name,)] if name in SHARED else [(*path, name)]
    return ["_".join((PREFIX, *scope)).upper().replace("-", "_") for scope in scopes]


class Command(TyperCommand):
    """A command whose options can also be set by environment variables and in the configuration file."""

    path: tuple[str, ...]
    """The names that lead to the command: ``("patch", "prove")``."""

    def set_path(self, path: tuple[str, ...]) -> None:
        """Set the command's path, from which the names of its environment variables follow."""
        self.path = path
        for name, option in self.settable().items():
            option.envvar, option.show_envvar = variables(path, name), False

    def settable(self) -> dict[str, Any]:
        """The options that variables and the configuration file can set, by their long forms without dashes."""
        return {_key(param): param for param in self.params if param.param_type_name == "option"}

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> Any:
        if parent is not None and not parent.resilient_parsing and not {"-h", "--help"} & {*args}:
            extra["default_map"] = config_file.values(self.path, self.settable(), _every_name())
        return super().make_context(info_name, args, parent, **extra)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. An invalid value is reported with the environment variable or file that sets it."""
        args = [*ctx.meta.get(MOVED, ()), *args]
        console.json_errors = "--json" in args
        try:
            rest = super().parse_args(ctx, args)
            console.json_errors = bool(ctx.params.get("json") or ctx.params.get("as_json"))
            if console.json_errors and ctx.params.get("html"):
                raise typer.BadParameter("--json prints no tables: leave it out", ctx=ctx, param_hint="--html")
            return rest
        except typer.BadParameter as error:
            _explain(error, ctx, self.path)
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run the command; with ``--html`` what it prints is also a section of that page, whatever ends it."""
        path = ctx.params.get("html")
        page = console.page = Page(path) if path else None
        try:
            return super().invoke(ctx)
        except InvalidOption as error:
            option = self.settable().get(error.option.removeprefix("--"))
            refused = typer.BadParameter(str(error), ctx=ctx, param=option, param_hint=error.option)
            _explain(refused, ctx, self.path)
            raise refused from error
        finally:
            console.page = None
            if page and page.write(console.printable(" ".join((*self.path, *_words(ctx))))):
                console.info(f"written: {path}")

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_parameters(self, ctx, formatter, COMMON)
        formatter.write_paragraph()
        formatter.write_text(MORE)


def _words(ctx: Any) -> Iterator[str]:
    """The arguments of a command, of a file only its name."""
    for param in ctx.command.params:
        if param.param_type_name == "argument" and (value := ctx.params.get(param.name)):
            for word in value if isinstance(value, list | tuple) else [value]:
                yield word.name if isinstance(word, Path) else str(word)


def _key(option: Any) -> str:
    """The name of an option in variables and in the configuration file: its first long form without the dashes."""
    return str(next(text for text in option.opts if text.startswith("--"))[2:])


def _explain(error: Any, ctx: Any, path: tuple[str, ...]) -> None:
    """Add to an error the value that is invalid, and the variable that sets it."""
    details = getattr(error.__cause__, "errors", None)  # of pydantic, which typer does not quote
    if details:
        error.message = f"{details()[0]['input']!r}: {error.message.removeprefix('Value error, ')}"
    option = error.param
    source = ctx.get_parameter_source(option.name) if option is not None and option.name else None
    if source is not None and source.name == "ENVIRONMENT":
        error.message += f" (from {next((name for name in option.envvar if os.environ.get(name)), '')})"
    if source is not None and source.name == "DEFAULT_MAP":
        problem = f"{_key(option)!r} for `sm120kit {' '.join(path)}`: {error.message}"
        raise BadInput(f"{config_file.file()}: {problem}", config_file.HINT) from error


class Group(TyperGroup):
    """A group that imports a command's module when the command is chosen.

    Other distributions may add commands and replace none. Looking for them takes time, so the root has none.
    """

    def __init__(self, *, branch: Branch, path: tuple[str, ...], **attrs: Any) -> None:
        super().__init__(**attrs)
        self.branch, self.path = branch, path
        added = {name[-1]: leaf for name, leaf in plugins.commands().items() if name[:-1] == path} if path else {}
        self.commands: Any = {**branch.commands, **{name: leaf for name, leaf in added.items() if name not in branch.commands}}

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name, or None.

        Raises:
            RequirementMissing: it is a command of the laboratory, which is not installed.
        """
        path = (*self.path, cmd_name)
        if cmd_name in self.commands:
            return _load(self.commands[cmd_name], path)
        if path in plugins.ELSEWHERE and not ctx.resilient_parsing:
            raise plugins.required(f"sm120kit {' '.join(path)}")
        return None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options: Any = self.get_params(ctx)
        for option in options:  # typer's own, such as --help: it would load pydantic to convert None
            if option.is_flag:
                option.default = option.default or False
        own = {name: not option.is_flag for option in options for name in option.opts}
        moved, args = split_common(args, own)
        ctx.meta[MOVED] = [*ctx.meta.get(MOVED, ()), *moved]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_commands({name: entry.summary for name, entry in self.commands.items()}, self.branch.sections, formatter)
        write_parameters(self, ctx, formatter)
        if not self.path:
            write_list(COMMON, common_help(), formatter)


def _load(entry: Leaf | Branch, path: tuple[str, ...]) -> Any:
    if isinstance(entry, Branch):
        return Group(
            branch=entry, path=path, name=path[-1], help=f"{entry.summary}.", no_args_is_help=True, rich_markup_mode=None
        )
    module, _, function = entry.target.partition(":")
    module = module if "." in module else f"sm120kit.cli.{module}"
    command = _command(expand_groups(getattr(import_module(module), function)), path[-1], Command)
    command.set_path(entry.path or path)
    return command


def _every_name() -> set[str]:
    """The names of the commands and groups of ``sm120kit``, whichever program runs."""
    from sm120kit.cli.commands import COMMANDS

    return {*COMMANDS.commands}


def _command(function: Any, name: str, cls: type[TyperCommand]) -> Any:
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(name, cls=cls)(function)
    return typer.main.get_command(app)


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
