"""Read and write the text of a lockfile: JSON with sorted keys, byte-stable."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from sm120kit.core.errors import Mismatch
from sm120kit.core.outside import read_found
from sm120kit.core.record_files import record_json
from sm120kit.recipes.recipe_records import Lock


def text(lock: Lock) -> str:
    """The text of a lock's file."""
    return record_json(lock)


def build_id(lock: Lock) -> str:
    """The build id: the sha256 of the lockfile, in hexadecimal."""
    return hashlib.sha256(text(lock).encode()).hexdigest()


def read(path: Path) -> Lock:
    """Read a lockfile. See :func:`read_with_build_id`."""
    return read_with_build_id(path)[0]


def read_with_build_id(path: Path) -> tuple[Lock, str]:
    """Read a lockfile and return its build id as well.

    Raises:
        Mismatch: the file does not exist, or its text is not what ``recipe lock`` writes.
    """
    name = path.name.removesuffix(".lock.json")
    try:
        content = read_found(path)
    except FileNotFoundError as error:
        raise Mismatch(f"{name} is not locked: there is no {path}", f"lock it: sm120kit recipe lock {name}") from error
    except OSError as error:
        raise Mismatch(f"{path} cannot be read: {error.strerror}", f"lock it: sm120kit recipe lock {name}") from error
    return _parse(path, content)


@functools.lru_cache(maxsize=8)
def _parse(path: Path, content: bytes) -> tuple[Lock, str]:
    name = path.name.removesuffix(".lock.json")
    try:
        lock = TypeAdapter(Lock).validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise Mismatch(
            f"{path} is not a lockfile: {where}{': ' * bool(where)}{first['msg']}",
            f"write it again: sm120kit recipe lock {name}",
        ) from error
    if text(lock).encode() != content:
        raise Mismatch(
            f"{path} was edited: it has keys or spaces that `recipe lock` does not write",
            f"write it again: sm120kit recipe lock {name}",
        )
    return lock, hashlib.sha256(content).hexdigest()
