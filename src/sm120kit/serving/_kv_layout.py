"""What each layer of a model keeps of a sequence, by its ``config.json``, or the reason why it is unknown.

A key by which layers differ, and that nothing here reads, makes the size unknown: a wrong size refuses models that fit.
The sizes are those of vLLM's KV cache specifications, with which ``tests/arguments/kv_specs.py`` compares them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from sm120kit.serving.kv_cache import KvCache, State, Vectors

LAYER_LIMIT, HEAD_LIMIT, WIDTH_LIMIT, TOKEN_LIMIT = 4096, 65_536, 1 << 24, 1 << 32
"""Limits for numbers of layers, heads, elements and tokens: twenty times those of the largest published models."""

FULL, WINDOW, CHUNK, STATE, BOTH, NOTHING = "full", "window", "chunk", "state", "both", "nothing"
_NAMES = {
    **dict.fromkeys(
        ("full_attention", "attention", "indexed_attention", "deepseek_sparse_attention", "*", "1", "A", "G"), FULL
    ),
    **dict.fromkeys(("sliding_attention", "sliding_window", "L"), WINDOW),
    "chunked_attention": CHUNK,
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "conv", "M", "0"), STATE),
    "hybrid": BOTH,
    **dict.fromkeys(("mlp", "moe", "-", "E"), NOTHING),
}
"""Kinds of layers in ``layer_types`` and ``layers_block_type`` (transformers), Nemotron-H's pattern and MiniMax's list."""
_LISTS = ("layer_types", "layers_block_type", "hybrid_override_pattern", "attn_type_list")
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window_pattern": 2, "sliding_window": 4096},
    "gemma3_text": {
        "sliding_window_pattern": 6,
        "sliding_window": 4096,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
    },
    "cohere2": {"sliding_window_pattern": 4},
    "llama4_text": {"attention_chunk_size": 8192, "no_rope_layer_interval": 4},
    "qwen3_next": {"full_attention_interval": 4},
}
"""What published ``config.json`` leave to the configuration classes of transformers, by ``model_type``."""
_HEADS = ("num_key_value_heads", "n_head_kv", "num_kv_heads", "multi_query_group_num", "num_attention_groups")
_QUERY_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_TWICE = ("longcat_flash",)
"""Models with two attentions in each of ``num_layers``."""
_EXPANDED = ("minicpm3",)
"""Models with MLA of which engines keep K and V of each head."""
_EMPTY: tuple[object, ...] = (None, False, 0, "", [], {})
SPARSE_MLA_BYTES = 656
"""Bytes of a latent vector of 512 + 64 elements that sparse attention reads: 512 FP8, 4 scales of FP32, 64 BF16."""
V4_BYTES, V4_INDEX_WINDOW = 584, 8
"""Bytes of DeepSeek-V4's vector: 448 FP8, 64 BF16, 8 of scales."""

_OTHERS = re.compile(
    r"moe|expert|mlp|^ple_(embed|conv|layer)|index_kpool_\w+|index_share|dspark|dflash|engram|candidate|block_(multiple_of|auto|ff)|rope|rotary|vision|audio|mtp|nextn|router|token|dropout|bias|norm|quant|compression_config|activation"
    r"|ngram|^hc_|chunk_size_feed_forward|_freq$|time_step"
    r"|^(use_sliding_window|max_window_layers|decoder_sparse_step|architectures|q_lora_rank|qk_nope_head_dim|qk_head_dim"
    r"|query_pre_attn_scalar|hidden_size_per_layer_input"
    r"|vocab_size_per_layer_input|pretraining_tp|o_lora_rank|o_groups|full_attn_idxs|num_sliding_attention_heads|prefix_dense_sliding_window_pattern"
    r"|num_attention_heads_per_layer|n_recurrent_\w+"
    r"|attention_chunk_size|swa_(num_attention_heads|rope_theta)|linear_lower_bound|hidden_act|layer_types_\w+)$"
)
"""Keys on other parts of a model than its cache, and those that are read with another key."""
_STATES = re.compile(r"^((use_)?mamba|ssm|linear|conv|chunk_size$|lightning|short_conv|expand$|time_step|n_groups|kda)")
"""Keys on the state of layers, whose kinds other keys have."""
_IRREGULAR = re.compile(
    r"layers?_(types?|block|overrides?|configs?|kinds?|map|specs?|group|ids$)|blocks?_(types?|configs?|layout)|_idxs?$|_indices$"
    r"|(attn|attention)_(types?|layers?|config|other|kinds?|every|idx|pattern)|hybrid|pattern|interval|period|offset|every"
    r"|per_layer|window|sliding|swa|chunk|local|global|mamba|ssm|ssd|recurrent|rwkv|lru|linear_|lightning|kda|delta|conv_"
    r"|retention|cross_attention|shared?_(kv|layer|factor)|kv_shared|cla_|reuse|sink|compress|lora_rank|latent|index_|sparse"
    r"|multi_query|(query|attention)_groups|k_eq_v|v_head_dim|qk_nope|cca_|ple_|^num_loops$"
)
"""Keys by which layers differ in what they keep of a token, as models in transformers, vLLM and SGLang name them."""


_FORMS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(_LISTS, (list, str)),
    **dict.fromkeys(("linear_attn_config", "attn_config", "sparse_attention_config"), dict),
    **dict.fromkeys(("compress_ratios", "no_rope_layers", "hybrid_layer_pattern", "full_attn_layers"), list),
    **dict.fromkeys(("block_configs", "indexer_types", "kv_source_layer_ids", "sparse_attention_freq"), list),
    **dict.fromkeys(("full_attn_idxs", "attn_layer_indices"), list),
}
"""What is at keys that are no numbers or texts, if anything."""


class _Unknown(Exception):
    """The cache's size cannot be determined, for this reason."""


class _Config(dict[str, Any]):
    """A ``config.json`` that records the keys which are read."""

    def __init__(self, values: Mapping[str, Any], read: set[str] | None = None) -> None:
        super().__init__({**_DEFAULTS.get(str(values.get("model_type")), {}), **values})
        self.read: set[str] = set() if read is None else read

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        value = super().get(key, default)
        if value and key in _FORMS and not isinstance(value, _FORMS[key]):
            raise ValueError(f"{key} is {repr(value)[:80]}, not {'an object' if _FORMS[key] is dict else 'a list'}")
        return value

    def number(self, *keys: str, limit: int = WIDTH_LIMIT) -> int:
        """The first number above 0 at one of these keys; 0 without one."""
        if lists := [key for key in keys if isinstance(self.get(key), list)]:
            raise _Unknown(f"its layers differ by {lists[0]} in config.json, which sm120kit does not interpret")
        return next(filter(None, (count(self, key, limit) for key in keys)), 0)

    def of_layer(self, layer: int) -> _Config:
        """The values for a layer: transformers' ``per_layer_config`` has those that differ."""
        own = self.get("per_layer_config") or {}
        if isinstance(own, list):
            own = dict(enumerate(own))
        found = own.get(f"{layer:02}") or own.get(str(layer)) or own.get(layer) or {}
        return _Config({**self, **found}, self.read) if found else self


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


def kv_cache(text: Mapping[str, Any]) -> tuple[KvCache | None, str]:
    """What a language model keeps of a sequence, or the reason why it is unknown.

    Raises:
        ValueError, TypeError: a value is not of the form of a ``config.json``.
    """
    try:
        return _kv_cache(_Config(text)), ""
    except _Unknown as reason:
        return None, str(reason)


def _kv_cache(config: _Config) -> KvCache:
    if config.get("is_encoder_decoder"):
        raise _Unknown("it has an encoder, of whose tokens the decoder keeps vectors too")
    layers = config.number(*_LAYERS, limit=LAYER_LIMIT) or len(config.get("layers_block_type") or ())
    if config.get("model_type") in _TWICE:
        layers = 2 * config.number("num_layers", *_LAYERS, limit=LAYER_LIMIT)
    if not layers:
        raise _Unknown("config.json lacks the number of layers")
    kinds = _kinds(config, layers)
    kept: Counter[Vectors | State | None] = Counter()
    shared = config.number("num_kv_shared_layers", limit=LAYER_LIMIT)
    for layer, kind in enumerate(kinds[: layers - shared]):
        kept.update(_kept(kind, config.of_layer(layer), layer))
    _require_all_read(config, layers, stateful=bool({STATE, BOTH} & set(kinds)))
    return KvCache(
        tuple((each, number) for each, number in kept.items() if isinstance(each, Vectors)),
        tuple((each, number) for each, number in kept.items() if isinstance(each, State)),
        kept[None],
    )


def _require_all_read(config: _Config, layers: int, *, stateful: bool) -> None:
    """Require that each key by which layers can differ has been read.

    Raises:
        _Unknown: such a key is set.
    """
    for key, value in config.items():
        if value in _EMPTY or key in config.read or _OTHERS.search(key):
            continue
        each_layer = isinstance(value, list) and layers > 1 and len(value) in (layers, layers + 1)
        if each_layer or (_IRREGULAR.search(key) and not (stateful and _STATES.search(key))):
            raise _Unknown(f"its layers differ by {key[:80]} in config.json, which sm120kit does not interpret")


def _kinds(config: _Config, layers: int) -> tuple[str, ...]:
    """The kind of each layer.

    Raises:
        _Unknown: keys contradict each other, have a kind that is not known, or more or fewer than ``layers``.
    """
    found = {key: kinds for key, kinds in _stated_kinds(config, layers) if kinds}
    for key, kinds in found.items():
        if len(kinds) != layers:
            raise _Unknown(f"{key} in config.json has {len(kinds)} layers, and the number of layers is {layers}")
    if len(set(found.values())) > 1:
        raise _Unknown(f"{' and '.join(found)} in config.json contradict each other")
    return next(iter(found.values()), None) or _alike(config, layers)


def _stated_kinds(config: _Config, layers: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The kinds of layers by each key that has them."""
    for key in _LISTS:
        yield key, _named(key, config.get(key) or ())
    if config.get("block_configs"):
        yield "block_configs", tuple(_block_kind(block) for block in config["block_configs"])
    if config.get("hybrid_layer_pattern"):  # MiMo-V2
        yield "hybrid_layer_pattern", tuple(WINDOW if each else FULL for each in config["hybrid_layer_pattern"])
    if (linear := config.get("linear_attn_config")) and not config.get("layer_types"):  # Kimi, which counts from 1
        full = _Config(linear).get("full_attn_layers") or ()
        yield "linear_attn_config", tuple(FULL if layer + 1 in full else STATE for layer in range(layers))
    for key in ("full_attn_idxs", "attn_layer_indices"):
        if config.get(key) and not config.get("layer_types"):
            yield key, tuple(FULL if layer in config[key] else STATE for layer in range(layers))
    if interval := config.number("full_attention_interval", limit=LAYER_LIMIT):
        yield "full_attention_interval", _every(layers, interval, interval - 1, FULL, STATE)
    if period := config.number("attn_layer_period", limit=LAYER_LIMIT):
        yield "attn_layer_period", _every(layers, period, config.number("attn_layer_offset"), FULL, STATE)
    if config.get("attention_chunk_size"):
        yield from _chunked(config, layers)
    for key in ("sliding_window_pattern", "_sliding_window_pattern"):
        if isinstance(pattern := config.get(key), str):  # EXAONE 4: LLLG
            yield key, _named(key, (pattern * layers)[:layers])
        elif not config.get("layer_types") and (period := config.number(key, limit=LAYER_LIMIT)):
            yield key, _every(layers, period, period - 1, FULL, WINDOW)


def _chunked(config: _Config, layers: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Llama 4: a layer without RoPE attends to all tokens, others to those of their chunk."""
    rope = config.get("no_rope_layers") or []
    interval = config.number("no_rope_layer_interval", limit=LAYER_LIMIT)
    if rope:
        yield "no_rope_layers", tuple(CHUNK if each else FULL for each in rope)
    elif interval:
        yield "no_rope_layer_interval", _every(layers, interval, interval - 1, FULL, CHUNK)
    elif CHUNK not in _named("layer_types", config.get("layer_types") or ()):
        yield "attention_chunk_size", (CHUNK,) * layers


def _every(layers: int, period: int, offset: int, one: str, others: str) -> tuple[str, ...]:
    return tuple(one if layer % period == offset else others for layer in range(layers))


def _named(key: str, names: Any) -> tuple[str, ...]:
    """The kinds of layers with these names.

    Raises:
        _Unknown: a name is not known.
    """
    kinds = [str(name) if isinstance(name, str) or key == "attn_type_list" else repr(name) for name in names]
    numbers = {"0", "1"} if key != "attn_type_list" else set()
    if unknown := sorted({*kinds} - (_NAMES.keys() | V4_RATES.keys()) | ({*kinds} & numbers)):
        raise _Unknown(f"it has layers of {', '.join(unknown)[:80]} ({key})")
    return tuple(_NAMES.get(kind, kind) for kind in kinds)


V4_RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
"""DeepSeek-V4's kinds of layers, and the tokens of which they keep one vector."""


_RATIOS = "config.json has compress_ratios that sm120kit does not interpret"


def _alike(config: _Config, layers: int) -> tuple[str, ...]:
    """The kinds of layers that no list has: all alike, but for Qwen2's first layers without a window."""
    if ratios := config.get("compress_ratios"):
        kinds = {0: WINDOW, **{rate: kind for kind, rate in V4_RATES.items()}}
        if len(ratios) < layers or (config.get("kv_source_layer_ids") is None and not {*ratios} <= kinds.keys()):
            raise _Unknown(_RATIOS)
        return tuple(kinds.get(ratio, WINDOW) for ratio in ratios[:layers])
    if config.get("state_size"):
        return (STATE,) * layers
    if config.get("mamba_n_heads") and config.get("model_type") == "falcon_h1":
        return (BOTH,) * layers
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return (FULL,) * layers
    whole = config.number("max_window_layers", limit=LAYER_LIMIT) if config.get("use_sliding_window") else 0
    return tuple(WINDOW if layer >= whole else FULL for layer in range(layers))


def _kept(kind: str, config: _Config, layer: int) -> Iterator[Vectors | State | None]:
    """What a layer of a kind keeps; None for a state of unknown size."""
    if kind in V4_RATES or config.get("compress_ratios"):
        sources = config.get("kv_source_layer_ids")
        yield from _deepseek_v4(config, V4_RATES.get(kind, 0)) if sources is None else _deepseek_v41(config, layer, sources)
        return
    if kind in (STATE, BOTH):
        yield _state(config)
    if kind in (STATE, NOTHING):
        return
    window = _window(kind, config)
    if rank := config.number("kv_lora_rank"):
        yield from _latent(config, rank, window, layer)
        return
    heads, width = _attention(config, layer, windowed=kind == WINDOW)
    if heads:
        yield Vectors(heads, width, window)
    yield from _index(config, layer)


def _window(kind: str, config: _Config) -> int | None:
    """The tokens that a layer of a kind keeps, None for all.

    Raises:
        _Unknown: their number is not stated.
    """
    keys = {WINDOW: ("sliding_window", "sliding_window_size"), CHUNK: ("attention_chunk_size",)}.get(kind)
    if keys is None:
        config.get("sliding_window")
        return None
    window = config.number(*keys, limit=TOKEN_LIMIT)
    if not window:
        raise _Unknown(f"config.json lacks the size of the window ({keys[0]})")
    return window


def _attention(config: _Config, layer: int, *, windowed: bool) -> tuple[int, int]:
    """The KV heads of a layer, and the elements of K and V of a head."""
    if windowed and (heads := config.number("swa_num_key_value_heads", limit=HEAD_LIMIT)):
        key = config.number("swa_head_dim") or _head_dim(config)
        return heads, key + (config.number("swa_v_head_dim") or key)
    config.read.update(("swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim"))
    if not windowed and (key := config.number("global_head_dim")):  # Gemma 4
        return config.number("num_global_key_value_heads", limit=HEAD_LIMIT) or _heads(config, layer), 2 * key
    config.read.update(("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v"))
    heads, key = _heads(config, layer), _head_dim(config)
    return heads, key + (config.number("v_head_dim") or key)


def _heads(config: _Config, layer: int) -> int:
    """The KV heads of a layer: by number for each layer, one number, or as many as of queries."""
    if blocks := config.get("block_configs"):
        return _block_heads(blocks[layer], config.number(*_QUERY_HEADS, limit=HEAD_LIMIT))
    for key in ("num_key_value_heads", "num_key_value_heads_per_layer"):
        if isinstance(each := config.get(key), list):
            if len(each) != (layers := config.number(*_LAYERS, limit=LAYER_LIMIT)):
                raise _Unknown(f"{key} in config.json has {len(each)} layers, and the number of layers is {layers}")
            return count({key: each[layer]}, key, HEAD_LIMIT) or 0
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    grouped = config.get("attn_config") or {}
    if "kv_n_heads" in grouped:
        return count(grouped, "kv_n_heads", HEAD_LIMIT) or 0
    heads = config.number(*_HEADS, limit=HEAD_LIMIT) or config.number(*_QUERY_HEADS, limit=HEAD_LIMIT)
    if not heads:
        raise _Unknown("config.json lacks the number of KV heads (num_key_value_heads)")
    return heads


def _block_kind(block: Mapping[str, Any]) -> str:
    """The kind of a layer in ``block_configs``: of Llama-Nemotron (``configuration_decilm.py``) or Nemotron-H Puzzle."""
    if kind := block.get("block_type"):
        return _named("block_configs", (kind,))[0]
    values = block["attention"]
    if values.get("no_op") or values.get("replace_with_linear"):
        return NOTHING
    if others := sorted(key for key, value in values.items() if value not in _EMPTY and key not in _BLOCK_HEADS):
        raise _Unknown(f"its layers differ by block_configs in config.json: {', '.join(others)[:80]}")
    return FULL


_BLOCK_HEADS = ("num_key_value_heads", "n_heads_in_group")


def _block_heads(block: Mapping[str, Any], heads: int) -> int:
    """The KV heads of a layer in ``block_configs``, whose attention has ``heads`` heads of queries."""
    values = block.get("attention") or block
    kv_heads, group = (count(values, key, HEAD_LIMIT) for key in _BLOCK_HEADS)
    if not (kv_heads or (group and heads and heads % group == 0)):
        raise _Unknown("its layers differ by block_configs in config.json, which has no number of heads")
    return kv_heads or heads // (group or 1)


def _head_dim(config: _Config) -> int:
    given = {size for key in ("head_dim", "attention_head_dim", "hidden_size_per_head") if (size := config.number(key))}
    hidden, heads = config.number(*_HIDDEN), config.number(*_QUERY_HEADS, limit=HEAD_LIMIT)
    if not given and hidden and heads and hidden % heads == 0:
        given = {hidden // heads}
    if len(given) != 1:
        raise _Unknown("config.json lacks the number of elements of a head (head_dim)")
    return given.pop()


def _latent(config: _Config, rank: int, window: int | None, layer: int) -> Iterator[Vectors]:
    """The latent vector of MLA, and the key by which sparse attention selects tokens; GPUs do not divide them."""
    sparse = config.number("index_topk") and not window
    config.read.update(("v_head_dim", "index_topk_freq", "index_n_heads"))
    rope = config.number("qk_rope_head_dim")
    if config.get("model_type") in _EXPANDED:
        yield Vectors(config.number(*_QUERY_HEADS, limit=HEAD_LIMIT), 2 * (config.number("qk_nope_head_dim") + rope), window)
        return
    yield Vectors(1, SPARSE_MLA_BYTES, element=1, latent=rank + rope) if sparse else Vectors(1, rank + rope, window)
    types = config.get("indexer_types") or []
    if not sparse or (layer < len(types) and types[layer] == "shared"):
        return
    key, pool = config.number("index_head_dim"), config.number("index_kpool") or 1
    yield Vectors(1, key + 4 * math.ceil(key / 128), tokens=pool, element=1)
    if pool > 1:  # GLM-5.3: key and score of the tokens that do not fill a pool yet
        yield Vectors(2, key, pool, element=2, ring=True)


def _index(config: _Config, layer: int) -> Iterator[Vectors]:
    """The keys by which sparse attention over K and V selects tokens."""
    sparse = config.get("sparse_attention_config") or {}  # MiniMax-M3
    layers = sparse.get("sparse_attention_freq") or ()
    if layers:
        config.read.update(key for key in config if key.startswith("index_"))
    if (pool := config.number("indexer_compress_ratio")) and (key := config.number("indexer_head_dim")):  # Qwen4-exp
        yield Vectors(1, key, tokens=pool, element=2)
        yield Vectors(1, key, pool, element=2, ring=True)
    if layer < len(layers) and layers[layer]:
        yield Vectors(1, count(sparse, "sparse_index_dim", WIDTH_LIMIT) or 0)


def _state(config: _Config) -> State | None:
    """The state of a layer of linear attention, Mamba or a short convolution; None if its size is not stated."""
    element = 4 if "float32" in (config.get("mamba_ssm_dtype"), config.get("mamba_ssm_cache_dtype")) else 2
    if values := config.number("linear_num_value_heads"):  # gated DeltaNet
        key = config.number("linear_key_head_dim")
        wide = values * config.number("linear_value_head_dim")
        step = 2 * config.number("linear_num_key_heads") * key + wide
        return State(wide * key, step, config.number("linear_conv_kernel_dim"), element)
    linear = _Config(config.get("linear_attn_config") or {})  # Kimi Delta Attention
    if heads := config.number("linear_num_heads") or linear.number("num_heads"):
        size = config.number("linear_head_dim") or linear.number("head_dim")
        kernel = config.number("linear_conv_kernel_dim") or linear.number("short_conv_kernel_size")
        return State(heads * size * size, 3 * heads * size, kernel, 4)
    size = config.number("ssm_state_size", "mamba_d_state", "state_size")
    kernel = config.number("conv_kernel", "mamba_d_conv")
    if heads := config.number("mamba_num_heads", "mamba_n_heads", "n_mamba_heads", *["num_heads"] * ("state_size" in config)):
        wide = heads * config.number("mamba_head_dim", "mamba_d_head", "mamba_headdim", "head_dim")
        groups = config.number("n_groups", "mamba_n_groups", "mamba_ngroups")
        return State(wide * size, wide + 2 * groups * size, kernel, element)
    wide = config.number("mamba_expand") * config.number("hidden_size") or (size and config.number("intermediate_size"))
    if wide:  # Mamba 1
        return State(wide * size, wide, kernel, element)
    if kernel := config.number("conv_L_cache"):
        return State(0, config.number("hidden_size"), kernel)
    return None


def _deepseek_v41(config: _Config, layer: int, sources: list[int]) -> Iterator[Vectors]:
    """A layer of DeepSeek-V4.1: a window, and compressed vectors with keys of the index in the layers that others read."""
    config.read.update(("index_source_layer_ids", "candidate_block_size", *_V4_OTHERS))
    yield Vectors(1, V4_BYTES, config.number("sliding_window"), element=1)
    if layer in sources:
        rates, key = dict(enumerate(config["compress_ratios"])), config.number("index_head_dim")
        if not (rate := count({"compress_ratios": rates.get(layer)}, "compress_ratios", TOKEN_LIMIT)):
            raise _Unknown(_RATIOS)
        yield Vectors(1, V4_BYTES, tokens=rate, element=1)
        yield Vectors(1, key + 4 * math.ceil(key / 128), tokens=rate, element=1)


_V4_OTHERS = ("compress_rates", "num_key_value_heads", "index_head_dim", "index_n_heads", "index_topk")


def _deepseek_v4(config: _Config, rate: int) -> Iterator[Vectors]:
    """A layer of DeepSeek-V4: a window, compressed vectors, keys of the index, and the states of both compressors."""
    size, window = config.number("head_dim"), config.number("sliding_window")
    config.read.update(_V4_OTHERS)
    yield Vectors(1, V4_BYTES, window, element=1)
    if not rate:
        return
    yield Vectors(1, V4_BYTES, tokens=rate, element=1)
    if rate > V4_INDEX_WINDOW:
        yield Vectors(1, 2 * size, rate, element=4)
        return
    key = config.number("index_head_dim")
    yield Vectors(1, key + 4 * math.ceil(key / 128), tokens=rate, element=1)
    for kept in (size, key):
        yield Vectors(1, 4 * kept, 2 * rate, element=4)
