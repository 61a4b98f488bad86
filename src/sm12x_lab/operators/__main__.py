"""Compare operators of FlashInfer and b12x, called as engines call them, with float64.

A directory for the Python that has the engine, which needs nothing of sm120kit:

    sm12x-lab run -- python src/sm12x_lab/operators nvfp4       a Hopper GPU
    python src/sm12x_lab/operators nvfp4                        an SM12x GPU

Faults are planted in the arguments of calls, and each must be detected. Exit codes: 0, every operator that ran is right; 1, one
is wrong, or what an engine selects by default was refused; 2, this Python or GPU cannot run the program, or nothing was
compared; 51, a planted fault was not detected.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Program:
    """A module of this directory whose ``run`` makes the calls of a library or engine.

    ``kind`` names its receipts, which state the versions of ``packages``; ``only`` describes the names of its calls.
    """

    what: str
    kind: str
    packages: tuple[str, ...]
    only: str


FLASHINFER, B12X = ("flashinfer", "torch"), ("b12x", "cutlass", "torch")

PROGRAMS = {
    "nvfp4": Program("FlashInfer's NVFP4 operators", "nvfp4-operators", FLASHINFER, "moe-NAME, mm, quantize"),
    "attention": Program(
        "FlashInfer's attention",
        "attention-operators",
        FLASHINFER,
        "prefill-, decode-, cuda-cores- or xqa-TYPE-MODEL; dense-nvfp4; sparse-mla",
    ),
    "groupwise": Program(
        "FlashInfer's GEMMs of FP8, MXFP8, MXFP4 and NVFP4",
        "groupwise-operators",
        FLASHINFER,
        "such as dense-e4m3-bf16-K, bmm-fp8-bf16, grouped-nvfp4-*",
    ),
    "flashinfer_b12x": Program(
        "FlashInfer's b12x_fused_moe",
        "flashinfer-b12x",
        ("flashinfer", "cutlass", "torch"),
        "LAYER-TOKENS: qwen3.5-122b-tp2-33",
    ),
    "b12x_nvfp4": Program("b12x's NVFP4 operators", "b12x-operators", B12X, "gemm, moe-NAME, moe-hot"),
    "b12x_formats": Program("the block-scaled GEMM and MoE of b12x 1.5", "b12x-formats", B12X, "a format, or moe-TOKENS"),
}
"""Every program, by the name of its module."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a program and return its exit code."""
    listed = "\n".join(f"  {name:16} {program.what}" for name, program in PROGRAMS.items())
    formatter = argparse.RawDescriptionHelpFormatter
    first = argparse.ArgumentParser(prog="operators", add_help=False, epilog=f"programs:\n{listed}", formatter_class=formatter)
    first.add_argument("program", choices=PROGRAMS, metavar="PROGRAM", help="PROGRAM --help lists its options")
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] in ([], ["-h"], ["--help"]):
        first.print_help()
        return 0 if words else 2
    name = first.parse_args(words[:1]).program
    return _run(name, PROGRAMS[name], words[1:])


def _run(name: str, program: Program, words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"operators {name}", description=f"Compare {program.what} with float64.")
    parser.add_argument("--only", action="append", metavar="GLOB", help=f"calls to make, repeatable: {program.only}")
    parser.add_argument("--receipt", type=Path, metavar="FILE", help="write the rows as JSON")
    parser.add_argument("--seed", type=int, default=1)
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        parser.error(f"{error}; {sys.executable} is to be the Python of the engine")
    getattr(module, "add_options", lambda _: None)(parser)
    options = parser.parse_args(words)
    return _compare(module, program, options, parser)


def _compare(module: object, program: Program, options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    import torch
    from report import OperatorReport, Unusable

    torch.manual_seed(options.seed)
    report = OperatorReport(program.kind, program.packages)
    try:
        importlib.import_module(program.packages[0])
        if (capability := torch.cuda.get_device_capability())[0] != 12:
            parser.error(f"compute capability {capability} is not 12.x; on a Hopper GPU, use sm12x-lab run")
        for pattern in options.only or ["*"]:
            module.run(report, argparse.Namespace(**vars(options) | {"only": pattern}))  # type: ignore[attr-defined]
    except Unusable as problem:
        parser.error(str(problem))
    except ImportError as error:
        parser.error(f"{program.packages[0]} cannot be imported by {sys.executable}: {error}")
    return int(report.finish(options.receipt))


if __name__ == "__main__":
    sys.exit(main())
