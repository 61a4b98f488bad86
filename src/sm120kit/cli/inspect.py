"""``sm120kit inspect``: what a finished file says it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HEAD, TAIL = 120, 40


def inspect_(
    path: Annotated[Path, typer.Argument(metavar="WHEEL|SO|CUBIN", help="A wheel, shared object, object, fatbin or cubin.")],
    as_json: Annotated[bool, typer.Option("--json", help="Full records for programs.")] = False,
    demangle: Annotated[bool, typer.Option("--demangle/--no-demangle", help="Kernel names as C++ has them.")] = True,
) -> None:
    """List the device code in a file: archs, kernels, registers, shared memory, stack and digests.

    Shared memory is static only: what a launch adds is not in the file. Stack is local memory per thread, where spilled
    registers live, and arrays that are indexed at run time. Long names lose their middle; --json has them whole.
    """
    from dataclasses import asdict

    from sm120kit import console, cubin

    found = cubin.read(path)
    if as_json:
        console.json_data([asdict(one) for one in found])
        return
    kernels = [(one.where, kernel) for one in found for kernel in one.kernels]
    names = [kernel.name for _, kernel in kernels]
    shown = cubin.demangle(names) if demangle else names
    console.table(
        ("where", "arch", "kernel", "registers", "shared B", "stack B", "text B", "text sha256"),
        (
            (where, k.arch, _short(name), k.registers, k.shared_bytes, k.stack_bytes, k.text_bytes, k.text_sha256[:12])
            for (where, k), name in zip(kernels, shown, strict=True)
        ),
    )
    archs = ", ".join(sorted({one.arch for one in found}))
    with_stack = sum(kernel.stack_bytes > 0 for _, kernel in kernels)
    console.data(f"images: {len(found)} ({archs}); kernels: {len(kernels)}; with a stack, where spills live: {with_stack}")


def _short(name: str) -> str:
    """A name that a line can hold: CUTLASS's have thousands of characters, the scheduler's at the end."""
    return name if len(name) <= HEAD + TAIL else f"{name[:HEAD]} ... {name[-TAIL:]}"
