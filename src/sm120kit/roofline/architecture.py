"""Architectures in ``recipes/models/``: how many parameters a pass reads, and how many bytes a checkpoint has for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from sm120kit.checkpoint import Attention
from sm120kit.errors import BadRecipe
from sm120kit.recipe.reading import told, toml, validated
from sm120kit.recipe.schema import Name, Strict
from sm120kit.workspace import data_root

Count = Annotated[int, Field(ge=1)]
Bits = Annotated[float, Field(gt=0, le=32)]
MATRICES = 3
"""Of a gated MLP: gate, up, down."""


class Grouped(Strict):
    """Attention with a KV cache in ``layers`` of the layers; ``gated``: q_proj makes an output gate as well."""

    layers: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    gated: bool = False


class Latent(Strict):
    """Multi-head latent attention: the cache holds ``kv_rank`` + ``rope`` elements per token and layer, on every GPU."""

    layers: Count
    heads: Count
    q_rank: Count
    kv_rank: Count
    nope: Count
    rope: Count
    v_dim: Count


class Linear(Strict):
    """Gated DeltaNet: a state of ``value_heads`` x ``head_dim`` x ``head_dim`` per layer and sequence, no cache."""

    layers: Count
    key_heads: Count
    value_heads: Count
    head_dim: Count
    state_bytes: Count


class Dense(Strict):
    """A gated MLP in ``layers`` of the layers."""

    layers: Count
    width: Count


class Experts(Strict):
    """``count`` routed experts in ``layers`` of the layers, ``active`` of them per token; a shared one has ``shared_width``."""

    layers: Count
    count: Count
    active: Count
    width: Count
    shared_width: Annotated[int, Field(ge=0)] = 0


class PartBits(Strict):
    """Bits per parameter with its scales: NVFP4 has 4 + 8/16. What is not said is BF16."""

    attention: Bits = 16
    linear_attention: Bits = 16
    experts: Bits = 16
    shared: Bits = 16
    dense: Bits = 16
    head: Bits = 16
    mtp: Bits = 16


class Checkpoint(Strict):
    """One repository with this architecture. ``gigabytes`` (10^9 bytes) is its published size; ``source`` is of both."""

    repository: str
    bits: PartBits
    gigabytes: Annotated[float, Field(gt=0)] | None = None
    source: str


class Architecture(Strict):
    """One file. ``mtp_layers`` are layers of the model's own kind that draft tokens, with its output head."""

    edition: Literal[1]
    name: Name
    source: str
    hidden: Count
    vocabulary: Count
    layers: Count
    attention: Grouped | None = None
    latent_attention: Latent | None = None
    linear_attention: Linear | None = None
    mlp: Dense | None = None
    experts: Experts | None = None
    mtp_layers: Annotated[int, Field(ge=0)] = 0
    checkpoint: Annotated[tuple[Checkpoint, ...], Field(strict=False, min_length=1)]


@dataclass(frozen=True)
class Pass:
    """The weights that one pass of the model reads, of all GPUs together.

    ``fixed_bytes`` are read for any number of tokens. Each token chooses ``active`` of the ``experts`` of each of ``layers``
    layers; an expert has ``expert_bytes``. ``parameters`` take part in the arithmetic of one token.
    """

    fixed_bytes: float
    expert_bytes: float
    layers: int
    experts: int
    active: int
    parameters: float

    def distinct(self, tokens: float) -> float:
        """Experts of a layer that ``tokens`` touch when each chooses evenly and by itself."""
        return self.experts * (1 - (1 - self.active / self.experts) ** tokens) if self.experts else 0.0

    def bytes(self, tokens: float, *, alike: bool = False) -> float:
        """Bytes read for ``tokens``; ``alike``: all of them choose the same experts, the fewest bytes there can be."""
        return self.fixed_bytes + self.layers * self.expert_bytes * (self.active if alike else self.distinct(tokens))


@dataclass(frozen=True)
class Model:
    """A checkpoint as the roofline sees it. ``state_bytes`` is per sequence, of all GPUs; ``draft`` one pass of the MTP head.

    ``weight_bytes`` are those of the text model on disk, for comparison with its published size.
    """

    name: str
    repository: str
    source: str
    hidden: int
    layers: int
    main: Pass
    draft: Pass | None
    draft_layers: int
    cache: Attention | int
    cache_layers: int
    state_bytes: float
    weight_bytes: float

    def cache_elements(self, gpus: int) -> int:
        """Elements that each token leaves in the KV cache of one GPU."""
        return self.cache if isinstance(self.cache, int) else self.cache.elements(gpus)


def names() -> tuple[str, ...]:
    """The architectures that come with sm120kit."""
    return tuple(sorted(path.stem for path in (data_root() / "recipes" / "models").glob("*.toml")))


def load(name: str) -> Architecture:
    """One architecture by name.

    Raises:
        BadRecipe: its file is not well-formed; every problem is named.
    """
    path = data_root() / "recipes" / "models" / f"{name}.toml"
    found = validated(Architecture, toml(path), path)
    if (found.attention is None) == (found.latent_attention is None):
        raise BadRecipe(told(path, ["one of attention and latent_attention must be there"]))
    return found


def model_of(repository: str) -> Model | None:
    """The model of a repository; None when no architecture names it."""
    for name in names():
        architecture = load(name)
        for checkpoint in architecture.checkpoint:
            if checkpoint.repository == repository:
                return model(architecture, checkpoint)
    return None


def parameters(a: Architecture) -> dict[str, int]:
    """Parameters of each part of :class:`PartBits`, all experts of all layers counted."""
    attention, attention_layers = _attention(a)
    moe_layers = a.experts.layers if a.experts else 0
    expert = MATRICES * a.hidden * a.experts.width if a.experts else 0
    shared = MATRICES * a.hidden * a.experts.shared_width if a.experts else 0
    dense = MATRICES * a.hidden * a.mlp.width if a.mlp else 0
    count = a.experts.count if a.experts else 0
    joins = 2 * a.hidden * a.hidden  # MTP makes one of the hidden state and the last token's embedding
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


def model(a: Architecture, checkpoint: Checkpoint) -> Model:
    """Parameters counted from the architecture, bytes from the checkpoint's bits."""
    bits, counts = checkpoint.bits, parameters(a)
    experts = a.experts
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
    return Model(
        name=a.name,
        repository=checkpoint.repository,
        source=f"{a.source}; {checkpoint.source}",
        hidden=a.hidden,
        layers=a.layers,
        main=main,
        draft=draft,
        draft_layers=a.mtp_layers,
        cache=_cache(a),
        cache_layers=_attention(a)[1],
        state_bytes=_state_bytes(a),
        weight_bytes=sum(number * getattr(bits, name) / 8 for name, number in counts.items()) + routers * 2 + embedding,
    )


def _router(a: Architecture) -> int:
    """Parameters of the router of one layer; it is BF16."""
    return a.hidden * a.experts.count if a.experts else 0


def _attention(a: Architecture) -> tuple[int, int]:
    """Parameters of one layer of attention, and how many there are."""
    if a.latent_attention:
        m = a.latent_attention
        down = a.hidden * (m.q_rank + m.kv_rank + m.rope)
        up = m.heads * (m.q_rank * (m.nope + m.rope) + m.kv_rank * (m.nope + m.v_dim))
        return down + up + m.heads * m.v_dim * a.hidden, m.layers
    g = a.attention
    assert g
    queries = g.heads * g.head_dim * (2 if g.gated else 1)
    return a.hidden * (queries + 2 * g.kv_heads * g.head_dim + g.heads * g.head_dim), g.layers


def _linear(a: Architecture) -> int:
    """Parameters of one layer of gated DeltaNet: queries, keys, values, gate, two scalars per head, output."""
    if a.linear_attention is None:
        return 0
    d = a.linear_attention
    keys, values = d.key_heads * d.head_dim, d.value_heads * d.head_dim
    return a.hidden * (2 * keys + 3 * values + 2 * d.value_heads)


def _cache(a: Architecture) -> Attention | int:
    if a.latent_attention:
        return a.latent_attention.layers * (a.latent_attention.kv_rank + a.latent_attention.rope)
    assert a.attention
    return Attention(a.attention.layers, a.attention.kv_heads, a.attention.head_dim)


def _state_bytes(a: Architecture) -> float:
    d = a.linear_attention
    return d.layers * d.value_heads * d.head_dim**2 * d.state_bytes if d else 0.0
