"""The knee, from which more concurrency adds no throughput, and goodput: requests per second that meet objectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from sm120kit.bench.figures import summary
from sm120kit.bench.result_file import MeasuredCase
from sm120kit.bench.sample import Sample
from sm120kit.core.errors import NotFound, did_you_mean
from sm120kit.core.outside import number

GAIN = 0.1
"""Minimum increase of the tokens per second for twice the concurrency, below which the server is saturated."""

OBJECTIVES = {"ttft": "time to first token", "ttfa": "time to the answer", "itl": "time between chunks", "e2e": "whole request"}
"""Names of objectives with their meaning; each is a time in milliseconds."""


@dataclass(frozen=True)
class Objective:
    """A request meets it if ``share`` of its times named ``name`` are at most ``seconds``; a request has one TTFT."""

    name: str
    seconds: float
    share: float = 1.0


@dataclass(frozen=True)
class Goodput:
    """Requests of a case that meet all objectives: their number, of how many, and per second."""

    met: int
    requests: int
    per_second: float | None


def parse_objectives(texts: Sequence[str]) -> tuple[Objective, ...]:
    """Objectives from ``NAME=MILLISECONDS``; ``itl:p95=50`` for a percentile of a request's times.

    Raises:
        NotFound: another form or name.
    """
    objectives = []
    for text in texts:
        name, _, limit = text.partition("=")
        name, _, percentile = name.partition(":p")
        try:
            objective = Objective(name, number(limit) / 1000, number(percentile) / 100 if percentile else 1.0)
        except ValueError:
            objective = Objective("", 0)
        if objective.name not in OBJECTIVES or objective.seconds <= 0 or not 0 < objective.share <= 1:
            known = "; ".join(f"{key}: {meaning}" for key, meaning in OBJECTIVES.items())
            raise NotFound(
                f"{text!r} is no objective{did_you_mean(name, OBJECTIVES)}", f"NAME=MILLISECONDS or itl:p95=50; {known}"
            )
        objectives.append(objective)
    return tuple(objectives)


def goodput(case: MeasuredCase, objectives: Sequence[Objective]) -> Goodput:
    """The requests of a case that meet all objectives, over the time from the first request to the last end.

    Failed requests meet none, and a time that is unknown is not met.
    """
    met = sum(not sample.error and all(_meets(sample, objective) for objective in objectives) for sample in case.samples)
    span = max((s.ended for s in case.samples), default=0.0) - min((s.started for s in case.samples), default=0.0)
    return Goodput(met, len(case.samples), met / span if span > 0 else None)


def _meets(sample: Sample, objective: Objective) -> bool:
    if objective.name == "itl":
        gaps = sample.itl
        return sum(gap <= objective.seconds for gap in gaps) >= objective.share * len(gaps)
    times = {"ttft": sample.ttft, "ttfa": sample.ttfa, "e2e": sample.ended - sample.started}
    time = times[objective.name]
    return time is not None and time <= objective.seconds


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
