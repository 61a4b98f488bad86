"""The record of a verification: what was run on which GPU with which sources, and what came out."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sm120kit.records import SMEM_CAPACITY_BYTES
from sm120kit.verify.gpu import Device, Gpu
from sm120kit.verify.kernels import Report
from sm120kit.verify.programs import Compiler, sources_digest
from sm120kit.verify.running import Verdict

FORMAT = 1

EMULATION_CANNOT_SHOW = (
    "the block-scaled mma instruction itself: it is software here, made from the PTX ISA's text",
    "speed, occupancy, clocks",
    f"the limit of {SMEM_CAPACITY_BYTES:,} B of shared memory: a static assertion holds it, this GPU would allow more",
    "the machine code that ptxas makes for sm_120: this is code for sm_90",
    "cluster launch control and programmatic dependent launch as SM120 does them",
    "the driver's rules for tensor maps of 4-bit elements: the packed ones are expressed in bytes here",
    "TMA copies that unpack 4-bit elements, for FP8 x MXFP4: they are software here",
    "code that only an SM120 target enables, such as the hardware's conversion to FP4",
)


def record(
    report: Report, *, engine: str, tree: str, device: Device, gpu: Gpu, compiler: Compiler, only: str, quick: bool
) -> dict[str, Any]:
    """A report as JSON, with all its circumstances."""
    native = device is Device.NATIVE
    return {
        "format": FORMAT,
        "engine": engine,
        "tree": tree,
        "sources": sources_digest(),
        "device": str(device),
        "arch": compiler.arch,
        "gpu": {**asdict(gpu), "capability": ".".join(map(str, gpu.capability))},
        "toolchain": {"nvcc": compiler.toolchain.nvcc_version, "host": compiler.toolchain.host_version},
        "only": only,
        "quick": quick,
        "passed": report.passed,
        "verified_on_sm120": native,
        "cannot_show": [] if native else list(EMULATION_CANNOT_SHOW),
        "configurations": [asdict(row) for row in report.rows],
        "planted": [asdict(one) for one in report.faults],
        "instructions": [asdict(one) for one in report.instructions],
        "left_out": [asdict(one) for one in report.left_out],
        "compile_seconds": report.compile_seconds,
        "seconds": report.seconds,
    }


def receipt_name(engine: str, gpu: Gpu) -> str:
    """The file name of an engine's receipt from one GPU."""
    return f"verify-{engine}-{re.sub(r'[^a-z0-9]+', '-', gpu.name.lower()).strip('-')}.json"


def stale(path: Path, tree: str) -> list[str]:
    """Why the evidence in a receipt does not hold for the present sources and that patched tree."""
    kept = json.loads(path.read_text())
    problems = []
    if kept["format"] != FORMAT:
        problems.append(f"format {kept['format']}, not {FORMAT}")
    if kept["sources"] != sources_digest():
        problems.append("the verification programs or the faults planted in them have changed")
    if kept["tree"] != tree:
        problems.append(f"it is about tree {kept['tree'][:12]}; the series makes {tree[:12]}")
    if kept["only"] or kept["quick"]:
        problems.append("it covers a part of the matrix")
    failed = [row["name"] for row in kept["configurations"] if row["verdict"] != Verdict.PASS and not row["excused"]]
    failed += [one["instruction"] for one in kept["instructions"] if one["verdict"] != Verdict.PASS]
    if failed or not (kept["configurations"] and kept["instructions"]):
        problems.append(f"it did not pass: {', '.join(failed) or 'nothing was run'}")
    elif not kept["passed"]:
        problems.append("it did not pass, by its own word")
    missed = [one["name"] for one in kept["planted"] if one["missed"] or not one["seen"]]
    if missed or not kept["planted"]:
        problems.append(f"planted faults were not found: {', '.join(missed) or 'none was planted'}")
    return problems
