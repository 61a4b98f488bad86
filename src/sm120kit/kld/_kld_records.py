"""Records of a comparison of distributions."""

from dataclasses import dataclass

FORMAT = 1
"""Version of the comparison's format; incremented when the format changes."""

SCALE = ((0.01, "near lossless"), (0.05, "good"), (0.1, "noticeable"), (float("inf"), "bad"))
"""Upper limit of the mean in nats -> rating (voipmonitor/rtx6kpro, benchmarks/kld-evaluation.md)."""

COVERED = 0.999
"""Minimum share of the probability for a rating: a lower bound from less leaves tokens uncompared that may differ."""


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

    @property
    def problems(self) -> tuple[str, ...]:
        """Why the comparison fails: NaN, and tokens of probability 0."""
        counts = {
            "the reference returns NaN": self.nan_reference,
            "the test returns NaN": self.nan_test,
            "the test gives probability 0 to a token that the reference does not": self.unbounded,
        }
        total = self.positions + sum(counts.values())
        return tuple(f"{problem} at {count:,} of {total:,} positions" for problem, count in counts.items() if count)


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

    @property
    def statements(self) -> tuple[str, ...]:
        """What the figures mean: a rating, or why there is none, and whether the difference is significant."""
        if self.result.problems:
            rating = "not rated: positions without a divergence are excluded from the figures"
        elif self.result.covered < COVERED:
            rating = (
                f"a lower bound: the tokens that both models listed have {self.result.covered:.1%} of the reference's "
                "probability; all others count as a single token. --top requests more tokens"
            )
        else:
            name = next(name for limit, name in SCALE if self.result.mean < limit)
            rating = f"{name}, by the scale of the community's evaluations"
        noise = "not larger than the difference of the control pair: no significant difference"
        return (rating, noise) if self.result.mean <= self.noise.mean and self.noise.mean > 0 else (rating,)
