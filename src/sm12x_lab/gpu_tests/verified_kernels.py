"""The kernels to verify: every tile of the engine and of the K=64 question, once for each variant with other arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

from sm12x_lab.gpu import Backend
from sm120kit.core.errors import NotFound
from sm120kit.core.records import LeftOut
from sm120kit.kernels.kernel_records import Tile, TileFacts

MX_SHAPES = ((128, 128, 128), (128, 128, 64), (256, 128, 64), (128, 256, 64))
"""Tiles of MXFP4 x MXFP4 and MXFP8 x MXFP8. FlashInfer 0.6 generates none for SM120; the K=64 patches concern them."""

FAMILIES = ("grouped", "dense")
"""Families of tiles that ``gemm.cu`` has launchers for."""

NO_DENSE_MX = "effective-block-sf is for grouped GEMM; the builder refuses dense K=64 with scale vector 32"

F16_SHAPE = "128x128x128"
"""The tile that also runs with f16 output. The output type changes the last conversion only; all tiles run with bf16."""


@dataclass(frozen=True)
class KernelConfiguration:
    """A kernel to verify. ``stages`` and ``smem_bytes`` are those of the tile table; 0 for a kernel that is not in it."""

    tile: Tile
    pingpong: bool = False
    streamk: bool = False
    generated: bool = False
    stages: int = 0
    smem_bytes: int = 0

    @property
    def name(self) -> str:
        """The name for ``--only``: ``grouped-nvfp4-128x128x64-finalize-swap-bf16``."""
        tile = self.tile
        words = [tile.family, tile.dtype, *([tile.scales] if tile.scales else []), tile.shape]
        words += ["finalize"] * (tile.epilogue == "finalize") + ["swap"] * tile.swap
        words += ["pingpong"] * self.pingpong + ["streamk"] * self.streamk
        return "-".join([*words, tile.output])

    @property
    def shipped(self) -> bool:
        """Whether the build has this kernel itself. FlashInfer 0.7 wraps its dense MXFP8 kernels in others."""
        return self.generated and (self.tile.family, self.tile.dtype) != ("dense", "mxfp8")

    def definitions(self) -> tuple[str, ...]:
        """Compiler flags that configure ``gemm.cu``."""
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
class VerificationScope:
    """Where and how much to verify: on ``backend``, kernels that match ``only``, fewer runs with ``quick``."""

    backend: Backend
    only: str = ""
    quick: bool = False

    @property
    def complete(self) -> bool:
        """Whether the full matrix runs; a receipt is written for a complete verification only."""
        return not (self.only or self.quick)


@dataclass(frozen=True)
class Matrix:
    """The kernels to run, those that cannot run (too big, does not compile) and those left out, with reasons."""

    run: tuple[KernelConfiguration, ...]
    too_big: tuple[LeftOut, ...] = ()
    does_not_compile: tuple[LeftOut, ...] = ()
    left_out: tuple[LeftOut, ...] = ()


def matrix_of(facts: Iterable[TileFacts], *, pattern: str = "", quick: bool = False) -> Matrix:
    """The matrix for a tile table. ``pattern`` is a glob on configuration names; without wildcards, a substring of them.

    Raises:
        NotFound: no configuration matches ``pattern``.
    """
    candidates: list[KernelConfiguration] = []
    excluded: dict[str, list[LeftOut]] = {"too big": [], "does not compile": [], "left out": []}
    for fact in facts:
        configuration = KernelConfiguration(
            fact.tile, fact.schedule == "pingpong", fact.scheduler == "stream-k", fact.generated, fact.stages, fact.smem_bytes
        )
        if fact.tile.family not in FAMILIES:
            excluded["left out"].append(LeftOut(configuration.name, "a groupwise GEMM of gemm_sm120, which no program runs"))
        elif not fact.compiles:
            excluded["does not compile"].append(LeftOut(configuration.name, f"{fact.why_not} ({fact.where})"))
        elif not fact.fits:
            excess = f"{fact.smem_bytes:,} B of shared memory, {-(fact.margin_bytes or 0):,} too many"
            excluded["too big"].append(LeftOut(configuration.name, excess))
        else:
            candidates.append(configuration)
    listed = {configuration.name for configuration in candidates}
    for configuration in _added():
        tile = configuration.tile
        if tile.family == "dense" and tile.dtype in ("mxfp4", "mxfp8") and tile.k < 128:
            excluded["does not compile"].append(LeftOut(configuration.name, NO_DENSE_MX))
        elif configuration.name not in listed:
            candidates.append(configuration)
    selected = []
    for configuration in candidates:
        reason = _twin(configuration) or (_slow(configuration) if quick else "")
        if reason:
            excluded["left out"].append(LeftOut(configuration.name, reason))
        else:
            selected.append(configuration)
    if pattern:
        glob = pattern if any(letter in pattern for letter in "*?[") else f"*{pattern}*"
        examples = ", ".join(configuration.name for configuration in _examples(selected))
        selected = [configuration for configuration in selected if fnmatch(configuration.name, glob)]
        excluded = {kind: [left for left in lefts if fnmatch(left.what, glob)] for kind, lefts in excluded.items()}
        if not selected and not any(excluded.values()):
            raise NotFound(f"no configuration matches {pattern!r}", f"names are such as {examples}")
    return Matrix(tuple(selected), *(tuple(excluded[kind]) for kind in ("too big", "does not compile", "left out")))


def _added() -> Iterable[KernelConfiguration]:
    """Kernels that FlashInfer 0.6 does not generate: the patches make them possible, or they share the patched code."""
    for dtype in ("mxfp4", "mxfp8"):
        for family in ("dense", "grouped"):
            for m, n, k in MX_SHAPES:
                yield KernelConfiguration(Tile(family, dtype, m, n, k, "none", False, "bf16"))
    yield KernelConfiguration(Tile("grouped", "mxfp4", 128, 128, 64, "finalize", False, "bf16"))
    yield KernelConfiguration(Tile("grouped", "mxfp8", 128, 128, 64, "finalize", True, "bf16"))
    yield KernelConfiguration(Tile("dense", "fp8xmxfp4", 128, 128, 128, "none", False, "bf16"))
    yield KernelConfiguration(Tile("dense", "nvfp4", 128, 128, 128, "none", True, "bf16"))
    for family, dtype, k in (
        ("dense", "nvfp4", 128),
        ("dense", "nvfp4", 64),
        ("grouped", "nvfp4", 128),
        ("grouped", "mxfp4", 64),
    ):
        yield KernelConfiguration(Tile(family, dtype, 128, 128, k, "none", False, "bf16"), pingpong=True)


def _twin(configuration: KernelConfiguration) -> str:
    """Why an f16 kernel is left out; empty for a kernel that runs."""
    tile = configuration.tile
    if tile.output == "bf16" or (tile.shape == F16_SHAPE and not tile.swap):
        return ""
    return f"differs from its bf16 twin in the last conversion only; f16 is run on {F16_SHAPE}"


def _slow(configuration: KernelConfiguration) -> str:
    """Why ``--quick`` leaves a kernel out; empty for a kernel that runs."""
    tile = configuration.tile
    plain = (tile.m, tile.n) == (128, 128) and tile.k <= 128 and not tile.swap and tile.output == "bf16"
    if plain and not configuration.pingpong and not configuration.streamk:
        return ""
    return "--quick runs 128x128 tiles without variants"


def _examples(configurations: Sequence[KernelConfiguration]) -> Sequence[KernelConfiguration]:
    return configurations[:: max(1, len(configurations) // 4)][:4]
