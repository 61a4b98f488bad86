"""The parameters of a model that a pass reads, and their bytes in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from sm120kit.recipes.architectures import Architecture, PartBits, of_checkpoint
from sm120kit.serving.kv_cache import KvCache, Split, Vectors

MATRICES = 3
"""Matrices of a gated MLP: gate, up, down."""


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


def parameters(a: Architecture) -> dict[str, int]:
    """Parameters of each part of :class:`PartBits`, with all experts of all layers."""
    attention, attention_layers = _attention(a)
    moe_layers = a.experts.layers if a.experts else 0
    expert = MATRICES * a.hidden * a.experts.width if a.experts else 0
    shared = MATRICES * a.hidden * a.experts.shared_width if a.experts else 0
    dense = MATRICES * a.hidden * a.mlp.width if a.mlp else 0
    count = a.experts.count if a.experts else 0
    joins = 2 * a.hidden * a.hidden  # MTP joins the hidden state and the last token's embedding
    drafting = attention + joins + (count * expert + shared + _router(a) if a.experts else dense)
    return {
        "attention": attention * attention_layers,
        "linear_attention": _linear(a) * a.linear_attention.layers if a.linear_attention else 0,
        "experts": count * expert * moe_layers,
        "shared": shared * moe_layers,
        "dense": dense * (a.mlp.layers if a.mlp else 0),
        "head": a.hidden * a.vocabulary,
        "mtp": drafting * a.mtp_layers,
    }


def model(a: Architecture, bits: PartBits) -> RooflineModel:
    """The model with the architecture's parameters and the bits of each in a checkpoint."""
    counts, experts = parameters(a), a.experts
    moe_layers, count, active = (experts.layers, experts.count, experts.active) if experts else (0, 0, 0)
    expert = MATRICES * a.hidden * experts.width if experts else 0
    routers = _router(a) * moe_layers
    always = {name: number for name, number in counts.items() if name not in ("experts", "mtp")}
    main = Pass(
        fixed_bytes=sum(number * getattr(bits, name) / 8 for name, number in always.items()) + routers * 2,
        expert_bytes=expert * bits.experts / 8,
        layers=moe_layers,
        experts=count,
        active=active,
        parameters=sum(always.values()) + routers + expert * active * moe_layers,
    )
    draft = None
    if a.mtp_layers:
        own = counts["mtp"] - count * expert * a.mtp_layers
        draft = Pass(
            fixed_bytes=own * bits.mtp / 8 + counts["head"] * bits.head / 8,
            expert_bytes=expert * bits.mtp / 8,
            layers=a.mtp_layers if experts else 0,
            experts=count,
            active=active,
            parameters=own + counts["head"] + expert * active * a.mtp_layers,
        )
    embedding = counts["head"] * 2
    return RooflineModel(
        hidden=a.hidden,
        layers=a.layers,
        main=main,
        draft=draft,
        draft_layers=a.mtp_layers,
        cache=cache(a),
        cache_layers=_attention(a)[1],
        state_bytes=_state_bytes(a),
        weight_bytes=sum(number * getattr(bits, name) / 8 for name, number in counts.items()) + routers * 2 + embedding,
        attended=a.latent_attention.index.top_k if a.latent_attention and a.latent_attention.index else None,
    )


def _router(a: Architecture) -> int:
    """Parameters of the router of a layer, which is BF16."""
    return a.hidden * a.experts.count if a.experts else 0


def _attention(a: Architecture) -> tuple[int, int]:
    """Parameters of an attention layer, and the number of these layers."""
    if a.latent_attention:
        m = a.latent_attention
        down = a.hidden * (m.q_rank + m.kv_rank + m.rope)
        up = m.heads * (m.q_rank * (m.nope + m.rope) + m.kv_rank * (m.nope + m.v_dim))
        index = m.q_rank * m.index.heads * m.index.head_dim + a.hidden * (m.index.head_dim + m.index.heads) if m.index else 0
        return down + up + m.heads * m.v_dim * a.hidden + index, m.layers
    g = a.attention
    assert g
    queries = g.heads * g.head_dim * (2 if g.gated else 1)
    return a.hidden * (queries + 2 * g.kv_heads * g.head_dim + g.heads * g.head_dim), g.layers


def _linear(a: Architecture) -> int:
    """Parameters of a layer of gated DeltaNet: queries, keys, values, gate, two scalars per head, output."""
    if a.linear_attention is None:
        return 0
    d = a.linear_attention
    keys, values = d.key_heads * d.head_dim, d.value_heads * d.head_dim
    return a.hidden * (2 * keys + 3 * values + 2 * d.value_heads)


def cache(a: Architecture) -> KvCache:
    """The KV cache, without the index of sparse attention."""
    if a.latent_attention:
        return KvCache(((Vectors(1, a.latent_attention.kv_rank + a.latent_attention.rope), a.latent_attention.layers),))
    assert a.attention
    return KvCache(((Vectors(a.attention.kv_heads, 2 * a.attention.head_dim), a.attention.layers),))


def _state_bytes(a: Architecture) -> float:
    d = a.linear_attention
    return d.layers * d.value_heads * d.head_dim**2 * d.state_bytes if d else 0.0
