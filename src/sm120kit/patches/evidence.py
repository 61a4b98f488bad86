"""Stored proofs of patches, one JSON file each among the laboratory's receipts: which patch and which hunks each is for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from sm120kit.patches.diff import Problem
from sm120kit.patches.format import PLACEHOLDER, Patch

PROOFS = "src/sm12x_lab/receipts/patches"
"""The directory of proofs in a checkout."""

_NAMED = re.compile(r"\b(?:docs|src|tests)/[\w./-]*\w")


def path_of(root: Path, patch: str) -> Path:
    """The file of the proof of ``project/slug``, whose patch is below ``root``."""
    return root.parent / PROOFS / f"{patch}.json"


def problems(root: Path, patch: Patch) -> Iterator[Problem]:
    """Files of this repository that an ``Evidence`` trailer names and that are missing, or that prove other hunks.

    An installed copy has neither tests nor receipts, so that nothing is checked there.
    """
    is_checkout = any((root.parent / "tests").glob("*/test_*.py"))
    if patch.trailer("Evidence").startswith(PLACEHOLDER) or not is_checkout:
        return
    file = root / patch.project / f"{patch.slug}.patch"
    line = next((n for n, line in enumerate(patch.content.split(b"\n"), 1) if line.startswith(b"Evidence:")), 1)
    for path in _NAMED.findall(patch.trailer("Evidence")):
        if not (root.parent / path).exists():
            yield Problem(file, line, f"Evidence names {path}, which does not exist")
        elif root.parent / path == path_of(root, patch.name) and (stale := _stale(path_of(root, patch.name), patch)):
            yield Problem(file, line, f"{path} {stale}: sm120kit patch prove {patch.name} --write")


def _stale(path: Path, patch: Patch) -> str:
    """The reason why a file is no proof of a patch; empty if it is one."""
    try:
        proof = json.loads(path.read_bytes())
        proved, hunks = proof["patch"], proof["hunks_sha256"]
    except (OSError, ValueError, TypeError, KeyError):
        return "is not a proof"
    if proved != patch.name:
        return f"is a proof of {proved}"
    return "is a proof of other hunks than those of the patch" if hunks != patch.hunks_sha256 else ""
