"""What is known of a server before its model is downloaded: memory, engine, back-ends, download and command. Pure.

What cannot be known is None, with the reason in ``unknown``.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from sm120kit import recipes
from sm120kit.engines import parser
from sm120kit.images import backends
from sm120kit.recipes import load_engine, load_flashinfer, reported
from sm120kit.recipes.configurations import Configuration
from sm120kit.serving.checkpoint import Checkpoint
from sm120kit.serving.fit import estimate, own_gpus
from sm120kit.serving.served_model import ModelToServe

SCHEMA_VERSION = 1
"""Increased by an incompatible change of ``plan --json``, whose schema is docs/plan.schema.json."""


@dataclass(frozen=True)
class PlannedModel:
    """The checkpoint. ``mtp_tensors`` is None if its headers are not known, ``weight_bytes`` if no size is."""

    repository: str
    revision: str
    architectures: tuple[str, ...]
    quantization: str
    weight_bytes: int | None
    context: int | None
    mtp_tensors: int | None
    remote_code: bool | None


@dataclass(frozen=True)
class PlannedMemory:
    """Memory of each GPU in bytes, and tokens. ``fits`` is None if that is not known; ``reason`` is a sentence."""

    fits: bool | None
    reason: str
    gpu_bytes: int | None
    usable_share: float | None
    weight_bytes: int | None
    kv_bytes_per_token: int | None
    capacity_tokens: int | None
    context: int | None


@dataclass(frozen=True)
class PlannedBackends:
    """What the engine selects by use. ``source`` is the configuration or model for which that is recorded, "" for none."""

    source: str
    selected: Mapping[str, list[str]]


@dataclass(frozen=True)
class PlannedDownload:
    """Bytes that are not in the download cache, None if that is not known, and the free bytes there."""

    missing_bytes: int | None
    free_bytes: int | None


@dataclass(frozen=True)
class PlannedRates:
    """Total tokens per second without context: expected at acceptance rates 0 and 1, bounds at 1."""

    expected_low: float
    expected_high: float
    roofline: float
    ceiling: float


@dataclass(frozen=True)
class FlightPlan:
    """What ``sm120kit plan --json`` prints.

    ``derived``: no file has the configuration; its name and ``engine`` are "" if they are not known. ``first_use`` is what
    compiles when the server starts or is first used.
    ``speculation`` is the method with its draft tokens, "" without. ``drafters`` are draft models in other repositories with
    their sources. ``defects`` are known ones of this checkpoint or engine.
    ``command`` starts the server, which has these ``arguments``.
    """

    configuration: str
    derived: bool
    engine: str
    gpus: int
    gpu: str
    nodes: int
    model: PlannedModel
    memory: PlannedMemory
    backends: PlannedBackends
    first_use: tuple[str, ...]
    speculation: str
    drafters: tuple[str, ...]
    defects: tuple[str, ...]
    download: PlannedDownload
    rates: PlannedRates | None
    notes: tuple[str, ...]
    unknown: tuple[str, ...]
    arguments: tuple[str, ...]
    command: str
    schema_version: int = field(default=SCHEMA_VERSION)


def flight_plan(served: ModelToServe, command: tuple[str, ...], cache: Path, rates: PlannedRates | None = None) -> FlightPlan:
    """The plan of a server; ``cache`` is the download cache, and ``command`` what starts the server."""
    configuration, facts = served.configuration, served.facts
    hardware, drafts = configuration.hardware, configuration.speculation
    decided = facts is not None or not served.derived
    memory = _memory(configuration, facts)
    selected, why_none = _backends(configuration, facts)
    download = PlannedDownload(
        0 if served.folder else served.download.missing_bytes if served.download else None, _free_bytes(cache)
    )
    unknown = {
        "the Hub": served.unreached,
        "sizes of the model, engine and arguments": "" if decided else "they follow from config.json",
        "memory": memory.reason if memory.fits is None else "",
        "back-ends": why_none,
        "rates": "" if rates else "the roofline does not cover this model, GPU or number of machines",
    }
    return FlightPlan(
        configuration=configuration.name if decided else "",
        derived=served.derived,
        engine=configuration.engine if decided else "",
        gpus=hardware.gpus,
        gpu=hardware.gpu,
        nodes=hardware.nodes,
        model=_model(configuration, facts, served.revision),
        memory=memory,
        backends=selected,
        first_use=tuple(_first_use(configuration)) if decided else (),
        speculation=f"{drafts.method}, {drafts.draft_tokens} draft tokens" if drafts else "",
        drafters=tuple(_drafters(configuration)) if decided else (),
        defects=tuple(_defects(configuration, facts)) if decided else (),
        download=download,
        rates=rates,
        notes=served.notes,
        unknown=tuple(f"{what}: {why}" for what, why in unknown.items() if why),
        arguments=configuration.arguments,
        command=shlex.join(command),
    )


def _model(configuration: Configuration, facts: Checkpoint | None, revision: str) -> PlannedModel:
    stated = configuration.model
    size = int(stated.gigabytes * 1e9) if stated.gigabytes else None
    if facts is None:
        return PlannedModel(stated.repository, revision, (), stated.quantization, size, None, None, None)
    return PlannedModel(
        stated.repository,
        revision,
        facts.architectures,
        facts.quantization if facts.architectures else stated.quantization,
        facts.weight_bytes or size,
        facts.context,
        len(facts.mtp) if facts.tensors else None,
        facts.remote_code,
    )


def _memory(configuration: Configuration, facts: Checkpoint | None) -> PlannedMemory:
    if facts is None:
        return PlannedMemory(None, "the size of the weights is not known", None, None, None, None, None, None)
    fit = estimate(configuration, facts, own_gpus(configuration.hardware))
    fits, reason = fit.verdict
    return PlannedMemory(
        fits,
        reason,
        fit.memory_bytes,
        fit.share,
        fit.weight_bytes,
        fit.kv_bytes_per_token,
        fit.capacity_tokens,
        fit.context,
    )


def _backends(configuration: Configuration, facts: Checkpoint | None) -> tuple[PlannedBackends, str]:
    """What is recorded for a configuration, else for a model that an engine selects the same for; or why that is not known."""
    own = backends.load(configuration.engine).get(configuration.name)
    if own and own["selected"] and backends.is_current(own, configuration):
        return PlannedBackends(configuration.name, own["selected"]), ""
    wanted = signature(configuration, facts) if facts and facts.architectures else None
    if wanted is None:
        why = "its options or variables may select others" if facts and facts.architectures else "they follow from config.json"
        return PlannedBackends("", {}), why
    alike = [each for each in backends.models(configuration.engine) if each["signature"] == wanted]
    found = min(alike, key=lambda each: each["model"] != configuration.model.repository, default=None)
    if found is None:
        kind = f"{wanted['architecture'][:80]}, quantization {wanted['quantization'][:80]}"
        return PlannedBackends("", {}), f"not recorded for {kind}; {configuration.engine} selects them at its start"
    if found["refusal"]:
        return PlannedBackends(
            "", {}
        ), f"{configuration.engine} stops before it selects for {found['model']}: {found['refusal']}"
    return PlannedBackends(found["model"], found["selected"]), ""


def signature(configuration: Configuration, facts: Checkpoint) -> dict[str, Any] | None:
    """What an engine selects back-ends by; None if options or variables of the configuration can select others.

    ``widths`` are elements of K and V of a token in one layer and head.
    """
    engine, drafts, kv_type = configuration.served_by, configuration.speculation, configuration.option_for("kv_type") or "auto"
    neutral = {*chain(*engine.options.values()), *engine.tool_arguments}
    others = parser.options(configuration.engine, configuration.arguments).keys() - neutral
    decided = any(not option.startswith("--speculative") for option in others)
    if decided or configuration.environment or any("backend" in word for word in configuration.arguments):
        return None
    return {
        "architecture": facts.architectures[0],
        "quantization": facts.quantization,
        "kv_type": kv_type if kv_type != "auto" else facts.kv_quantization or "auto",
        "widths": sorted({kept.width for kept, _ in facts.kv_cache.vectors}) if facts.kv_cache else [],
        "capability": backends.gpu(configuration).get("capability"),
        "drafts": drafts.method.replace("nextn", "eagle") if drafts else "",  # two names in SGLang
    }


def _first_use(configuration: Configuration) -> Iterator[str]:
    engine = load_engine(configuration.engine)
    kernels = load_flashinfer(engine.flashinfer)
    count = len(recipes.group(kernels, engine.kernels).modules)
    yield f"modules of FlashInfer beside the {count} of the image's kernel group {engine.kernels}, if it is built with that"
    yield "Triton kernels, and what torch.compile or the CUDA graphs of the engine compile; caches keep both"


def _drafters(configuration: Configuration) -> Iterator[str]:
    """The draft models for a configuration that it does not draft with."""
    known = reported.drafters(configuration.model.repository, load_engine(configuration.engine))
    return (each.text for each in known if not any(each.repository in word for word in configuration.arguments))


def _defects(configuration: Configuration, facts: Checkpoint | None) -> Iterator[str]:
    for bad in configuration.known_bad:
        yield f"{bad.distribution} {bad.version}: {bad.reason} ({bad.source})"
    if facts is None:
        return
    yield from (each.text for each in reported.defects(configuration, facts.model_type, facts.quantization))
    if not facts.tensors:
        return
    if facts.mtp_layers and not facts.mtp:
        yield f"config.json claims {facts.mtp_layers} MTP layers; none of the {facts.tensors} tensors belongs to one"
    if facts.claimed_vector_size and facts.vector_sizes and facts.claimed_vector_size not in facts.vector_sizes:
        found = " and ".join(map(str, facts.vector_sizes))
        yield f"config.json claims {facts.claimed_vector_size} elements per scale, the tensors have {found}"
    if facts.outside:
        yield f"the index does not list {', '.join(facts.outside)[:200]}, which engines do not read"


def _free_bytes(directory: Path) -> int | None:
    existing = next((each for each in (directory, *directory.parents) if each.is_dir()), None)
    return shutil.disk_usage(existing).free if existing else None
