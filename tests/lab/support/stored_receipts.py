"""Whether a stored receipt of ``verify kernels`` is evidence for the present programs and series."""

from __future__ import annotations

import json
from pathlib import Path

from sm12x_lab.gpu_tests.programs import sources_digest
from sm12x_lab.gpu_tests.receipt import FORMAT
from sm12x_lab.gpu_tests.running import RunOutcome
from sm120kit.patches import Patch


def is_compiled(patch: Patch) -> bool:
    """Whether a patch changes what programs compile: any file but FlashInfer's Python; flashinfer/jit generates sources."""
    return any(not file.path.startswith("flashinfer/") or file.path.startswith("flashinfer/jit/") for file in patch.files)


def stale(path: Path, *trees: str) -> list[str]:
    """Why a receipt is no evidence for the present programs and one of the git tree ids; empty if it is.

    They are of the whole series, and of its patches that :func:`is_compiled`.
    """
    receipt = json.loads(path.read_text())
    problems = []
    if receipt["format"] != FORMAT:
        problems.append(f"format {receipt['format']}, not {FORMAT}")
    if receipt["sources"] != sources_digest():
        problems.append("the verification programs or their seeded faults have changed")
    if receipt["tree"] not in trees:
        results = " and ".join(tree[:12] for tree in trees)
        problems.append(f"it is of tree {receipt['tree'][:12]}; the series results in {results}")
    if receipt["only"] or receipt["quick"]:
        problems.append("it covers a part of the matrix")
    failed = [row["name"] for row in receipt["configurations"] if row["verdict"] != RunOutcome.PASS and not row["excused"]]
    failed += [row["instruction"] for row in receipt["instructions"] if row["verdict"] != RunOutcome.PASS]
    if failed or not (receipt["configurations"] and receipt["instructions"]):
        problems.append(f"it did not pass: {', '.join(failed) or 'nothing was run'}")
    elif not receipt["passed"]:
        problems.append("it did not pass: its field passed is false")
    missed = [fault["name"] for fault in receipt["planted"] if fault["missed"] or not fault["seen"]]
    if missed or not receipt["planted"]:
        problems.append(f"seeded faults were not detected: {', '.join(missed) or 'none was seeded'}")
    return problems
