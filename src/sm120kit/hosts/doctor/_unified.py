"""Checks of GB10 (DGX Spark), whose memory CPU and GPU share."""

from __future__ import annotations

from sm120kit.hosts.doctor._findings import Diagnosis, Impact, check, ok, problem, unknown
from sm120kit.hosts.facts import Host

FREE_SHARE, SCARCE_SHARE = 0.9, 0.7
"""Below the second share no model of a configuration fits, unless a running server occupies the memory."""

WITHOUT_CONTIGUOUS_MEMORY = ("7.0.0-1019-nvidia", "7.0.0-31-")
"""Releases of kernels of DGX OS on which owners report it."""


@check("unified-headroom")
def headroom(host: Host) -> Diagnosis:
    total, available = host.memory_total, host.memory_available
    if total is None or available is None:
        return unknown(host.missing_reason("/proc/meminfo"), "free -h")
    fact = f"{available >> 30} of {total >> 30} GiB available"
    if available < FREE_SHARE * total:
        occupied = available < SCARCE_SHARE * total and not any(gpu.processes for gpu in host.gpus)
        return problem("unified-headroom", Impact.SLOWS if occupied else Impact.MINOR, fact)
    return ok(fact)


@check("unified-guard")
def guard(host: Host) -> Diagnosis:
    if host.guards is None:
        return unknown("systemd's control groups are not visible", "systemctl is-active earlyoom systemd-oomd")
    if not host.guards:
        return problem("unified-guard", Impact.MINOR, "none of earlyoom, systemd-oomd and nohang is running")
    return ok(f"{', '.join(host.guards)} is running")


@check("unified-kernel")
def kernel(host: Host) -> Diagnosis:
    if host.kernel is None:
        return unknown(host.missing_reason("/proc/sys/kernel/osrelease"), "uname -r")
    if host.kernel.startswith(WITHOUT_CONTIGUOUS_MEMORY):
        return problem("unified-kernel", Impact.MINOR, f"Linux {host.kernel}")
    return ok(f"Linux {host.kernel}")
