"""Compare two tile tables of an engine, without and with the patches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sm120kit.kernels.kernel_records import NumericStatus, Tile, TileFacts


@dataclass(frozen=True)
class TileComparison:
    """A tile without and with the patches. ``tile.output`` lists all output types with the same comparison."""

    tile: Tile
    before: TileFacts | None
    after: TileFacts | None

    @property
    def changed(self) -> bool:
        """Whether the patches change this tile. Its numbers count only if both sides were emulated."""
        if self.before is None or self.after is None:
            return True
        checked = all(side.numbers.proof is not NumericStatus.NOT_CHECKED for side in (self.before, self.after))
        return (self.before if checked else replace(self.before, numbers=self.after.numbers)) != self.after


def compare_tables(before: Sequence[TileFacts], after: Sequence[TileFacts]) -> list[TileComparison]:
    """Compare the kernels of each tile; output types with equal kernels share a comparison."""
    merged: dict[tuple[Tile, TileFacts | None, TileFacts | None], list[str]] = {}
    for tile in dict.fromkeys(fact.tile for fact in (*before, *after)):
        for without, patched in _pairs(_of(before, tile), _of(after, tile)):
            merged.setdefault((replace(tile, output=""), without, patched), []).append(tile.output)
    return [
        TileComparison(replace(tile, output=", ".join(sorted(outputs))), without, patched)
        for (tile, without, patched), outputs in merged.items()
    ]


def _of(facts: Sequence[TileFacts], tile: Tile) -> list[TileFacts]:
    return [replace(fact, tile=replace(tile, output="")) for fact in facts if fact.tile == tile]


def _pairs(before: list[TileFacts], after: list[TileFacts]) -> list[tuple[TileFacts | None, TileFacts | None]]:
    """Pair the kernels of a tile by scheduler; a side with one entry (or none) is paired with every kernel of the other."""
    if len(before) == len(after):
        return list(zip(before, after, strict=True))
    if len(before) < 2:
        return [(before[0] if before else None, patched) for patched in after]
    return [(without, after[0] if after else None) for without in before]
