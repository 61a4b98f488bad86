"""The programs that made receipts of operators before they became one library, and the receipts of earlier rewriters."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from sm12x_lab import RECEIPTS
from sm12x_lab.ptx import interposed

ROOT = Path(__file__).parents[3]
COMMIT = "7eb1c7a136449a0ebb625a7fb8a725ab606c74d4"
"""The last commit in which the laboratory was a part of ``sm120kit``."""
BEFORE = "src/sm120kit/kernels"

_EARLIER = re.compile(r"^\| `([\w./-]+\.json)` \| `([0-9a-f]{8})` \|", re.MULTILINE)


def earlier_rewriters() -> dict[str, str]:
    """Receipts that the README lists as made by an earlier rewriter, and the first digits of its digest."""
    return dict(_EARLIER.findall((RECEIPTS / "README.md").read_text()))


def made_by_others() -> dict[str, str]:
    """Receipts that another rewriter or preloaded driver than the present one made, and the first digits of the rewriter."""
    present, found = interposed.digests(), {}
    for path in RECEIPTS.rglob("*.json"):
        record = json.loads(path.read_text())
        if any(record.get(name, digest) != digest for name, digest in present.items()):
            found[str(path.relative_to(RECEIPTS))] = record["rewriter"][:8]
    return found


def shown(path: str, commit: str = COMMIT) -> str:
    """A file of a commit; the test is skipped in a copy whose history lacks it."""
    done = subprocess.run(["git", "show", f"{commit}:{path}"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the history of this copy lacks {commit}")
    return done.stdout


def operators_before(name: str) -> str:
    """A program that made receipts of operators; since then the programs have become one library."""
    return shown(f"{BEFORE}/gpu_tests/operators/{name}")
