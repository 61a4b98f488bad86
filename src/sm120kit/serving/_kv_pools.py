"""What SGLang keeps of a sequence where vLLM does not keep the same, on SM12x: windows, sparse MLA and DeepSeek-V4.

SGLang 0.5.23, srt/model_executor/pool_configurator.py, srt/mem_cache/kv_cache_configurator.py and srt/arg_groups/overrides.py;
``tests/unit/test_kv_pools.py`` compares with what its classes compute.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from sm120kit.serving._kv_layout import SPARSE_MLA_BYTES, V4_BYTES
from sm120kit.serving.kv_cache import KvCache, Vectors

SPARSE = ("DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "Glm5NextForConditionalGeneration")
"""Classes with sparse MLA whose memory is known."""
SCALED = ("GlmMoeDsaForCausalLM",)
"""Of these, those that keep scales beside FP8 on SM12x; others select TRT-LLM's layout, without scales."""
V4 = ("DeepseekV4ForCausalLM", "DeepseekV41ForCausalLM")
OTHERS = (
    "DeepseekOCRForCausalLM",
    "Gemma3nForCausalLM",
    "Gemma3nForConditionalGeneration",
    "MiniCPM3ForCausalLM",
    "MuseSparkForConditionalGeneration",
    "UnlimitedOCRForCausalLM",
)
"""Classes that keep what others do not: all heads instead of a latent vector or the reverse, layers that share, FP8."""
TYPES = {"auto": 1, "fp8_e4m3": 1, "bf16": 2, "bfloat16": 2}
"""Bytes of an element of sparse MLA by ``--kv-cache-dtype``, whose default is FP8 whatever the checkpoint's."""
PAGE, PADDING = 256, 576
"""Tokens of a page of DeepSeek-V4; its bytes are a multiple of ``PADDING``."""
REQUESTS, SHARE = 256, 0.1
"""Requests at a time of DeepSeek-V4, and tokens of its windows over all, unless options set them; V4.1 has no such share."""


def pooled(
    cache: KvCache, architectures: tuple[str, ...], kind: str, windowed: Sequence[str] | None
) -> tuple[KvCache | None, str]:
    """The cache of a model in SGLang whose cache in vLLM is known, or the reason why it is unknown.

    ``kind`` is the value of ``--kv-cache-dtype``, "auto" without one. ``windowed`` are the classes with a pool of windows, None
    if they are not recorded; others keep all tokens in layers with a window.
    """
    name = next(iter(architectures), "a model without a class")
    sparse = is_sparse(cache)
    if name in OTHERS or (is_deepseek_v4(cache) and name not in V4) or (sparse and name not in SPARSE):
        return None, f"the pools of SGLang for {name[:80]} are not known"
    if not sparse:
        if windowed is None and name not in V4 and any(each.window and not each.ring for each, _ in cache.vectors):
            return None, f"whether this version of SGLang has a pool of windows for {name[:80]} is not recorded"
        whole = name not in (*(windowed or ()), *V4)
        return replace(cache, vectors=tuple(_whole(cache))) if whole else cache, ""
    if kind not in TYPES:
        return None, f"SGLang has no sparse attention with a cache of {kind[:40]}"
    scaled = name in SCALED and TYPES[kind] == 1
    vectors = tuple((each if scaled else _raw(each, TYPES[kind]), layers) for each, layers in cache.vectors)
    return replace(cache, vectors=vectors), ""


def honours(kind: str, quantization: str) -> bool:
    """Whether the cache has by default the type of the checkpoint: only FP8, and not of compressed-tensors."""
    return kind.startswith(("fp8", "float8")) and not quantization.startswith("compressed-tensors")


def is_sparse(cache: KvCache) -> bool:
    """Whether a cache has latent vectors of sparse attention."""
    return any(_is_sparse(each) for each, _ in cache.vectors)


def _is_sparse(vectors: Vectors) -> bool:
    return vectors.width == SPARSE_MLA_BYTES and vectors.element == 1


def _whole(cache: KvCache) -> Iterator[tuple[Vectors, int]]:
    """The vectors without windows."""
    return ((each if each.ring else replace(each, window=None), layers) for each, layers in cache.vectors)


def _raw(vectors: Vectors, element: int) -> Vectors:
    """Latent vectors without scales."""
    return replace(vectors, width=vectors.latent, element=element) if _is_sparse(vectors) else vectors


def is_deepseek_v4(cache: KvCache) -> bool:
    """Whether a cache is that of DeepSeek-V4 or V4.1."""
    return any(each.width == V4_BYTES and each.element == 1 for each, _ in cache.vectors)


def deepseek_v4(cache: KvCache, requests: int, in_flight: int, share: float | None) -> tuple[float, float]:
    """Bytes per token of DeepSeek-V4 or V4.1 on each GPU, and those that SGLang reserves for ``requests`` at a time.

    ``in_flight`` are tokens of two steps. ``share`` is ``--swa-full-tokens-ratio``, None without one: the windows of V4.1 are
    then reserved.
    """
    tokens = windows = states = 0.0
    for each, layers in cache.vectors:
        if each.element == 4 and each.window == PAGE // 32:  # of the compressor of four tokens: eight rows for a page
            windows += layers * each.bytes(4) / 32
        elif each.element == 4:
            states += layers * each.bytes(4) * (each.window or 0)
        elif each.window:
            windows += layers * _slot(each)
        else:
            tokens += layers * _slot(each) / each.tokens
    reserved = (requests + 3) * states
    if share is None and not states:
        return tokens, reserved + _windowed(requests, in_flight, _window(cache)) * windows
    return tokens + (SHARE if share is None else share) * windows, reserved


def _window(cache: KvCache) -> int:
    return max(each.window or 0 for each, _ in cache.vectors if each.width == V4_BYTES)


def _slot(vectors: Vectors) -> float:
    """Bytes of one vector: of the cache with its page's padding, of the index in FP8, or FP4 for each or every second token."""
    if vectors.width == V4_BYTES:
        slots = PAGE // vectors.tokens
        return math.ceil(V4_BYTES * slots / PADDING) * PADDING / slots
    key = vectors.width * 32 // 33
    return vectors.width if vectors.tokens > 2 else key // 2 + key // 32


def _windowed(requests: int, in_flight: int, window: int) -> int:
    """Tokens of windows: of requests that run, of the steps in flight, and of the ends of four prefixes for each request."""
    running = requests * (window + 128 + 2 * PAGE) + in_flight + PAGE
    return math.ceil((running + 4 * requests * (window + PAGE)) / PAGE) * PAGE
