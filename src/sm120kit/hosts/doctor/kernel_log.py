"""Check of the kernel log: errors of NVIDIA's driver, PCI and the IOMMU since boot, the cause before its consequences."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sm120kit.hosts.doctor.findings import Diagnosis, HostCheck, Impact, Scope, check, ok, problem, unknown
from sm120kit.hosts.facts import Host


@dataclass(frozen=True)
class KernelError:
    """An error by a pattern that a line of the kernel log contains."""

    pattern: str
    cause: str
    consequence: str
    fix: str
    unified: bool = False
    """Whether this is an error on GPUs with unified memory only."""


ERRORS = (
    KernelError(
        r"requires use of the NVIDIA open kernel modules|is not supported by the proprietary",
        "the proprietary kernel module is loaded; Blackwell GPUs require the open one",
        'the GPU is not initialized: nvidia-smi prints "No devices were found"',
        "install the -open variant of the driver package, remove the other variant, reboot",
    ),
    KernelError(
        r"(BAR 1|PCI I/O region).*(no space|can't assign|failed to assign|is invalid)|BAR1 is 0M",
        "the kernel found no address space for BAR1",
        "the driver does not initialize the GPU, or refuses P2P",
        "BIOS: Above 4G Decoding and Re-Size BAR Support on; otherwise pci=realloc; with many GPUs, a newer BIOS",
    ),
    KernelError(
        r"IO_PAGE_FAULT|DMAR: .*(fault|DMA (Read|Write))",
        "the IOMMU rejected an access of a device, such as a write of one GPU to another",
        "NCCL hangs at the first collective, or data are lost",
        "see the finding iommu: iommu=pt, or the IOMMU off",
    ),
    KernelError(
        r"Xid \(PCI:[^)]*\): 79\b|fallen off the bus",
        "the GPU lost its PCIe link: power supply or its cable, riser, slot, temperature, or ASPM",
        "the GPU is absent until the next reboot or power cycle",
        "reseat card, riser and power cable; try pcie_aspm=off; one 12V-2x6 cable per GPU; compare with a lower power limit: "
        "sudo nvidia-smi -pl WATTS",
    ),
    KernelError(
        r"Xid \(PCI:[^)]*\): (119|120|8)\b|GSP (RPC|task) (timeout|timed out)|GPU_HEARTBEAT|_kgspRpcRecvPoll",
        "the GPU's system processor (GSP) does not answer: a fault of driver or firmware, or of the link",
        "nvidia-smi and CUDA programs hang",
        "reboot; then another driver version. If it recurs at load: power supply, riser and temperature",
    ),
    KernelError(
        r"Surprise Link Down|SurprDnErr|severity=Unc\w+ \((Non-)?Fatal",
        "a PCIe link failed: ASPM, riser, retimer or slot",
        "GPUs fall off the bus, or transfers stop",
        "see the findings aer and aspm; shorter riser, or Gen4 for this slot in the BIOS",
    ),
    KernelError(
        r"NV_ERR_NO_MEMORY",
        "memory that CPU and GPU share was exhausted",
        "the host freezes or resets, instead of an error in the engine",
        "a lower gpu-memory-utilization, context or number of sequences; see the findings unified-headroom and unified-guard",
        unified=True,
    ),
    KernelError(
        r"RmInitAdapter failed|rm_init_adapter failed|Cannot initialize GSP firmware",
        "the driver cannot initialize the GPU: small BARs, missing GSP firmware, a module of another version, or a GPU that "
        "was not reset",
        'nvidia-smi prints "No devices were found"',
        "BIOS: Above 4G Decoding and Re-Size BAR Support on; then a newer open driver; a cold start, not a reboot, after a "
        "virtual machine used the GPU",
    ),
)
"""Ordered: an error before those that it causes."""


@check(
    "kernel-log",
    "the kernel log has no error of a GPU since boot",
    Scope.GPU,
    "NVIDIA GPU driver manual, Xid errors; NVIDIA/open-gpu-kernel-modules#862, #1111, #1151; NVIDIA/dgx-spark-playbooks#97; "
    "aikitoria/open-gpu-kernel-modules#9",
)
def kernel_log(host: Host) -> Diagnosis:
    if host.kernel_log is None:
        return unknown(host.missing_reason("dmesg.txt"), "sudo dmesg | sm120kit explain -")
    unified = any(gpu.unified for gpu in host.gpus)
    for error in (error for error in ERRORS if unified or not error.unified):
        lines = [line for line in host.kernel_log if re.search(error.pattern, line, re.IGNORECASE)]
        if lines:
            count = f" ({len(lines)} lines)" if len(lines) > 1 else ""
            return problem(
                Impact.BREAKS,
                f"{lines[0].strip()}{count}",
                cause=error.cause,
                consequence=error.consequence,
                fix=error.fix,
            )
    return ok("no known error")


CHECKS: tuple[HostCheck, ...] = (kernel_log,)
