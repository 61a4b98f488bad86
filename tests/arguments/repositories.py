"""Models that plans are compared for with engines: their ``config.json`` as far as known, and in other quantizations."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sm120kit.core.data_roots import data_root

HERE = Path(__file__).parent
OWN = HERE / "repositories.json"
"""``config.json`` of 11 published models, written from knowledge of them, not read from the Hub and not compared with it.

Sizes of Mixtral 8x7B and GLM-4.5-Air are the defaults of ``MixtralConfig`` and ``Glm4MoeConfig`` of transformers 5.20.2, except
GLM's bias of the attention; those of the other nine have no source that can be read here.
"""
OTHERS = {
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "Qwen3-Next 80B-A3B",
    "zai-org/GLM-5.3-Flash": "GLM-5.3-Flash",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "Llama 4 Scout",
    "google/gemma-4-26B-A4B-it": "Gemma 4 26B-A4B",
    "google/gemma-3-4b-it": "Gemma 3 4B",
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": "Nemotron-3 Super",
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": "Kimi Linear 48B-A3B",
    "XiaomiMiMo/MiMo-V2-Flash": "MiMo-V2-Flash",
    "LiquidAI/LFM2-1.2B": "LFM2 1.2B",
}
"""Repositories with the entry of ``kv_models.json`` that they have."""
REQUANTIZED = (
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "meta-llama/Llama-3.1-8B-Instruct",
    "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "google/gemma-4-26B-A4B-it",
    "zai-org/GLM-4.5-Air",
    "Qwen/Qwen3.6-27B",
    "Qwen/Qwen3.6-35B-A3B",
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
)
"""Models that are published in other quantizations, too."""
BASES = {"Qwen/Qwen3.6-27B": "nvidia/Qwen3.6-27B-NVFP4", "Qwen/Qwen3.6-35B-A3B": "nvidia/Qwen3.6-35B-A3B-NVFP4"}
"""BF16 models by a recorded checkpoint of them."""
KEPT = ["lm_head", "re:.*visual.*", "re:.*router.*", "re:.*gate$", "re:.*conv1d.*", "re:^mtp.*"]
_FP4 = {"num_bits": 4, "type": "float", "group_size": 16}
_GROUPS = {**_FP4, "symmetric": True, "strategy": "tensor_group", "observer": "static_minmax"}
QUANTIZED: dict[str, dict[str, Any]] = {
    "FP8": {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "NVFP4": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "producer": {"name": "modelopt"},
        "ignore": ["lm_head", "*visual*", "*router*", "*.gate", "*conv1d*", "mtp*"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**_FP4, "dynamic": False},
                "input_activations": {**_FP4, "dynamic": False},
            }
        },
    },
    "NVFP4, llm-compressor": {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "nvfp4-pack-quantized",
        "ignore": KEPT,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": "nvfp4-pack-quantized",
                "weights": {**_GROUPS, "dynamic": False},
                "input_activations": {**_GROUPS, "dynamic": "local"},
            }
        },
    },
    "FP8, llm-compressor": {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "float-quantized",
        "ignore": KEPT,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False},
                "input_activations": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True},
            }
        },
    },
    "AWQ": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
}
"""``quantization_config`` as such checkpoints usually have it, written from knowledge of them."""


def configs() -> dict[str, dict[str, Any]]:
    """The ``config.json`` of each repository, also of those in ``recipes/checkpoints/``."""
    facts = json.loads((HERE / "kv_models.json").read_text())
    found: dict[str, dict[str, Any]] = dict(json.loads(OWN.read_text()))
    found |= {name: facts[case] for name, case in OTHERS.items()}
    for path in sorted((data_root() / "recipes" / "checkpoints").glob("*.json")):
        model = json.loads(path.read_text())
        found[model["repository"]] = model["config"] | model.get("selected_as", {})
    return found | {name: _unquantized(found[quantized]) for name, quantized in BASES.items()}


def _unquantized(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "quantization_config"}


def cases() -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Each ``config.json`` with a name, and whether it has another quantization than the repository."""
    found = configs()
    yield from ((name, config, False) for name, config in found.items())
    for name in REQUANTIZED:
        for quantization, table in QUANTIZED.items():
            yield f"{name} in {quantization}", {**found[name], "quantization_config": copy.deepcopy(table)}, True
