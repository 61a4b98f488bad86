"""Draw which packages import which, from the imports in the code; ``--write`` puts the drawing into docs/architecture.md."""

from __future__ import annotations

import re
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
BLOCK = re.compile(r"(?<=<!-- imports: python ci/import_graph.py --write -->\n\n```\n).*?(?=```\n)", re.DOTALL)


def main() -> None:
    text = drawing(imports())
    if "--write" in sys.argv[1:]:
        PAGE.write_text(BLOCK.sub(text, PAGE.read_text(), count=1))
    sys.stdout.write(text)


def imports() -> dict[str, set[str]]:
    """The packages that each package of sm120kit imports, and those that the laboratory imports."""
    graph = grimp.build_graph("sm120kit", "sm12x_lab", cache_dir=None)
    packages = [name for name in graph.find_children("sm120kit") if graph.find_children(name)]
    for name in (*packages, "sm12x_lab"):
        graph.squash_module(name)
    found = {name: graph.find_modules_directly_imported_by(name) & {*packages} - {name} for name in (*packages, "sm12x_lab")}
    return {_short(name): {_short(imported) for imported in below} for name, below in found.items()}


def _short(name: str) -> str:
    return name.removeprefix("sm120kit.")


def drawing(graph: dict[str, set[str]]) -> str:
    """A line for each package, the highest first, with what it imports and no other import of it leads to."""
    reached: dict[str, set[str]] = {}
    lines = []
    for name in TopologicalSorter({name: sorted(graph[name]) for name in sorted(graph)}).static_order():
        indirect = set().union(*(reached[imported] for imported in graph[name]))
        reached[name] = graph[name] | indirect
        lines.append(f"{name:<9} ─► {', '.join(sorted(graph[name] - indirect))}".rstrip(" ─►") + "\n")
    return "".join(reversed(lines))


if __name__ == "__main__":
    main()
