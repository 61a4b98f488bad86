"""``sm120kit recipe``: what can be built."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sm120kit import console
from sm120kit.cli.options import Json, Mirror, Offline, State

if TYPE_CHECKING:
    from sm120kit.recipe import EngineRecipe, EnvironmentTable, Recipe

Names = Annotated[list[str] | None, typer.Argument(metavar="[RECIPE]...", help="Recipe names or files; all without one.")]

app = typer.Typer(help="List, show, check and lock recipes.", no_args_is_help=True, rich_markup_mode=None)


@app.command("list")
def list_(json: Json = False) -> None:
    """Every recipe: what it builds from, and for what."""
    from sm120kit import recipe

    recipes = [recipe.load_any(name) for name in recipe.names()]
    if json:
        console.json_data([item.model_dump(mode="json") for item in recipes])
        return
    rows = []
    for item in recipes:
        rests_on = (
            f"{item.flashinfer} ({item.kernels})"
            if isinstance(item, recipe.EngineRecipe)
            else ", ".join(f"{project} {source.version}" for project, source in item.sources.items())
        )
        groups = "" if isinstance(item, recipe.EngineRecipe) else " ".join(item.groups)
        rows.append((item.name, rests_on, " ".join(item.archs), groups, item.summary))
    console.table(("recipe", "made from", "archs", "kernel groups", "summary"), rows)


@app.command()
def show(name: str, json: Json = False) -> None:
    """One recipe: its pins and kernels or wheels, and its build id when it is locked."""
    from sm120kit import lock, recipe

    item, path = recipe.load_any(name), recipe.lock_path(name)
    if json:
        console.json_data(item.model_dump(mode="json"))
        return
    console.data(f"{item.name}: {item.summary}")
    console.data(f"build id {lock.build_id(lock.read(path))}\n" if path.is_file() else "not locked\n")
    if isinstance(item, recipe.EngineRecipe):
        _show_engine(item)
    else:
        _show_kernels(item)
    if item.environment:
        console.table(("environment", "value"), (("Python", item.environment.python), *_environment(item.environment)))


def _show_kernels(item: Recipe) -> None:
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


def _show_engine(item: EngineRecipe) -> None:
    console.data(f"state: {item.state}; unverified on SM120\nrests on {item.flashinfer}, kernel group {item.kernels}\n")
    console.table(("built here", "why"), ((part.what, part.reason) for part in item.built))
    console.table(("stays official", "why"), ((part.what, part.reason) for part in item.official))
    if item.known_bad:
        console.table(("known to be bad", "why"), ((f"{bad.distribution} {bad.version}", bad.reason) for bad in item.known_bad))


def _environment(table: EnvironmentTable) -> list[tuple[str, str]]:
    rows = [("platforms", " ".join(table.platforms)), ("requires", " ".join(table.requires))]
    return rows + [(f"override {name}", f"{given.version}: {given.reason}") for name, given in table.overrides.items()]


@app.command()
def check(names: Names = None) -> None:
    """Validate recipes; every problem of a file in one error."""
    from sm120kit import recipe

    for name in names or recipe.names():
        item = recipe.load_any(name)
        console.data(f"ok {item.name}")


@app.command()
def lock(
    names: Names = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; say in what the lock is not what would be built.")
    ] = False,
    upgrade: Annotated[
        bool, typer.Option("--upgrade", help="Take the newest wheels that fit, not those locked before.")
    ] = False,
    mirror: Mirror = None,
    offline: Offline = False,
    state: State = None,
    json: Json = False,
) -> None:
    """Write down everything that builds are made of, beside their recipes: sources, trees, patches, wheels by hash."""
    from sm120kit import lock as locks
    from sm120kit import locking, recipe
    from sm120kit.trees import Options
    from sm120kit.workspace import Workspace

    if check and upgrade:
        raise typer.BadParameter("--check writes nothing; --upgrade is for writing")
    options = Options(Workspace.open(state), mirror, offline)
    ids = {}
    for name in names or [*recipe.names(recipe.Recipe), *recipe.names(recipe.EngineRecipe)]:
        if check:
            made = locking.locked(name, options)
        else:
            made, path = locking.lock(name, options, upgrade=upgrade)
            console.say(f"wrote {path}")
        ids[str(made.recipe["name"])] = locks.build_id(made)
        if not json:
            console.data(f"{'ok' if check else 'locked'} {made.recipe['name']}: build id {locks.build_id(made)}")
    if json:
        console.json_data(ids)


@app.command()
def requirements(
    name: str,
    platform: Annotated[str | None, typer.Option("--platform", help="One of the recipe's; default: its first.")] = None,
) -> None:
    """The locked wheels as a requirements file with hashes, for `pip install --require-hashes --no-deps -r` or uv.

    The wheel that is built here is not among them.
    """
    from sm120kit import lock as locks
    from sm120kit import recipe
    from sm120kit.errors import UnknownName

    held = locks.read(recipe.lock_path(name))
    asked = (held.recipe.get("environment") or {}).get("platforms", [])
    wanted = platform or next(iter(asked), "")
    closure = next((one for one in held.closures if one.platform == wanted), None)
    if closure is None:
        raise UnknownName(f"{name} is not locked for platform {wanted!r}", f"platforms: {', '.join(asked) or 'none'}")
    console.data(locks.requirements(closure).rstrip())


@app.command()
def schema(out: Annotated[Path | None, typer.Option("--out", help="Write to this file.")] = None) -> None:
    """The JSON Schema of a recipe, for editors."""
    from sm120kit import recipe, workspace

    text = recipe.json_schema()
    if out is None:
        console.data(text)
    else:
        workspace.write_atomic(out, (text + "\n").encode())
