"""The sizes of a model's parts by its ``config.json``, and the bits of its weights in ``recipes/weights.toml``."""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from sm120kit.core import data_roots
from sm120kit.core.errors import BadInput
from sm120kit.core.outside import parse_json, read_found
from sm120kit.recipes.load import read_entries
from sm120kit.recipes.schema import Strict

MATRICES = 3
"""Matrices of a gated MLP: gate, up, down."""
MAX_SIZE = 2**32
"""Limit for a number in ``config.json``, so that products of several are floats."""

Bits = Annotated[float, Field(gt=0, le=32)]


class PartBits(Strict):
    """Bits per parameter including scales: NVFP4 has 4 + 8/16. The default is BF16."""

    attention: Bits = 16
    linear_attention: Bits = 16
    experts: Bits = 16
    shared: Bits = 16
    dense: Bits = 16
    head: Bits = 16
    mtp: Bits = 16


class Weights(Strict):
    """The weights of the checkpoint in a repository. ``gigabytes`` (10^9 bytes) is its published size; ``source`` of both."""

    repository: str
    bits: PartBits
    gigabytes: Annotated[float, Field(gt=0)] | None = None
    source: str


@dataclass(frozen=True)
class Architecture:
    """The sizes of a language model.

    ``kv_heads`` x ``head_dim`` are those of keys and of values in ``full`` of the layers; with multi-head latent attention
    these are 0, and the cache has ``latent`` elements per token and layer, on every GPU. Sparse attention attends to
    ``attended`` tokens. ``linear`` layers have gated DeltaNet, with a state of ``state_bytes`` per sequence in all of them. A
    token selects ``active`` of ``experts`` in each of ``moe_layers``. ``mtp_layers`` are layers like its own that draft tokens,
    with its output head. ``parameters`` has those of each part of :class:`PartBits` with all experts of all layers; ``expert``
    are those of one, ``router`` those of the router of a layer, which is BF16.
    """

    hidden: int
    vocabulary: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    latent: int
    attended: int | None
    full: int
    linear: int
    state_bytes: int
    moe_layers: int
    experts: int
    active: int
    expert: int
    router: int
    mtp_layers: int
    parameters: Mapping[str, int]


def recorded_config(repository: str) -> Path:
    """Path of the ``config.json`` of a checkpoint, with its source; it may not be recorded."""
    return data_roots.find("checkpoints", f"{repository.replace('/', '--')}.json")


def recorded(repository: str) -> dict[str, Any] | None:
    """The recorded ``config.json`` of a checkpoint; None without one.

    Raises:
        BadInput: the file, which may be a user's, is not of that form.
    """
    path = recorded_config(repository)
    if not os.path.lexists(path):
        return None
    try:
        content = parse_json(read_found(path))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read: {error}", _FORM) from error
    if not isinstance(content, dict) or not isinstance(content.get("config"), dict):
        raise BadInput(f"{path}: there is no object config", _FORM)
    config: dict[str, Any] = content["config"]
    return config


_FORM = 'its form is {"repository": "OWNER/NAME", "source": "...", "config": {...}}, the last the content of config.json'


def weights_of(repository: str) -> Weights | None:
    """The weights of a checkpoint; None if they are not recorded.

    Raises:
        BadInput: ``recipes/weights.toml`` is not well-formed; the message has every problem.
    """
    return next((each for each in read_entries(Weights, "weights", "checkpoint") if each.repository == repository), None)


def of_checkpoint(repository: str) -> tuple[Architecture, Weights] | None:
    """Architecture and weights of a checkpoint; None if one of them is not recorded, or no such architecture."""
    weights, config = weights_of(repository), recorded(repository)
    if weights is None or config is None:
        return None
    architecture = architecture_of(language_model(config), with_mtp=True)
    return (architecture, weights) if architecture else None


def language_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a ``config.json`` for the language model.

    Raises:
        ValueError: it is no object.
    """
    inner = object_at(config, "thinker_config") or config
    parts = (object_at(inner, f"{part}_config") for part in ("text", "llm", "language"))
    return next(filter(None, parts), dict(inner))


def object_at(table: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The object at a key, empty if there is none.

    Raises:
        ValueError: there is another value.
    """
    value = table.get(key) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{key} is {repr(value)[:80]}, not an object")
    return value


def architecture_of(text: Mapping[str, Any], *, with_mtp: bool) -> Architecture | None:
    """The architecture of a language model by the keys of ``config.json``; None if it is unsupported."""
    try:
        return _architecture(text, with_mtp)
    except (TypeError, ValueError):
        return None


def _size(text: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """The first of some keys that is set and not 0."""
    value = next((text[name] for name in names if text.get(name)), default)
    if type(value) is not int or not 0 <= value <= MAX_SIZE:
        raise ValueError(f"{names[0]} is no size")
    return value


def _architecture(text: Mapping[str, Any], with_mtp: bool) -> Architecture | None:
    layers, hidden, heads = (_size(text, name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    kinds = Counter(list(text.get("layer_types") or ())) or Counter(full_attention=layers)
    latent, sparse = _size(text, "kv_lora_rank", default=0), _size(text, "index_topk", default=0)
    full, linear = kinds["full_attention"], kinds["linear_attention"]
    if full < 1 or full + linear < kinds.total() or (sparse and not latent) or text.get("sliding_window"):
        return None
    experts = _size(text, "num_experts", "n_routed_experts", "num_local_experts", default=0)
    dense_layers = _size(text, "first_k_dense_replace", default=0) if experts else layers
    if experts and dense_layers >= layers:
        return None
    width = _size(text, "moe_intermediate_size", "intermediate_size")
    shared_width = _size(text, "shared_expert_intermediate_size", default=width * _size(text, "n_shared_experts", default=0))
    kv_heads = 0 if latent else _size(text, "num_key_value_heads", default=heads)
    dim = 0 if latent else _size(text, "head_dim", default=hidden // heads)
    if latent:
        attention, cached = _latent_attention(text, hidden, heads, sparse)
    else:
        gate = 1 if text.get("attn_output_gate") else 0
        attention, cached = hidden * dim * ((2 + gate) * heads + 2 * kv_heads), 0
    delta, state_bytes = _gated_delta_net(text, hidden) if linear else (0, 0)
    expert, router = (MATRICES * hidden * width, hidden * experts) if experts else (0, 0)
    shared = MATRICES * hidden * shared_width if experts else 0
    dense = MATRICES * hidden * _size(text, "intermediate_size") if dense_layers else 0
    mtp_layers = _size(text, "mtp_num_hidden_layers", "num_nextn_predict_layers", default=0) if with_mtp else 0
    joins = 2 * hidden * hidden  # MTP joins the hidden state and the last token's embedding
    drafting = attention + joins + (experts * expert + shared + router if experts else dense)
    moe_layers = layers - dense_layers
    return Architecture(
        hidden=hidden,
        vocabulary=_size(text, "vocab_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        latent=cached,
        attended=sparse or None,
        full=full,
        linear=linear,
        state_bytes=linear * state_bytes,
        moe_layers=moe_layers,
        experts=experts,
        active=_size(text, "num_experts_per_tok") if experts else 0,
        expert=expert,
        router=router,
        mtp_layers=mtp_layers,
        parameters={
            "attention": attention * full,
            "linear_attention": delta * linear,
            "experts": experts * expert * moe_layers,
            "shared": shared * moe_layers,
            "dense": dense * dense_layers,
            "head": hidden * _size(text, "vocab_size"),
            "mtp": drafting * mtp_layers,
        },
    )


def _latent_attention(text: Mapping[str, Any], hidden: int, heads: int, sparse: int) -> tuple[int, int]:
    """Parameters of a layer of multi-head latent attention with its index, and elements of a token in its cache."""
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    q_rank, kv_rank, nope, rope, v_dim = (_size(text, name) for name in names)
    up = heads * (q_rank * (nope + rope) + kv_rank * (nope + v_dim))
    index = 0
    if sparse:
        index_heads, index_dim = _size(text, "index_n_heads"), _size(text, "index_head_dim")
        index = q_rank * index_heads * index_dim + hidden * (index_dim + index_heads)
    return hidden * (q_rank + kv_rank + rope) + up + heads * v_dim * hidden + index, kv_rank + rope


def _gated_delta_net(text: Mapping[str, Any], hidden: int) -> tuple[int, int]:
    """Parameters of a layer (queries, keys, values, gate, two scalars per head, output), and bytes of its state."""
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim")
    key_heads, value_heads, dim = (_size(text, name) for name in names)
    state_bytes = 4 if text.get("mamba_ssm_dtype") == "float32" else 2
    return hidden * (2 * key_heads * dim + 3 * value_heads * dim + 2 * value_heads), value_heads * dim**2 * state_bytes
