"""``sm120kit image diff``: the differences between two images and their causes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from sm120kit.cli.options import Json, State
from sm120kit.core import console

if TYPE_CHECKING:
    from sm120kit.images.diff import ImageDiff


def diff_(
    first: Annotated[str, typer.Argument(metavar="IMAGE", help="An image by id, tag or digest.")],
    second: Annotated[str, typer.Argument(metavar="IMAGE", help="The image to compare it with.")],
    state: State = None,
    json: Json = False,
) -> None:
    """Show the differences between two images and their causes.

    Exit code 1 if there is a difference.
    """
    from sm120kit.core.state import Workspace
    from sm120kit.images import diff
    from sm120kit.images.stores import EveryStore

    result = diff.diff(first, second, EveryStore(Workspace.open(state)))
    if json:
        console.json_data(result)
    else:
        _show(result)
    if result.differences:
        raise typer.Exit(1)


def _show(result: ImageDiff) -> None:
    """Print a row for each cause, and every unexplained difference."""
    layers = len(result.first.layers), len(result.second.layers)
    console.info(f"the lowest {result.common_layers} layers are the same, of {layers[0]} and {layers[1]}")
    if not result.differences:
        console.data("no difference")
        return
    rows: dict[tuple[str, str], list[str]] = {}
    for difference in result.differences:
        path, detail = difference.path, difference.detail
        rows.setdefault((difference.cause, difference.what), []).append(f"{path}: {detail}" if detail else path)
    console.table(("cause", "kind", "count", "first"), ((*key, len(paths), paths[0]) for key, paths in sorted(rows.items())))
    for difference in result.unexplained:
        detail = f": {difference.detail}" if difference.detail else ""
        console.data(f"unexplained: {difference.what} {difference.path}{detail}")
    console.info(f"{len(result.differences)} differences, {len(result.unexplained)} unexplained")
