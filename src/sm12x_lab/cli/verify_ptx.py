"""``sm120kit verify ptx``: rewrite PTX for a Hopper GPU, and compare the replaced instructions with a model there."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sm120kit.cli.build import KernelOptions
from sm120kit.cli.options import Json, Limits, Overwrite, Sources
from sm120kit.core import console
from sm120kit.core.records import Stage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sm12x_lab.ptx.library import AssembledKernel
    from sm12x_lab.ptx.ptx_session import PtxReport, UnitReport
    from sm120kit.sources.run_options import Options as RunOptions
    from sm120kit.wheels.build_records import BuildRequest


@dataclass(frozen=True)
class PtxSelection:
    """What is rewritten: a file or the units of a build; or the comparison of instructions."""

    instructions: Annotated[
        bool,
        typer.Option(
            "--instructions", help="Compare the replacements (TMA excepted) with the model on a Hopper GPU, bit for bit."
        ),
    ] = False
    only: Annotated[
        str, typer.Option("--only", metavar="PATTERN", help="Units whose module/file contains this text or matches this glob.")
    ] = ""


@dataclass(frozen=True)
class PtxOutput:
    """The files that ``verify ptx`` writes."""

    ptx: Annotated[Path | None, typer.Option("--ptx", metavar="FILE", help="Write the rewritten PTX to this file.")] = None
    cubin: Annotated[Path | None, typer.Option("--cubin", metavar="FILE", help="Write the machine code to this file.")] = None
    capture: Annotated[
        Path | None, typer.Option("--capture", metavar="DIR", help="Write the PTX of a build's units, for SM120, here.")
    ] = None
    receipt: Annotated[
        Path | None, typer.Option("--receipt", metavar="FILE", help="Write the record of --instructions to this file.")
    ] = None
    overwrite: Overwrite = False


def verify_ptx(
    source: Annotated[
        str | None,
        typer.Argument(metavar="FILE|RECIPE", help="PTX for sm_120a or sm_120f, or a FlashInfer recipe."),
    ] = None,
    *,
    selection: PtxSelection,
    kernels: KernelOptions,
    output: PtxOutput,
    limits: Limits,
    sources: Sources,
    as_json: Json = False,
) -> None:
    """Rewrite PTX for SM120 so that a Hopper GPU can run it.

    Assembles the PTX for its own target, replaces each instruction that Hopper lacks by a call of a software function,
    assembles the result for sm_90a, and lists the replacements; no GPU is needed. Of a recipe, the PTX is that of the units
    that `build` compiles, by the same commands; of an engine's recipe, those of `build --from-source`. Exit code 11: an
    instruction has no replacement; the message names it; 50: ptxas rejects the PTX for its own target, so that no SM12x GPU
    runs it. With --instructions, 1: an instruction differs from the model; 41: no Hopper GPU; 51: a fault seeded in the
    rewriter was not detected.
    """
    from sm12x_lab.ptx import ptx_session
    from sm120kit.core.disk import require_new, require_writable
    from sm120kit.core.errors import CheckFailed
    from sm120kit.core.record_files import write_record

    if source is None and not selection.instructions:
        raise typer.BadParameter("name a PTX file or a recipe, or use --instructions")
    if output.receipt and not selection.instructions:
        raise typer.BadParameter("a receipt requires --instructions", param_hint="--receipt")
    recipe = source if source is not None and _is_recipe(source) else None
    file = Path(source) if source is not None and recipe is None else None
    if file is None and (output.ptx or output.cubin):
        raise typer.BadParameter("--ptx and --cubin require a PTX file")
    if recipe is None and (output.capture or selection.only or kernels != KernelOptions()):
        raise typer.BadParameter("--capture, --only, --arch and --kernels require a recipe")
    if recipe is not None and selection.instructions:
        raise typer.BadParameter("--instructions and a recipe are two runs")
    if output.capture:
        with suppress(OSError):  # the next line names it
            output.capture.mkdir(parents=True, exist_ok=True)
        require_writable(output.capture / "unit.ptx", "--capture")
    for option, path in (("--ptx", output.ptx), ("--cubin", output.cubin), ("--receipt", output.receipt)):
        if path:
            require_writable(path, option)
            require_new(path, option, output.overwrite)
    if recipe is not None:
        _verify_build(
            recipe, kernels.request(stage=Stage.PLAN), selection.only, output.capture, sources.run_options(limits), as_json
        )
        return
    cache = sources.run_options(limits).workspace.cache
    report = ptx_session.rewrite_file(file, cache, output.ptx, output.cubin) if file else None
    record: dict[str, Any] | None = None
    if selection.instructions:
        missed, record = ptx_session.verify_instructions()
    if as_json:
        console.json_data({"module": ptx_session.data(report) if report else None, "instructions": record})
    else:
        if report:
            _show_module(report)
        if record:
            _show_instructions(record)
    if record is None:
        return
    if missed:
        raise CheckFailed(
            f"seeded faults were not detected: {'; '.join(missed)}", "the comparison proves nothing; no receipt was written"
        )
    if output.receipt:
        write_record(output.receipt, record)
        console.info(f"receipt: {output.receipt}")
    raise typer.Exit(0 if record["passed"] else 1)


def _is_recipe(source: str) -> bool:
    """Whether an argument names a recipe: a TOML file, or a name that is no file and has no suffix of PTX."""
    path = Path(source)
    return path.suffix == ".toml" or not (path.exists() or path.suffix == ".ptx" or path.is_absolute() or "/" in source)


def _verify_build(
    name: str, request: BuildRequest, pattern: str, capture: Path | None, options: RunOptions, as_json: bool
) -> None:
    """Rewrite the PTX of a build's units."""
    from sm12x_lab.ptx import ptx_session
    from sm120kit.cli.build import watcher
    from sm120kit.core.errors import BadInput
    from sm120kit.recipes.target import resolve_flashinfer
    from sm120kit.wheels import flashinfer

    target = resolve_flashinfer(name, options)
    with watcher() as watch:
        texts = flashinfer.unit_ptx(target, request, pattern, watch)
    units = ptx_session.rewrite_units(texts, options.workspace.cache, capture)
    if as_json:
        console.json_data({"recipe": target.recipe.name, "tree": target.tree.tree, "units": ptx_session.units_data(units)})
    else:
        _show_units(units)
    refused = [unit for unit in units if unit.refused]
    if refused:
        raise BadInput(
            f"{len(refused)} of {len(units)} units have an instruction without a replacement\n"
            + "\n".join(f"  {unit.refused}" for unit in refused),
            "the other units were rewritten; --only leaves units out",
        )


def _show_units(units: Sequence[UnitReport]) -> None:
    met: dict[str, tuple[int, int]] = {}
    for unit in units:
        for opcode, count in (unit.report.module.counts if unit.report else {}).items():
            total, where = met.get(opcode, (0, 0))
            met[opcode] = (total + count, where + 1)
    console.table(
        ("replaced instruction", "count", "units"),
        ((opcode, *counts) for opcode, counts in sorted(met.items(), key=lambda item: -item[1][0])),
    )
    console.table(
        ("unit", "kernels", "instructions", "replaced", "registers SM12x", "spilled", "registers sm_90a", "spilled"),
        (
            (
                unit.name,
                len(unit.report.kernels),
                f"{unit.report.module.instruction_count:,}",
                f"{len(unit.report.module.replacements):,}",
                max((row.registers for row in unit.report.native.kernels), default=0),
                max((row.spill_bytes for row in unit.report.native.kernels), default=0),
                max((row.registers for row in unit.report.kernels), default=0),
                max((row.spill_bytes for row in unit.report.kernels), default=0),
            )
            if unit.report
            else (unit.name, "refused", *[""] * 6)
            for unit in units
        ),
    )
    kernels = sum(len(unit.report.kernels) for unit in units if unit.report)
    console.data(f"{len(units)} units with {kernels} kernels rewritten and assembled for sm_90a; they were not run")


def _show_module(report: PtxReport) -> None:
    console.table(
        ("replaced instruction", "count", "first line", "by"),
        (
            (opcode, count, *next((row.line, row.function) for row in report.module.replacements if row.opcode == opcode))
            for opcode, count in report.module.counts.items()
        ),
    )
    native = {row.name: row for row in report.native.kernels}
    arch = report.native.arch
    console.table(
        ("kernel", f"registers {arch}", "spilled", "shared", "registers sm_90a", "spilled"),
        ((row.name, *_native_figures(native.get(row.name)), row.registers, row.spill_bytes) for row in report.kernels),
    )
    if report.native.unknown:
        console.data(f"not assembled for {arch}: {report.native.unknown}")
    console.data(
        f"{len(report.module.replacements)} of {report.module.instruction_count} instructions replaced; "
        f"{report.module.source_target} rewritten and assembled for sm_90a; it was not run"
    )


def _native_figures(kernel: AssembledKernel | None) -> tuple[object, object, object]:
    """Registers per thread, spilled bytes and static shared memory in bytes on SM12x."""
    return (kernel.registers, kernel.spill_bytes, kernel.shared_bytes) if kernel else ("unknown",) * 3


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
