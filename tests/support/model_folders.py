"""Small model folders in the layouts of published checkpoints: real safetensors files filled with zeros."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

BYTES = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I32": 4, "F16": 2}
Shapes = dict[str, tuple[str, tuple[int, ...]]]

HYBRID: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "mtp_num_hidden_layers": 1,
        "max_position_embeddings": 262144,
    },
    "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
}
"""Qwen3.5: linear attention in three of four layers, the language model's keys in ``text_config``."""
MINIMAX: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 196608,
}
"""MiniMax M2: full attention in all layers."""

NVFP4: Shapes = {
    "model.language_model.embed_tokens.weight": ("BF16", (64, 32)),
    "model.language_model.layers.3.mlp.gate_proj.weight": ("U8", (64, 16)),
    "model.language_model.layers.3.mlp.gate_proj.weight_scale": ("F8_E4M3", (64, 2)),
    "model.language_model.layers.3.mlp.gate_proj.weight_scale_2": ("F32", ()),
    "model.visual.blocks.26.attn.qkv.weight": ("BF16", (32, 32)),
}
MTP: Shapes = {"mtp.layers.0.mlp.gate_proj.weight": ("BF16", (64, 32)), "mtp.fc.weight": ("BF16", (32, 64))}


def shard(path: Path, shapes: Shapes) -> None:
    """Write a safetensors file."""
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in shapes.items():
        size = BYTES[dtype] * math.prod(shape)
        content[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    header = json.dumps(content).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(offset))


def folder(directory: Path, config: dict[str, Any], *shards: Shapes) -> Path:
    """Write a model folder; several shards get an index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if len(shards) == 1:
        shard(directory / "model.safetensors", shards[0])
        return directory
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    weight_map = {name: file for file, shapes in zip(names, shards, strict=True) for name in shapes}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for name, shapes in zip(names, shards, strict=True):
        shard(directory / name, shapes)
    return directory
