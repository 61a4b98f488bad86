"""The list of configurations by kind and number of GPUs, on one screen of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping

from sm120kit.recipes.configurations import Configuration, Reference

WIDTH = 80
KINDS = ("RTX 5090", "RTX PRO 6000", "GB10")
NAMES = {"GB10": "DGX Spark"}


def lines(listed: Iterable[Configuration], origins: Mapping[str, str]) -> Iterator[str]:
    """The lines of the list; ``origins`` has where configurations are from, for those that are not built-in."""
    groups: dict[tuple[int, str, int], list[Configuration]] = {}
    old = []
    for configuration in listed:
        if configuration.historical:
            old.append(configuration.name)
        else:
            groups.setdefault(_group(configuration), []).append(configuration)
    for (_, kind, gpus), members in sorted(groups.items()):
        yield f"{gpus} x {kind}"
        yield from (_line(each, origins.get(each.name, "")) for each in members)
    if old:
        text = f"historical (older engines, for their published figures): {', '.join(old)}"
        yield from textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _group(configuration: Configuration) -> tuple[int, str, int]:
    """The place of a configuration's kind of GPU, its name, and the number of GPUs."""
    gpu = configuration.hardware.gpu
    place = next((place for place, kind in enumerate(KINDS) if kind in gpu), len(KINDS))
    kind = KINDS[place] if place < len(KINDS) else gpu
    return place, NAMES.get(kind, kind), configuration.hardware.gpus


def _line(configuration: Configuration, origin: str) -> str:
    figure = next((f"{text(each)}{' *' * bool(each.differs)}" for each in configuration.reference), "")
    return f"  {configuration.name:<42} {configuration.engine:<19} {figure:<14} {origin}".rstrip()


def text(reference: Reference) -> str:
    """A published figure in tokens per second."""
    highest = f"-{reference.highest:g}" if reference.highest else ""
    return f"{reference.value:g}{highest}"
