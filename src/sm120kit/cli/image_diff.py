"""``sm120kit image``: what is no subcommand is an engine; ``image diff``: what is different between two images, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from sm120kit import console
from sm120kit.cli.image import image_
from sm120kit.cli.options import Json

if TYPE_CHECKING:
    from sm120kit.imagediff import Diff


class _EngineOrCommand(TyperGroup):
    """Makes ``image ENGINE`` of ``image build ENGINE``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["build", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_EngineOrCommand, no_args_is_help=True, help="Build an image of an engine, or compare two images.")
app.command("build")(image_)


@app.command("diff")
def diff_(
    first: Annotated[str, typer.Argument(metavar="IMAGE", help="An image by id, tag or digest.")],
    second: Annotated[str, typer.Argument(metavar="IMAGE", help="The image that is compared with it.")],
    json: Json = False,
) -> None:
    """What is different between two images, and why. Exit code 1 when there is a difference."""
    from sm120kit import imagediff
    from sm120kit.daemon import Daemon

    found = imagediff.diff(first, second, Daemon())
    if json:
        console.json_data(found)
    else:
        _show(found)
    if found.differences:
        raise typer.Exit(1)


def _show(found: Diff) -> None:
    """A row for each cause, and every difference that has none."""
    layers = len(found.first.layers), len(found.second.layers)
    console.say(f"the lowest {found.common_layers} layers are the same, of {layers[0]} and {layers[1]}")
    if not found.differences:
        console.data("no difference")
        return
    rows: dict[tuple[str, str], list[str]] = {}
    for one in found.differences:
        rows.setdefault((one.cause, one.what), []).append(f"{one.path}: {one.detail}" if one.detail else one.path)
    console.table(
        ("cause", "what", "count", "the first"), ((*key, len(places), places[0]) for key, places in sorted(rows.items()))
    )
    for one in found.unexplained:
        console.data(f"unexplained: {one.what} {one.path}{': ' * bool(one.detail)}{one.detail}")
    console.say(f"{len(found.differences)} differences, {len(found.unexplained)} unexplained")
