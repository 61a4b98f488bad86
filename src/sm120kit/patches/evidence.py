"""Stored proofs of patches, one JSON file each among the laboratory's receipts: which patch and which hunks each is for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sm120kit.core.outside import parse_json, read_found
from sm120kit.patches.diff import Problem
from sm120kit.patches.format import PLACEHOLDER, Patch

PROOFS = "src/sm12x_lab/receipts/patches"
"""The directory of proofs in a checkout."""

NOT_COMPARED = "no effect seen, code not compared"
NO_EFFECTS = (NOT_COMPARED, "no effect")
"""The effects of a probe on which the patch has none, as a proof names them."""

NOT_CHECKED = "not checked"

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
        proof = parse_json(read_found(path))
        proved, hunks = proof["patch"], proof["hunks_sha256"]
    except (OSError, ValueError, TypeError, KeyError):
        return "is not a proof"
    if proved != patch.name:
        return f"is a proof of {proved}"
    if hunks != patch.hunks_sha256:
        return "is a proof of other hunks than those of the patch"
    return next(gaps(proof), "")


def gaps(proof: Mapping[str, Any]) -> Iterator[str]:
    """What a proof, as its document, leaves open: that nothing differs, or what a probe requests and was not compared."""
    try:
        results = [(result["probe"], result["below"], result["above"], {*result["effects"]}) for result in proof["results"]]
        if not any(effects - set(NO_EFFECTS) for *_, effects in results):
            yield "shows no effect of the patch"
        for probe, below, above, effects in results:
            if probe["code"] and NOT_COMPARED in effects:
                yield f"does not compare the machine code of probe {probe['text']!r}, which is compiled with --code"
            compiles = not (below["error"] or above["error"])
            if probe["numbers"] and compiles and NOT_CHECKED in (below["numbers"], above["numbers"]):
                yield f"does not compare the numbers of probe {probe['text']!r}"
    except (TypeError, KeyError):
        yield "is not a proof"
