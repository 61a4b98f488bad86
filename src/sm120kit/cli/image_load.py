"""``sm120kit image load``: load an image of the state directory into the container daemon."""

from __future__ import annotations

from typing import Annotated

import typer

from sm120kit.cli.options import Json, Sources
from sm120kit.core import console
from sm120kit.images import loading
from sm120kit.images.docker import Daemon
from sm120kit.images.oci import Layout


def load(
    reference: Annotated[str, typer.Argument(metavar="IMAGE", help="An image in the state directory, by id, tag or digest.")],
    *,
    sources: Sources,
    json: Json = False,
) -> None:
    """Load an image into the container daemon.

    Layers that the daemon has are not sent. It gets the tag of a checked image; a tag of another image is not moved.
    """
    layout = Layout(sources.workspace().root / "oci")
    manifest = layout.require(reference).digest
    image = loading.load(layout, manifest, Daemon())
    if json:
        console.json_data(image)
        return
    console.data(image.id)
