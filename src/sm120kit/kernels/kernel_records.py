"""Records of CTA tiles: their shape, properties of their kernels, and whether their numbers are correct."""

from dataclasses import dataclass
from enum import StrEnum

SMEM_CAPACITY_BYTES = 101_376
"""Limit of dynamic shared memory per CTA on SM120 and SM121 (99 KiB; CUDA C++ Programming Guide, compute capability 12.x)."""


@dataclass(frozen=True)
class Tile:
    """A CTA tile that an engine instantiates for SM120: ``m`` x ``n`` x ``k`` in elements.

    ``family`` is grouped (fused MoE) or dense, and groupwise or groupwise-grouped for those of FlashInfer's ``gemm_sm120``;
    ``dtype`` nvfp4, mxfp4, mxfp8, fp8xmxfp4 (activations x weights) or fp8, with ``fp8_e5m2`` for fp8 that is not e4m3;
    ``epilogue`` none or finalize; ``swap`` whether A and B change places; ``output`` bf16 or f16; ``scales`` the rows of A x
    rows of B x elements of K that share an fp32 scale, empty for other types of scales.
    """

    family: str
    dtype: str
    m: int
    n: int
    k: int
    epilogue: str
    swap: bool
    output: str
    scales: str = ""

    @property
    def grouped(self) -> bool:
        """Whether its kernel computes a group of GEMMs."""
        return self.family.endswith("grouped")

    @property
    def shape(self) -> str:
        """The tile as text: ``128x128x64``."""
        return f"{self.m}x{self.n}x{self.k}"


class NumericStatus(StrEnum):
    """Whether a tile computes correct numbers."""

    PROVEN = "proven"
    MAINLOOP_PROVEN = "mainloop proven"
    WRONG = "wrong"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True)
class NumericResult:
    """Whether a tile computes correct numbers, by its emulation on the CPU; ``why`` is the reason unless they are proven.

    Of a tile whose mainloop is proven, ``why`` lists the parts of its kernel that were not run.
    ``outputs`` counts values that were compared with integers, bit for bit; ``mismatches`` those that differ.
    """

    proof: NumericStatus = NumericStatus.NOT_CHECKED
    why: str = ""
    outputs: int = 0
    mismatches: int = 0


@dataclass(frozen=True)
class TileFacts:
    """Properties of a tile's kernel, evaluated by the engine's templates; ``numbers`` is the result of its emulation.

    ``generated`` is false for a tile that the engine could instantiate but does not. A tile that does not compile has the
    reason in plain English (``why_not``), the compiler's message (``error``) and its file:line in the tree (``where``). A tile
    that compiles has the schedule (cooperative or pingpong), the tile scheduler (persistent or stream-k), pipeline ``stages``,
    dynamic shared memory per CTA in bytes, and ``k_blocks``, the MMA steps along K in one tile.
    """

    tile: Tile
    generated: bool
    compiles: bool
    why_not: str = ""
    error: str = ""
    where: str = ""
    schedule: str = ""
    scheduler: str = ""
    stages: int = 0
    smem_bytes: int = 0
    k_blocks: int = 0
    numbers: NumericResult = NumericResult()

    @property
    def fits(self) -> bool:
        """Whether SM120 and SM121 can launch it."""
        return self.compiles and self.smem_bytes <= SMEM_CAPACITY_BYTES

    @property
    def margin_bytes(self) -> int | None:
        """Unused shared memory in bytes; negative if the tile is too big, None if it does not compile."""
        return SMEM_CAPACITY_BYTES - self.smem_bytes if self.compiles else None
