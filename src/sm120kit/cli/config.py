"""``sm120kit config``: how models are served, and what has been published about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from sm120kit import console
from sm120kit.cli.options import Json

if TYPE_CHECKING:
    from sm120kit.recipe.configuration import Container, Reference

app = typer.Typer(help="List, show and check configurations.", no_args_is_help=True, rich_markup_mode=None)

Name = Annotated[str, typer.Argument(metavar="CONFIG", help="A configuration by name, or a .toml file.")]


@app.command("list")
def list_(json: Json = False) -> None:
    """Every configuration: model, hardware, engine, and the first published figure."""
    from sm120kit.recipe import configuration

    found = [configuration.load(name) for name in configuration.names()]
    if json:
        console.json_data([item.model_dump(mode="json") for item in found])
        return
    console.table(
        ("configuration", "engine", "GPUs", "published", "class"),
        (
            (item.name, item.engine, item.hardware.gpus, _figure(item.reference[0]), item.reference[0].reproducibility)
            for item in found
        ),
    )


@app.command()
def show(name: Name, json: Json = False) -> None:
    """One configuration: everything that it sets, what of that is ours, and every published figure with its method."""
    from sm120kit.recipe import configuration

    item = configuration.load(name)
    if json:
        console.json_data(item.model_dump(mode="json"))
        return
    console.data(f"{item.name}: {item.summary}\n")
    model, hardware = item.model, item.hardware
    revision = model.revision if not model.why_unpinned else f"unpinned: {model.why_unpinned}"
    rows = [
        ("model", f"{model.repository}, {model.quantization}" + (f", {model.gigabytes:g} GB" if model.gigabytes else "")),
        ("revision", revision),
        ("hardware", f"{hardware.gpus} x {hardware.gpu}"),
        ("engine", item.engine),
        ("originally", item.original),
        ("arguments", " ".join(item.arguments)),
        *((f"environment {key}", value) for key, value in item.environment.items()),
        ("container", _container(item.container)),
        *[("host", f"no problem in {', '.join(item.host)}")][: len(item.host)],
        *((f"refused by {item.engine}", f"{', '.join(one.arguments)}: {one.reason}") for one in [item.unreleased] if one),
        *(("ours", f"{one.field}: {one.reason}") for one in item.ours),
        *(("known to be bad", f"{bad.distribution} {bad.version}: {bad.reason}") for bad in item.known_bad),
    ]
    console.table(("field", "value"), rows)
    console.table(
        ("published", "users", "class", "method", "conditions", "source"),
        ((_figure(r), r.users, r.reproducibility, r.method, r.conditions, r.source) for r in item.reference),
    )
    console.data("unverified on SM120: none of these figures was measured with sm120kit")


@app.command()
def check(names: Annotated[list[str] | None, typer.Argument(metavar="[CONFIG]...", help="All without one.")] = None) -> None:
    """Validate configurations; every problem of a file in one error. Arguments are held to the engine's own parser."""
    from sm120kit.recipe import arguments, configuration

    for name in names or configuration.names():
        found = configuration.load(name)
        arguments.require_known(found)
        refused = f"; {found.engine} refuses {', '.join(found.unreleased.arguments)}" if found.unreleased else ""
        console.data(f"ok {found.name}{refused}")


def _container(one: Container) -> str:
    shared = "--ipc=host" if one.ipc_host else f"{one.shm_gib} GiB of shared memory"
    limits = [f"{name}={value}" for name, value in one.ulimits.items()]
    return "; ".join([shared, *[f"ulimits {' '.join(limits)}"][: len(limits)], f"caches {' '.join(one.caches) or 'none'}"])


def _figure(one: Reference) -> str:
    value = f"{one.value:g}" + (f"-{one.highest:g}" if one.highest else "") + (f" ± {one.spread:g}" if one.spread else "")
    return f"{value} {one.unit}"
