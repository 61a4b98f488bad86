"""Read and write the text of a lockfile: JSON with sorted keys, byte-stable."""

from __future__ import annotations

import hashlib
from pathlib import Path

from sm120kit.core.record_files import record_json
from sm120kit.recipes._locked_text import read_locked
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
    return read_locked(Lock, path)
