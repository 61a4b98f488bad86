"""``sm120kit verify``: ask the finished thing to do its job."""

from __future__ import annotations

import typer

from sm120kit.cli.image import verify_image

app = typer.Typer(no_args_is_help=True, help="Ask a finished thing to do its job.")
app.command("image")(verify_image)
