"""``sm120kit patch rebase``: move a series to another version."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sm120kit import patches
from sm120kit.cli.options import Json, SourceRecipeName, Sources, recipe_names
from sm120kit.core import console
from sm120kit.core.data_roots import data_root, top_root, writable_data_root
from sm120kit.core.errors import PatchConflict
from sm120kit.patches import rebase as rebasing
from sm120kit.patches.checkout import OVERRIDES, PATCHES
from sm120kit.recipes.target import pinned_versions, resolve_source


def rebase(
    recipe: SourceRecipeName,
    onto: Annotated[
        str,
        typer.Option("--onto", metavar="RECIPE", autocompletion=recipe_names, help="The recipe whose version to move to."),
    ],
    into: Annotated[Path, typer.Option("--into", metavar="DIR", help="New or empty directory to resolve conflicts in.")],
    *,
    sources: Sources,
    json: Json = False,
) -> None:
    """Move a series to the version of another recipe.

    Git picks each patch onto the new version in DIR. At a conflict it stops: resolve it as in any `git rebase`, then
    `sm120kit patch export` writes the files. Without conflicts they are written at once. A patch that changed becomes a variant
    for the new version; what the series is for the old version stays.
    """
    options = sources.run_options()
    root, key = writable_data_root() / PATCHES, options.workspace.key()
    old, new = (resolve_source(name, options) for name in (recipe, onto))
    recipes = (old.recipe, new.recipe)
    overrides = data_root() / OVERRIDES
    move = rebasing.SeriesMove(old.tree, new.unpatched_tree, recipes, top_root() / PATCHES, overrides, key)
    progress = rebasing.begin(move, into)
    source = patches.EditedSource(new.recipe, new.pin, new.inside, pinned_versions(options))
    changed = [] if progress.conflicts else patches.export_edits(into, source, root, key)
    if json:
        console.json_data({"states": progress.states, "conflicts": progress.conflicts, "changed": changed})
    else:
        console.table(("patch", "state"), progress.states.items())
    if progress.conflicts:
        raise PatchConflict(
            "\n".join([f"git stopped at a conflict in {into}:", *(f"  {path}" for path in progress.conflicts)]),
            f"there: edit these files, git add, git rebase --continue; then sm120kit patch export {onto} --from {into}",
        )
    if not json:
        for file in changed:
            console.data(f"{'wrote' if file.exists() else 'removed'} {file}")
        console.info(f"{into}: the series of {onto} as commits, as `sm120kit patch edit` creates it")
        if changed:
            console.info(f"next: sm120kit patch check {onto}, which names what is to be proved; sm120kit recipe lock")
