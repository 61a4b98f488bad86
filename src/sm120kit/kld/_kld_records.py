"""Records of a comparison of distributions."""

from __future__ import annotations

from dataclasses import dataclass

FORMAT = 1
"""Version of the comparison's format; incremented when the format changes."""


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

    ``windowing`` is the division of the text, with the number of windows compared so far. ``exact`` is False when a model
    returned its most likely tokens only. ``tokens_sha256`` is the hash of the token ids as JSON. ``complete`` is False when
    the run ended before its last window.
    """

    format: int
    reference: str
    test: str
    control: str
    windowing: Windowing
    tokens_sha256: str
    exact: bool
    complete: bool
    result: DivergenceSummary
    noise: DivergenceSummary
