"""``sm120kit tiles``: which tiles an engine asks for, and which of them SM120 can launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sm120kit.cli.options import Mirror, Offline, State

if TYPE_CHECKING:
    from sm120kit.records import TileFacts
    from sm120kit.tiles.compare import Row


def tiles_(
    engine: Annotated[str, typer.Argument(metavar="ENGINE[@VERSION]", help="Such as flashinfer@0.6.6.")],
    patched: Annotated[bool, typer.Option("--patched/--unpatched", help="Show what the patches change.")] = True,
    changed: Annotated[bool, typer.Option("--changed", help="Only tiles that the patches change.")] = False,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="Run each mainloop on the CPU and check its numbers: most of a minute each, once.")
    ] = False,
    mirror: Mirror = None,
    offline: Offline = False,
    state: State = None,
    as_json: Annotated[bool, typer.Option("--json", help="Full records for programs.")] = False,
) -> None:
    """List every CTA tile that an engine generates for SM120: stages, shared memory, and whether SM120 and SM121 can launch it.

    The engine's own templates are asked, with the host compiler; no GPU and no nvcc runs. Tiles marked "no" under generated
    are ones of interest that the engine does not instantiate. That a tile fits says nothing about its numbers: those are proven
    or wrong where the tile's mainloop was emulated (--emulate; results are kept). Speed and the instructions themselves are
    unverified on SM120.
    """
    from sm120kit import console, tiling
    from sm120kit.tiles import compare
    from sm120kit.trees import Options
    from sm120kit.workspace import Workspace

    options = Options(Workspace.open(state), mirror, offline)
    before = tiling.tiles(engine, options, patched=False, emulated=emulate)
    after = tiling.tiles(engine, options, patched=True, emulated=emulate) if patched else before
    if as_json:
        sides = {"unpatched": before, "patched": after} if patched else {"unpatched": before}
        console.json_data({"engine": engine, **{side: [record(one) for one in facts] for side, facts in sides.items()}})
        return
    found = compare.rows(before, after)
    shown = [row for row in found if row.changed or not changed]
    console.table(
        (
            "family",
            "dtype",
            "tile",
            "epilogue",
            "swap",
            "output",
            "schedule",
            "generated",
            "k-blocks",
            "stages",
            "bytes",
            "verdict",
            "numbers",
        ),
        (_cells(row) for row in shown),
    )
    kept = [row.after for row in found if row.after and row.after.generated]
    fits = sum(fact.fits for fact in kept)
    broken = sum(not fact.compiles for fact in kept)
    console.data(
        f"{len(kept)} generated: {fits} fit, {len(kept) - fits - broken} too big, {broken} do not compile"
        + (f"; the patches change {sum(row.changed for row in found)} of {len(found)} rows" if patched else "")
    )


def record(fact: TileFacts) -> dict[str, Any]:
    """A tile's facts for programs, with what follows from them."""
    from dataclasses import asdict

    return {**asdict(fact), "fits": fact.fits, "margin_bytes": fact.margin_bytes}


def verdict(fact: TileFacts | None) -> str:
    """In words: fits, too big and by how much, or why it does not compile."""
    if fact is None:
        return "not generated"
    margin = fact.margin_bytes
    if margin is None:
        return f"does not compile: {fact.why_not} ({fact.where})"
    return f"fits, {margin:,} B left" if fact.fits else f"too big by {-margin:,} B"


def numbers(fact: TileFacts | None) -> str:
    """Proven, wrong or not checked, and why not."""
    if fact is None:
        return ""
    return f"{fact.numbers.proof}: {fact.numbers.why}" if fact.numbers.why else str(fact.numbers.proof)


def _cells(row: Row) -> list[str]:
    fact = row.after or row.before
    assert fact is not None
    schedule = f"{fact.schedule} {fact.scheduler}".removesuffix(" persistent").strip()
    return [
        fact.tile.family,
        fact.tile.dtype,
        fact.tile.shape,
        fact.tile.epilogue,
        "yes" if fact.tile.swap else "",
        row.tile.output,
        schedule,
        _both(row, lambda one: "yes" if one and one.generated else "no"),
        _both(row, lambda one: str(one.k_blocks) if one and one.compiles else ""),
        _both(row, lambda one: str(one.stages) if one and one.compiles else ""),
        _both(row, lambda one: f"{one.smem_bytes:,}" if one and one.compiles else ""),
        _both(row, verdict),
        _both(row, numbers),
    ]


def _both(row: Row, text: Callable[[TileFacts | None], str]) -> str:
    """What is true now, with what was before where that differs."""
    was, now = text(row.before), text(row.after)
    return now if was == now else f"{was or '-'} → {now or '-'}"
