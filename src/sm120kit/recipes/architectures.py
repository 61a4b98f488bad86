"""Model architectures in ``recipes/models/``: the sizes of a model's parts, and the checkpoints that have them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sm120kit.core import data_roots
from sm120kit.core.errors import BadInput
from sm120kit.recipes.load import problems_message, read_toml, validate
from sm120kit.recipes.schema import Name, Strict

Count = Annotated[int, Field(ge=1)]
Bits = Annotated[float, Field(gt=0, le=32)]


class Grouped(Strict):
    """Attention with a KV cache in ``layers`` of the layers; ``gated``: q_proj also produces an output gate."""

    layers: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    gated: bool = False


class SparseIndex(Strict):
    """The index of sparse attention, which selects the ``top_k`` tokens that are attended to."""

    heads: Count
    head_dim: Count
    top_k: Count


class Latent(Strict):
    """Multi-head latent attention: the cache has ``kv_rank`` + ``rope`` elements per token and layer, on every GPU."""

    layers: Count
    heads: Count
    q_rank: Count
    kv_rank: Count
    nope: Count
    rope: Count
    v_dim: Count
    index: SparseIndex | None = None


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
    """``count`` routed experts in ``layers`` of the layers, ``active`` of them per token; ``shared_width``: of a shared one."""

    layers: Count
    count: Count
    active: Count
    width: Count
    shared_width: Annotated[int, Field(ge=0)] = 0


class PartBits(Strict):
    """Bits per parameter including scales: NVFP4 has 4 + 8/16. The default is BF16."""

    attention: Bits = 16
    linear_attention: Bits = 16
    experts: Bits = 16
    shared: Bits = 16
    dense: Bits = 16
    head: Bits = 16
    mtp: Bits = 16


class PublishedCheckpoint(Strict):
    """A repository with this architecture. ``gigabytes`` (10^9 bytes) is its published size; ``source`` of bits and size."""

    repository: str
    bits: PartBits
    gigabytes: Annotated[float, Field(gt=0)] | None = None
    source: str


class Architecture(Strict):
    """The contents of a file. ``mtp_layers`` are layers like the model's own that draft tokens, with its output head."""

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
    checkpoint: Annotated[tuple[PublishedCheckpoint, ...], Field(strict=False, min_length=1)]


def names() -> tuple[str, ...]:
    """The names of the architectures."""
    return tuple(sorted(data_roots.entries("models")))


def load(name: str) -> Architecture:
    """Load an architecture by name.

    Raises:
        BadInput: the file is not well-formed; the message has every problem.
    """
    path = data_roots.find("models", f"{name}.toml")
    architecture = validate(Architecture, read_toml(path), path)
    if (architecture.attention is None) == (architecture.latent_attention is None):
        raise BadInput(problems_message(path, ["exactly one of attention and latent_attention is required"]))
    return architecture


def of_checkpoint(repository: str) -> tuple[Architecture, PublishedCheckpoint] | None:
    """The architecture of the checkpoint in a repository; None if no file lists it."""
    for name in names():
        architecture = load(name)
        for checkpoint in architecture.checkpoint:
            if checkpoint.repository == repository:
                return architecture, checkpoint
    return None
