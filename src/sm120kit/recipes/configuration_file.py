"""Write a configuration as a file that is made to be edited."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sm120kit.core import data_roots
from sm120kit.core.atomic_writes import write_atomic
from sm120kit.core.disk import disk_errors
from sm120kit.core.errors import AlreadyExists
from sm120kit.engines import parser
from sm120kit.recipes import _toml_text
from sm120kit.recipes.configurations import KIND, Configuration


def content(configuration: Configuration) -> dict[str, Any]:
    """The fields of a configuration that are not their defaults."""
    return configuration.model_dump(mode="json", exclude_defaults=True, exclude_none=True)


def text(data: Mapping[str, Any], comments: Sequence[str] = ()) -> str:
    """The TOML text of a configuration's content: one line for each option; ``comments`` are lines above it."""
    options = _toml_text.Rows(words for _, words in parser.split(str(data["engine"]), data["arguments"]))
    return _toml_text.write({**data, "arguments": options}, "\n".join(comments))


def write(name: str, written: str, *, overwrite: bool) -> Path:
    """Write the file of a configuration to the user's repository, or to a clone of sm120kit.

    Raises:
        AlreadyExists: it exists and may not be overwritten.
        SystemRefused: see :func:`sm120kit.core.data_roots.writable_folder`.
    """
    path = data_roots.writable_folder(KIND) / f"{name}.toml"
    data_roots.require_not_installed(path)
    if path.exists() and not overwrite:
        raise AlreadyExists(f"{path} exists", "choose another name with --name, or replace it with --overwrite")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, written.encode())
    return path
