"""What is wrong with a host: ``diagnose(host) -> findings``. Pure: it reads the record, never the machine.

Checks are small functions in ``CHECKS``, one topic per module. More checks, such as what a configuration requires of a host,
are handed to ``diagnose`` in the same form.
"""

from __future__ import annotations

from collections.abc import Sequence

from sm120kit.doctor import collectives, containers, gpus, kernel, machine, p2p, pcie, requirements, unified
from sm120kit.doctor.model import (
    Check,
    Finding,
    Impact,
    Scope,
    Status,
    Verdict,
    not_applicable,
    outside,
    problem,
    without_strangers,
)
from sm120kit.host import Host
from sm120kit.recipe.configuration import Configuration

__all__ = ["CHECKS", "Check", "Finding", "Impact", "Scope", "Status", "Verdict", "checks_for", "diagnose", "fit"]

CHECKS: tuple[Check, ...] = tuple(
    check for topic in (gpus, machine, kernel, pcie, p2p, collectives, containers, unified) for check in topic.CHECKS
)


def checks_for(configuration: Configuration) -> tuple[Check, ...]:
    """All checks as far as they matter to a configuration, and what it requires. See :mod:`sm120kit.doctor.requirements`."""
    return requirements.checks(configuration, CHECKS)


def diagnose(host: Host, checks: Sequence[Check] = CHECKS) -> tuple[Finding, ...]:
    """One finding per check, in their order. GPUs that are surely no SM12x, such as one for the display, are left aside."""
    ours = without_strangers(host)
    hosts = {check.name: host if check.scope is Scope.ANY else ours for check in checks}
    return tuple(Finding(check.name, check.title, _verdict(check, hosts[check.name]), check.source) for check in checks)


def fit(findings: Sequence[Finding]) -> bool:
    """Whether nothing breaks or slows this host. What is unknown or minor does not count."""
    return not any(finding.verdict.impact in (Impact.BREAKS, Impact.SLOWS) for finding in findings)


def _verdict(check: Check, host: Host) -> Verdict:
    reason = outside(host, check.scope)
    if reason:
        return not_applicable(reason)
    try:
        return check.judge(host)
    except Exception as error:  # whatever a strange host makes of a check, the others still answer
        return problem(
            Impact.MINOR,
            f"the check itself failed: {type(error).__name__}: {error}",
            cause="a fact of this host has a form that the check does not expect: a bug in sm120kit",
            consequence="this question stays unanswered",
            fix="report it with the output of: sm120kit doctor --record DIR",
        )
