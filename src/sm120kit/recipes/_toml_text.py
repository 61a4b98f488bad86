"""Write a recipe or a configuration as TOML, with the comments of the recipe that it is made from where they still apply."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

WIDTH = 130
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_VERSION = re.compile(r"\d+\.\d+\.\w+")
_INLINE_BELOW = ("modules", "groups", "from_source")
"""Tables in which a table of plain values is written in one line, if it fits."""


class Rows(list[Any]):
    """A list that is written in rows, each a line with its entries."""

    def __init__(self, rows: Iterable[Sequence[Any]]) -> None:
        self.rows = [tuple(row) for row in rows]
        super().__init__(chain.from_iterable(self.rows))


class Comments:
    """The comments above the lines of a recipe, and those at their ends.

    Those that mention a version are left out: they are about the release that the recipe is for. ``renamed`` are texts of the
    recipe with their replacements in the new one, ``above`` are comments above lines instead of those of the recipe.
    """

    def __init__(self, text: str = "", renamed: Mapping[str, str] = {}, above: Mapping[str, str] = {}) -> None:
        self._above: dict[str, list[str]] = {}
        self._behind: dict[str, str] = {}
        block: list[str] = []
        _, _, body = text.partition("\nedition")  # the comment above describes the release
        for line in body.splitlines()[1:]:
            stripped = line.strip()
            if stripped.startswith("#"):
                block.append(stripped)
                continue
            code, behind = _split(stripped)
            for old, new in renamed.items():
                code = code.replace(old, new)
            if block and code and not any(map(_VERSION.search, block)):
                self._above.setdefault(code, block)
            if behind and not _VERSION.search(behind):
                self._behind.setdefault(code, behind)
            block = []
        self._above |= {line: [f"# {comment}"] for line, comment in above.items()}

    def above(self, line: str) -> list[str]:
        """The comment above a line of the new recipe, which the first such line gets."""
        return self._above.pop(line.strip(), [])

    def behind(self, line: str) -> str:
        """The comment at the end of a line of the new recipe."""
        return self._behind.get(line.strip(), "")


def _split(line: str) -> tuple[str, str]:
    """A line of TOML and the comment at its end; a text with ``#`` counts as no comment."""
    match = re.fullmatch(r"""((?:[^"'#]|"[^"]*"|'[^']*')*?)\s*(#.*)?""", line)
    return (match[1], match[2] or "") if match else (line, "")


def write(data: Mapping[str, Any], head: str, comments: Comments) -> str:
    """The text of a recipe; ``head`` is the comment at its start."""
    lines: list[str] = []
    for line in _table((), data):
        indent = line[: len(line) - len(line.lstrip())]
        lines += [indent + comment for comment in comments.above(line)]
        behind = comments.behind(line)
        lines.append(f"{line}  {behind}" if behind else line)
    return "".join(f"# {line}\n" for line in head.splitlines()) + "\n".join(lines).strip() + "\n"


def _table(path: tuple[str, ...], table: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a table: its values, then the tables in it, each after an empty line."""
    below = {}
    for key, value in table.items():
        if _is_table(value) or _is_tables(value):
            if (line := _one_line(path, key, value)) is None:
                below[key] = value
            else:
                yield line
        else:
            yield from _value(key, value)
    for key, value in below.items():
        inner = (*path, key)
        name = ".".join(map(_key, inner))
        for entry in value if _is_tables(value) else [value]:
            has_values = not _is_table(entry) or any(not _is_table(v) or _one_line(inner, k, v) for k, v in entry.items())
            if has_values:
                yield ""
                yield f"[[{name}]]" if _is_tables(value) else f"[{name}]"
            yield from _table(inner, entry)


def _is_table(value: object) -> bool:
    return isinstance(value, dict)


def _is_tables(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_table, value))


def _one_line(path: tuple[str, ...], key: str, value: Any) -> str | None:
    """A table in one line, if it is of plain values, in a table of them, and short."""
    if path[:1] not in [(name,) for name in _INLINE_BELOW] or len(path) < 2 or not _is_table(value):
        return None
    if any(isinstance(entry, dict | list) for entry in value.values()):
        return None
    line = f"{_key(key)} = {{ {', '.join(f'{_key(k)} = {_plain(v)}' for k, v in value.items())} }}"
    return line if len(line) <= WIDTH else None


def _value(key: str, value: Any) -> Iterator[str]:
    if not isinstance(value, list):
        yield f"{_key(key)} = {_plain(value)}"
        return
    line = f"{_key(key)} = [{', '.join(map(_plain, value))}]"
    if len(line) <= WIDTH and key != "requires" and not isinstance(value, Rows):
        yield line
        return
    rows = value.rows if isinstance(value, Rows) else [(entry,) for entry in value]
    yield f"{_key(key)} = ["
    yield from (f"  {', '.join(map(_plain, row))}," for row in rows)
    yield "]"


def _plain(value: object) -> str:
    if isinstance(value, str) and "\\" in value and "'" not in value and "\n" not in value:
        return f"'{value}'"  # regular expressions
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # the one control character that JSON allows


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else json.dumps(key, ensure_ascii=False)
