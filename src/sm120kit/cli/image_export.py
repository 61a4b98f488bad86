"""``sm120kit image export``: write an image for podman, skopeo, containerd or another host's Docker."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sm120kit.cli.options import Overwrite, State
from sm120kit.core import console


def export(
    reference: Annotated[str, typer.Argument(metavar="IMAGE", help="An image in the state directory, by id, tag or digest.")],
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A file that ends in .tar, or a new directory.")],
    overwrite: Overwrite = False,
    state: State = None,
) -> None:
    """Write an image as an OCI archive or directory.

    `docker load --input FILE`, podman, skopeo and containerd read a file; skopeo and podman a directory, as `oci:DIRECTORY`.
    The files of a directory are hard links to those in the state directory where possible: do not change them.
    """
    from sm120kit.core.state import Workspace, require_new
    from sm120kit.images import loading
    from sm120kit.images.oci import Layout

    if path.suffix == ".tar":
        require_new(path, "PATH", overwrite)
    layout = Layout(Workspace.open(state).root / "oci")
    loading.export(layout, loading.manifest_digest(layout, reference), path)
    console.data(str(path))
