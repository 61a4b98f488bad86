"""Results for tests of plots: a sweep over concurrency and contexts with a failed request, a failed and an interrupted case."""

from __future__ import annotations

from sm120kit.bench.result_file import FORMAT, Environment, MeasuredCase, Result
from sm120kit.bench.sample import Sample


def sample(user: int, rate: float, error: str = "") -> Sample:
    """101 tokens, one per chunk, at a steady rate."""
    times = tuple(1.0 + i / rate for i in range(101))
    return Sample(user, 0, 0.0, times[-1], 200, error, times, 101, 1.0, 1.0, 5, None, 101, None, "stop", "m", "")


def case(concurrency: int, context: int, *samples: Sample, restart: int = 0, complete: bool = True) -> MeasuredCase:
    return MeasuredCase(concurrency, 100, context, (), samples, 0.001, None, restart, complete)


ABOUT = Environment("http://x", "tiny", "w", "0" * 64, "off", 0.0, {"python": "3"}, {})


def result_of(*cases: MeasuredCase) -> Result:
    return Result(FORMAT, "2026-01-01T00:00:00+00:00", True, ABOUT, cases)


SWEEP = result_of(
    case(1, 0, sample(0, 50), sample(0, 60)),
    case(4, 0, *(sample(user, 40) for user in range(3)), sample(3, 40, "HTTP 500")),
    case(8, 0, *(sample(user, 9, "HTTP 500") for user in range(8))),
    case(1, 32000, sample(0, 30)),
    case(1, 64000, sample(0, 3), complete=False),
)
