"""Print the options of an engine's argument parser and its answers to command lines; run by a Python that has the engine.

It reads ``{"parser": the source of Engine.parser, "lines": {name: [argument, ...]}}`` from stdin, and writes ``{"options":
[...], "answers": {name: text}}`` to stdout. The text is the parser's error message, empty for a command line that it accepts.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.abc
import importlib.machinery
import io
import json
import sys
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


def option(action: argparse.Action) -> dict[str, Any]:
    """An option as JSON: its names and the values that it accepts."""
    kind = getattr(action.type, "__name__", "") if action.type else ""
    choices = None if action.choices is None else sorted(map(str, action.choices))
    return {"names": list(action.option_strings), "nargs": action.nargs, "type": kind, "choices": choices}


def main() -> None:
    given = json.load(sys.stdin)
    namespace: dict[str, Any] = {}
    exec(f"from __future__ import annotations\n{given['parser']}", namespace)
    with contextlib.redirect_stdout(sys.stderr):
        parser, parse = namespace["parser"](stand_in)
        answers = {name: answer(parse, argv) for name, argv in given["lines"].items()}
    options = [option(action) for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    json.dump({"options": options, "answers": answers}, sys.stdout)


def answer(parse: Parse, argv: list[str]) -> str:
    """The parser's error message for a command line; empty if it accepts."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            parse(argv)
    except SystemExit:
        return output.getvalue().strip().splitlines()[-1].partition("error: ")[2]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    main()
