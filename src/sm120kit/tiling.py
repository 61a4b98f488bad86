"""The tiles of an engine: what each compiles to, and what its numbers are, without and with the patches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sm120kit import console, emulate, recipe, sources, toolchain
from sm120kit import tiles as tile_facts
from sm120kit.errors import CompileFailed
from sm120kit.gitrepo import Repository
from sm120kit.records import Emulation, Numbers, PatchedTree, Proof, TileFacts, Toolchain
from sm120kit.trees import Options, patched_tree
from sm120kit.workspace import Workspace, publish_directory


def tiles(name: str, options: Options, *, patched: bool, emulated: bool = False) -> tuple[TileFacts, ...]:
    """The tiles of a recipe's engine, with or without its series applied, and what is known of their numbers.

    With ``emulated``, each mainloop that was not emulated before is, most of a minute each.
    """
    item = recipe.load(name)
    tools = toolchain.find(headers=item.headers)
    tree = patched_tree(item, options) if patched else unpatched_tree(item, options)
    facts = table(item, tree, tools, options.workspace)
    (cutlass,) = (inside for inside in item.inside if inside.project == "cutlass")
    headers = exported(tree, options.workspace) / cutlass.path / "include"
    emulator = emulate.Emulator(headers, tools, options.workspace.cache)
    return with_numbers(facts, emulator, f"{item.name}, {'patched' if patched else 'unpatched'}", emulated)


def unpatched_tree(item: recipe.Recipe, options: Options) -> PatchedTree:
    """A recipe's source without the series."""
    checkout = sources.fetch(item.pin, options.workspace, mirror=options.mirror, offline=options.offline)
    return PatchedTree(checkout, item.inside, checkout.commit, checkout.tree, ())


def table(item: recipe.Recipe, tree: PatchedTree, tools: Toolchain, workspace: Workspace) -> tuple[TileFacts, ...]:
    """What each tile of a tree compiles to."""
    place = exported(tree, workspace)
    with workspace.locked(f"tiles-{tree.tree}"):
        return tile_facts.table(place, tree.tree, item.name, tools, workspace.cache)


def exported(tree: PatchedTree, workspace: Workspace) -> Path:
    """A tree's files, for reading only."""
    place = workspace.cache / "trees" / tree.tree
    with workspace.locked(f"tree-{tree.tree}"):
        if not place.is_dir():
            with publish_directory(place) as beside:
                Repository(tree.checkout.repository).export(tree.commit, beside)
    return place


def with_numbers(facts: Sequence[TileFacts], emulator: emulate.Emulator, what: str, emulated: bool) -> tuple[TileFacts, ...]:
    """Each tile with what the emulation of its mainloop showed; tiles that differ in nothing it depends on share one."""
    mainloops = {fact: _mainloop(fact) for fact in facts}
    distinct = [one for one in dict.fromkeys(mainloops.values()) if isinstance(one, emulate.Mainloop)]
    found: dict[emulate.Mainloop, Emulation | CompileFailed | None] = {one: emulator.known(one) for one in distinct}
    if emulated:
        asked = [one for one in distinct if not found[one]]
        if asked:
            console.say(f"emulating {len(asked)} mainloops of {what}, most of a minute each")
        with console.progress() as progress:
            task = progress.add_task(f"emulating {what}", total=len(asked))
            found |= emulator.run_all(asked, lambda: progress.advance(task))
    return tuple(
        replace(fact, numbers=_numbers(found[one]) if isinstance(one, emulate.Mainloop) else Numbers(why=one))
        for fact, one in mainloops.items()
    )


def _mainloop(fact: TileFacts) -> emulate.Mainloop | str:
    """What to emulate for a tile, or why nothing can be."""
    if not fact.compiles:
        return "does not compile"
    if fact.scheduler == "stream-k":
        return "its scheduler, which divides K among CTAs, is not emulated"
    if fact.tile.dtype not in emulate.DTYPES:
        return f"{fact.tile.dtype} is not emulated"
    return emulate.Mainloop.of(fact.tile, pingpong=fact.schedule == "pingpong", stages=fact.stages)


def _numbers(result: Emulation | CompileFailed | None) -> Numbers:
    """What an emulation says about the tiles that share it."""
    if result is None:
        return Numbers(why="not emulated yet")
    if isinstance(result, CompileFailed):
        return Numbers(why=f"the emulation does not compile: {result.message}")
    if result.passed:
        return Numbers(Proof.PROVEN, "", result.outputs)
    first = next((f"{finding.kind}: {finding.first[0]}" for finding in result.findings), "")
    differ = f"{result.mismatches:,} of {result.outputs:,} outputs differ"
    return Numbers(Proof.WRONG, result.signature or first or differ, result.outputs, result.mismatches)
