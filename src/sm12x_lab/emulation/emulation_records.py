"""Results of emulations."""

from __future__ import annotations

from dataclasses import dataclass

from sm120kit.kernels.kernel_records import Tile


@dataclass(frozen=True)
class EmulationFinding:
    """A kind of error in an emulation, such as a rejected tensor map: its count and the first few messages."""

    kind: str
    count: int
    first: tuple[str, ...]


@dataclass(frozen=True)
class Emulation:
    """The result of emulating a tile's mainloop and epilogue on the CPU, and the whole kernel if that was run as well.

    ``passed`` means that every accumulator (``outputs``; the whole kernel's are not seen) and every bf16 value that was
    ``stored`` has the bits of the integer reference, and that there is no finding. ``max_error`` is None if an accumulator was
    NaN or there was no output.
    ``signature`` names a known kind of error that explains every mismatch.
    ``expected_bytes`` and ``delivered_bytes`` are per pipeline stage; -1 if no stage was completed.
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
