"""Checks and findings of doctor: a check diagnoses one property of a host as ok, problem, unknown or not applicable."""

import functools
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from sm120kit.hosts.facts import Host


class Status(StrEnum):
    """Result of a check."""

    OK = "ok"
    PROBLEM = "problem"
    NOT_APPLICABLE = "not applicable"
    UNKNOWN = "unknown"


class Impact(StrEnum):
    """Effect of a problem: hangs, crashes or wrong results; lower speed; a few percent at most, or on some boards only."""

    BREAKS = "breaks"
    SLOWS = "slows"
    MINOR = "minor"


class Scope(StrEnum):
    """Hosts that a check applies to."""

    ANY = "any host"
    GPU = "an SM12x GPU"
    DISCRETE = "a discrete GPU"
    PAIR = "two or more discrete GPUs"
    BARE_PAIR = "two or more discrete GPUs on bare metal"
    UNIFIED = "a GPU with unified memory (GB10)"


@dataclass(frozen=True)
class HostRemedy:
    """A further remedy of a problem, and what it may break or give up."""

    action: str
    risk: str


Remedies = tuple[HostRemedy, ...]


@dataclass(frozen=True)
class Diagnosis:
    """Result of one check on one host.

    ``fact`` is the observed value. A problem also has cause, consequence and fix, and further remedies in the order in which to
    try them; for an unknown fact, ``fix`` is a command that shows it.
    """

    status: Status
    fact: str
    impact: Impact | None = None
    cause: str = ""
    consequence: str = ""
    fix: str = ""
    risk: str = ""
    alternatives: Remedies = ()


@dataclass(frozen=True)
class Finding:
    """A diagnosis with the check's name and title, and the source of the check's knowledge.

    ``generic`` is a condition of many hosts without any symptom; a problem that is not generic is the more likely cause.
    """

    check: str
    title: str
    verdict: Diagnosis
    source: str
    generic: bool = False

    @property
    def status(self) -> Status:
        """ok, problem, not applicable or unknown."""
        return self.verdict.status


@dataclass(frozen=True)
class HostCheck:
    """One check. ``diagnose`` is called for hosts within ``scope`` only; ``title`` states the expected condition.

    The condition of a ``generic`` check is absent on many hosts that work.
    """

    name: str
    title: str
    scope: Scope
    source: str
    diagnose: Callable[[Host], Diagnosis]
    generic: bool = False


_CHECKS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("checks.toml").read_text("utf-8"))
"""What each check expects, and the texts of its problems."""


def check(name: str) -> Callable[[Callable[[Host], Diagnosis]], HostCheck]:
    """Decorator that turns a function ``Host -> Diagnosis`` into the check with a name in ``checks.toml``."""
    table = _CHECKS[name]
    scope, generic = Scope[table["scope"]], table.get("generic", False)
    return lambda diagnose: HostCheck(name, table["title"], scope, table["source"], diagnose, generic)


def in_order(checks: Iterable[HostCheck]) -> tuple[HostCheck, ...]:
    """Checks in the order of ``checks.toml``."""
    return tuple(sorted(checks, key=lambda check: list(_CHECKS).index(check.name)))


def ok(fact: str) -> Diagnosis:
    """The expected condition holds."""
    return Diagnosis(Status.OK, fact)


def problem(
    name: str, impact: Impact, fact: str, *, cause: str = "", consequence: str = "", fix: str = "", remedies: Remedies = ()
) -> Diagnosis:
    """The expected condition does not hold. ``name`` is that of the check, or ``check.problem``, in ``checks.toml``.

    What the file does not have depends on the host: ``fix`` is the exact remedy, or ``remedies`` several with their risks, in
    order.
    """
    table = functools.reduce(dict.__getitem__, name.split("."), _CHECKS)
    cause, consequence, fix = (
        given or table.get(key, "") for key, given in (("cause", cause), ("consequence", consequence), ("fix", fix))
    )
    first, others = (HostRemedy(fix, ""), remedies) if fix else (remedies[0], remedies[1:])
    return Diagnosis(Status.PROBLEM, fact, impact, cause, consequence, first.action, first.risk, others)


def as_information(diagnosis: Diagnosis, reason: str) -> Diagnosis:
    """A problem that has no effect on this host for a reason such as "NCCL_P2P_DISABLE=1"; "" leaves it as it is."""
    if not reason or diagnosis.status is not Status.PROBLEM:
        return diagnosis
    return replace(diagnosis, impact=Impact.MINOR, consequence=f"none here: {reason}; otherwise: {diagnosis.consequence}")


def not_applicable(reason: str) -> Diagnosis:
    """The check does not apply to this host."""
    return Diagnosis(Status.NOT_APPLICABLE, reason)


def unknown(reason: str, command: str) -> Diagnosis:
    """A fact could not be read; ``command`` shows it."""
    return Diagnosis(Status.UNKNOWN, reason, fix=command)


def by_device(facts: Iterable[tuple[str, str]]) -> str:
    """Facts of several devices on one line: (address, fact) pairs, devices with the same fact grouped."""
    buses: dict[str, list[str]] = {}
    for bus, fact in facts:
        buses.setdefault(fact, []).append(bus)
    if len(buses) == 1:
        (fact,) = buses
        return fact
    return "; ".join(f"{', '.join(devices)}: {fact}" for fact, devices in buses.items())


def only_sm12x(host: Host) -> Host:
    """The host without GPUs that are known not to be SM12x, and without the ports and pairs that belong to those only."""
    gpus = tuple(gpu for gpu in host.gpus if gpu.capability is None or gpu.capability.startswith("12."))
    buses = {gpu.bus for gpu in gpus}
    ports = {bus for gpu in gpus for bus in gpu.bridges}
    return replace(
        host,
        gpus=gpus,
        bridges=tuple(port for port in host.bridges if port.bus in ports),
        pairs=tuple(pair for pair in host.pairs if {pair.first, pair.second} <= buses),
    )


def out_of_scope(host: Host, scope: Scope) -> str:
    """The reason why a scope excludes a host; "" when it does not."""
    discrete = [gpu for gpu in host.gpus if not gpu.unified]
    if scope is Scope.ANY:
        return ""
    if not host.gpus:
        return "no SM12x GPU detected"
    if scope is Scope.UNIFIED:
        return "" if len(discrete) < len(host.gpus) else "the GPUs are discrete"
    if scope is Scope.GPU:
        return ""
    if not discrete:
        return "GB10 has unified memory and no peer GPU on PCIe"
    if scope is Scope.DISCRETE:
        return ""
    if len(discrete) < 2:
        return "only one GPU"
    if scope is Scope.BARE_PAIR and host.wsl:
        return "WSL2 hides the PCIe tree"
    if scope is Scope.BARE_PAIR and host.virtual:
        return f"a virtual machine ({host.virtual}) has an emulated PCIe tree; run doctor on its host instead"
    return ""
