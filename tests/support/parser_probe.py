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
from collections.abc import Callable, Sequence
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


def keys_of(dataclass: Any) -> dict[str, Any]:
    """The keys of a JSON object, each with the JSON schema of its values; none if that is not known.

    A validator of the engine before pydantic's converts some. If samples of all types are accepted as without it, it counts for
    nothing; else the types of which all samples are refused are left out.
    """
    decorators = getattr(dataclass, "__pydantic_decorators__", None)
    first = [each.info for each in decorators.field_validators.values() if each.info.mode != "after"] if decorators else []
    free = {name for info in first for name in info.fields}
    if decorators is None or "*" in free or any(each.info.mode != "after" for each in decorators.model_validators.values()):
        free = {field.name for field in dataclasses.fields(dataclass)}
    hints = typing.get_type_hints(dataclass, include_extras=True)
    known = getattr(dataclass, "__pydantic_fields__", {})
    required = {name: tuple(known[name].metadata) if name in known else () for name in hints}
    names = sorted(field.name for field in dataclasses.fields(dataclass) if field.init)
    return {
        name: schema(hint) if name not in free or is_plain(dataclass, name, hint) else tried(dataclass, name)
        for name in names
        for hint in [typing.Annotated[(hints[name], None, *required[name])]]
    }


def schema(hint: Any) -> dict[str, Any]:
    """The JSON schema of a type, empty for one that pydantic cannot describe."""
    from pydantic import TypeAdapter

    try:
        return short(TypeAdapter(hint).json_schema())
    except Exception:  # of types that pydantic cannot describe
        return {}


KEPT = {"$defs", "$ref", "anyOf", "enum", "const", "type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
KEPT |= {"items", "prefixItems", "minItems", "maxItems", "properties", "required", "additionalProperties"}
"""Keywords of JSON schemas that decide what is accepted."""


def short(table: dict[str, Any]) -> dict[str, Any]:
    """A JSON schema without titles, defaults and texts."""

    def inside(key: str, value: Any) -> Any:
        if key in ("properties", "$defs"):
            return {name: short(each) for name, each in value.items()}
        if isinstance(value, list):
            return [short(each) if isinstance(each, dict) else each for each in value]
        return short(value) if isinstance(value, dict) else value

    return {key: inside(key, value) for key, value in table.items() if key in KEPT}


SAMPLES: dict[str, list[Any]] = {
    "null": [None],
    "boolean": [True, False],
    "integer": [*range(-1, 18), *(2**power for power in range(5, 32)), 100, 1000, 10**6],
    "number": [0.5, 1.5, -0.5, 1e-6, 1e6],
    "string": ["text", "a,b", "a.b", "A", "a b"],
    "array": [[], [1], [2, 4], ["a"], [True], [None], [{}], [[1]]],
    "object": [{}, {"a": 1}, {"a": "b"}, {"a": {}}, {"a": []}],
}
"""Values of each type in JSON."""


def tried(dataclass: Any, name: str) -> dict[str, Any]:
    """The schema of a key's values by those that are refused: a type of which all are is left out."""
    taken = [kind for kind, values in SAMPLES.items() if not all(is_refused(dataclass, name, value) for value in values)]
    return {} if len(taken) in (0, len(SAMPLES)) else {"anyOf": [{"type": kind} for kind in taken]}


def is_plain(dataclass: Any, name: str, hint: Any) -> bool:
    """Whether a key takes of all samples what its type does."""
    from pydantic import TypeAdapter

    try:
        alone = TypeAdapter(hint)
    except Exception:  # of types that pydantic cannot describe
        return False

    def taken(value: Any) -> bool:
        try:
            alone.validate_json(json.dumps(value))
        except Exception:
            return False
        return True

    values = [value for values in SAMPLES.values() for value in values] + ["1", "0", "true", "", -2, 2**70]
    return all(taken(value) != is_refused(dataclass, name, value) for value in values)


def is_refused(dataclass: Any, name: str, value: Any) -> bool:
    """Whether pydantic refuses a value for its type: not the engine, which may accept it with other keys."""
    from pydantic import ValidationError

    try:
        dataclass.__pydantic_validator__.validate_json(json.dumps({name: value}))
    except ValidationError as error:
        own = [each for each in error.errors() if each["loc"][:1] == (name,)]
        return any(each["type"] not in ("value_error", "assertion_error", "missing") for each in own)
    except Exception:
        return False
    return False


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
