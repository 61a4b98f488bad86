"""``sm120kit verify run``: run a program for SM120 on a Hopper GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sm120kit.cli.options import Overwrite, Sources
from sm120kit.core import console

if TYPE_CHECKING:
    from sm12x_lab.ptx.interposed import InterposedRun, SimulatedGpu
    from sm120kit.core.workspace import Workspace


@dataclass(frozen=True)
class RunSelection:
    """What runs for SM120, and the GPU that the program sees."""

    ptx: Annotated[
        Path | None,
        typer.Option("--ptx", metavar="DIR", help="PTX of modules without it, as `verify ptx RECIPE --capture DIR` writes it."),
    ] = None
    fast: Annotated[
        bool, typer.Option("--fast", help="Multiply on Hopper's tensor cores: faster, but not bit for bit; without --receipt.")
    ] = False
    sms: Annotated[
        int | None,
        typer.Option(
            "--sms",
            min=1,
            max=1024,
            metavar="N",
            help="Multiprocessors: 188 as an RTX PRO 6000, 170 as an RTX 5090; default: as the GPU.",
        ),
    ] = None
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse modules that would run code for Hopper, except those of PyTorch.")
    ] = False
    perturb: Annotated[
        str | None,
        typer.Option(
            "--perturb",
            metavar="SEED,N",
            help="Find races: run without delays twice, then with delays from N seeds (8), and compare output and exit code.",
        ),
    ] = None


def verify_run(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="The program and its arguments, after --.")],
    *,
    selection: RunSelection,
    receipt: Annotated[Path | None, typer.Option("--receipt", metavar="FILE", help="Write the record to this file.")] = None,
    overwrite: Overwrite = False,
    sources: Sources,
) -> None:
    """Run a program for SM120 on a Hopper GPU.

    The program gets an SM120 GPU. Modules that it loads for SM12x are rewritten as `verify ptx` does; a library of sm120kit is
    preloaded for that. Exit code: that of the program; 1: --perturb found a race; 41: no Hopper GPU; 11: a module was refused
    although the program succeeded; 50: ptxas rejected one for its own target; 51: the program loaded no kernel for SM12x, so
    that nothing was verified, or two runs without delays differ or fail.
    """
    from sm12x_lab.ptx import interposed
    from sm120kit.core import toolchain
    from sm120kit.core.disk import require_new, require_writable
    from sm120kit.core.errors import BadInput, CheckFailed, CompileFailed
    from sm120kit.core.record_files import write_record

    if receipt and selection.perturb is not None:
        raise typer.BadParameter("a receipt is of one run, and --perturb needs several", param_hint="--perturb")
    if receipt and selection.fast:
        raise typer.BadParameter("a receipt states the arithmetic of the PTX ISA, which --fast has not", param_hint="--fast")
    if receipt:
        require_writable(receipt, "--receipt")
        require_new(receipt, "--receipt", overwrite)
    simulated = interposed.SimulatedGpu(selection.sms, selection.strict)
    if selection.perturb is not None:
        _find_races(command, selection, sources.workspace(), simulated)
        return
    done, record = interposed.run(command, selection.ptx, sources.workspace(), selection.fast, simulated)
    _show(done)
    if selection.fast:
        console.info("fast: MMAs may differ by 2^-20 of the sum of their magnitudes from what the PTX ISA defines")
    if receipt and done.kernels:
        record["toolchain"] |= {"ptxas": toolchain.assembler(toolchain.find().cuda_home)}
        write_record(receipt, record)
        console.info(f"receipt: {receipt}")
    if done.exit_code:
        raise typer.Exit(done.exit_code)
    if done.rejected_modules:
        raise CompileFailed(
            f"ptxas rejects {done.rejected_modules} modules for their own target", "the messages above name the instructions"
        )
    if done.refused_modules:
        raise BadInput(f"{done.refused_modules} modules were refused", "the messages above state why")
    if not done.kernels:
        raise CheckFailed(
            "the program loaded no kernel for SM12x: nothing was verified",
            "without PTX for SM12x, code for Hopper runs; compile with -gencode arch=compute_120a,code=compute_120a",
        )


def _find_races(command: list[str], selection: RunSelection, workspace: Workspace, simulated: SimulatedGpu) -> None:
    """Run a program with delays, and print the race that is found."""
    from sm12x_lab import gpu
    from sm12x_lab.ptx import interposed, races
    from sm120kit.core import toolchain
    from sm120kit.core.errors import BadInput, CheckFailed

    seeds = races.seeds_of(selection.perturb or "")
    gpu.require(gpu.probe(), gpu.Backend.REWRITTEN, "verify run", "without a GPU, `sm120kit verify ptx` rewrites PTX only")
    tools, options = toolchain.find(), {"fast": selection.fast, "simulated": simulated, "perturbed": True}
    with interposed.prepared(selection.ptx, workspace, tools, **options) as interposition:  # type: ignore[arg-type]
        report = races.search(races.runner(command, interposition), seeds, interposition.modules)
        sites = sum(len(module["sites"]) for module in interposition.modules())
        hopper, refused = races.unperturbed(interposition)
    for name in hopper:
        console.info(f"without delays, and not verified: code for Hopper in {name}")
    if not sites:
        raise CheckFailed("the program loaded no module for SM12x with a site for delays: nothing was perturbed", "see above")
    console.data(f"without delays: {report.undelayed}; {report.seconds} s; {sites} sites for delays")
    if not report.race:
        console.data(f"no run of {len(report.seeds)} seeds differs; {report.runs} runs; unverified on SM120")
        if refused:
            raise BadInput(f"{refused} modules were refused", "the messages above state why")
        return
    console.data(f"race: seed {report.race.seed}: {report.race.differs}; {report.runs} runs")
    if not report.race.sites:
        console.data("no module's delays alone make a run differ: repeat with the same seed")
    for site in report.race.sites:
        source = f" ({site['source']})" if site["source"] else ""
        console.data(f"{report.race.module}: line {site['line']}{source}: delayed before: {site['instruction'][:200]}")
        for line in _accesses(**site["accesses"]):
            console.data(line)
    raise typer.Exit(1)


def _accesses(late: str, other: str, others: int) -> Iterator[str]:
    if late:
        yield f"  late access: {late}"
        nearest = f", the nearest of {others} to the same memory" if others > 1 else ""
        yield f"  other access{nearest}: {other}" if other else "  other access: none in this kernel has the same memory"


MOST_NAMES = 8
"""Kernels that are named of a module; the record has all."""


def _show(done: InterposedRun) -> None:
    for opcode, count in done.replaced.items():
        console.info(f"replaced: {count} {opcode}")
    for size in done.refused_shared_bytes:
        console.info(f"refused: {size:,} B of shared memory for a CTA; SM120 has 101,376 B")
    for ctas, threads, shared, room in done.refused_launches:
        console.info(
            f"refused: a launch of {ctas:,} CTAs of {threads} threads with {shared:,} B of dynamic shared memory;"
            f" an SM has room for {room} on SM120"
        )
    for module in done.hopper_modules:
        kernels = f": {', '.join(module.kernels[:MOST_NAMES])}" if module.kernels else ""
        more = f" and {len(module.kernels) - MOST_NAMES} more" if len(module.kernels) > MOST_NAMES else ""
        console.info(f"not verified: a module of {module.bytes:,} B in {module.file} ran code for Hopper{kernels}{more}")
    if done.unseen:
        names = ", ".join(done.unseen[:MOST_NAMES])
        console.info(
            f"not seen, as compilers and what assembles Triton's kernels: programs without the preloaded library: {names}"
        )
    for native in (module["sm120"] for module in done.modules):
        if native["unknown"]:
            console.info(f"not assembled for {native['arch']}: {native['unknown']}")
    console.info(
        f"{len(done.modules)} modules for SM12x with {done.kernels} kernels rewritten, {done.refused_modules} refused, "
        f"{len(done.hopper_modules)} not verified; the program ended with exit code {done.exit_code}; unverified on SM120"
    )
