"""``sm120kit recipe new`` and ``recipe update``: recipes of upstream releases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer
from packaging.utils import canonicalize_name
from packaging.version import Version

from sm120kit.cli import plugins
from sm120kit.cli.options import Json, Sources, argument, option, recipe_names
from sm120kit.core import console
from sm120kit.patches.patch_records import PatchStatus
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
    arguments: Annotated[
        bool, option("--arguments", "Also record the options of the engine's parser, in a temporary environment: 8 GB of disk.")
    ] = False


def new(
    release: Annotated[
        str,
        argument("ENGINE@VERSION", "A release, such as vllm@0.32.0, or vllm@latest for the newest.", autocompletion=_releases),
    ],
    like: Annotated[
        str, option("--like RECIPE", "Recipe to draft from; default: that of the nearest release.", autocompletion=recipe_names)
    ] = "",
    override: Annotated[
        list[str] | None,
        option(
            "--override NAME==VERSION",
            "Version that replaces what others require, if the wheels do not resolve without it; repeatable.",
        ),
    ] = None,
    *,
    results: ResultOptions,
    sources: Sources,
    json: Json = False,
) -> None:
    """Make the recipe of an upstream release.

    It is drafted from the nearest recipe: pinned by hash, with the FlashInfer that its METADATA requires, whose recipe is made
    as well if there is none. Files appear when the recipes are locked and planned, and the probes of patches compiled where
    sm12x-lab is installed. What a person has to decide is printed.
    """
    engine, version = new_recipe.parse_release(release)
    overrides = _overrides(override or [])
    if overrides and engine == "flashinfer":
        raise typer.BadParameter("wheels are overridden in recipes of vLLM and SGLang only", param_hint="--override")
    if results.arguments and (results.draft or engine == "flashinfer" or sources.mirror or sources.offline):
        raise typer.BadParameter("--arguments is for vLLM and SGLang, and without --draft, --offline and --mirror")
    request = new_recipe.NewRecipeRequest(engine, version, like, overrides, results.overwrite, results.draft)
    options = sources.run_options()
    effects: dict[str, str] = {}
    errors: dict[str, str] = {}
    with options.workspace.exclusive("recipe-new"), options.workspace.scratch() as directory:
        staged = new_recipe.RecipeMaker(request, options, directory).make()
        if not results.draft:
            new_recipe.plan(staged)
            if not staged[0].target.engine and (series_effects := plugins.function("series_effects")):
                effects, errors = series_effects(staged[0].target.flashinfer, options)
        if results.arguments:
            new_recipe.record_arguments(staged[-1])
        files = new_recipe.publish(staged)
    drafts = [each.draft for each in staged]
    states = [state for each in staged for state in each.states]
    decisions = [f"{each.name}: {text}" for each in drafts for text in each.decisions]
    decisions += [f"{name}: its probes do not compile on this source: {error}" for name, error in errors.items()]
    if json:
        data = {"files": [str(path) for path in files], "states": states, "decisions": decisions}
        console.json_data(data | {"notes": {each.name: each.notes for each in drafts}})
        return
    if states:
        _show_states(states, effects)
    _show_notes(drafts)
    for path in files:
        console.data(f"wrote {path}")
    console.data("\nto decide:" if decisions else "\nnothing to decide")
    for number, text in enumerate(decisions, 1):
        console.data(f"{number}. {text}")
    console.info("\n".join(["next:", *_next_steps(drafts[-1], draft=results.draft, recorded=results.arguments)]))


def _overrides(texts: Sequence[str]) -> dict[str, str]:
    versions = {}
    for text in texts:
        name, _, version = text.partition("==")
        try:
            versions[str(canonicalize_name(name, validate=True))] = str(Version(version))
        except ValueError as error:  # InvalidName and InvalidVersion
            raise typer.BadParameter(f"{text!r} is not NAME==VERSION", param_hint="--override") from error
    return versions


def _show_states(states: Sequence[PatchStatus], effects: Mapping[str, str]) -> None:
    """List the patches with their effects by patch, which the laboratory finds."""
    console.table(
        ("patch", "version", "state", "effect on its probes"),
        ((name := f"{s.project}/{s.slug}", s.version, s.state, effects.get(name, "")) for s in states),
    )


def _show_notes(drafts: Iterable[Draft]) -> None:
    console.table(
        ("recipe", "drafted from", "change"), ((each.name, each.template, text) for each in drafts for text in each.notes)
    )


def _next_steps(last: Draft, *, draft: bool, recorded: bool) -> list[str]:
    lock = [f"  sm120kit recipe lock {last.name}"] if draft else []
    if last.data["engine"] == "flashinfer":
        return [*lock, f"  sm120kit build {last.name}"]
    options = f"  nox -s arguments -- {last.name}  # the options of its parser, as with --arguments"
    return [*lock, *([] if recorded else [options]), f"  sm120kit build {last.name}"]


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
