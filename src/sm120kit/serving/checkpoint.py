"""Read facts of a model without loading it: from its JSON files and the headers of its safetensors files.

``config.json`` can differ from the tensors. The presence of MTP tensors and the number of elements per scale come from the
tensors.
"""

import errno
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from sm120kit.core.errors import BadInput, NotFound
from sm120kit.core.outside import file_problem, parse_json, read_found
from sm120kit.recipes.architectures import language_model, object_at
from sm120kit.serving._kv_layout import HEAD_LIMIT, LAYER_LIMIT, WIDTH_LIMIT, count, kv_cache
from sm120kit.serving.kv_cache import KvCache

HEADER_LIMIT_BYTES = 100_000_000
"""The format's limit for a header."""

INDEX = "model.safetensors.index.json"
QUANTIZATION = "hf_quant_config.json"
SENTENCE_MODULES = "modules.json"
MTP_LAYERS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
CONTEXT_LIMIT = 1 << 32
"""Limit for the length of a sequence in tokens."""
NAME_LIMIT = 200
"""Limit for the length of a name of an architecture."""
DOWNLOAD = "download it again, or finish the download"

_LAYER = re.compile(r"^(?:language_model\.)?(?:model\.)?(?:language_model\.)?layers\.([0-9]{1,9})\.")
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
class Checkpoint:
    """Contents of a model; ``source`` is its folder, or its repository and commit. ``architectures`` are
    class names.

    ``quantization`` is the method in ``config.json``, "none" without one. ``vector_sizes`` are the numbers of elements of K
    per scale by the shapes of the tensors, ``claimed_vector_size`` the number in ``config.json``. ``mtp`` names the
    tensors of multi-token prediction; ``mtp_layers`` is the number of such layers by
    ``config.json``. ``outside`` are safetensors files that the index does not list and engines do not read. ``kv_cache`` is
    None if its size is unknown, for the reason ``why_no_kv``; ``kv_quantization`` is that of the KV cache, ""
    if it has none. ``heads`` is the number of attention heads; with ``remote_code``, ``config.json`` names Python files of the
    checkpoint (``auto_map``). ``embeds``: it is of sentence-transformers. Without ``tensors``, only ``config.json`` is known.
    """

    source: str
    architectures: tuple[str, ...]
    quantization: str
    vector_sizes: tuple[int, ...]
    claimed_vector_size: int | None
    kv_quantization: str
    tensors: int
    weight_bytes: int
    mtp: tuple[str, ...]
    mtp_layers: int
    outside: tuple[str, ...]
    context: int | None
    kv_cache: KvCache | None
    why_no_kv: str = ""
    model_type: str = ""
    heads: int | None = None
    remote_code: bool = False
    embeds: bool = False


class ModelFiles(Protocol):
    """The files of a model, in a folder or a repository."""

    @property
    def source(self) -> str:
        """Where they are, for messages."""

    def names(self) -> frozenset[str]:
        """The names of the files, without those in folders."""

    def content(self, name: str) -> bytes:
        """The content of a small file."""

    def headers(self, names: Iterable[str]) -> Iterable[tuple[str, dict[str, Tensor]]]:
        """The tensors of safetensors files, by their names."""


@dataclass(frozen=True)
class LocalFiles:
    """The files of a local folder."""

    folder: Path

    @property
    def source(self) -> str:
        return str(self.folder)

    def names(self) -> frozenset[str]:
        return frozenset(path.name for path in self.folder.iterdir() if path.is_file())

    def content(self, name: str) -> bytes:
        return read_found(self.folder / name)

    def headers(self, names: Iterable[str]) -> Iterable[tuple[str, dict[str, Tensor]]]:
        return ((name, header(self.folder / name)) for name in names)


def read(folder: Path) -> Checkpoint:
    """Read a model folder.

    Raises:
        NotFound: the folder does not exist or cannot be read.
        Sm120kitError: see :func:`read_files`.
    """
    if not folder.is_dir():
        raise NotFound(f"there is no model folder {folder}", "name a directory with config.json and *.safetensors")
    return read_files(LocalFiles(folder))


def read_files(files: ModelFiles) -> Checkpoint:
    """Read a model from its files.

    Raises:
        NotFound: a file cannot be read.
        BadInput: a file or tensor is missing, or a file is not of its form or has another size than by its header.
    """
    config = _json(files, "config.json")
    with _form_required(files.source):
        text = language_model(config)
    present = files.names()
    names, listed = _shards(files, present)
    every: dict[str, Tensor] = {}
    for name, shard in files.headers(names):
        missing = sorted(tensor for tensor, file in listed.items() if file == name and tensor not in shard)
        if missing:
            raise BadInput(f"{files.source}: {name} lacks the tensor {missing[0]}, which {INDEX} lists in it", DOWNLOAD)
        every |= shard
    with _form_required(files.source):
        modelopt = object_at(_json(files, QUANTIZATION), "quantization") if QUANTIZATION in present else {}
        layers = count(text, "num_hidden_layers", LAYER_LIMIT)
        return replace(
            _described(config, files.source, sum(tensor.bytes for tensor in every.values()), modelopt),
            vector_sizes=_vector_sizes(every),
            tensors=len(every),
            mtp=tuple(sorted(name for name in every if _is_mtp(name, layers))),
            embeds=SENTENCE_MODULES in present,
            outside=tuple(sorted({name for name in present if name.endswith(".safetensors")} - set(names))),
        )


def language_config(files: ModelFiles) -> dict[str, Any]:
    """The part of a model's ``config.json`` for the language model."""
    with _form_required(files.source):
        return language_model(_json(files, "config.json"))


def described(config: dict[str, Any], source: str, weight_bytes: int) -> Checkpoint:
    """A model by its ``config.json``: no tensor is known, only the size of all.

    Raises:
        BadInput: a value is not of the form of a ``config.json``.
    """
    with _form_required(source):
        return _described(config, source, weight_bytes, {})


@contextmanager
def _form_required(source: str) -> Iterator[None]:
    try:
        yield
    except (AttributeError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise BadInput(f"{source}: a value in its JSON files is not of the form of a checkpoint: {error}", DOWNLOAD) from error


def _described(config: dict[str, Any], source: str, weight_bytes: int, modelopt: Mapping[str, Any]) -> Checkpoint:
    text = language_model(config)
    method, claimed, kv = _quantization(config, modelopt)
    cache, why = kv_cache(text)
    return Checkpoint(
        source=source,
        architectures=_names(config, "architectures"),
        quantization=method,
        vector_sizes=(),
        claimed_vector_size=claimed,
        kv_quantization=kv,
        tensors=0,
        weight_bytes=weight_bytes,
        mtp=(),
        mtp_layers=next(filter(None, (count(text, key, LAYER_LIMIT) for key in MTP_LAYERS)), 0),
        outside=(),
        context=count(text, "max_position_embeddings", CONTEXT_LIMIT),
        kv_cache=cache,
        why_no_kv=why,
        model_type=_word(config, "model_type") or _word(text, "model_type"),
        heads=count(text, "num_attention_heads", HEAD_LIMIT),
        remote_code=bool(config.get("auto_map")),
    )


def header(path: Path) -> dict[str, Tensor]:
    """The tensors of a local safetensors file.

    Raises:
        BadInput: there is no such file, or see :func:`tensors`.
    """
    if problem := file_problem(path):
        raise BadInput(f"{path} {problem}", DOWNLOAD)
    try:
        with path.open("rb") as file:
            return tensors(file.read, path.stat().st_size, str(path))
    except OSError as error:
        raise BadInput(f"{path} has no safetensors header: {error}", DOWNLOAD) from error


def tensors(read: Callable[[int], bytes], size: int, name: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file: 8 bytes with the header's length, the header as JSON, then the data.

    ``read`` returns the next bytes of the file, which has ``size`` bytes; ``name`` is for messages.

    Raises:
        BadInput: it is truncated, too long, or has no header.
    """
    start = read(8)
    length = int.from_bytes(start, "little")
    if start.startswith(b"version "):
        raise BadInput(f"{name} is a Git LFS pointer, not the file", "fetch it: git lfs pull")
    if size < 8 or not 2 <= length <= min(size - 8, HEADER_LIMIT_BYTES):
        raise BadInput(f"{name} is truncated or no safetensors file: {size} bytes", DOWNLOAD)
    try:
        content = parse_json(read(length))
        content.pop("__metadata__", None)
        listed = {tensor: _tensor(entry) for tensor, entry in content.items()}
        end = 8 + length + sum(tensor.bytes for tensor in listed.values())  # the format has no gaps
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise BadInput(f"{name} has no safetensors header: {error}", DOWNLOAD) from error
    if end != size:
        raise BadInput(f"{name} has {size} bytes instead of the {end} in its header", DOWNLOAD)
    return listed


def _tensor(entry: Mapping[str, Any]) -> Tensor:
    """The tensor of an entry in a header.

    Raises:
        ValueError, TypeError, KeyError: the entry is not of the form of the format.
    """
    dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    sizes = (begin, end, *shape)
    if not isinstance(dtype, str) or not all(isinstance(size, int) and size >= 0 for size in sizes) or begin > end:
        raise TypeError(f"dtype {dtype!r}, shape {shape!r}, data_offsets {[begin, end]!r}")
    return Tensor(dtype, shape, end - begin)


def _shards(files: ModelFiles, present: frozenset[str]) -> tuple[list[str], dict[str, str]]:
    """The shards, and the shard of each tensor by the index; no tensors without an index."""
    if INDEX in present:
        listed = _json(files, INDEX).get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise BadInput(f"{files.source}: {INDEX} has no weight_map", DOWNLOAD)
        if odd := [name for name in listed.values() if not isinstance(name, str)]:
            raise BadInput(f"{files.source}: weight_map of {INDEX} names {odd[0]!r}, which is no file name", DOWNLOAD)
        names = sorted(set(listed.values()))
        absent = [name for name in names if name not in present]
        if absent:
            raise BadInput(
                f"{files.source}: {len(absent)} of {len(names)} shards are missing: {', '.join(absent[:3])}", DOWNLOAD
            )
        return names, listed
    single = "model.safetensors"
    names = [single] if single in present else sorted(name for name in present if name.endswith(".safetensors"))
    if not names:
        raise BadInput(f"{files.source} has no safetensors files", "sm120kit reads checkpoints in this format only")
    return names, {}


def _json(files: ModelFiles, name: str) -> dict[str, Any]:
    try:
        content = parse_json(files.content(name), lenient=True)
    except FileNotFoundError as error:
        raise BadInput(f"{files.source} has no {name}", "name a repository or folder that has it beside its weights") from error
    except OSError as error:
        hint = "name another model: sm120kit reads no larger one" if error.errno == errno.EFBIG else "make it a readable file"
        raise NotFound(f"{files.source}: {name} cannot be read: {error.strerror}", hint) from error
    except ValueError as error:
        raise BadInput(f"{files.source}: {name} is not JSON: {error}", DOWNLOAD) from error
    if not isinstance(content, dict):
        raise BadInput(f"{files.source}: {name} is not a JSON object", DOWNLOAD)
    return content


def _names(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """The names at a key.

    Raises:
        ValueError: they are no list of short names.
    """
    names = config.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) and len(name) <= NAME_LIMIT for name in names):
        raise ValueError(f"{key} is {repr(names)[:80]}, not a list of names")
    return tuple(names)


def _quantization(config: Mapping[str, Any], modelopt: Mapping[str, Any]) -> tuple[str, int | None, str]:
    """Method, elements per scale and the KV cache's quantisation, by ``config.json`` or ModelOpt's ``QUANTIZATION``."""
    table = object_at(config, "quantization_config") or object_at(object_at(config, "text_config"), "quantization_config")
    words = (_word(table, "quant_method"), _word(table, "quant_algo") or _word(modelopt, "quant_algo"), _word(table, "format"))
    groups = object_at(table, "config_groups")
    weights = next((object_at(object_at(groups, group), "weights") for group in groups), {})
    block = table.get("weight_block_size") or [None]
    claimed = weights.get("group_size") or table.get("group_size") or modelopt.get("group_size")
    claimed = claimed or (block[-1] if isinstance(block, list) else None)
    scheme = object_at(table, "kv_cache_scheme")
    kv = _word(modelopt, "kv_cache_quant_algo") or (f"{scheme.get('type')}{scheme.get('num_bits')}" if scheme else "")
    whole = isinstance(claimed, int) and 0 < claimed <= WIDTH_LIMIT  # -1: a scale for each row
    return " ".join(filter(None, words)) or "none", claimed if whole else None, kv.lower()


def _word(table: Mapping[str, Any], key: str) -> str:
    """The name at a key, "" if there is none.

    Raises:
        ValueError: there is another value.
    """
    value = table.get(key) or ""
    if not isinstance(value, str) or len(value) > NAME_LIMIT:
        raise ValueError(f"{key} is {repr(value)[:80]}, not a name")
    return value.strip()


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
