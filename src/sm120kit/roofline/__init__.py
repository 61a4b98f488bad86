"""How fast decoding could be if nothing but memory, arithmetic and all-reduces took time. docs/roofline.md explains it.

One decode step of one GPU reads its share of the weights, of every user's KV cache, and reads and writes every user's state of
linear attention; the MTP head is read once for each draft token; two all-reduces follow in each layer. No constant is fitted.
"""

from __future__ import annotations

from dataclasses import dataclass

from sm120kit.roofline.architecture import Model, Pass, load, model, model_of, names
from sm120kit.roofline.folder import model_in
from sm120kit.roofline.hardware import GPUS, GpuKind, all_reduce_seconds, gpu_kind

__all__ = ["GPUS", "GpuKind", "Model", "Pass", "Step", "Work", "ceiling", "gpu_kind", "load", "model", "model_of", "names"]
__all__ += ["all_reduce_seconds", "model_in", "roofline", "step", "tokens_per_step"]

ALL_REDUCES = 2
"""Per layer of a tensor parallel model: after attention and after the MLP."""
ACTIVATION_BYTES = 2
"""BF16: what an all-reduce carries of each hidden element."""
FLOPS_PER_PARAMETER = 2
"""A multiplication and an addition."""


@dataclass(frozen=True)
class Work:
    """What is decoded: ``users`` at once after ``context_tokens`` each, ``drafts`` tokens drafted per step, on ``gpus``.

    ``cache_bytes`` are those of one element of the KV cache. ``all_reduce_us`` was measured at 16 KiB; None: as published.
    """

    users: int
    context_tokens: int
    drafts: int
    gpus: int
    cache_bytes: float = 2.0
    all_reduce_us: float | None = None


@dataclass(frozen=True)
class Step:
    """Seconds of one decode step by what takes them. ``arithmetic`` runs beside the memory, ``all_reduces`` do not."""

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


def step(model: Model, gpu: GpuKind, work: Work, *, favourable: bool = False) -> Step:
    """One step. ``favourable``: all tokens choose the same experts, and all-reduces take no time."""
    tokens = work.users * (1 + work.drafts)
    lane = gpu.bandwidth * work.gpus
    cached = work.users * work.context_tokens * model.cache_elements(work.gpus) * work.cache_bytes / gpu.bandwidth
    drafting, flops = 0.0, model.main.parameters * tokens
    reduces = ALL_REDUCES * model.layers * all_reduce_seconds(_message(model, tokens), work.gpus, work.all_reduce_us)
    if model.draft and work.drafts:
        share = model.draft_layers / model.cache_layers
        drafting = work.drafts * (model.draft.bytes(work.users, alike=favourable) / lane + cached * share)
        flops += model.draft.parameters * work.users * work.drafts
        small = all_reduce_seconds(_message(model, work.users), work.gpus, work.all_reduce_us)
        reduces += work.drafts * ALL_REDUCES * model.draft_layers * small
    return Step(
        weights=model.main.bytes(tokens, alike=favourable) / lane,
        cache=cached,
        states=2 * work.users * model.state_bytes / lane,
        drafting=drafting,
        arithmetic=FLOPS_PER_PARAMETER * flops / (gpu.fp4_flops * work.gpus),
        all_reduces=0.0 if favourable else reduces,
    )


def _message(model: Model, tokens: float) -> float:
    return tokens * model.hidden * ACTIVATION_BYTES


def tokens_per_step(drafts: int, acceptance: float) -> float:
    """Tokens that a step gives each user: its own, and the share ``acceptance`` of the drafted ones."""
    return 1 + drafts * acceptance


def roofline(model: Model, gpu: GpuKind, work: Work, acceptance: float) -> float:
    """Tokens per second of all users together."""
    return work.users * tokens_per_step(work.drafts, acceptance) / step(model, gpu, work).seconds


def ceiling(model: Model, gpu: GpuKind, work: Work) -> float:
    """Tokens per second that no luck can exceed: every draft accepted, and the step favourable. Above it a figure is wrong."""
    return work.users * (1 + work.drafts) / step(model, gpu, work, favourable=True).seconds
