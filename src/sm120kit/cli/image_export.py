"""``sm120kit image export``: write an image for podman, skopeo, containerd or another host's Docker."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from sm120kit.cli.options import Overwrite, Sources
from sm120kit.core import console
from sm120kit.core.disk import require_new
from sm120kit.images import loading
from sm120kit.images.dockerfile import export_dockerfile
from sm120kit.images.oci import Layout


def export(
    reference: Annotated[str, typer.Argument(metavar="IMAGE", help="An image in the state directory, by id, tag or digest.")],
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="A file that ends in .tar, - for standard output, or with --dockerfile a directory."
        ),
    ],
    dockerfile: Annotated[
        bool, typer.Option("--dockerfile", help="Write a directory for `docker build`: a Dockerfile that adds the layers.")
    ] = False,
    overwrite: Overwrite = False,
    *,
    sources: Sources,
) -> None:
    """Write an image as an OCI archive.

    `docker load --input FILE`, podman, skopeo and containerd read it. With `-`, it is written to standard output, as for
    `| ssh HOST docker load`.
    With `--dockerfile`, `docker build DIRECTORY` gives an image with the same files and settings. The files of the directory
    are hard links to those in the state directory where possible: do not change them.
    """
    to_stdout = str(path) == "-"
    if to_stdout and sys.stdout.isatty():
        raise typer.BadParameter("an archive is not text for a terminal: redirect standard output, or name a file")
    if path.suffix == ".tar":
        require_new(path, "PATH", overwrite)
    if dockerfile and (to_stdout or path.suffix == ".tar"):
        raise typer.BadParameter("--dockerfile writes a directory: name one that does not exist yet", param_hint="PATH")
    if not dockerfile and not to_stdout and path.suffix != ".tar":
        raise typer.BadParameter("an archive is a file that ends in .tar, or - for standard output", param_hint="PATH")
    layout = Layout(sources.workspace().root / "oci")
    manifest = layout.require(reference).digest
    if to_stdout:
        loading.stream(layout, manifest, sys.stdout.buffer)
        return
    (export_dockerfile if dockerfile else loading.export)(layout, manifest, path)
    console.data(str(path))
