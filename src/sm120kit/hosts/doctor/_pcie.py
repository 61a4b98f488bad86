"""Checks of PCIe: ACS, BARs, links, AER error counters and topology."""

from __future__ import annotations

from collections import Counter

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
from sm120kit.hosts.doctor._linux import GRUB, IOMMU_OFF
from sm120kit.hosts.doctor._peers import p2p_unused
from sm120kit.hosts.facts import Gpu, GpuPair, Host
from sm120kit.hosts.facts._pci import ACS_REDIRECT, DEVICES

WIKI = "github.com/Visual-Synthesizer/rtx6kpro"
AWAKE = ("P0", "P1", "P2")
"""Performance states in which a GPU keeps its link at full speed."""
SLOT_LANES = 16
"""Lanes of the widest slot; a GPU with more is not expected to have them."""
HALF_LANES, GEN4 = 8, 16.0
"""A Gen5 link with half its lanes, or a Gen4 link with all, is a property of many boards and costs some percent."""


@check(
    "acs",
    "ACS does not redirect peer traffic to the CPU",
    Scope.BARE_PAIR,
    "NVIDIA/nccl#2079; NCCL manual, troubleshooting; Linux pci_enable_acs, kernel-parameters: pci=disable_acs_redir; "
    f"{WIKI} hardware/pcie-bandwidth.md",
    generic=True,
)
def acs(host: Host) -> Diagnosis:
    if not all(gpu.root_complex for gpu in host.gpus):
        return unknown("the ports above the GPUs are unknown", "sudo lspci -vvv | grep ACSCtl")
    if not host.bridges:
        return not_applicable("the GPUs are not below PCIe ports")
    redirecting = [port for port in host.bridges if (port.acs or 0) & ACS_REDIRECT]
    if redirecting:
        buses = [port.bus for port in redirecting]
        fix = "for port in " + " ".join(buses) + '; do sudo setpci -s "$port" ECAP_ACS+6.w=0000; done'
        if host.passthrough:
            fix = f"first stop the passthrough of {', '.join(host.passthrough)}: without ACS its groups merge. Then {fix}"
        diagnosis = problem(
            Impact.BREAKS,
            "ACSCtl " + ", ".join(f"{port.acs:#06x} at {port.bus}" for port in redirecting),
            cause="ACS request redirect or completion redirect is set on these root or switch ports: by Linux, while an IOMMU "
            "is active, also with iommu=pt, or by the firmware",
            consequence="NCCL with two ranks may hang, or a switch forwards 50 instead of 103 GB/s, both directions together",
            remedies=(
                HostRemedy(fix, "lasts until the next boot: try it first. Virtual machines are no longer separated"),
                HostRemedy(
                    f'GRUB_CMDLINE_LINUX="pci=disable_acs_redir={";".join(buses)}" {GRUB}',
                    "the same ports, permanently; addresses change when cards are moved. Linux has no option pci=noacs",
                ),
                IOMMU_OFF,
            ),
        )
        return as_information(diagnosis, p2p_unused(host))
    if any(port.has_acs is None for port in host.bridges):
        return unknown(
            "only root can read configuration space beyond 64 bytes",
            "sudo sm120kit doctor, or sudo lspci -vvv | grep ACSCtl",
        )
    return ok(f"no redirection on {len(host.bridges)} port(s)")


@check(
    "bar1",
    "BAR1 covers the GPU's memory",
    Scope.DISCRETE,
    f"{WIKI} hardware/pcie-bandwidth.md; noonghunna/club-3090 docs/PCIE_P2P.md §4",
)
def bar1(host: Host) -> Diagnosis:
    if host.wsl:
        return not_applicable("WSL2 hides the PCIe tree")
    if host.virtual:
        return unknown("BARs are emulated in a virtual machine", "sm120kit doctor on the host")
    if any(gpu.aperture_mib is None for gpu in host.gpus):
        return unknown(host.missing_reason("nvidia-smi-q.xml"), "nvidia-smi -q -d MEMORY | grep -A1 BAR1")
    unassigned = [gpu.bus for gpu in host.gpus if gpu.aperture_mib == 0]
    if unassigned:
        return problem(
            Impact.BREAKS,
            f"{', '.join(unassigned)}: no BAR is assigned",
            cause='the kernel found no address space for the BARs (dmesg: "BAR 1: no space")',
            consequence="the driver does not initialize the GPU",
            fix="BIOS: Above 4G Decoding on, unused USB4 off; otherwise pci=realloc on the kernel command line; with more than "
            "12 GPUs, set compute mode with displaymodeselector",
        )
    small = [gpu for gpu in host.gpus if (gpu.aperture_mib or 0) < (gpu.memory_mib or 257)]
    if small:
        return problem(
            Impact.SLOWS if len(host.gpus) > 1 and not any(gpu.consumer for gpu in host.gpus) else Impact.MINOR,
            by_device((gpu.bus, f"BAR1 {gpu.aperture_mib} MiB for {gpu.memory_mib or '?'} MiB of memory") for gpu in small),
            cause="Resizable BAR is off",
            consequence="no P2P between GPUs; models load more slowly",
            fix="BIOS: both Re-Size BAR Support and Above 4G Decoding on; on RTX PRO cards displaymodeselector can make it "
            "permanent",
        )
    return ok(by_device((gpu.bus, f"BAR1 {gpu.aperture_mib} MiB") for gpu in host.gpus))


@check("link-width", "PCIe links use all lanes", Scope.DISCRETE, f"{WIKI} hardware/gpu-configs.md, daily-summaries 2026-04-22")
def link_width(host: Host) -> Diagnosis:
    if host.virtual or host.wsl:
        return not_applicable("the real links are not visible in a virtual machine")
    if any(gpu.link.width is None or gpu.link.max_width is None for gpu in host.gpus):
        return unknown(
            host.missing_reason(*(f"{DEVICES}/{gpu.bus}/current_link_width" for gpu in host.gpus)),
            "sudo lspci -vv | grep LnkSta:",
        )
    narrow = [gpu for gpu in host.gpus if (gpu.link.width or 0) < min(gpu.link.max_width or 0, SLOT_LANES)]
    if narrow:
        half = all((gpu.link.width or 0) >= HALF_LANES for gpu in narrow)
        return problem(
            Impact.MINOR if half else Impact.SLOWS,
            by_device((gpu.bus, f"x{gpu.link.width} of x{gpu.link.max_width}{_port(host, gpu)}") for gpu in narrow),
            cause="the slot has fewer lanes or shares them with an M.2 slot, or a riser or dirty contact lost some",
            consequence="one narrow link slows every collective: prefill fell from 9,000 to 1,000 tok/s",
            fix="another slot (see the board's block diagram), BIOS bifurcation x16, cables below 30 cm, or reseat the card",
        )
    return ok(by_device((gpu.bus, f"x{gpu.link.width}") for gpu in host.gpus))


def _port(host: Host, gpu: Gpu) -> str:
    lanes = host.bridge(gpu.bridges[-1]).link.max_width if gpu.bridges else None
    return "" if lanes is None else f" (port: x{lanes})"


@check(
    "link-speed",
    "PCIe links run at the GPU's maximum speed",
    Scope.DISCRETE,
    f"{WIKI} hardware/gpu-configs.md, daily-summaries 2026-04-17, 2026-05-10",
)
def link_speed(host: Host) -> Diagnosis:
    if host.virtual or host.wsl:
        return not_applicable("the real links are not visible in a virtual machine")
    if any(gpu.link.speed is None or gpu.link.max_speed is None for gpu in host.gpus):
        return unknown(
            host.missing_reason(*(f"{DEVICES}/{gpu.bus}/current_link_speed" for gpu in host.gpus)),
            "sudo lspci -vv | grep LnkSta:",
        )
    old = [gpu for gpu in host.gpus if _port_speed(host, gpu) < (gpu.link.max_speed or 0)]
    slow = [gpu for gpu in host.gpus if gpu.state in AWAKE and (gpu.link.speed or 0) < (gpu.link.max_speed or 0)]
    slow_link = [gpu for gpu in slow if (gpu.link.speed or 0) < _port_speed(host, gpu)]
    if old or slow:
        older = [gpu for gpu in old if _port_speed(host, gpu) < GEN4]
        return problem(
            Impact.SLOWS if slow_link or older else Impact.MINOR,
            by_device(
                (gpu.bus, f"{gpu.link.speed:g} of {gpu.link.max_speed:g} GT/s, port maximum {_port_speed(host, gpu):g}")
                for gpu in host.gpus
                if gpu in old or gpu in slow
            ),
            cause="the slot, riser or retimer is of an older PCIe generation, or the link was trained at a lower speed",
            consequence="each generation lower halves P2P bandwidth: 26 GB/s instead of 52 to 56 for Gen5 x16",
            fix="use a Gen5 slot and riser; BIOS: link speed Gen5 for this slot; with a poor riser, set Gen4 explicitly",
        )
    if all(gpu.link.speed == gpu.link.max_speed for gpu in host.gpus):
        return ok(by_device((gpu.bus, f"{gpu.link.speed:g} GT/s") for gpu in host.gpus))
    return unknown(
        "idle GPUs lower their link speed; currently "
        + by_device((gpu.bus, f"{gpu.link.speed:g} of {gpu.link.max_speed:g} GT/s") for gpu in host.gpus),
        "sm120kit doctor, run again while a model serves requests",
    )


def _port_speed(host: Host, gpu: Gpu) -> float:
    """Maximum speed in GT/s of the port above a GPU; the GPU's own maximum where the port's is unknown."""
    maximum = host.bridge(gpu.bridges[-1]).link.max_speed if gpu.bridges else None
    return maximum or gpu.link.max_speed or 0.0


@check(
    "aer",
    "no PCIe errors (AER) since boot",
    Scope.DISCRETE,
    f"{WIKI} daily-summaries 2026-03-07, 2026-05-12; Linux Documentation/ABI sysfs-bus-pci-devices-aer_stats",
)
def aer(host: Host) -> Diagnosis:
    if host.wsl:
        return not_applicable("WSL2 hides the PCIe tree")
    devices = [(gpu.bus, gpu.errors) for gpu in host.gpus] + [(port.bus, port.errors) for port in host.bridges]
    counters = [(bus, errors) for bus, errors in devices if errors]
    if not counters:
        paths = [f"{DEVICES}/{gpu.bus}/aer_dev_correctable" for gpu in host.gpus]
        return unknown(host.missing_reason(*paths), "dmesg | grep -i aer")
    uncorrected = [
        f"{bus}: {errors.nonfatal} nonfatal, {errors.fatal} fatal"
        for bus, errors in counters
        if errors.nonfatal or errors.fatal
    ]
    if uncorrected:
        return problem(
            Impact.BREAKS,
            "; ".join(uncorrected),
            cause="an unstable link: cable, riser, retimer, contact or heat",
            consequence="transfers fail, and the GPU falls off the bus",
            fix="use a shorter or better cable or riser, reseat the card, cool the slot below 88 °C, or set it to Gen4; "
            "dmesg | grep -i aer",
        )
    corrected = [f"{bus}: {errors.correctable}" for bus, errors in counters if errors.correctable]
    if corrected:
        return problem(
            Impact.MINOR,
            f"corrected errors since boot: {'; '.join(corrected)}",
            cause="a marginal link: packets are sent again",
            consequence="some bandwidth is lost; uncorrected errors may follow",
            fix="run doctor again after some load; if the count grows, use a better cable or riser, or set this slot to Gen4",
        )
    return ok(f"no errors on {len(counters)} device(s)")


@check(
    "topology",
    "every GPU pair is within the range of NCCL's P2P",
    Scope.PAIR,
    f"nvidia-smi topo -m, legend; {WIKI} hardware/topology.md, optimization/pcie-oneshot-allreduce.md",
)
def topology(host: Host) -> Diagnosis:
    if host.wsl:
        return not_applicable("WSL2 hides the PCIe tree")
    unclear = next((pair for pair in host.pairs if pair.kind is None or _contradictory(pair)), None)
    if unclear:
        return unknown(
            f"{unclear.first} and {unclear.second}: sysfs {unclear.kind or 'unknown'}, nvidia-smi {unclear.smi or 'unknown'}",
            "nvidia-smi topo -m; lspci -tv",
        )
    counts = Counter(pair.kind for pair in host.pairs)
    fact = ", ".join(f"{count} x {kind}" for kind, count in sorted(counts.items(), key=str))
    if counts["SYS"] and host.environment.get("NCCL_P2P_LEVEL") != "SYS":
        return problem(
            Impact.MINOR if p2p_unused(host) else Impact.SLOWS,
            fact,
            cause="some GPUs are on different sockets, and by default NCCL does not use P2P across sockets",
            consequence="all-reduce of all GPUs goes through host memory; one-shot all-reduce is 4 to 16 % slower across "
            "sockets",
            fix="NCCL_P2P_LEVEL=SYS for models on all GPUs; otherwise select GPUs of one socket with CUDA_VISIBLE_DEVICES",
        )
    return ok(fact)


def _contradictory(pair: GpuPair) -> bool:
    """Whether nvidia-smi reports another class than sysfs. NVLink (``NV18``) is not visible in sysfs."""
    return bool(pair.smi) and pair.kind != pair.smi and not str(pair.smi).startswith("NV")


CHECKS: tuple[HostCheck, ...] = (acs, bar1, link_width, link_speed, aer, topology)
