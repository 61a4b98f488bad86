"""The command line: parse, call, print. ``commands`` lists the commands; each is imported when it is chosen."""

import os
import sys
from typing import Annotated, Any

import typer

import sm120kit
from sm120kit.cli import entry
from sm120kit.cli.commands import COMMANDS
from sm120kit.cli.tree import Branch, Group
from sm120kit.core import console, reporting

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""The base of all errors of usage, which typer does not export."""


class Program(Group):
    """A program itself, with the commands of ``tree``."""

    tree: Branch = COMMANDS

    def __init__(self, **attrs: Any) -> None:
        super().__init__(branch=self.tree, path=(), **attrs)

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the program; wrong usage is printed as every error is, and ends it with exit code 2."""
        try:
            sys.exit(super().main(*args, **extra | {"standalone_mode": False}) or 0)
        except _UsageError as error:
            entry.print_usage_error(error)
            sys.exit(2)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        option: Any
        for option in self.params:
            if "-C" in option.opts:  # typer would load pydantic to convert its text
                option.process_value = _change_directory
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with reporting.use(console):
            return super().invoke(ctx)


def _version(value: bool) -> None:
    if value:
        console.data(f"sm120kit {sm120kit.__version__}")
        raise typer.Exit


def _change_directory(ctx: Any, value: Any) -> Any:
    if value:
        try:
            os.chdir(value)
        except OSError as error:
            raise typer.BadParameter(f"{value}: {error.strerror}", ctx=ctx, param_hint="-C") from error
    return value


def _root(
    directory: Annotated[
        str, typer.Option("-C", "--directory", metavar="DIR", is_eager=True, show_default=False, help="Run in this directory.")
    ] = "",
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """The options of the program itself."""


app = typer.Typer(
    name="sm120kit",
    cls=Program,
    callback=_root,
    help=f"{COMMANDS.summary}.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line and exit: known failures print a message and set the exit code; a bug keeps its traceback."""
    entry.require_utf8()
    sys.excepthook = entry.report_bug
    sys.exit(entry.run(app))
