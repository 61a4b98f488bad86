"""``sm120kit recipe``: what can be built."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sm120kit import console
from sm120kit.cli.options import Json

app = typer.Typer(help="List, show and check engine recipes.", no_args_is_help=True, rich_markup_mode=None)


@app.command("list")
def list_(json: Json = False) -> None:
    """Every recipe with its sources."""
    from sm120kit import recipe

    recipes = [recipe.load(name) for name in recipe.names()]
    if json:
        console.json_data([item.model_dump(mode="json") for item in recipes])
        return
    console.table(
        ("recipe", "sources", "archs", "kernel groups", "summary"),
        (
            (
                item.name,
                ", ".join(f"{project} {source.version}" for project, source in item.sources.items()),
                " ".join(item.archs),
                " ".join(item.groups),
                item.summary,
            )
            for item in recipes
        ),
    )


@app.command()
def show(
    name: str,
    json: Json = False,
) -> None:
    """One recipe: its pins, modules and kernel groups."""
    from sm120kit import recipe

    item = recipe.load(name)
    if json:
        console.json_data(item.model_dump(mode="json"))
        return
    console.data(f"{item.name}: {item.summary}\n")
    console.table(
        ("project", "version", "pinned by"),
        (
            (project, source.version, " ".join(f"{k}={v}" for k, v in source.model_dump().items() if k != "version"))
            for project, source in item.sources.items()
        ),
    )
    console.table(("module", "generator"), ((name, module.generator) for name, module in item.modules.items()))
    console.table(
        ("kernel group", "modules", "samples", "summary"),
        (
            (name + (" (default)" if name == item.default_group else ""), " ".join(g.modules), " ".join(g.samples), g.summary)
            for name, g in item.groups.items()
        ),
    )


@app.command()
def check(names: Annotated[list[str] | None, typer.Argument(help="Recipe names or files; all without one.")] = None) -> None:
    """Validate recipes; every problem of a file in one error."""
    from sm120kit import recipe

    for name in names or recipe.names():
        item = recipe.load(name)
        console.data(f"ok {item.name}")


@app.command()
def schema(out: Annotated[Path | None, typer.Option("--out", help="Write to this file.")] = None) -> None:
    """The JSON Schema of a recipe, for editors."""
    from sm120kit import recipe, workspace

    text = recipe.json_schema()
    if out is None:
        console.data(text)
    else:
        workspace.write_atomic(out, (text + "\n").encode())
