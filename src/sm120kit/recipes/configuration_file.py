"""Write a configuration as a file that is made to be edited."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sm120kit.core import data_roots
from sm120kit.core.atomic_writes import write_atomic
from sm120kit.core.disk import disk_errors
from sm120kit.core.errors import AlreadyExists
from sm120kit.engines import parser
from sm120kit.recipes.configurations import KIND, Configuration


def content(configuration: Configuration) -> dict[str, Any]:
    """The fields of a configuration that are not their defaults."""
    return configuration.model_dump(mode="json", exclude_defaults=True)


def text(data: Mapping[str, Any], comments: Sequence[str] = ()) -> str:
    """The TOML text of a configuration's content: one line for each option; ``comments`` are lines above it."""
    simple = {key: value for key, value in data.items() if not isinstance(value, dict | list | tuple) and value is not None}
    lines = [f"# {line}" for comment in comments for line in comment.splitlines()]
    lines += [f"{key} = {_value(value)}" for key, value in simple.items()]
    lines += ["arguments = [", *_arguments(str(data["engine"]), data["arguments"]), "]"]
    for key, table in data.items():
        if isinstance(table, dict) and table:
            lines += ["", *_table(key, table)]
        elif isinstance(table, list | tuple) and table and isinstance(table[0], dict):
            lines += [line for entry in table for line in ("", f"[[{key}]]", *_rows(entry))]
    return "\n".join(lines) + "\n"


def _arguments(engine: str, argv: Sequence[str]) -> Iterator[str]:
    for _, words in parser.split(engine, argv):
        yield f"  {', '.join(map(_value, words))},"


def _table(name: str, table: Mapping[str, Any]) -> Iterator[str]:
    yield f"[{name}]"
    yield from _rows(table)
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from ("", f"[{name}.{key}]", *_rows(value))


def _rows(table: Mapping[str, Any]) -> Iterator[str]:
    for key, value in table.items():
        if not isinstance(value, dict) and value is not None:
            bare = key.replace("_", "").replace("-", "").isalnum() and key.isascii()
            yield f"{key if bare else _value(key)} = {_value(value)}"


def _value(value: Any) -> str:
    """A value as TOML, whose texts and lists are those of JSON."""
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)


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
