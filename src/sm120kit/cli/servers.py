"""``sm120kit ps``, ``metrics``, ``logs`` and ``stop``: the servers that ``serve`` started on this host."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from sm120kit.bench.metrics import observe
from sm120kit.cli.options import ApiKey, Json, argument, key_of, option
from sm120kit.core import console
from sm120kit.core.signals import Interrupted
from sm120kit.core.urls import Endpoint
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


def metrics(
    server: ServerName = "",
    *,
    seconds: Annotated[float, option("--seconds N", "The interval of rates and acceptance.", min=0.1, max=3600)] = 2,
    api_key: ApiKey = "",
    json: Json = False,
) -> None:
    """Show live metrics: requests, KV cache, tokens per second.

    The names are the same for vLLM and SGLang. Exit code 0: the server is healthy; 1: it is not.
    """
    container = server_containers.find(server)
    observed = observe(Endpoint.parse(container.url, key_of(api_key)), seconds)
    if json:
        console.json_data(observed)
    else:
        console.table(("metric", container.name), ((name, _metric_text(name, value)) for name, value in vars(observed).items()))
    raise typer.Exit(0 if observed.healthy else 1)


def _metric_text(name: str, value: float | None) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name in ("kv_cache", "acceptance"):
        return f"{value:.1%}"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


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
