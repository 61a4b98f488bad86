"""``sm120kit patch``: the series, how they stand to a version, and working on them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sm120kit import console
from sm120kit.cli import patch_proof
from sm120kit.cli.options import Json, Mirror, Offline, State

if TYPE_CHECKING:
    from sm120kit.pipeline import Options
    from sm120kit.records import PatchStatus

app = typer.Typer(help="List, check, prove, apply and edit the patch series.", no_args_is_help=True, rich_markup_mode=None)
app.command("prove")(patch_proof.prove)
app.command("ablate")(patch_proof.ablate)

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe name, engine@version, or recipe file.")]
Into = Annotated[Path, typer.Option("--into", metavar="DIR", help="Where the files go; nobody else's directory.")]


def _root() -> Path:
    from sm120kit.workspace import data_root

    return data_root() / "patches"


def _options(state: Path | None, mirror: str | None, offline: bool) -> Options:
    from sm120kit.pipeline import Options
    from sm120kit.workspace import Workspace

    return Options(Workspace.open(state), mirror, offline)


def _status(name: str, options: Options) -> tuple[PatchStatus, ...]:
    from sm120kit import patches, recipe, sources

    item = recipe.load(name)
    checkout = sources.fetch(item.pin, options.workspace, mirror=options.mirror, offline=options.offline)
    return patches.status(checkout, item.inside, _root())


@app.command("list")
def list_(json: Json = False) -> None:
    """Every patch: for which versions, how it stands to its upstream, for whom it matters and for whom it does nothing."""
    from sm120kit import patches

    found = [patch for project in patches.projects(_root()) for patch in patches.load(_root(), project)]
    if json:
        rows = (
            {"project": p.project, "slug": p.slug, "subject": p.subject, "sha256": p.sha256, **dict(p.trailers)} for p in found
        )
        console.json_data(list(rows))
        return
    told = ("Applies-To", "Upstream-Status", "Matters-For", "No-Effect-For")
    console.table(("patch", *told), ((patch.name, *(patch.trailer(name) for name in told)) for patch in found))


@app.command()
def status(
    recipes: Annotated[list[str] | None, typer.Argument(metavar="[RECIPE]...", help="Recipes; all without one.")] = None,
    mirror: Mirror = None,
    offline: Offline = False,
    state: State = None,
    json: Json = False,
) -> None:
    """Each patch against each recipe's pin: applies, already upstream, not for this version, or conflicts and where."""
    from dataclasses import asdict

    from sm120kit import recipe

    options = _options(state, mirror, offline)
    found = [(name, item) for name in recipes or recipe.names(recipe.Recipe) for item in _status(name, options)]
    if json:
        console.json_data([{"recipe": name, **asdict(item)} for name, item in found])
        return
    console.table(
        ("recipe", "patch", "version", "state", "detail"),
        ((name, f"{s.project}/{s.slug}", s.version, s.state, s.detail.strip()) for name, s in found),
    )


@app.command()
def check(
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="Also apply the series to this recipe's pin.")
    ] = None,
    fix: Annotated[bool, typer.Option("--fix", help="First write the files in their normal form.")] = False,
    mirror: Mirror = None,
    offline: Offline = False,
    state: State = None,
    json: Json = False,
) -> None:
    """Whether every series is well-formed and, with a recipe, every patch for its versions applies. Exit code 1 if not."""
    from dataclasses import asdict

    from sm120kit import patches
    from sm120kit.records import PatchState

    wrote = patches.fix(_root()) if fix else []
    problems = patches.lint(_root())
    found = _status(recipe, _options(state, mirror, offline)) if recipe and not problems else ()
    unfit = [item for item in found if item.state in (PatchState.CONFLICTS, PatchState.ALREADY_UPSTREAM)]
    if json:
        console.json_data({"wrote": wrote, "problems": [asdict(p) for p in problems], "unfit": [asdict(s) for s in unfit]})
    else:
        for file in wrote:
            console.say(f"wrote {file}")
        for problem in problems:
            console.data(str(problem))
        for s in unfit:
            console.data(f"{s.project}/{s.slug}: {s.state} in {s.project} {s.version}\n{s.detail}")
        if not problems and not unfit:
            fits = [item for item in found if item.state is PatchState.APPLIES]
            console.data(f"ok {', '.join(patches.projects(_root()))}" + (f"; {len(fits)} patches apply" if recipe else ""))
    if problems or unfit:
        raise typer.Exit(1)


@app.command()
def apply(
    recipe: RecipeName,
    into: Into,
    mirror: Mirror = None,
    offline: Offline = False,
    state: State = None,
    json: Json = False,
) -> None:
    """Write a recipe's patched tree to DIR. Run again, it rewrites only files that differ; your edits there are lost."""
    from sm120kit import patches, pipeline
    from sm120kit import recipe as recipes

    tree = pipeline.patched_tree(recipes.load(recipe), _options(state, mirror, offline))
    patches.materialise(tree, into)
    if json:
        from dataclasses import asdict

        console.json_data(asdict(tree))
        return
    for patch in tree.patches:
        console.say(f"applied {patch.project}/{patch.slug}")
    console.data(f"{into}: tree {tree.tree}, commit {tree.commit}")


@app.command()
def edit(recipe: RecipeName, into: Into, mirror: Mirror = None, offline: Offline = False, state: State = None) -> None:
    """Make DIR a git repository with the series as commits, to change with git; `patch export` takes them back."""
    from sm120kit import patches, pipeline
    from sm120kit import recipe as recipes

    tree = pipeline.patched_tree(recipes.load(recipe), _options(state, mirror, offline))
    patches.edit(tree, into)
    console.data(f"{into}: {len(tree.patches)} patches on branch series")
    console.say(f"when done: sm120kit patch export {recipe} --from {into}")


@app.command()
def export(
    recipe: RecipeName,
    from_: Annotated[Path, typer.Option("--from", metavar="DIR", help="A directory that `patch edit` made.")],
    json: Json = False,
) -> None:
    """Write the commits in DIR back to the patch files; unchanged commits leave their files unchanged."""
    from sm120kit import patches
    from sm120kit import recipe as recipes

    item = recipes.load(recipe)
    changed = patches.take_back(from_, patches.parts_of(item.pin, item.inside), _root())
    if json:
        console.json_data([str(path) for path in changed])
        return
    for path in changed:
        console.data(f"{'wrote' if path.exists() else 'removed'} {path}")
    console.say(f"{len(changed)} files changed")
