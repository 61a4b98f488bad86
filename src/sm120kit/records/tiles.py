"""CTA tiles: what the engine's templates make of them, and what their emulation showed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

SMEM_CAPACITY_BYTES = 101_376
"""Dynamic shared memory one CTA can have on SM120 and SM121 (99 KiB; CUDA C++ Programming Guide, compute capability 12.x)."""


@dataclass(frozen=True)
class Tile:
    """A CTA tile that an engine instantiates for SM120: ``m`` x ``n`` x ``k`` in elements.

    ``family`` is grouped (fused MoE) or dense; ``dtype`` nvfp4, mxfp4, mxfp8 or fp8xmxfp4 (activations x weights); ``epilogue``
    none or finalize; ``swap`` whether A and B change places; ``output`` bf16 or f16.
    """

    family: str
    dtype: str
    m: int
    n: int
    k: int
    epilogue: str
    swap: bool
    output: str

    @property
    def shape(self) -> str:
        """As people write it."""
        return f"{self.m}x{self.n}x{self.k}"


class Proof(StrEnum):
    """What is known of the numbers that a tile computes."""

    PROVEN = "proven"
    WRONG = "wrong"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True)
class Numbers:
    """Whether a tile computes right numbers, as far as the emulation on the CPU shows it; ``why`` when it is not proven.

    ``outputs`` were compared bit for bit with integers, ``mismatches`` of them differ.
    """

    proof: Proof = Proof.NOT_CHECKED
    why: str = ""
    outputs: int = 0
    mismatches: int = 0


@dataclass(frozen=True)
class TileFacts:
    """What the engine's templates make of a tile, and with ``numbers`` what its emulation showed.

    ``generated`` is false for a tile that the engine could but does not instantiate. A tile that does not compile has the
    reason in plain words, the compiler's own words, and where in the tree they stand (file:line). One that does has the
    schedule (cooperative or pingpong), the tile scheduler (persistent or stream-k), pipeline ``stages``, dynamic shared memory
    per CTA, and ``k_blocks``, the MMA steps along K in one tile.
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
    numbers: Numbers = Numbers()

    @property
    def fits(self) -> bool:
        """Whether SM120 and SM121 can launch it."""
        return self.compiles and self.smem_bytes <= SMEM_CAPACITY_BYTES

    @property
    def margin_bytes(self) -> int | None:
        """Shared memory left over; negative when it is too big, None when it does not compile."""
        return SMEM_CAPACITY_BYTES - self.smem_bytes if self.compiles else None


@dataclass(frozen=True)
class EmulationFinding:
    """One kind of thing that is wrong, such as a rejected tensor map: how often, and the first few in words."""

    kind: str
    count: int
    first: tuple[str, ...]


@dataclass(frozen=True)
class Emulation:
    """What running a tile's mainloop and epilogue on the CPU showed.

    ``passed`` means every accumulator (``outputs``) and every bf16 value that the epilogue ``stored`` has the bits of the
    integer reference, and there is no finding. ``max_error`` is None when an accumulator was NaN or nothing came out.
    ``signature`` names a known way to be wrong that explains every mismatch.
    ``expected_bytes`` and ``delivered_bytes`` are those of one pipeline stage; -1 when no stage was ever completed.
    """

    tile: Tile
    fault: str
    passed: bool
    outputs: int = 0
    mismatches: int = 0
    max_error: float | None = None
    signature: str = ""
    stored: int = 0
    stored_mismatches: int = 0
    stages: int = 0
    tensor_bytes: int = 0
    mma_count: int = 0
    expected_bytes: int = -1
    delivered_bytes: int = -1
    findings: tuple[EmulationFinding, ...] = ()
