"""Options that change the speed of a configuration, with what is known of their effect: the file ``recipes/ablations.toml``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from sm120kit.core.errors import NotFound, did_you_mean
from sm120kit.recipes.configurations import Configuration
from sm120kit.recipes.load import read_entries
from sm120kit.recipes.schema import Name, Strict, Strings

EXPERTS = re.compile(r"-A\d+B|MoE|gpt-oss|DeepSeek-V\d|GLM-(4\.[5-9]|[5-9])|MiniMax|MiMo|Kimi|Next", re.IGNORECASE)
"""Repositories of models with a mixture of experts."""


class Ablation(Strict):
    """An option: ``arguments``, ``environment``, or one to leave out; its ``effect`` as ``source`` has it.

    ``engine`` is the start of a recipe's name, ``gpus`` the numbers of GPUs in one machine, none for all. ``key`` is a word
    that configurations with the option have in their arguments. ``speculation`` and ``experts`` are what it requires,
    ``methods`` the methods of speculation, all if empty.
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
            and (not self.speculation or (drafts is not None and (not self.methods or drafts.method in self.methods)))
            and (not self.experts or bool(EXPERTS.search(configuration.model.repository)))
        )

    @property
    def text(self) -> str:
        """The option as it is written on a command line."""
        words = (*(f"{name}={value}" for name, value in self.environment.items()), *self.arguments)
        return " ".join(words) or f"without {self.without}"


def of(configuration: Configuration) -> tuple[Ablation, ...]:
    """The options that apply to a configuration and that it does not have.

    Raises:
        BadInput: the file is not well-formed.
    """
    return tuple(each for each in read_entries(Ablation, "ablations", "ablation") if each.applies(configuration))


def named(configuration: Configuration, names: Iterable[str]) -> tuple[Ablation, ...]:
    """The options of a configuration with these names, each once.

    Raises:
        NotFound: one is none of :func:`of`.
    """
    known = {each.name: each for each in of(configuration)}
    for name in names:
        if name not in known:
            raise NotFound(
                f"{configuration.name} has no ablation {name!r}{did_you_mean(name, known)}",
                f"known: {', '.join(known) or 'none'}; `sm120kit config show {configuration.name}` describes them",
            )
    return tuple(known[name] for name in dict.fromkeys(names))
