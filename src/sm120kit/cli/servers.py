"""``sm120kit ps``, ``logs`` and ``stop``: the servers that ``serve`` started on this host."""

from __future__ import annotations

from typing import Annotated

import typer

from sm120kit.cli.options import Json
from sm120kit.core import console

ServerName = Annotated[
    str,
    typer.Argument(metavar="SERVER", show_default=False, help="A name that ps lists, or CONFIG; default: the only one."),
]


def ps(*, json: Json = False) -> None:
    """List the servers that serve started."""
    from sm120kit.serving import containers

    listed = containers.listed()
    if json:
        console.json_data(listed)
        return
    console.table(
        ("server", "configuration", "GPUs", "URL", "status"),
        ((server.name, server.configuration, server.gpus, server.url, server.status) for server in listed),
    )


def logs(
    server: ServerName = "",
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until the server exits or Ctrl-C.")] = False,
) -> None:
    """Print what a server printed."""
    from sm120kit.core.signals import Interrupted
    from sm120kit.serving import containers

    container = containers.find(server)
    try:
        containers.logs(container, console.data, follow=follow)
    except Interrupted:
        if not follow:
            raise


def stop(server: ServerName = "") -> None:
    """Stop a server and remove its container.

    Its log and the record of its run stay in the state directory.
    """
    from sm120kit.serving import containers

    container = containers.find(server)
    containers.stop(container)
    console.info(f"stopped: {container.name}")
