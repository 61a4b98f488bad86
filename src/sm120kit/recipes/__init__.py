"""Recipes by name: find, load and validate ``recipes/engines/<name>.toml``.

A :class:`FlashInferRecipe` (engine ``flashinfer``) lists the kernels that are compiled and the source they come from. An
:class:`EngineRecipe` (of one of :mod:`sm120kit.engines`) lists the locked wheels of an image and names the FlashInfer recipe
whose kernels the image contains.
"""

from sm120kit.recipes._by_name import (
    DEFAULT_RECIPES,
    KIND,
    NO_KERNELS,
    group,
    load,
    load_engine,
    load_flashinfer,
    load_with_path,
    locate,
    lock_path,
    names,
    newest,
    newest_for,
    parse_arch,
    path_of,
    writable_lock_path,
)
from sm120kit.recipes.load import read
from sm120kit.recipes.schema import (
    EngineRecipe,
    FlashInferRecipe,
    FromSourceTable,
    ModuleTable,
    Recipe,
    TargetTable,
    known_engines,
)

__all__ = ["DEFAULT_RECIPES", "KIND", "NO_KERNELS", "EngineRecipe", "FlashInferRecipe", "FromSourceTable", "ModuleTable"]
__all__ += ["Recipe", "TargetTable", "group", "known_engines", "load", "load_engine", "load_flashinfer", "load_with_path"]
__all__ += ["locate", "lock_path", "names", "newest", "newest_for", "parse_arch", "path_of", "read", "writable_lock_path"]
