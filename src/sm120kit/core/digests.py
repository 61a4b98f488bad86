"""sha256 of files and of values."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from sm120kit.core.records import json_default


def digest_of(value: object) -> str:
    """sha256 of a JSON-like value in canonical form."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=json_default)
    return hashlib.sha256(text.encode()).hexdigest()


def is_digest(text: str) -> bool:
    """Whether a text is a sha256 in hexadecimal."""
    return bool(re.fullmatch("[0-9a-f]{64}", text))


def file_sha256(path: Path) -> str:
    """sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
