"""``sm120kit patch``: check and edit the patch series, and their state on recipes."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from sm120kit import patches, recipes
from sm120kit.cli.options import (
    Json,
    PatchedProject,
    PatchName,
    SourceRecipeName,
    Sources,
    argument,
    option,
    patches_root,
    recipe_names,
)
from sm120kit.core import console
from sm120kit.core.data_roots import data_root, top_root, user_repository, writable_data_root
from sm120kit.core.errors import PatchConflict
from sm120kit.patches import rebase as rebasing
from sm120kit.patches.checkout import OVERRIDES, PATCHES
from sm120kit.patches.local import read_local, read_source
from sm120kit.patches.patch_records import PatchState
from sm120kit.patches.series import wanted
from sm120kit.recipes.default_recipes import unproven
from sm120kit.recipes.target import pinned_versions, resolve, resolve_source, resolve_sources, source_with
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
        argument("RECIPE", "Recipes, by name or file; default: all that have a source.", autocompletion=recipe_names),
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
        argument("RECIPE", "Also apply the series of its projects to this recipe's source.", autocompletion=recipe_names),
    ] = None,
    *,
    sources: Sources,
    json: Json = False,
) -> None:
    """Check that the series are well-formed and apply.

    Each patch of a recipe that a bare engine name builds must have a proof on that recipe, or a test if it has no probe. The
    series are applied only if RECIPE is given. Exit code 1 if a check fails.
    """
    options = sources.run_options()
    source = resolve_source(recipe, options) if recipe else None
    problems = patches.lint(patches_root())
    problems += () if problems else unproven(options)
    states = source.statuses if source and not problems else ()
    unfit = [status for status in states if status.state in (PatchState.CONFLICTS, PatchState.ALREADY_UPSTREAM)]
    if json:
        console.json_data({"problems": [asdict(p) for p in problems], "unfit": [asdict(s) for s in unfit]})
    else:
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
    into: Annotated[Path, option("--into DIR", "New or empty directory.")],
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
    from_: Annotated[Path, option("--from DIR", "A directory of `sm120kit patch edit` or `rebase`.")],
    overwrite: Annotated[
        list[str] | None,
        option("--overwrite PROJECT/SLUG", "Replace this patch although it is for other versions; repeatable."),
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
    _print_changed(changed)
    console.info(f"{len(changed)} files changed")
    for problem in patches.lint(root):
        if problem.file in changed:
            console.info(str(problem))


RecipeOption = Annotated[str, option("--recipe RECIPE", "Recipe whose version the patch is for.", autocompletion=recipe_names)]


@dataclass(frozen=True)
class ImportOptions:
    """Where an imported patch comes from, and where it goes."""

    recipe: RecipeOption = "flashinfer"
    project: Annotated[str, option("--project PROJECT", "Project of the patch; default: the one that has its files.")] = ""
    name: Annotated[str, option("--name SLUG", "Name of the file; default: from the subject.")] = ""
    strip: Annotated[
        int | None, option("--strip -p N", "Remove N leading directories from paths, a/ or b/ included.", min=0, max=99)
    ] = None
    directory: Annotated[str, option("--directory DIR", "Paths are below this directory, such as vllm for the package.")] = ""


def import_(
    source: Annotated[str, argument("SOURCE", "A file or directory of diffs or mails; or a pull request, owner/project#123.")],
    *,
    target: ImportOptions,
    sources: Sources,
    json: Json = False,
) -> None:
    """Make patch files of a diff, mail or pull request.

    What `git apply` or `patch -p1` takes is applied to the recipe's patched source and appended to the series of its project,
    for that version; of several, every patch or none. A directory stands for the files of its `series`, or by name. Tests and
    documentation that the source does not have are left out. Missing trailers are added as placeholders, which
    `sm120kit patch check` reports. No file is replaced.
    """
    root, options = writable_data_root() / PATCHES, sources.run_options()
    given = Path(source)
    read = read_local([given], options.origin) if given.is_dir() else read_source(given, options.origin)
    foreign = patches.of_the_source(read)
    place = patches.ImportTarget(target.project, target.name, target.strip, target.directory)
    found = source_with(resolve(target.recipe, options), foreign[0], place)
    imported = patches.import_patches(foreign, found.tree, place, root)
    if json:
        console.json_data([asdict(each) for each in imported])
        return
    for each in imported:
        console.data(f"wrote {each.file}")
        for path in each.left_out:
            console.info(f"left out {path}: the source does not have it")
        for problem in each.to_fill_in:
            console.info(str(problem))


def drop(
    patch: PatchName,
    with_dependants: Annotated[
        bool, option("--with-dependants", "Also remove the patches that require it or do not apply without it.")
    ] = False,
    *,
    sources: Sources,
    json: Json = False,
) -> None:
    """Remove a patch from its series.

    Its file and its proof are removed as well. Refused if another patch names it in Requires, or no longer applies without it
    to the version of a recipe, whose source is fetched if it is not cached.
    """
    root = writable_data_root() / PATCHES
    dropped = patches.find(root, patch)
    required_by = {
        source.recipe: patches.dependents(dropped, source.unpatched_tree, root, data_root() / OVERRIDES)
        for source in resolve_sources((), sources.run_options())
        if source.has_version_of(dropped)
    }
    changed = patches.drop(dropped, root, required_by, dependants=with_dependants)
    if json:
        console.json_data(changed)
    else:
        _print_changed(changed)


def _print_changed(changed: Sequence[Path]) -> None:
    for file in changed:
        console.data(f"{'wrote' if file.exists() else 'removed'} {file}")


def rebase(
    recipe: SourceRecipeName,
    onto: Annotated[str, option("--onto RECIPE", "The recipe whose version to move to.", autocompletion=recipe_names)],
    into: Annotated[Path, option("--into DIR", "New or empty directory to resolve conflicts in.")],
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
    names, overrides = (old.recipe, new.recipe), data_root() / OVERRIDES
    settled = recipes.locate(onto).is_relative_to(data_root())
    move = rebasing.SeriesMove(old.tree, new.unpatched_tree, names, top_root() / PATCHES, overrides, key, settled)
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
        _print_changed(changed)
        console.info(f"{into}: the series of {onto} as commits, as `sm120kit patch edit` creates it")
        if changed:
            console.info(f"next: sm120kit patch check {onto}, which names what is to be proved; sm120kit recipe lock")
