"""Kullback-Leibler divergence of two next-token distributions, position by position, in float64 and in nats.

A window's distributions come whole (an array) or as the likeliest tokens of each position (what servers give). Of whole ones
the divergence is exact; of others it is that of the distributions with all unlisted tokens taken as one, which is never more
than the divergence of the whole ones (data-processing inequality).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Whole = NDArray[np.floating[Any]]

REST_FLOOR = 1e-6
"""The least probability that all unlisted tokens together are given: below lies the rounding of float32 log-probabilities."""

_ROWS = 64
"""Positions taken at once, so that a vocabulary of 250,000 in float64 stays below half a GB."""


@dataclass(frozen=True)
class Listed:
    """For each position the log-probabilities of its likeliest tokens, by token."""

    positions: Sequence[Mapping[int, float]]


@dataclass(frozen=True)
class Divergences:
    """What a window's positions came to.

    ``nats`` holds one value for each position that has one. A position where a side has NaN has none, and neither has one
    where the test gives probability 0 to a token that the reference does not (``unbounded``). ``top1_differs`` counts, of those
    with a value, where the likeliest token is another one. ``covered`` is the reference's probability of the tokens that were
    compared one by one, the mean of those positions: 1 where the distributions are whole.
    """

    nats: tuple[float, ...]
    covered: float
    nan_reference: int
    nan_test: int
    unbounded: int
    top1_differs: int


def divergences(reference: Whole | Listed, test: Whole | Listed) -> Divergences:
    """``KL(reference || test)`` at each position that both sides have.

    Whole ones are arrays of shape (positions, vocabulary) of log-probabilities. Where the vocabularies differ in size, as
    padding makes them, both are cut to the smaller one and normalised again.
    """
    if isinstance(reference, Listed) or isinstance(test, Listed):
        return _of_listed(reference, test)
    return _of_whole(reference, test)


def _of_whole(reference: Whole, test: Whole) -> Divergences:
    import numpy as np

    count, common = min(len(reference), len(test)), min(reference.shape[1], test.shape[1])
    nats: list[float] = []
    nan_reference = nan_test = unbounded = differs = 0
    for start in range(0, count, _ROWS):
        rows = slice(start, min(start + _ROWS, count))
        sides = [np.asarray(side[rows, :common], dtype=np.float64) for side in (reference, test)]
        bad = [np.isnan(side).any(axis=1) for side in sides]
        nan_reference += int(bad[0].sum())
        nan_test += int(bad[1].sum())
        kept = ~(bad[0] | bad[1])
        p, q = (_normalised(side[kept]) for side in sides)
        with np.errstate(invalid="ignore"):  # where both are -inf, which the next line takes as nothing
            terms = np.where(np.isneginf(p), 0.0, np.exp(p) * (p - q))
        values = terms.sum(axis=1)
        bounded = np.isfinite(values)
        unbounded += int((~bounded).sum())
        differs += int((p.argmax(axis=1) != q.argmax(axis=1))[bounded].sum())
        nats += values[bounded].tolist()
    return Divergences(tuple(nats), 1.0, nan_reference, nan_test, unbounded, differs)


def _normalised(rows: Whole) -> Whole:
    import numpy as np

    top = rows.max(axis=1, keepdims=True, initial=-np.inf)
    return np.asarray(rows - (top + np.log(np.exp(rows - top).sum(axis=1, keepdims=True))))


def _of_listed(reference: Whole | Listed, test: Whole | Listed) -> Divergences:
    nats: list[float] = []
    covered: list[float] = []
    nan_reference = nan_test = unbounded = differs = 0
    for p, q in zip(_positions(reference, test), _positions(test, reference), strict=False):
        bad = [any(math.isnan(value) for value in side.values()) for side in (p, q)]
        nan_reference += bad[0]
        nan_test += bad[1]
        if any(bad):
            continue
        value, shared = _one(p, q)
        if math.isinf(value):
            unbounded += 1
            continue
        nats.append(value)
        covered.append(shared)
        differs += max(p, key=p.__getitem__) != max(q, key=q.__getitem__)
    return Divergences(tuple(nats), fmean(covered) if covered else 0.0, nan_reference, nan_test, unbounded, differs)


def _positions(side: Whole | Listed, other: Whole | Listed) -> Sequence[Mapping[int, float]]:
    """A side's positions as lists; of whole distributions the tokens that the other side lists, and the likeliest one."""
    if isinstance(side, Listed):
        return side.positions
    assert isinstance(other, Listed)
    return [
        {token: float(row[token]) for token in {*listed, int(row.argmax())} if token < len(row)}
        for row, listed in zip(side, other.positions, strict=False)
    ]


def _one(p: Mapping[int, float], q: Mapping[int, float]) -> tuple[float, float]:
    """The divergence, and the reference's probability of the tokens that both list."""
    both = p.keys() & q.keys()
    total = 0.0
    for token in both:
        if p[token] > -math.inf:
            if q[token] == -math.inf:
                return math.inf, 0.0
            total += math.exp(p[token]) * (p[token] - q[token])
    shared = [math.fsum(math.exp(side[token]) for token in both) for side in (p, q)]
    rest_p, rest_q = (max(1.0 - one, REST_FLOOR) for one in shared)
    return total + rest_p * math.log(rest_p / rest_q), shared[0]
