"""``sm120kit tiles``: the CTA tiles that an engine generates, and whether SM120 can launch them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Annotated, Any

import typer

from sm120kit.cli import plugins
from sm120kit.cli.options import SourceRecipeName, Sources, option
from sm120kit.core import console, reporting
from sm120kit.kernels import tables, tile_records
from sm120kit.kernels.kernel_records import TileFacts
from sm120kit.recipes.locked_toolchain import compilers
from sm120kit.recipes.target import FlashInferTarget, Target, resolve


@cache
def _tile_numbers() -> Any:
    """The laboratory's function that adds the results of emulations to tiles; None if it is not installed."""
    return plugins.function("tile_numbers")


@dataclass(frozen=True)
class CostOptions:
    """Whether compiled tiles are counted, and the GEMM for waves and bytes."""

    cost: Annotated[
        bool,
        option(
            "--cost",
            "Instead, count instructions, spills and CTAs/SM of the tiles that builds have compiled.",
            hidden=_tile_numbers() is None,
        ),
    ] = False
    problem: Annotated[
        str, option("--problem M,N,K", "With --cost: waves and bytes of a GEMM.", hidden=_tile_numbers() is None)
    ] = ""


def tiles_(
    engine: SourceRecipeName,
    emulate: Annotated[
        bool,
        option(
            "--emulate",
            "Run each mainloop on the CPU and check its numbers: half a minute a shape.",
            hidden=_tile_numbers() is None,
        ),
    ] = False,
    write: Annotated[
        bool, option("--write", "Only record beside a FlashInfer recipe which tiles cannot be launched, for plans.")
    ] = False,
    unpatched: Annotated[bool, option("--unpatched", "The tiles of the source as released.")] = False,
    *,
    counted: CostOptions,
    sources: Sources,
    as_json: Annotated[bool, option("--json", "Print full records as JSON.")] = False,
) -> None:
    """List the CTA tiles of an engine and whether SM120 can launch them.

    The host compiler evaluates the engine's own templates for stages and shared memory; neither nvcc nor a GPU is used. Tiles
    with "no" under generated are of interest, but the engine does not instantiate them. A tile that fits can still compute
    wrong numbers: with sm12x-lab installed, --emulate checks them. Speed and the instructions themselves are unverified on
    SM120.
    """
    cost, problem = counted.cost, counted.problem
    costs = plugins.function("tile_costs") if cost else None
    if (cost and costs is None) or (emulate and _tile_numbers() is None):
        raise plugins.required("--cost" if cost else "--emulate")
    if (problem and not cost) or (cost and (emulate or write or unpatched)):
        raise typer.BadParameter("--problem requires --cost, and --cost stands alone", param_hint="--cost")
    target = resolve(engine, sources.run_options())
    if write and target.engine:
        raise typer.BadParameter("the record is of a patched FlashInfer: name its recipe")
    if write:
        console.data(f"wrote {tile_records.write(target.flashinfer, tables.tiles(target.flashinfer, patched=True))}")
        return
    if costs:
        _show_costs(as_json, *costs(_require_kernels(target), problem))
        return
    facts = _tiles(_require_kernels(target), not unpatched, emulate)
    if as_json:
        console.json_data({"engine": engine, "tiles": [record(fact) for fact in facts]})
        return
    rows = [_cells(fact, outputs) for fact, outputs in _merged(facts).items()]
    console.table(tuple(rows[0]) if rows else (), (tuple(each.values()) for each in rows))
    generated = [fact for fact in facts if fact.generated]
    fits, broken = sum(fact.fits for fact in generated), sum(not fact.compiles for fact in generated)
    console.data(f"{len(generated)} generated: {fits} fit, {len(generated) - fits - broken} too big, {broken} do not compile")


def _show_costs(as_json: bool, rows: Sequence[dict[str, str]], notes: Sequence[str], data: dict[str, object]) -> None:
    if as_json:
        console.json_data(data)
        return
    console.table(tuple(rows[0]), (tuple(row.values()) for row in rows))
    for line in notes:
        console.data(line)


def _merged(facts: Sequence[TileFacts]) -> dict[TileFacts, list[str]]:
    """Facts without their output types, each with the types of which it is true."""
    merged: dict[TileFacts, list[str]] = {}
    for fact in facts:
        merged.setdefault(replace(fact, tile=replace(fact.tile, output="")), []).append(fact.tile.output)
    return merged


def _require_kernels(target: Target) -> FlashInferTarget:
    """Require a FlashInfer recipe."""
    target.recipe.require_kernels()
    return target.flashinfer


def _tiles(target: FlashInferTarget, patched: bool, emulated: bool) -> tuple[TileFacts, ...]:
    """The tiles with results of their emulation: cached ones, with ``emulated`` all. Without the laboratory, the tiles."""
    if not compilers(target, unpack=False).cuda_home.is_dir():
        reporting.info(f"compilers and source of {target.recipe.name} are fetched first: 0.5 to 1 GB")
    facts, add = tables.tiles(target, patched=patched), _tile_numbers()
    return add(target, facts, patched=patched, emulated=emulated) if add else facts


def record(fact: TileFacts) -> dict[str, Any]:
    """The facts of a tile as a JSON object, with the values derived from them."""
    return {**asdict(fact), "fits": fact.fits, "margin_bytes": fact.margin_bytes}


def verdict(fact: TileFacts) -> str:
    """Whether a tile fits, by how many bytes it is too big, or why it does not compile."""
    margin = fact.margin_bytes
    if margin is None:
        return f"does not compile: {fact.why_not} ({fact.where})"
    return f"fits, {margin:,} B left" if fact.fits else f"too big by {-margin:,} B"


def numbers(fact: TileFacts) -> str:
    """Whether a tile's numbers or its mainloop are proven, wrong or not checked, with the reason."""
    return f"{fact.numbers.proof}: {fact.numbers.why}" if fact.numbers.why else str(fact.numbers.proof)


def _cells(fact: TileFacts, outputs: Sequence[str]) -> dict[str, str]:
    """The cells of a row by column."""
    return {
        "family": fact.tile.family,
        "dtype": f"{fact.tile.dtype} {fact.tile.scales}".strip(),
        "tile": fact.tile.shape,
        "epilogue": fact.tile.epilogue,
        "swap": "yes" if fact.tile.swap else "",
        "output": ", ".join(sorted(outputs)),
        "schedule": f"{fact.schedule} {fact.scheduler}".removesuffix(" persistent").strip(),
        "generated": "yes" if fact.generated else "no",
        "k-blocks": str(fact.k_blocks) if fact.compiles else "",
        "stages": str(fact.stages) if fact.compiles else "",
        "bytes": f"{fact.smem_bytes:,}" if fact.compiles else "",
        "verdict": verdict(fact),
        "numbers": numbers(fact),
    }
