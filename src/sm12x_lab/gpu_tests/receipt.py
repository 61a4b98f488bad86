"""The receipt of a verification: kernels and seeded faults with their outcomes, GPU, toolchain and sources."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

from sm12x_lab.gpu import Backend, CudaDevice
from sm12x_lab.gpu_tests.programs import Programs, sources_digest
from sm12x_lab.gpu_tests.verification import VerificationReport
from sm12x_lab.gpu_tests.verified_kernels import VerificationScope
from sm120kit.kernels.kernel_records import SMEM_CAPACITY_BYTES

FORMAT = 1

EMULATION_CANNOT_SHOW = (
    "the block-scaled mma instruction itself: it is emulated in software, after the PTX ISA's text",
    "speed, occupancy, clocks",
    f"the limit of {SMEM_CAPACITY_BYTES:,} B of shared memory: a static assertion checks it, this GPU has more",
    "the machine code that ptxas generates for sm_120: the programs are compiled for sm_90a",
    "cluster launch control and programmatic dependent launch as SM120 does them",
    "the driver's rules for tensor maps of 4-bit elements: packed elements are expressed in bytes",
    "TMA copies that unpack 4-bit elements, for FP8 x MXFP4: they are emulated in software",
    "code that only an SM120 target enables, such as the hardware's conversion to FP4",
)

REWRITTEN_CANNOT_SHOW = (
    "the instructions in silicon: they are software functions, after the PTX ISA's text",
    "speed, occupancy, clocks; races, whose effect depends on timing",
    "the machine code that ptxas generates for sm_120: the PTX is rewritten and assembled for sm_90a",
    "cluster launch control that grants a request: every request is refused, and each CTA computes one tile",
    "the driver's rules for tensor maps of 4-bit elements: packed elements are expressed in bytes",
    "TMA copies that unpack 4-bit and 6-bit elements: one thread does them in software",
)


def record(
    report: VerificationReport, scope: VerificationScope, *, engine: str, tree: str, gpu: CudaDevice, compiler: Programs
) -> dict[str, Any]:
    """A report as JSON-serialisable data, with engine, git tree id, GPU, toolchain and scope."""
    native = scope.backend is Backend.NATIVE
    rewritten = scope.backend is Backend.REWRITTEN
    return {
        "format": FORMAT,
        "engine": engine,
        "tree": tree,
        "sources": sources_digest(),
        "device": str(scope.backend),
        "arch": compiler.arch,
        "gpu": {**asdict(gpu), "capability": ".".join(map(str, gpu.capability))},
        "toolchain": {"nvcc": compiler.toolchain.nvcc_version, "host": compiler.toolchain.host_version},
        "only": scope.only,
        "quick": scope.quick,
        "passed": report.passed,
        "verified_on_sm120": native,
        "cannot_show": [] if native else list(REWRITTEN_CANNOT_SHOW if rewritten else EMULATION_CANNOT_SHOW),
        "configurations": [asdict(row) for row in report.rows],
        "planted": [asdict(fault) for fault in report.faults],
        "instructions": [asdict(instruction) for instruction in report.instructions],
        "left_out": [asdict(left) for left in report.left_out],
        "compile_seconds": report.compile_seconds,
        "seconds": report.seconds,
    }


def receipt_name(gpu: CudaDevice, backend: Backend) -> str:
    """The file name of a receipt from one GPU, in the directory of its recipe."""
    kind = "-rewritten" if backend is Backend.REWRITTEN else ""
    return f"verify{kind}-{re.sub(r'[^a-z0-9]+', '-', gpu.name.lower()).strip('-')}.json"
