"""Facts of model folders, read from real safetensors files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_folders import HYBRID, MTP, NVFP4, Shapes, folder, shard

from sm120kit.core.errors import BadInput, NotFound, Sm120kitError
from sm120kit.serving import checkpoint
from sm120kit.serving.kv_cache import Split, Vectors

PLAIN: dict[str, Any] = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 256}
LAST = "model-00002-of-00002.safetensors"


def test_facts_of_a_hybrid_nvfp4_checkpoint(tmp_path: Path) -> None:
    facts = checkpoint.read(folder(tmp_path, HYBRID, NVFP4, MTP))
    assert facts.architectures == ("Qwen3_5MoeForConditionalGeneration",)
    assert (facts.quantization, facts.vector_sizes, facts.claimed_vector_size) == ("modelopt NVFP4", (16,), 16)
    assert (facts.tensors, facts.context) == (7, 262144)
    assert facts.weight_bytes == 2 * (64 * 32 + 32 * 32 + 64 * 32 + 32 * 64) + 64 * 16 + 128 + 4
    assert facts.mtp == ("mtp.fc.weight", "mtp.layers.0.mlp.gate_proj.weight") and facts.mtp_layers == 1
    assert facts.kv_cache and facts.kv_cache.vectors == ((Vectors(2, 64), 1),)
    assert [facts.kv_cache.token_bytes(1, Split(gpus)) for gpus in (1, 2, 4)] == [128, 64, 64]


def test_mtp_is_detected_from_tensors_not_config(tmp_path: Path) -> None:
    claimed = checkpoint.read(folder(tmp_path / "claimed", HYBRID, NVFP4))
    assert claimed.mtp == () and claimed.mtp_layers == 1
    shard(tmp_path / "claimed" / "mtp.safetensors", MTP)
    unlisted = checkpoint.read(tmp_path / "claimed")
    assert unlisted.mtp == () and unlisted.outside == ("mtp.safetensors",)


@pytest.mark.parametrize(
    ("name", "mtp"),
    [
        ("model.layers.3.mlp.up_proj.weight", False),
        ("model.layers.4.eh_proj.weight", True),
        ("language_model.model.layers.4.enorm.weight", True),
        ("vision_tower.encoder.layers.4.mlp.weight", False),
        ("model.mtp_layers.0.norm.weight", True),
        ("model.nextn.0.norm.weight", True),
        ("model.layers.0.mtpish.weight", False),
        (f"model.layers.{'9' * 5000}.weight", False),
    ],
)
def test_mtp_by_name(name: str, mtp: bool, tmp_path: Path) -> None:
    facts = checkpoint.read(folder(tmp_path, PLAIN, {name: ("BF16", (2, 2))}))
    assert bool(facts.mtp) == mtp


@pytest.mark.parametrize(
    ("config", "shapes", "method", "sizes", "claimed"),
    [
        ({}, {"a.weight": ("BF16", (4, 64))}, "none", (), None),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
            },
            {"a.weight_packed": ("U8", (4, 32)), "a.weight_scale": ("F8_E4M3", (4, 4))},
            "compressed-tensors nvfp4-pack-quantized",
            (16,),
            16,
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            {"a.weight": ("F8_E4M3", (256, 384)), "a.weight_scale_inv": ("F32", (2, 3))},
            "fp8",
            (128,),
            128,
        ),
        (
            {"quant_method": "auto-round", "group_size": 128},
            {"a.qweight": ("I32", (32, 64)), "a.scales": ("F16", (2, 64))},
            "auto-round",
            (128,),
            128,
        ),
        (
            {"quant_method": "awq", "group_size": 64},
            {"a.qweight": ("I32", (256, 8)), "a.scales": ("F16", (4, 64))},
            "awq",
            (64,),
            64,
        ),
        # The tensors are MXFP4, unlike config.json.
        (
            {"quant_method": "modelopt", "group_size": 16},
            {"a.weight": ("U8", (4, 64)), "a.weight_scale": ("F8_E8M0", (4, 4))},
            "modelopt",
            (32,),
            16,
        ),
        # A scale per row or per tensor is not a vector size.
        ({"quant_method": "fp8"}, {"a.weight": ("F8_E4M3", (4, 64)), "a.weight_scale": ("F32", (4, 1))}, "fp8", (), None),
    ],
)
def test_quantisation(
    config: dict[str, Any], shapes: Shapes, method: str, sizes: tuple[int, ...], claimed: int | None, tmp_path: Path
) -> None:
    facts = checkpoint.read(folder(tmp_path, PLAIN | ({"quantization_config": config} if config else {}), shapes))
    assert (facts.quantization, facts.vector_sizes, facts.claimed_vector_size) == (method, sizes, claimed)


def test_quantisation_from_hf_quant_config(tmp_path: Path) -> None:
    own = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}}
    (folder(tmp_path, PLAIN, NVFP4) / "hf_quant_config.json").write_text(json.dumps(own))
    facts = checkpoint.read(tmp_path)
    assert (facts.quantization, facts.claimed_vector_size, facts.kv_quantization) == ("NVFP4", 16, "fp8")


def write_header(path: Path, dtype: Any, shape: Any, offsets: Any) -> None:
    """A safetensors file with one tensor and one byte of data."""
    content = json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content + b"\0")


def write_weight_map(model: Path, name: object) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))


def set_config(model: Path, **values: object) -> None:
    """Change values of the language model."""
    config = json.loads((model / "config.json").read_text())
    config["text_config"] |= values
    (model / "config.json").write_text(json.dumps(config))


def zeros(path: Path) -> None:
    """A link to a device without end."""
    path.symlink_to("/dev/zero")


def special(path: Path, make: Callable[[Path], None]) -> None:
    """Replace a file by another kind of file."""
    path.unlink()
    make(path)


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda model: (model / "config.json").unlink(), BadInput, "has no config.json"),
        (lambda model: (model / "config.json").write_text("{"), BadInput, "not JSON"),
        (lambda model: (model / "config.json").write_text("[]"), BadInput, "not a JSON object"),
        (lambda model: (model / "model.safetensors.index.json").write_text("{}"), BadInput, "weight_map"),
        (lambda model: write_weight_map(model, 1), BadInput, "names 1, which is no file name"),
        (lambda model: write_weight_map(model, []), BadInput, "names [], which is no file name"),
        (lambda model: write_weight_map(model, "a" * 300), BadInput, "1 of 1 shards are missing"),
        (lambda model: (model / "config.json").write_text('{"text_config": [1]}'), BadInput, "not of the form"),
        (lambda model: (model / "hf_quant_config.json").write_text('{"quantization": "a"}'), BadInput, "not of the form"),
        (lambda model: (model / LAST).unlink(), BadInput, "1 of 2 shards are missing: " + LAST),
        (
            lambda model: shard(model / LAST, {"mtp.fc.weight": MTP["mtp.fc.weight"]}),
            BadInput,
            "lacks the tensor mtp.layers.0",
        ),
        (lambda model: cut(model / LAST, 3), BadInput, "truncated"),
        (lambda model: cut(model / LAST, 60), BadInput, "truncated"),
        (lambda model: cut(model / LAST, 1000), BadInput, "has 1000 bytes instead of the"),
        (lambda model: (model / LAST).write_bytes(b"\x02" + bytes(7) + b"[]"), BadInput, "has no safetensors header"),
        (lambda model: (model / LAST).write_bytes(b'\x08\0\0\0\0\0\0\0{"a": 1}'), BadInput, "has no safetensors header"),
        (lambda model: write_header(model / LAST, "U8", [1], [0.5, 10**39]), BadInput, "data_offsets [0.5, 1000"),
        (lambda model: write_header(model / LAST, ["U8"], [1], [0, 1]), BadInput, "dtype ['U8']"),
        (lambda model: write_header(model / LAST, "U8", ["1"], [0, 1]), BadInput, "shape ('1',)"),
        (lambda model: write_header(model / LAST, "U8", [1], [0]), BadInput, "has no safetensors header"),
        (lambda model: write_header(model / LAST, "U8", [1], [1, 0]), BadInput, "data_offsets [1, 0]"),
        (lambda model: write_header(model / LAST, "U8", [-1], [0, 1]), BadInput, "shape (-1,)"),
        (lambda model: set_config(model, num_hidden_layers=10**12), BadInput, "num_hidden_layers is 1000"),
        (lambda model: set_config(model, num_hidden_layers=-1), BadInput, "num_hidden_layers is -1"),
        (lambda model: set_config(model, num_hidden_layers=4.5), BadInput, "num_hidden_layers is 4.5"),
        (lambda model: set_config(model, num_hidden_layers=True), BadInput, "num_hidden_layers is True"),
        (lambda model: set_config(model, head_dim=10**39), BadInput, "head_dim is 1000"),
        (lambda model: set_config(model, head_dim=10**400), BadInput, "config.json"),
        (lambda model: special(model / "config.json", os.mkfifo), NotFound, "config.json cannot be read"),
        (lambda model: special(model / "config.json", zeros), NotFound, "config.json cannot be read"),
        (lambda model: special(model / LAST, os.mkfifo), BadInput, LAST),
        (lambda model: special(model / LAST, zeros), BadInput, LAST),
        (lambda model: set_config(model, num_key_value_heads=10**18), BadInput, "num_key_value_heads is 1000"),
        (lambda model: set_config(model, max_position_embeddings=1 << 80), BadInput, "max_position_embeddings is 12"),
        (lambda model: set_config(model, mtp_num_hidden_layers="9"), BadInput, "mtp_num_hidden_layers is '9'"),
        (lambda model: (model / "config.json").write_text('{"a": ' + "9" * 5000 + "}"), BadInput, "config.json"),
        (
            lambda model: (model / "config.json").write_text('{"architectures": ["' + "A" * 999 + '"]}'),
            BadInput,
            "not a list",
        ),
        (lambda model: (model / LAST).write_text("version https://git-lfs"), BadInput, "Git LFS pointer"),
    ],
)
def test_damaged_folders_are_refused(damage: Any, error: type[Sm120kitError], message: str, tmp_path: Path) -> None:
    damage(folder(tmp_path / "model", HYBRID, NVFP4, MTP))
    with pytest.raises(error) as caught:
        checkpoint.read(tmp_path / "model")
    assert message in caught.value.message and str(tmp_path / "model") in caught.value.message and caught.value.hint


def test_missing_folder_and_missing_tensors(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no model folder"):
        checkpoint.read(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadInput, match="no safetensors"):
        checkpoint.read(tmp_path)


def test_only_headers_are_read(tmp_path: Path) -> None:
    content = json.dumps({"w": {"dtype": "BF16", "shape": [1 << 37], "data_offsets": [0, 1 << 38]}}).encode()
    (tmp_path / "config.json").write_text("{}")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(content).to_bytes(8, "little") + content)
        file.truncate(8 + len(content) + (1 << 38))  # 256 GiB, sparse
    assert checkpoint.read(tmp_path).weight_bytes == 1 << 38
