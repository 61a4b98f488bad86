"""Whether a configuration can run with this image, checkpoint and GPUs, as far as it can be known before it starts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from sm120kit.checkpoint import Checkpoint
from sm120kit.errors import DoesNotFit, MtpMissing, TooFewGpus, WrongImage
from sm120kit.recipe.configuration import Configuration
from sm120kit.records import VerifiedImage

SHARE = 0.9
"""Of a GPU's memory, what an engine takes for weights and KV cache when the configuration does not say."""


@dataclass(frozen=True)
class Device:
    """A GPU that may be used: its number in nvidia-smi's order, and its memory; None when it is not known."""

    number: int
    name: str
    bytes: int | None


@dataclass(frozen=True)
class Fit:
    """What fits on each of ``gpus``, in bytes; activations and CUDA graphs come on top of it.

    ``share`` is the part of ``memory_bytes`` for weights and KV cache. ``kv_bytes_per_token`` is None when it could not be
    estimated, for the reason ``why_no_kv``; ``context`` is the longest sequence.
    """

    gpus: tuple[Device, ...]
    memory_bytes: int | None
    share: float
    weight_bytes: int
    kv_bytes_per_token: int | None
    why_no_kv: str
    context: int | None

    @property
    def room_tokens(self) -> int | None:
        """Tokens for which the KV cache has room, or None when it is not known."""
        if self.memory_bytes is None or not self.kv_bytes_per_token:
            return None
        return int(self.memory_bytes * self.share - self.weight_bytes) // self.kv_bytes_per_token

    def lines(self) -> tuple[str, ...]:
        """In words, for people."""
        memory = "unknown" if self.memory_bytes is None else f"{self.memory_bytes / 1e9:.1f} GB, {self.share:.0%} of it usable"
        kv = f"unknown: {self.why_no_kv}"
        if self.kv_bytes_per_token is not None:
            room = "" if self.room_tokens is None else f": room for {self.room_tokens:,} tokens"
            kv = f"{self.kv_bytes_per_token:,} B per token{room}; the longest sequence is {self.context or 'of unknown length'}"
        return (
            f"GPUs     {', '.join(str(gpu.number) for gpu in self.gpus)} ({self.gpus[0].name}), memory {memory}",
            f"weights  {self.weight_bytes / 1e9:.1f} GB on each GPU",
            f"KV cache {kv}",
        )


def judge(wanted: Configuration, image: VerifiedImage, model: Checkpoint, devices: Sequence[Device]) -> Fit:
    """Refuse what cannot work; else what fits.

    Raises:
        WrongImage: the image is of another engine, or has a version that is known to be bad.
        MtpMissing: the configuration speculates with tensors that the checkpoint lacks.
        TooFewGpus: there are fewer than it divides the model among.
        DoesNotFit: weights, or the KV cache of one sequence of full length, are larger than the memory for them.
    """
    _image(wanted, image)
    _mtp(wanted, model)
    if len(devices) < wanted.hardware.gpus:
        kind = "GPU that shares the host's memory" if wanted.hardware.unified else "SM12x GPU with memory of its own"
        raise TooFewGpus(
            f"{wanted.name} needs {wanted.hardware.gpus} x {wanted.hardware.gpu}; this host has {len(devices)} {kind}",
            f"sm120kit doctor {wanted.name} says what the host has; sm120kit config list has configurations for others",
        )
    fit = _fit(wanted, model, tuple(devices[: wanted.hardware.gpus]))
    if fit.memory_bytes is None:
        return fit
    lines = "\n".join(f"  {line}" for line in fit.lines())
    if fit.weight_bytes >= fit.memory_bytes * fit.share:
        raise DoesNotFit(f"the weights do not fit:\n{lines}", "choose a smaller checkpoint, or a configuration for more GPUs")
    if fit.room_tokens is not None and fit.context and fit.room_tokens < fit.context:
        raise DoesNotFit(
            f"the KV cache has no room for one sequence of full length:\n{lines}",
            "copy the configuration to a file and lower --max-model-len (vLLM) or --context-length (SGLang) in it",
        )
    return fit


def _image(wanted: Configuration, image: VerifiedImage) -> None:
    recipe = image.image.labels.get("sm120kit.recipe", "")
    if recipe != wanted.engine:
        raise WrongImage(
            f"{image.reference} is an image of {recipe or 'nothing that it names'}; {wanted.name} is for {wanted.engine}",
            f"name an image of {wanted.engine} with --image",
        )
    pairs = [wheel.partition("==") for wheel in image.image.labels.get("sm120kit.wheels", "").split(",")]
    installed = {_plain(name): version for name, _, version in pairs}
    for bad in wanted.known_bad:
        if installed.get(_plain(bad.distribution)) == bad.version:
            raise WrongImage(
                f"{image.reference} has {bad.distribution} {bad.version}, which is known to be bad here: {bad.reason}",
                f"use an image with another version; source: {bad.source}",
            )


def _plain(distribution: str) -> str:
    return distribution.lower().replace("_", "-").replace(".", "-")


def _mtp(wanted: Configuration, model: Checkpoint) -> None:
    if not wanted.model.needs_mtp or model.mtp:
        return
    method = f"{wanted.speculation.method}, {wanted.speculation.draft_tokens} draft tokens" if wanted.speculation else "MTP"
    claim = f"config.json claims {model.mtp_layers}" if model.mtp_layers else "config.json claims none"
    beside = f"; {', '.join(model.outside)} lies beside them, but the index does not list it" if model.outside else ""
    raise MtpMissing(
        f"{wanted.name} speculates with the checkpoint's own MTP layers ({method}); {model.folder} has none: "
        f"not one of its {model.tensors} tensors is one, whatever config.json says ({claim} layers{beside})",
        f"use a checkpoint that kept them, or a configuration without speculation; it is for {wanted.model.repository}",
    )


def _fit(wanted: Configuration, model: Checkpoint, gpus: tuple[Device, ...]) -> Fit:
    arguments = wanted.arguments
    share = _value(arguments, "--gpu-memory-utilization", "--mem-fraction-static")
    length = _value(arguments, "--max-model-len", "--context-length")
    sizes = [gpu.bytes for gpu in gpus if gpu.bytes is not None]
    per_token = None
    if model.attention:
        per_token = int(model.attention.elements(wanted.tensor_parallel) * _kv_bytes(arguments, model))
    return Fit(
        gpus=gpus,
        memory_bytes=min(sizes) if len(sizes) == len(gpus) else None,
        share=float(share) if share else SHARE,
        weight_bytes=model.weight_bytes // wanted.tensor_parallel,
        kv_bytes_per_token=per_token,
        why_no_kv=model.why_not_plain,
        context=int(length) if length and length.isdecimal() else model.context,
    )


def _kv_bytes(arguments: Sequence[str], model: Checkpoint) -> float:
    """Bytes of one element of the KV cache."""
    kind = _value(arguments, "--kv-cache-dtype") or "auto"
    if kind == "auto":
        kind = model.kv_quantization
    if kind.startswith(("fp8", "float8", "int8")):
        return 1
    return 0.5 if kind.startswith(("fp4", "nvfp4")) else 2


def _value(arguments: Sequence[str], *flags: str) -> str | None:
    """The value of the last of these flags, ``--flag value`` or ``--flag=value``."""
    found = None
    for word, after in pairwise([*arguments, ""]):
        if word in flags:
            found = after
        elif word.partition("=")[0] in flags:
            found = word.partition("=")[2]
    return found
