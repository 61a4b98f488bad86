"""``sm120kit verify run``: run a program for SM120 on a Hopper GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sm120kit.cli.options import Overwrite, State
from sm120kit.core import console

if TYPE_CHECKING:
    from sm12x_lab.ptx.interposed import InterposedRun


def verify_run(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="The program and its arguments, after --.")],
    *,
    ptx: Annotated[
        Path | None,
        typer.Option("--ptx", metavar="DIR", help="PTX of modules without it, as `verify ptx RECIPE --capture DIR` writes it."),
    ] = None,
    fast: Annotated[
        bool, typer.Option("--fast", help="Multiply on Hopper's tensor cores: faster, but not bit for bit; without --receipt.")
    ] = False,
    receipt: Annotated[Path | None, typer.Option("--receipt", metavar="FILE", help="Write the record to this file.")] = None,
    overwrite: Overwrite = False,
    state: State = None,
) -> None:
    """Run a program for SM120 on a Hopper GPU.

    The program gets an SM120 GPU. Modules that it loads for SM12x are rewritten as `verify ptx` does; a library of sm120kit is
    preloaded for that. Exit code: that of the program; 41: no Hopper GPU; 11: a module was refused although the program
    succeeded; 54: the program loaded no module for SM12x, so that nothing was verified.
    """
    from sm12x_lab.ptx import interposed
    from sm120kit.core.disk import require_new, require_writable
    from sm120kit.core.errors import BadInput, CheckFailed
    from sm120kit.core.record_files import write_record
    from sm120kit.core.workspace import Workspace

    if receipt and fast:
        raise typer.BadParameter("a receipt states the arithmetic of the PTX ISA, which --fast has not", param_hint="--fast")
    if receipt:
        require_writable(receipt, "--receipt")
        require_new(receipt, "--receipt", overwrite)
    done, record = interposed.run(command, ptx, Workspace.open(state), fast)
    _show(done)
    if fast:
        console.info("fast: MMAs may differ by 2^-20 of the sum of their magnitudes from what the PTX ISA defines")
    if receipt and done.modules:
        write_record(receipt, record)
        console.info(f"receipt: {receipt}")
    if done.exit_code:
        raise typer.Exit(done.exit_code)
    if done.refused_modules:
        raise BadInput(f"{done.refused_modules} modules for SM12x were refused", "the messages above name the instructions")
    if not done.modules:
        raise CheckFailed(
            "the program loaded no module for SM12x: nothing was verified",
            "modules with code for Hopper run unchanged; build for sm_120a or sm_120f alone",
        )


def _show(done: InterposedRun) -> None:
    for opcode, count in done.replaced.items():
        console.info(f"replaced: {count} {opcode}")
    for size in done.refused_shared_bytes:
        console.info(f"refused: {size:,} B of shared memory for a CTA; SM120 has 101,376 B")
    console.info(
        f"{len(done.modules)} modules for SM12x with {done.kernels} kernels rewritten, {done.refused_modules} refused; "
        f"the program ended with exit code {done.exit_code}; unverified on SM120"
    )
