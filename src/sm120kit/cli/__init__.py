"""The command line: parse, call, render. One file per noun; no logic here."""

from __future__ import annotations

import signal
import sys
from types import FrameType

import typer

from sm120kit import console
from sm120kit.cli import bench, config, image_diff, patch, recipe, verify
from sm120kit.cli.build import build
from sm120kit.cli.doctor import doctor
from sm120kit.cli.explain import explain_
from sm120kit.cli.image import publish, pull
from sm120kit.cli.inspect import inspect_
from sm120kit.cli.kld import kld
from sm120kit.cli.launch import launch_
from sm120kit.cli.reproduce import reproduce_
from sm120kit.cli.tiles import tiles_
from sm120kit.errors import Sm120kitError

app = typer.Typer(
    name="sm120kit",
    help="Patch and build vLLM, SGLang and FlashInfer for NVIDIA SM12x GPUs, with evidence.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("build")(build)
app.command("doctor")(doctor)
app.command("explain")(explain_)
app.command("inspect")(inspect_)
app.command("kld")(kld)
app.command("launch")(launch_)
app.command("publish")(publish)
app.command("pull")(pull)
app.command("reproduce")(reproduce_)
app.command("tiles")(tiles_)
app.add_typer(bench.app, name="bench")
app.add_typer(config.app, name="config")
app.add_typer(image_diff.app, name="image")
app.add_typer(patch.app, name="patch")
app.add_typer(recipe.app, name="recipe")
app.add_typer(verify.app, name="verify")


class _Interrupted(BaseException):
    """Ctrl-C. Not KeyboardInterrupt, of which typer would make a silent exit."""


def _interrupt(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one, as timeout(1) sends, must not interrupt the ending
    raise _Interrupted


def main() -> None:
    """Entry point: known failures become a message and an exit code; a bug keeps its traceback."""
    signal.signal(signal.SIGINT, _interrupt)
    try:
        app()
    except Sm120kitError as failure:
        console.error(failure.message, failure.hint)
        sys.exit(failure.exit_code)
    except _Interrupted:
        console.error("interrupted", "what was finished is kept; the same command goes on from there")
        sys.exit(130)
