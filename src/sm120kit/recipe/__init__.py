"""TOML to a recipe, or every reason why not.

A recipe of engine ``flashinfer`` says which kernels are compiled from which source (:class:`Recipe`); one of ``vllm`` or
``sglang`` says of which locked wheels an image is made, and on which of the former it rests (:class:`EngineRecipe`).
"""

from __future__ import annotations

import re
from pathlib import Path

from sm120kit.errors import UnknownName
from sm120kit.recipe.reading import did_you_mean, json_schema, read
from sm120kit.recipe.schema import (
    KINDS,
    EngineRecipe,
    EnvironmentTable,
    FromSourceTable,
    GroupTable,
    KnownBad,
    ModuleTable,
    Recipe,
    TargetTable,
)
from sm120kit.records import Arch
from sm120kit.workspace import data_root

__all__ = [
    "DEFAULT_RECIPES",
    "EngineRecipe",
    "EnvironmentTable",
    "FromSourceTable",
    "GroupTable",
    "KnownBad",
    "ModuleTable",
    "Recipe",
    "TargetTable",
    "directory",
    "group",
    "json_schema",
    "load",
    "load_any",
    "load_engine",
    "locate",
    "lock_path",
    "names",
    "parse_arch",
    "read",
]

DEFAULT_RECIPES = {"flashinfer": "flashinfer-0.6.6"}
"""What the bare name of a kernel recipe means: the release whose kernels were compiled and checked most."""


def directory() -> Path:
    """Where the recipes lie."""
    return data_root() / "recipes" / "engines"


def names(kind: type[Recipe] | type[EngineRecipe] | None = None) -> list[str]:
    """All recipes, or those of one kind: by engine, oldest version first."""
    from packaging.version import Version

    def order(name: str) -> tuple[str, Version, str]:
        engine, version, variant = _parts(name)
        return engine, Version(version), variant

    found = [path.stem for path in directory().glob("*.toml") if path.stem.count("-")]
    return sorted((name for name in found if kind is None or KINDS.get(_parts(name)[0]) is kind), key=order)


def _parts(name: str) -> tuple[str, str, str]:
    """Engine, version and variant of a recipe's name: ``sglang-0.5.23-spark``."""
    engine, _, rest = name.partition("-")
    version, _, variant = rest.partition("-")
    return engine, version, variant


def locate(name: str) -> Path:
    """The file of a recipe: by name (``flashinfer-0.6.6``), as ``engine@version``, by engine alone, or by path.

    ``flashinfer`` alone means the one that ``DEFAULT_RECIPES`` names; another engine alone its newest verified recipe.

    Raises:
        UnknownName: there is none; the hint names the nearest.
        BadRecipe: a recipe of that engine is not well-formed.
    """
    if name.endswith(".toml") or "/" in name:
        path = Path(name)
        if not path.is_file():
            raise UnknownName(f"no recipe file {name}", "name a recipe that `sm120kit recipe list` shows, or an existing file")
        return path
    known = names()
    wanted = name.replace("@", "-")
    if wanted not in known:
        of_engine = [item for item in known if _parts(item)[0] == wanted]
        if not of_engine:
            raise UnknownName(
                f"unknown recipe {name!r}{did_you_mean(wanted, known)}",
                f"recipes: {', '.join(known) or 'none'} (in {directory()})",
            )
        wanted = DEFAULT_RECIPES.get(wanted) or _newest_verified(wanted, of_engine)
    return directory() / f"{wanted}.toml"


def _newest_verified(engine: str, of_engine: list[str]) -> str:
    loaded = [read(directory() / f"{name}.toml") for name in of_engine]
    verified = [item.name for item in loaded if not isinstance(item, EngineRecipe) or item.state == "verified"]
    if not verified:
        choices = ", ".join(name.replace("-", "@", 1) for name in of_engine)
        raise UnknownName(
            f"{engine!r} means its newest verified recipe, and none is verified yet",
            f"name one with its version: {choices}",
        )
    return verified[-1]


def lock_path(name: str) -> Path:
    """Where a recipe's lock lies: beside the recipe, ``<recipe>.lock.json``. See :func:`locate` for errors."""
    return locate(name).with_suffix(".lock.json")


def load_any(name: str) -> Recipe | EngineRecipe:
    """A recipe of any kind. See :func:`locate` for its spellings.

    Raises:
        UnknownName: there is none; the hint names the nearest.
        BadRecipe: it is not well-formed; the message lists every problem.
    """
    return read(locate(name))


def load(name: str) -> Recipe:
    """A recipe of kernels; see :func:`load_any`.

    Raises:
        UnknownName: also when it is the recipe of an engine; the hint names the kernels that it rests on.
    """
    item = load_any(name)
    if isinstance(item, EngineRecipe):
        raise UnknownName(
            f"{item.name} is the recipe of an engine; it has no kernels of its own", f"it rests on {item.flashinfer}"
        )
    return item


def load_engine(name: str) -> EngineRecipe:
    """A recipe of vLLM or SGLang; see :func:`load_any`.

    Raises:
        UnknownName: also when it is a recipe of kernels.
    """
    item = load_any(name)
    if isinstance(item, Recipe):
        raise UnknownName(f"{item.name} is a recipe of kernels, not of an engine", f"engines: {', '.join(names(EngineRecipe))}")
    return item


def group(recipe: Recipe, name: str | None) -> GroupTable:
    """A kernel group of a recipe; the default one without a name.

    Raises:
        UnknownName: there is no such group.
    """
    name = name or recipe.default_group
    if name not in recipe.groups:
        raise UnknownName(
            f"recipe {recipe.name} has no kernel group {name!r}{did_you_mean(name, recipe.groups)}",
            "groups: " + "; ".join(f"{key} ({table.summary})" for key, table in recipe.groups.items()),
        )
    return recipe.groups[name]


def parse_arch(text: str) -> Arch:
    """``sm_120a``, ``sm_120f`` or ``sm_121a``.

    Raises:
        UnknownName: not an arch that SM12x can run.
    """
    try:
        return Arch(text)
    except ValueError:
        known = [str(arch) for arch in Arch]
        plain = re.sub(r"^(compute_|sm_?)?12\.?([01])", r"sm_12\2", text)
        raise UnknownName(
            f"unknown arch {text!r}{did_you_mean(plain, known)}",
            f"archs: {', '.join(known)} (plain sm_120 lacks the block-scaled MMA instructions)",
        ) from None
