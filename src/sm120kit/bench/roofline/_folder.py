"""Read a model for the roofline from its folder: architecture from ``config.json``, bits from the headers of its tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from sm120kit.bench.roofline._architecture import RooflineModel, cache, model, parameters
from sm120kit.core.outside import parse_json
from sm120kit.recipes.architectures import (
    Architecture,
    Dense,
    Experts,
    Grouped,
    Latent,
    Linear,
    PartBits,
    PublishedCheckpoint,
    SparseIndex,
)
from sm120kit.serving import checkpoint
from sm120kit.serving.kv_cache import KvCache
from sm120kit.serving.kv_layout import language_model

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
    facts, name = checkpoint.read_files(files), files.source.rpartition("/")[2]
    config = parse_json(files.content("config.json"), lenient=True)
    text = language_model(config)
    architecture = architecture_of(text, with_mtp=bool(facts.mtp))
    if architecture is None or not _same_cache(architecture, facts.kv_cache):
        return None
    sizes: Counter[str] = Counter()
    shards = {shard for shard in files.names() if shard.endswith(".safetensors")} - set(facts.outside)
    for _, header in files.headers(sorted(shards)):
        for tensor, entry in header.items():
            sizes["mtp" if tensor in facts.mtp else part(tensor)] += entry.bytes
    counts = parameters(architecture)
    bits = {part: 8 * sizes[part] / count for part, count in counts.items() if count and sizes[part]}
    source = f"{name}: config.json and the headers of its tensors"
    try:
        return model(architecture, PublishedCheckpoint(repository=name, bits=PartBits(**bits), source=source))
    except ValueError:  # of pydantic: sizes that no such architecture has
        return None


def _same_cache(architecture: Architecture, found: KvCache | None) -> bool:
    return bool(architecture.latent_attention or (found and cache(architecture).vectors == found.vectors))


def part(tensor: str) -> str:
    """The part that a tensor belongs to, "" for none."""
    return next((name for name, pattern in PARTS if re.search(pattern, tensor)), "")


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
        edition=1,
        name="local",
        source="config.json",
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
        checkpoint=(PublishedCheckpoint(repository="local", bits=PartBits(), source="config.json"),),
    )
