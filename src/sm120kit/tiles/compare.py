"""Two tables of the same engine side by side: what the patches change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sm120kit.records import Proof, Tile, TileFacts


@dataclass(frozen=True)
class Row:
    """A tile without and with the patches. ``tile.output`` names all outputs for which both are the same."""

    tile: Tile
    before: TileFacts | None
    after: TileFacts | None

    @property
    def changed(self) -> bool:
        """Whether the patches make a difference to this tile: to its numbers only where both were checked."""
        if self.before is None or self.after is None:
            return True
        checked = all(one.numbers.proof is not Proof.NOT_CHECKED for one in (self.before, self.after))
        return (self.before if checked else replace(self.before, numbers=self.after.numbers)) != self.after


def rows(before: Sequence[TileFacts], after: Sequence[TileFacts]) -> list[Row]:
    """One row per kernel of a tile, those outputs in one row that do not differ."""
    merged: dict[tuple[Tile, TileFacts | None, TileFacts | None], list[str]] = {}
    for tile in dict.fromkeys(one.tile for one in (*before, *after)):
        for was, now in _pairs(_of(before, tile), _of(after, tile)):
            merged.setdefault((replace(tile, output=""), was, now), []).append(tile.output)
    return [Row(replace(tile, output=", ".join(sorted(outputs))), was, now) for (tile, was, now), outputs in merged.items()]


def _of(facts: Sequence[TileFacts], tile: Tile) -> list[TileFacts]:
    return [replace(one, tile=replace(tile, output="")) for one in facts if one.tile == tile]


def _pairs(before: list[TileFacts], after: list[TileFacts]) -> list[tuple[TileFacts | None, TileFacts | None]]:
    """The kernels of one tile by scheduler; where one side has none or does not compile, that answers for all of the other."""
    if len(before) == len(after):
        return list(zip(before, after, strict=True))
    if len(before) < 2:
        return [(before[0] if before else None, now) for now in after]
    return [(was, after[0] if after else None) for was in before]
