"""Leave each patch of a series out in turn, and compare tiles and compiler flags with those of the full series."""

from __future__ import annotations

from collections.abc import Sequence

from sm12x_lab.proofs.records import Ablation, PatchAblation, TileChange
from sm12x_lab.proofs.side import Side, has_cutlass
from sm120kit import patches
from sm120kit.core import reporting
from sm120kit.core.data_roots import data_root
from sm120kit.core.errors import CompileFailed, NotFound
from sm120kit.kernels.records import TileFacts
from sm120kit.kernels.tiles import compare
from sm120kit.patches.records import PatchState
from sm120kit.recipes.target import FlashInferTarget
from sm120kit.recipes.toolchain import compilers


def ablate(target: FlashInferTarget, *, dtype: str | None = None, only: Sequence[str] = ()) -> Ablation:
    """Compare a recipe's series without each of its patches, or of the patches ``only``, with the full series.

    ``dtype`` limits the tiles. A table of tiles takes about a minute; tiles with unchanged headers are read from the cache.

    Raises:
        NotFound: the source contains no CUTLASS, the recipe's series has no such patch, or no tile has that dtype.
    """
    recipe, options = target.recipe, target.options
    if not has_cutlass(target):
        raise NotFound(
            f"the source of {recipe.name} contains no CUTLASS, so it has no tiles to compare", "name another FlashInfer recipe"
        )
    tools = compilers(target)
    checkout, full_tree = target.checkout, target.tree
    root, overrides = data_root() / "patches", data_root() / "cutlass_overrides"
    applied = {f"{patch.project}/{patch.slug}" for patch in full_tree.patches}
    series = [patch for patch in patches.load_for_tree(recipe.pin, recipe.inside, root) if patch.name in applied]
    selected = [patch for patch in series if not only or {patch.name, patch.slug} & set(only)]
    missing = [name for name in only if not any(name in (patch.name, patch.slug) for patch in selected)]
    if missing:
        names = ", ".join(patch.name for patch in series)
        raise NotFound(f"the series of {recipe.name} has no patch {', '.join(missing)}", f"it has {names}")
    with options.workspace.scratch() as scratch:
        full = Side(target, full_tree.tree, tools, scratch)
        facts = full.tiles(dtype)
        if not facts:
            raise NotFound(f"{recipe.name} has no tile of dtype {dtype}", "leave out --for")
        results = []
        for patch in selected:
            reporting.info(f"without {patch.name}")
            rest = [other for other in series if other is not patch]
            _, steps = patches.compose(checkout, recipe.inside, rest, overrides)
            dependents = tuple(step.patch.name for step in steps if step.status.state is not PatchState.APPLIES)
            side = Side(target, steps[-1].tree, tools, scratch)
            try:
                results.append(_compared(patch.name, dependents, side, full, side.tiles(dtype), facts))
            except CompileFailed as failure:
                results.append(PatchAblation(patch.name, side.tree, dependents, (), (), failure.message))
    return Ablation(recipe.name, full_tree.tree, len(facts), tuple(results))


def _compared(
    patch: str, dependents: tuple[str, ...], side: Side, full: Side, without: Sequence[TileFacts], facts: Sequence[TileFacts]
) -> PatchAblation:
    changed = [row for row in compare.compare_tables(without, facts) if row.changed]
    changes = tuple(TileChange(row.tile, row.before, row.after) for row in changed)
    flags = sorted(_flags(full) - _flags(side))
    return PatchAblation(patch, side.tree, dependents, tuple(flags), changes)


def _flags(side: Side) -> set[str]:
    return {f"{call.module}: {flag}" for call in side.instantiations for flag in call.definitions}
