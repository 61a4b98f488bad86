"""The knee, from which more concurrency adds no throughput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from sm120kit.bench.figures import summary
from sm120kit.bench.result_file import MeasuredCase

GAIN = 0.1
"""Minimum increase of the tokens per second for twice the concurrency, below which the server is saturated."""


def throughput(cases: Sequence[MeasuredCase]) -> dict[int, float]:
    """Total tokens per second by concurrency, in increasing order: the median over starts.

    Only of complete cases without failed requests: those would lower the rate, or be refused sooner than they are answered.
    """
    rates: dict[int, list[float]] = {}
    for case in cases:
        figures = summary(case)
        if case.complete and not figures.errors and figures.output_tok_s:
            rates.setdefault(case.concurrency, []).append(figures.output_tok_s)
    return {concurrency: median(rates[concurrency]) for concurrency in sorted(rates)}


def knee(cases: Sequence[MeasuredCase]) -> int | None:
    """The concurrency from which more add less than ``GAIN`` per doubling; None if no measured number is.

    The cases differ in concurrency only. Gains between numbers that are not doubled are scaled to a doubling.
    """
    rates = list(throughput(cases).items())
    for (concurrency, rate), (more, higher) in pairwise(rates):
        if higher / rate < (1 + GAIN) ** _doublings(concurrency, more):
            return concurrency
    return None


@dataclass(frozen=True)
class Knee:
    """The knee of cases that differ in concurrency only."""

    concurrency: int
    output_tokens: int
    context_tokens: int

    @property
    def text(self) -> str:
        """The knee as a line."""
        return (
            f"knee at concurrency {self.concurrency} ({self.output_tokens:,} output tokens at context depth "
            f"{self.context_tokens:,}): twice as much adds less than {GAIN:.0%} of tokens per second"
        )


def knees(cases: Sequence[MeasuredCase]) -> tuple[Knee, ...]:
    """The knee of each series of cases that differ in concurrency only."""
    series: dict[tuple[int, int], list[MeasuredCase]] = {}
    for case in cases:
        series.setdefault((case.output_tokens, case.context_tokens), []).append(case)
    return tuple(Knee(concurrency, *key) for key, each in sorted(series.items()) if (concurrency := knee(each)) is not None)


def _doublings(concurrency: int, more: int) -> float:
    from math import log2

    return log2(more / concurrency)
