"""The tile table of a FlashInfer, without and with the patches: properties of each kernel."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from sm120kit import patches, recipes
from sm120kit.core import reporting
from sm120kit.core.digests import digest_of
from sm120kit.core.record_files import read_record, write_record
from sm120kit.core.records import Toolchain
from sm120kit.core.workspace import Workspace, mark_used
from sm120kit.kernels.kernel_records import TileFacts
from sm120kit.kernels.tiles import introspect, listing
from sm120kit.patches.patch_records import PatchedTree
from sm120kit.recipes.locked_toolchain import compilers
from sm120kit.recipes.target import FlashInferTarget


def tiles(target: FlashInferTarget, *, patched: bool) -> tuple[TileFacts, ...]:
    """The tiles of a FlashInfer recipe, with or without its series."""
    tree = target.tree if patched else target.source.unpatched_tree
    return tile_table(target.recipe, tree, compilers(target), target.options.workspace)


def cutlass(target: FlashInferTarget, *, patched: bool) -> Path:
    """The directory of the CUTLASS that the kernels of a recipe are compiled with."""
    tree = target.tree if patched else target.source.unpatched_tree
    (inside,) = (inside for inside in target.recipe.inside if inside.project == "cutlass")
    return export_tree(tree, target.options.workspace) / inside.path


def tile_table(
    recipe: recipes.FlashInferRecipe, tree: PatchedTree, tools: Toolchain, workspace: Workspace
) -> tuple[TileFacts, ...]:
    """The facts of every tile that a tree generates for SM120, and of the K=64 candidates.

    Only those tiles are compiled whose headers, flags or compiler have changed; the tree is exported only for that.

    Raises:
        CheckFailed: the tree's generators are not those of a supported FlashInfer version.
        CompileFailed: the headers themselves do not compile, or the compiler crashed.
        ResourceUnavailable: the compiler ran out of memory.
    """
    key = digest_of([tree.tree, recipe.name, introspect.toolchain_key(tools), introspect.own_sources()])
    record = workspace.cache / "tiles" / "tables" / f"{key}.json"
    with workspace.exclusive(f"tiles-{tree.tree}"):
        if record.is_file():
            return read_record(introspect.TileFactsRecord, record).facts
        directory = export_tree(tree, workspace)
        facts = _measured(recipe.name, listing.instantiations(directory), directory, tools, workspace)
        write_record(record, introspect.TileFactsRecord(facts))
    return facts


def generated_tiles(target: FlashInferTarget, tools: Toolchain, modules: Collection[str]) -> tuple[TileFacts, ...]:
    """The facts of the tiles that modules of a recipe, by name, consist of. For errors see :func:`tile_table`."""
    workspace = target.options.workspace
    with workspace.exclusive(f"tiles-{target.tree.tree}"):
        directory = export_tree(target.tree, workspace)
        calls = [call for call in listing.instantiations(directory) if call.generated and call.is_in(modules)]
        return _measured(target.recipe.name, calls, directory, tools, workspace)


def _measured(
    name: str, calls: Sequence[listing.Instantiation], directory: Path, tools: Toolchain, workspace: Workspace
) -> tuple[TileFacts, ...]:
    with reporting.task(f"tiles of {name}", len(calls)) as advance:
        measured = introspect.measure(calls, directory, tools, workspace.cache / "tiles", advance)
    return tuple(replace(fact, generated=call.generated) for call in calls for fact in measured[call])


def export_tree(tree: PatchedTree, workspace: Workspace) -> Path:
    """Write a tree's files to the cache, for reading only; files with other content are written again."""
    directory = workspace.cache / "trees" / tree.tree
    with workspace.exclusive(f"tree-{tree.tree}"):
        patches.materialise(tree, directory)
        mark_used(directory)
    return directory
