"""The words of judgement: a check asks one question of a host, and its finding answers it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from sm120kit.host import Host


class Status(StrEnum):
    """The four answers."""

    OK = "ok"
    PROBLEM = "problem"
    NOT_APPLICABLE = "not applicable"
    UNKNOWN = "unknown"


class Impact(StrEnum):
    """What a problem does: hangs, crashes and wrong results; lost speed; or a few percent, perhaps."""

    BREAKS = "breaks"
    SLOWS = "slows"
    MINOR = "minor"


class Scope(StrEnum):
    """On which hosts a question makes sense."""

    ANY = "any host"
    GPU = "a host with an SM12x GPU"
    DISCRETE = "a GPU with memory of its own"
    PAIR = "two GPUs with memory of their own"
    BARE_PAIR = "two GPUs with memory of their own on bare metal"
    UNIFIED = "a GPU that shares the host's memory (GB10)"


@dataclass(frozen=True)
class Verdict:
    """What a check says. ``fact`` is what was seen. A problem has cause, consequence and fix; unknown has what to run."""

    status: Status
    fact: str
    impact: Impact | None = None
    cause: str = ""
    consequence: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Finding:
    """A verdict with the question it answers and where the knowledge is from."""

    check: str
    title: str
    verdict: Verdict
    source: str

    @property
    def status(self) -> Status:
        """ok, problem, not applicable or unknown."""
        return self.verdict.status


@dataclass(frozen=True)
class Check:
    """One question: ``judge`` looks at a host within ``scope`` and answers."""

    name: str
    title: str
    scope: Scope
    source: str
    judge: Callable[[Host], Verdict]


def check(name: str, title: str, scope: Scope, source: str) -> Callable[[Callable[[Host], Verdict]], Check]:
    """Make a check of a function."""
    return lambda judge: Check(name, title, scope, source, judge)


def ok(fact: str) -> Verdict:
    """All is well."""
    return Verdict(Status.OK, fact)


def problem(impact: Impact, fact: str, *, cause: str, consequence: str, fix: str) -> Verdict:
    """Something is wrong; ``fix`` is the exact way out."""
    return Verdict(Status.PROBLEM, fact, impact, cause, consequence, fix)


def not_applicable(why: str) -> Verdict:
    """The question makes no sense here."""
    return Verdict(Status.NOT_APPLICABLE, why)


def unknown(why: str, run: str) -> Verdict:
    """A fact could not be had; ``run`` gets it."""
    return Verdict(Status.UNKNOWN, why, fix=run)


def each(facts: Iterable[tuple[str, str]]) -> str:
    """Facts of several devices in one line: (address, fact) -> those with the same fact together."""
    together: dict[str, list[str]] = {}
    for bus, fact in facts:
        together.setdefault(fact, []).append(bus)
    if len(together) == 1:
        (fact,) = together
        return fact
    return "; ".join(f"{', '.join(buses)}: {fact}" for fact, buses in together.items())


def without_strangers(host: Host) -> Host:
    """A host as if it had only GPUs that are, or may be, SM12x."""
    gpus = tuple(gpu for gpu in host.gpus if gpu.capability is None or gpu.capability.startswith("12."))
    buses = {gpu.bus for gpu in gpus}
    above = {bus for gpu in gpus for bus in gpu.bridges}
    return replace(
        host,
        gpus=gpus,
        bridges=tuple(port for port in host.bridges if port.bus in above),
        pairs=tuple(pair for pair in host.pairs if {pair.first, pair.second} <= buses),
    )


def outside(host: Host, scope: Scope) -> str:
    """Why a host is outside a scope; "" when it is within."""
    discrete = [gpu for gpu in host.gpus if not gpu.unified]
    if scope is Scope.ANY:
        return ""
    if not host.gpus:
        return "no SM12x GPU found"
    if scope is Scope.UNIFIED:
        return "" if len(discrete) < len(host.gpus) else "the GPUs have memory of their own"
    if scope is Scope.GPU:
        return ""
    if not discrete:
        return "GB10 shares the host's memory and has no peer on PCIe"
    if scope is Scope.DISCRETE:
        return ""
    if len(discrete) < 2:
        return "only one GPU"
    if scope is Scope.BARE_PAIR and host.wsl:
        return "WSL2 hides the PCIe tree"
    if scope is Scope.BARE_PAIR and host.virtual:
        return f"a guest ({host.virtual}) shows an emulated PCIe tree, and its settings belong to the host: run doctor there"
    return ""
