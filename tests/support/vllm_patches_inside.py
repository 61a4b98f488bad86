"""What vLLM's own functions answer for the cases of ``patches/vllm``, on the CPU; run by a Python that can import vLLM.

Prints one JSON object. Nothing is replaced: layer classes, planner and back-ends are those of the wheel.
"""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.layers.attention.attention import _largest_kernel_block_within
from vllm.model_executor.layers.quantization.modelopt import ModelOptMixedPrecisionConfig
from vllm.models.qwen4_exp.common.qsa_cache import QSAKeyStateCache
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.flashinfer import FlashInferBackend
from vllm.v1.core.kv_cache_planning import unify_kv_cache_spec_page_size
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

EXPERTS = "layers.45.mlp.experts"
WRAPPED = ("model.language_model.", "language_model.model.")
"""How the checkpoint names the text model's layers, and how the target renames them."""
DRAFTS = range(17)
BLOCKS = (16, 128, 848, 1616)
"""Attention block sizes: powers of two, and those of Qwen3.8-Flash-Next."""


def algorithm(listed: str, asked: str) -> str | None:
    """The algorithm that a checkpoint's map with the layer ``listed`` gives to ``asked``."""
    config = ModelOptMixedPrecisionConfig.__new__(ModelOptMixedPrecisionConfig)
    config.quantized_layers = {f"{listed}.0.gate_proj": {"quant_algo": "mxfp8"}}
    config.packed_modules_mapping = {}
    return config._resolve_quant_algo(asked)


def ring(drafts: int, block_size: int) -> int | str:
    """The rows of the ring for a number of draft tokens, or the name of the error."""
    cache = QSAKeyStateCache.__new__(QSAKeyStateCache)
    torch.nn.Module.__init__(cache)
    cache.compress_ratio, cache.head_size, cache.dtype = 4, 128, torch.bfloat16
    cache.cache_config = SimpleNamespace(block_size=block_size)
    try:
        return cache.get_kv_cache_spec(SimpleNamespace(num_speculative_tokens=drafts)).block_size
    except (AssertionError, ValueError) as error:
        return type(error).__name__


def drafter(backend: Any, primary: int) -> dict[str, int]:
    """The block of a drafter's layers beside a target with a block of ``primary``, and the steps of prefix cache hits."""

    def window(block: int) -> SlidingWindowSpec:
        return SlidingWindowSpec(block_size=block, num_kv_heads=8, head_size=128, dtype=torch.bfloat16, sliding_window=2048)

    target = FullAttentionSpec(block_size=primary, num_kv_heads=4, head_size=256, dtype=torch.bfloat16)
    token = window(1).real_page_size_bytes
    block = _largest_kernel_block_within(backend, token, token * primary, primary, window(1))
    planned = unify_kv_cache_spec_page_size({"target": target, "drafter": window(block)})["drafter"]
    return {"kernel": block, "planned": planned.block_size, "steps": math.lcm(primary, planned.block_size)}


print(
    json.dumps(
        {
            "map": {f"{name}{EXPERTS}": algorithm(f"{name}{EXPERTS}", f"model.{EXPERTS}") for name in ("model.", *WRAPPED)},
            "other layer": algorithm(f"{WRAPPED[0]}{EXPERTS}", "model.layers.4.mlp.experts"),
            "target": [algorithm(f"{WRAPPED[0]}{EXPERTS}", f"{name}{EXPERTS}") for name in WRAPPED],
            "ring": {str(block): [ring(drafts, block) for drafts in DRAFTS] for block in BLOCKS},
            "drafter": {str(block): drafter(FlashInferBackend, block) for block in (848, 1600, 1648)},
            "other back-end": drafter(FlashAttentionBackend, 1648),
        }
    )
)
