"""Estimate decode rates as if only memory, arithmetic and all-reduces took time, and with what engines need beyond that.

In a decode step each GPU reads its share of the weights and of the KV cache of every request, reads and writes the states of
linear attention, and reads the MTP head once for each draft token; two all-reduces follow in each layer. No constant of the
roofline is fitted; an expected step has costs that are fitted to published rates. See docs/bench.md.
"""

import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from math import log2

from sm120kit.core.outside import parse_json
from sm120kit.recipes.architectures import Architecture, PartBits, architecture_of, language_model, of_checkpoint
from sm120kit.serving import checkpoint
from sm120kit.serving.kv_cache import KvCache, Split, Vectors

# ---- hardware

BYTES_PER_CLOCK = 2 * 512 / 8
"""GB202's memory: two transfers per clock as nvidia-smi shows it, 512 bits wide."""


@dataclass(frozen=True)
class GpuKind:
    """A GPU: ``bandwidth`` in bytes per second, ``fp4_flops`` dense; its name contains one of ``markers``."""

    name: str
    markers: tuple[str, ...]
    bandwidth: float
    fp4_flops: float
    source: str


GPUS = (
    GpuKind(
        "RTX PRO 6000 Blackwell Server Edition",
        ("RTX PRO 6000 Blackwell Server",),
        12481e6 * BYTES_PER_CLOCK,
        2000e12,
        "memory clock 12,481 MHz under load: github.com/Visual-Synthesizer/rtx6kpro hardware/blackwell-power-limit-sweep.md; "
        "4,000 TOPS of FP4 with sparsity, half of it without: NVIDIA",
    ),
    GpuKind(
        "RTX PRO 6000 Blackwell",
        ("RTX PRO 6000",),
        14001e6 * BYTES_PER_CLOCK,
        2000e12,
        "1,792 GB/s, and 4,000 TOPS of FP4 with sparsity: NVIDIA; 14,001 MHz: MarcoPizeta/flash-next-rtxpro6000-bench",
    ),
    GpuKind(
        "GeForce RTX 5090",
        ("RTX 5090",),
        14001e6 * BYTES_PER_CLOCK,
        1676e12,
        "1,792 GB/s and 3,352 TOPS of FP4 with sparsity: NVIDIA",
    ),
    GpuKind("GB10", ("GB10",), 273e9, 500e12, "273 GB/s and 1,000 TOPS of FP4 with sparsity: NVIDIA, DGX Spark"),
)


def gpu_kind(text: str) -> GpuKind | None:
    """The GPU named in ``text``, by the first matching row; None if it is not in the table."""
    return next((gpu for gpu in GPUS if any(marker in text for marker in gpu.markers)), None)


ONE_NODE_US = ((1 << 10, 6.1), (16 << 10, 7.7), (64 << 10, 11.8), (256 << 10, 28.7), (1 << 20, 85.2))
"""(bytes, microseconds) of an all-reduce over 4 GPUs of one NUMA node: the faster of one-shot and NCCL at each size.

github.com/local-inference-lab/rtx6kpro@e2c2b95 optimization/pcie-oneshot-allreduce.md. Two GPUs are assumed to be as fast.
"""

EIGHT_GPUS_US = 26.2
"""The minimum for 8 GPUs: 32 KB over a ring of 2 channels, same wiki, optimization/nccl-tuning.md."""


def all_reduce_seconds(size: float, gpus: int) -> float:
    """Seconds of an all-reduce of ``size`` bytes by the published times.

    Linear between the published sizes; proportional to the size beyond the largest.
    """
    if gpus == 1:
        return 0.0
    return max(EIGHT_GPUS_US if gpus > 4 else 0.0, _published_us(size)) / 1e6


def _published_us(size: float) -> float:
    first, last = ONE_NODE_US[0], ONE_NODE_US[-1]
    if size <= first[0]:
        return first[1]
    for (low, low_us), (high, high_us) in pairwise(ONE_NODE_US):
        if size <= high:
            return low_us + (high_us - low_us) * (size - low) / (high - low)
    return last[1] * size / last[0]


# ---- models


@dataclass(frozen=True)
class Pass:
    """The weights that a pass of the model reads, of all GPUs together.

    ``fixed_bytes`` are read for any number of tokens. Each token selects ``active`` of the ``experts`` of each of ``layers``
    layers; an expert has ``expert_bytes``. ``parameters`` is the number of parameters in the arithmetic of a token.
    """

    fixed_bytes: float
    expert_bytes: float
    layers: int
    experts: int
    active: int
    parameters: float

    def distinct(self, tokens: float) -> float:
        """Expected number of experts per layer that ``tokens`` select, each uniformly and independently."""
        return self.experts * (1 - (1 - self.active / self.experts) ** tokens) if self.experts else 0.0

    def bytes(self, tokens: float, *, alike: bool = False) -> float:
        """Bytes read for ``tokens``; ``alike``: all select the same experts, which is the minimum."""
        return self.fixed_bytes + self.layers * self.expert_bytes * (self.active if alike else self.distinct(tokens))


@dataclass(frozen=True)
class RooflineModel:
    """The sizes of a checkpoint that decide its roofline.

    ``state_bytes`` is per sequence, of all GPUs; ``draft`` is a pass of the MTP head. ``weight_bytes`` is the text model's size
    on disk, for comparison with the published size. ``attended`` is the number of tokens that sparse attention selects.
    """

    hidden: int
    layers: int
    main: Pass
    draft: Pass | None
    draft_layers: int
    cache: KvCache
    cache_layers: int
    state_bytes: float
    weight_bytes: float
    attended: int | None = None

    def cache_elements(self, gpus: int) -> int:
        """Elements per token in the KV cache of one GPU."""
        return int(self.cache.token_bytes(1, Split(gpus)))


def model_of(repository: str) -> RooflineModel | None:
    """The model in a repository; None if no architecture lists it."""
    listed = of_checkpoint(repository)
    return model(listed[0], listed[1].bits) if listed else None


def model(a: Architecture, bits: PartBits) -> RooflineModel:
    """The model with the architecture's parameters and the bits of each in a checkpoint."""
    counts, routers = a.parameters, a.router * a.moe_layers
    always = {name: number for name, number in counts.items() if name not in ("experts", "mtp")}
    main = Pass(
        fixed_bytes=sum(number * getattr(bits, name) / 8 for name, number in always.items()) + routers * 2,
        expert_bytes=a.expert * bits.experts / 8,
        layers=a.moe_layers,
        experts=a.experts,
        active=a.active,
        parameters=sum(always.values()) + routers + a.expert * a.active * a.moe_layers,
    )
    draft = None
    if a.mtp_layers:
        own = counts["mtp"] - a.experts * a.expert * a.mtp_layers
        draft = Pass(
            fixed_bytes=own * bits.mtp / 8 + counts["head"] * bits.head / 8,
            expert_bytes=a.expert * bits.mtp / 8,
            layers=a.mtp_layers if a.experts else 0,
            experts=a.experts,
            active=a.active,
            parameters=own + counts["head"] + a.expert * a.active * a.mtp_layers,
        )
    embedding = counts["head"] * 2
    return RooflineModel(
        hidden=a.hidden,
        layers=a.layers,
        main=main,
        draft=draft,
        draft_layers=a.mtp_layers,
        cache=cache(a),
        cache_layers=a.full,
        state_bytes=a.state_bytes,
        weight_bytes=sum(number * getattr(bits, name) / 8 for name, number in counts.items()) + routers * 2 + embedding,
        attended=a.attended,
    )


def cache(a: Architecture) -> KvCache:
    """The KV cache, without the index of sparse attention."""
    return KvCache(((Vectors(1, a.latent) if a.latent else Vectors(a.kv_heads, 2 * a.head_dim), a.full),))


PARTS = (
    ("", r"(^|\.)(visual|vision_tower|vision_model)\."),
    ("mtp", r"(^|\.)(mtp|nextn)(\.|_)"),
    ("experts", r"\.experts\."),
    ("shared", r"\.shared_experts?\."),
    ("linear_attention", r"\.linear_attn\."),
    ("attention", r"\.self_attn\."),
    ("dense", r"\.mlp\.(gate_proj|up_proj|down_proj)\."),
    ("head", r"(^|\.)lm_head\."),
)
"""Parts of :class:`PartBits` by tensor names; the first match counts. Routers, norms and embeddings are in none."""


def model_from(files: checkpoint.ModelFiles) -> RooflineModel | None:
    """The model that files are of; None if the roofline does not cover its architecture.

    Raises:
        Sm120kitError: they are no checkpoint, see :func:`checkpoint.read_files`.
    """
    facts, config = checkpoint.read_files(files), parse_json(files.content("config.json"), lenient=True)
    text = language_model(config)
    architecture = architecture_of(text, with_mtp=bool(facts.mtp))
    if architecture is None or not _same_cache(architecture, facts.kv_cache):
        return None
    sizes: Counter[str] = Counter()
    shards = {shard for shard in files.names() if shard.endswith(".safetensors")} - set(facts.outside)
    for _, header in files.headers(sorted(shards)):
        for tensor, entry in header.items():
            sizes["mtp" if tensor in facts.mtp else part(tensor)] += entry.bytes
    bits = {part: 8 * sizes[part] / count for part, count in architecture.parameters.items() if count and sizes[part]}
    try:
        return model(architecture, PartBits(**bits))
    except ValueError:  # of pydantic: sizes that no such architecture has
        return None


def _same_cache(architecture: Architecture, found: KvCache | None) -> bool:
    return bool(architecture.latent or (found and cache(architecture).vectors == found.vectors))


def part(tensor: str) -> str:
    """The part that a tensor belongs to, "" for none."""
    return next((name for name, pattern in PARTS if re.search(pattern, tensor)), "")


# ---- steps and rates

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
    """Seconds of a decode step by cause. ``arithmetic`` overlaps with memory traffic, the others add up.

    ``floor`` is the least that its layers take, which the roofline leaves out.
    """

    weights: float
    cache: float
    states: float
    drafting: float
    arithmetic: float
    all_reduces: float
    floor: float = 0.0

    @property
    def terms(self) -> dict[str, float]:
        """What adds up to the whole step."""
        reads = {"weights": self.weights, "KV cache": self.cache, "states of linear attention": self.states}
        reads["drafting"] = self.drafting
        slower = reads if sum(reads.values()) >= self.arithmetic else {"arithmetic": self.arithmetic}
        return {**slower, "all-reduces": self.all_reduces, "layer floor": self.floor}

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(self.terms.values())

    @property
    def dominant(self) -> tuple[str, float]:
        """The longest term and its share of the step."""
        name, seconds = max(self.terms.items(), key=lambda term: term[1])
        return name, seconds / self.seconds


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


# ---- expected rates


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


def expected_step(model: RooflineModel, gpu: GpuKind, work: Work) -> DecodeStep:
    """The decode step that current engines are expected to take."""
    return calibrated(step(model, gpu, work), model, gpu, work, CALIBRATION)


def calibrated(ideal: DecodeStep, model: RooflineModel, gpu: GpuKind, work: Work, calibration: Calibration) -> DecodeStep:
    """The expected step, from that of the roofline."""
    share = calibration.gb10_share if gpu.name == "GB10" else 1.0
    # Layers that run one after the other: the model's, and those of the MTP head for each draft token.
    layers = model.layers + (work.drafts * model.draft_layers if model.draft else 0)
    return DecodeStep(
        ideal.weights / share,
        ideal.cache / share,
        ideal.states / share,
        ideal.drafting / share,
        ideal.arithmetic,
        ideal.all_reduces + layers * log2(work.gpus) * calibration.wait_seconds,
        layers * calibration.layer_seconds,
    )
