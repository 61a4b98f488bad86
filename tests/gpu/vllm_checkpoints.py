"""Checkpoints of random weights and few layers: Qwen3, GLM-4.5 with multi-token prediction, and Qwen3.5 MoE in NVFP4."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "src"), str(HERE.parent / "support")]

QWEN35 = HERE.parents[1] / "recipes" / "checkpoints" / "lukealonso--Qwen3.5-397B-A17B-NVFP4.json"
LAYERS, EXPERTS, CHOSEN = 4, 32, 4
"""Of the small Qwen3.5 MoE: three layers of linear attention and one of full attention, experts, and those of a token."""


def small(folder: Path) -> None:
    """Qwen3 with and without experts, with all of them for each token, and GLM-4.5 with a layer of multi-token prediction."""
    import torch
    from safetensors.torch import load_file, save_file
    from small_models import probe_tokenizer, tiny_model, word_ids
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    tokenizer = probe_tokenizer()
    words = torch.zeros(len(tokenizer), 1)
    words[word_ids(tokenizer)] = 1.0  # others are never the most likely ones: a text is read as the tokens that were generated
    for name, experts in (("moe", 8), ("dense", 0)):
        model = tiny_model(len(tokenizer), experts=experts)
        model.lm_head.weight.data *= words
        model.bfloat16().save_pretrained(folder / name)  # in float32 the weights are those of bfloat16
    layers = 3
    config = {"num_hidden_layers": layers + 1, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "head_dim": 64, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1}
    config |= {"topk_group": 1, "moe_intermediate_size": 128, "n_shared_experts": 1, "first_k_dense_replace": 1}
    config |= {"initializer_range": 0.1, "max_position_embeddings": 4096, "tie_word_embeddings": False}
    torch.manual_seed(0)
    Glm4MoeForCausalLM(Glm4MoeConfig(**config, vocab_size=len(tokenizer))).save_pretrained(folder / "glm")
    weights = load_file(folder / "glm" / "model.safetensors")
    weights["lm_head.weight"] *= 6 * words
    ahead = f"model.layers.{layers}"
    weights |= {f"{ahead}.{name}.weight": torch.ones(128) for name in ("enorm", "hnorm", "shared_head.norm")}
    weights |= {f"{ahead}.eh_proj.weight": torch.cat([torch.zeros(128, 128), torch.eye(128)], 1)}
    weights |= {f"{ahead}.shared_head.head.weight": weights["lm_head.weight"].clone()}
    weights |= {f"{ahead}.embed_tokens.weight": weights["model.embed_tokens.weight"].clone()}
    save_file(weights, folder / "glm" / "model.safetensors", {"format": "pt"})
    file = folder / "glm" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": layers, "num_nextn_predict_layers": 1}))
    shutil.copytree(folder / "moe", folder / "all-experts", dirs_exist_ok=True)
    file = folder / "all-experts" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_experts_per_tok": 8}))
    for model in ("moe", "all-experts", "dense", "glm"):
        tokenizer.save_pretrained(folder / model)


def qwen35_config(vocabulary: int, end: int, hidden: int = 0) -> dict[str, Any]:
    """The recorded ``config.json`` with fewer layers and experts, and the probes' vocabulary; ``hidden`` for a rehearsal."""
    config: dict[str, Any] = json.loads(QWEN35.read_text())["config"]
    text = config["text_config"]
    text |= {"num_hidden_layers": LAYERS, "layer_types": text["layer_types"][:LAYERS], "num_experts": EXPERTS}
    text |= {"num_experts_per_tok": CHOSEN, "vocab_size": vocabulary, "eos_token_id": end}
    if hidden:
        text |= {"hidden_size": hidden, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    beyond = [f".layers.{number}." for number in range(LAYERS, 60)]
    ignored = config["quantization_config"]["ignore"]
    config["quantization_config"]["ignore"] = [name for name in ignored if not any(part in name for part in beyond)]
    return config


def qwen35_weights(text: dict[str, Any], words: Any, device: str) -> Iterator[tuple[str, Any]]:
    """The names and tensors of the checkpoint: routed experts in NVFP4 as ModelOpt stores them, everything else bf16."""
    import torch

    hidden, experts, width = text["hidden_size"], text["num_experts"], text["moe_intermediate_size"]
    keys, values = (text[f"linear_num_{kind}_heads"] * text[f"linear_{kind}_head_dim"] for kind in ("key", "value"))
    heads, size, kv = text["num_attention_heads"], text["head_dim"], text["num_key_value_heads"]

    def random(*shape: int, gain: float = 1.0, dtype: Any = torch.bfloat16) -> Any:
        return (torch.randn(shape, device=device) * gain * shape[-1] ** -0.5).to(dtype)

    def zeros(length: int) -> Any:
        return torch.zeros(length, dtype=torch.bfloat16, device=device)

    def nvfp4(name: str, rows: int, columns: int) -> Iterator[tuple[str, Any]]:
        yield f"{name}.weight", torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=device)
        scale = torch.rand(rows, columns // 16, device=device) + 0.5
        yield f"{name}.weight_scale", scale.to(torch.float8_e4m3fn)
        yield f"{name}.weight_scale_2", torch.tensor(columns**-0.5 / 3)  # the codes have a root mean square of 2.9
        yield f"{name}.input_scale", torch.tensor(1e-3)

    def mlp(prefix: str, quantized: bool) -> Iterator[tuple[str, Any]]:
        yield f"{prefix}.gate.weight", random(experts, hidden, gain=3.0)
        yield f"{prefix}.shared_expert_gate.weight", random(1, hidden)
        for kind, shape in (("gate_proj", (width, hidden)), ("up_proj", (width, hidden)), ("down_proj", (hidden, width))):
            yield f"{prefix}.shared_expert.{kind}.weight", random(*shape)
            for number in range(experts):
                if quantized:
                    yield from nvfp4(f"{prefix}.experts.{number}.{kind}", *shape)
                else:
                    yield f"{prefix}.experts.{number}.{kind}.weight", random(*shape)

    def full_attention(prefix: str) -> Iterator[tuple[str, Any]]:
        yield f"{prefix}.q_proj.weight", random(2 * heads * size, hidden)  # with the output's gate
        for kind in ("k_proj", "v_proj"):
            yield f"{prefix}.{kind}.weight", random(kv * size, hidden)
        yield f"{prefix}.o_proj.weight", random(hidden, heads * size, gain=3.0)
        yield f"{prefix}.q_norm.weight", zeros(size) + 1
        yield f"{prefix}.k_norm.weight", zeros(size)

    def linear_attention(prefix: str) -> Iterator[tuple[str, Any]]:
        yield f"{prefix}.in_proj_qkv.weight", random(2 * keys + values, hidden)
        yield f"{prefix}.in_proj_z.weight", random(values, hidden)
        for kind in ("in_proj_a", "in_proj_b"):
            yield f"{prefix}.{kind}.weight", random(text["linear_num_value_heads"], hidden)
        yield f"{prefix}.conv1d.weight", random(2 * keys + values, 1, text["linear_conv_kernel_dim"])
        yield f"{prefix}.A_log", torch.rand(text["linear_num_value_heads"], device=device).log().to(torch.bfloat16)
        yield f"{prefix}.dt_bias", zeros(text["linear_num_value_heads"]) - 2
        yield f"{prefix}.norm.weight", zeros(text["linear_value_head_dim"]) + 1
        yield f"{prefix}.out_proj.weight", random(hidden, values)

    def layer(prefix: str, kind: str, quantized: bool) -> Iterator[tuple[str, Any]]:
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", zeros(hidden)
        if kind == "full_attention":
            yield from full_attention(f"{prefix}.self_attn")
        else:
            yield from linear_attention(f"{prefix}.linear_attn")
        yield from mlp(f"{prefix}.mlp", quantized)

    yield "model.language_model.embed_tokens.weight", random(text["vocab_size"], hidden, gain=hidden**0.5)
    yield "lm_head.weight", (random(text["vocab_size"], hidden, gain=6.0) * words).to(torch.bfloat16)
    yield "model.language_model.norm.weight", zeros(hidden)
    for number, kind in enumerate(text["layer_types"]):
        yield from layer(f"model.language_model.layers.{number}", kind, True)
    # The head of multi-token prediction sees the token that was sampled rather than the state before it, so that drafts are
    # right now and then.
    yield "mtp.fc.weight", torch.cat([torch.eye(hidden), torch.eye(hidden) / 4], 1).to(device, torch.bfloat16)
    for norm in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        yield f"mtp.{norm}.weight", zeros(hidden)
    yield from layer("mtp.layers.0", "full_attention", False)


def qwen35(folder: Path, device: str = "cuda", hidden: int = 0) -> None:
    """Qwen3.5 MoE: what the recorded ``config.json`` states but for :func:`qwen35_config`."""
    import torch
    from safetensors.torch import save_file
    from small_models import probe_tokenizer, word_ids

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = probe_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<tool_call>", "</tool_call>"]})
    vocabulary = -(-len(tokenizer) // 64) * 64
    config = qwen35_config(vocabulary, tokenizer.eos_token_id, hidden)
    words = torch.zeros(vocabulary, 1, device=device)
    words[word_ids(tokenizer)] = 1.0
    torch.manual_seed(0)
    weights = {name: tensor.cpu().contiguous() for name, tensor in qwen35_weights(config["text_config"], words, device)}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen3VLProcessor"}
    processor |= {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    processor |= {"size": {"longest_edge": 16777216, "shortest_edge": 65536}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    video = processor | {"video_processor_type": "Qwen3VLVideoProcessor"}
    del video["image_processor_type"]
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    tokenizer.save_pretrained(folder)
