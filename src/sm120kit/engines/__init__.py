"""The engines that are built, served and measured: one object each, in one file.

Those of other distributions are entry points of the group ``sm120kit.engines``: the name of the engine, and its object.
"""

from functools import cache

from sm120kit.core.errors import NotFound
from sm120kit.engines.engine import AllReduce, ApiKey, Engine, LogSigns, Metrics, Node
from sm120kit.engines.sglang import SGLANG
from sm120kit.engines.vllm import VLLM

__all__ = ["BUILT_IN", "AllReduce", "ApiKey", "Engine", "LogSigns", "Metrics", "Node", "all_engines", "find"]
__all__ += ["find_of_recipe", "of_recipe"]

GROUP = "sm120kit.engines"
BUILT_IN = (VLLM, SGLANG)


@cache
def all_engines() -> tuple[Engine, ...]:
    """Every engine, those of other distributions last."""
    from importlib.metadata import entry_points

    return (*BUILT_IN, *(entry.load() for entry in entry_points(group=GROUP)))


def find(name: str) -> Engine | None:
    """The engine of a name; None if there is none."""
    own = next((engine for engine in BUILT_IN if engine.name == name), None)
    return own or next((engine for engine in all_engines() if engine.name == name), None)


def find_of_recipe(recipe: str) -> Engine | None:
    """The engine of a recipe by the recipe's name, such as ``sglang-0.5.23-spark``; None if there is none."""
    return find(recipe.partition("-")[0])


def of_recipe(recipe: str) -> Engine:
    """As :func:`find_of_recipe`.

    Raises:
        NotFound: no engine has that name.
    """
    if engine := find_of_recipe(recipe):
        return engine
    name = recipe.partition("-")[0]
    known = ", ".join(engine.name for engine in all_engines())
    raise NotFound(f"unknown engine {name!r}", f"engines: {known}; others are entry points of the group {GROUP}")
