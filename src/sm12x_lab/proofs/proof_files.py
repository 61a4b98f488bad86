"""Read, write and compare proofs, whose bytes do not depend on machine or time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from sm12x_lab.proofs.effects import compare
from sm12x_lab.proofs.proof_records import PatchProof, PatchProofs, ProbeComparison
from sm120kit.core.record_files import read_record, record_json
from sm120kit.kernels.kernel_records import NumericStatus


def read(path: Path) -> tuple[PatchProof, ...]:
    """The proofs of a patch in a file, one for each recipe; none if the file does not exist."""
    return read_record(PatchProofs, path).proofs if path.is_file() else ()


def on(proofs: Iterable[PatchProof], recipe: str) -> PatchProof | None:
    """The proof for a recipe."""
    return next((proof for proof in proofs if proof.recipe == recipe), None)


def text(proof: PatchProof) -> str:
    """A proof as JSON."""
    return record_json(proof)


def file_text(proofs: Iterable[PatchProof]) -> str:
    """Proofs of a patch as the content of their file."""
    return record_json(PatchProofs(tuple(sorted(proofs, key=lambda proof: proof.recipe))))


def with_stored_code(proof: PatchProof, stored: PatchProof | None) -> PatchProof:
    """``proof`` with the machine code of ``stored`` for the same probes, if trees and nvcc are the same."""
    if stored is None or (stored.tree_below, stored.tree_above, stored.nvcc) != (
        proof.tree_below,
        proof.tree_above,
        proof.nvcc,
    ):
        return proof
    former = {result.probe: result for result in stored.results}

    def merged(result: ProbeComparison) -> ProbeComparison:
        before = former.get(result.probe)
        if before is None:
            return result
        below = replace(result.below, code=before.below.code | result.below.code)
        above = replace(result.above, code=before.above.code | result.above.code)
        return compare(result.probe, below, above)

    return replace(proof, results=tuple(merged(result) for result in proof.results))


def differences(stored: PatchProof, proof: PatchProof) -> list[str]:
    """Differences between a stored proof and a new one, as lines; code and numbers are compared if both proofs have them.

    Types are compared only for the same host compiler, because compilers print them differently.
    """
    compared = ["error", "where", "facts"] + ["types"] * (stored.host_compiler == proof.host_compiler)
    lines = [
        f"{name}: {getattr(stored, name)} → {getattr(proof, name)}"
        for name in ("patch", "hunks_sha256", "recipe", "tree_below", "tree_above")
        if getattr(stored, name) != getattr(proof, name)
    ]
    before, after = ({result.probe.text: result for result in each.results} for each in (stored, proof))
    lines += [f"probe {probe}: only in the stored proof" for probe in before.keys() - after.keys()]
    lines += [f"probe {probe}: not in the stored proof" for probe in after.keys() - before.keys()]
    for probe in sorted(before.keys() & after.keys()):
        lines += [f"probe {probe}, {line}" for line in _differences(before[probe], after[probe], compared)]
    return sorted(lines)


def _differences(stored: ProbeComparison, result: ProbeComparison, compared: list[str]) -> list[str]:
    lines = []
    for side in ("below", "above"):
        before, after = getattr(stored, side), getattr(result, side)
        checked = NumericStatus.NOT_CHECKED not in (before.numbers, after.numbers)
        lines += [
            f"{side}: {name} {getattr(before, name)} → {getattr(after, name)}"
            for name in (*compared, *(("numbers", "why") if checked else ()))
            if getattr(before, name) != getattr(after, name)
        ]
        lines += [
            f"{side}: code for {arch} differs"
            for arch in sorted(before.code.keys() & after.code.keys())
            if before.code[arch] != after.code[arch]
        ]
    return lines
