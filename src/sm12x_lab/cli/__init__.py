"""The program ``sm12x-lab``. With it installed, ``sm120kit`` has the same commands."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from sm12x_lab.cli.commands import OWN
from sm120kit.cli import Program, entry
from sm120kit.core import console


class _Laboratory(Program):
    """The program itself."""

    tree = OWN


def _version(value: bool) -> None:
    if value:
        console.data(f"sm12x-lab {version('sm12x-lab')}")
        raise typer.Exit


def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """The options of the program itself."""


app = typer.Typer(
    name="sm12x-lab",
    cls=_Laboratory,
    callback=_root,
    help=f"{OWN.summary}.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line and exit, as ``sm120kit`` does."""
    sys.exit(entry.run(app))
