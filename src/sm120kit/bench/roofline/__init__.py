"""Estimate decode rates as if only memory, arithmetic and all-reduces took time; see docs/bench.md.

In a decode step each GPU reads its share of the weights and of the KV cache of every request, reads and writes the states of
linear attention, and reads the MTP head once for each draft token; two all-reduces follow in each layer. No constant is fitted.
"""

from __future__ import annotations

from dataclasses import dataclass

from sm120kit.bench.roofline._architecture import Pass, RooflineModel, model, model_of
from sm120kit.bench.roofline._folder import model_from
from sm120kit.bench.roofline._hardware import GPUS, GpuKind, all_reduce_seconds, gpu_kind

__all__ = [
    "GPUS",
    "DecodeStep",
    "GpuKind",
    "Pass",
    "RooflineModel",
    "Work",
    "ceiling",
    "gpu_kind",
    "model",
    "model_of",
]
__all__ += ["all_reduce_seconds", "model_from", "roofline", "step", "tokens_per_step"]

ALL_REDUCES = 2
"""All-reduces per layer of a tensor parallel model: after attention and after the MLP."""
ACTIVATION_BYTES = 2
"""Bytes of a hidden element in an all-reduce: BF16."""
FLOPS_PER_PARAMETER = 2
"""A multiplication and an addition."""


@dataclass(frozen=True)
class Work:
    """A decoding load: requests at a context depth of ``context_tokens`` each, ``drafts`` draft tokens per step, on ``gpus``.

    ``cache_bytes`` are per element of the KV cache.
    """

    concurrency: int
    context_tokens: int
    drafts: int
    gpus: int
    cache_bytes: float = 2.0


@dataclass(frozen=True)
class DecodeStep:
    """Seconds of a decode step by cause. ``arithmetic`` overlaps with memory traffic, ``all_reduces`` do not."""

    weights: float
    cache: float
    states: float
    drafting: float
    arithmetic: float
    all_reduces: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return max(self.weights + self.cache + self.states + self.drafting, self.arithmetic) + self.all_reduces


def step(model: RooflineModel, gpu: GpuKind, work: Work, *, favourable: bool = False) -> DecodeStep:
    """A decode step.

    ``favourable``: all tokens select the same experts, sparse attention reads what it selects only, and all-reduces take no
    time.
    """
    tokens = work.concurrency * (1 + work.drafts)
    lane = gpu.bandwidth * work.gpus
    context = min(work.context_tokens, model.attended) if model.attended and favourable else work.context_tokens
    cached = work.concurrency * context * model.cache_elements(work.gpus) * work.cache_bytes / gpu.bandwidth
    drafting, flops = 0.0, model.main.parameters * tokens
    reduces = ALL_REDUCES * model.layers * all_reduce_seconds(_message(model, tokens), work.gpus)
    if model.draft and work.drafts:
        share = model.draft_layers / model.cache_layers
        drafting = work.drafts * (model.draft.bytes(work.concurrency, alike=favourable) / lane + cached * share)
        flops += model.draft.parameters * work.concurrency * work.drafts
        small = all_reduce_seconds(_message(model, work.concurrency), work.gpus)
        reduces += work.drafts * ALL_REDUCES * model.draft_layers * small
    return DecodeStep(
        weights=model.main.bytes(tokens, alike=favourable) / lane,
        cache=cached,
        states=2 * work.concurrency * model.state_bytes / lane,
        drafting=drafting,
        arithmetic=FLOPS_PER_PARAMETER * flops / (gpu.fp4_flops * work.gpus),
        all_reduces=0.0 if favourable else reduces,
    )


def _message(model: RooflineModel, tokens: float) -> float:
    return tokens * model.hidden * ACTIVATION_BYTES


def tokens_per_step(drafts: int, acceptance: float) -> float:
    """Tokens per step and request: the verified token, and the share ``acceptance`` of the draft tokens."""
    return 1 + drafts * acceptance


def roofline(model: RooflineModel, gpu: GpuKind, work: Work, acceptance: float) -> float:
    """Tokens per second of all requests in parallel together."""
    return work.concurrency * tokens_per_step(work.drafts, acceptance) / step(model, gpu, work).seconds


def ceiling(model: RooflineModel, gpu: GpuKind, work: Work, acceptance: float = 1.0) -> float:
    """Maximum tokens per second with this share of drafts accepted, in a favourable step. A figure above it is wrong."""
    return work.concurrency * tokens_per_step(work.drafts, acceptance) / step(model, gpu, work, favourable=True).seconds
