"""Checks of Linux settings: IOMMU, heterogeneous memory management, power management of links and drives, sysctl."""

from __future__ import annotations

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
from sm120kit.hosts.doctor._peers import p2p_unused
from sm120kit.hosts.facts import Host

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
