"""Records as JSON files."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sm120kit.core.atomic_writes import write_atomic
from sm120kit.core.errors import BadRecord
from sm120kit.core.outside import MAX_INPUT_BYTES, read_input
from sm120kit.core.records import json_text
from sm120kit.core.secrets import masked_json

if TYPE_CHECKING:
    from pydantic import ValidationError

T = TypeVar("T")


def record_json(record: object) -> str:
    """A record in its form on disk: sorted, indented, with a trailing newline."""
    return json_text(record, sort_keys=True) + "\n"


def write_record(path: Path, record: object) -> None:
    """Write a record atomically, without secrets."""
    document = masked_json(record_json(record))
    if r"\ud" in document:  # half of a character, as servers send it, which readers of JSON refuse
        document = json.dumps(json.loads(document), indent=2, ensure_ascii=False) + "\n"
    write_atomic(path, document.encode(errors="replace"))


def read_record(kind: type[T], path: Path, name: str = "", limit: int = MAX_INPUT_BYTES) -> T:
    """Read a record of at most ``limit`` bytes as its dataclass. Errors call it ``name`` instead of the name of the class.

    Raises:
        BadRecord: it is damaged, or was written by another version.
        OSError: it cannot be read.
    """
    from pydantic import ValidationError

    try:
        record: T = _adapter(kind).validate_json(read_input(path, limit))  # type: ignore[arg-type]  # a class is hashable
    except ValidationError as error:
        raise BadRecord(
            f"{path} is not {name or f'a {kind.__name__} record'}: {first_problem(error)}",
            "it is damaged or of another version: remove it, and the work that it records is done again",
        ) from error
    return record


def first_problem(error: ValidationError) -> str:
    """The first of pydantic's problems, with its key."""
    first = error.errors()[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))


@functools.cache
def _adapter(kind: type) -> Any:
    """The validator of a record; it takes longer to make than to use."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
