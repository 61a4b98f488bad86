"""Check before a start whether a configuration can run with an image, a checkpoint and GPUs. Pure."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from packaging.utils import canonicalize_name

from sm120kit.core.errors import BadInput, Mismatch, NotFound, ResourceUnavailable
from sm120kit.core.outside import number
from sm120kit.engines import parser
from sm120kit.images.image_records import VerifiedImage
from sm120kit.recipes import configurations
from sm120kit.recipes.architectures import recorded, weights_of
from sm120kit.recipes.configurations import Configuration, Hardware, Speculation
from sm120kit.serving import _kv_pools
from sm120kit.serving.checkpoint import Checkpoint, described
from sm120kit.serving.kv_cache import KvCache, Split
from sm120kit.serving.unified_memory import RESERVE

SHARE = 0.9
"""Share of a GPU's memory that an engine takes for weights and KV cache if the configuration does not set it."""
NO_DRAFTS = Speculation.model_construct(method="none", draft_tokens=0, gigabytes=0.0, kv_bytes=0)
STATES = 2
"""States of a sequence with prefix caching: one at the end of a block, one in use; and one for each draft token (vLLM 0.33.0,
vllm/v1/kv_cache_interface.py).
"""
LARGE_BYTES, STEP_TOKENS = 70 * 2**30, (2048, 8192)
"""Tokens of a step with less, and with that much memory (vLLM 0.33.0, vllm/engine/arg_utils.py)."""


@dataclass(frozen=True)
class Device:
    """A GPU that may be used: its number in nvidia-smi's order, and the size of its memory, None if unknown.

    ``used`` bytes of it have others, such as a desktop.
    """

    number: int
    name: str
    bytes: int | None
    used: int = 0


@dataclass(frozen=True)
class Fit:
    """Memory use on each of ``gpus``, in bytes, without activations and CUDA graphs.

    ``share`` is the part of ``memory_bytes`` for weights and KV cache, ``kv_share`` the part of what weights leave that tokens
    can take. ``kv_bytes_per_token`` is None if there is no estimate, for the reason ``why_no_kv``; ``kv_bytes_per_sequence``
    are the windows and states of one, or of all if the engine reserves them. ``context`` is the length of the longest sequence.
    """

    gpus: tuple[Device, ...]
    memory_bytes: int | None
    share: float
    weight_bytes: int
    kv_bytes_per_token: int | None
    why_no_kv: str
    context: int | None
    kv_bytes_per_sequence: int = 0
    kv_share: float = 1.0

    @property
    def capacity_tokens(self) -> int | None:
        """Capacity of the KV cache in tokens, None if unknown."""
        if self.memory_bytes is None or not self.kv_bytes_per_token:
            return None
        return max(0, self._room - self.kv_bytes_per_sequence) // self.kv_bytes_per_token

    @property
    def _room(self) -> int:
        """Bytes for tokens, windows and states."""
        return int(((self.memory_bytes or 0) * self.share - self.weight_bytes) * self.kv_share)

    @property
    def overflows(self) -> bool:
        """Whether the weights exceed the memory for them."""
        return self.memory_bytes is not None and self.weight_bytes >= self.memory_bytes * self.share

    @property
    def verdict(self) -> tuple[bool | None, str]:
        """Whether weights and one sequence of full length fit, None if that is not known; and why."""
        if self.memory_bytes is None:
            return None, "the memory of the GPUs is not known"
        usable, weights = self.memory_bytes * self.share / 1e9, self.weight_bytes / 1e9
        left = usable - weights
        if self.overflows:
            return False, f"weights of {weights:.1f} GB exceed the {usable:.1f} GB that the engine takes of each GPU"
        if self.kv_bytes_per_token == 0:
            sequences = self._room // max(self.kv_bytes_per_sequence, 1)
            return sequences > 0, f"{left:.1f} GB hold the states of {sequences:,} sequences, which keep nothing of tokens"
        if self.capacity_tokens is None:
            return None, f"weights of {weights:.1f} GB leave {left:.1f} GB; the KV cache is unknown: {self.why_no_kv}"
        room = f"{left:.1f} GB hold {self.capacity_tokens:,} tokens of KV cache"
        if self.context and self.capacity_tokens < self.context:
            return False, f"{room}, and one sequence has {self.context:,}"
        return True, f"{room} beside weights of {weights:.1f} GB; activations and CUDA graphs are not counted"

    def lines(self) -> tuple[str, ...]:
        """Lines for the user."""
        memory = "unknown" if self.memory_bytes is None else f"{self.memory_bytes / 1e9:.1f} GB, {self.share:.0%} of it usable"
        kv = f"unknown: {self.why_no_kv}"
        if self.kv_bytes_per_token is not None:
            capacity = "" if self.capacity_tokens is None else f": capacity {self.capacity_tokens:,} tokens"
            fixed = f", {self.kv_bytes_per_sequence / 1e6:,.0f} MB of windows and states" if self.kv_bytes_per_sequence else ""
            longest = f"longest sequence {self.context or 'of unknown length'}"
            kv = f"{self.kv_bytes_per_token:,} B per token{fixed}{capacity}; {longest}"
        return (
            f"GPUs     {', '.join(str(gpu.number) for gpu in self.gpus)} ({self.gpus[0].name}), memory {memory}",
            f"weights  {self.weight_bytes / 1e9:.1f} GB on each GPU",
            f"KV cache {kv}",
        )


def choose_gpus(configuration: Configuration, devices: Sequence[Device], numbers: Sequence[int]) -> tuple[Device, ...]:
    """The GPUs with these numbers among those that a configuration can use.

    Raises:
        ResourceUnavailable: they are not as many as the configuration uses, or one is not among ``devices``.
    """
    count, known = configuration.hardware.gpus_per_node, {device.number: device for device in devices}
    if len(numbers) != count:
        raise ResourceUnavailable(
            f"{configuration.name} needs {count} GPUs, and --gpus names {len(numbers)}", f"name {count}, or omit --gpus"
        )
    absent = ", ".join(str(number) for number in numbers if number not in known)
    if absent:
        usable = ", ".join(map(str, known)) or "none"
        raise ResourceUnavailable(
            f"{configuration.name} cannot use GPU {absent}; of this host it can use {usable}",
            "nvidia-smi lists the GPUs with their numbers",
        )
    return tuple(known[number] for number in numbers)


def select_gpus(configuration: Configuration, devices: Sequence[Device], taken: Mapping[int, str]) -> tuple[Device, ...]:
    """The GPUs that a configuration uses: the first ones that no server has. ``taken`` has the server of each other GPU.

    Raises:
        ResourceUnavailable: there are fewer GPUs than the configuration uses, or servers have them.
    """
    needed, count = configuration.hardware, configuration.hardware.gpus_per_node
    if len(devices) < count:
        memory = "that share the host's memory" if needed.unified else "with memory of their own"
        raise ResourceUnavailable(
            f"{configuration.name} needs {count} x {needed.gpu}; this host has {len(devices)} SM12x GPUs {memory}",
            f"sm120kit doctor {configuration.name} lists the host's GPUs; sm120kit config list has configurations for others",
        )
    free = [device for device in devices if device.number not in taken]
    if len(free) < count:
        servers = sorted({taken[device.number] for device in devices if device.number in taken})
        raise ResourceUnavailable(
            f"{configuration.name} needs {count} GPUs; {len(free)} of {len(devices)} are free, others are used by "
            + ", ".join(servers),
            f"sm120kit stop {servers[0]}",
        )
    return tuple(free[:count])


def check_fit(configuration: Configuration, model: Checkpoint, gpus: Sequence[Device]) -> Fit:
    """Memory use of a configuration that can run on ``gpus``.

    Raises:
        NotFound: see :func:`require_architecture`.
        BadInput: the configuration speculates with tensors that the checkpoint lacks.
        ResourceUnavailable: the weights, or the KV cache of one sequence of full length, exceed the memory for them.
    """
    require_architecture(configuration, model)
    _require_mtp(configuration, model)
    fit = estimate(configuration, model, tuple(gpus))
    if configuration.hardware.unified:
        _require_alive(configuration, fit)
    elif not configuration.served_by.share_of_free:
        _require_free(configuration, fit)
    fits, reason = fit.verdict
    if fits is False:
        lines = "\n".join(f"  {line}" for line in fit.lines())
        lower = f"copy the configuration to a file and lower {configuration.served_by.options['context'][0]} in it"
        hint = "choose a smaller checkpoint, or a configuration for more GPUs" if fit.overflows else lower
        raise ResourceUnavailable(f"{configuration.name} does not fit: {reason}:\n{lines}", hint)
    return fit


def _require_free(configuration: Configuration, fit: Fit) -> None:
    """Require that the share of each GPU's memory is free which an engine takes at its start, or it ends there."""
    for gpu in fit.gpus:
        free = (gpu.bytes or 0) - gpu.used
        if gpu.bytes and gpu.used and free < gpu.bytes * fit.share:
            option, most = configuration.served_by.options["memory_share"][0], math.floor(free / gpu.bytes * 100 - 1) / 100
            raise ResourceUnavailable(
                f"{free / 1e9:.1f} of {gpu.bytes / 1e9:.1f} GB are free on GPU {gpu.number}, and {configuration.name} takes "
                f"{fit.share:.0%}: a desktop or other programs have {gpu.used / 1e9:.1f} GB",
                f"stop them (nvidia-smi lists them), or take less: -- {option} {max(most, 0):.2f}",
            )


def _require_alive(configuration: Configuration, fit: Fit) -> None:
    """Require that weights and KV cache leave the system enough of the memory that CPU and GPU share."""
    gpu, memory = fit.gpus[0], fit.memory_bytes
    if not memory or not gpu.bytes:
        return
    available = gpu.bytes - gpu.used
    if memory * fit.share + RESERVE > available:
        option = configuration.served_by.options["memory_share"][0]
        most = math.floor((available - RESERVE) / memory * 100) / 100
        raise ResourceUnavailable(
            f"{configuration.name} would freeze the system, whose memory CPU and GPU share: weights and KV cache take "
            f"{memory * fit.share / 1e9:.1f} GB, the engine and the system need {RESERVE / 1e9:.1f} GB more, and "
            f"{available / 1e9:.1f} of {gpu.bytes / 1e9:.1f} GB are available",
            f"stop other programs, or take less: -- {option} {max(most, 0):.2f}",
        )


def recorded_model(repository: str, gigabytes: float = 0) -> Checkpoint | None:
    """What recipes have on a model: the size of its weights, and ``config.json`` if that is recorded; None without a size.

    ``gigabytes`` (10^9 bytes) is the size that a configuration states, 0 for what any other or ``weights.toml`` states.
    """
    stated = (each.model for each in configurations.readable() if each.model.repository == repository)
    weights = weights_of(repository)
    size = gigabytes or next((model.gigabytes for model in stated if model.gigabytes), weights.gigabytes if weights else 0)
    return described(recorded(repository) or {}, f"{repository}, as recorded", int(size * 1e9)) if size else None


def planned(configuration: Configuration) -> Fit | None:
    """Memory use of a configuration with its own checkpoint and GPUs, as they are recorded; None if their sizes are not."""
    model = recorded_model(configuration.model.repository, configuration.model.gigabytes or 0)
    if model is None or not model.architectures or not configuration.hardware.memory_gb:
        return None
    return estimate(configuration, model, own_gpus(configuration.hardware))


def own_gpus(hardware: Hardware, reserve: float = 0.0) -> tuple[Device, ...]:
    """The GPUs of a machine as a configuration states them, without a share of their memory."""
    memory = int(hardware.memory_gb * 1e9 * (1 - reserve)) if hardware.memory_gb else None
    return tuple(Device(number, hardware.gpu, memory) for number in range(hardware.gpus_per_node))


def require_architecture(configuration: Configuration, model: Checkpoint) -> None:
    """Require the architecture of the configuration's own model, if that is recorded in ``recipes/checkpoints/``.

    Raises:
        NotFound: the model has another one.
    """
    expected = (recorded(configuration.model.repository) or {}).get("architectures")
    if expected and model.architectures and model.architectures != tuple(expected):
        raise NotFound(
            f"{model.source} is a {', '.join(model.architectures)[:200]}; {configuration.name} is for "
            f"{configuration.model.repository}, a {', '.join(expected)}",
            "sm120kit config list has other configurations; or copy this one to a file, and name the model in it",
        )


def require_image(configuration: Configuration, image: VerifiedImage) -> None:
    """Require an image of the configuration's engine.

    Raises:
        Mismatch: the image is of another engine, or contains a version that is known to be bad.
    """
    recipe = image.image.labels.get("sm120kit.recipe", "")
    if recipe != configuration.engine:
        labelled = f"an image of {recipe}" if recipe else "labelled with no recipe"
        raise Mismatch(
            f"{image.reference} is {labelled}; {configuration.name} is for {configuration.engine}",
            f"name an image of {configuration.engine} with --image",
        )
    pairs = [wheel.partition("==") for wheel in image.image.labels.get("sm120kit.wheels", "").split(",")]
    installed = {canonicalize_name(name): version for name, _, version in pairs}
    for bad in configuration.known_bad:
        if installed.get(canonicalize_name(bad.distribution)) == bad.version:
            raise Mismatch(
                f"{image.reference} contains {bad.distribution} {bad.version}, known to be bad: {bad.reason}",
                f"use an image with another version; source: {bad.source}",
            )


def _require_mtp(configuration: Configuration, model: Checkpoint) -> None:
    if not configuration.model.needs_mtp or model.mtp or not model.tensors:
        return
    method = (
        f"{configuration.speculation.method}, {configuration.speculation.draft_tokens} draft tokens"
        if configuration.speculation
        else "MTP"
    )
    unlisted = f"; the index does not list {', '.join(model.outside)}" if model.outside else ""
    raise BadInput(
        f"{configuration.name} speculates with the checkpoint's own MTP layers ({method}); {model.source} has none: "
        f"config.json claims {model.mtp_layers}, none of the {model.tensors} tensors belongs to one{unlisted}",
        f"use a checkpoint with MTP tensors, such as {configuration.model.repository}, or a configuration without speculation",
    )


def estimate(configuration: Configuration, model: Checkpoint, gpus: tuple[Device, ...]) -> Fit:
    """Memory use of a configuration, whether it fits or not."""
    share, length = (configuration.option_for(meaning) for meaning in ("memory_share", "context"))
    taken = configuration.served_by.share_of_free
    sizes = [gpu.bytes - taken * gpu.used for gpu in gpus if gpu.bytes is not None]
    memory = min(sizes) if len(sizes) == len(gpus) else None
    kind = _kv_dtype(configuration, model)
    element, (cache, why) = _element_bytes(kind), _cache(configuration, model)
    if element is None:
        why = why or f"the size of an element of {kind[:40]} is not known"
    sizes_of_kv = _kv_sizes(configuration, cache, element, memory) if cache and element else (None, 0, 1.0)
    return Fit(
        gpus=gpus,
        memory_bytes=memory,
        share=_share(share) if share else SHARE,
        weight_bytes=_weight_bytes(configuration, model),
        kv_bytes_per_token=sizes_of_kv[0],
        why_no_kv=why,
        context=(configuration.served_by.integer(length) if length else None) or model.context,
        kv_bytes_per_sequence=sizes_of_kv[1],
        kv_share=sizes_of_kv[2],
    )


def _cache(configuration: Configuration, model: Checkpoint) -> tuple[KvCache | None, str]:
    """The cache of a model in the configuration's engine, with layers that draft; or the reason why it is unknown."""
    cache, why = model.kv_cache, model.why_no_kv
    if cache and configuration.served_by.pools:
        cache, why = _pooled(configuration, cache, model.architectures)
    return cache and cache.with_drafts(model.mtp_layers if configuration.model.needs_mtp else 0), why


def _pooled(configuration: Configuration, cache: KvCache, architectures: tuple[str, ...]) -> tuple[KvCache | None, str]:
    """The cache in an engine that divides its memory into pools, or the reason why it is unknown."""
    if _kv_pools.is_deepseek_v4(cache) and (configuration.speculation or configuration.pipeline_parallel > 1):
        return None, "the pools of SGLang for DeepSeek-V4 with speculation or a pipeline are not known"
    if _kv_pools.is_sparse(cache) and configuration.option("--dsa-prefill-backend", "--dsa-decode-backend"):
        return None, "SGLang's layout of sparse attention differs by --dsa-prefill-backend and --dsa-decode-backend"
    record = parser.load(configuration.engine)
    windowed = record.models.get("windows") if record else None
    return _kv_pools.pooled(cache, architectures, configuration.option_for("kv_type") or "auto", windowed)


def _kv_sizes(configuration: Configuration, cache: KvCache, element: float, memory: int | None) -> tuple[int, int, float]:
    """Bytes per token and of one sequence's windows and states, and the share of the memory that tokens can take."""
    drafting = configuration.speculation or NO_DRAFTS
    drafts = drafting.draft_tokens
    split = Split(configuration.tensor_parallel, configuration.pipeline_parallel)
    per_token = cache.token_bytes(element, split) + drafting.kv_bytes / split.gpus
    windows = cache.window_bytes(element, _in_flight(configuration, memory), split)
    states = cache.state_bytes(split, drafts) * (STATES + drafts)
    pools = {name: _pool(configuration, name) for name in configuration.served_by.pools}
    if not pools:
        return math.ceil(per_token), math.ceil(windows + states), 1.0
    if _kv_pools.is_deepseek_v4(cache):
        requests = configuration.option("--max-running-requests")
        count = (configuration.served_by.integer(requests) if requests else None) or _kv_pools.REQUESTS
        share = pools["windows"] if configuration.option_for("windows") else None
        per_token, reserved = _kv_pools.deepseek_v4(cache, count, _in_flight(configuration, memory), share)
        return math.ceil(per_token), math.ceil(reserved), 1.0
    plain = sum(
        kept.bytes(element, split.gpus) * math.ceil(layers / split.stages)
        for kept, layers in cache.vectors
        if kept.window and kept.element is None
    )
    return math.ceil(per_token + pools["windows"] * plain), 0, 1 / (1 + pools["states"]) if states else 1.0


def _weight_bytes(configuration: Configuration, model: Checkpoint) -> int:
    """The weights on each GPU: without what the host keeps beside it, with those of a draft model."""
    hardware, drafting = configuration.hardware, configuration.speculation or NO_DRAFTS
    host = 0 if hardware.unified else configuration.model.host_gigabytes
    return int(model.weight_bytes - (host - drafting.gigabytes) * 1e9) // hardware.gpus


def _pool(configuration: Configuration, name: str) -> float:
    """The ratio of an engine's pool, of its option or by default."""
    given = configuration.option_for(name)
    with suppress(ValueError):
        return abs(number(given)) if given else configuration.served_by.pools[name]
    return configuration.served_by.pools[name]


def _in_flight(configuration: Configuration, memory: int | None) -> int:
    """Tokens that an engine may have written beyond a window: those of a step, and of the next one that is scheduled."""
    given = configuration.option_for("step_tokens")
    stated = configuration.served_by.integer(given) if given else None
    return 2 * (stated or STEP_TOKENS[memory is None or memory >= LARGE_BYTES])


def _share(text: str) -> float:
    """The share of a GPU's memory that an argument states."""
    with suppress(ValueError):
        if 0 < (share := number(text.strip())) <= 1:
            return share
    raise BadInput(f"the share of memory is {text[:40]!r}, not a number from 0 to 1", "correct it in the configuration")


def _kv_dtype(configuration: Configuration, model: Checkpoint) -> str:
    """The data type of the KV cache, by the engine's argument or the checkpoint; "" for that of the model."""
    kind = configuration.option("--kv-cache-dtype") or "auto"
    if kind != "auto":
        return kind
    honoured = not configuration.served_by.pools or _kv_pools.honours(model.kv_quantization, model.quantization)
    return model.kv_quantization if honoured else ""


def _element_bytes(kind: str) -> float | None:
    """Bytes of one element of the KV cache; None for a data type that is not known."""
    if kind.startswith(("fp8", "float8", "int8")):
        return 1
    if kind.startswith(("fp4", "nvfp4")):
        return 0.5 + 1 / 16  # and a scale of one byte for 16 elements
    return 2 if kind in ("", "none", "auto", "bfloat16", "bf16", "float16", "fp16", "half") else None
