"""``sm120kit verify ptx``: rewrite PTX for a Hopper GPU, and compare the replaced instructions with a model there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sm120kit.cli.options import Json
from sm120kit.core import console

if TYPE_CHECKING:
    from sm120kit.kernels.ptx.session import PtxReport


@dataclass(frozen=True)
class PtxOutput:
    """The files that ``verify ptx`` writes."""

    ptx: Annotated[Path | None, typer.Option("--ptx", metavar="FILE", help="Write the rewritten PTX to this file.")] = None
    cubin: Annotated[Path | None, typer.Option("--cubin", metavar="FILE", help="Write the machine code to this file.")] = None
    receipt: Annotated[
        Path | None, typer.Option("--receipt", metavar="FILE", help="Write the record of --instructions to this file.")
    ] = None


def verify_ptx(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="PTX for sm_120a or sm_120f.")] = None,
    *,
    instructions: Annotated[
        bool,
        typer.Option(
            "--instructions", help="Compare the replacements (TMA excepted) with the model on a Hopper GPU, bit for bit."
        ),
    ] = False,
    output: PtxOutput,
    as_json: Json = False,
) -> None:
    """Rewrite PTX for SM120 so that a Hopper GPU can run it.

    Replaces each instruction that Hopper lacks by a call of a software function, assembles the result for sm_90a, and lists the
    replacements; no GPU is needed. Exit code 55: an instruction has no replacement; the message names it. With --instructions,
    1: an instruction differs from the model; 45, 46: no Hopper GPU; 54: a fault seeded in the rewriter was not detected.
    """
    from sm120kit.core.errors import ControlMissed
    from sm120kit.core.state import write_record
    from sm120kit.kernels.ptx import session

    if file is None and not instructions:
        raise typer.BadParameter("name a PTX file, or use --instructions")
    if output.receipt and not instructions:
        raise typer.BadParameter("a receipt requires --instructions", param_hint="--receipt")
    if file is None and (output.ptx or output.cubin):
        raise typer.BadParameter("--ptx and --cubin require a PTX file")
    report = session.rewrite_file(file, output.ptx, output.cubin) if file else None
    record: dict[str, Any] | None = None
    if instructions:
        missed, record = session.verify_instructions()
    if as_json:
        console.json_data({"module": session.data(report) if report else None, "instructions": record})
    else:
        if report:
            _show_module(report)
        if record:
            _show_instructions(record)
    if record is None:
        return
    if missed:
        raise ControlMissed(
            f"seeded faults were not detected: {'; '.join(missed)}", "the comparison proves nothing; no receipt was written"
        )
    if output.receipt:
        write_record(output.receipt, record)
        console.info(f"receipt: {output.receipt}")
    raise typer.Exit(0 if record["passed"] else 1)


def _show_module(report: PtxReport) -> None:
    console.table(
        ("replaced instruction", "count", "first line", "by"),
        (
            (opcode, count, *next((row.line, row.function) for row in report.module.replacements if row.opcode == opcode))
            for opcode, count in report.module.counts.items()
        ),
    )
    console.table(
        ("kernel", "registers", "spilled bytes"), ((row.name, row.registers, row.spill_bytes) for row in report.kernels)
    )
    console.data(
        f"{len(report.module.replacements)} of {report.module.instruction_count} instructions replaced; "
        f"{report.module.source_target} rewritten and assembled for sm_90a; it was not run"
    )


def _show_instructions(record: dict[str, Any]) -> None:
    rows = record["instructions"]
    for row in rows:
        if row["differ"]:
            console.data(f"{row['instruction']}: {row['differ']:,} of {row['values']:,} results differ; first: {row['first']}")
    families = sorted({row["instruction"].split(".")[0] for row in rows})
    console.table(
        ("instruction", "forms", "pass", "results"),
        (
            (
                family,
                len(chosen := [row for row in rows if row["instruction"].split(".")[0] == family]),
                sum(not row["differ"] for row in chosen),
                f"{sum(row['values'] for row in chosen):,}",
            )
            for family in families
        ),
    )
    console.table(
        ("fault seeded in the rewriter", "description", "forms", "detected"),
        ((fault["name"], fault["what"], fault["forms"], fault["forms"] - len(fault["missed"])) for fault in record["planted"]),
    )
    gpu = record["gpu"]
    passed = sum(not row["differ"] for row in rows)
    console.data(
        f"{passed} of {len(rows)} instruction forms equal the model bit for bit on {gpu['name']} (driver {gpu['driver']}, "
        f"CUDA {gpu['cuda']}); rewriter {record['rewriter'][:12]}; {record['seconds']:.0f} s"
    )
    console.data("unverified on SM120; not shown by this run:")
    for line in record["cannot_show"]:
        console.data(f"  {line}")
