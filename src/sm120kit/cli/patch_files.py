"""``sm120kit patch import`` and ``drop``: single patch files."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from sm120kit import patches
from sm120kit.cli.options import Json, PatchName, Sources, recipe_names
from sm120kit.core import console
from sm120kit.core.data_roots import data_root, writable_data_root
from sm120kit.patches import Patch
from sm120kit.patches.checkout import OVERRIDES, PATCHES
from sm120kit.patches.local import read_source
from sm120kit.recipes.target import PatchSource, resolve, resolve_sources, source_with
from sm120kit.sources.run_options import Options

RecipeOption = Annotated[
    str,
    typer.Option("--recipe", metavar="RECIPE", autocompletion=recipe_names, help="Recipe whose version the patch is for."),
]


@dataclass(frozen=True)
class ImportOptions:
    """Where an imported patch comes from, and where it goes."""

    repository: Annotated[
        Path | None, typer.Option("--repository", metavar="DIR", help="SOURCE is a commit of this git repository.")
    ] = None
    recipe: RecipeOption = "flashinfer"
    project: Annotated[
        str, typer.Option("--project", metavar="PROJECT", help="Project of the patch; default: the one that has its files.")
    ] = ""
    name: Annotated[str, typer.Option("--name", metavar="SLUG", help="Name of the file; default: from the subject.")] = ""
    strip: Annotated[
        int | None,
        typer.Option(
            "--strip", "-p", min=0, max=99, metavar="N", help="Remove N leading directories from paths, a/ or b/ included."
        ),
    ] = None
    directory: Annotated[
        str, typer.Option("--directory", metavar="DIR", help="Paths are below this directory, such as vllm for the package.")
    ] = ""


def import_(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="A diff, mail or mailbox; a pull request, owner/project#123; or a commit of --repository."
        ),
    ],
    *,
    target: ImportOptions,
    sources: Sources,
    json: Json = False,
) -> None:
    """Make patch files of a diff, mail, commit or pull request.

    What `git apply` takes is applied to the recipe's patched source and appended to the series of its project, for that
    version; of a mailbox, every patch or none. Tests and documentation that the source does not have are left out. Missing
    trailers are added as placeholders, which `sm120kit patch check` reports. No file is replaced.
    """

    root, options = writable_data_root() / PATCHES, sources.run_options()
    where = target.repository
    read = (patches.read_commit(where, source),) if where else read_source(Path(source), options.origin)
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
        bool, typer.Option("--with-dependants", help="Also remove the patches that require it or do not apply without it.")
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
        for source in _sources_for(dropped, sources.run_options())
    }
    _print_changed(patches.drop(dropped, root, required_by, dependants=with_dependants), json)


def _sources_for(patch: Patch, options: Options) -> list[PatchSource]:
    """The sources of recipes that contain a version that a patch is for."""
    return [source for source in resolve_sources((), options) if source.has_version_of(patch)]


def _print_changed(changed: list[Path], json: bool) -> None:
    if json:
        console.json_data(changed)
        return
    for file in changed:
        console.data(f"{'wrote' if file.exists() else 'removed'} {file}")
