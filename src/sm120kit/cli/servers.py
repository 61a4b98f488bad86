"""``sm120kit ps``, ``logs`` and ``stop``: the servers that ``serve`` started on this host."""

from dataclasses import asdict
from typing import Annotated

from sm120kit.cli.options import Json, argument, option
from sm120kit.core import console
from sm120kit.core.signals import Interrupted
from sm120kit.serving import server_containers

ServerName = Annotated[str, argument("SERVER", "A name that ps lists, or CONFIG; default: the only one.", show_default=False)]


def ps(*, json: Json = False) -> None:
    """List the servers that serve started."""
    listed = server_containers.listed()
    if json:
        states = ({"status": each.state, "running": each.running, "ended": each.ended} for each in listed)
        console.json_data([asdict(each) | state for each, state in zip(listed, states, strict=True)])
        return
    console.table(
        ("server", "configuration", "GPUs", "URL", "status"),
        ((server.name, server.configuration, server.gpus, server.url, server.state) for server in listed),
    )


def logs(
    server: ServerName = "",
    *,
    follow: Annotated[bool, option("--follow -f", "Print new lines until the server exits or Ctrl-C.")] = False,
) -> None:
    """Show the log of a server."""
    container = server_containers.find(server)
    try:
        server_containers.logs(container, console.data, follow=follow)
    except Interrupted:
        if not follow:
            raise


def stop(server: ServerName = "") -> None:
    """Stop a server and remove its container.

    Its log and the record of its run stay in the state directory.
    """
    container = server_containers.find(server)
    server_containers.stop(container)
    console.info(f"stopped: {container.name}")
