"""``sm120kit verify kernels``: compare kernels on a GPU with an integer reference, bit for bit."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sm120kit.cli.options import FlashInferName, Json, Limits, Overwrite, Sources
from sm120kit.core import console

if TYPE_CHECKING:
    from sm12x_lab.gpu_tests import VerificationReport


@dataclass(frozen=True)
class KernelSelection:
    """The kernels that are compared, and the kind of GPU they run on."""

    device: Annotated[
        str,
        typer.Option(
            "--device",
            metavar="DEVICE",
            help="emulate: a Hopper GPU, with missing instructions in software; rewritten: a Hopper GPU, with rewritten PTX;"
            " native: an SM12x GPU.",
        ),
    ] = "emulate"
    only: Annotated[
        str, typer.Option("--only", metavar="PATTERN", help="Kernels whose name contains this text or matches this glob.")
    ] = ""
    ptx: Annotated[
        Path | None,
        typer.Option(
            "--ptx",
            metavar="DIR",
            help="For --device rewritten: run the kernels of a build, captured with `verify ptx RECIPE --capture DIR`.",
        ),
    ] = None
    quick: Annotated[bool, typer.Option("--quick", help="Only 128x128 tiles without variants, and fewer runs.")] = False
    compile_only: Annotated[
        bool, typer.Option("--compile-only", help="Compile the programs without running them; needs no GPU.")
    ] = False
    perturb: Annotated[
        str | None,
        typer.Option(
            "--perturb", metavar="SEED,N", help="For --device rewritten: run each kernel again with delays from N seeds (8)."
        ),
    ] = None
    programs: Annotated[
        Path | None,
        typer.Option(
            "--programs",
            metavar="DIR",
            help="With --compile-only: copy the programs to this directory; otherwise run those that another machine compiled.",
        ),
    ] = None


@dataclass(frozen=True)
class RecordOptions:
    """The files that the record of a complete run is written to."""

    receipt: Annotated[
        Path | None, typer.Option("--receipt", metavar="FILE", help="Write the record of a complete run to this file.")
    ] = None
    write: Annotated[bool, typer.Option("--write", help="Write the record to the receipts of this checkout.")] = False
    overwrite: Overwrite = False


def verify_kernels(
    engine: FlashInferName = "flashinfer",
    *,
    selection: KernelSelection,
    limits: Limits,
    output: RecordOptions,
    sources: Sources,
    as_json: Json = False,
) -> None:
    """Compare kernels on a GPU with an integer reference, bit for bit.

    Runs every SM120 kernel of an engine, and kernels with seeded faults, which must be detected. Exit code 0: all kernels are
    right; 1: a kernel is wrong; 41: no GPU, or an unsuitable one; 51: a seeded fault was not detected, so that the result
    proves nothing.
    """
    from sm12x_lab.gpu_tests import Backend, VerificationScope, gpu_session
    from sm12x_lab.gpu_tests.compiled import RECORD
    from sm12x_lab.ptx import interposed
    from sm12x_lab.ptx.races import seeds_of
    from sm120kit.core.data_roots import data_root
    from sm120kit.core.disk import require_new, require_writable
    from sm120kit.core.errors import CheckFailed, NotFound
    from sm120kit.core.record_files import write_record
    from sm120kit.recipes.target import resolve_flashinfer

    try:
        device = Backend(selection.device)
    except ValueError:
        raise NotFound(f"unknown device {selection.device!r}", f"devices: {', '.join(Backend)}") from None
    scope = VerificationScope(device, selection.only, selection.quick)
    if (output.receipt or output.write) and (selection.compile_only or not scope.complete):
        raise typer.BadParameter("a receipt requires a complete run: leave out --only, --quick and --compile-only")
    if selection.ptx and device is not Backend.REWRITTEN:
        raise typer.BadParameter("captured PTX is for --device rewritten", param_hint="--ptx")
    seeds = seeds_of(selection.perturb) if selection.perturb is not None else ()
    if seeds and (device is not Backend.REWRITTEN or selection.compile_only or output.receipt or output.write):
        raise typer.BadParameter("delays are for --device rewritten, and without a receipt", param_hint="--perturb")
    if selection.ptx:
        interposed.captured_kernels(selection.ptx)
    if selection.compile_only and selection.programs:
        with suppress(OSError):  # the next line names it
            selection.programs.mkdir(parents=True, exist_ok=True)
        require_writable(selection.programs / RECORD, "--programs")
    if output.receipt:
        require_writable(output.receipt, "--receipt")
        require_new(output.receipt, "--receipt", output.overwrite)
    target = resolve_flashinfer(engine, sources.run_options(limits))
    if selection.compile_only:
        captured, programs = selection.ptx is not None, selection.programs
        _compile_only(gpu_session.compile_verification(target, scope, captured=captured, programs=programs), as_json)
        return
    report, record, name = gpu_session.verify_kernels(target, scope, selection.ptx, selection.programs, seeds)
    if as_json:
        console.json_data(record)
    else:
        _show(report, record)
    if report.missed:
        raise CheckFailed(
            f"seeded faults were not detected: {'; '.join(report.missed)}",
            "passed kernels prove nothing; no receipt was written",
        )
    stored = data_root() / "src" / "sm12x_lab" / "receipts" / target.recipe.name / name if output.write else None
    for path in filter(None, (output.receipt, stored)):
        write_record(path, record)
        console.info(f"receipt: {path}")
    raise typer.Exit(0 if report.passed else 1)


def _compile_only(programs: list[tuple[str, Any]], as_json: bool) -> None:
    failed = [(name, failure.message) for name, failure in programs if failure]
    if as_json:
        console.json_data({"compiled": [name for name, failure in programs if not failure], "failed": dict(failed)})
    else:
        for name, message in failed:
            console.data(f"{name}: {message}")
        console.data(f"{len(programs) - len(failed)} of {len(programs)} programs compile; none was run")
    raise typer.Exit(1 if failed else 0)


def _show(report: VerificationReport, record: dict[str, Any]) -> None:
    console.table(
        ("kernel", "verdict", "runs", "outputs", "error", "bound", "error/bound", "stages", "bytes", "kernel time", "time"),
        (
            (
                row.name,
                row.verdict,
                sum(row.runs.values()) or "",
                f"{row.outputs:,}" if row.outputs else "",
                f"{row.max_relative_error:.3g}" if row.runs else "",
                f"{row.error_bound:.3g}" if row.runs else "",
                f"{row.error_over_bound:.3f}" if row.runs else "",
                row.stages or "",
                f"{row.smem_bytes:,}" if row.smem_bytes else "",
                f"{row.milliseconds:.1f} ms" if row.runs else "",
                f"{row.seconds:.1f} s" if row.runs else "",
            )
            for row in report.rows
        ),
    )
    for row in report.rows:
        if row.why:
            console.data(f"{row.name}: {row.verdict}: {row.why}")
    console.table(
        ("seeded fault", "class", "description", "kernels", "detected as"),
        (
            (
                fault.name,
                fault.kind,
                fault.what,
                len(fault.seen),
                "NOT DETECTED" if fault.missed else _detected(fault.seen.values(), fault.signature),
            )
            for fault in report.faults
        ),
    )
    console.table(
        ("instruction", "compared", "verdict", "values", "error/magnitude"),
        (
            (row.instruction, row.compared, row.verdict, f"{row.values:,}", f"{row.max_error_over_magnitude or 0:.3g}")
            for row in report.instructions
        ),
    )
    shipped = sum(any(line.startswith("captured") for line in row.ptx) for row in report.rows)
    if shipped:
        console.data(f"{shipped} of {len(report.rows)} kernels are those of the build, from its PTX")
    reasons: dict[str, list[str]] = {}
    for left in report.left_out:
        reasons.setdefault(left.reason, []).append(left.what)
    for reason, names in reasons.items():
        console.data(f"left out: {len(names)} kernels: {reason}")
    gpu = record["gpu"]
    passed = sum(row.verdict == "PASS" for row in report.rows)
    console.data(
        f"{passed} of {len(report.rows)} kernels pass on {gpu['name']} (driver {gpu['driver']}, CUDA {gpu['cuda']}; "
        f"nvcc {record['toolchain']['nvcc']}, {record['arch']}); tree {record['tree'][:12]}; {report.seconds:.0f} s"
    )
    console.data("errors: of the inexact data set against float64, relative to the sum of the magnitudes of an output's terms")
    if not record["verified_on_sm120"]:
        console.data("unverified on SM120; not shown by this run:")
        for line in record["cannot_show"]:
            console.data(f"  {line}")


def _detected(verdicts: Any, signature: str) -> str:
    text = ", ".join(sorted(set(verdicts)))
    return f"{text}: {signature}" if signature else text
