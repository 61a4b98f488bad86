"""Which sources made receipts that are older than the present sources, and what has changed since.

Receipts bind a result to the digest of the sources that made it. Moves and new names of errors change these digests without
changing what is computed: :func:`are_of_present_sources` compares the present sources with those of the commit that had the
digest.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from pathlib import Path

import pytest

from sm12x_lab.ptx import interposed, library
from sm120kit.core.digests import digest_of

ROOT = Path(__file__).parents[2]
COMMIT = "7eb1c7a136449a0ebb625a7fb8a725ab606c74d4"
"""The last commit in which the laboratory was a part of ``sm120kit``."""
BEFORE, AFTER = "src/sm120kit/kernels", "src/sm12x_lab"

REWRITER = tuple(f"ptx/{name}" for name in library.REWRITER)
INTERPOSER = ("ptx/driver_shim.c", "ptx/images.py", "ptx/interposed.py")
MADE_BY = {
    "696dcb774edbef273ec31f94ad031c9e09fa4dfcb84e748cd40503fb093d1d86": (COMMIT, BEFORE, REWRITER),
    "f044dbd7d63055d837bd98b8d12e4bf0d6907edfb8acacb72a07964d757967e3": (COMMIT, BEFORE, INTERPOSER),
    "e602ff6e1152872a46b938f9b53349b7bb132c446ec924b91dab1e17ad4bbbb2": ("5bc8d89", AFTER, REWRITER),
}
"""Commit, directory and files of the sources with a digest."""

_IMPORT = re.compile(r"^(?:from [\w.]+ )?import (?:\([^)]*\)|[^\n]*)\n", re.MULTILINE)
_ERRORS = re.compile(r"^from sm120kit\.core\.errors import (\([^)]*\)|[^\n]*)$", re.MULTILINE)
_RAISES = re.compile(r"^ +Raises:\n(?: {8}.*\n)+", re.MULTILINE)


def are_of_present_sources(digest: str) -> bool:
    """Whether sources with a digest compute what the present ones do; skips in a copy without their commit."""
    if digest in {*interposed.digests().values()}:
        return True
    commit, directory, files = MADE_BY[digest]
    before = {name: shown(os.path.normpath(f"{directory}/{name}"), commit) for name in files}
    raw = [[_name(name), hashlib.sha256(text.encode()).hexdigest()] for name, text in before.items()]
    assert digest_of(raw) == digest, "the commit has other sources"
    return all(meaning(text) == meaning((ROOT / AFTER / name).read_text()) for name, text in before.items())


def _name(name: str) -> str:
    """The name of a file in a digest."""
    return name.removeprefix("ptx/")


def meaning(text: str) -> str:
    """Sources without imports, names of errors and modules, lists of errors, and white space."""
    names = [name for found in _ERRORS.findall(text) for name in re.findall(r"\w+", found)]
    text = re.sub(r"\bsm120kit\.kernels\.(emulation|gpu_tests|ptx)\b", r"sm12x_lab.\1", text)
    text = _RAISES.sub("", _IMPORT.sub("", text))
    for name in names:
        text = re.sub(rf"\b{name}\b", "Error", text)
    return re.sub(r",(?=[)\]}])", "", re.sub(r"\s+", "", text))


def shown(path: str, commit: str = COMMIT) -> str:
    """A file of a commit; the test is skipped in a copy whose history lacks it."""
    done = subprocess.run(["git", "show", f"{commit}:{path}"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the history of this copy lacks {commit}")
    return done.stdout


def operators_before(name: str) -> str:
    """A program that made receipts of operators; since then the programs have become one library."""
    return shown(f"{BEFORE}/gpu_tests/operators/{name}")
