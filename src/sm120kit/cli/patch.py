"""``sm120kit patch``: check and edit the patch series, and their state on recipes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sm120kit import patches
from sm120kit.cli.options import Json, PatchedProject, SourceRecipeName, Sources, patches_root, recipe_names
from sm120kit.core import console
from sm120kit.core.data_roots import data_root, user_repository, writable_data_root
from sm120kit.patches.checkout import PATCHES
from sm120kit.patches.patch_records import PatchState
from sm120kit.patches.wanted import wanted
from sm120kit.recipes.default_recipes import unproven
from sm120kit.recipes.target import pinned_versions, resolve_source, resolve_sources
from sm120kit.sources.run_options import Options


def list_(json: Json = False) -> None:
    """List the patches.

    With the versions that each applies to, its upstream status, and the data types, tiles or hardware that it matters for. In a
    repository of `sm120kit init` also where each comes from, and what overrides what.
    """
    listed = [patch for project in patches.projects(patches_root()) for patch in patches.load(patches_root(), project)]
    if json:
        rows = (
            {
                "project": p.project,
                "slug": p.slug,
                "subject": p.subject,
                "sha256": p.sha256,
                "from": patches.origin(patches_root(), p),
                **dict(p.trailers),
            }
            for p in listed
        )
        console.json_data(list(rows))
        return
    trailers = ("Applies-To", "Upstream-Status", "Matters-For", "No-Effect-For")
    own = bool(user_repository())
    origins = ([patches.origin(patches_root(), patch)] * own for patch in listed)
    lines = ((patch.name, *where, *map(patch.trailer, trailers)) for patch, where in zip(listed, origins, strict=True))
    console.table(("patch", *["from"] * own, *trailers), lines)


def status(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE", autocompletion=recipe_names, help="Recipes, by name or file; default: all that have a source."
        ),
    ] = None,
    *,
    sources: Sources,
    json: Json = False,
) -> None:
    """Show the state of each patch on each recipe's version.

    A patch applies, is already upstream, is not for this version, or conflicts; of a conflict, the file and line. A FlashInfer
    recipe has the series of FlashInfer and CUTLASS, a recipe of an engine that of the engine. Below are the changes of these
    projects that are wanted and that no series has, with the reason.
    """
    resolved = resolve_sources(names or (), sources.run_options())
    states = [(source.recipe, state) for source in resolved for state in source.statuses]
    missing = wanted(data_root() / PATCHES, {part.project for source in resolved for part in source.projects})
    if json:
        rows = [{"recipe": name, **asdict(state)} for name, state in states]
        console.json_data([*rows, *({"recipe": "", "state": "wanted", **asdict(each)} for each in missing)])
        return
    console.table(
        ("recipe", "patch", "version", "state", "detail"),
        ((name, f"{s.project}/{s.slug}", s.version, s.state, s.detail.strip()) for name, s in states),
    )
    if missing:
        console.table(("wanted", "reason"), ((f"{each.project}/{each.slug}", each.reason) for each in missing))


def check(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE", autocompletion=recipe_names, help="Also apply the series of its projects to this recipe's source."
        ),
    ] = None,
    fix: Annotated[bool, typer.Option("--fix", help="First rewrite the files in normal form.")] = False,
    *,
    sources: Sources,
    json: Json = False,
) -> None:
    """Check that the series are well-formed and apply.

    Each patch of a recipe that a bare engine name builds must have a proof on that recipe, or a test if it has no probe. The
    series are applied only if RECIPE is given. Exit code 1 if a check fails.
    """

    root = writable_data_root() / PATCHES if fix else patches_root()
    options = sources.run_options()
    source = resolve_source(recipe, options) if recipe else None
    wrote = patches.fix(root) if fix else []
    problems = patches.lint(root)
    problems += () if problems else unproven(options)
    states = source.statuses if source and not problems else ()
    unfit = [status for status in states if status.state in (PatchState.CONFLICTS, PatchState.ALREADY_UPSTREAM)]
    if json:
        console.json_data({"wrote": wrote, "problems": [asdict(p) for p in problems], "unfit": [asdict(s) for s in unfit]})
    else:
        for file in wrote:
            console.info(f"wrote {file}")
        for problem in problems:
            console.data(str(problem))
        for s in unfit:
            console.data(f"{s.project}/{s.slug}: {s.state} in {s.project} {s.version}\n{s.detail}")
        if not problems and not unfit:
            fits = [status for status in states if status.state is PatchState.APPLIES]
            applied = f"; {len(fits)} patches apply" if recipe else ""
            console.data(f"ok {', '.join(patches.projects(patches_root()))}{applied}")
    if problems or unfit:
        raise typer.Exit(1)


def edit(
    recipe: SourceRecipeName,
    into: Annotated[Path, typer.Option("--into", metavar="DIR", help="New or empty directory.")],
    project: PatchedProject = "",
    *,
    sources: Sources,
) -> None:
    """Create a git repository with the series as commits.

    Change the commits with git; `sm120kit patch export` writes them back to the patch files.
    """
    options = sources.run_options()
    source = resolve_source(recipe, options, project)
    patches.edit(source.tree, into, source.recipe, options.workspace.key())
    console.data(f"{into}: {len(source.tree.patches)} patches on branch series")
    console.info(f"when done: sm120kit patch export {recipe} --from {into}{f' --project {project}' * bool(project)}")


def export(
    recipe: SourceRecipeName,
    from_: Annotated[Path, typer.Option("--from", metavar="DIR", help="A directory of `sm120kit patch edit` or `rebase`.")],
    overwrite: Annotated[
        list[str] | None,
        typer.Option(
            "--overwrite", metavar="PROJECT/SLUG", help="Replace this patch although it is for other versions; repeatable."
        ),
    ] = None,
    project: PatchedProject = "",
    *,
    sources: Sources,
    json: Json = False,
) -> None:
    """Write the commits of a `patch edit` repository to the patch files.

    The file of an unchanged commit stays as it is. A commit ported from another version becomes a variant. If the series
    changed since, both are merged patch by patch; one that both changed is merged as git merges it. Nothing is written if git
    does not, or if the directory was made from another recipe.
    """
    options = Options(sources.workspace())
    resolved = resolve_source(recipe, options, project)
    root, key = writable_data_root() / PATCHES, options.workspace.key()
    source = patches.EditedSource(resolved.recipe, resolved.pin, resolved.inside, pinned_versions(options))
    changed = patches.export_edits(from_, source, root, key, overwrite or ())
    if json:
        console.json_data([str(path) for path in changed])
        return
    for file in changed:
        console.data(f"{'wrote' if file.exists() else 'removed'} {file}")
    console.info(f"{len(changed)} files changed")
    for problem in patches.lint(root):
        if problem.file in changed:
            console.info(str(problem))
