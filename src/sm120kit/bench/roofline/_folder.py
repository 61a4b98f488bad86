"""Read a model for the roofline from its folder: architecture from ``config.json``, bits from the headers of its tensors."""

from __future__ import annotations

import re
from collections import Counter

from sm120kit.bench.roofline._architecture import RooflineModel, cache, model
from sm120kit.core.outside import parse_json
from sm120kit.recipes.architectures import Architecture, PartBits, architecture_of, language_model
from sm120kit.serving import checkpoint
from sm120kit.serving.kv_cache import KvCache

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
