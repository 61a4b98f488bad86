"""What SGLang keeps of a token as sm120kit computes it, against SGLang's own pool configurators."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kv_rows import TOLERANCE

from sm120kit.recipes import configurations
from sm120kit.serving import _kv_pools
from sm120kit.serving.checkpoint import described
from sm120kit.serving.fit import Device, Fit, estimate

RECORD = json.loads((Path(__file__).parent / "data" / "kv_pools.json").read_text())
CASES: dict[str, dict[str, Any]] = {name: case for name, case in RECORD["cases"].items() if not case["refusal"]}
MEMORY = 40_000_000_000
"""Bytes for tokens in the record."""
UNKNOWN = {
    "global_attn_every_n_layers": ["AfmoeForCausalLM"],
    "layer_group_size": ["BailingMoeV3VLForConditionalGeneration"],
    "Glm5NextForCausalLM": ["GLM-5.3-Flash"],
    "head_dim": [
        "Glm4MoeForCausalLM",
        "Glm4vMoeForConditionalGeneration",
        "Qwen3OmniMoeForConditionalGeneration",
    ],
    "learnable_sink": ["HYV4ForCausalLM"],
    "use_hybrid_layers": ["IQuestQ1ForCausalLM"],
    "conv_L_cache": ["Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Lfm2VlForConditionalGeneration"],
    "linear_attention_type": ["GigaChat35ForCausalLM"],
    "lightning_nh": ["MiniCPMSALAForCausalLM"],
    "cross_attention_layers": ["MllamaForConditionalGeneration"],
    "num_loops": ["NanbeigeForCausalLM"],
    "is_hybrid_swa": ["Spark2_5ForCausalLM"],
    "encoder": ["WhisperForConditionalGeneration"],
    "num_query_groups": ["ZayaForCausalLM"],
    "DeepseekV4ForConditionalGeneration": ["deepseek-ai/DeepSeek-V4-Flash-Vision-Exp"],
    "are not known": [*_kv_pools.OTHERS],
}
"""Models whose cache is unknown, by a word of the reason."""
REASONS = {name: word for word, names in UNKNOWN.items() for name in names}


def fit(case: dict[str, Any], *more: str, **changes: Any) -> Fit:
    served = configurations.load("deepseek-v4-flash-2x-rtx-pro-6000-sglang")
    arguments = ("--mem-fraction-static", "1.0", *case["argv"], *more)
    alone = served.model_copy(update={"arguments": arguments, "tensor_parallel": 1, **changes})
    return estimate(alone, described(case["config"], "a/b", 0), (Device(0, "a GPU", MEMORY),))


@pytest.mark.parametrize("name", CASES)
def test_cache_is_that_of_sglang_or_unknown_with_the_reason(name: str) -> None:
    found = fit(CASES[name])
    if name in REASONS:
        assert found.kv_bytes_per_token is None and REASONS[name] in found.why_no_kv
        return
    assert found.kv_bytes_per_token == pytest.approx(CASES[name]["token"], rel=TOLERANCE), found.why_no_kv


def test_most_classes_are_read_and_refusals_have_a_reason() -> None:
    assert len(CASES) >= 160 and REASONS.keys() <= CASES.keys()
    assert all(case["refusal"] for case in RECORD["cases"].values() if "token" not in case)


@pytest.mark.parametrize("name", [name for name in CASES if "DeepSeek-V4" in name and name not in REASONS])
def test_windows_and_states_of_requests_are_reserved(name: str) -> None:
    assert fit(CASES[name]).capacity_tokens == pytest.approx(CASES[name]["tokens"], rel=TOLERANCE)


def test_what_the_record_does_not_have_is_unknown() -> None:
    v4, glm = CASES["deepseek-ai/DeepSeek-V4-Flash-0731"], CASES["festr2/GLM-5-NVFP4-MTP"]
    assert "pipeline" in fit(v4, pipeline_parallel=2).why_no_kv
    assert "nvfp4" in fit(glm, "--kv-cache-dtype", "nvfp4").why_no_kv
    assert "--dsa-decode-backend" in fit(glm, "--dsa-decode-backend", "trtllm").why_no_kv
    other = fit(glm | {"config": glm["config"] | {"architectures": ["OtherForCausalLM"]}})
    assert other.verdict[0] is None and "OtherForCausalLM" in other.why_no_kv


def test_only_classes_that_sglang_lists_have_a_pool_of_windows() -> None:
    text = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "head_dim": 64, "sliding_window": 128}
    kept = {
        name: fit({"argv": [], "config": text | {"architectures": [name]}}).kv_bytes_per_token
        for name in ("MellumForCausalLM", "MistralForCausalLM")
    }
    assert kept == {"MellumForCausalLM": 820, "MistralForCausalLM": 1024}


@pytest.mark.parametrize(
    ("quantization", "element"),
    [
        ({"quant_method": "modelopt", "kv_cache_scheme": {"type": "float", "num_bits": 8}}, 1),
        ({"quant_method": "modelopt", "kv_cache_scheme": {"type": "float", "num_bits": 4}}, 2),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"type": "float", "num_bits": 8}}, 2),
    ],
)
def test_only_fp8_of_modelopt_is_the_default_of_the_cache(quantization: dict[str, Any], element: int) -> None:
    case = CASES["lukealonso/MiniMax-M2.5-NVFP4"]
    found = fit(case | {"config": case["config"] | {"quantization_config": quantization}})
    assert found.kv_bytes_per_token == case["token"] / 2 * element
