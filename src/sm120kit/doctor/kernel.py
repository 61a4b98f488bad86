"""Kernel settings: IOMMU, heterogeneous memory management, power management of links, and small ones."""

from __future__ import annotations

from sm120kit.doctor.model import Check, Impact, Scope, Verdict, check, each, not_applicable, ok, problem, unknown
from sm120kit.host import Host

WIKI = "github.com/Visual-Synthesizer/rtx6kpro"
GRUB = "in /etc/default/grub, then sudo update-grub and reboot"


@check(
    "iommu",
    "the IOMMU does not translate for the GPUs",
    Scope.BARE_PAIR,
    "vllm-project/vllm#33041; NVIDIA/nccl#257; pytorch/pytorch#84803; NVIDIA/open-gpu-kernel-modules#1257",
)
def iommu(host: Host) -> Verdict:
    kinds = {gpu.bus: gpu.iommu for gpu in host.gpus}
    translated = [(bus, kind) for bus, kind in kinds.items() if kind and kind.startswith("DMA")]
    if translated:
        return problem(
            Impact.BREAKS,
            each(translated),
            cause="the IOMMU translates the GPUs' addresses, and peer traffic with them",
            consequence="NCCL may hang at the first collective; copies between GPUs may deliver zeros without any error",
            fix=f'GRUB_CMDLINE_LINUX="amd_iommu=on iommu=pt" (Intel: intel_iommu=on iommu=pt) {GRUB}',
        )
    if all(kind == "identity" for kind in kinds.values()):
        return ok("pass through (identity)")
    if host.iommu_active is False:
        return ok("no IOMMU is active")
    return unknown(
        host.why(*(f"/sys/bus/pci/devices/{bus}/iommu_group/type" for bus in kinds), "/sys/class/iommu"),
        "cat /sys/bus/pci/devices/*/iommu_group/type; cat /proc/cmdline",
    )


@check(
    "hmm",
    "nvidia_uvm leaves HMM alone",
    Scope.BARE_PAIR,
    f"{WIKI} optimization/nccl-tuning.md, troubleshooting/common-issues.md",
)
def hmm(host: Host) -> Verdict:
    if host.driver.hmm_disabled is None:
        path = "/sys/module/nvidia_uvm/parameters/uvm_disable_hmm"
        return unknown(f"{host.why(path)} (nvidia_uvm is loaded by the first CUDA program)", f"nvidia-smi; cat {path}")
    if not host.driver.hmm_disabled:
        return problem(
            Impact.BREAKS,
            "uvm_disable_hmm is N",
            cause="the driver's default: heterogeneous memory management is on",
            consequence="P2P transfers between GPUs lock up on several boards",
            fix="echo 'options nvidia_uvm uvm_disable_hmm=1' | sudo tee /etc/modprobe.d/uvm.conf; "
            "sudo update-initramfs -u; reboot",
        )
    return ok("uvm_disable_hmm is Y")


@check("aspm", "links do not save power", Scope.DISCRETE, f"{WIKI} troubleshooting/common-issues.md (Surprise Link Down)")
def aspm(host: Host) -> Verdict:
    if host.virtual or host.wsl:
        return not_applicable("a guest does not see the real links")
    ends = [(gpu.bus, gpu.link.aspm) for gpu in host.gpus] + [(port.bus, port.link.aspm) for port in host.bridges]
    saving = [bus for bus, on in ends if on]
    if saving:
        return problem(
            Impact.BREAKS,
            f"ASPM is on at {', '.join(saving)}",
            cause="firmware or the kernel turned active state power management on",
            consequence="Surprise Link Down (aer_uncor_status 0x20): the GPU falls off the bus when its link changes speed",
            fix=f'GRUB_CMDLINE_LINUX="pcie_aspm=off pcie_port_pm=off" {GRUB}, and ASPM off in the BIOS',
        )
    if all(on is False for _, on in ends):
        return ok("off on every link")
    if "[performance]" in (host.aspm_policy or ""):
        return ok("the kernel's policy is performance")
    return unknown("link control registers are not readable", "sudo sm120kit doctor, or sudo lspci -vv | grep LnkCtl:")


@check("sysctl", "the kernel does not move memory about", Scope.GPU, f"{WIKI} optimization/nccl-tuning.md (host CPU tuning)")
def sysctl(host: Host) -> Verdict:
    wanted = {"swappiness": ("vm.swappiness", 10), "numa_balancing": ("kernel.numa_balancing", 0)}
    present = {name: int(host.settings[name]) for name in wanted if name in host.settings}
    if not present:
        return unknown(host.why("/proc/sys/vm/swappiness"), "sysctl vm.swappiness kernel.numa_balancing")
    high = [name for name, value in present.items() if value > wanted[name][1]]
    if high:
        return problem(
            Impact.MINOR,
            ", ".join(f"{wanted[name][0]} = {present[name]}" for name in high),
            cause="the distribution's default",
            consequence="now and then a page is moved or swapped in the middle of a step",
            fix="; ".join(f"sudo sysctl -w {wanted[name][0]}=0" for name in high) + " (/etc/sysctl.d/ keeps it)",
        )
    return ok(", ".join(f"{wanted[name][0]} = {value}" for name, value in present.items()))


@check("nvme", "NVMe drives do not sleep", Scope.GPU, f"{WIKI} troubleshooting/common-issues.md")
def nvme(host: Host) -> Verdict:
    latency = host.settings.get("nvme_latency")
    if latency is None:
        return not_applicable("no NVMe driver")
    if latency != "0":
        return problem(
            Impact.MINOR,
            f"nvme_core.default_ps_max_latency_us = {latency}",
            cause="the kernel lets drives enter power states",
            consequence="loading a model stalls now and then",
            fix=f"nvme_core.default_ps_max_latency_us=0 on the kernel command line {GRUB}",
        )
    return ok("power states are off")


CHECKS: tuple[Check, ...] = (iommu, hmm, aspm, sysctl, nvme)
