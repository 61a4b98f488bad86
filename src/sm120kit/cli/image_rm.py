"""``sm120kit image rm``: remove images from the state directory."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from sm120kit.cli.cache import size
from sm120kit.cli.options import Json, Sources
from sm120kit.core import console
from sm120kit.core.workspace import Workspace
from sm120kit.images import state_entries


def rm(
    references: Annotated[
        list[str], typer.Argument(metavar="IMAGE", help="Images in the state directory, by id, tag or digest.")
    ],
    *,
    sources: Sources,
    json: Json = False,
) -> None:
    """Remove images from the state directory.

    An image goes with its last tag; by id or digest with all its tags. Layers that other images have are kept. Waits until no
    other command uses the state directory. Images in the container daemon stay, and so does a running server's.
    """
    workspace = Workspace.at(sources.state)
    with workspace.maintenance():
        removed = state_entries.remove_images(workspace.root, references)
    if json:
        console.json_data(asdict(removed))
        return
    for reference in removed.untagged:
        console.data(f"untagged {reference}")
    for digest in removed.removed:
        console.data(f"removed {digest}")
    console.data(f"freed {size(removed.bytes)}")
