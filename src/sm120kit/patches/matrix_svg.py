"""Draw the drift matrix as SVG: a row for each patch, a column for each release. The same matrix gives the same bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from xml.sax.saxutils import escape

from sm120kit.core.state import write_atomic
from sm120kit.patches.records import DriftCell, PatchState, ReleaseDrift

CELL, LEFT, HEAD, GAP = 18, 250, 96, 28
"""Pixels: the side of a cell, the column of names, the heads of columns, and the space between two matrices."""

_STYLES = {
    "applies": ("#1a7f4b", "#ffffff", ""),
    "offset": ("#7cc99b", "#123524", "±"),
    "already upstream": ("#2a6fb0", "#ffffff", "="),
    "conflicts": ("#c0392b", "#ffffff", "x"),
    "not for this version, applies": ("#ffffff", "#1a7f4b", "○"),
    "not for this version, offset": ("#ffffff", "#1a7f4b", "±"),
    "not for this version, already upstream": ("#ffffff", "#2a6fb0", "="),
    "not for this version, conflicts": ("#ededed", "#777777", "x"),
}
"""Fill, colour and sign of each state."""
_VARIANT = ("#ededed", "#777777", "·")
_ERROR = ("#fbe3a2", "#6b4e00", "!")

_LEGEND = {**_STYLES, "another variant is for this version": _VARIANT, "release not available": _ERROR}


def write(path: Path, rows: Sequence[ReleaseDrift]) -> None:
    """Draw the releases of each project from left to right, the oldest first."""
    parts: list[str] = []
    width, y = 0, 0
    for _, group in groupby(rows, lambda row: row.project):
        releases = list(group)
        names = list(dict.fromkeys((cell.project, cell.slug) for row in releases for cell in row.cells))
        parts += [*_heads(releases, y), *_versions(releases, y + HEAD)]
        y += CELL * len(_inside(releases))
        parts += _states(releases, names, y + HEAD)
        width = max(width, LEFT + CELL * len(releases) + 60)
        y += HEAD + CELL * len(names) + GAP
    legend = list(_legend(y))
    width, height = max(width, 2 * LEFT + 200), y + CELL * ((len(_LEGEND) + 1) // 2) + 8
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    lines = [f'{head} font-family="sans-serif" font-size="11">', f'<rect width="{width}" height="{height}" fill="#ffffff"/>']
    write_atomic(path, "\n".join([*lines, *parts, *legend, "</svg>", ""]).encode())


def _inside(releases: Sequence[ReleaseDrift]) -> list[str]:
    """The projects inside the sdists."""
    return list(dict.fromkeys(cell.project for row in releases for cell in row.cells if cell.project != row.project))


def _heads(releases: Sequence[ReleaseDrift], top: int) -> Iterator[str]:
    yield f'<text x="8" y="{top + HEAD - 6}" font-weight="bold">{escape(releases[0].project)}</text>'
    for column, row in enumerate(releases):
        x, y = LEFT + CELL * column + 13, top + HEAD - 6
        yield f'<text x="{x}" y="{y}" transform="rotate(-60 {x} {y})">{escape(row.version)}</text>'


def _versions(releases: Sequence[ReleaseDrift], top: int) -> Iterator[str]:
    """A line for each project inside the sdists, with a bar for each of its versions."""
    for line, project in enumerate(_inside(releases)):
        y, column = top + CELL * line, 0
        yield f'<text x="8" y="{y + 13}">{escape(project)} inside</text>'
        versions = [next((cell.version for cell in row.cells if cell.project == project), "") for row in releases]
        for version, group in groupby(versions):
            width, x = CELL * len(list(group)), LEFT + CELL * column
            if version:
                yield f'<path d="M{x + 1} {y + CELL - 2}h{width - 2}" stroke="#777777"/>'
                yield f'<text x="{x + 3}" y="{y + 13}">{escape(version)}</text>'
            column += width // CELL


def _states(releases: Sequence[ReleaseDrift], names: Sequence[tuple[str, str]], top: int) -> Iterator[str]:
    for column, row in enumerate(releases):
        if row.error:
            yield from _square(LEFT + CELL * column, top, _ERROR, f"{row.project} {row.version}: {row.error}")
    for line, (project, slug) in enumerate(names):
        y = top + CELL * line
        yield f'<text x="8" y="{y + 13}">{escape(f"{project}/{slug}")}</text>'
        for column, row in enumerate(releases):
            for cell in row.cells:
                if (cell.project, cell.slug) == (project, slug):
                    title = f"{project}/{slug}, {row.project} {row.version}"
                    title += f" ({cell.project} {cell.version})" if cell.project != row.project else ""
                    yield from _square(LEFT + CELL * column, y, _style(cell), f"{title}: {cell.label}")


def _style(cell: DriftCell) -> tuple[str, str, str]:
    return _VARIANT if cell.variant and cell.state is PatchState.NOT_FOR_THIS_VERSION else _STYLES[cell.label]


def _square(x: int, y: int, style: tuple[str, str, str], title: str) -> Iterator[str]:
    fill, colour, sign = style
    yield f'<g><title>{escape(title)}</title><rect x="{x + 1}" y="{y + 1}" width="{CELL - 2}" height="{CELL - 2}" rx="2"'
    yield f' fill="{fill}" stroke="{colour if fill == "#ffffff" else fill}"/>'
    if sign:
        yield f'<text x="{x + CELL // 2}" y="{y + 13}" text-anchor="middle" fill="{colour}">{sign}</text>'
    yield "</g>"


def _legend(top: int) -> Iterator[str]:
    for number, (name, style) in enumerate(_LEGEND.items()):
        x, y = 8 + (LEFT + 90) * (number % 2), top + CELL * (number // 2)
        yield from _square(x, y, style, name)
        yield f'<text x="{x + CELL + 6}" y="{y + 13}">{escape(name)}</text>'
