"""Diagnose a host: ``diagnose(host) -> findings``. Pure: works on the recorded facts and never reads the machine.

Checks are small functions in ``CHECKS``, one module per topic. Further checks, such as the requirements of a configuration, are
passed to ``diagnose`` in the same form.
"""

from __future__ import annotations

from collections.abc import Sequence

from sm120kit.hosts.doctor import collectives, containers, gpus, linux, machine, p2p, pcie, requirements, unified
from sm120kit.hosts.doctor.findings import (
    Diagnosis,
    Finding,
    HostCheck,
    Impact,
    Scope,
    Status,
    not_applicable,
    only_sm12x,
    out_of_scope,
    problem,
)
from sm120kit.hosts.facts import Host
from sm120kit.recipes.configurations import Configuration

__all__ = ["CHECKS", "Diagnosis", "Finding", "HostCheck", "Impact", "Scope", "Status", "checks_for", "diagnose", "fit"]

CHECKS: tuple[HostCheck, ...] = tuple(
    check for topic in (gpus, machine, linux, pcie, p2p, collectives, containers, unified) for check in topic.CHECKS
)


def checks_for(configuration: Configuration) -> tuple[HostCheck, ...]:
    """All checks that apply to a configuration, and one for each of its requirements. See :mod:`.requirements`."""
    return requirements.checks(configuration, CHECKS)


def diagnose(host: Host, checks: Sequence[HostCheck] = CHECKS) -> tuple[Finding, ...]:
    """One finding per check, in their order.

    GPUs with a compute capability other than 12.x, such as a display GPU, are ignored, except by checks of ``Scope.ANY``.
    """
    sm12x = only_sm12x(host)
    return tuple(
        Finding(check.name, check.title, _diagnosis(check, host if check.scope is Scope.ANY else sm12x), check.source)
        for check in checks
    )


def fit(findings: Sequence[Finding]) -> bool:
    """Whether no finding breaks or slows this host. Unknown and minor findings do not count."""
    return not any(finding.verdict.impact in (Impact.BREAKS, Impact.SLOWS) for finding in findings)


def _diagnosis(check: HostCheck, host: Host) -> Diagnosis:
    reason = out_of_scope(host, check.scope)
    if reason:
        return not_applicable(reason)
    try:
        return check.diagnose(host)
    except Exception as error:  # a fact in an unexpected form must not prevent the other findings
        return problem(
            Impact.MINOR,
            f"the check failed: {type(error).__name__}: {error}",
            cause="a bug in sm120kit: a fact of this host has a form that the check does not handle",
            consequence="this check has no result",
            fix="report it with the output of: sm120kit doctor --record DIR",
        )
