"""Write the parts of pages that follow from the code and the recipes: between ``<!-- NAME: ... -->`` and ``<!-- end -->``.

With ``--check`` nothing is written; the exit code is 1 if a page differs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

from sm120kit.bench.configured_rates import planned_rates
from sm120kit.recipes import configurations
from sm120kit.recipes.configurations import Configuration, Reference

ROOT = Path(__file__).parents[1]
HARDWARE = {"rtx-5090": "RTX 5090", "rtx-pro-6000": "RTX PRO 6000", "dgx-spark": "DGX Spark"}
COUNTS = {1: "One", 2: "Two", 4: "Four", 8: "Eight"}
NODES = " --nodes 192.168.100.10,192.168.100.11 --interface enp1s0f1np1 --print"
"""Addresses of two machines, the same as in docs/serve.md: prints the lines for each."""
DOUBTED = ("withdrawn", "not-found")


def main() -> None:
    differ = [page for page in BLOCKS if not _written(ROOT / page, "--check" not in sys.argv[1:])]
    if differ:
        sys.exit(f"python ci/page_blocks.py would change {', '.join(differ)}")


def _written(page: Path, write: bool) -> bool:
    """Whether the page's block is what the code gives, after it was written if ``write``."""
    name, make = BLOCKS[str(page.relative_to(ROOT))]
    before, start, rest = re.split(rf"(<!-- {name}: .* -->\n)", page.read_text())
    _, end, after = rest.partition("<!-- end -->")
    text = f"{before}{start}\n{make()}\n{end}{after}"
    if write:
        page.write_text(text)
    return page.read_text() == text


def drawn_imports() -> str:
    """A line for each package, the highest first, with what it imports and no other import of it leads to."""
    graph = imports()
    reached: dict[str, set[str]] = {}
    lines = []
    for name in TopologicalSorter({name: sorted(graph[name]) for name in sorted(graph)}).static_order():
        indirect = set().union(*(reached[imported] for imported in graph[name]))
        reached[name] = graph[name] | indirect
        lines.append(f"{name:<9} ─► {', '.join(sorted(graph[name] - indirect))}".rstrip(" ─►") + "\n")
    return f"```\n{''.join(reversed(lines))}```\n"


def imports() -> Mapping[str, set[str]]:
    """The packages that each package of sm120kit imports, and those that the laboratory imports."""
    graph = grimp.build_graph("sm120kit", "sm12x_lab", cache_dir=None)
    packages = {name for name in graph.find_children("sm120kit") if graph.find_children(name)}
    for name in (*packages, "sm12x_lab"):
        graph.squash_module(name)
    found = {name: graph.find_modules_directly_imported_by(name) & packages - {name} for name in (*packages, "sm12x_lab")}
    return {_short(name): {_short(imported) for imported in below} for name, below in found.items()}


def _short(name: str) -> str:
    return name.removeprefix("sm120kit.")


def models(kind: str) -> str:
    """A section for each number of GPUs of a kind, with its configurations; historical ones are named in a last line."""
    found = [one for one in map(configurations.load, configurations.names()) if f"x-{kind}" in one.name]
    sections: dict[int, list[Configuration]] = {}
    for configuration in found:
        if not configuration.historical:
            sections.setdefault(configuration.hardware.gpus, []).append(configuration)
    text = "\n".join("".join(_section(HARDWARE[kind], *section)) for section in sorted(sections.items()))
    old = [f"`{configuration.name}`" for configuration in found if configuration.historical]
    return f"{text}\nFor older engines, with their published figures: {', '.join(old)}.\n" if old else text


def _section(kind: str, gpus: int, found: list[Configuration]) -> Iterator[str]:
    nodes = NODES if found[0].hardware.nodes > 1 else ""
    yield f"## {COUNTS[gpus]} {kind}\n\n```\nsm120kit serve {found[0].name}{nodes}\n```\n\n"
    yield "| model | configuration | published, tok/s | expected, tok/s |\n|---|---|---|---|\n"
    for one in found:
        yield f"| {_model(one)} | `{one.name}` | {_published(one)} | {_expected(one)} |\n"


def _model(configuration: Configuration) -> str:
    """The checkpoint, without the organization, and its size."""
    size = f", {configuration.model.gigabytes:.0f} GB" if configuration.model.gigabytes else ""
    return configuration.model.repository.rpartition("/")[2] + size


def _figure(configuration: Configuration) -> Reference | None:
    """The first published figure that was not withdrawn; if possible one that was measured with what the configuration has."""
    figures = configuration.reference
    return min(figures, key=lambda figure: (figure.reproducibility in DOUBTED, bool(figure.differs)), default=None)


def _published(configuration: Configuration) -> str:
    """A figure, its concurrency and source; ``*`` if it was measured with what the configuration lacks."""
    figure = _figure(configuration)
    if figure is None:
        return "none"
    value = f"{figure.value:g}-{figure.highest:g}" if figure.highest else f"{figure.value:g}"
    concurrency = f" at concurrency {figure.concurrency}" if figure.concurrency > 1 else ""
    claim = f", {figure.reproducibility}" if figure.reproducibility in DOUBTED else ""
    return f"{value}{concurrency}{claim}{' *' if figure.differs else ''}{_source(figure.source)}"


def _source(text: str) -> str:
    """A link to the repository or site that a source begins with, at the named commit and file."""
    found = re.match(r"(?:github\.com/([\w.-]+/[\w.-]+)(?:@(\w+)(?: ([^\s,;]+\.\w+))?)?|([\w-]+\.[\w.-]+))(/[^\s,;]+)?", text)
    if found is None:
        return ""
    project, commit, file, site, path = found.groups("")
    address = f"github.com/{project}" if project else site
    below = f"/{'blob' if file else 'tree'}/{commit}{'/' * bool(file)}{file}" if commit else path
    label = project or site.removeprefix("www.") + (path if site == "github.com" else "")
    return f" ([{label}](https://{address}{below}))"


def _expected(configuration: Configuration) -> str:
    """The expected rate at that concurrency; with drafts, at acceptance rates 0 to 1."""
    figure = _figure(configuration)
    rates = planned_rates(configuration, concurrency=figure.concurrency if figure else 1)
    if rates is None:
        return "not modelled"
    least, most = f"{rates.expected_low:.0f}", f"{rates.expected_high:.0f}"
    return least if least == most else f"{least} to {most}"


BLOCKS: Mapping[str, tuple[str, Callable[[], str]]] = {
    "docs/architecture.md": ("imports", drawn_imports),
    **{f"docs/{kind}.md": ("configurations", partial(models, kind)) for kind in HARDWARE},
}
"""Pages with the name of their block and the function that makes it."""


if __name__ == "__main__":
    main()
