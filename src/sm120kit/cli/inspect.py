"""``sm120kit inspect``: list the device code in a wheel, library or cubin."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from sm120kit.cli.options import argument, option
from sm120kit.core import console
from sm120kit.kernels import cubin
from sm120kit.kernels.cubin.cubin_records import Kernel

HEAD, TAIL = 120, 40


def inspect_(
    path: Annotated[Path, argument("WHEEL|SO|CUBIN", "Wheel, shared object, object file, fatbin or cubin.")],
    as_json: Annotated[bool, option("--json", "Print full records as JSON.")] = False,
) -> None:
    """List the device code in a file.

    Prints archs, kernels, registers, shared memory, stack, FP4 tensor core instructions of SM12x (OMMA) and digests. Shared
    memory is the static part: a launch adds the dynamic part. Stack is local memory per thread: spilled registers, and arrays
    indexed at run time. Long names are printed without their middle; --json prints them in full.
    """
    images = cubin.read(path)
    if as_json:
        console.json_data([asdict(image) for image in images])
        return
    kernels = [(image.where, kernel) for image in images for kernel in image.kernels]
    names = [kernel.name for _, kernel in kernels]
    shown = cubin.demangle(names)
    console.table(
        ("where", "arch", "kernel", "registers", "shared B", "stack B", "FP4 MMA", "text B", "text sha256"),
        ((where, k.arch, _short(name), *_figures(k)) for (where, k), name in zip(kernels, shown, strict=True)),
    )
    archs = ", ".join(sorted({image.arch for image in images}))
    with_stack = sum(kernel.stack_bytes > 0 for _, kernel in kernels)
    console.data(f"images: {len(images)} ({archs}); kernels: {len(kernels)}; with a stack (spills): {with_stack}")


def _figures(kernel: Kernel) -> tuple[int | str, ...]:
    sizes = (kernel.registers, kernel.shared_bytes, kernel.stack_bytes, kernel.fp4_mma, kernel.text_bytes)
    return (*sizes, kernel.text_sha256[:12])


def _short(name: str) -> str:
    """A name that fits a line: names of CUTLASS kernels have thousands of characters; the scheduler is at their end."""
    return name if len(name) <= HEAD + TAIL else f"{name[:HEAD]} ... {name[-TAIL:]}"
