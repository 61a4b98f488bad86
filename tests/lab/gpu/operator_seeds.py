"""Operators with delays: ``operator_seeds.py PROGRAM GLOB[,GLOB] SEED...`` prints a line for each call, with its verdict.

With the programs of ``src/sm12x_lab/operators`` on ``PYTHONPATH``; hunt.py starts it. Of attention, which adds in one order, a
line has the figures too, so that other bits are seen. Planted faults are left out. With ``SPARSE_PAGES=32,128``, sparse
attention has pages of these sizes, not those of the program.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import hunt
import torch
from reference import OperatorRow


class Lines:
    """A report that prints nothing and keeps no faults."""

    def __init__(self, figures: bool) -> None:
        self.figures, self.found = figures, list[str]()

    def add(self, row: OperatorRow) -> None:
        figures = f" {row.error_over_bound:.9g} {row.relative_rms:.9g}" if self.figures else ""
        case = row.case.replace(": ", ", ")  # a colon ends the name
        self.found.append(f"{row.operator}, {case}: {row.verdict}{figures} {row.why}".rstrip())

    def fault(self, name: str, row: OperatorRow) -> None:
        pass


def lines(program: str, globs: list[str]) -> Iterator[str]:
    torch.manual_seed(1)
    report: Any = Lines(program == "attention")
    for only in globs:
        importlib.import_module(program).run(report, argparse.Namespace(only=only, autotune=False, seed=1))
    yield from report.found


def paged(program: Any, sizes: str) -> None:
    """Give sparse attention pages of other sizes: both kinds of lists, with and without a sink."""
    shapes = [(32, 7, 512, 0, False), (8, 3, 128, 200, True)]
    program.SPARSE_SHAPES = tuple(
        program.SparseShape(*shape, page=int(size), sink=sink) for size in sizes.split(",") for *shape, sink in shapes
    )


def main() -> int:
    program, globs, *seeds = sys.argv[1:]
    module = importlib.import_module(program)
    if sizes := os.environ.get("SPARSE_PAGES"):
        paged(module, sizes)
    return hunt.forked(list(map(int, seeds)), lambda: lines(program, globs.split(",")))


if __name__ == "__main__":
    sys.exit(main())
