"""The machine: hypervisors, processors, disks."""

from __future__ import annotations

import re

from sm120kit.doctor.model import Check, Impact, Scope, Verdict, check, not_applicable, ok, problem, unknown
from sm120kit.host import Host

TURIN_FAMILY = 26
"""AMD Zen 5: EPYC 9005 and its relatives (Linux's amd.c)."""
WIKI = "github.com/Visual-Synthesizer/rtx6kpro"


@check("wsl2", "this is not WSL2", Scope.GPU, f"{WIKI} daily-summaries 2026-05-01")
def wsl2(host: Host) -> Verdict:
    if host.wsl:
        return problem(
            Impact.SLOWS,
            "the kernel is Microsoft's",
            cause="under WSL2 every launch goes through Windows's driver",
            consequence="about half the decode speed: 60 to 70 tok/s where native Linux has 120 to 150",
            fix="boot Linux natively",
        )
    return ok("native Linux")


@check("virtual-machine", "this is bare metal", Scope.GPU, "noonghunna/club-3090 docs/PCIE_P2P.md §4a")
def virtual_machine(host: Host) -> Verdict:
    if host.wsl:
        return not_applicable("WSL2 has a finding of its own")
    if host.virtual is None:
        return unknown(host.why("/proc/cpuinfo"), "systemd-detect-virt")
    if not host.virtual:
        return ok("bare metal")
    if len(host.gpus) < 2:
        return ok(f"a guest ({host.virtual}) with one GPU; BAR and link facts are the emulator's")
    return problem(
        Impact.SLOWS,
        f"a guest ({host.virtual}) with {len(host.gpus)} GPUs",
        cause="the driver finds an emulated chipset, and peer traffic must pass the host's IOMMU",
        consequence="P2P is refused (CNS) or goes through the CPU; what the guest says of BARs and links proves nothing",
        fix="run doctor on the host. Do not clear ACS there: it keeps the passthrough groups apart. Else serve from bare metal",
    )


@check("numa", "a socket is one NUMA node", Scope.PAIR, "noonghunna/club-3090 docs/PCIE_P2P.md §2")
def numa(host: Host) -> Verdict:
    nodes, sockets = host.cpu.nodes, host.cpu.sockets
    if nodes is None or sockets is None:
        return unknown(host.why("/sys/devices/system/node/online"), "lscpu | grep -E 'Socket|NUMA'")
    if nodes > sockets:
        return problem(
            Impact.SLOWS,
            f"{nodes} NUMA nodes on {sockets} socket(s)",
            cause="the BIOS splits a socket: NPS2 or NPS4 on AMD, SNC on Intel",
            consequence="GPUs of one socket look as far apart as two sockets, and transfers are planned accordingly",
            fix="BIOS: NUMA nodes per socket = NPS1 (AMD), Sub-NUMA Clustering off (Intel)",
        )
    return ok(f"{nodes} NUMA node(s) on {sockets} socket(s)")


@check("governor", "processors run at full clock", Scope.GPU, f"{WIKI} benchmarks/inference-throughput/b650d4u-2gpu.md")
def governor(host: Host) -> Verdict:
    if not host.cpu.governors:
        return not_applicable("this kernel does not show processor clocks")
    if host.cpu.governors != ("performance",):
        return problem(
            Impact.SLOWS,
            f"governor: {', '.join(host.cpu.governors)}",
            cause="the distribution's default",
            consequence="5 % less for a single stream, more where one thread feeds many GPUs",
            fix="echo performance | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor (tmpfiles.d keeps it)",
        )
    return ok("governor: performance")


@check("kernel-version", "the kernel knows the processors' links", Scope.PAIR, f"{WIKI} daily-summaries 2026-03-10")
def kernel_version(host: Host) -> Verdict:
    if host.cpu.family != TURIN_FAMILY or (host.cpu.sockets or 1) < 2:
        return not_applicable("concerns two sockets of AMD Turin")
    found = re.match(r"(\d+)\.(\d+)", host.kernel or "")
    if not found:
        return unknown(host.why("/proc/sys/kernel/osrelease"), "uname -r")
    if (int(found[1]), int(found[2])) < (6, 17):
        return problem(
            Impact.MINOR,
            f"Linux {host.kernel} on dual-socket Turin",
            cause="before 6.17 the kernel does not report Turin's xGMI links",
            consequence="fabric tools say UNKNOWN; traffic itself is not affected",
            fix="Linux 6.17 or newer",
        )
    return ok(f"Linux {host.kernel}")


@check("zfs", "models do not lie on ZFS", Scope.GPU, f"{WIKI} troubleshooting/common-issues.md; vllm-project/vllm#31085")
def zfs(host: Host) -> Verdict:
    if host.file_systems is None:
        return unknown(host.why("/proc/self/mounts"), "findmnt -t zfs")
    places = [point for point, kind in host.file_systems if kind == "zfs"]
    if places:
        return problem(
            Impact.MINOR,
            f"ZFS at {', '.join(places)}",
            cause="ZFS caches large sequential reads in memory of its own",
            consequence="systems froze while models loaded from it, and vLLM turns its prefetch off",
            fix="keep models on ext4 or xfs, or limit zfs_arc_max",
        )
    return ok("no ZFS")


@check("raid", "software RAID reads with several threads", Scope.GPU, f"{WIKI} optimization/io-tuning.md")
def raid(host: Host) -> Verdict:
    if not host.raids:
        return not_applicable("no RAID-5 or RAID-6 array")
    idle = [name for name, values in host.raids.items() if values["group_thread_cnt"] in ("", "0")]
    if idle:
        return problem(
            Impact.MINOR,
            f"{', '.join(idle)}: group_thread_cnt is 0",
            cause="md's default is one thread",
            consequence="models load slowly, and writes wait for half a second",
            fix=f"as root, in /sys/block/{idle[0]}/md: echo 8 > group_thread_cnt; echo 32768 > stripe_cache_size",
        )
    return ok("; ".join(f"{name}: {values['group_thread_cnt']} threads" for name, values in host.raids.items()))


CHECKS: tuple[Check, ...] = (wsl2, virtual_machine, numa, governor, kernel_version, zfs, raid)
