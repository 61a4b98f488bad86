"""Which kernels are verified: every tile of the engine and of the K=64 question, each once for what its numbers depend on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

from sm120kit.errors import UnknownName
from sm120kit.records import LeftOut, Tile, TileFacts

MX_SHAPES = ((128, 128, 128), (128, 128, 64), (256, 128, 64), (128, 256, 64))
"""Tiles of MXFP4 x MXFP4 and MXFP8 x MXFP8: FlashInfer 0.6 generates none for SM120, the K=64 patches are about them."""

NO_DENSE_MX = "effective-block-sf is for grouped GEMM; the builder refuses dense K=64 with scale vector 32"

F16_SHAPE = "128x128x128"
"""The output type changes the last conversion and nothing else: f16 runs on this tile, everything on bf16."""


@dataclass(frozen=True)
class Configuration:
    """One kernel to verify. ``stages`` and ``smem_bytes`` are what the tile table says of it; 0 where it does not know it."""

    tile: Tile
    pingpong: bool = False
    streamk: bool = False
    generated: bool = False
    stages: int = 0
    smem_bytes: int = 0

    @property
    def name(self) -> str:
        """As people choose it: ``grouped-nvfp4-128x128x64-finalize-swap-bf16``."""
        tile = self.tile
        words = [tile.family, tile.dtype, tile.shape]
        words += ["finalize"] * (tile.epilogue == "finalize") + ["swap"] * tile.swap
        words += ["pingpong"] * self.pingpong + ["streamk"] * self.streamk
        return "-".join([*words, tile.output])

    def definitions(self) -> tuple[str, ...]:
        """As ``gemm.cu`` wants it."""
        tile = self.tile
        values = {
            "DTYPE": tile.dtype,
            "TILE_M": tile.m,
            "TILE_N": tile.n,
            "TILE_K": tile.k,
            "GROUPED": int(tile.family == "grouped"),
            "PINGPONG": int(self.pingpong),
            "SWAP": int(tile.swap),
            "FINALIZE": int(tile.epilogue == "finalize"),
            "OUTPUT": tile.output,
            "STREAMK": int(self.streamk),
            "STAGES": 0,
        }
        return tuple(f"-D{name}={value}" for name, value in values.items())


@dataclass(frozen=True)
class Matrix:
    """What is run, what cannot be (too big, does not compile), and what is not, with the reason."""

    run: tuple[Configuration, ...]
    too_big: tuple[LeftOut, ...] = ()
    does_not_compile: tuple[LeftOut, ...] = ()
    left_out: tuple[LeftOut, ...] = ()


def matrix_of(facts: Iterable[TileFacts], *, pattern: str = "", quick: bool = False) -> Matrix:
    """The matrix for a tile table. ``pattern`` is a glob on configuration names; a plain word means any name with it.

    Raises:
        UnknownName: no configuration has such a name.
    """
    run: list[Configuration] = []
    aside: dict[str, list[LeftOut]] = {"too big": [], "does not compile": [], "left out": []}
    for fact in facts:
        one = Configuration(
            fact.tile, fact.schedule == "pingpong", fact.scheduler == "stream-k", fact.generated, fact.stages, fact.smem_bytes
        )
        if not fact.compiles:
            aside["does not compile"].append(LeftOut(one.name, f"{fact.why_not} ({fact.where})"))
        elif not fact.fits:
            aside["too big"].append(
                LeftOut(one.name, f"{fact.smem_bytes:,} B of shared memory, {-(fact.margin_bytes or 0):,} too many")
            )
        else:
            run.append(one)
    made = {one.name for one in run}
    for one in _added():
        if one.tile.family == "dense" and one.tile.dtype in ("mxfp4", "mxfp8") and one.tile.k < 128:
            aside["does not compile"].append(LeftOut(one.name, NO_DENSE_MX))
        elif one.name not in made:
            run.append(one)
    kept = []
    for one in run:
        reason = _twin(one) or (_slow(one) if quick else "")
        if reason:
            aside["left out"].append(LeftOut(one.name, reason))
        else:
            kept.append(one)
    whole = tuple(kept)
    if pattern:
        glob = pattern if any(letter in pattern for letter in "*?[") else f"*{pattern}*"
        kept = [one for one in kept if fnmatch(one.name, glob)]
        aside = {kind: [left for left in lefts if fnmatch(left.what, glob)] for kind, lefts in aside.items()}
        if not kept and not any(aside.values()):
            raise UnknownName(
                f"no configuration matches {pattern!r}",
                f"they have names such as {', '.join(one.name for one in _examples(whole))}",
            )
    return Matrix(tuple(kept), *(tuple(aside[kind]) for kind in ("too big", "does not compile", "left out")))


def _added() -> Iterable[Configuration]:
    """What FlashInfer 0.6 does not generate and the patches make possible, or what shares the patched code."""
    for dtype in ("mxfp4", "mxfp8"):
        for family in ("dense", "grouped"):
            for m, n, k in MX_SHAPES:
                yield Configuration(Tile(family, dtype, m, n, k, "none", False, "bf16"))
    yield Configuration(Tile("grouped", "mxfp4", 128, 128, 64, "finalize", False, "bf16"))
    yield Configuration(Tile("grouped", "mxfp8", 128, 128, 64, "finalize", True, "bf16"))
    yield Configuration(Tile("dense", "fp8xmxfp4", 128, 128, 128, "none", False, "bf16"))
    yield Configuration(Tile("dense", "nvfp4", 128, 128, 128, "none", True, "bf16"))
    for family, dtype, k in (
        ("dense", "nvfp4", 128),
        ("dense", "nvfp4", 64),
        ("grouped", "nvfp4", 128),
        ("grouped", "mxfp4", 64),
    ):
        yield Configuration(Tile(family, dtype, 128, 128, k, "none", False, "bf16"), pingpong=True)


def _twin(one: Configuration) -> str:
    if one.tile.output == "bf16" or (one.tile.shape == F16_SHAPE and not one.tile.swap):
        return ""
    return f"differs from its bf16 twin in the last conversion only; f16 is run on {F16_SHAPE}"


def _slow(one: Configuration) -> str:
    """Why ``--quick`` leaves a configuration out."""
    tile = one.tile
    plain = (tile.m, tile.n) == (128, 128) and tile.k <= 128 and not tile.swap and tile.output == "bf16"
    return "" if plain and not one.pingpong and not one.streamk else "--quick runs 128x128 tiles without variants"


def _examples(run: Sequence[Configuration]) -> Sequence[Configuration]:
    return run[:: max(1, len(run) // 4)][:4]
