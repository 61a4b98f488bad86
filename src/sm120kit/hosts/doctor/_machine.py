"""Checks of the machine: hypervisor, CPUs, NUMA and storage."""

from __future__ import annotations

from sm120kit.hosts.doctor._findings import Diagnosis, HostCheck, Impact, Scope, check, not_applicable, ok, problem, unknown
from sm120kit.hosts.doctor._peers import p2p_unused
from sm120kit.hosts.facts import Host

TURIN_FAMILY = 26
"""CPU family of AMD Zen 5, such as EPYC 9005 "Turin" (Linux's amd.c)."""
WIKI = "github.com/Visual-Synthesizer/rtx6kpro"


@check("wsl2", "Linux is native, not WSL2", Scope.GPU, f"{WIKI} daily-summaries 2026-05-01")
def wsl2(host: Host) -> Diagnosis:
    if host.wsl:
        return problem(
            Impact.SLOWS,
            "this is a WSL2 kernel",
            cause="under WSL2 every kernel launch goes through the Windows driver",
            consequence="about half the decode speed: 60 to 70 tok/s instead of 120 to 150 on native Linux",
            fix="boot Linux natively",
        )
    if host.wsl is None:
        return unknown(host.missing_reason("/proc/version", "/proc/sys/kernel/osrelease"), "uname -r")
    return ok("native Linux")


@check("virtual-machine", "Linux runs on bare metal", Scope.GPU, "noonghunna/club-3090 docs/PCIE_P2P.md §4a")
def virtual_machine(host: Host) -> Diagnosis:
    if host.wsl:
        return not_applicable("see the finding wsl2")
    if host.virtual is None:
        return unknown(host.missing_reason("/proc/cpuinfo"), "systemd-detect-virt")
    if not host.virtual:
        return ok("bare metal")
    if len(host.gpus) < 2:
        return ok(f"a virtual machine ({host.virtual}) with one GPU; its BARs and links are emulated")
    return problem(
        Impact.MINOR,
        f"a virtual machine ({host.virtual}) with {len(host.gpus)} GPUs",
        cause="the driver detects an emulated chipset, and peer traffic has to pass the host's IOMMU",
        consequence="P2P is refused (CNS) or goes through the CPU; BARs and links in the virtual machine are emulated",
        fix="run doctor on the host. Do not clear ACS there: it separates the passthrough groups. Or serve on bare metal",
    )


@check("numa", "each socket is one NUMA node", Scope.PAIR, "noonghunna/club-3090 docs/PCIE_P2P.md §2")
def numa(host: Host) -> Diagnosis:
    nodes, sockets = host.cpu.nodes, host.cpu.sockets
    if nodes is None or sockets is None:
        return unknown(host.missing_reason("/sys/devices/system/node/online"), "lscpu | grep -E 'Socket|NUMA'")
    if nodes > sockets:
        return problem(
            Impact.MINOR if p2p_unused(host) else Impact.SLOWS,
            f"{nodes} NUMA nodes on {sockets} socket(s)",
            cause="the BIOS divides each socket into several NUMA nodes: NPS2 or NPS4 (AMD), SNC (Intel)",
            consequence="GPUs of one socket appear as distant as GPUs of two sockets, and NCCL plans its transfers accordingly",
            fix="BIOS: NUMA nodes per socket = NPS1 (AMD), Sub-NUMA Clustering off (Intel)",
        )
    return ok(f"{nodes} NUMA node(s) on {sockets} socket(s)")


@check(
    "governor",
    "the CPU frequency governor is performance",
    Scope.GPU,
    f"{WIKI} benchmarks/inference-throughput/b650d4u-2gpu.md",
)
def governor(host: Host) -> Diagnosis:
    if not host.cpu.governors:
        return not_applicable("this kernel has no CPU frequency governors")
    if host.cpu.governors != ("performance",):
        return problem(
            Impact.MINOR,
            f"governor: {', '.join(host.cpu.governors)}",
            cause="the distribution's default",
            consequence="a single stream is 5 % slower, more where one thread drives many GPUs",
            fix="echo performance | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor (persistent: tmpfiles.d)",
        )
    return ok("governor: performance")


@check("zfs", "no ZFS is mounted", Scope.GPU, f"{WIKI} troubleshooting/common-issues.md; vllm-project/vllm#31085")
def zfs(host: Host) -> Diagnosis:
    if host.file_systems is None:
        return unknown(host.missing_reason("/proc/self/mounts"), "findmnt -t zfs")
    mount_points = [point for point, kind in host.file_systems if kind == "zfs"]
    if mount_points:
        return problem(
            Impact.MINOR,
            f"ZFS at {', '.join(mount_points)}",
            cause="ZFS caches large sequential reads in its own memory (ARC)",
            consequence="hosts froze while loading models from ZFS, and vLLM disables prefetching",
            fix="store models on ext4 or xfs, or limit zfs_arc_max",
        )
    return ok("no ZFS")


CHECKS: tuple[HostCheck, ...] = (wsl2, virtual_machine, numa, governor, zfs)
