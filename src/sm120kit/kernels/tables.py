"""The tile table of an engine, without and with the patches: properties of each kernel, and results of its emulation."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sm120kit import patches, recipes
from sm120kit.core import reporting
from sm120kit.core.errors import BadRecipe, CompileFailed, UnknownName
from sm120kit.core.records import Toolchain
from sm120kit.core.state import Workspace, mark_used
from sm120kit.kernels import emulation
from sm120kit.kernels import tiles as tile_facts
from sm120kit.kernels.records import Emulation, NumericResult, NumericStatus, TileFacts
from sm120kit.patches.records import PatchedTree
from sm120kit.recipes.target import EngineTarget, FlashInferTarget, Target
from sm120kit.recipes.toolchain import compilers


def tiles(target: Target, *, patched: bool, emulated: bool = False) -> tuple[TileFacts, ...]:
    """The tiles of a recipe's engine, with or without its series, and with cached results of their emulation.

    Those of vLLM are the ones of its own sources, with the CUTLASS of its FlashInfer recipe (:func:`require_tiles`).

    ``emulated`` runs the emulations that are not cached, half a minute for each shape.
    """
    flashinfer, workspace = target.flashinfer, target.options.workspace
    tools = compilers(flashinfer)
    tree = flashinfer.tree if patched else flashinfer.unpatched_tree
    (cutlass,) = (inside for inside in flashinfer.recipe.inside if inside.project == "cutlass")
    directory = export_tree(tree, workspace) / cutlass.path
    if isinstance(target, EngineTarget):
        facts = _engine_table(target, patched, directory, tools)
    else:
        facts = tile_table(target.recipe, tree, tools, workspace)
    emulator = emulation.Emulator(directory / "include", tools, workspace.cache, tree.tree)
    return with_numbers(facts, emulator, f"{target.recipe.name}, {'patched' if patched else 'unpatched'}", emulated)


def _engine_table(target: EngineTarget, patched: bool, cutlass: Path, tools: Toolchain) -> tuple[TileFacts, ...]:
    """What the tiles of an engine's own source compile to with a CUTLASS directory."""
    recipe, workspace = target.recipe, target.options.workspace
    assert target.kernel_source is not None
    tree = target.kernel_source.tree if patched else target.kernel_source.unpatched_tree
    carrier = target.flashinfer.tree if patched else target.flashinfer.unpatched_tree
    identity = f"{tree.tree} {carrier.tree}"
    with workspace.exclusive(f"tiles-{tree.tree}"):
        cached = tile_facts.cached_table(identity, recipe.name, tools, workspace.cache)
        return cached or tile_facts.table(export_tree(tree, workspace), identity, recipe.name, tools, workspace.cache, cutlass)


def require_tiles(target: Target) -> Target:
    """Return ``target`` if its tiles can be listed: a FlashInfer recipe, or one with the source of an engine's own kernels.

    Raises:
        UnknownName: it is the recipe of another engine.
        BadRecipe: the engine requires another CUTLASS than its FlashInfer carries.
    """
    if isinstance(target, FlashInferTarget):
        return target
    recipe, carried = target.recipe, {inside.project: inside.version for inside in target.flashinfer.recipe.inside}
    if recipe.cutlass is None:
        raise UnknownName(
            f"{recipe.name} has no source of kernels of {recipe.engine} in its recipe: only its official binaries",
            f"sm120kit tiles {recipe.flashinfer} lists the tiles of its FlashInfer; sm120kit inspect lists kernels of a wheel",
        )
    _, required = recipe.cutlass
    if required != carried.get("cutlass"):
        raise BadRecipe(
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


def with_numbers(facts: Sequence[TileFacts], emulator: emulation.Emulator, what: str, emulated: bool) -> tuple[TileFacts, ...]:
    """Each tile with the result of its emulation; tiles with the same mainloop share a result.

    ``what`` names the table in messages; ``emulated`` runs the emulations that are not cached.
    """
    mainloops = {fact: _mainloop(fact) for fact in facts}
    distinct = [mainloop for mainloop in dict.fromkeys(mainloops.values()) if isinstance(mainloop, emulation.Mainloop)]
    results: dict[emulation.Mainloop, Emulation | CompileFailed | None] = {
        mainloop: emulator.cached(mainloop) for mainloop in distinct
    }
    if emulated:
        missing = [mainloop for mainloop in distinct if not results[mainloop]]
        if missing:
            reporting.info(f"emulating {len(missing)} mainloops of {what}, half a minute for each shape")
        with reporting.task(f"emulating {what}", len(missing)) as advance:
            results |= emulator.run_all(missing, advance)
    return tuple(
        replace(
            fact,
            numbers=NumericResult(why=mainloop) if isinstance(mainloop, str) else _numbers(results[mainloop], fact, mainloop),
        )
        for fact, mainloop in mainloops.items()
    )


def _mainloop(fact: TileFacts) -> emulation.Mainloop | str:
    """The mainloop to emulate for a tile, or the reason why there is none."""
    if not fact.compiles:
        return "does not compile"
    if fact.scheduler == "stream-k":
        return "its scheduler, which divides K among CTAs, is not emulated"
    if fact.tile.dtype not in emulation.DTYPES:
        return f"{fact.tile.dtype} is not emulated"
    pingpong = fact.schedule == "pingpong"
    whole_kernel = fact.tile.grouped and not pingpong
    return emulation.Mainloop.of(fact.tile, pingpong=pingpong, stages=fact.stages, whole_kernel=whole_kernel)


def _not_run(fact: TileFacts, mainloop: emulation.Mainloop) -> list[str]:
    """The parts of a tile's kernel that its emulation does not run."""
    parts = {
        f"{fact.tile.epilogue} epilogue": fact.tile.epilogue != "none",
        f"{fact.tile.output} output": fact.tile.output != "bf16",
        "its launcher's epilogue": fact.tile.family.startswith("groupwise"),
        "tile scheduler": not mainloop.whole_kernel,
    }
    return [part for part, left_out in parts.items() if left_out]


def _numbers(result: Emulation | CompileFailed | None, fact: TileFacts, mainloop: emulation.Mainloop) -> NumericResult:
    """The result of an emulation, for one of the tiles that share it."""
    if result is None:
        return NumericResult(why="not emulated yet")
    if isinstance(result, CompileFailed):
        return NumericResult(why=f"the emulation does not compile: {result.message}")
    if result.passed:
        not_run = _not_run(fact, mainloop)
        proof = NumericStatus.MAINLOOP_PROVEN if not_run else NumericStatus.PROVEN
        return NumericResult(proof, f"not run: {', '.join(not_run)}" if not_run else "", result.outputs)
    first = next((f"{finding.kind}: {finding.first[0]}" for finding in result.findings), "")
    differ = f"{result.mismatches:,} of {result.outputs:,} outputs differ"
    return NumericResult(NumericStatus.WRONG, result.signature or first or differ, result.outputs, result.mismatches)
