"""Whether the tiles of an engine compute correct numbers, by their emulation on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sm12x_lab import emulation
from sm12x_lab.emulation.emulation_records import Emulation
from sm120kit.core import reporting
from sm120kit.core.errors import CompileFailed
from sm120kit.kernels import tables
from sm120kit.kernels.kernel_records import NumericResult, NumericStatus, TileFacts
from sm120kit.recipes.locked_toolchain import compilers
from sm120kit.recipes.target import FlashInferTarget


def tile_numbers(
    target: FlashInferTarget, facts: Sequence[TileFacts], *, patched: bool, emulated: bool
) -> tuple[TileFacts, ...]:
    """The tiles of a FlashInfer recipe, with or without its series, each with the result of its emulation.

    ``emulated`` runs the emulations that are not cached, half a minute for each shape.
    """
    headers = tables.cutlass(target, patched=patched) / "include"
    emulator = emulation.Emulator(headers, compilers(target), target.options.workspace.cache)
    return with_numbers(facts, emulator, f"{target.recipe.name}, {'patched' if patched else 'unpatched'}", emulated)


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
