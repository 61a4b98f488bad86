"""Receipts for tests of plots: a sweep over users and contexts with a failed request, a failed and an interrupted cell."""

from __future__ import annotations

from sm120kit.bench.receipt import FORMAT, Circumstances, MeasuredCell, Receipt
from sm120kit.bench.sample import Sample


def sample(user: int, rate: float, error: str = "") -> Sample:
    """101 tokens, one per chunk, at a steady rate."""
    times = tuple(1.0 + i / rate for i in range(101))
    return Sample(user, 0, 0.0, times[-1], 200, error, times, 101, 1.0, 1.0, 5, None, 101, None, "stop", "m", "")


def cell(users: int, context: int, *samples: Sample, restart: int = 0, complete: bool = True) -> MeasuredCell:
    return MeasuredCell(users, 100, context, (), samples, 0.001, None, restart, None, complete)


ABOUT = Circumstances("http://x", "tiny", "w", "0" * 64, "off", 0.0, 0, {"python": "3"}, {})


def receipt_of(*cells: MeasuredCell) -> Receipt:
    return Receipt(FORMAT, "2026-01-01T00:00:00+00:00", True, ABOUT, cells)


SWEEP = receipt_of(
    cell(1, 0, sample(0, 50), sample(0, 60)),
    cell(4, 0, *(sample(user, 40) for user in range(3)), sample(3, 40, "HTTP 500")),
    cell(8, 0, *(sample(user, 9, "HTTP 500") for user in range(8))),
    cell(1, 32000, sample(0, 30)),
    cell(1, 64000, sample(0, 3), complete=False),
)
