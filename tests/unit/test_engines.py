"""An engine is one object: nothing else in the package is decided by its name or by the class of a recipe."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import sm120kit
from sm120kit import engines
from sm120kit.core.errors import NotFound
from sm120kit.engines import Engine

SOURCE = Path(sm120kit.__file__).parent
OWN = {SOURCE / "engines" / f"{engine.name}.py" for engine in engines.all_engines()}
CLASS = re.compile(r"(Engine|Target|Recipe)")


def modules() -> Iterator[Path]:
    """The modules of the package but those of engines and their suites of checks, which run in an image."""
    for path in SOURCE.rglob("*.py"):
        if path not in OWN and "suites" not in path.parts and "data" not in path.parts:
            yield path


def test_no_module_compares_with_the_name_of_an_engine() -> None:
    names = {engine.name for engine in engines.all_engines()}
    found = {
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    }
    assert found == set()


def test_no_module_switches_on_the_class_of_a_recipe_or_target() -> None:
    switches = {
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("isinstance", "issubclass")
        and CLASS.search(ast.unparse(node.args[1]))
    }
    assert switches == set()


@pytest.mark.parametrize("engine", engines.all_engines(), ids=lambda engine: str(engine.name))
def test_every_engine_is_found_by_its_recipes(engine: Engine) -> None:
    assert engines.of_recipe(f"{engine.name}-1.0-variant") is engine is engines.find(engine.name)
    assert {"tensor_parallel", "context"} <= {*engine.options}


def test_unknown_engine_is_named_with_the_known_ones() -> None:
    with pytest.raises(NotFound, match="'llama'") as caught:
        engines.of_recipe("llama-1.0")
    assert all(engine.name in caught.value.hint for engine in engines.all_engines())
