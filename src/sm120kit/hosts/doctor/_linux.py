"""Checks of Linux and of the machine: settings, memory, containers, and the errors in the kernel's log since boot."""

import io
import re

from sm120kit.hosts.doctor._findings import (
    Diagnosis,
    HostRemedy,
    Impact,
    as_information,
    by_device,
    check,
    not_applicable,
    ok,
    problem,
    unknown,
)
from sm120kit.hosts.doctor._p2p import p2p_unused
from sm120kit.hosts.facts import Host
from sm120kit.hosts.log_rules import explain

GRUB = "in /etc/default/grub, then sudo update-grub and reboot"
IOMMU_OFF = HostRemedy(
    f"the IOMMU off: in the BIOS, or amd_iommu=off (Intel: intel_iommu=off) {GRUB}; Linux then does not set ACS either",
    "no passthrough to virtual machines and no protection from devices; above 255 CPU threads Linux uses only some",
)
LINK_LOST = re.compile(r"fallen off the bus|Xid \(PCI:[^)]*\): 79\b|Surprise|SurprDnErr", re.IGNORECASE)


@check("iommu")
def iommu(host: Host) -> Diagnosis:
    kinds = {gpu.bus: gpu.iommu for gpu in host.gpus}
    translated = [(bus, kind) for bus, kind in kinds.items() if kind and kind.startswith("DMA")]
    if translated:
        diagnosis = problem(
            "iommu",
            Impact.BREAKS,
            by_device(translated),
            remedies=(
                HostRemedy(
                    f'GRUB_CMDLINE_LINUX="amd_iommu=on iommu=pt" (Intel: intel_iommu=on iommu=pt) {GRUB}',
                    "devices can access all memory. Linux still sets ACS, as whenever an IOMMU is active: see the finding acs",
                ),
                IOMMU_OFF,
            ),
        )
        return as_information(diagnosis, p2p_unused(host))
    if all(kind == "identity" for kind in kinds.values()):
        return ok("passthrough (identity)")
    if host.iommu_active is False:
        return ok("no IOMMU is active")
    return unknown(
        host.missing_reason(*(f"/sys/bus/pci/devices/{bus}/iommu_group/type" for bus in kinds), "/sys/class/iommu"),
        "cat /sys/bus/pci/devices/*/iommu_group/type; cat /proc/cmdline",
    )


@check("hmm")
def hmm(host: Host) -> Diagnosis:
    if host.driver.hmm_disabled is None:
        path = "/sys/module/nvidia_uvm/parameters/uvm_disable_hmm"
        return unknown(
            f"{host.missing_reason(path)} (nvidia_uvm is loaded by the first CUDA program)", f"nvidia-smi; cat {path}"
        )
    if not host.driver.hmm_disabled:
        diagnosis = problem("hmm", Impact.MINOR, "uvm_disable_hmm is N")
        return as_information(diagnosis, p2p_unused(host))
    return ok("uvm_disable_hmm is Y")


@check("aspm")
def aspm(host: Host) -> Diagnosis:
    if host.virtual or host.wsl:
        return not_applicable("the real links are not visible in a virtual machine")
    links = [(gpu.bus, gpu.link.aspm) for gpu in host.gpus] + [(port.bus, port.link.aspm) for port in host.bridges]
    enabled = [bus for bus, on in links if on]
    if enabled:
        failed = [line for line in host.kernel_log or () if LINK_LOST.search(line)]
        return problem("aspm", Impact.BREAKS if failed else Impact.MINOR, f"ASPM is on at {', '.join(enabled)}")
    if all(on is False for _, on in links):
        return ok("off on every link")
    if "[performance]" in (host.aspm_policy or ""):
        return ok("the kernel's ASPM policy is performance")
    return unknown("the link control registers are not readable", "sudo sm120kit doctor, or sudo lspci -vv | grep LnkCtl:")


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


SHM_FLOOR = 8 << 30


@check("container-toolkit")
def toolkit(host: Host) -> Diagnosis:
    if host.container.inside:
        return not_applicable("doctor runs in a container")
    if not host.container.docker:
        return not_applicable("Docker is not installed")
    if not host.container.toolkit:
        return problem("container-toolkit", Impact.BREAKS, "docker is installed, nvidia-ctk is not")
    modes = (("docker runtime", host.container.runtime), ("CDI", host.container.cdi))
    configured = " and ".join(name for name, present in modes if present)
    return ok(f"NVIDIA Container Toolkit{f': {configured}' if configured else ''}")


@check("shm")
def shm(host: Host) -> Diagnosis:
    size = host.container.shm_bytes
    if size is None:
        return unknown(host.missing_reason("/proc/self/mounts"), "df -h /dev/shm")
    if size < SHM_FLOOR:
        return problem("shm", Impact.BREAKS, f"/dev/shm has {size >> 20} MiB")
    return ok(f"/dev/shm has {size >> 30} GiB")


@check("left-behind")
def left_behind(host: Host) -> Diagnosis:
    orphans = [container for container in host.launched if not container.attended]
    if orphans:
        names = [f"{orphan.name} ({orphan.configuration}, GPU {', '.join(map(str, orphan.gpus))})" for orphan in orphans]
        return problem(
            "left-behind",
            Impact.BREAKS,
            f"running without the sm120kit serve that started it: {', '.join(names)}",
            fix=f"docker stop {' '.join(orphan.name for orphan in orphans)}",
        )
    return ok(f"{len(host.launched) or 'no'} containers of sm120kit serve")


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


@check("kernel-log")
def kernel_log(host: Host) -> Diagnosis:
    """Errors of the host since boot, by the rules of :mod:`sm120kit.hosts.log_rules`, the first first."""
    if host.kernel_log is None:
        return unknown(host.missing_reason("dmesg.txt"), "sudo dmesg | sm120kit explain -")
    context = [gpu.name for gpu in host.gpus if gpu.name]
    log = "\n".join([*context, *host.kernel_log]).encode()
    for match in explain(io.BytesIO(log), ended=True).found:
        if match.rule.consequence:
            count = f" ({match.count} lines)" if match.count > 1 else ""
            return problem(
                "kernel-log",
                Impact.BREAKS,
                f"{match.line}{count}",
                cause=match.cause,
                consequence=match.rule.consequence,
                fix=" ".join(match.fixes),
            )
    return ok("no known error")
