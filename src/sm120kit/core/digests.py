"""sha256 of files and of values."""

import hashlib
import json
from pathlib import Path

from sm120kit.core.outside import open_found
from sm120kit.core.records import json_default


def digest_of(value: object) -> str:
    """sha256 of a JSON-like value in canonical form."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=json_default)
    return hashlib.sha256(text.encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """sha256 of a file's bytes."""
    with open_found(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
