"""``sm120kit patch rebase``: move a series to another version."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from sm120kit.cli.options import Json, Sources, recipe_names
from sm120kit.core import console
from sm120kit.core.data_roots import data_root, top_root, writable_data_root
from sm120kit.core.errors import PatchConflict
from sm120kit.patches import rebase as rebasing
from sm120kit.patches.checkout import OVERRIDES, PATCHES
from sm120kit.patches.rebase import RebaseProgress, SeriesMove
from sm120kit.recipes.target import pinned_versions, resolve_source
from sm120kit.sources.run_options import Options


@dataclass(frozen=True)
class RebaseStep:
    """What to do: start a rebase with ``onto`` and ``into``, or continue or abort that of a directory."""

    onto: Annotated[
        str | None,
        typer.Option("--onto", metavar="RECIPE", autocompletion=recipe_names, help="The recipe whose version to move to."),
    ] = None
    into: Annotated[
        Path | None, typer.Option("--into", metavar="DIR", help="New or empty directory to resolve conflicts in.")
    ] = None
    continue_: Annotated[
        Path | None, typer.Option("--continue", metavar="DIR", help="Go on with the rebase in this directory.")
    ] = None
    abort: Annotated[
        Path | None, typer.Option("--abort", metavar="DIR", help="Remove this directory; the series stays as it is.")
    ] = None


def rebase(
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="RECIPE", autocompletion=recipe_names, help="The recipe whose series is moved."),
    ] = None,
    *,
    step: RebaseStep,
    sources: Sources,
    json: Json = False,
) -> None:
    """Move a series to the version of another recipe.

    Each patch is merged three-way into the new version. At a conflict the command stops: resolve it in DIR, `git add` the
    files, and go on with --continue. When all patches are moved, those that changed are written as variants for the new
    version; those of the old version stay.
    """
    starts = recipe is not None and step.onto is not None and step.into is not None
    given = [value is not None for value in (recipe, step.onto, step.into)]
    forms = [all(given), step.continue_ is not None, step.abort is not None]
    if forms.count(True) != 1 or (any(given) and not starts):
        raise typer.BadParameter("expected RECIPE --onto RECIPE --into DIR, or --continue DIR, or --abort DIR")
    options = sources.run_options()
    root = writable_data_root()
    if step.abort:
        rebasing.abort(step.abort, root / PATCHES, options.workspace.key())
        console.info(f"removed {step.abort}")
        return
    directory = step.into or step.continue_
    assert directory is not None
    names = (recipe, step.onto) if recipe and step.onto else rebasing.recipes_of(directory, options.workspace.key())
    move = _move(names, options)
    progress = (rebasing.resume if step.continue_ else rebasing.begin)(move, directory)
    _report(progress, move, directory, json=json)


def _move(names: tuple[str, str], options: Options) -> SeriesMove:
    old, onto = (resolve_source(name, options) for name in names)
    recipes = (old.recipe, onto.recipe)
    key, pinned = options.workspace.key(), pinned_versions(options)
    return SeriesMove(old.tree, onto.unpatched_tree, recipes, top_root() / PATCHES, data_root() / OVERRIDES, key, pinned)


def _report(progress: RebaseProgress, move: SeriesMove, directory: Path, *, json: bool) -> None:
    """Print how far the rebase came.

    Raises:
        PatchConflict: a patch has conflicts.
    """

    if json:
        console.json_data(progress)
    else:
        console.table(("patch", "state", "detail"), ((m.name, m.state, m.detail.strip()) for m in progress.moves))
    if progress.conflicts:
        raise PatchConflict(
            "\n".join([f"{progress.moves[-1].name} has conflicts in {directory}:", *(f"  {p}" for p in progress.conflicts)]),
            f"edit these files, `git add` or `git rm` them, then sm120kit patch rebase --continue {directory}"
            f" (or --abort {directory})",
        )
    if json:
        return
    for file in progress.changed:
        console.data(f"{'wrote' if file.exists() else 'removed'} {file}")
    console.info(f"{directory}: the series of {move.recipes[1]} as commits, as `sm120kit patch edit` creates it")
    for name in progress.provable:
        console.info(f"next: sm120kit patch prove {name} --recipe {move.recipes[1]} --code --write")
    if progress.changed:
        console.info("then: sm120kit patch check; sm120kit recipe lock")
