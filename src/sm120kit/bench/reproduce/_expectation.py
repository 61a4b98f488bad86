"""Compare measured and published rates with the rate that is expected of their configuration."""

from __future__ import annotations

from dataclasses import dataclass

from sm120kit.bench.roofline import GpuKind, RooflineModel, Work, tokens_per_step
from sm120kit.bench.roofline.expected import MEAN_ERROR, ExpectedStep, expected_step

NEAR = 2 * MEAN_ERROR
"""Deviation from the expected rate up to which a rate is as expected. All published tables but one deviate less on average."""


@dataclass(frozen=True)
class Expectation:
    """The expected step of a concurrency.

    ``tokens`` per step and request follow from the measured acceptance of drafts, None if it is unknown; at most ``at_most``.
    """

    concurrency: int
    step: ExpectedStep
    tokens: float | None
    at_most: int

    @property
    def tok_s(self) -> float | None:
        """The expected rate of all requests in parallel together."""
        return None if self.tokens is None else self.concurrency * self.tokens / self.step.seconds

    def share(self, tok_s: float) -> float | None:
        """A rate over the expected one."""
        return tok_s / self.tok_s if self.tok_s else None

    def statement(self, tok_s: float) -> str:
        """How far a rate is from the expected one, and which term dominates the expected step."""
        share = self.share(tok_s)
        if share is None:
            needs = tok_s / self.concurrency * self.step.seconds
            excess = ": impossible" if needs > self.at_most * (1 + NEAR) else ""
            return f"{tok_s:.4g} tok/s take {needs:.1f} of at most {self.at_most} tokens in an {self._step}{excess}"
        relation = f"within {NEAR:.0%}" if abs(share - 1) <= NEAR else "below that" if share < 1 else "above that"
        expected = f"the expected {self.tok_s:.4g} with a mean error of {MEAN_ERROR:.0%}"
        return f"{tok_s:.4g} tok/s, {share:.2f} of {expected}: {relation}; {self._step}"

    @property
    def _step(self) -> str:
        term, part = self.step.dominant
        return f"expected step of {self.step.seconds * 1e3:.1f} ms, {part:.0%} of it {term}"


def expectation(model: RooflineModel, gpu: GpuKind, work: Work, acceptance: float | None) -> Expectation:
    """The expectation for a load, with the acceptance of drafts if it was measured."""
    known = acceptance is not None or not work.drafts
    tokens = tokens_per_step(work.drafts, acceptance or 0.0) if known else None
    return Expectation(work.concurrency, expected_step(model, gpu, work), tokens, 1 + work.drafts)
