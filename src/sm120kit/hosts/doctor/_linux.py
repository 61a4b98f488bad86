"""Checks of Linux settings: IOMMU, heterogeneous memory management, power management of links and drives, sysctl."""

from __future__ import annotations

import re

from sm120kit.hosts.doctor._findings import (
    Diagnosis,
    HostCheck,
    HostRemedy,
    Impact,
    Scope,
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

WIKI = "github.com/Visual-Synthesizer/rtx6kpro"
GRUB = "in /etc/default/grub, then sudo update-grub and reboot"
IOMMU_OFF = HostRemedy(
    f"the IOMMU off: in the BIOS, or amd_iommu=off (Intel: intel_iommu=off) {GRUB}; Linux then does not set ACS either",
    "no passthrough to virtual machines and no protection from devices; above 255 CPU threads Linux uses only some",
)
LINK_LOST = re.compile(r"fallen off the bus|Xid \(PCI:[^)]*\): 79\b|Surprise|SurprDnErr", re.IGNORECASE)


@check(
    "iommu",
    "the IOMMU does not translate GPU addresses",
    Scope.BARE_PAIR,
    "vllm-project/vllm#33041; NVIDIA/nccl#257; pytorch/pytorch#84803; NVIDIA/open-gpu-kernel-modules#1257",
    generic=True,
)
def iommu(host: Host) -> Diagnosis:
    kinds = {gpu.bus: gpu.iommu for gpu in host.gpus}
    translated = [(bus, kind) for bus, kind in kinds.items() if kind and kind.startswith("DMA")]
    if translated:
        diagnosis = problem(
            Impact.BREAKS,
            by_device(translated),
            cause="the IOMMU translates the addresses of the GPUs, including peer traffic",
            consequence="NCCL may hang at the first collective; copies between GPUs may return zeros without an error",
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


@check(
    "hmm",
    "HMM is disabled in nvidia_uvm",
    Scope.BARE_PAIR,
    f"{WIKI} optimization/nccl-tuning.md, troubleshooting/common-issues.md; P2P at full rate with HMM: "
    "EfficientMoE/Omni-Infinity docs/ (multi-GPU platform validation)",
    generic=True,
)
def hmm(host: Host) -> Diagnosis:
    if host.driver.hmm_disabled is None:
        path = "/sys/module/nvidia_uvm/parameters/uvm_disable_hmm"
        return unknown(
            f"{host.missing_reason(path)} (nvidia_uvm is loaded by the first CUDA program)", f"nvidia-smi; cat {path}"
        )
    if not host.driver.hmm_disabled:
        diagnosis = problem(
            Impact.MINOR,
            "uvm_disable_hmm is N",
            cause="the driver enables heterogeneous memory management (HMM) by default",
            consequence="P2P transfers between GPUs hang on some boards; others have full rates with HMM",
            fix="echo 'options nvidia_uvm uvm_disable_hmm=1' | sudo tee /etc/modprobe.d/uvm.conf; "
            "sudo update-initramfs -u; reboot",
        )
        return as_information(diagnosis, p2p_unused(host))
    return ok("uvm_disable_hmm is Y")


@check("aspm", "ASPM is off", Scope.DISCRETE, f"{WIKI} troubleshooting/common-issues.md (Surprise Link Down)", generic=True)
def aspm(host: Host) -> Diagnosis:
    if host.virtual or host.wsl:
        return not_applicable("the real links are not visible in a virtual machine")
    links = [(gpu.bus, gpu.link.aspm) for gpu in host.gpus] + [(port.bus, port.link.aspm) for port in host.bridges]
    enabled = [bus for bus, on in links if on]
    if enabled:
        failed = [line for line in host.kernel_log or () if LINK_LOST.search(line)]
        return problem(
            Impact.BREAKS if failed else Impact.MINOR,
            f"ASPM is on at {', '.join(enabled)}",
            cause="the firmware or the kernel enabled active state power management",
            consequence="Surprise Link Down (aer_uncor_status 0x20): the GPU falls off the bus when its link changes speed",
            fix=f'GRUB_CMDLINE_LINUX="pcie_aspm=off pcie_port_pm=off" {GRUB}; also turn ASPM off in the BIOS',
        )
    if all(on is False for _, on in links):
        return ok("off on every link")
    if "[performance]" in (host.aspm_policy or ""):
        return ok("the kernel's ASPM policy is performance")
    return unknown("the link control registers are not readable", "sudo sm120kit doctor, or sudo lspci -vv | grep LnkCtl:")


CHECKS: tuple[HostCheck, ...] = (iommu, hmm, aspm)
