"""The sizes of a model's parts by its ``config.json``, and the bits of its weights in ``recipes/weights.toml``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from sm120kit.core import data_roots
from sm120kit.core.errors import BadInput
from sm120kit.core.outside import parse_json, read_found
from sm120kit.recipes.load import read_entries
from sm120kit.recipes.schema import Strict

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


class Weights(Strict):
    """The weights of the checkpoint in a repository. ``gigabytes`` (10^9 bytes) is its published size; ``source`` of both."""

    repository: str
    bits: PartBits
    gigabytes: Annotated[float, Field(gt=0)] | None = None
    source: str


class Architecture(Strict):
    """The sizes of a language model. ``mtp_layers`` are layers like its own that draft tokens, with its output head."""

    hidden: Count
    vocabulary: Count
    layers: Count
    attention: Grouped | None = None
    latent_attention: Latent | None = None
    linear_attention: Linear | None = None
    mlp: Dense | None = None
    experts: Experts | None = None
    mtp_layers: Annotated[int, Field(ge=0)] = 0


def recorded_config(repository: str) -> Path:
    """Path of the ``config.json`` of a checkpoint, with its source; it may not be recorded."""
    return data_roots.find("checkpoints", f"{repository.replace('/', '--')}.json")


def recorded(repository: str) -> dict[str, Any] | None:
    """The recorded ``config.json`` of a checkpoint; None without one.

    Raises:
        BadInput: the file, which may be a user's, is not of that form.
    """
    path = recorded_config(repository)
    if not path.exists():
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


def language_model(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a ``config.json`` for the language model."""
    inner = config.get("thinker_config") or config
    return inner.get("text_config") or inner.get("llm_config") or inner.get("language_config") or inner


def architecture_of(text: Mapping[str, Any], *, with_mtp: bool) -> Architecture | None:
    """The architecture of a language model by the keys of ``config.json``; None if it is unsupported."""
    try:
        return _architecture(text, with_mtp)
    except (KeyError, TypeError, ValueError):  # pydantic's errors are of the last kind
        return None


def _architecture(text: Mapping[str, Any], with_mtp: bool) -> Architecture | None:
    layers, hidden, heads = text["num_hidden_layers"], text["hidden_size"], text["num_attention_heads"]
    kinds = text.get("layer_types") or ["full_attention"] * layers
    latent, sparse = text.get("kv_lora_rank"), text.get("index_topk")
    if set(kinds) - {"full_attention", "linear_attention"} or (sparse and not latent) or text.get("sliding_window"):
        return None
    full, linear = kinds.count("full_attention"), kinds.count("linear_attention")
    count = text.get("num_experts") or text.get("n_routed_experts") or text.get("num_local_experts") or 0
    dense = text.get("first_k_dense_replace", 0) if count else layers
    width = text.get("moe_intermediate_size") or text["intermediate_size"]
    shared = text.get("shared_expert_intermediate_size") or width * text.get("n_shared_experts", 0)
    return Architecture(
        hidden=hidden,
        vocabulary=text["vocab_size"],
        layers=layers,
        attention=None
        if latent
        else Grouped(
            layers=full,
            heads=heads,
            kv_heads=text.get("num_key_value_heads") or heads,
            head_dim=text.get("head_dim") or hidden // heads,
            gated=bool(text.get("attn_output_gate")),
        ),
        latent_attention=Latent(
            layers=full,
            heads=heads,
            q_rank=text["q_lora_rank"],
            kv_rank=latent,
            nope=text["qk_nope_head_dim"],
            rope=text["qk_rope_head_dim"],
            v_dim=text["v_head_dim"],
            index=SparseIndex(heads=text["index_n_heads"], head_dim=text["index_head_dim"], top_k=sparse) if sparse else None,
        )
        if latent
        else None,
        linear_attention=Linear(
            layers=linear,
            key_heads=text["linear_num_key_heads"],
            value_heads=text["linear_num_value_heads"],
            head_dim=text["linear_value_head_dim"],
            state_bytes=4 if text.get("mamba_ssm_dtype") == "float32" else 2,
        )
        if linear
        else None,
        mlp=Dense(layers=dense, width=text["intermediate_size"]) if dense else None,
        experts=Experts(
            layers=layers - dense, count=count, active=text["num_experts_per_tok"], width=width, shared_width=shared
        )
        if count
        else None,
        mtp_layers=(text.get("mtp_num_hidden_layers") or text.get("num_nextn_predict_layers") or 0) if with_mtp else 0,
    )
