"""Digests in receipts of the time when the laboratory's modules were part of ``sm120kit``.

Receipts bind a result to the sources of the program that made it. The move to ``sm12x_lab`` changed only import statements and
names of modules in docstrings, which :func:`moved_only` shows against the commit before it.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMIT = "7eb1c7a136449a0ebb625a7fb8a725ab606c74d4"
"""The last commit before the move, whose sources the receipts' digests are of."""

MOVED = {
    "696dcb774edbef273ec31f94ad031c9e09fa4dfcb84e748cd40503fb093d1d86":
    "e602ff6e1152872a46b938f9b53349b7bb132c446ec924b91dab1e17ad4bbbb2",
    "f044dbd7d63055d837bd98b8d12e4bf0d6907edfb8acacb72a07964d757967e3":
    "c383074096f210800b4320f184337d480a99c92c6389402103e2c2edea7c4d2b",
}  # fmt: skip
"""The digest of the same sources after the move, by that before it."""

FILES = {
    "gpu_tests/cpp/block_scaled_mma.cuh": "kernels/gpu_tests/cpp/block_scaled_mma.cuh",
    **{
        f"ptx/{name}": f"kernels/ptx/{name}"
        for name in (
            *("functions.cu", "forms.py", "library.py", "model.py", "rewrite.py", "selftest.py", "syntax.py"),
            *("driver_shim.c", "images.py", "interposed.py"),
        )
    },
}
"""The files of both digests below ``src/sm12x_lab``, and where they were below ``src/sm120kit``."""

_IMPORT = re.compile(r"^(?:from [\w.]+ )?import (?:\([^)]*\)|[^\n]*)\n", re.MULTILINE)


def of_present_sources(digest: str) -> str:
    """The digest that the present sources must have for a receipt with ``digest`` to be of them."""
    return MOVED.get(digest, digest)


def moved_only(before: str, after: str) -> bool:
    """Whether two versions of a module differ in import statements and the name of its package only."""
    before = re.sub(r"\bsm120kit\.kernels\.(emulation|gpu_tests|ptx)\b", r"sm12x_lab.\1", before)
    return _IMPORT.sub("", before) == _IMPORT.sub("", after)


def shown(path: str) -> str:
    """A file of that commit; the test is skipped in a copy whose history lacks it."""
    done = subprocess.run(["git", "show", f"{COMMIT}:{path}"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("the history of this copy lacks the commit before the move")
    return done.stdout


def operators_before(name: str) -> str:
    """A program that made receipts of operators; since then the programs have become one library."""
    return shown(f"src/sm120kit/kernels/gpu_tests/operators/{name}")
