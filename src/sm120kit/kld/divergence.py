"""Kullback-Leibler divergence of two next-token distributions per position, in float64 and in nats.

A window's distributions are full (rows of logits) or the most likely tokens of each position (as servers return them). For full
distributions the divergence is exact. Otherwise all unlisted tokens count as a single token; the result is a lower bound of the
divergence of the full distributions (data-processing inequality).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Rows = NDArray[np.floating[Any]]


class FullDistributions(Protocol):
    """Logits or log-probabilities of shape (positions, vocabulary), which are computed when rows are requested."""

    shape: tuple[int, ...]

    def __getitem__(self, rows: slice) -> Rows:
        """An array of some positions."""
        ...


REST_FLOOR = 1e-6
"""Minimum probability of all unlisted tokens together; smaller values are rounding errors of float32 log-probabilities."""

BLOCK_VALUES = 2**22
"""Values per step: 32 MB in float64."""


@dataclass(frozen=True)
class TopLogProbabilities:
    """For each position, token id -> log-probability of the most likely tokens."""

    positions: Sequence[Mapping[int, float]]


@dataclass(frozen=True)
class WindowDivergences:
    """Divergences of the positions of one window.

    ``nats`` has one value per position that has a divergence. A position has none where a model returns NaN, or where the test
    gives probability 0 to a token that the reference does not (``unbounded``). ``top1_differs`` counts the positions with a
    divergence whose most likely token differs. ``covered`` is the reference's probability of the tokens that were compared
    individually, averaged over these positions: 1 for full distributions.
    """

    nats: tuple[float, ...]
    covered: float
    nan_reference: int
    nan_test: int
    unbounded: int
    top1_differs: int


def divergences(
    reference: FullDistributions | TopLogProbabilities, test: FullDistributions | TopLogProbabilities
) -> WindowDivergences:
    """``KL(reference || test)`` at each position that both have.

    Vocabularies of different sizes, usually because of padding, are cut to the smaller size and normalized again.
    """
    if isinstance(reference, TopLogProbabilities) or isinstance(test, TopLogProbabilities):
        return _of_top(reference, test)
    return _of_full(reference, test)


def _of_full(reference: FullDistributions, test: FullDistributions) -> WindowDivergences:
    import numpy as np

    count, common = min(reference.shape[0], test.shape[0]), min(reference.shape[1], test.shape[1])
    nats: list[float] = []
    nan_reference = nan_test = unbounded = differs = 0
    for rows in blocks(count, common):
        pair = [np.asarray(full[rows][:, :common], dtype=np.float64) for full in (reference, test)]
        has_nan = [np.isnan(full).any(axis=1) for full in pair]
        nan_reference += int(has_nan[0].sum())
        nan_test += int(has_nan[1].sum())
        valid = ~(has_nan[0] | has_nan[1])
        p, q = (normalized(full[valid]) for full in pair)
        with np.errstate(invalid="ignore"):  # -inf minus -inf, which np.where replaces by 0
            terms = np.where(np.isneginf(p), 0.0, np.exp(p) * (p - q))
        values = terms.sum(axis=1)
        bounded = np.isfinite(values)
        unbounded += int((~bounded).sum())
        differs += int((p.argmax(axis=1) != q.argmax(axis=1))[bounded].sum())
        nats += values[bounded].tolist()
    return WindowDivergences(tuple(nats), 1.0, nan_reference, nan_test, unbounded, differs)


def blocks(count: int, vocabulary: int) -> list[slice]:
    """Slices of ``count`` positions, each with at most ``BLOCK_VALUES`` values."""
    step = max(1, BLOCK_VALUES // vocabulary)
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def normalized(rows: Rows) -> Rows:
    """Log-probabilities of logits, in float64."""
    import numpy as np

    rows = np.asarray(rows, dtype=np.float64)
    top = rows.max(axis=1, keepdims=True, initial=-np.inf)
    return np.asarray(rows - (top + np.log(np.exp(rows - top).sum(axis=1, keepdims=True))))


def _of_top(
    reference: FullDistributions | TopLogProbabilities, test: FullDistributions | TopLogProbabilities
) -> WindowDivergences:
    nats: list[float] = []
    covered: list[float] = []
    nan_reference = nan_test = unbounded = differs = 0
    for p, q in zip(_positions(reference, test), _positions(test, reference), strict=False):
        has_nan = [any(math.isnan(value) for value in position.values()) for position in (p, q)]
        nan_reference += has_nan[0]
        nan_test += has_nan[1]
        if any(has_nan):
            continue
        value, shared = _position_divergence(p, q)
        if math.isinf(value):
            unbounded += 1
            continue
        nats.append(value)
        covered.append(shared)
        differs += max(p, key=p.__getitem__) != max(q, key=q.__getitem__)
    return WindowDivergences(tuple(nats), fmean(covered) if covered else 0.0, nan_reference, nan_test, unbounded, differs)


def _positions(
    distributions: FullDistributions | TopLogProbabilities, other: FullDistributions | TopLogProbabilities
) -> Sequence[Mapping[int, float]]:
    """Lists of tokens per position; of full distributions, the tokens that the other model lists, and the most likely token."""
    if isinstance(distributions, TopLogProbabilities):
        return distributions.positions
    assert isinstance(other, TopLogProbabilities)
    count, listed = min(distributions.shape[0], len(other.positions)), other.positions
    selected = []
    for rows in blocks(count, distributions.shape[1]):
        for row, tokens in zip(normalized(distributions[rows]), listed[rows], strict=True):
            ids = [token for token in {*tokens, int(row.argmax())} if token < len(row)]
            selected.append(dict(zip(ids, row[ids].tolist(), strict=True)))
    return selected


def _position_divergence(p: Mapping[int, float], q: Mapping[int, float]) -> tuple[float, float]:
    """The divergence at one position, and the reference's probability of the tokens that both list."""
    both = p.keys() & q.keys()
    total = 0.0
    for token in both:
        if p[token] > -math.inf:
            if q[token] == -math.inf:
                return math.inf, 0.0
            total += _probability(p[token]) * (p[token] - q[token])
    shared = [math.fsum(_probability(position[token]) for token in both) for position in (p, q)]
    rest_p, rest_q = (max(1.0 - probability, REST_FLOOR) for probability in shared)
    return total + rest_p * math.log(rest_p / rest_q), shared[0]


def _probability(logprob: float) -> float:
    """The probability, also of what a server lists and is none: a logit may be too large for a float's exponential."""
    return math.exp(min(logprob, 1.0))
