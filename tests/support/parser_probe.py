"""Print the options of an engine's argument parser and its answers to command lines; run by a Python that has the engine.

It reads ``{"parser": the source of Engine.parser, "lines": {name: [argument, ...]}}`` from stdin, and writes ``{"options":
[...], "answers": {name: text}}`` to stdout. The text is the parser's error message, empty for a command line that it accepts.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.abc
import importlib.machinery
import io
import json
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

Parse = Callable[[list[str]], object]


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import modules with these names that are not installed as mocks."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return MagicMock(name=spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in(*names: str) -> None:
    """Replace modules that are not installed."""
    sys.meta_path.append(StandIn(*names))


def option(action: argparse.Action, dataclass: type | None = None) -> dict[str, Any]:
    """An option as JSON: its names and the values that it accepts, those of a ``dataclass`` that is made of it later."""
    choices = None if action.choices is None else sorted(map(str, action.choices))
    found = {"names": list(action.option_strings), "nargs": action.nargs, "type": type_name(action.type), "choices": choices}
    known = dataclass or dataclass_of(action.type)
    return {**found, "keys": keys_of(known)} if known else found


def inner(kind: Any) -> list[Any]:
    """A function that converts a value, and those in its closure, the innermost last."""
    cells = [cell.cell_contents for cell in getattr(kind, "__closure__", None) or ()]
    called = next(filter(callable, cells), None)
    return [kind, *inner(called)] if called else [kind]


def dataclass_of(kind: Any) -> type | None:
    """The dataclass that a JSON object becomes, which is a default of the function; None for another one."""
    classes = (each for each in getattr(inner(kind)[-1], "__defaults__", None) or () if dataclasses.is_dataclass(each))
    return next((each for each in classes if isinstance(each, type)), None)


def keys_of(dataclass: Any) -> dict[str, list[str]]:
    """The keys of a JSON object, with the types in JSON or, after "=", the values that pydantic takes; none if not known."""
    decorators = getattr(dataclass, "__pydantic_decorators__", None)
    first = [each.info for each in decorators.field_validators.values() if each.info.mode != "after"] if decorators else []
    free = {name for info in first for name in info.fields}  # a validator of the engine converts them
    if decorators is None or any(each.info.mode != "after" for each in decorators.model_validators.values()):
        free = {field.name for field in dataclasses.fields(dataclass)}
    hints = typing.get_type_hints(dataclass, include_extras=True)
    names = sorted(field.name for field in dataclasses.fields(dataclass) if field.init)
    return {name: [] if free & {name, "*"} else json_types(hints[name]) for name in names}


def json_types(hint: Any) -> list[str]:
    """The types in JSON that pydantic takes for a type."""
    from pydantic import TypeAdapter

    try:
        schema = TypeAdapter(hint).json_schema()
    except Exception:  # of types that pydantic cannot describe
        return []
    found = list(flat(schema, schema.get("$defs", {})))
    return [] if "" in found else found


def flat(schema: dict[str, Any], defined: dict[str, Any]) -> Iterator[str]:
    """The types and values of a JSON schema, "" for others."""
    schema = defined[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    for each in schema.get("anyOf", ()):
        yield from flat(each, defined)
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if "anyOf" not in schema:
        yield from [f"={value}" for value in values] or [schema.get("type", "")]


def type_name(kind: Any) -> str:
    """The name of a function that converts a value, and of the innermost that it is made with: ``_optional_type int``."""
    names = [getattr(each, "__name__", "") for each in inner(kind)] if kind else []
    return " ".join(names[:1] + names[1:][-1:])


def main() -> None:
    given = json.load(sys.stdin)
    namespace: dict[str, Any] = {}
    exec(f"from __future__ import annotations\n{given['parser']}", namespace)
    with contextlib.redirect_stdout(sys.stderr):
        parser, parse = namespace["parser"](stand_in)
        answers = {name: answer(parse, argv) for name, argv in given["lines"].items()}
    actions = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    classes = parser._registries.get("dataclass", {})
    options = [option(each, next((classes[name] for name in each.option_strings if name in classes), None)) for each in actions]
    json.dump({"options": options, "answers": answers}, sys.stdout)


def answer(parse: Parse, argv: list[str]) -> str:
    """The parser's error message for a command line; empty if it accepts."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            parse(argv)
    except SystemExit as end:
        return " ".join(output.getvalue().partition("error: ")[2].split()) or f"exit code {end.code}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    main()
