"""``sm120kit verify kernels``: run the kernels on a GPU, bit for bit against integers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sm120kit import console
from sm120kit.cli.options import Jobs, Json, Memory, Mirror, Offline, State

if TYPE_CHECKING:
    from sm120kit.verify import Report


def verify_kernels(
    engine: Annotated[
        str, typer.Argument(metavar="[ENGINE[@VERSION]]", help="An engine, engine@version, recipe name or recipe file.")
    ] = "flashinfer",
    device: Annotated[
        str,
        typer.Option("--device", help="emulate: on a Hopper GPU, missing instructions in software; native: on an SM12x GPU."),
    ] = "emulate",
    only: Annotated[
        str, typer.Option("--only", metavar="PATTERN", help="Kernels whose name has this in it, or matches this glob.")
    ] = "",
    quick: Annotated[bool, typer.Option("--quick", help="128x128 tiles without variants, fewer runs.")] = False,
    compile_only: Annotated[
        bool, typer.Option("--compile-only", help="Compile the programs and run none; needs no GPU.")
    ] = False,
    jobs: Jobs = None,
    memory: Memory = None,
    receipt: Annotated[
        Path | None, typer.Option("--receipt", metavar="FILE", help="Write the record of a whole run here.")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Write it where the repository keeps evidence.")] = False,
    mirror: Mirror = None,
    offline: Offline = False,
    state: State = None,
    as_json: Json = False,
) -> None:
    """Run every SM120 kernel of an engine on a GPU and compare with integers, bit for bit; plant faults and see them found.

    Exit code 0: all right; 1: a kernel is wrong; 45, 46: no GPU, or one that cannot do it; 54: a planted fault was not found,
    so that the result proves nothing.
    """
    from sm120kit import verifying
    from sm120kit.errors import ControlMissed, UnknownName
    from sm120kit.trees import Options
    from sm120kit.verify import Device
    from sm120kit.workspace import Workspace, data_root, write_record

    try:
        chosen = Device(device)
    except ValueError:
        raise UnknownName(f"unknown device {device!r}", f"devices: {', '.join(Device)}") from None
    asked = verifying.Verification(chosen, only, quick)
    if (receipt or write) and not (asked.whole and not compile_only):
        raise typer.BadParameter("a receipt is of a whole run: leave out --only, --quick and --compile-only")
    options = Options(Workspace.open(state), mirror, offline, jobs, int(memory * 2**30) if memory is not None else None)
    if compile_only:
        _compile_only(verifying.compile_verification(engine, options, asked, tell=console.say), as_json)
        return
    report, record, name = verifying.verify_kernels(engine, options, asked, tell=console.say)
    if as_json:
        console.json_data(record)
    else:
        _show(report, record)
    if report.missed:
        raise ControlMissed(
            f"planted faults were not found: {'; '.join(report.missed)}", "what passed proves nothing; no receipt was written"
        )
    for path in filter(None, (receipt, data_root() / "patches" / "evidence" / name if write else None)):
        write_record(path, record)
        console.say(f"receipt: {path}")
    raise typer.Exit(0 if report.passed else 1)


def _compile_only(found: list[tuple[str, Any]], as_json: bool) -> None:
    failed = [(name, failure.message) for name, failure in found if failure]
    if as_json:
        console.json_data({"compiled": [name for name, failure in found if not failure], "failed": dict(failed)})
    else:
        for name, message in failed:
            console.data(f"{name}: {message}")
        console.data(f"{len(found) - len(failed)} of {len(found)} programs compile; none was run")
    raise typer.Exit(1 if failed else 0)


def _show(report: Report, record: dict[str, Any]) -> None:
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
        ("planted fault", "class", "what", "on", "seen as"),
        (
            (
                one.name,
                one.kind,
                one.what,
                len(one.seen),
                "NOT FOUND" if one.missed else _seen(one.seen.values(), one.signature),
            )
            for one in report.faults
        ),
    )
    console.table(
        ("instruction", "compared", "verdict", "values", "error/magnitude"),
        (
            (one.instruction, one.compared, one.verdict, f"{one.values:,}", f"{one.max_error_over_magnitude or 0:.3g}")
            for one in report.instructions
        ),
    )
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
    console.data("errors are relative to the sum of the magnitudes of an output's terms, in set inexact, beside float64")
    if not record["verified_on_sm120"]:
        console.data("unverified on SM120. What this cannot show:")
        for line in record["cannot_show"]:
            console.data(f"  {line}")


def _seen(verdicts: Any, signature: str) -> str:
    text = ", ".join(sorted(set(verdicts)))
    return f"{text}: {signature}" if signature else text
