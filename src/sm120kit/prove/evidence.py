"""A proof as a file beside the patches: the same bytes wherever and whenever it is made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sm120kit.prove.effects import compare
from sm120kit.records import PatchProof, Proof, Proven
from sm120kit.workspace import read_record, record_json


def path_of(root: Path, patch: str) -> Path:
    """Where the proof of ``project/slug`` lies below ``patches/``."""
    return root / "evidence" / f"{patch.replace('/', '-')}.json"


def read(path: Path) -> PatchProof | None:
    """A proof that was written before."""
    return read_record(PatchProof, path) if path.is_file() else None


def text(proof: PatchProof) -> str:
    """The file's content."""
    return record_json(proof)


def with_code(proof: PatchProof, kept: PatchProof | None) -> PatchProof:
    """``proof`` with the code that a former proof has of the same probes on the same trees by the same nvcc."""
    if kept is None or (kept.tree_below, kept.tree_above, kept.nvcc) != (proof.tree_below, proof.tree_above, proof.nvcc):
        return proof
    former = {one.probe: one for one in kept.results}

    def merged(one: Proven) -> Proven:
        before = former.get(one.probe)
        if before is None:
            return one
        below, above = (
            replace(now, code=was.code | now.code) for was, now in ((before.below, one.below), (before.above, one.above))
        )
        return compare(one.probe, below, above)

    return replace(proof, results=tuple(merged(one) for one in proof.results))


def differences(stored: PatchProof, found: PatchProof) -> list[str]:
    """In what a stored proof differs from a new one; code and numbers only where both have them.

    Every host compiler writes types in its own way, so those are compared only when it is the same one.
    """
    compared = ["error", "where", "facts"] + ["types"] * (stored.host_compiler == found.host_compiler)
    told = [
        f"{name}: {getattr(stored, name)} → {getattr(found, name)}"
        for name in ("patch", "hunks_sha256", "recipe", "tree_below", "tree_above")
        if getattr(stored, name) != getattr(found, name)
    ]
    before, now = ({one.probe.text: one for one in proof.results} for proof in (stored, found))
    told += [f"probe {probe}: only in the stored proof" for probe in before.keys() - now.keys()]
    told += [f"probe {probe}: not in the stored proof" for probe in now.keys() - before.keys()]
    for probe in sorted(before.keys() & now.keys()):
        told += [f"probe {probe}, {what}" for what in _differences(before[probe], now[probe], compared)]
    return sorted(told)


def _differences(stored: Proven, found: Proven, compared: list[str]) -> list[str]:
    told = []
    for side in ("below", "above"):
        was, now = getattr(stored, side), getattr(found, side)
        checked = Proof.NOT_CHECKED not in (was.numbers, now.numbers)
        told += [
            f"{side}: {name} {getattr(was, name)} → {getattr(now, name)}"
            for name in (*compared, *(("numbers", "why") if checked else ()))
            if getattr(was, name) != getattr(now, name)
        ]
        told += [
            f"{side}: code for {arch} differs"
            for arch in sorted(was.code.keys() & now.code.keys())
            if was.code[arch] != now.code[arch]
        ]
    return told
