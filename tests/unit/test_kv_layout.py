"""What models keep of a sequence, by hand and as vLLM's KV cache specifications have it."""

from __future__ import annotations

from typing import Any

import pytest

from sm120kit.serving._kv_layout import kv_cache
from sm120kit.serving.kv_cache import KvCache, Split, State, Vectors

PLAIN: dict[str, Any] = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 256}
WINDOWED = PLAIN | {"sliding_window": 64}
BLOCKS = [{"attention": {"n_heads_in_group": 2, "no_op": False, "window_length": None}}] * 2 + [
    {"attention": {"no_op": True}},
    {"attention": {"replace_with_linear": True}},
]
MLA = PLAIN | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
V4 = PLAIN | {"head_dim": 512, "sliding_window": 128, "index_head_dim": 128}
LATENT, PAIR = 4 * 576, 2 * 2 * 32
"""Elements per token of four layers of MLA, and of one layer of ``PLAIN``."""


def layout(config: dict[str, Any]) -> KvCache:
    found, why = kv_cache(config)
    assert found, why
    return found


@pytest.mark.parametrize(
    ("config", "elements", "windows"),
    [
        (PLAIN, 4 * PAIR, 0),
        (PLAIN | {"num_key_value_heads": None}, 4 * 2 * 8 * 32, 0),
        (PLAIN | {"num_key_value_heads": [2, 2, 1, 0]}, 2.5 * PAIR, 0),
        (PLAIN | {"num_key_value_heads_per_layer": [2, 2, 1, 1]}, 3 * PAIR, 0),
        (PLAIN | {"multi_query": True}, 2 * PAIR, 0),
        (PLAIN | {"attn_config": {"kv_n_heads": 1}}, 2 * PAIR, 0),
        (PLAIN | {"v_head_dim": 16}, 4 * 2 * (32 + 16), 0),
        (PLAIN | {"num_kv_shared_layers": 2}, 2 * PAIR, 0),
        (PLAIN | {"per_layer_config": {"01": {"head_dim": 64}}}, 5 * PAIR, 0),
        # Windows and chunks
        (WINDOWED, 0, 4 * PAIR * 64),
        (WINDOWED | {"use_sliding_window": False}, 4 * PAIR, 0),
        (WINDOWED | {"use_sliding_window": True, "max_window_layers": 3}, 3 * PAIR, PAIR * 64),
        (WINDOWED | {"layer_types": ["full_attention", "sliding_attention"] * 2}, 2 * PAIR, 2 * PAIR * 64),
        (WINDOWED | {"sliding_window_pattern": 4}, PAIR, 3 * PAIR * 64),
        (WINDOWED | {"sliding_window_pattern": "LLLG"}, PAIR, 3 * PAIR * 64),
        (
            WINDOWED | {"sliding_window_pattern": [1, 1, 1, 0], "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
            PAIR,
            3 * PAIR * 64,
        ),
        (WINDOWED | {"model_type": "gemma2"}, 2 * PAIR, 2 * PAIR * 64),
        (
            WINDOWED
            | {"hybrid_layer_pattern": [0, 1, 1, 0], "swa_num_key_value_heads": 4, "swa_head_dim": 8, "swa_v_head_dim": 4},
            2 * PAIR,
            2 * 4 * 12 * 64,
        ),
        (
            WINDOWED | {"layer_types": ["full_attention", "sliding_attention"] * 2, "global_head_dim": 64},
            4 * PAIR,
            2 * PAIR * 64,
        ),
        (PLAIN | {"attention_chunk_size": 128, "no_rope_layers": [1, 1, 1, 0]}, PAIR, 3 * PAIR * 128),
        (PLAIN | {"model_type": "llama4_text"}, PAIR, 3 * PAIR * 8192),
        (PLAIN | {"no_rope_layers": [1, 1, 1, 0], "attention_chunk_size": None}, 4 * PAIR, 0),
        # Layers without attention
        (PLAIN | {"hybrid_override_pattern": "M*E-"}, PAIR, 0),
        (PLAIN | {"layers_block_type": ["mamba", "attention", "moe", "attention"]}, 2 * PAIR, 0),
        (PLAIN | {"layers_block_type": ["mamba", "hybrid", "mamba", "mamba"]}, PAIR, 0),
        (PLAIN | {"layer_types": ["conv", "full_attention", "mamba", "attention"], "conv_L_cache": 3}, 2 * PAIR, 0),
        (PLAIN | {"attn_type_list": [1, 0, 1, 1]}, 3 * PAIR, 0),
        (PLAIN | {"full_attention_interval": 2, "linear_num_key_heads": 4}, 2 * PAIR, 0),
        (PLAIN | {"full_attention_interval": 2, "layer_types": ["linear_attention", "full_attention"] * 2}, 2 * PAIR, 0),
        (PLAIN | {"attn_layer_period": 4, "attn_layer_offset": 1}, PAIR, 0),
        (PLAIN | {"attn_layer_indices": [1, 3]}, 2 * PAIR, 0),
        (PLAIN | {"full_attn_idxs": [2]}, PAIR, 0),
        (PLAIN | {"linear_attn_config": {"full_attn_layers": [4]}}, PAIR, 0),
        (PLAIN | {"block_configs": BLOCKS, "num_key_value_heads": None}, 2 * 2 * 4 * 32, 0),
        (PLAIN | {"block_configs": [*BLOCKS[:3], {"attention": {"n_heads_in_group": 4}}]}, 2 * (4 + 4 + 2) * 32, 0),
        # Latent attention: one vector, which GPUs do not divide
        (MLA, LATENT, 0),
        (MLA | {"index_topk": 2048, "index_head_dim": 128}, 4 * (656 + 132), 0),
        (MLA | {"index_topk": 2048, "index_head_dim": 128, "indexer_types": ["full", "shared"] * 2}, 4 * 656 + 2 * 132, 0),
        (
            MLA | {"index_topk": 2048, "index_head_dim": 128, "index_kpool": 4},
            4 * (656 + 132 / 4),
            4 * 2 * 128 * 2 * 4,
        ),
        (
            PLAIN | {"sparse_attention_config": {"sparse_index_dim": 16, "sparse_attention_freq": [0, 1, 1, 1]}},
            4 * PAIR + 48,
            0,
        ),
        # Keys on other parts of a model
        (
            PLAIN | {"decoder_sparse_step": 1, "first_k_dense_replace": 3, "mlp_only_layers": [1], "max_window_layers": 2},
            4 * PAIR,
            0,
        ),
        (PLAIN | {"quantization_config": {"group_size": 16}, "rope_scaling": {"factor": 2}}, 4 * PAIR, 0),
    ],
)
def test_bytes_of_tokens_and_windows(config: dict[str, Any], elements: float, windows: float) -> None:
    cache = layout(config)
    assert (cache.token_bytes(1), cache.window_bytes(1, 0)) == (elements, windows)


def test_deepseek_v4_by_hand() -> None:
    ratios = [0, 4, 128, 0]
    cache = layout(PLAIN | {"compress_ratios": ratios, "head_dim": 512, "sliding_window": 128, "index_head_dim": 128})
    # 584 bytes a vector; the index has 128 of FP8 and a scale; compressors keep FP32 sums of keys and weights.
    assert cache.token_bytes(1) == cache.token_bytes(2) == 584 / 4 + 132 / 4 + 584 / 128
    states = 8 * 4 * (4 * 512 + 4 * 128) + 128 * 4 * 2 * 512
    assert cache.window_bytes(1, 0) == 4 * 584 * 128 + states
    assert cache.window_bytes(1, 1000) - cache.window_bytes(1, 0) == 1000 * (4 * 584 + 4 * (4 * 512 + 4 * 128 + 2 * 512))


@pytest.mark.parametrize(
    ("config", "state"),
    [
        (
            {"linear_num_value_heads": 8, "linear_value_head_dim": 16, "linear_num_key_heads": 4, "linear_key_head_dim": 32}
            | {"linear_conv_kernel_dim": 4, "mamba_ssm_dtype": "float32"},
            8 * 16 * 32 * 4 + (2 * 4 * 32 + 8 * 16) * 3 * 2,
        ),
        ({"linear_num_heads": 4, "linear_head_dim": 8, "linear_conv_kernel_dim": 4}, 4 * 8 * 8 * 4 + 3 * 4 * 8 * 3 * 2),
        (
            {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4},
            4 * 8 * 16 * 2 + (4 * 8 + 2 * 2 * 16) * 3 * 2,
        ),
        ({"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}, 512 * 16 * 2 + 512 * 3 * 2),
        ({"conv_L_cache": 3}, 256 * 2 * 2),
    ],
)
def test_states(config: dict[str, Any], state: float) -> None:
    kinds = ["linear_attention", "full_attention"] * 2
    cache = layout(PLAIN | config | {"layer_types": kinds})
    assert cache.state_bytes() == 2 * state and cache.stateful == 0
    assert cache.token_bytes(1) == 2 * PAIR


def test_state_of_unknown_size_is_not_counted() -> None:
    cache = layout(PLAIN | {"hybrid_override_pattern": "MM*E"})
    assert (cache.state_bytes(), cache.stateful) == (0, 2)


def test_division_among_gpus_and_stages() -> None:
    cache = KvCache(
        ((Vectors(4, 10), 3), (Vectors(1, 6, window=5), 2), (Vectors(2, 1, 4, ring=True), 1)), ((State(8, 2, 4), 3),)
    )
    assert [cache.token_bytes(1, Split(gpus)) for gpus in (1, 2, 8)] == [120, 60, 30]
    assert cache.token_bytes(0.5, Split(stages=2)) == 2 * 4 * 10 * 0.5
    assert cache.window_bytes(1, 0, Split(4)) == 2 * 6 * 5 + 1 * 4
    assert cache.window_bytes(1, 10) == 2 * 6 * 15 + 2 * 4, "a ring has no room for the tokens of a step"
    assert cache.state_bytes(Split(2), drafts=1) == 3 * (8 * 2 + 2 * 4 * 2) / 2
    assert cache.with_drafts(1).token_bytes(1) == 160 and cache.with_drafts(0) == cache


IRREGULAR: dict[str, Any] = {
    "attention_window_size": 2048,
    "attention_other_setting": {"attention_type": "sliding_attention"},
    "block_types": ["recurrent", "recurrent", "attention"],
    "cla_share_factor": 2,
    "cross_attention_layers": [3],
    "global_attn_every_n_layers": 3,
    "head_dim": [64, 64, 32, 32],
    "hybrid_layer_ids": [1],
    "index_topk": 2048,
    "layer_group_size": 8,
    "mamba_d_state": 16,
    "some_sizes": [1, 2, 3, 4],
}
"""Keys by which the layers of published models differ, and one that no model has."""


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (PLAIN | {"num_key_value_heads": [2, 4]}, "num_key_value_heads in config.json has 2 layers"),
        (PLAIN | {"layer_types": [0, 1, 1, 1]}, "layers of 0, 1 (layer_types)"),
        (PLAIN | {"is_encoder_decoder": True}, "encoder"),
        ({}, "number of layers"),
        ({"num_hidden_layers": 4}, "heads"),
        (PLAIN | {"hidden_size": 257}, "head_dim"),
        (PLAIN | {"head_dim": 64, "attention_head_dim": 32}, "head_dim"),
        (PLAIN | {"layer_types": ["sliding_attention"] * 4}, "sliding_window"),
        (PLAIN | {"hybrid_override_pattern": "M*E"}, "hybrid_override_pattern"),
        (PLAIN | {"hybrid_override_pattern": "M*EW"}, "W (hybrid_override_pattern)"),
        (PLAIN | {"hybrid_override_pattern": "M*EM", "layers_block_type": ["mamba"] * 4}, "contradict"),
        (PLAIN | {"full_attention_interval": 4, "layer_types": ["full_attention"] * 4}, "contradict"),
        (PLAIN | {"attention_chunk_size": 128, "layer_types": ["full_attention"] * 4}, "contradict"),
        (PLAIN | {"block_configs": BLOCKS[:3]}, "block_configs"),
        (PLAIN | {"block_configs": [*BLOCKS[:3], {"attention": {"n_heads_in_group": 2, "window_length": 9}}]}, "window_l"),
        (V4 | {"compress_ratios": [0, 4, 128]}, "compress_ratios"),
        (V4 | {"compress_ratios": [0, 4, 64, 0]}, "compress_ratios"),
        (V4 | {"compress_ratios": [0, 1, 2, 0], "kv_source_layer_ids": [0]}, "compress_ratios"),
        *((PLAIN | {key: value}, key) for key, value in IRREGULAR.items()),
    ],
)
def test_unknown_with_the_reason(config: dict[str, Any], why: str) -> None:
    found, reason = kv_cache(config)
    assert found is None and why in reason


@pytest.mark.parametrize(
    ("key", "value"), [("sliding_window_pattern", -3), ("sliding_window_pattern", 2.5), ("full_attn_idxs", {"a": 1})]
)
def test_kinds_of_layers_of_another_form_are_refused(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=key):
        kv_cache(WINDOWED | {key: value})
