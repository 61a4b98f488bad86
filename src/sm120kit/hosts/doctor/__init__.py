"""Diagnose a host: ``diagnose(host) -> findings``. Pure: works on the recorded facts and never reads the machine.

Checks are small functions in ``CHECKS``, one module per topic; ``checks.toml`` has what they expect, and the texts of their
problems. Further checks, such as the requirements of a configuration, are
passed to ``diagnose`` in the same form.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sm120kit.hosts.doctor import _gpus, _linux, _p2p, _pcie, requirements
from sm120kit.hosts.doctor._findings import (
    Diagnosis,
    Finding,
    HostCheck,
    HostRemedy,
    Impact,
    Scope,
    Status,
    as_information,
    in_order,
    not_applicable,
    only_sm12x,
    out_of_scope,
    problem,
)
from sm120kit.hosts.facts import Host
from sm120kit.recipes.configurations import Configuration

__all__ = [
    "CHECKS",
    "Diagnosis",
    "DoctorReport",
    "Finding",
    "HostCheck",
    "HostRemedy",
    "Impact",
    "Scope",
    "Status",
    "checks_for",
    "diagnose",
    "fit",
    "ranked",
    "report",
    "with_measurements",
]

TOPICS = (_gpus, _linux, _pcie, _p2p)
CHECKS = in_order(check for topic in TOPICS for check in vars(topic).values() if isinstance(check, HostCheck))


def checks_for(configuration: Configuration) -> tuple[HostCheck, ...]:
    """All checks that apply to a configuration, and one for each of its requirements. See :mod:`.requirements`."""
    return requirements.checks(configuration, CHECKS)


def diagnose(host: Host, checks: Sequence[HostCheck] = CHECKS) -> tuple[Finding, ...]:
    """One finding per check, in their order.

    GPUs with a compute capability other than 12.x, such as a display GPU, are ignored, except by checks of ``Scope.ANY``.
    """
    sm12x = only_sm12x(host)
    return tuple(
        Finding(
            check.name, check.title, _diagnosis(check, host if check.scope is Scope.ANY else sm12x), check.source, check.generic
        )
        for check in checks
    )


def fit(findings: Sequence[Finding]) -> bool:
    """Whether no finding breaks or slows this host. Unknown and minor findings do not count."""
    return not any(finding.verdict.impact in (Impact.BREAKS, Impact.SLOWS) for finding in findings)


def ranked(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The problems, most likely cause first: by impact, those that are generic last, then in the order of the checks."""
    problems = [finding for finding in findings if finding.verdict.impact]
    return tuple(
        sorted(problems, key=lambda finding: (list(Impact).index(finding.verdict.impact or Impact.MINOR), finding.generic))
    )


def with_measurements(findings: Sequence[Finding], measured: Sequence[Finding]) -> tuple[Finding, ...]:
    """Findings with those of ``--measure``. Correct transfers exclude generic problems as causes."""
    if measured and all(finding.status is Status.OK for finding in measured):
        findings = [
            replace(finding, verdict=as_information(finding.verdict, "measured: transfers are correct"))
            if finding.generic and finding.verdict.impact is Impact.BREAKS
            else finding
            for finding in findings
        ]
    return (*findings, *measured)


@dataclass(frozen=True)
class DoctorReport:
    """What ``doctor --json`` prints; docs/doctor.schema.json is its schema.

    ``problems`` are the names of the checks with a problem, the most likely cause first; ``configuration`` is "" without one.
    """

    schema_version: int
    configuration: str
    fit: bool
    problems: tuple[str, ...]
    findings: tuple[Finding, ...]
    host: Host


def report(host: Host, findings: Sequence[Finding], configuration: str = "") -> DoctorReport:
    """The report on a host. A change of its form that breaks programs which read it increases ``schema_version``."""
    names = tuple(finding.check for finding in ranked(findings))
    return DoctorReport(3, configuration, fit(findings), names, tuple(findings), host)


def _diagnosis(check: HostCheck, host: Host) -> Diagnosis:
    reason = out_of_scope(host, check.scope)
    if reason:
        return not_applicable(reason)
    try:
        return check.diagnose(host)
    except Exception as error:  # a fact in an unexpected form must not prevent the other findings
        return problem("failed", Impact.MINOR, f"the check failed: {type(error).__name__}: {error}")
