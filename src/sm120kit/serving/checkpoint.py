"""Read facts of a local model folder without loading it: from its JSON files and the headers of its safetensors files.

``config.json`` can differ from the tensors. The presence of MTP tensors and the number of elements per scale come from the
tensors.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm120kit.core.errors import NoModel, NotACheckpoint, ShardDamaged, ShardMissing
from sm120kit.core.state import parse_json

HEADER_LIMIT_BYTES = 100_000_000
"""The format's limit for a header."""

INDEX = "model.safetensors.index.json"
DOWNLOAD = "download it again, or finish the download"

_LAYER = re.compile(r"^(?:language_model\.)?(?:model\.)?(?:language_model\.)?layers\.(\d+)\.")
_MTP = re.compile(r"(?:^|\.)(?:mtp|nextn)(?:\.|_)")
_PACKED = {"U8": 2, "I32": 8}
"""Elements of 4 bits in one element of a packed weight's dtype."""
_WEIGHTS = ("weight_packed", "qweight", "weight")
_SCALES = ("weight_scale", "weight_scale_inv", "scales", "scale")


@dataclass(frozen=True)
class Tensor:
    """A tensor in a header; ``dtype`` is a name of the safetensors format, such as BF16 or F8_E4M3."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Attention:
    """Size of the KV cache: for each token, K and V of ``kv_heads`` x ``head_dim`` elements in each of ``layers``."""

    layers: int
    kv_heads: int
    head_dim: int

    def elements(self, gpus: int = 1) -> int:
        """Elements per token on each of ``gpus``, among which the heads are divided; fewer heads than GPUs are replicated."""
        return 2 * self.layers * math.ceil(self.kv_heads / gpus) * self.head_dim


@dataclass(frozen=True)
class Checkpoint:
    """Contents of a model folder.

    ``quantization`` is the method in ``config.json``, "none" without one. ``vector_sizes`` are the numbers of elements of K
    per scale by the shapes of the tensors, ``claimed_vector_size`` the number in ``config.json``. ``bf16`` names the tensors
    that are not quantised, ``mtp`` those of multi-token prediction; ``mtp_layers`` is the number of such layers by
    ``config.json``. ``outside`` are safetensors files that the index does not list and engines do not read. ``attention`` is
    None if the KV cache has another layout, for the reason ``why_not_plain``; ``kv_quantization`` is that of the KV cache, ""
    if it has none.
    """

    folder: Path
    architecture: str
    quantization: str
    vector_sizes: tuple[int, ...]
    claimed_vector_size: int | None
    kv_quantization: str
    tensors: int
    weight_bytes: int
    bytes_by_dtype: dict[str, int]
    bf16: tuple[str, ...]
    mtp: tuple[str, ...]
    mtp_layers: int
    outside: tuple[str, ...]
    context: int | None
    attention: Attention | None
    why_not_plain: str = ""


def read(folder: Path) -> Checkpoint:
    """Read a model folder.

    Raises:
        NoModel: the folder does not exist or cannot be read.
        NotACheckpoint: it has no ``config.json`` or no safetensors files, or a JSON file is not of the expected form.
        ShardMissing: a file or tensor that the index lists is missing.
        ShardDamaged: a file has another size than by its header, or no header.
    """
    if not folder.is_dir():
        raise NoModel(f"there is no model folder {folder}", "name a directory with config.json and *.safetensors")
    config = _json(folder / "config.json")
    text = config.get("text_config") or config.get("llm_config") or config
    names, listed = _files(folder)
    tensors: dict[str, Tensor] = {}
    for name in names:
        shard = header(folder / name)
        missing = sorted(tensor for tensor, file in listed.items() if file == name and tensor not in shard)
        if missing:
            raise ShardMissing(f"{folder / name} lacks the tensor {missing[0]}, which {INDEX} lists in it", DOWNLOAD)
        tensors |= shard
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        sizes[tensor.dtype] += tensor.bytes
    method, claimed, kv = _quantization(config, folder)
    attention, why = _attention(text)
    layers = text.get("num_hidden_layers")
    return Checkpoint(
        folder=folder,
        architecture=", ".join(config.get("architectures") or ()) or str(config.get("model_type", "unknown")),
        quantization=method,
        vector_sizes=_vector_sizes(tensors),
        claimed_vector_size=claimed,
        kv_quantization=kv,
        tensors=len(tensors),
        weight_bytes=sum(sizes.values()),
        bytes_by_dtype=dict(sizes.most_common()),
        bf16=tuple(sorted(name for name, tensor in tensors.items() if tensor.dtype == "BF16")),
        mtp=tuple(sorted(name for name in tensors if _is_mtp(name, layers))),
        mtp_layers=int(text.get("mtp_num_hidden_layers") or text.get("num_nextn_predict_layers") or 0),
        outside=tuple(sorted({path.name for path in folder.glob("*.safetensors")} - set(names))),
        context=text.get("max_position_embeddings"),
        attention=attention,
        why_not_plain=why,
    )


def header(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file: 8 bytes with the header's length, the header as JSON, then the data.

    Raises:
        ShardMissing: the file does not exist.
        ShardDamaged: it is truncated, too long, or has no header.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if start.startswith(b"version "):
                raise ShardDamaged(f"{path} is a Git LFS pointer, not the file", "fetch it: git lfs pull")
            if size < 8 or not 2 <= length <= min(size - 8, HEADER_LIMIT_BYTES):
                raise ShardDamaged(f"{path} is truncated or no safetensors file: {size} bytes", DOWNLOAD)
            content = parse_json(file.read(length))
        content.pop("__metadata__", None)
        tensors = {
            name: Tensor(entry["dtype"], tuple(entry["shape"]), entry["data_offsets"][1] - entry["data_offsets"][0])
            for name, entry in content.items()
        }
        end = 8 + length + max((entry["data_offsets"][1] for entry in content.values()), default=0)
    except FileNotFoundError as error:
        raise ShardMissing(f"{path} does not exist", DOWNLOAD) from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OSError) as error:
        raise ShardDamaged(f"{path} has no safetensors header: {error}", DOWNLOAD) from error
    if end != size:
        raise ShardDamaged(f"{path} has {size} bytes instead of the {end} in its header", DOWNLOAD)
    return tensors


def _files(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The shards, and the shard of each tensor by the index; no tensors without an index."""
    if (folder / INDEX).is_file():
        listed = _json(folder / INDEX).get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise NotACheckpoint(f"{folder / INDEX} has no weight_map", DOWNLOAD)
        names = sorted(set(listed.values()))
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            raise ShardMissing(f"{folder}: {len(absent)} of {len(names)} shards are missing: {', '.join(absent[:3])}", DOWNLOAD)
        return names, listed
    single = folder / "model.safetensors"
    names = [single.name] if single.is_file() else sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise NotACheckpoint(f"{folder} has no safetensors files", "sm120kit reads checkpoints in this format only")
    return names, {}


def _json(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_bytes())
    except FileNotFoundError as error:
        raise NotACheckpoint(f"{path.parent} has no {path.name}", "name the folder that contains it") from error
    except PermissionError as error:
        raise NoModel(f"{path} cannot be read: {error.strerror}", "make it readable") from error
    except ValueError as error:
        raise NotACheckpoint(f"{path} is not JSON: {error}", DOWNLOAD) from error
    if not isinstance(content, dict):
        raise NotACheckpoint(f"{path} is not a JSON object", DOWNLOAD)
    return content


def _quantization(config: Mapping[str, Any], folder: Path) -> tuple[str, int | None, str]:
    """Method, elements per scale and the KV cache's quantisation, by ``config.json`` or ModelOpt's ``hf_quant_config.json``."""
    table = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config") or {}
    path = folder / "hf_quant_config.json"
    modelopt = _json(path).get("quantization", {}) if path.is_file() else {}
    method = " ".join(filter(None, (table.get("quant_method"), table.get("quant_algo") or modelopt.get("quant_algo"))))
    weights = next((group.get("weights") or {} for group in (table.get("config_groups") or {}).values()), {})
    if table.get("format"):
        method += f" {table['format']}"
    block = table.get("weight_block_size") or [None]
    claimed = weights.get("group_size") or table.get("group_size") or modelopt.get("group_size") or block[-1]
    scheme = table.get("kv_cache_scheme") or {}
    kv = modelopt.get("kv_cache_quant_algo") or (f"{scheme.get('type')}{scheme.get('num_bits')}" if scheme else "")
    return method.strip() or "none", claimed, str(kv or "").lower()


def _vector_sizes(tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Numbers of elements of K per scale, by the shapes of weights and their scales. Scales of whole tensors do not count."""
    sizes = set()
    for name, tensor in tensors.items():
        prefix, _, last = name.rpartition(".")
        if last not in _WEIGHTS:
            continue
        scale = next((tensors[f"{prefix}.{suffix}"] for suffix in _SCALES if f"{prefix}.{suffix}" in tensors), None)
        if scale is None or len(scale.shape) < 2 or len(tensor.shape) != len(scale.shape):
            continue
        packed = _PACKED.get(tensor.dtype, 1)
        if last == "qweight":  # K comes first; GPTQ packs along it, AWQ along N
            elements, scales = tensor.shape[-2] * (packed if tensor.shape[-1] == scale.shape[-1] else 1), scale.shape[-2]
        else:
            elements, scales = tensor.shape[-1] * packed, scale.shape[-1]
        if 1 < scales <= elements:
            sizes.add(math.ceil(elements / scales))
    return tuple(sorted(sizes))


def _is_mtp(name: str, layers: object) -> bool:
    """Whether a tensor belongs to multi-token prediction: by name, or by a layer number beyond the model's (DeepSeek, GLM)."""
    layer = _LAYER.match(name)
    return bool(_MTP.search(name)) or bool(layer and isinstance(layers, int) and int(layer[1]) >= layers)


def _attention(text: Mapping[str, Any]) -> tuple[Attention | None, str]:
    """The KV cache of full attention; the state of linear attention has a constant size and is not counted."""
    if text.get("kv_lora_rank"):
        return None, "it keeps a compressed KV cache (MLA)"
    layers, heads = text.get("num_hidden_layers"), text.get("num_attention_heads")
    kinds = text.get("layer_types") or ["full_attention"] * (layers or 0)
    unsupported = sorted(set(kinds) - {"full_attention", "linear_attention"})
    if unsupported:
        return None, f"it has layers of {', '.join(unsupported)}"
    if text.get("sliding_window") and text.get("use_sliding_window", True):
        return None, "it has layers of sliding attention"
    head = text.get("head_dim") or (text.get("hidden_size", 0) // heads if heads else 0)
    kv_heads = text.get("num_key_value_heads") or heads
    if not (layers and kv_heads and head):
        return None, "config.json lacks the numbers of layers and heads"
    return Attention(kinds.count("full_attention"), kv_heads, head), ""
