"""Collect the source of the documentation site: docs/, other pages of the repository, and generated reference pages.

Links that work in the repository are rewritten to links between pages; other files that pages link to are copied.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
SITE = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "site").resolve()
OTHER_PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
    "patches/README.md": "patches.md",
    "src/sm12x_lab/README.md": "lab/index.md",
    "src/sm12x_lab/receipts/README.md": "lab/receipts.md",
    "tests/bench/README.md": "measurements/benchmarks.md",
}
"""Pages outside docs/, and their paths on the site. Links to the README lead to docs/index.md."""
LINK = re.compile(r"(\]\(|^\[[^]]+\]: )([^)#\s]*)(#[^)\s]*)?")
FENCE = re.compile(r"^\s*(```|~~~)")


def main() -> None:
    """Write the source; exit with a message that lists broken links, and differences between pages and navigation."""
    shutil.rmtree(SITE, ignore_errors=True)
    pages = {path: path.relative_to(ROOT / "docs") for path in sorted((ROOT / "docs").rglob("*.md"))}
    laboratory = ROOT / "src" / "sm12x_lab" / "docs"
    pages |= {path: Path("lab") / path.relative_to(laboratory) for path in sorted(laboratory.rglob("*.md"))}
    pages |= {ROOT / source: Path(target) for source, target in OTHER_PAGES.items() if (ROOT / source).is_file()}
    broken: list[str] = []
    for source, target in pages.items():
        if source != ROOT / "README.md":
            _write(target, "".join(_page(source, pages, broken)))
    for name, text in _reference():
        _write(Path("reference", name), text)
    shutil.copyfile(ROOT / "docs" / "site.css", SITE / "site.css")
    listed = set(_listed(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    written = {str(path.relative_to(SITE)) for path in SITE.rglob("*.md")}
    broken += [f"mkdocs.yml: nav lists {name}, which does not exist" for name in sorted(listed - written)]
    broken += [f"mkdocs.yml: nav lacks {name}" for name in sorted(written - listed)]
    if broken:
        sys.exit("\n".join(broken))


def _listed(nav: str | list[Any] | dict[str, Any]) -> Iterator[str]:
    """The pages of a navigation, at all levels."""
    if isinstance(nav, str):
        yield nav
    else:
        for below in nav.values() if isinstance(nav, dict) else nav:
            yield from _listed(below)


def _write(target: Path, text: str) -> None:
    path = SITE / target
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _page(source: Path, pages: Mapping[Path, Path], broken: list[str]) -> Iterator[str]:
    """The lines of a page with their links rewritten."""
    fenced = False
    for number, line in enumerate(source.read_text().splitlines(keepends=True), 1):
        fenced ^= bool(FENCE.match(line))
        if fenced:
            yield line
            continue

        def rewritten(link: re.Match[str], number: int = number) -> str:
            before, path, anchor = link[1], link[2], link[3] or ""
            if not path or re.match(r"[a-z]+:", path):
                return link[0]
            file = (source.parent / path).resolve()
            if not file.is_file():
                broken.append(f"{source.relative_to(ROOT)}:{number}: there is no file {path}")
                return link[0]
            target = pages.get(file) or _copied(file)
            return f"{before}{os.path.relpath(target, pages[source].parent)}{anchor}"

        yield LINK.sub(rewritten, line)


def _copied(path: Path) -> Path:
    """Copy a file of the repository to the site; returns its path there."""
    target = Path("files") / path.relative_to(ROOT)
    (SITE / target).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, SITE / target)
    return target


def _reference() -> Iterator[tuple[str, str]]:
    """Pages generated from the code, by name."""
    yield "cli.md", _cli()
    yield "releases.md", _releases()
    recipe = _output("-c", SCHEMA)
    yield "recipe.md", _schema("Recipe files", "What `sm120kit recipe check` accepts.", json.loads(recipe))
    result = (ROOT / "docs" / "result.schema.json").read_text()
    link = _copied(ROOT / "docs" / "result.schema.json")
    yield "result.md", _schema("Results", f"As JSON Schema: [{link.name}](../{link}).", json.loads(result))


def _output(*arguments: str) -> str:
    return subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True).stdout


def _cli() -> str:
    """Every command with its options, by Typer's documentation generator, but with complete summaries."""
    text = _output("-m", "typer", "sm120kit.cli", "utils", "docs", "--name", "sm120kit", "--title", "Command line")
    summaries = dict(re.findall(r"^#+ `(.+)`\n\n(.+)", text, re.MULTILINE))
    lines, group = [], "sm120kit"
    for line in text.splitlines():
        if heading := re.match(r"#+ `(.+)`", line):
            group = heading[1]
        if entry := re.fullmatch(r"\* `([a-z-]+)`: .*\.\.\.", line):
            line = f"* `{entry[1]}`: {summaries[f'{group} {entry[1]}']}"
        lines.append(f"{line}\n")
    return "".join(lines)


def _releases() -> str:
    """Every recipe with its state and its day, from the recipes, their lockfiles and the records of arguments."""
    from sm120kit import recipes
    from sm120kit.engines import parser
    from sm120kit.recipes import lockfile

    rows = []
    for name in reversed(recipes.names()):
        path, recipe = recipes.load_with_path(name)
        lock = lockfile.read(recipes.lock_path(path)) if recipes.lock_path(path).is_file() else None
        cells = (
            f"`{name}`",
            f"{recipe.engine} {recipe.version}",
            recipe.state if lock else f"{recipe.state}, not locked",
            (recipe.environment.as_of if recipe.environment else "") or "",
            recipe.flashinfer
            if recipe.delivers_image
            else ", ".join(f"{part.project} {part.version}" for part in recipe.inside),
            str(_patch_count(name)) if lock else "",
            ("yes" if parser.load(name) else "no") if recipe.delivers_image else "",
        )
        rows.append(f"| {' | '.join(cells)} |\n")
    return RELEASES + "".join(rows)


SCHEMA = """
import json
from pydantic import TypeAdapter
from sm120kit.recipes import Recipe
print(json.dumps(TypeAdapter(Recipe).json_schema(), indent=2))
"""


def _patch_count(recipe: str) -> int:
    """The number of patches for the versions of a recipe's sources."""
    from sm120kit.core.workspace import Workspace
    from sm120kit.patches.checkout import series_of
    from sm120kit.recipes.target import resolve
    from sm120kit.sources.run_options import Options

    target = resolve(recipe, Options(Workspace(Path())))
    sources = {source.pin: source for source in (*target.flashinfer.sources, *target.sources)}.values()
    return sum(source.has_version_of(patch) for source in sources for patch in series_of(source.pin, source.inside))


RELEASES = """# Releases

Every recipe with its state, from the recipes and lockfiles of this version. `verified`: an image passed its checks, without a
GPU; `resolved`: locked and planned; `kernels`: a FlashInfer recipe. *As of*: wheels that were uploaded on that day or later are
not in the environment. *Options*: whether the options of the engine's parser are recorded. Unverified on SM120.

| recipe | release | state | as of | FlashInfer or CUTLASS | patches | options |
|---|---|---|---|---|---|---|
"""


def _schema(title: str, summary: str, schema: Mapping[str, Any]) -> str:
    """A JSON Schema as tables: the record itself first, then the records in it."""
    definitions = dict(schema.get("$defs", {}))
    top = {schema["title"]: schema} if "properties" in schema else {}
    parts = [f"# {title}\n\n{summary}\n"]
    for name, record in {**top, **definitions}.items():
        parts.append(f"\n## {name}\n\n{record.get('description', '').replace('``', '`')}\n")
        if "enum" in record:
            parts.append("\nOne of " + ", ".join(f"`{value}`" for value in record["enum"]) + ".\n")
        if "properties" in record:
            parts.append("\n| key | type | required |\n|---|---|---|\n")
        for key, value in record.get("properties", {}).items():
            parts.append(f"| `{key}` | {_type(value)} | {'yes' if key in record.get('required', []) else 'no'} |\n")
    return "".join(parts)


def _type(value: Mapping[str, Any]) -> str:
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in value:
        return " or ".join(_type(part) for part in value["anyOf"])
    if "enum" in value or "const" in value:
        return ", ".join(f"`{json.dumps(part)}`" for part in value.get("enum", [value.get("const")]))
    if value.get("type") == "array":
        return f"list of {_type(value['items'])}" if "items" in value else "list"
    if value.get("type") == "object" and isinstance(value.get("additionalProperties"), dict):
        return f"table of {_type(value['additionalProperties'])}"
    pattern = f", `{value['pattern']}`" if "pattern" in value else ""
    return str(value.get("type", "any")) + pattern.replace("|", "\\|")


def _line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("``", "`")


if __name__ == "__main__":
    main()
