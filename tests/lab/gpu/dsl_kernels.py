"""CuTe DSL kernels of b12x and FlashInfer with delays: ``dsl_kernels.py PROGRAM GLOB SEED...`` as hunt.py calls it.

PROGRAM and GLOB are those of ``src/sm12x_lab/operators``, which is on ``PYTHONPATH``. Each call's result is whether its outputs
are within the bounds, since the fused MoE adds in any order.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import b12x_nvfp4
import hunt
import torch

IMPORTED = {
    "b12x_formats": ("b12x.gemm", "b12x.moe.fused_moe", "b12x.preparation"),
    "flashinfer_b12x": (),  # the import of flashinfer initializes CUDA, which a forked process cannot use then
}
"""What is imported once, before the processes of the seeds."""


class Results:
    """What a program reports, as lines; its seeded faults are left out."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, row: Any) -> None:
        self.lines.append(
            f"{row.operator} {row.case.replace(': ', ' ')}: {row.verdict}{f', {row.why}' * (row.verdict == 'refused')}"
        )

    def fault(self, *_: object) -> None:
        raise AssertionError("no faults are seeded here")


def main() -> int:
    program, pattern, seeds = sys.argv[1], sys.argv[2], [int(seed) for seed in sys.argv[3:]]
    module: Any = importlib.import_module(program)
    b12x_nvfp4.moe_faults = lambda *_: {}
    for name, replacement in (("gemm_faults", lambda *_: {}), ("moe_faults", lambda *_: {}), ("REPEATS", 1)):
        if hasattr(module, name):
            setattr(module, name, replacement)
    for imported in IMPORTED[program]:
        importlib.import_module(imported)

    def run() -> Iterator[str]:
        torch.manual_seed(1)
        results = Results()
        module.run(results, argparse.Namespace(only=pattern))
        return iter(results.lines)

    return hunt.forked(seeds, run)


if __name__ == "__main__":
    sys.exit(main())
