"""Files that a recipe adds by hash: chat templates and launch scripts to its image, build files to its engine's source."""

import hashlib
from pathlib import Path

from sm120kit.core.data_roots import data_root, top_root
from sm120kit.core.errors import BadInput, Mismatch
from sm120kit.core.outside import read_found
from sm120kit.recipes.schema import EngineRecipe, Recipe

FILES = "files"
"""The directory of these files in a user's repository, and in the built-in data."""

MAX_BYTES = 2**20
"""Limit for the size of one file."""


def read_added(recipe: Recipe) -> dict[str, str]:
    """The texts of the files that a recipe adds, by path below ``/opt/sm120kit/files`` of the image.

    Raises:
        BadInput: a file does not exist, is too large, or is not UTF-8.
        Mismatch: a file does not have the sha256 in the recipe.
    """
    return {entry.path: _read(recipe.name, entry.path, entry.sha256) for entry in recipe.files}


def read_added_sources(recipe: EngineRecipe) -> dict[str, str]:
    """The texts of the files that a recipe adds to its engine's source, by path. See :func:`read_added` for errors."""
    files = recipe.from_source.files if recipe.from_source else {}
    return {path: _read(recipe.name, f"{recipe.name}/{path}", sha256) for path, sha256 in files.items()}


def _read(recipe: str, path: str, sha256: str) -> str:
    file = _find(path)
    try:
        content = read_found(file, MAX_BYTES)
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise BadInput(f"{recipe}: files names {file}, which cannot be read: {problem}", "write a text file there") from error
    if (found := hashlib.sha256(content).hexdigest()) != sha256:
        raise Mismatch(
            f"{file} has sha256 {found}; files of {recipe} names {sha256}",
            "if the change is intended, write its sha256 in the recipe, and lock that again",
        )
    return text


def _find(path: str) -> Path:
    """The file in the user's repository if it has it, else in the built-in data."""
    own = top_root() / FILES / path
    return own if own.exists() else data_root() / FILES / path
