"""How far a model's next-token distributions are from those of a reference, and how far the reference is from itself."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sm120kit.errors import NothingMeasured
from sm120kit.kld.divergence import Divergences, Listed, divergences
from sm120kit.kld.sides import Checkpoint, Served, Side, tokens_of

__all__ = ["Asked", "Checkpoint", "Comparison", "Served", "Side", "Summary", "compare", "tokens_of", "windows"]

FORMAT = 1
"""Raised when a comparison's form changes."""


@dataclass(frozen=True)
class Asked:
    """How a text is cut: ``windows`` windows of ``window_tokens``, each ``stride_tokens`` after the one before."""

    windows: int = 100
    window_tokens: int = 2048
    stride_tokens: int = 512


@dataclass(frozen=True)
class Summary:
    """The divergences of all positions, in nats.

    ``positions`` counts those with a value; those without are counted apart: NaN on a side, or unbounded. ``covered`` is how
    much of the reference's probability was compared token by token. ``window_means`` has the mean of each window that has one.
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
class Comparison:
    """A test against its reference, and the control pair beside it.

    ``exact`` is false where a side gave its likeliest tokens only.
    ``tokens_sha256`` is that of the token ids as JSON. ``complete`` is false when the run ended before its last window.
    """

    format: int
    reference: str
    test: str
    control: str
    asked: Asked
    tokens_sha256: str
    exact: bool
    complete: bool
    result: Summary
    noise: Summary


def windows(tokens: Sequence[int], asked: Asked) -> list[Sequence[int]]:
    """A text's windows.

    Raises:
        NothingMeasured: it is too short for them.
    """
    needed = asked.window_tokens + (asked.windows - 1) * asked.stride_tokens
    if len(tokens) < needed:
        fit = max(0, (len(tokens) - asked.window_tokens) // asked.stride_tokens + 1)
        raise NothingMeasured(
            f"{asked.windows} windows of {asked.window_tokens} tokens, {asked.stride_tokens} apart, need {needed:,} tokens; "
            f"the text has {len(tokens):,}",
            f"a longer text, or --windows {fit}" if fit else "a longer text, or a smaller --window",
        )
    return [
        tokens[start : start + asked.window_tokens]
        for start in range(0, asked.windows * asked.stride_tokens, asked.stride_tokens)
    ]


def compare(
    reference: Side,
    test: Side,
    control: Side | None,
    tokens: Sequence[int],
    asked: Asked,
    *,
    keep: Callable[[Comparison], None] = lambda comparison: None,
) -> Comparison:
    """Compare two models on the same tokens, two windows at a time, so that what is held at once stays small.

    The control pair is the reference against ``control``, or against itself asked again, one window at a time instead of two:
    what differs there is rounding in another batch, and a test's divergence below it says nothing. ``keep`` gets what was
    measured after each pair of windows, marked as not complete until it is.

    Raises:
        NothingMeasured: the text is too short, or no position has a value.
    """
    cut = windows(tokens, asked)
    sha256 = hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest()
    against = control.name if control else "the reference again, in other batches"
    found: list[Divergences] = []
    noise: list[Divergences] = []
    exact = True

    def made() -> Comparison:
        whole, results = len(found) == len(cut), (_summary(found, test.name), _summary(noise, "the control pair"))
        done = replace(asked, windows=len(found))
        return Comparison(FORMAT, reference.name, test.name, against, done, sha256, exact, whole, *results)

    for first in range(0, len(cut), 2):
        pair = cut[first : first + 2]
        expected, tested = reference.windows(pair), test.windows(pair)
        again = control.windows(pair) if control else [one for window in pair for one in reference.windows([window])]
        exact = exact and not any(isinstance(one, Listed) for one in (*expected, *tested))
        found += [divergences(p, q) for p, q in zip(expected, tested, strict=True)]
        noise += [divergences(p, q) for p, q in zip(expected, again, strict=True)]
        if any(one.nats for one in found) and any(one.nats for one in noise):
            keep(made())
    return made()


def _summary(found: Sequence[Divergences], what: str) -> Summary:
    nats = sorted(value for one in found for value in one.nats)
    nan = [sum(one.nan_reference for one in found), sum(one.nan_test for one in found)]
    unbounded = sum(one.unbounded for one in found)
    if not nats:
        raise NothingMeasured(
            f"no position of {what} has a divergence: {nan[0]:,} with NaN in the reference, {nan[1]:,} in the test, "
            f"{unbounded:,} unbounded",
            "a model that gives NaN everywhere was not loaded as it should be",
        )
    percentiles = statistics.quantiles(nats, n=100, method="inclusive") if len(nats) > 1 else nats * 99
    return Summary(
        positions=len(nats),
        covered=math.fsum(one.covered * len(one.nats) for one in found) / len(nats),
        nan_reference=nan[0],
        nan_test=nan[1],
        unbounded=unbounded,
        mean=statistics.fmean(nats),
        median=statistics.median(nats),
        p95=percentiles[94],
        p99=percentiles[98],
        max=nats[-1],
        top1_differs=sum(one.top1_differs for one in found),
        window_means=tuple(statistics.fmean(one.nats) for one in found if one.nats),
    )
