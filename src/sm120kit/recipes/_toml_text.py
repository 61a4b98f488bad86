"""Write a recipe or a configuration as TOML that is made to be edited."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

WIDTH = 130
_BARE = re.compile(r"[A-Za-z0-9_-]+")


class Rows(list[Any]):
    """A list that is written in rows, each a line with its entries."""

    def __init__(self, rows: Iterable[Sequence[Any]]) -> None:
        self.rows = [tuple(row) for row in rows]
        super().__init__(chain.from_iterable(self.rows))


def write(data: Mapping[str, Any], head: str) -> str:
    """The text of a recipe or a configuration; ``head`` is the comment at its start."""
    lines = _table((), data)
    return "".join(f"# {line}\n" for line in head.splitlines()) + "\n".join(lines).strip() + "\n"


def _table(path: tuple[str, ...], table: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a table: its values, then the tables in it, each after an empty line."""
    below = {}
    for key, value in table.items():
        if _is_table(value) or _is_tables(value):
            below[key] = value
        else:
            yield from _value(key, value)
    for key, value in below.items():
        inner = (*path, key)
        name = ".".join(map(_key, inner))
        for entry in value if _is_tables(value) else [value]:
            if _is_tables(value) or not all(map(_is_table, entry.values())):
                yield ""
                yield f"[[{name}]]" if _is_tables(value) else f"[{name}]"
            yield from _table(inner, entry)


def _is_table(value: object) -> bool:
    return isinstance(value, dict)


def _is_tables(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_table, value))


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
