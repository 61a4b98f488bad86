"""Read the text of a lockfile, of a recipe or of a base: JSON with sorted keys, byte-stable."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from sm120kit.core.errors import Mismatch
from sm120kit.core.outside import read_found
from sm120kit.core.record_files import record_json

T = TypeVar("T")


def read_locked(kind: type[T], path: Path) -> tuple[T, str]:
    """Read a lockfile as a ``kind``, and return its build id, the sha256 of its text in hexadecimal, as well.

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
    lock: T = _parse(kind, path, content)  # type: ignore[arg-type]
    return lock, hashlib.sha256(content).hexdigest()


@functools.lru_cache(maxsize=16)
def _parse(kind: type[Any], path: Path, content: bytes) -> Any:
    hint = f"write it again: sm120kit recipe lock {path.name.removesuffix('.lock.json')}"
    try:
        lock = TypeAdapter(kind).validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise Mismatch(f"{path} is not a lockfile: {where}{': ' * bool(where)}{first['msg']}", hint) from error
    if record_json(lock).encode() != content:
        raise Mismatch(f"{path} was edited: it has keys or spaces that `recipe lock` does not write", hint)
    return lock
