"""What others report: defects of models with an engine, draft models, and options that change the speed of a configuration.

The files ``recipes/known_defects.toml``, ``drafters.toml`` and ``ablations.toml``.
"""

import re
from collections.abc import Iterable
from typing import Annotated

from packaging.specifiers import SpecifierSet
from pydantic import Field

from sm120kit.core.errors import NotFound, did_you_mean
from sm120kit.recipes import load_engine
from sm120kit.recipes.configurations import Configuration
from sm120kit.recipes.load import read_entries
from sm120kit.recipes.schema import EngineRecipe, Name, Strict, Strings


class KnownDefect(Strict):
    """A ``symptom``, as its ``source`` reports it, and what it requires: see the head of the file."""

    model_types: Strings
    engine: Name
    versions: str
    symptom: str
    source: str
    quantization: str = ""
    methods: Strings = ()
    gpus: Strings = ()
    remedy: str = ""
    patch: str = ""

    def applies(self, configuration: Configuration, model_type: str, quantization: str) -> bool:
        """Whether a configuration has it, with a checkpoint of this type and quantization."""
        recipe, drafts = load_engine(configuration.engine), configuration.speculation
        return (
            model_type in self.model_types
            and recipe.engine == self.engine
            and SpecifierSet(self.versions).contains(recipe.version, prereleases=True)
            and self.quantization in quantization.lower()
            and (not self.methods or (drafts is not None and drafts.method in self.methods))
            and (not self.gpus or any(gpu in configuration.hardware.gpu for gpu in self.gpus))
        )

    @property
    def text(self) -> str:
        """The defect with its remedy and source."""
        mended = f"mended by the patch {self.patch} of the default image" if self.patch else ""
        return "; ".join(filter(None, (self.symptom, self.remedy, mended, self.source)))


def defects(configuration: Configuration, model_type: str, quantization: str) -> tuple[KnownDefect, ...]:
    """The defects of a configuration with a checkpoint of this type and quantization."""
    return tuple(
        each
        for each in read_entries(KnownDefect, "known_defects", "defect")
        if each.applies(configuration, model_type, quantization)
    )


class Drafter(Strict):
    """A draft model: ``method`` and most ``draft_tokens`` of a step, and the ``versions`` of engines that load it."""

    repository: str
    models: str
    method: str
    draft_tokens: Annotated[int, Field(gt=0)]
    versions: dict[str, str]
    source: str

    def drafts_for(self, repository: str, recipe: EngineRecipe) -> bool:
        """Whether it drafts for a model with an engine."""
        versions = self.versions.get(recipe.engine)
        suits = re.search(self.models, repository.partition("/")[2]) is not None
        return suits and versions is not None and SpecifierSet(versions).contains(recipe.version, prereleases=True)

    @property
    def text(self) -> str:
        """The drafter with its source."""
        return f"{self.repository}: {self.method}, {self.draft_tokens} draft tokens; {self.source}"


def drafters(repository: str, recipe: EngineRecipe) -> tuple[Drafter, ...]:
    """The drafters for a model with an engine."""
    return tuple(each for each in read_entries(Drafter, "drafters", "drafter") if each.drafts_for(repository, recipe))


def drafter_named(drafter: str, repository: str, recipe: EngineRecipe) -> Drafter:
    """The drafter with a name.

    Raises:
        NotFound: none of that name drafts for the model with the engine.
    """
    known = {each.repository: each for each in drafters(repository, recipe)}
    if drafter in known:
        return known[drafter]
    option = recipe.served_by.draft_arguments("METHOD", "REPO", 3)
    raise NotFound(
        f"{drafter!r} is no known drafter of {repository} with {recipe.name}{did_you_mean(drafter, known)}",
        f"known: {', '.join(known) or 'none'}; for another one, give the engine's own option: -- {' '.join(option)}",
    )


EXPERTS = re.compile(r"-A\d+B|MoE|gpt-oss|DeepSeek-V\d|GLM-(4\.[5-9]|[5-9])|MiniMax|MiMo|Kimi|Next", re.IGNORECASE)
"""Repositories of models with a mixture of experts."""


class Ablation(Strict):
    """An option: ``arguments``, ``environment``, or one to leave out; its ``effect`` as ``source`` has it.

    ``engine`` is the start of a recipe's name, ``gpus`` the numbers of GPUs in one machine, none for all. ``key`` is a word
    that configurations with the option have in their arguments. ``speculation`` and ``experts`` are what it requires,
    ``methods`` the methods of speculation in lower case, all if empty.
    """

    name: Name
    engine: str
    effect: str
    source: str
    arguments: Strings = ()
    without: str = ""
    environment: Annotated[dict[str, str], Field(default_factory=dict)]
    gpus: Annotated[tuple[int, ...], Field(strict=False)] = ()
    speculation: bool = False
    methods: Strings = ()
    experts: bool = False
    key: str = ""

    def is_in(self, configuration: Configuration) -> bool:
        """Whether a configuration has this option."""
        named = any(self.key and self.key in argument for argument in configuration.arguments)
        return named or bool(self.environment.keys() & configuration.environment.keys())

    def applies(self, configuration: Configuration) -> bool:
        """Whether a configuration can have this option, and has not."""
        drafts = configuration.speculation
        gpus = configuration.hardware.gpus if configuration.hardware.nodes == 1 else 0
        return (
            not self.is_in(configuration)
            and configuration.engine.startswith(self.engine)
            and (not self.gpus or gpus in self.gpus)
            and (not self.speculation or (drafts is not None and (not self.methods or drafts.method.lower() in self.methods)))
            and (not self.experts or bool(EXPERTS.search(configuration.model.repository)))
        )

    @property
    def text(self) -> str:
        """The option as it is written on a command line."""
        words = (*(f"{name}={value}" for name, value in self.environment.items()), *self.arguments)
        return " ".join(words) or f"without {self.without}"


def ablations(configuration: Configuration) -> tuple[Ablation, ...]:
    """The options that apply to a configuration and that it does not have.

    Raises:
        BadInput: the file is not well-formed.
    """
    return tuple(each for each in read_entries(Ablation, "ablations", "ablation") if each.applies(configuration))


def ablations_named(configuration: Configuration, names: Iterable[str]) -> tuple[Ablation, ...]:
    """The options of a configuration with these names, each once.

    Raises:
        NotFound: one is none of :func:`ablations`.
    """
    known = {each.name: each for each in ablations(configuration)}
    for name in names:
        if name not in known:
            raise NotFound(
                f"{configuration.name} has no ablation {name!r}{did_you_mean(name, known)}",
                f"known: {', '.join(known) or 'none'}; `sm120kit config show {configuration.name}` describes them",
            )
    return tuple(known[name] for name in dict.fromkeys(names))
