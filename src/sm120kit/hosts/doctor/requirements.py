"""Checks of a configuration's requirements: GPUs, memory, and the checks listed under its ``host``."""

import re
from collections.abc import Sequence
from dataclasses import replace

from sm120kit.core.errors import NotFound
from sm120kit.hosts.doctor import _gpus
from sm120kit.hosts.doctor._findings import (
    Diagnosis,
    HostCheck,
    Impact,
    Scope,
    Status,
    by_device,
    not_applicable,
    ok,
    out_of_scope,
    problem,
    unknown,
)
from sm120kit.hosts.facts import Gpu, Host
from sm120kit.hosts.facts._redact import READ_VARIABLES
from sm120kit.recipes.configurations import Configuration

UNIFIED_SHARE = 0.93
"""MemTotal is at least this share of the nominal unified memory; firmware and display reserve the rest."""

_PAIRS = (Scope.PAIR, Scope.BARE_PAIR)
_REMOVED = (
    *("cuda-compat", "cudart", "kernel-cache", "kernel-version", "nvme", "posted-writes"),
    *("raid", "sysctl", "turin-graph", "ulimits", "zfs"),
)
"""Checks that users' configurations may list and that exist no more."""


def checks(configuration: Configuration, general: Sequence[HostCheck]) -> tuple[HostCheck, ...]:
    """The ``general`` checks, as far as they apply to a configuration, then one for each of its requirements.

    Raises:
        NotFound: the configuration lists a check that does not exist.
    """
    by_name = {check.name: check for check in general}
    listed = [name for name in configuration.host if name not in _REMOVED]
    missing = [name for name in listed if name not in by_name]
    if missing:
        raise NotFound(
            f"{configuration.name}: host: no check named {', '.join(map(repr, missing))}", f"checks: {', '.join(by_name)}"
        )
    single = configuration.hardware.gpus_per_node == 1
    applying = [_without_peers(check) if single and check.scope in _PAIRS else check for check in general]
    source = f"recipes/configurations/{configuration.name}.toml"
    required = [_in_environment(by_name[name], configuration.environment) for name in listed]
    return (
        *(_in_environment(check, configuration.environment) for check in applying),
        HostCheck("config-driver", "the driver supports CUDA 13", Scope.GPU, source, _driver),
        HostCheck("config-gpus", "enough GPUs", Scope.ANY, source, lambda host: _enough_gpus(host, configuration)),
        HostCheck("config-memory", "enough memory on each GPU", Scope.GPU, source, lambda host: _memory(host, configuration)),
        HostCheck("config-host", "the required checks are ok", Scope.GPU, source, lambda host: _required(host, required)),
    )


def suitable(host: Host, configuration: Configuration) -> tuple[tuple[int, Gpu], ...]:
    """GPUs with the kind of memory that a configuration requires, with their numbers in nvidia-smi's order."""
    return tuple(
        (number, gpu)
        for number, gpu in enumerate(host.gpus)
        if gpu.unified == configuration.hardware.unified and (gpu.capability is None or gpu.capability.startswith("12."))
    )


def memory_bytes(host: Host, gpu: Gpu) -> int | None:
    """A GPU's memory in bytes; for unified memory, the host's."""
    if gpu.unified:
        return host.memory_total
    return None if gpu.memory_mib is None else gpu.memory_mib << 20


def _in_environment(check: HostCheck, environment: dict[str, str]) -> HostCheck:
    """A check of the host with the variables that a configuration sets."""
    return replace(
        check, diagnose=lambda host: check.diagnose(replace(host, environment=host.environment | _nonempty(environment)))
    )


def _nonempty(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name in READ_VARIABLES and value}


def _driver(host: Host) -> Diagnosis:
    """The images of all configurations contain CUDA 13."""
    diagnosis = _gpus.driver.diagnose(host)
    return replace(diagnosis, impact=Impact.BREAKS) if diagnosis.status is Status.PROBLEM else diagnosis


def _without_peers(check: HostCheck) -> HostCheck:
    return replace(check, scope=Scope.ANY, diagnose=lambda host: not_applicable("the configuration uses one GPU"))


def _enough_gpus(host: Host, configuration: Configuration) -> Diagnosis:
    hardware, count = configuration.hardware, configuration.hardware.gpus_per_node
    candidates = suitable(host, configuration)
    kind = "GPUs with unified memory" if hardware.unified else "discrete SM12x GPUs"
    if len(candidates) < count:
        return problem("config-gpus.few", Impact.BREAKS, f"{len(candidates)} {kind}; {configuration.name} requires {count}")
    model = re.split(r"[,(]", hardware.gpu)[0].strip()
    different = [(gpu.bus, gpu.name or "unnamed GPU") for _, gpu in candidates if model not in (gpu.name or model)]
    if len(candidates) - len(different) < count:
        return problem(
            "config-gpus.other", Impact.MINOR, by_device(different), cause=f"the configuration was published for {hardware.gpu}"
        )
    return ok(f"{len(candidates)} x {model}; {configuration.name} requires {count}")


def _memory(host: Host, configuration: Configuration) -> Diagnosis:
    hardware = configuration.hardware
    if hardware.memory_gb is None:
        return not_applicable("the configuration states no size")
    required = hardware.memory_gb * 1e9 * (UNIFIED_SHARE if hardware.unified else 1)
    sizes = [(gpu.bus, memory_bytes(host, gpu)) for _, gpu in suitable(host, configuration)]
    known = [(bus, size) for bus, size in sizes if size is not None]
    enough = [size for _, size in known if size >= required]
    if not sizes:
        return not_applicable("no GPU of the kind that the configuration requires")
    if len(known) < len(sizes) and len(enough) < hardware.gpus_per_node:
        return unknown(host.missing_reason("nvidia-smi-q.xml"), "nvidia-smi --query-gpu=memory.total --format=csv")
    if len(enough) == len(known) or len(enough) >= hardware.gpus_per_node:
        return ok(f"{min(enough) / 1e9:.1f} GB")
    return problem(
        "config-memory",
        Impact.BREAKS,
        by_device((bus, f"{size / 1e9:.1f} GB") for bus, size in known if size < required),
        cause=f"the configuration is for GPUs with {hardware.memory_gb:g} GB",
    )


def _required(host: Host, required: Sequence[HostCheck]) -> Diagnosis:
    """The worst diagnosis of the checks that a configuration lists; checks that do not apply to this host are no problem."""
    if not required:
        return not_applicable("the configuration lists no checks")
    diagnoses = [(check, check.diagnose(host)) for check in required if not out_of_scope(host, check.scope)]
    problems = [(check, diagnosis) for check, diagnosis in diagnoses if diagnosis.status is Status.PROBLEM]
    if problems:
        breaks = any(diagnosis.impact is Impact.BREAKS for _, diagnosis in problems)
        return problem(
            "config-host",
            Impact.BREAKS if breaks else Impact.SLOWS,
            "; ".join(f"{check.name}: {diagnosis.fact}" for check, diagnosis in problems),
            cause="the configuration's figures depend on these checks: " + ", ".join(check.name for check in required),
            consequence="; ".join(diagnosis.consequence for _, diagnosis in problems),
            fix="see the findings of these checks: " + ", ".join(check.name for check, _ in problems),
        )
    unclear = [(check.name, diagnosis) for check, diagnosis in diagnoses if diagnosis.status is Status.UNKNOWN]
    if unclear:
        return unknown("; ".join(f"{name}: {diagnosis.fact}" for name, diagnosis in unclear), unclear[0][1].fix)
    passed = [check.name for check, diagnosis in diagnoses if diagnosis.status is Status.OK]
    return ok(", ".join(passed) or "none of the checks applies to this host")
