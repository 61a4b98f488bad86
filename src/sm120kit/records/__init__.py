"""The frozen records that rooms hand to each other. Standard library only; each is also a small JSON file on disk."""

from __future__ import annotations

from dataclasses import asdict, is_dataclass
from typing import Any

from sm120kit.records.builds import (
    Arch,
    Artifact,
    Artifacts,
    BuildPlan,
    Cubin,
    Generated,
    Kernel,
    LeftOut,
    Module,
    Toolchain,
    Unit,
)
from sm120kit.records.images import Attested, BuiltWheel, Check, Image, ImageContext, PublishedImage, Verdict, VerifiedImage
from sm120kit.records.locks import Closure, Lock, LockedFile, LockedSource, LockedWheel, Replaced
from sm120kit.records.proofs import Ablated, Ablation, Effect, KernelCode, PatchProof, Probe, Proven, Seen, TileChange
from sm120kit.records.runs import Run
from sm120kit.records.sources import AppliedPatch, Checkout, GitPin, Inside, PatchedTree, PatchState, PatchStatus, Pin, SdistPin
from sm120kit.records.tiles import SMEM_CAPACITY_BYTES, Emulation, EmulationFinding, Numbers, Proof, Tile, TileFacts

__all__ = [
    "SMEM_CAPACITY_BYTES",
    "Ablated",
    "Ablation",
    "AppliedPatch",
    "Arch",
    "Artifact",
    "Artifacts",
    "Attested",
    "BuildPlan",
    "BuiltWheel",
    "Check",
    "Checkout",
    "Closure",
    "Cubin",
    "Effect",
    "Emulation",
    "EmulationFinding",
    "Generated",
    "GitPin",
    "Image",
    "ImageContext",
    "Inside",
    "Kernel",
    "KernelCode",
    "LeftOut",
    "Lock",
    "LockedFile",
    "LockedSource",
    "LockedWheel",
    "Module",
    "Numbers",
    "PatchProof",
    "PatchState",
    "PatchStatus",
    "PatchedTree",
    "Pin",
    "Probe",
    "Proof",
    "Proven",
    "PublishedImage",
    "Replaced",
    "Run",
    "SdistPin",
    "Seen",
    "Tile",
    "TileChange",
    "TileFacts",
    "Toolchain",
    "Unit",
    "Verdict",
    "VerifiedImage",
    "plain",
]


def plain(value: object) -> Any:
    """A record, or what else JSON does not know, as it is written: for ``default`` of ``json.dumps``."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)
