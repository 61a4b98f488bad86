"""The tiles of a patched FlashInfer that SM12x cannot launch: a record beside its recipe, so that a plan compiles nothing.

``sm120kit tiles RECIPE --write`` writes it; tests compile the tiles again and compare. A source with other patches has no
record: its tiles are compiled before its kernels are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sm120kit.core.data_roots import require_writable
from sm120kit.core.errors import CheckFailed
from sm120kit.core.record_files import read_record, write_record
from sm120kit.core.records import LeftOut
from sm120kit.kernels.kernel_records import SMEM_CAPACITY_BYTES, TileFacts
from sm120kit.recipes.target import FlashInferTarget


@dataclass(frozen=True)
class TileRecord:
    """The tiles of interest of the source ``tree`` that SM12x cannot launch; the source generates none of them."""

    tree: str
    left_out: tuple[LeftOut, ...]


def record_path(target: FlashInferTarget) -> Path:
    """The record beside a recipe, which may not exist."""
    return target.path.with_suffix(".tiles.json")


def recorded(target: FlashInferTarget) -> tuple[LeftOut, ...] | None:
    """The recorded tiles of the target's present source; None if there is no record of it."""
    path = record_path(target)
    record = read_record(TileRecord, path) if path.is_file() else None
    return record.left_out if record and record.tree == target.tree.tree else None


def write(target: FlashInferTarget, facts: Sequence[TileFacts]) -> Path:
    """Record the facts of the target's tiles. See :func:`left_out` for errors."""
    path = record_path(target)
    require_writable(path)
    write_record(path, TileRecord(target.tree.tree, left_out(target.recipe.name, facts)))
    return path


def left_out(recipe: str, facts: Sequence[TileFacts]) -> tuple[LeftOut, ...]:
    """The tiles that cannot be launched, with one entry for all outputs and swaps of a tile.

    Raises:
        CheckFailed: the source generates one of them; the message has each once.
    """
    broken = dict.fromkeys(f"  {_name(fact)}: {_why_not(fact)}" for fact in facts if fact.generated and not fact.fits)
    if broken:
        raise CheckFailed(
            "\n".join([f"{recipe} generates tiles that SM12x cannot launch", *broken]),
            "a patch has to make them fit or leave them out; sm120kit tiles shows all",
        )
    absent = {(f"tile {_name(fact)}", _why_not(fact)) for fact in facts if not fact.fits}
    return tuple(LeftOut(what, why) for what, why in sorted(absent))


def _name(fact: TileFacts) -> str:
    return f"{fact.tile.family} {fact.tile.dtype} {fact.tile.shape} {fact.tile.epilogue}"


def _why_not(fact: TileFacts) -> str:
    if not fact.compiles:
        return fact.why_not
    return f"needs {fact.smem_bytes:,} B of shared memory; SM120 has {SMEM_CAPACITY_BYTES:,} B"
