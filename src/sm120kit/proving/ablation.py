"""Each patch of a series left out once: what the series lacks without it, as far as the host compiler sees it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from sm120kit import console, patches, recipe, sources, toolchain
from sm120kit.errors import CompileFailed, UnknownName
from sm120kit.proving.side import Side
from sm120kit.records import Ablated, Ablation, PatchState, TileChange, TileFacts
from sm120kit.tiles import compare
from sm120kit.trees import Options, patched_tree
from sm120kit.workspace import data_root


def ablate(name: str, options: Options, *, dtype: str | None = None, only: Sequence[str] = ()) -> Ablation:
    """The series of a recipe without each of its patches, or without each of ``only``; tiles of all dtypes or of one.

    Tiles that were measured before with the same headers are not measured again; a whole table takes about a minute.

    Raises:
        UnknownName: the recipe's series has no such patch, or no tile has that dtype.
    """
    item = recipe.load(name)
    tools = toolchain.find(headers=item.headers)
    checkout = sources.fetch(item.pin, options.workspace, mirror=options.mirror, offline=options.offline)
    root, overrides = data_root() / "patches", data_root() / "cutlass_overrides"
    whole = patched_tree(item, options)
    applied = {f"{one.project}/{one.slug}" for one in whole.patches}
    series = [patch for patch in patches.in_order(item.pin, item.inside, root) if patch.name in applied]
    chosen = [patch for patch in series if not only or {patch.name, patch.slug} & set(only)]
    missing = [one for one in only if not any(one in (patch.name, patch.slug) for patch in chosen)]
    if missing:
        there = ", ".join(patch.name for patch in series)
        raise UnknownName(f"the series of {item.name} has no patch {', '.join(missing)}", f"it has {there}")
    with tempfile.TemporaryDirectory(prefix="sm120kit-ablate-") as directory:
        full = Side(item, checkout, whole.tree, tools, options, Path(directory))
        facts = full.tiles(dtype)
        if not facts:
            raise UnknownName(f"{item.name} has no tile of dtype {dtype}", "leave out --for")
        found = []
        for patch in chosen:
            console.say(f"without {patch.name}")
            rest = [one for one in series if one is not patch]
            _, steps = patches.compose(checkout, item.inside, rest, overrides)
            dependents = tuple(step.patch.name for step in steps if step.status.state is not PatchState.APPLIES)
            side = Side(item, checkout, steps[-1].tree, tools, options, Path(directory))
            try:
                found.append(_compared(patch.name, dependents, side, full, side.tiles(dtype), facts))
            except CompileFailed as failure:
                found.append(Ablated(patch.name, side.tree, dependents, (), (), failure.message))
    return Ablation(item.name, whole.tree, len(facts), tuple(found))


def _compared(
    patch: str, dependents: tuple[str, ...], side: Side, full: Side, without: Sequence[TileFacts], facts: Sequence[TileFacts]
) -> Ablated:
    changed = [row for row in compare.rows(without, facts) if row.changed]
    changes = tuple(TileChange(row.tile, row.before, row.after) for row in changed)
    flags = sorted(_flags(full) - _flags(side))
    return Ablated(patch, side.tree, dependents, tuple(flags), changes)


def _flags(side: Side) -> set[str]:
    return {f"{one.module}: {flag}" for one in side.instantiations for flag in one.definitions}
