"""Copy a checkpoint with linear layers quantized and dequantized: ``quantized_copy.py SOURCE TARGET fp8|nvfp4``.

``quantized_copy.py FILE.gguf TARGET float32`` writes a checkpoint of float32 from a GGUF file, which requires ``gguf``.

FP8 has a scale for each tensor (E4M3). NVFP4 has E2M1 values, an E4M3 scale for each 16 of a row and a float32 scale for the
tensor, amax / (6 * 448), as ModelOpt stores them. Activations are not quantized.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

E4M3_MAX = 448.0
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def fp8(weight: torch.Tensor) -> torch.Tensor:
    scale = weight.abs().amax() / E4M3_MAX
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


def nvfp4(weight: torch.Tensor) -> torch.Tensor:
    tensor_scale = weight.abs().amax() / (E2M1[-1] * E4M3_MAX)
    groups = weight.reshape(-1, 16)
    wanted = groups.abs().amax(1, keepdim=True) / E2M1[-1] / tensor_scale
    scales = wanted.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float() * tensor_scale
    scaled = groups / scales.clamp(min=1e-30)
    nearest = torch.bucketize(scaled.abs(), (E2M1[1:] + E2M1[:-1]) / 2)
    return (E2M1[nearest] * scaled.sign() * scales).reshape(weight.shape)


def dequantized(file: Path, target: Path) -> None:
    """Write the checkpoint of a GGUF file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    model.hf_quantizer = None  # Transformers refuses to write what it read from GGUF
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(target)


def main(source: Path, target: Path, kind: str) -> None:
    if kind == "float32":
        dequantized(source, target)
        return
    quantize = {"fp8": fp8, "nvfp4": nvfp4}[kind]
    shutil.copytree(source, target)
    weights = load_file(source / "model.safetensors")
    copied = {name: quantize(weight.float()) if name.endswith("proj.weight") else weight for name, weight in weights.items()}
    save_file(copied, target / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
