"""The tile table of a FlashInfer, without and with the patches: properties of each kernel."""

from __future__ import annotations

from pathlib import Path

from sm120kit import patches, recipes
from sm120kit.core.records import Toolchain
from sm120kit.core.workspace import Workspace, mark_used
from sm120kit.kernels import tiles as tile_facts
from sm120kit.kernels.kernel_records import TileFacts
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
    """What each tile of a tree compiles to; the tree is exported only if that is not cached."""
    with workspace.exclusive(f"tiles-{tree.tree}"):
        cached = tile_facts.cached_table(tree.tree, recipe.name, tools, workspace.cache)
        return cached or tile_facts.table(export_tree(tree, workspace), tree.tree, recipe.name, tools, workspace.cache)


def export_tree(tree: PatchedTree, workspace: Workspace) -> Path:
    """Write a tree's files to the cache, for reading only; files with other content are written again."""
    directory = workspace.cache / "trees" / tree.tree
    with workspace.exclusive(f"tree-{tree.tree}"):
        patches.materialise(tree, directory)
        mark_used(directory)
    return directory
