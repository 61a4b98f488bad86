"""A class name is unique in the package, so that a search for it finds one definition."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import sm120kit

SOURCE = Path(sm120kit.__file__).parent


def test_each_class_name_is_defined_once() -> None:
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for path in SOURCE.rglob("*.py"):
        if "data" not in path.parts:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    homes[node.name].append(str(path.relative_to(SOURCE)))
    assert len(homes) > 100
    assert {name: sorted(paths) for name, paths in homes.items() if len(paths) > 1} == {}
