"""Find, load and validate ``recipes/engines/<name>.toml``."""

import functools
import re
from pathlib import Path

from packaging.version import InvalidVersion, Version

from sm120kit.core import data_roots, reporting
from sm120kit.core.errors import BadInput, NotFound, did_you_mean, nearest
from sm120kit.core.outside import file_problem
from sm120kit.core.records import Arch
from sm120kit.recipes.load import read
from sm120kit.recipes.schema import EngineRecipe, FlashInferRecipe, GroupTable, Recipe, kind_of

DEFAULT_RECIPES = {"flashinfer": "flashinfer-0.6.6"}
"""The recipe for a bare engine name: of FlashInfer, the release whose kernels were compiled and checked most."""

KIND = "engines"
"""The kind of recipes of engines, for :mod:`sm120kit.core.data_roots`."""


def path_of(name: str) -> Path:
    """The file of a recipe by its full name: the user's if there is one, else the built-in, which may not exist."""
    return data_roots.find(KIND, f"{name}.toml")


def names(kind: type[FlashInferRecipe] | type[EngineRecipe] | None = None) -> list[str]:
    """All recipe names, or those of one kind: sorted by engine, oldest version first; without files named without a version."""

    def order(name: str) -> tuple[str, Version, str]:
        engine, version, variant = _split_name(name)
        return engine, Version(version), variant

    ordered = sorted((name for name, path in data_roots.entries(KIND).items() if _has_version(path)), key=order)
    return [name for name in ordered if kind is None or kind_of(_split_name(name)[0]) is kind]


@functools.cache
def _has_version(path: Path) -> bool:
    """Whether the name of a recipe's file contains a version; a file without one is reported once."""
    try:
        return bool(Version(_split_name(path.stem)[1]))
    except InvalidVersion:
        reporting.warn(f"{path} is a recipe by its path only: its name is not ENGINE-VERSION or ENGINE-VERSION-VARIANT")
        return False


def newest(engine: str) -> tuple[str, ...]:
    """The names of the recipes of an engine's newest version, which differ by the machines they are for."""
    of_engine = [name for name in names() if _split_name(name)[0] == engine]
    return tuple(name for name in of_engine if _split_name(name)[1] == _split_name(of_engine[-1])[1])


def newest_for(engine: str, *, unified: bool) -> EngineRecipe | None:
    """The recipe of an engine's newest version for machines whose GPUs have ``unified`` memory, or memory of their own."""
    machine = "aarch64" if unified else "x86_64"
    loaded = (load_engine(name) for name in newest(engine))
    return next((recipe for recipe in loaded if recipe.environment.platforms[0].endswith(machine)), None)


def _split_name(name: str) -> tuple[str, str, str]:
    """Engine, version and variant of a recipe name such as ``sglang-0.5.23-spark``."""
    engine, _, rest = name.partition("-")
    version, _, variant = rest.partition("-")
    return engine, version, variant


def locate(name: str) -> Path:
    """Find the file of a recipe by name (``flashinfer-0.6.6``), as ``engine@version``, by engine alone, or by path.

    ``flashinfer`` alone is the recipe in ``DEFAULT_RECIPES``; any other engine alone is its newest verified recipe that is
    no variant, such as ``sglang-0.5.11-b12x``.

    Raises:
        NotFound: no such recipe; the hint lists the recipes.
        BadInput: a recipe of that engine is not well-formed.
    """
    if name.endswith((".patch", ".diff")):
        hint = "name a recipe; `sm120kit patch import` makes a patch of a file, and --patch applies one"
        raise BadInput(f"{name} is a patch, not a recipe", hint)
    if name.endswith(".toml") or "/" in name:
        path = Path(name)
        if why := file_problem(path):
            hint = "name a recipe that `sm120kit recipe list` shows, or an existing file"
            raise NotFound(f"no recipe file {name}: it {why}", hint)
        return path
    known, stem = names(), DEFAULT_RECIPES.get(name, name.replace("@", "-"))
    if stem in known:
        return path_of(stem)
    of_engine = [candidate for candidate in known if _split_name(candidate)[0] == stem]
    for candidate in reversed(of_engine):
        if not _split_name(candidate)[2] and read(path_of(candidate)).state == "verified":
            return path_of(candidate)
    if of_engine:
        choices = ", ".join(candidate.replace("-", "@", 1) for candidate in of_engine)
        raise NotFound(
            f"{stem!r} means its newest verified recipe, and none is verified yet", f"name one with its version: {choices}"
        )
    raise NotFound(
        f"unknown recipe {name!r}{did_you_mean(stem, known)}",
        f"nearest: {nearest(stem, known)}; `sm120kit recipe list` lists all,"
        f" of {' and '.join(map(str, data_roots.folders(KIND)))}",
    )


def lock_path(recipe: Path) -> Path:
    """The lockfile of a recipe's file: ``<recipe>.lock.json`` beside it.

    In a user's repository, that of a built-in recipe is in the repository once it was locked there: with the user's patches.
    """
    own = writable_lock_path(recipe)
    return own if own.exists() else recipe.with_suffix(".lock.json")


def writable_lock_path(recipe: Path) -> Path:
    """The path to which the lockfile of a recipe's file is written."""
    *own, built_in = data_roots.folders(KIND)
    beside = recipe.with_suffix(".lock.json")
    return own[0] / beside.name if own and recipe.parent == built_in else beside


def load_with_path(name: str) -> tuple[Path, Recipe]:
    """Load a recipe of either kind, and return its file as well. See :func:`locate` for the forms of a name.

    Raises:
        NotFound: no such recipe; the hint lists the recipes.
        BadInput: the file is not well-formed; the message lists every problem.
    """
    path = locate(name)
    return path, read(path)


def load(name: str) -> Recipe:
    """Load a recipe of either kind. See :func:`load_with_path`."""
    return load_with_path(name)[1]


def load_flashinfer(name: str) -> FlashInferRecipe:
    """Load a FlashInfer recipe. See :func:`load_with_path` for errors.

    Raises:
        NotFound: also for the recipe of an engine; the hint names the FlashInfer recipe that it uses.
    """
    return load(name).require_kernels()


def load_engine(name: str) -> EngineRecipe:
    """Load a recipe of an engine. See :func:`load` for errors.

    Raises:
        NotFound: also for a FlashInfer recipe.
    """
    return load(name).require_engine()


NO_KERNELS = "none"
"""The kernel group without modules, which every recipe has. It needs no compiler, and can be packed for other machines."""


def group(recipe: FlashInferRecipe, name: str | None) -> GroupTable:
    """A kernel group of a recipe, or :data:`NO_KERNELS`; its default group when ``name`` is None.

    Raises:
        NotFound: no such group; the hint lists the groups.
    """
    name = name or recipe.default_group
    if name == NO_KERNELS:
        return GroupTable(summary="no module: FlashInfer compiles each on first use", modules=())
    if name not in recipe.groups:
        raise NotFound(
            f"recipe {recipe.name} has no kernel group {name!r}{did_you_mean(name, recipe.groups)}",
            "groups: " + "; ".join(f"{key} ({table.summary})" for key, table in recipe.groups.items()) + f"; {NO_KERNELS}",
        )
    return recipe.groups[name]


def parse_arch(text: str) -> Arch:
    """Parse ``sm_120a``, ``sm_120f`` or ``sm_121a``.

    Raises:
        NotFound: not an arch that SM12x can run.
    """
    try:
        return Arch(text)
    except ValueError:
        known = [str(arch) for arch in Arch]
        plain = re.sub(r"^(compute_|sm_?)?12\.?([01])", r"sm_12\2", text)
        raise NotFound(
            f"unknown arch {text!r}{did_you_mean(plain, known)}",
            f"archs: {', '.join(known)} (plain sm_120 lacks the block-scaled MMA instructions)",
        ) from None
