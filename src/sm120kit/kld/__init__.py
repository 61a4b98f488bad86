"""Compare two models by the KL divergence of their next-token distributions, with a control pair that measures rounding."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sm120kit.core.errors import NothingMeasured
from sm120kit.kld.divergence import TopLogProbabilities, WindowDivergences, divergences
from sm120kit.kld.models import ComparedModel, LocalModel, ServedModel, read_tokens

__all__ = [
    "ComparedModel",
    "DivergenceSummary",
    "KldComparison",
    "LocalModel",
    "ServedModel",
    "Windowing",
    "compare",
    "read_tokens",
    "split_windows",
]

FORMAT = 1
"""Version of the record's format; incremented when the format changes."""


@dataclass(frozen=True)
class Windowing:
    """Division of a text: ``windows`` windows of ``window_tokens``, which start ``stride_tokens`` apart."""

    windows: int = 100
    window_tokens: int = 2048
    stride_tokens: int = 512


@dataclass(frozen=True)
class DivergenceSummary:
    """Statistics of the divergences of all positions, in nats.

    ``positions`` counts the positions with a divergence; those without are counted separately: NaN in a model, or unbounded.
    ``covered`` is the share of the reference's probability that was compared token by token. ``window_means`` has the mean of
    each window that has a divergence.
    """

    positions: int
    covered: float
    nan_reference: int
    nan_test: int
    unbounded: int
    mean: float
    median: float
    p95: float
    p99: float
    max: float
    top1_differs: int
    window_means: tuple[float, ...]


@dataclass(frozen=True)
class KldComparison:
    """Comparison of a test with its reference (``result``), and of the control pair (``noise``).

    ``asked`` is the division of the text, with the number of windows compared so far. ``exact`` is False when a model returned
    its most likely tokens only. ``tokens_sha256`` is the hash of the token ids as JSON. ``complete`` is False when the run
    ended before its last window.
    """

    format: int
    reference: str
    test: str
    control: str
    asked: Windowing
    tokens_sha256: str
    exact: bool
    complete: bool
    result: DivergenceSummary
    noise: DivergenceSummary


def split_windows(tokens: Sequence[int], windowing: Windowing) -> list[Sequence[int]]:
    """Divide a text into windows.

    Raises:
        NothingMeasured: the text is too short.
    """
    windows, length, stride = windowing.windows, windowing.window_tokens, windowing.stride_tokens
    required = length + (windows - 1) * stride
    if len(tokens) < required:
        possible = max(0, (len(tokens) - length) // stride + 1)
        raise NothingMeasured(
            f"{windows} windows of {length} tokens with a stride of {stride} require {required:,} tokens; the text has "
            f"{len(tokens):,}",
            f"use a longer text, or --windows {possible}" if possible else "use a longer text, or a smaller --window",
        )
    return [tokens[start : start + length] for start in range(0, windows * stride, stride)]


def compare(
    reference: ComparedModel,
    test: ComparedModel,
    control: ComparedModel | None,
    tokens: Sequence[int],
    windowing: Windowing,
    *,
    on_progress: Callable[[KldComparison], None] = lambda comparison: None,
) -> KldComparison:
    """Compare two models on the same tokens, two windows at a time to limit memory.

    The control pair is the reference and ``control``; without ``control``, the reference and itself, computed again with one
    window per batch instead of two. The difference of the control pair is rounding, and a divergence of the test below it is
    not significant. ``on_progress`` is called after each pair of windows with the comparison so far.

    Raises:
        NothingMeasured: the text is too short, or no position has a divergence.
    """
    windows = split_windows(tokens, windowing)
    sha256 = hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest()
    control_name = control.name if control else "the reference again, in other batches"
    results: list[WindowDivergences] = []
    noise: list[WindowDivergences] = []
    exact = True

    def comparison() -> KldComparison:
        complete = len(results) == len(windows)
        compared = replace(windowing, windows=len(results))
        summaries = (_summary(results, test.name), _summary(noise, "the control pair"))
        return KldComparison(FORMAT, reference.name, test.name, control_name, compared, sha256, exact, complete, *summaries)

    for first in range(0, len(windows), 2):
        pair = windows[first : first + 2]
        expected, tested = reference.windows(pair), test.windows(pair)
        if control:
            controls = control.windows(pair)
        else:
            controls = [distributions for window in pair for distributions in reference.windows([window])]
        exact = exact and not any(isinstance(distributions, TopLogProbabilities) for distributions in (*expected, *tested))
        results += [divergences(p, q) for p, q in zip(expected, tested, strict=True)]
        noise += [divergences(p, q) for p, q in zip(expected, controls, strict=True)]
        if any(window.nats for window in results) and any(window.nats for window in noise):
            on_progress(comparison())
    return comparison()


def _summary(windows: Sequence[WindowDivergences], name: str) -> DivergenceSummary:
    """Summarize the windows of ``name``, a model or the control pair.

    Raises:
        NothingMeasured: no position has a divergence.
    """
    nats = sorted(value for window in windows for value in window.nats)
    nan = [sum(window.nan_reference for window in windows), sum(window.nan_test for window in windows)]
    unbounded = sum(window.unbounded for window in windows)
    if not nats:
        raise NothingMeasured(
            f"no position of {name} has a divergence: {nan[0]:,} with NaN in the reference, {nan[1]:,} in the test, "
            f"{unbounded:,} unbounded",
            "a model that returns NaN at every position was not loaded correctly",
        )
    percentiles = statistics.quantiles(nats, n=100, method="inclusive") if len(nats) > 1 else nats * 99
    return DivergenceSummary(
        positions=len(nats),
        covered=math.fsum(window.covered * len(window.nats) for window in windows) / len(nats),
        nan_reference=nan[0],
        nan_test=nan[1],
        unbounded=unbounded,
        mean=statistics.fmean(nats),
        median=statistics.median(nats),
        p95=percentiles[94],
        p99=percentiles[98],
        max=nats[-1],
        top1_differs=sum(window.top1_differs for window in windows),
        window_means=tuple(statistics.fmean(window.nats) for window in windows if window.nats),
    )
