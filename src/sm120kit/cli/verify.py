"""``sm120kit verify``: ask the finished thing to do its job."""

from __future__ import annotations

import typer

from sm120kit.cli.image import verify_image
from sm120kit.cli.verify_kernels import verify_kernels

app = typer.Typer(no_args_is_help=True, help="Ask a finished thing to do its job.")
app.command("image")(verify_image)
app.command("kernels")(verify_kernels)
