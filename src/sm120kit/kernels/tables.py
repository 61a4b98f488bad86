"""The tile table of an engine, without and with the patches: properties of each kernel."""

from __future__ import annotations

import shutil
from pathlib import Path

from sm120kit import patches, recipes
from sm120kit.core.errors import BadInput, NotFound
from sm120kit.core.records import Toolchain
from sm120kit.core.workspace import Workspace, mark_used
from sm120kit.kernels import tiles as tile_facts
from sm120kit.kernels.kernel_records import TileFacts
from sm120kit.patches.patch_records import PatchedTree
from sm120kit.recipes.locked_toolchain import compilers
from sm120kit.recipes.target import EngineTarget, Target


def tiles(target: Target, *, patched: bool) -> tuple[TileFacts, ...]:
    """The tiles of a recipe's engine, with or without its series.

    Those of vLLM are the ones of its own sources, with the CUTLASS of its FlashInfer recipe (:func:`require_tiles`).
    """
    flashinfer, workspace = target.flashinfer, target.options.workspace
    tools = compilers(flashinfer)
    if target.engine:
        return _engine_table(target.engine, patched, cutlass(target, patched=patched), tools)
    tree = flashinfer.tree if patched else flashinfer.source.unpatched_tree
    return tile_table(flashinfer.recipe, tree, tools, workspace)


def cutlass(target: Target, *, patched: bool) -> Path:
    """The directory of the CUTLASS that the kernels of a recipe are compiled with."""
    tree = target.flashinfer.tree if patched else target.flashinfer.source.unpatched_tree
    (inside,) = (inside for inside in target.flashinfer.recipe.inside if inside.project == "cutlass")
    return export_tree(tree, target.options.workspace) / inside.path


def _engine_table(target: EngineTarget, patched: bool, cutlass: Path, tools: Toolchain) -> tuple[TileFacts, ...]:
    """What the tiles of an engine's own source compile to with a CUTLASS directory."""
    recipe, workspace = target.recipe, target.options.workspace
    assert target.kernel_source is not None
    tree = target.kernel_source.tree if patched else target.kernel_source.unpatched_tree
    carrier = target.flashinfer.tree if patched else target.flashinfer.source.unpatched_tree
    identity = f"{tree.tree} {carrier.tree}"
    with workspace.exclusive(f"tiles-{tree.tree}"):
        cached = tile_facts.cached_table(identity, recipe.name, tools, workspace.cache)
        return cached or tile_facts.table(export_tree(tree, workspace), identity, recipe.name, tools, workspace.cache, cutlass)


def require_tiles(target: Target) -> Target:
    """Return ``target`` if its tiles can be listed: a FlashInfer recipe, or one with the source of an engine's own kernels.

    Raises:
        NotFound: it is the recipe of another engine.
        BadInput: the engine requires another CUTLASS than its FlashInfer carries.
    """
    if target.engine is None:
        return target
    recipe, carried = target.engine.recipe, {inside.project: inside.version for inside in target.flashinfer.recipe.inside}
    if recipe.cutlass is None:
        raise NotFound(
            f"{recipe.name} has no source of kernels of {recipe.engine} in its recipe: only its upstream binaries",
            f"sm120kit tiles {recipe.flashinfer} lists the tiles of its FlashInfer; sm120kit inspect lists kernels of a wheel",
        )
    _, required = recipe.cutlass
    if required != carried.get("cutlass"):
        raise BadInput(
            f"{recipe.name} requires cutlass {required}; {recipe.flashinfer} carries {carried.get('cutlass')}",
            "name a FlashInfer recipe that carries the version that the engine requires",
        )
    return target


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
        if directory.is_dir() and not patches.index_file(directory).is_file():  # of a version that did not check files again
            shutil.rmtree(directory)
        patches.materialise(tree, directory)
        mark_used(directory)
    return directory
