"""``sm120kit recipe new`` and ``recipe update``: recipes of upstream releases."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from sm120kit.cli.options import Json, Sources, argument, option, recipe_names
from sm120kit.core import console
from sm120kit.recipes import known_engines
from sm120kit.recipes.drafts import Draft
from sm120kit.wheels import new_recipe
from sm120kit.wheels.new_recipe import NewerRelease
from sm120kit.wheels.newer_wheels import NewerWheel, newer_wheels


def _releases(incomplete: str) -> list[str]:
    return [name for engine in known_engines() if (name := f"{engine}@latest").startswith(incomplete)]


@dataclass(frozen=True)
class ResultOptions:
    """Which files `recipe new` writes."""

    draft: Annotated[
        bool, option("--draft", "Write the recipes only: not locked, not planned, whether patches fit or not.")
    ] = False
    overwrite: Annotated[bool, option("--overwrite", "Replace the recipe if it exists.")] = False


def new(
    release: Annotated[
        str,
        argument("ENGINE@VERSION", "A release, such as vllm@0.32.0, or vllm@latest for the newest.", autocompletion=_releases),
    ],
    like: Annotated[
        str, option("--like RECIPE", "Recipe to draft from; default: that of the nearest release.", autocompletion=recipe_names)
    ] = "",
    *,
    results: ResultOptions,
    sources: Sources,
    json: Json = False,
) -> None:
    """Make the recipe of an upstream release.

    It is drafted from the nearest recipe: pinned by hash, with the FlashInfer that its METADATA requires, whose recipe is made
    as well if there is none. Files appear when the recipes are locked and planned. What a person has to decide is printed.
    """
    engine, version = new_recipe.parse_release(release)
    request = new_recipe.NewRecipeRequest(engine, version, like, results.overwrite, results.draft)
    options = sources.run_options()
    with options.workspace.exclusive("recipe-new"), options.workspace.scratch() as directory:
        staged = new_recipe.RecipeMaker(request, options, directory).make()
        if not results.draft:
            new_recipe.plan(staged)
        files = new_recipe.publish(staged)
    drafts = [each.draft for each in staged]
    states = [state for each in staged for state in each.states]
    decisions = [f"{each.name}: {text}" for each in drafts for text in each.decisions]
    if json:
        console.json_data({"files": [str(path) for path in files], "states": states, "decisions": decisions})
        return
    if states:
        rows = ((f"{each.project}/{each.slug}", each.version, each.state) for each in states)
        console.table(("patch", "version", "state"), rows)
    for path in files:
        console.data(f"wrote {path}")
    console.data("\nto decide:" if decisions else "\nnothing to decide")
    for number, text in enumerate(decisions, 1):
        console.data(f"{number}. {text}")
    console.info("\n".join(["next:", *_next_steps(drafts[-1], draft=results.draft)]))


def _next_steps(last: Draft, *, draft: bool) -> list[str]:
    lock = [f"  sm120kit recipe lock {last.name}"] if draft else []
    options = [f"  nox -s arguments -- {last.name}  # in a clone: records the options of its parser"]
    return [*lock, *options * (last.data["engine"] != "flashinfer"), f"  sm120kit build {last.name}"]


def update(*, sources: Sources, json: Json = False) -> None:
    """List the upstream releases that are newer than the recipes.

    Also lists newer releases of the wheels that recipes pin, such as b12x, and of torch, NCCL, CUTLASS DSL and the CUTLASS in
    FlashInfer, with their age. Reads the package index. Exit code 1 if an engine has a newer release than its newest recipe.
    """
    options = sources.run_options()
    newer, wheels = new_recipe.newer_releases(options), newer_wheels(options)
    if json:
        console.json_data([*newer, *wheels])
    else:
        _show_newer(newer, wheels)
    if newer:
        raise typer.Exit(1)


def _show_newer(newer: Sequence[NewerRelease], wheels: Sequence[NewerWheel]) -> None:
    if newer:
        command = "sm120kit recipe new"
        rows = ((f"{r.engine} {r.version}", r.uploaded, r.newest_recipe, f"{command} {r.engine}@{r.version}") for r in newer)
        console.table(("release", "uploaded", "newest recipe", "command"), rows)
    else:
        console.data("no release is newer than the recipes")
    if wheels:
        console.table(
            ("wheel", "pinned", "newest", "days old", "pinned by"),
            ((w.distribution, w.pinned, w.newest, "" if w.days is None else w.days, ", ".join(w.recipes)) for w in wheels),
        )
