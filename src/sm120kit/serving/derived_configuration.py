"""Derive how a model is served from its ``config.json`` and headers, the engines' records and the GPUs. Pure.

What an engine can serve is in the record of its wheel (:class:`sm120kit.engines.parser.ParserRecord`); its parsers, and how it
drafts tokens, are in its object. Nothing derived has run on an SM12x GPU.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from sm120kit import recipes
from sm120kit.core import reporting
from sm120kit.core.errors import BadInput, Mismatch, NotFound, did_you_mean
from sm120kit.engines import Engine, all_engines, find, parser
from sm120kit.hosts.facts import Host
from sm120kit.images.backends import GPUS
from sm120kit.recipes import EngineRecipe, arguments, configurations
from sm120kit.recipes.configurations import Configuration, Hardware
from sm120kit.serving.checkpoint import Checkpoint
from sm120kit.serving.fit import Fit, estimate, own_gpus

PLANNED_GPUS = {
    "rtx-pro-6000": Hardware(gpu="RTX PRO 6000 Blackwell, 96 GB", gpus=1, memory_gb=96.0),
    "rtx-5090": Hardware(gpu="GeForce RTX 5090, 32 GB", gpus=1, memory_gb=32.0),
    "dgx-spark": Hardware(gpu="GB10 (DGX Spark)", gpus=1, memory_gb=128.0, unified=True),
}
"""GPUs that can be planned for."""
COUNTS = (1, 2, 4, 8, 16)
"""Numbers of GPUs that are tried, the smallest first."""
UNIFIED_SHARE = 0.70
"""Share of unified memory for weights and KV cache: above it, owners report that GB10 freezes (doctor, unified-headroom)."""
RESERVE = 0.04
"""Share of a GPU's memory that is left for activations and CUDA graphs, which the estimate does not count."""
LEAST_CONTEXT, CONTEXT_STEP = 32_768, 1024
"""Tokens that a sequence should have, and of which its length is a multiple."""
DRAFT_TOKENS = 3
"""Draft tokens of a step with the checkpoint's own MTP layers: between those that publications of such models have."""


@dataclass(frozen=True)
class NamedModel:
    """A model to serve: the name under which, the commit of its repository ("" for a folder), and what is known of it."""

    repository: str
    revision: str
    facts: Checkpoint


@dataclass(frozen=True)
class DerivedConfiguration:
    """A configuration that no file has, with ``notes`` on what a user may want to decide otherwise."""

    configuration: Configuration
    notes: tuple[str, ...]


def planned_gpus(kind: str, count: int) -> Hardware:
    """GPUs that need not exist: ``count`` of a kind, each DGX Spark a machine of its own.

    Raises:
        NotFound: there is no such kind.
    """
    if kind not in PLANNED_GPUS:
        known = ", ".join(PLANNED_GPUS)
        raise NotFound(f"unknown GPU {kind!r}{did_you_mean(kind, PLANNED_GPUS)}", f"GPUs that can be planned for: {known}")
    one = PLANNED_GPUS[kind]
    return one.model_copy(update={"gpus": count, "nodes": count if one.unified else 1})


def present_gpus(host: Host) -> Hardware | None:
    """The GPUs of a host, with the memory of the smallest; those with memory of their own if it has both kinds."""
    usable = [gpu for gpu in host.gpus if gpu.capability is None or gpu.capability.startswith("12.")]
    usable = [gpu for gpu in usable if not gpu.unified] or usable
    if not usable:
        return None
    unified = usable[0].unified
    sizes = [host.memory_total if unified else gpu.memory_mib and gpu.memory_mib << 20 for gpu in usable]
    known = [size for size in sizes if size]
    memory = min(known) / 1e9 if len(known) == len(sizes) else None
    return Hardware(gpu=usable[0].name or "SM12x GPU", gpus=len(usable), memory_gb=memory, unified=unified)


def gpu_word(hardware: Hardware) -> str:
    """The word for a kind of GPU in names and options: that of :data:`PLANNED_GPUS` if there is one."""
    kind = next((kind for kind in GPUS if kind in hardware.gpu), None)
    known = {word: next(key for key in GPUS if key in planned.gpu) for word, planned in PLANNED_GPUS.items()}
    return next((word for word, key in known.items() if key == kind), "") or _slug(hardware.gpu)


def published(repository: str, hardware: Hardware | None, *, exact: bool, engine: str = "") -> Configuration | None:
    """The configuration of a model that exists for GPUs, or for as many of them as it needs unless they are ``exact``.

    The one with the most GPUs, then with the highest figure; none that is historical, or that its engine's parser, lockfile or
    image refuses, which is reported. Without ``hardware`` the one with the fewest GPUs.
    """
    suitable = (
        each
        for each in configurations.readable()
        if each.model.repository.lower() == repository.lower()
        and not each.historical
        and engine in ("", each.engine, each.served_by.name)
        and (hardware is None or _suits(each.hardware, hardware, exact=exact))
    )
    usable = [each for each in suitable if _is_accepted(each)]
    if hardware is None:
        return min(usable, key=lambda each: (each.hardware.gpus, each.hardware.unified), default=None)
    return max(usable, key=lambda each: (each.hardware.gpus, *(ref.value for ref in each.reference[:1])), default=None)


def _is_accepted(configuration: Configuration) -> bool:
    """Whether nothing is wrong with the arguments of a configuration; reports what is."""
    if found := list(arguments.problems(configuration.model_dump(mode="json"))):
        reporting.warn(f"configuration {configuration.name} is left out: {'; '.join(found)}")
    return not found


def _suits(needed: Hardware, there: Hardware, *, exact: bool) -> bool:
    count = needed.gpus == there.gpus if exact else needed.gpus <= there.gpus
    return count and gpu_word(needed) == gpu_word(there)


def choose_engine(model: NamedModel, hardware: Hardware, wanted: str = "") -> EngineRecipe:
    """The recipe that serves a model: the first engine whose newest version has its class and quantization.

    ``wanted`` names an engine, or a recipe, which is taken whatever its record has.

    Raises:
        NotFound: no recipe has that name, no engine has the model's class, or that generates no text.
        Mismatch: no back-end of an engine with the class takes the quantization on SM12x.
    """
    pooling = {*model.facts.architectures} & {*chain(*(_names(recipe, "pooling") for recipe in _newest(hardware)))}
    if pooling or model.facts.embeds:
        kind = min(pooling, default="model of sentence-transformers (modules.json)")
        raise NotFound(
            f"{model.facts.source} is a {kind}, which generates no text: sm120kit plans and serves models that do",
            "for embeddings, scores or classes, start the engine itself, such as vllm serve MODEL --runner pooling",
        )
    if wanted and find(wanted) is None:
        return recipes.load_engine(wanted)
    candidates = [recipe for recipe in _newest(hardware) if wanted in ("", recipe.engine)]
    having = [recipe for recipe in candidates if _has_class(recipe, model.facts)]
    if not having:
        raise _no_class(model, candidates)
    taking = [recipe for recipe in having if _takes(recipe, model.facts.quantization)]
    if not taking:
        names = " and ".join(recipe.name for recipe in having)
        raise Mismatch(
            f"{model.facts.source} has quantization {model.facts.quantization[:80]}; {names} have no back-end for it on SM12x",
            "choose a checkpoint in NVFP4, FP8, MXFP4, AWQ or BF16; or name another engine with --engine",
        )
    return taking[0]


def _newest(hardware: Hardware) -> list[EngineRecipe]:
    """The newest recipe of each engine for GPUs."""
    found = (recipes.newest_for(engine.name, unified=hardware.unified) for engine in all_engines())
    return [recipe for recipe in found if recipe]


def _no_class(model: NamedModel, candidates: list[EngineRecipe]) -> NotFound:
    names, lacking = ", ".join(model.facts.architectures)[:200], " and ".join(recipe.name for recipe in candidates)
    if not names:
        return NotFound(
            f"{model.facts.source} names no architecture in config.json", "add the name of its class: architectures"
        )
    code = "; its own Python code (auto_map) is not run" if model.facts.remote_code else ""
    hint = "name an engine that has it with --engine; or, for code that you have read, add -- --trust-remote-code to that"
    return NotFound(f"{model.facts.source} is a {names}, a class that is not in {lacking or 'any engine'}{code}", hint)


def _names(recipe: EngineRecipe, kind: str) -> tuple[str, ...]:
    record = parser.load(recipe.name)
    return record.models.get(kind, ()) if record else ()


def _has_class(recipe: EngineRecipe, facts: Checkpoint) -> bool:
    return bool({*facts.architectures} & {*_names(recipe, "architectures")})


def _takes(recipe: EngineRecipe, quantization: str) -> bool:
    """Whether an engine has a method of quantization on SM12x, by the first word of what ``config.json`` names."""
    engine, method = recipe.served_by, quantization.partition(" ")[0].lower()
    names = {method, engine.quantizations.get(method, method)}
    return method == "none" or bool(names & {*_names(recipe, "quantizations")} - engine.other_gpus)


def derive(model: NamedModel, recipe: EngineRecipe, hardware: Hardware, *, exact: bool) -> DerivedConfiguration:
    """How a recipe serves a model on GPUs: on the fewest of them that hold it, or on all if none do or they are ``exact``.

    The KV cache is FP8 only if that is what makes room for :data:`LEAST_CONTEXT` tokens.
    """
    counts = [hardware.gpus] if exact else [count for count in COUNTS if count <= hardware.gpus]
    nodes = hardware.nodes > 1
    tried = [
        _Draft(model, recipe, hardware.model_copy(update={"gpus": count, "nodes": count if nodes else 1}), kv_type)
        for count in counts
        for kv_type in ("", "fp8")
    ]
    draft = next((each for each in tried if each.is_roomy), None) or max(
        tried, key=lambda each: (each.room, each.hardware.gpus, not each.kv_type)
    )
    return DerivedConfiguration(draft.configuration, tuple(draft.notes()))


@dataclass(frozen=True)
class _Draft:
    """A configuration with a number of GPUs and a data type of the KV cache, "" for the checkpoint's."""

    model: NamedModel
    recipe: EngineRecipe
    hardware: Hardware
    kv_type: str

    @property
    def room(self) -> int:
        """Tokens for one sequence, -1 if the weights do not fit, 0 if the KV cache is unknown or not even one token fits."""
        fit = self._fit(())
        return -1 if fit.overflows else min(fit.capacity_tokens or 0, fit.context or fit.capacity_tokens or 0)

    @property
    def is_roomy(self) -> bool:
        """Whether enough tokens fit, or the weights if the KV cache is unknown."""
        fit = self._fit(())
        least = min(fit.context or LEAST_CONTEXT, LEAST_CONTEXT)
        return not fit.overflows and (self.room >= least if fit.capacity_tokens is not None else not self.kv_type)

    def _fit(self, context: tuple[str, ...]) -> Fit:
        return estimate(self._with(context), self.model.facts, own_gpus(self.hardware, RESERVE))

    @property
    def configuration(self) -> Configuration:
        """The configuration, with the longest sequences that fit."""
        return self._with(self._context())

    def _context(self) -> tuple[str, ...]:
        engine, fit = self.recipe.served_by, self._fit(())
        option = engine.options["context"][0]
        if fit.overflows:
            return ()
        if fit.capacity_tokens is None:
            return (option, engine.any_context) if engine.any_context and fit.memory_bytes else ()
        length = min(fit.context or fit.capacity_tokens, max(fit.capacity_tokens, CONTEXT_STEP))
        return (option, str(length if length == fit.context else length // CONTEXT_STEP * CONTEXT_STEP)) if fit.context else ()

    def _with(self, context: tuple[str, ...]) -> Configuration:
        facts, repository = self.model.facts, self.model.repository
        name = _slug(f"{repository.partition('/')[2]}-{self.hardware.gpus}x-{gpu_word(self.hardware)}")
        name += "-derived" * (name in configurations.names())
        data = {
            "summary": f"{repository} on {self.hardware.gpus} x {self.hardware.gpu}, derived from its config.json and headers",
            "engine": self.recipe.name,
            "model": {
                "repository": repository,
                "revision": self.model.revision or configurations.UNPINNED,
                "quantization": facts.quantization,
                "gigabytes": round(facts.weight_bytes / 1e9, 1) or None,
            },
            "hardware": self.hardware.model_dump(),
            "arguments": [*self._parallel(), *self._shares(), *context, *self._parsers(), *self._speculation()],
        }
        return Configuration.model_validate(configurations.completed(data, name))

    def _parallel(self) -> Iterator[str]:
        """Tensor parallelism over as many GPUs as divide the attention heads; the others are stages of a pipeline."""
        gpus, heads = self.hardware.gpus, self.model.facts.heads
        tensor = next(size for size in range(gpus, 0, -1) if gpus % size == 0 and (not heads or heads % size == 0))
        for field, size in (("tensor_parallel", tensor), ("pipeline_parallel", gpus // tensor)):
            if size > 1:
                yield from (self.recipe.served_by.options[field][0], str(size))

    def _shares(self) -> Iterator[str]:
        engine = self.recipe.served_by
        share = UNIFIED_SHARE if self.hardware.unified else engine.memory_share
        yield from (engine.options["memory_share"][0], f"{share:.2f}")
        if self.kv_type:
            yield from (engine.options["kv_type"][0], engine.fp8_cache)

    def _parsers(self) -> Iterator[str]:
        engine = self.recipe.served_by
        parsers = engine.parsers_of(self.model.facts.model_type, self.model.repository)
        for meaning, value in (("reasoning_parser", parsers.reasoning), ("tool_parser", parsers.tools)):
            option = engine.options[meaning][0]
            if value and self._takes(option, value):
                yield from (option, value, *(engine.tool_arguments if meaning == "tool_parser" else ()))

    def _takes(self, *words: str) -> bool:
        """Whether the engine's parser accepts an option; an earlier version may lack a value of its newest."""
        record = parser.load(self.recipe.name)
        return record is None or not parser.rejections(record, words)

    def _speculation(self) -> tuple[str, ...]:
        facts = self.model.facts
        types = {facts.model_type, *facts.architectures}
        usable = facts.mtp and types & {*_names(self.recipe, "mtp")}
        return self.recipe.served_by.mtp_arguments(DRAFT_TOKENS) if usable else ()

    def notes(self) -> Iterator[str]:
        """What a user may want to decide otherwise."""
        facts, engine, fit = self.model.facts, self.recipe.served_by, self._fit(self._context())
        if not _has_class(self.recipe, facts):
            yield f"whether {self.recipe.name} has the class {', '.join(facts.architectures)[:200]} is not checked"
        if fit.capacity_tokens is None:
            yield f"the KV cache is unknown: {fit.why_no_kv or 'the memory of the GPUs is not known'}"
        elif fit.context and facts.context and fit.context < facts.context:
            yield f"{fit.context:,} of {facts.context:,} tokens of context fit"
        if self.kv_type:
            yield f"the KV cache is FP8, so that {LEAST_CONTEXT:,} tokens fit; its scales are not in every checkpoint"
        if facts.mtp and not self._speculation():
            yield f"the checkpoint has MTP layers, which {self.recipe.name} cannot draft with"
        if not engine.parsers_of(facts.model_type, self.model.repository).tools:
            yield f"no tool parser is known for model type {facts.model_type or 'unknown'}"
        if facts.remote_code:
            yield "Python code of the checkpoint (auto_map) is not run; if the engine needs it: -- --trust-remote-code"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "model"


def with_arguments(configuration: Configuration, argv: tuple[str, ...], without: str = "") -> Configuration:
    """A configuration whose arguments are overridden by others, with the numbers of GPUs and the speculation that follow.

    The option ``without`` is left out.

    Raises:
        ValueError: the arguments are for another number of machines.
    """
    if not argv and not without:
        return configuration
    engine, name = configuration.served_by, configuration.engine
    given = {*parser.options(name, argv), without}
    given |= {other for names in engine.options.values() if given & {*names} for other in names}
    kept = [word for option, words in parser.split(name, configuration.arguments) if option not in given for word in words]
    data = configuration.model_dump(
        mode="json", exclude={"tensor_parallel", "pipeline_parallel", "speculation", "model", "hardware"}
    )
    hardware = configuration.hardware
    model = configuration.model.model_dump(exclude={"needs_mtp"})
    data |= {"arguments": [*kept, *argv], "model": model}
    completed = configurations.completed(data, configuration.name)
    gpus = completed["hardware"]["gpus"]
    completed["hardware"] = hardware.model_copy(update={"gpus": gpus, "nodes": gpus if hardware.nodes > 1 else 1}).model_dump()
    return Configuration.model_validate(completed)


def recipe_of(engine: Engine, wanted: str) -> EngineRecipe:
    """The recipe ``wanted``, for arguments of an engine.

    Raises:
        NotFound: there is none.
        BadInput: it is of another engine.
    """
    recipe = recipes.load_engine(wanted)
    if recipe.served_by is not engine:
        raise BadInput(f"the arguments are those of {engine.title}, not of {recipe.engine}", f"name a recipe of {engine.name}")
    return recipe


def imported_engine(engine: Engine, wanted: str, *, unified: bool) -> EngineRecipe:
    """The recipe for arguments of an engine: ``wanted``, else its newest version for these machines."""
    if not wanted or find(wanted) is engine:
        found = recipes.newest_for(engine.name, unified=unified) or recipes.newest_for(engine.name, unified=not unified)
        if found is None:
            raise NotFound(f"there is no recipe of {engine.title}", "sm120kit recipe list has all")
        return found
    return recipe_of(engine, wanted)


def gpus_of(data: Mapping[str, Any]) -> int:
    """The number of GPUs in the content of a configuration's file."""
    return int(configurations.completed(dict(data), "")["hardware"]["gpus"])


def name_of(data: Mapping[str, Any]) -> str:
    """A name for the content of a configuration's file: model, number and kind of GPUs."""
    hardware = Hardware.model_validate(configurations.completed(dict(data), "")["hardware"])
    return _slug(f"{data['model']['repository'].partition('/')[2]}-{hardware.gpus}x-{gpu_word(hardware)}")
