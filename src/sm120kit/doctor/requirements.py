"""What a configuration requires of a host, as further checks: GPUs, memory, shared memory, limits, its ``host`` checks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from sm120kit.doctor.model import Check, Impact, Scope, Status, Verdict, each, not_applicable, ok, outside, problem, unknown
from sm120kit.errors import UnknownName
from sm120kit.host import Gpu, Host
from sm120kit.recipe.configuration import Configuration

UNIFIED_SHARE = 0.93
"""Of a unified memory's nominal size, so much is the kernel's MemTotal at least; firmware and display keep the rest."""

_PAIRS = (Scope.PAIR, Scope.BARE_PAIR)


def checks(wanted: Configuration, general: Sequence[Check]) -> tuple[Check, ...]:
    """The ``general`` checks as far as they matter to a configuration, then one for each thing that it requires.

    Raises:
        UnknownName: it names a check that does not exist.
    """
    known = {check.name: check for check in general}
    strange = [name for name in wanted.host if name not in known]
    if strange:
        raise UnknownName(
            f"{wanted.name}: host: there is no check {', '.join(map(repr, strange))}", f"checks: {', '.join(known)}"
        )
    mattering = [_alone(check) if wanted.hardware.gpus == 1 and check.scope in _PAIRS else check for check in general]
    source = f"recipes/configurations/{wanted.name}.toml"
    named = [known[name] for name in wanted.host]
    return (
        *mattering,
        Check("config-gpus", "as many GPUs as the configuration asks for", Scope.ANY, source, lambda host: _gpus(host, wanted)),
        Check("config-memory", "each GPU has the memory it asks for", Scope.GPU, source, lambda host: _memory(host, wanted)),
        Check("config-shm", "shared memory is as large as it asks for", Scope.ANY, source, lambda host: _shm(host, wanted)),
        Check("config-ulimits", "limits are as it asks for", Scope.ANY, source, lambda host: _ulimits(host, wanted)),
        Check("config-host", "no check that it names is a problem", Scope.GPU, source, lambda host: _named(host, named)),
    )


def suitable(host: Host, wanted: Configuration) -> tuple[tuple[int, Gpu], ...]:
    """GPUs of the kind of memory that a configuration asks for, with their numbers in nvidia-smi's order."""
    return tuple(
        (number, gpu)
        for number, gpu in enumerate(host.gpus)
        if gpu.unified == wanted.hardware.unified and (gpu.capability is None or gpu.capability.startswith("12."))
    )


def memory_bytes(host: Host, gpu: Gpu) -> int | None:
    """A GPU's memory; of a unified one, the host's."""
    if gpu.unified:
        return host.memory_total
    return None if gpu.memory_mib is None else gpu.memory_mib << 20


def _alone(check: Check) -> Check:
    return replace(check, scope=Scope.ANY, judge=lambda host: not_applicable("the configuration uses one GPU"))


def _gpus(host: Host, wanted: Configuration) -> Verdict:
    hardware = wanted.hardware
    found = suitable(host, wanted)
    kind = "GPUs that share the host's memory" if hardware.unified else "SM12x GPUs with memory of their own"
    if len(found) < hardware.gpus:
        return problem(
            Impact.BREAKS,
            f"{len(found)} {kind}; {wanted.name} needs {hardware.gpus}",
            cause="the configuration is for other hardware, or not all GPUs are seen",
            consequence="the engine cannot start: its model is divided among that many",
            fix="choose another one: sm120kit config list; compare nvidia-smi -L with lspci -d 10de:",
        )
    model = re.split(r"[,(]", hardware.gpu)[0].strip()
    others = [(gpu.bus, gpu.name or "unnamed GPU") for _, gpu in found if model not in (gpu.name or model)]
    if len(found) - len(others) < hardware.gpus:
        return problem(
            Impact.MINOR,
            each(others),
            cause=f"the configuration was published for {hardware.gpu}",
            consequence="its figures are not those of this GPU",
            fix="measure: sm120kit bench run URL; do not compare with its reference figures",
        )
    return ok(f"{len(found)} x {model}; {wanted.name} needs {hardware.gpus}")


def _memory(host: Host, wanted: Configuration) -> Verdict:
    needed = wanted.hardware.memory_gb * 1e9 * (UNIFIED_SHARE if wanted.hardware.unified else 1)
    sizes = [(gpu.bus, memory_bytes(host, gpu)) for _, gpu in suitable(host, wanted)]
    known = [(bus, size) for bus, size in sizes if size is not None]
    enough = [size for _, size in known if size >= needed]
    if not sizes:
        return not_applicable("no GPU of the kind that the configuration asks for")
    if len(known) < len(sizes) and len(enough) < wanted.hardware.gpus:
        return unknown(host.why("nvidia-smi-q.xml"), "nvidia-smi --query-gpu=memory.total --format=csv")
    if len(enough) == len(known) or len(enough) >= wanted.hardware.gpus:
        return ok(f"{min(enough) / 1e9:.1f} GB")
    return problem(
        Impact.BREAKS,
        each((bus, f"{size / 1e9:.1f} GB") for bus, size in known if size < needed),
        cause=f"the configuration is for GPUs with {wanted.hardware.memory_gb:g} GB",
        consequence="weights or KV cache do not fit: out of memory while it starts",
        fix="choose a configuration for less memory or more GPUs: sm120kit config list",
    )


def _shm(host: Host, wanted: Configuration) -> Verdict:
    needed = wanted.container.shm_gib << 30
    if not host.container.inside and not wanted.container.ipc_host:
        return not_applicable("sm120kit launch gives the container its own")
    size = host.container.shm_bytes
    if size is None:
        return unknown(host.why("/proc/self/mounts"), "df -h /dev/shm")
    if size < needed:
        gib = wanted.container.shm_gib
        return problem(
            Impact.BREAKS,
            f"/dev/shm has {size >> 20} MiB; {wanted.name} needs {gib} GiB",
            cause="docker gives a container 64 MiB, and a host half of its memory, unless told otherwise",
            consequence="NCCL and the engine's workers run out of it: a crash or a hang while they start",
            fix=f"in a container: docker run --shm-size={gib}g; on a host: sudo mount -o remount,size={gib}G /dev/shm",
        )
    return ok(f"/dev/shm has {size >> 30} GiB")


def _ulimits(host: Host, wanted: Configuration) -> Verdict:
    if not wanted.container.ulimits:
        return not_applicable("the configuration asks for none")
    if not host.container.inside:
        return not_applicable("sm120kit launch gives the container its own")
    here = {"memlock": host.container.memlock, "stack": host.container.stack}
    asked = wanted.container.ulimits
    blind = [name for name in asked if here.get(name) is None]
    if blind:
        return unknown(f"{', '.join(blind)}: {host.why('/proc/self/limits')}", "ulimit -a")
    limits = [(name, here[name] or 0, value) for name, value in asked.items()]
    low = [(name, limit, value) for name, limit, value in limits if limit != -1 and (value == -1 or limit < value)]
    if low:
        return problem(
            Impact.BREAKS,
            ", ".join(f"{name} {limit}; needs {value}" for name, limit, value in low),
            cause="docker's defaults",
            consequence="pinned host buffers cannot be had, deep recursion while compiling ends in a crash",
            fix="docker run " + " ".join(f"--ulimit {name}={value}" for name, _, value in low),
        )
    return ok(", ".join(f"{name} {limit}" for name, limit, _ in limits))


def _named(host: Host, named: Sequence[Check]) -> Verdict:
    """The worst answer of the checks that a configuration names; what does not apply to this host is no problem."""
    if not named:
        return not_applicable("the configuration names none")
    answers = [(check, check.judge(host)) for check in named if not outside(host, check.scope)]
    bad = [(check, verdict) for check, verdict in answers if verdict.status is Status.PROBLEM]
    if bad:
        breaks = any(verdict.impact is Impact.BREAKS for _, verdict in bad)
        return problem(
            Impact.BREAKS if breaks else Impact.SLOWS,
            "; ".join(f"{check.name}: {verdict.fact}" for check, verdict in bad),
            cause="the configuration's figures depend on these: " + ", ".join(check.name for check in named),
            consequence="; ".join(verdict.consequence for _, verdict in bad),
            fix="as the findings of these checks say: " + ", ".join(check.name for check, _ in bad),
        )
    blind = [(check.name, verdict) for check, verdict in answers if verdict.status is Status.UNKNOWN]
    if blind:
        return unknown("; ".join(f"{name}: {verdict.fact}" for name, verdict in blind), blind[0][1].fix)
    content = [check.name for check, verdict in answers if verdict.status is Status.OK]
    return ok(", ".join(content) or "none of them applies to this host")
