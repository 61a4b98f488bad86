"""Expected decode rates: the roofline's step with costs that are fitted to published rates; see docs/bench.md."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from sm120kit.bench.roofline import DecodeStep, GpuKind, RooflineModel, Work, step


@dataclass(frozen=True)
class Calibration:
    """The fitted costs.

    ``layer_seconds`` is the floor of a layer: launches, and kernels too small to reach the bandwidth. ``wait_seconds`` is what
    all-reduces take beyond their published times, per layer and doubling of the GPUs. ``gb10_share`` is the share of its
    published bandwidth that GB10 reaches; other GPUs count with all of theirs.
    """

    layer_seconds: float
    wait_seconds: float
    gb10_share: float


CALIBRATION = Calibration(layer_seconds=100e-6, wait_seconds=30e-6, gb10_share=0.74)
"""The minimum of the mean absolute error over the tables in docs/measurements/rates.md."""
MEAN_ERROR = 0.13
"""Mean absolute error over the same tables, each with the costs fitted to the others."""


@dataclass(frozen=True)
class ExpectedStep:
    """Seconds of an expected decode step by cause; they add up."""

    terms: tuple[tuple[str, float], ...]

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(seconds for _, seconds in self.terms)

    @property
    def dominant(self) -> tuple[str, float]:
        """The longest term and its share of the step."""
        name, seconds = max(self.terms, key=lambda term: term[1])
        return name, seconds / self.seconds


def expected_step(model: RooflineModel, gpu: GpuKind, work: Work) -> ExpectedStep:
    """The decode step that current engines are expected to take."""
    return calibrated(step(model, gpu, work), model, gpu, work, CALIBRATION)


def calibrated(ideal: DecodeStep, model: RooflineModel, gpu: GpuKind, work: Work, calibration: Calibration) -> ExpectedStep:
    """The expected step, from that of the roofline."""
    share = calibration.gb10_share if gpu.name == "GB10" else 1.0
    reads: tuple[tuple[str, float], ...] = (
        ("weights", ideal.weights / share),
        ("KV cache", ideal.cache / share),
        ("states of linear attention", ideal.states / share),
        ("drafting", ideal.drafting / share),
    )
    if ideal.arithmetic > sum(seconds for _, seconds in reads):
        reads = (("arithmetic", ideal.arithmetic),)
    # Layers that run one after the other: the model's, and those of the MTP head for each draft token.
    layers = model.layers + (work.drafts * model.draft_layers if model.draft else 0)
    waits = layers * log2(work.gpus) * calibration.wait_seconds
    return ExpectedStep(
        (*reads, ("all-reduces", ideal.all_reduces + waits), ("layer floor", layers * calibration.layer_seconds))
    )
