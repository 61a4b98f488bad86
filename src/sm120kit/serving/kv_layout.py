"""The KV cache of a model by its ``config.json``: of attention layers that are all alike, or unknown with the reason.

A key by which layers differ, and that is not interpreted here, makes the size unknown: a wrong size refuses models that fit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LAYER_LIMIT, HEAD_LIMIT, WIDTH_LIMIT = 4096, 65_536, 1 << 20
"""Limits for numbers of layers, heads, and elements of a vector: twenty times those of the largest published models."""

_CACHED = frozenset({"full_attention", "attention", "*", "1"})
"""Layers whose KV cache has every token: ``layer_types`` (transformers), Nemotron-H's pattern, MiniMax's ``attn_type_list``."""
_UNCACHED = frozenset({"linear_attention", "mamba", "mamba2", "conv", "mlp", "moe", "M", "-", "E", "0"})
"""Layers with a state of constant size, or with none."""
_KINDS = ("layer_types", "layers_block_type", "hybrid_override_pattern", "attn_type_list", "full_attention_interval")
"""Keys with the kind of each layer."""
_SIZES = ("num_attention_heads", "num_key_value_heads", "head_dim", "attention_head_dim", "hidden_size")
_EMPTY: tuple[object, ...] = (None, False, 0, "", [], {})

_OTHERS = re.compile(
    r"moe|expert|mlp|rope|rotary|vision|audio|mtp|nextn|router|token|dropout|bias|norm|quant|compression_config"
    r"|^(use_sliding_window|max_window_layers|decoder_sparse_step|architectures)$"
)
"""Keys on other parts of a model than its cache, and those that are interpreted with another key."""
_STATES = re.compile(r"^(mamba|ssm|linear|conv|chunk_size$)")
"""Keys on the state of layers, whose kinds other keys have."""
_IRREGULAR = re.compile(
    r"layers?_(types?|block|overrides?|configs?|kinds?|map|specs?|group|ids$)|blocks?_(types?|configs?|layout)|_idxs?$|_indices$"
    r"|(attn|attention)_(types?|layers?|config|other|kinds?|every|idx|pattern)|hybrid|pattern|interval|period|offset|every"
    r"|per_layer|window|sliding|swa|chunk|local|global|mamba|ssm|ssd|recurrent|rwkv|lru|linear_|lightning|kda|delta|conv_"
    r"|retention|cross_attention|shared?_(kv|layer|factor)|kv_shared|cla_|reuse|sink|compress|lora_rank|latent|index_|sparse"
    r"|multi_query|(query|attention)_groups|k_eq_v|v_head_dim|qk_nope"
)
"""Keys by which layers differ in what they keep of a token, as models in transformers, vLLM and SGLang name them."""


class _Unknown(Exception):
    """The cache's size cannot be determined, for this reason."""


@dataclass(frozen=True)
class Attention:
    """Size of the KV cache: for each token, K and V of ``kv_heads`` x ``head_dim`` elements in each of ``layers``."""

    layers: int
    kv_heads: int
    head_dim: int

    def elements(self, gpus: int = 1, stages: int = 1) -> int:
        """Elements per token on each of ``gpus``, among which the heads are divided; fewer heads than GPUs are replicated.

        ``stages`` of a pipeline divide the layers; the result is that of the longest one.
        """
        return 2 * math.ceil(self.layers / stages) * math.ceil(self.kv_heads / gpus) * self.head_dim


def count(config: Mapping[str, Any], key: str, limit: int) -> int | None:
    """The number at ``key`` in a ``config.json``; None if it has none.

    Raises:
        ValueError: it is not a whole number from 0 to ``limit``.
    """
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= limit:
        raise ValueError(f"{key} is {repr(value)[:40]}, not a number from 0 to {limit:,}")
    return value


def attention(text: Mapping[str, Any]) -> tuple[Attention | None, str]:
    """The KV cache of a language model, or the reason why it is unknown. A state of constant size is not counted.

    Raises:
        ValueError, TypeError: a value is not of the form of a ``config.json``.
    """
    try:
        return _attention(text), ""
    except _Unknown as reason:
        return None, str(reason)


def _attention(text: Mapping[str, Any]) -> Attention:
    _require_every_token(text)
    layers = count(text, "num_hidden_layers", LAYER_LIMIT)
    if not layers:
        raise _Unknown("config.json lacks the numbers of layers and heads")
    _require_interpreted(text, layers)
    by_layer = [heads for heads in _heads(text, layers) if heads]
    if len(set(by_layer)) > 1:
        raise _Unknown("its layers have different numbers of KV heads")
    return Attention(len(by_layer), by_layer[0] if by_layer else 0, _head_dim(text))


def _require_every_token(text: Mapping[str, Any]) -> None:
    """Require K and V of every token in the layers with a cache.

    Raises:
        _Unknown: the cache is compressed, or has the latest tokens only.
    """
    if text.get("kv_lora_rank"):
        raise _Unknown("it keeps a compressed KV cache (MLA)")
    if text.get("sliding_window") and text.get("use_sliding_window", True):
        raise _Unknown("it has layers of sliding attention (sliding_window)")
    if text.get("attention_chunk_size"):
        raise _Unknown("it has layers of chunked attention (attention_chunk_size)")


def _require_interpreted(text: Mapping[str, Any], layers: int) -> None:
    """Require that no key makes layers differ in a way that this module does not know.

    Raises:
        _Unknown: such a key is set.
    """
    explained = any(text.get(key) for key in _KINDS)
    for key, value in text.items():
        if value in _EMPTY or key in (*_KINDS, "block_configs", "sliding_window") or _OTHERS.search(key):
            continue
        each_layer = isinstance(value, list) and (key in _SIZES or (layers > 1 and len(value) in (layers, layers + 1)))
        if each_layer or (_IRREGULAR.search(key) and not (explained and _STATES.search(key))):
            raise _Unknown(f"its layers differ by {key[:80]} in config.json, which sm120kit does not interpret")


def _heads(text: Mapping[str, Any], layers: int) -> list[int]:
    """The number of KV heads of each layer, 0 in those without a cache."""
    if blocks := text.get("block_configs"):
        heads = count(text, "num_attention_heads", HEAD_LIMIT)
        found = [_block_heads(block, heads or 0) for block in blocks]
        if len(found) != layers or any(text.get(key) for key in _KINDS):
            raise _Unknown("block_configs in config.json contradicts the layers there")
        return found
    kv_heads = count(text, "num_key_value_heads", HEAD_LIMIT)
    if not kv_heads:
        raise _Unknown("config.json lacks the number of KV heads (num_key_value_heads)")
    cached = {key: _cached(key, text[key], layers) for key in _KINDS if text.get(key)}
    if len(set(cached.values())) > 1:
        raise _Unknown(f"{' and '.join(cached)} in config.json contradict each other")
    return [kv_heads * has_cache for has_cache in next(iter(cached.values()), (True,) * layers)]


def _cached(key: str, value: Any, layers: int) -> tuple[bool, ...]:
    """Whether each layer has a KV cache, by one of ``_KINDS``.

    Raises:
        _Unknown: a kind of layer is not known, or there are more or fewer than ``layers``.
    """
    if key == "full_attention_interval":
        interval = count({key: value}, key, LAYER_LIMIT) or 1
        return tuple((layer + 1) % interval == 0 for layer in range(layers))
    kinds = [str(kind) for kind in value]
    if unknown := sorted(set(kinds) - _CACHED - _UNCACHED):
        raise _Unknown(f"it has layers of {', '.join(unknown)[:80]} ({key})")
    if len(kinds) != layers:
        raise _Unknown(f"{key} in config.json has {len(kinds)} layers, and num_hidden_layers is {layers}")
    return tuple(kind in _CACHED for kind in kinds)


def _block_heads(block: Mapping[str, Any], heads: int) -> int:
    """The KV heads of a layer in ``block_configs`` (Llama-Nemotron: ``BlockConfig`` in its configuration_decilm.py)."""
    values = {key: value for key, value in block["attention"].items() if value not in _EMPTY}
    if values.keys() & {"no_op", "replace_with_linear"}:
        return 0
    kv_heads, group = (count(values, key, HEAD_LIMIT) for key in ("num_key_value_heads", "n_heads_in_group"))
    others = sorted(values.keys() - {"num_key_value_heads", "n_heads_in_group"})
    if others or not (kv_heads or (group and heads and heads % group == 0)):
        raise _Unknown(f"its layers differ by block_configs in config.json: {', '.join(others)[:80] or 'heads'}")
    return kv_heads or heads // (group or 1)


def _head_dim(text: Mapping[str, Any]) -> int:
    given = {size for key in _SIZES[2:4] if (size := count(text, key, WIDTH_LIMIT))}
    hidden, heads = count(text, "hidden_size", WIDTH_LIMIT), count(text, "num_attention_heads", HEAD_LIMIT)
    if not given and hidden and heads and hidden % heads == 0:
        given = {hidden // heads}
    if len(given) != 1:
        raise _Unknown("config.json lacks the number of elements of a head (head_dim)")
    return given.pop()
