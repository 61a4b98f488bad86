"""Command classes: groups that import a command when it is chosen, and the options and settings that all commands have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from sm120kit.cli import config_file, help_text, plugins
from sm120kit.cli.options import SHARED, expand_groups
from sm120kit.core import console
from sm120kit.core.errors import BadInput

PREFIX = "SM120KIT"


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
    """A group of commands.

    ``default`` names the command that runs when the first argument is not a command; with ``alone`` also without arguments.
    ``sections`` are the commands by heading in the group's help; those of no section are below ``Commands``.
    """

    summary: str
    commands: Mapping[str, Leaf | Branch]
    default: str = ""
    alone: bool = False
    sections: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def key(option: Any) -> str:
    """The name of an option in variables and in the configuration file: its first long form without the dashes."""
    return str(next(text for text in option.opts if text.startswith("--"))[2:])


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

    def __init__(self, name: str | None, **attrs: Any) -> None:
        super().__init__(name, **attrs)
        self.params += _verbosity()

    def set_path(self, path: tuple[str, ...]) -> None:
        """Set the command's path, from which the names of its environment variables follow."""
        self.path = path
        for name, option in self.settable().items():
            option.envvar, option.show_envvar = variables(path, name), False

    def settable(self) -> dict[str, Any]:
        """The options that environment variables and the configuration file can set, by name."""
        return {key(param): param for param in self.params if param.param_type_name == "option"}

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> Any:
        if parent is not None and not parent.resilient_parsing:
            extra["default_map"] = config_file.Defaults(_every_command(), self)
        return super().make_context(info_name, args, parent, **extra)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. An invalid value is reported with the environment variable or file that sets it."""
        console.json_errors = "--json" in args
        try:
            rest = super().parse_args(ctx, args)
            console.json_errors = bool(ctx.params.get("json") or ctx.params.get("as_json"))
            return rest
        except typer.BadParameter as error:
            details: Any = getattr(error.__cause__, "errors", None)  # of pydantic, which typer does not quote
            if details:
                error.message = f"{details()[0]['input']!r}: {error.message}"
            option: Any = error.param
            source = ctx.get_parameter_source(option.name) if option is not None and option.name else None
            if source is not None and source.name == "ENVIRONMENT":
                error.message += f" (from {_variable(option)})"
            if source is not None and source.name == "DEFAULT_MAP":
                problem = f"{key(option)!r} for `sm120kit {' '.join(self.path)}`: {error.message}"
                raise BadInput(f"{config_file.path()}: {problem}", config_file.HINT) from error
            raise

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        formatter.write(help_text.usage(self, ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(help_text.page(self, ctx))


class Group(TyperGroup):
    """A group that imports a command's module when the command is chosen."""

    def __init__(self, *, branch: Branch, path: tuple[str, ...], **attrs: Any) -> None:
        super().__init__(**attrs)
        self.params += _verbosity()
        self.branch, self.path = branch, path
        self.commands: Any = _Commands(branch.commands, path)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name, or None.

        Raises:
            RequirementMissing: it is a command of the laboratory, which is not installed.
        """
        path = (*self.path, cmd_name)
        if path in plugins.ELSEWHERE and cmd_name not in self.commands and not ctx.resilient_parsing:
            raise plugins.required(f"sm120kit {' '.join(path)}")
        return super().get_command(ctx, cmd_name)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for option in self.get_params(ctx):  # typer's own, such as --help: it would load pydantic to convert None
            option.default = option.default or False
        default = self.branch.default
        if default and (args or self.branch.alone) and [*args, ""][0] not in (*self.commands, *ctx.help_option_names):
            args = [default, *args]
        return super().parse_args(ctx, args)

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        formatter.write(help_text.usage(self, ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(help_text.page(self, ctx, self._sections()))

    def _sections(self) -> dict[str, dict[str, str]]:
        rest = self.commands.summaries()
        sections = {title: {name: rest.pop(name) for name in names} for title, names in self.branch.sections.items()}
        return sections | ({"Commands": rest} if rest else {})


class _Commands(Mapping[str, Any]):
    """The commands of a group by name, each loaded when it is looked up: its own, then those of other distributions."""

    def __init__(self, own: Mapping[str, Leaf | Branch], path: tuple[str, ...]) -> None:
        self._own, self._path, self._loaded = own, path, dict[str, Any]()

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            entry = self._own[name] if name in self._own else self._added[name]
            self._loaded[name] = _load(entry, (*self._path, name))
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in self._added

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def summaries(self) -> dict[str, str]:
        """The line of each command in the group's help."""
        return {name: entry.summary for name, entry in self._entries.items()}

    @property
    def _entries(self) -> Mapping[str, Leaf | Branch]:
        return {**self._own, **{name: leaf for name, leaf in self._added.items() if name not in self._own}}

    @property
    def _added(self) -> Mapping[str, Leaf | Branch]:
        """What other distributions add to a group; they replace nothing. Looking for them takes time, so the root has none."""
        if not self._path:
            return {}
        return {path[-1]: leaf for path, leaf in plugins.commands().items() if path[:-1] == self._path}


def _load(entry: Leaf | Branch, path: tuple[str, ...]) -> Any:
    if isinstance(entry, Branch):
        default = f" The default COMMAND is {entry.default}." if entry.default else ""
        return Group(
            branch=entry,
            path=path,
            name=path[-1],
            help=f"{entry.summary}.{default}",
            no_args_is_help=True,
            rich_markup_mode=None,
        )
    module, _, function = entry.target.partition(":")
    command = _command(
        getattr(import_module(module if "." in module else f"sm120kit.cli.{module}"), function), path[-1], Command
    )
    command.set_path(entry.path or path)
    return command


def _every_command() -> Group:
    """All commands of ``sm120kit``, which the configuration file has tables for, whichever program runs."""
    from sm120kit.cli.commands import COMMANDS

    return Group(branch=COMMANDS, path=())


def _command(function: Any, name: str, cls: type[TyperCommand]) -> Any:
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(name, cls=cls)(expand_groups(function))
    return typer.main.get_command(app)


def _verbosity() -> list[Any]:
    """``-v`` and ``-q`` of every command and group; they set how much the console prints."""

    def options(
        verbose: Annotated[
            bool,
            typer.Option(
                "--verbose",
                "-v",
                callback=_set_verbose,
                expose_value=False,
                help="Also print downloads and programs that run.",
            ),
        ] = False,
        quiet: Annotated[
            bool, typer.Option("--quiet", "-q", callback=_set_quiet, expose_value=False, help="Print results and errors only.")
        ] = False,
    ) -> None: ...

    return list(_command(options, "options", TyperCommand).params)


def _set_verbose(value: bool) -> None:
    console.verbose |= value


def _set_quiet(value: bool) -> None:
    console.quiet |= value


def _variable(option: Any) -> str:
    import os

    return next((name for name in option.envvar if os.environ.get(name)), "")
