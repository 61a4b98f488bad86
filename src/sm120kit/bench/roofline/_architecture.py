"""The parameters of a model that a pass reads, and their bytes in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from sm120kit.recipes.architectures import Architecture, PartBits, of_checkpoint
from sm120kit.serving.kv_cache import KvCache, Split, Vectors


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
