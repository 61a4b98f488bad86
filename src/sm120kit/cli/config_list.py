"""The list of configurations by kind and number of GPUs, on one screen of 80 columns."""

import textwrap
from collections.abc import Iterable, Iterator, Mapping

from sm120kit.recipes.configurations import Configuration, Hardware, Reference
from sm120kit.serving.derived_configuration import PLANNED_GPUS, gpu_word

WIDTH = 80
KINDS = ("RTX 5090", "RTX PRO 6000", "GB10")
NAMES = {"GB10": "DGX Spark"}


def fit(configuration: Configuration, gpus: Hardware) -> bool:
    """Whether a configuration is for these GPUs, or for fewer of them; machines of one GPU each may be several."""
    own = configuration.hardware
    enough = own.gpus <= gpus.gpus or own.nodes > 1
    return not configuration.historical and gpu_word(own) == gpu_word(gpus) and enough


def kinds(listed: Iterable[Configuration]) -> Iterator[str]:
    """The models that have a configuration for each kind of GPU, and the command that lists these."""
    models: dict[str, set[str]] = {kind: set() for kind in PLANNED_GPUS}
    for configuration in listed:
        if not configuration.historical:
            kind = gpu_word(configuration.hardware)
            models.setdefault(kind, set()).add(configuration.name.partition(f"-{configuration.hardware.gpus}x-")[0])
    for kind, names in models.items():
        yield f"sm120kit config list --gpu {kind}" if kind in PLANNED_GPUS else f"sm120kit config list --all: {kind}"
        yield from _wrapped(f"  {', '.join(sorted(names))}")


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
        yield from _wrapped(f"historical (older engines, for their published figures): {', '.join(old)}")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _group(configuration: Configuration) -> tuple[int, str, int]:
    """The place of a configuration's kind of GPU, its name, and the number of GPUs."""
    gpu = configuration.hardware.gpu
    place = next((place for place, kind in enumerate(KINDS) if kind in gpu), len(KINDS))
    kind = KINDS[place] if place < len(KINDS) else gpu
    return place, NAMES.get(kind, kind), configuration.hardware.gpus


def _line(configuration: Configuration, origin: str) -> str:
    figure = next((f"{text(each)}{' *' * bool(each.differs)}" for each in configuration.reference), "")
    return f"  {configuration.name:<44} {configuration.engine:<19} {figure:<12} {origin}".rstrip()


def text(reference: Reference) -> str:
    """A published figure in tokens per second."""
    highest = f"-{reference.highest:g}" if reference.highest else ""
    return f"{reference.value:g}{highest}"
