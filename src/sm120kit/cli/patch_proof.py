"""``sm120kit patch prove`` and ``ablate``: what a patch does, and what a series lacks without it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from sm120kit import console
from sm120kit.cli.options import Json, Mirror, Offline, State

if TYPE_CHECKING:
    from sm120kit.records import Ablated, Arch, KernelCode, Probe, Proven, Seen, TileFacts

Dtype = Annotated[str | None, typer.Option("--for", metavar="DTYPE", help="Only nvfp4, mxfp4, mxfp8 or fp8xmxfp4.")]


def prove(
    patch: Annotated[str, typer.Argument(metavar="PATCH", help="project/slug, a slug, or anybody's patch file.")],
    dtype: Dtype = None,
    arch: Annotated[str | None, typer.Option("--arch", help="What nvcc compiles for; default: what the recipe says.")] = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", metavar="RECIPE", help="Default: the first to whose version the patch applies.")
    ] = None,
    code: Annotated[
        bool, typer.Option("--code", help="Also compare what nvcc makes: about a minute for each probe and side, once.")
    ] = False,
    probe: Annotated[
        list[str] | None, typer.Option("--probe", metavar="TEXT", help="In place of the patch's own probes; repeatable.")
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Write the proof to patches/evidence, where a test checks it.")
    ] = False,
    mirror: Mirror = None,
    offline: Offline = False,
    state: State = None,
    json: Json = False,
) -> None:
    """What a patch does, shown on the probes that it names: each is compiled with and without it, on the series below.

    The host compiler says what compiles, and types, stages and bytes; the emulation on the CPU whether the numbers are right;
    nvcc, with --code, whether the code of each kernel differs. A file that is in no series is applied alone to the stock tree.
    No GPU is used: what a patch does to speed is unverified on SM120.
    """
    from sm120kit import pipeline, proving
    from sm120kit.workspace import Workspace

    if write and (dtype or probe):
        raise typer.BadParameter("a part of a proof is not kept: leave out --for and --probe", param_hint="--write")
    proof = proving.prove_patch(
        patch,
        pipeline.Options(Workspace.open(state), mirror, offline),
        recipe_name=recipe,
        dtype=_dtype(dtype),
        arch=_arch(arch),
        code=code,
        probes=[_probe(text) for text in probe or ()],
    )
    if write:
        proof, path = proving.keep(patch, proof)
        console.say(f"wrote {path}")
    if json:
        from sm120kit import prove as prover

        console.data(prover.text(proof).rstrip())
        return
    console.table(("probe", "dtype", "arch", "effect", "below", "with"), (_cells(one) for one in proof.results))
    console.data(f"{proof.patch} on {proof.recipe}: tree {proof.tree_below[:12]} → {proof.tree_above[:12]}")
    if any("not compared" in effect for one in proof.results for effect in one.effects):
        console.say("whether code differs is said by --code")


def ablate(
    recipe: Annotated[
        str, typer.Argument(metavar="[RECIPE]", help="A recipe name, engine@version, or recipe file.")
    ] = "flashinfer",
    patch: Annotated[
        list[str] | None, typer.Option("--patch", metavar="PATCH", help="Leave out only this one; repeatable.")
    ] = None,
    dtype: Dtype = None,
    mirror: Mirror = None,
    offline: Offline = False,
    state: State = None,
    json: Json = False,
) -> None:
    """What a series lacks without each of its patches: tiles gained or lost, what compiles, stages and bytes.

    Patches that do not apply without another are named and left out with it. The host compiler sees neither numbers nor code:
    `sm120kit patch prove` compares those. A minute for each patch the first time.
    """
    from dataclasses import asdict

    from sm120kit import pipeline, proving
    from sm120kit.workspace import Workspace

    options = pipeline.Options(Workspace.open(state), mirror, offline)
    found = proving.ablate(recipe, options, dtype=_dtype(dtype), only=patch or ())
    if json:
        console.json_data(asdict(found))
        return
    console.table(
        ("without", "also left out", "tile", "then", "with all"), (row for one in found.without for row in _rows(one))
    )
    console.data(f"{found.recipe}, tree {found.tree[:12]}: {found.tiles} kernels of tiles compared for each")


def _rows(one: Ablated) -> list[list[str]]:
    from sm120kit.cli.tiles import verdict

    lead = [[one.patch, ", ".join(one.dependents)], ["", ""]]
    told = [["", one.failure, ""]] if one.failure else []
    told += [["flags", "", flag] for flag in one.flags]
    for change in one.changes:
        tile = change.tile
        words = f"{tile.family} {tile.dtype} {tile.shape}" + (f" {tile.epilogue}" if tile.epilogue != "none" else "")
        words += " swap" if tile.swap else ""
        sides = (change.without, change.full)
        told.append([f"{words}, {tile.output}", *(f"{_tile(side)}{verdict(side)}" for side in sides)])
    told = told or [["", "nothing that the host compiler sees", ""]]
    return [[*lead[min(number, 1)], *row] for number, row in enumerate(told)]


def _tile(fact: TileFacts | None) -> str:
    if fact is None:
        return ""
    told = "" if fact.generated else "not generated; "
    return told + (f"{fact.stages} stages, {fact.smem_bytes:,} B, " if fact.compiles else "")


def _dtype(name: str | None) -> str | None:
    from sm120kit.errors import UnknownName
    from sm120kit.patches.probes import DTYPES

    if name is not None and name not in DTYPES:
        raise UnknownName(f"unknown dtype {name!r}", f"dtypes: {', '.join(DTYPES)}")
    return name


def _arch(name: str | None) -> Arch | None:
    from sm120kit.recipe import parse_arch

    return parse_arch(name) if name else None


def _probe(text: str) -> Probe:
    from sm120kit.errors import BadPatch
    from sm120kit.patches import probes

    try:
        return probes.parse(text)
    except probes.BadProbe as problem:
        raise BadPatch(f"--probe {text!r}: {problem}", "patches/README.md describes probes") from problem


def _cells(one: Proven) -> list[str]:
    archs = ", ".join(sorted(one.below.code.keys() | one.above.code.keys()))
    return [
        one.probe.text,
        one.probe.dtype,
        archs,
        ", ".join(one.effects),
        *(_told(one.probe, side, other) for side, other in ((one.below, one.above), (one.above, one.below))),
    ]


def _told(probe: Probe, side: Seen, other: Seen) -> str:
    """A side in words; of two that are alike in something, only what differs and the most telling of the rest."""
    if side.error:
        return f"error: {side.error} ({side.where})"
    told = [
        f"{name} {_part(value, other.facts.get(name))}".strip()
        for name, value in sorted(side.facts.items())
        if name.endswith(("stages", "smem_bytes")) or other.facts.get(name) != value
    ]
    if probe.numbers:
        told.append(f"numbers {side.numbers}" + (f": {side.why}" if side.why else ""))
    told += [f"{arch} {_code(kernels)}" for arch, kernels in sorted(side.code.items())]
    return "; ".join(told)


def _part(value: str | int, other: str | int | None) -> str:
    """A value; of flags, those that the other side lacks."""
    if isinstance(value, int):
        return f"{value:,}"
    if not value.startswith("-D"):
        return value
    return " ".join(word for word in value.split() if word not in str(other).split()) or "without those"


def _code(kernels: tuple[KernelCode, ...]) -> str:
    return " and ".join(
        f"{one.text_sha256[:12]}, {one.registers} registers"
        + (f", {one.stack_bytes} B stack" if one.stack_bytes else "")
        + (f", {one.grid_waits} grid waits" if one.grid_waits else "")
        for one in kernels
    )
