"""Stored proofs of patches among the laboratory's receipts: a JSON file for each patch, with a proof for each recipe."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sm120kit.core.data_roots import built_in_below
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
    """The file of the proofs of ``project/slug``, whose patch is below ``root``: in a user's repository, beside the patch."""
    return (root if built_in_below(root) else root.parent / PROOFS) / f"{patch}.json"


def problems(root: Path, patch: Patch) -> Iterator[Problem]:
    """Files of this repository that an ``Evidence`` trailer names and that are missing, or that prove other hunks."""
    if not _is_checked(root, patch):
        return
    for path in _NAMED.findall(patch.trailer("Evidence")):
        if not (root.parent / path).exists():
            yield _problem(root, patch, f"Evidence names {path}, which does not exist")
        elif root.parent / path == path_of(root, patch.name) and (stale := _stale(path_of(root, patch.name), patch)):
            yield _problem(root, patch, f"{path} {stale}")


def unproven(root: Path, patch: Patch, recipe: str) -> Iterator[Problem]:
    """What shows that a patch is not proved on a recipe: no proof of a patch with probes, no test of any other patch."""
    if not _is_checked(root, patch):
        return
    if not patch.probes:
        if not any(path.startswith("tests/") for path in _NAMED.findall(patch.trailer("Evidence"))):
            yield _problem(root, patch, "has neither a probe nor a test as evidence")
    elif recipe not in {proof.get("recipe") for proof in _documents(path_of(root, patch.name))}:
        yield _problem(root, patch, f"has no proof on {recipe}, which is built by default: {_remedy(patch, recipe)}")


def _is_checked(root: Path, patch: Patch) -> bool:
    """Whether the evidence of a patch can be checked: an installed copy has neither tests nor receipts."""
    is_checkout = any((root.parent / "tests").glob("*/test_*.py"))
    return is_checkout and not patch.trailer("Evidence").startswith(PLACEHOLDER)


def _problem(root: Path, patch: Patch, text: str) -> Problem:
    numbered = enumerate(patch.content.split(b"\n"), 1)
    line = next((number for number, line in numbered if line.startswith(b"Evidence:")), 1)
    return Problem(root / patch.project / f"{patch.slug}.patch", line, text)


def _remedy(patch: Patch, recipe: str) -> str:
    return f"sm120kit patch prove {patch.name} --recipe {recipe} --code --write"


def _documents(path: Path) -> list[dict[str, Any]]:
    """The proofs in a file; none if it has none."""
    try:
        proofs = parse_json(read_found(path))["proofs"]
        return [proof for proof in proofs if isinstance(proof, dict)]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def _stale(path: Path, patch: Patch) -> str:
    """The reason why a file has no proofs of a patch; empty if all are."""
    proofs = _documents(path)
    reasons = ((proof, _not_a_proof(proof, patch)) for proof in proofs)
    found = next((f"{reason}: {_remedy(patch, str(proof.get('recipe')))}" for proof, reason in reasons if reason), "")
    return found if proofs else "has no proof"


def _not_a_proof(proof: Mapping[str, Any], patch: Patch) -> str:
    if {"patch", "hunks_sha256", "recipe"} - proof.keys():
        return "is not a proof"
    if proof["patch"] != patch.name:
        return f"is a proof of {proof['patch']}"
    if proof["hunks_sha256"] != patch.hunks_sha256:
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
