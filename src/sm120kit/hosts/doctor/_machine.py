"""Checks of the machine: hypervisor, CPUs and NUMA."""

from __future__ import annotations

from sm120kit.hosts.doctor._findings import Diagnosis, Impact, check, not_applicable, ok, problem, unknown
from sm120kit.hosts.doctor._peers import p2p_unused
from sm120kit.hosts.facts import Host


@check("wsl2")
def wsl2(host: Host) -> Diagnosis:
    if host.wsl:
        return problem("wsl2", Impact.SLOWS, "this is a WSL2 kernel")
    if host.wsl is None:
        return unknown(host.missing_reason("/proc/version", "/proc/sys/kernel/osrelease"), "uname -r")
    return ok("native Linux")


@check("virtual-machine")
def virtual_machine(host: Host) -> Diagnosis:
    if host.wsl:
        return not_applicable("see the finding wsl2")
    if host.virtual is None:
        return unknown(host.missing_reason("/proc/cpuinfo"), "systemd-detect-virt")
    if not host.virtual:
        return ok("bare metal")
    if len(host.gpus) < 2:
        return ok(f"a virtual machine ({host.virtual}) with one GPU; its BARs and links are emulated")
    return problem("virtual-machine", Impact.MINOR, f"a virtual machine ({host.virtual}) with {len(host.gpus)} GPUs")


@check("numa")
def numa(host: Host) -> Diagnosis:
    nodes, sockets = host.cpu.nodes, host.cpu.sockets
    if nodes is None or sockets is None:
        return unknown(host.missing_reason("/sys/devices/system/node/online"), "lscpu | grep -E 'Socket|NUMA'")
    if nodes > sockets:
        return problem("numa", Impact.MINOR if p2p_unused(host) else Impact.SLOWS, f"{nodes} NUMA nodes on {sockets} socket(s)")
    return ok(f"{nodes} NUMA node(s) on {sockets} socket(s)")


@check("governor")
def governor(host: Host) -> Diagnosis:
    if not host.cpu.governors:
        return not_applicable("this kernel has no CPU frequency governors")
    if host.cpu.governors != ("performance",):
        return problem("governor", Impact.MINOR, f"governor: {', '.join(host.cpu.governors)}")
    return ok("governor: performance")
