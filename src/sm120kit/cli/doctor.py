"""``sm120kit doctor``: diagnose a host and print its problems with their remedies."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from sm120kit.cli.options import Html, Json, argument, configuration_names, option
from sm120kit.core import console
from sm120kit.hosts.doctor import CHECKS, Finding, Status, checks_for, diagnose, fit, ranked, report, with_measurements
from sm120kit.hosts.doctor.measure import measure as measure_transfers
from sm120kit.hosts.facts import probe
from sm120kit.recipes import configurations


@dataclass(frozen=True)
class Measured:
    """What is measured, and by which Python."""

    transfers: Annotated[
        bool, option("--measure", "Also verify and time copies and collectives between the GPUs: takes minutes.")
    ] = False
    python: Annotated[
        str,
        option(
            "--python PYTHON",
            "For --measure: a Python whose torch supports CUDA; default: the Python that runs sm120kit.",
            show_default=False,
        ),
    ] = sys.executable


def doctor(
    config: Annotated[
        str,
        argument(
            "CONFIG",
            "Also check the requirements of this configuration.",
            autocompletion=configuration_names,
            show_default=False,
        ),
    ] = "",
    root: Annotated[Path, option("--root FILE", "Diagnose another host: its doctor --json.", show_default=False)] = Path("/"),
    *,
    measured: Measured,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Diagnose why an SM12x host hangs, is slow or gives wrong results.

    Checks IOMMU, ACS, BARs, links, P2P, driver, NCCL and containers. Changes nothing; only --measure uses a GPU. ACS and ASPM
    can be read by root only. Exit code 0: nothing breaks or slows this host, or what CONFIG requires of it; 1: otherwise.
    """
    if measured.transfers and root != Path("/"):
        raise typer.BadParameter("a recorded host cannot be measured", param_hint="--measure")
    if measured.python != sys.executable and not measured.transfers:
        raise typer.BadParameter("it runs the measurements: add --measure", param_hint="--python")
    configuration = configurations.load(config) if config else None
    checks = checks_for(configuration) if configuration else CHECKS
    host = probe(root)
    findings = diagnose(host, checks)
    if measured.transfers:
        findings = with_measurements(findings, measure_transfers(host, measured.python))
    is_fit = fit(findings)
    if as_json:
        console.json_data(report(host, findings, config))
    else:
        _print_findings(findings)
        _print_summary(findings, is_fit, config)
    raise typer.Exit(0 if is_fit else 1)


def _print_findings(findings: Sequence[Finding]) -> None:
    console.table(
        ("check", "status", "observed"),
        (
            (finding.check, finding.verdict.impact or finding.status, finding.verdict.fact)
            for finding in findings
            if finding.status is not Status.NOT_APPLICABLE
        ),
    )
    for finding in ranked(findings):
        _print_problem(finding)
    for finding in findings:
        if finding.status is Status.UNKNOWN:
            console.data(f"{finding.check} is unknown; check it with: {finding.verdict.fix}")


def _print_problem(finding: Finding) -> None:
    diagnosis = finding.verdict
    console.data(f"{finding.check} ({diagnosis.impact}): {diagnosis.fact}")
    for label, text in (
        ("cause", diagnosis.cause),
        ("effect", diagnosis.consequence),
        ("fix", diagnosis.fix),
        ("risk", diagnosis.risk),
        *(item for remedy in diagnosis.alternatives for item in (("or", remedy.action), ("risk", remedy.risk))),
        ("source", finding.source),
    ):
        if text:
            console.data(f"  {label + ':':<8}{text}")
    console.data("")


def _print_summary(findings: Sequence[Finding], is_fit: bool, config: str) -> None:
    counts = {status: sum(finding.status is status for finding in findings) for status in Status}
    result = f"{'fit' if is_fit else 'not fit'}{f' for {config}' if config else ''}"
    console.data(f"{result}: {', '.join(f'{count} {status}' for status, count in counts.items())}")
