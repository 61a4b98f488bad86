"""``sm120kit doctor``: what is wrong with this host, and the way out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sm120kit.cli.options import Json

if TYPE_CHECKING:
    from sm120kit.doctor import Finding


def doctor(
    config: Annotated[
        str, typer.Argument(metavar="[CONFIG]", help="Also ask what this configuration requires.", show_default=False)
    ] = "",
    root: Annotated[
        Path, typer.Option("--root", metavar="DIR", help="Look at a recorded host, as --record writes it.", show_default=False)
    ] = Path("/"),
    record: Annotated[
        Path | None, typer.Option("--record", metavar="DIR", help="Also write what was read to a new directory.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also copy between the GPUs, read back, and run collectives: takes minutes.")
    ] = False,
    python: Annotated[
        str,
        typer.Option(
            "--python",
            metavar="PYTHON",
            help="For --measure: a Python whose torch has CUDA; default: this one.",
            show_default=False,
        ),
    ] = sys.executable,
    everything: Annotated[bool, typer.Option("--all", help="Also list checks that do not apply.")] = False,
    as_json: Json = False,
) -> None:
    """Look for what makes SM12x hosts hang, slow or wrong: IOMMU, ACS, BARs, links, P2P, driver, NCCL, containers.

    Nothing is changed, and only --measure uses a GPU. Run it as root to see ACS and ASPM. Exit code 0: nothing
    breaks or slows this host, as far as could be known, and it is what CONFIG asks for; 1: something does, or it is not.
    """
    from dataclasses import asdict

    from sm120kit import console
    from sm120kit import doctor as judge
    from sm120kit.host import probe
    from sm120kit.recipe import configuration

    if measure and root != Path("/"):
        raise typer.BadParameter("a recorded host cannot be measured", param_hint="--measure")
    checks = judge.checks_for(configuration.load(config)) if config else judge.CHECKS
    host = probe(root, record)
    findings = judge.diagnose(host, checks)
    if measure:
        from sm120kit.doctor.measure import measure as put_to_the_test

        findings += put_to_the_test(host, python)
        console.say("the figures to compare with are published by others; unverified on SM120")
    fit = judge.fit(findings)
    if as_json:
        console.json_data({"fit": fit, "findings": [asdict(finding) for finding in findings], "host": asdict(host)})
    else:
        shown = [finding for finding in findings if everything or finding.status is not judge.Status.NOT_APPLICABLE]
        console.table(
            ("check", "answer", "what was seen"),
            ((finding.check, finding.verdict.impact or finding.status, finding.verdict.fact) for finding in shown),
        )
        for impact in judge.Impact:
            for finding in findings:
                if finding.verdict.impact is impact:
                    _explain(finding)
        unknown = [finding for finding in findings if finding.status is judge.Status.UNKNOWN]
        for finding in unknown:
            console.data(f"{finding.check} is unknown; to know it: {finding.verdict.fix}")
        counts = {status: sum(finding.status is status for finding in findings) for status in judge.Status}
        answer = f"{'fit' if fit else 'not fit'}{f' for {config}' if config else ''}"
        console.data(f"{answer}: {', '.join(f'{count} {status}' for status, count in counts.items())}")
        if record:
            console.say(f"what was read is in {record}: look at it before you send it")
    raise typer.Exit(0 if fit else 1)


def _explain(finding: Finding) -> None:
    from sm120kit import console

    verdict = finding.verdict
    console.data(f"{finding.check} ({verdict.impact}): {verdict.fact}")
    for name, text in (
        ("cause", verdict.cause),
        ("then", verdict.consequence),
        ("fix", verdict.fix),
        ("source", finding.source),
    ):
        console.data(f"  {name + ':':<8}{text}")
    console.data("")
