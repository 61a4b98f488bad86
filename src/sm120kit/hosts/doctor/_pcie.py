"""Checks of PCIe: ACS, BARs, links, AER error counters, topology, and all-reduce over PCIe."""

from collections import Counter

from sm120kit.hosts.doctor import _linux, _p2p
from sm120kit.hosts.doctor._findings import (
    Diagnosis,
    HostRemedy,
    Impact,
    Status,
    as_information,
    by_device,
    check,
    not_applicable,
    ok,
    problem,
    unknown,
)
from sm120kit.hosts.doctor._linux import GRUB, IOMMU_OFF
from sm120kit.hosts.doctor._p2p import p2p_unused
from sm120kit.hosts.facts import Gpu, GpuPair, Host
from sm120kit.hosts.facts._pci import ACS_REDIRECT, DEVICES

AWAKE = ("P0", "P1", "P2")
"""Performance states in which a GPU keeps its link at full speed."""
SLOT_LANES = 16
"""Lanes of the widest slot; a GPU with more is not expected to have them."""
HALF_LANES, GEN4 = 8, 16.0
"""A Gen5 link with half its lanes, or a Gen4 link with all, is a property of many boards and costs some percent."""


@check("acs")
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
            "acs",
            Impact.BREAKS,
            "ACSCtl " + ", ".join(f"{port.acs:#06x} at {port.bus}" for port in redirecting),
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
            "only root can read configuration space beyond 64 bytes", "sudo sm120kit doctor, or sudo lspci -vvv | grep ACSCtl"
        )
    return ok(f"no redirection on {len(host.bridges)} port(s)")


@check("bar1")
def bar1(host: Host) -> Diagnosis:
    if host.wsl:
        return not_applicable("WSL2 hides the PCIe tree")
    if host.virtual:
        return unknown("BARs are emulated in a virtual machine", "sm120kit doctor on the host")
    if any(gpu.aperture_mib is None for gpu in host.gpus):
        return unknown(host.missing_reason("nvidia-smi-q.xml"), "nvidia-smi -q -d MEMORY | grep -A1 BAR1")
    unassigned = [gpu.bus for gpu in host.gpus if gpu.aperture_mib == 0]
    if unassigned:
        return problem("bar1.unassigned", Impact.BREAKS, f"{', '.join(unassigned)}: no BAR is assigned")
    small = [gpu for gpu in host.gpus if (gpu.aperture_mib or 0) < (gpu.memory_mib or 257)]
    if small:
        return problem(
            "bar1.small",
            Impact.SLOWS if len(host.gpus) > 1 and not any(gpu.consumer for gpu in host.gpus) else Impact.MINOR,
            by_device((gpu.bus, f"BAR1 {gpu.aperture_mib} MiB for {gpu.memory_mib or '?'} MiB of memory") for gpu in small),
        )
    return ok(by_device((gpu.bus, f"BAR1 {gpu.aperture_mib} MiB") for gpu in host.gpus))


@check("link-width")
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
            "link-width",
            Impact.MINOR if half else Impact.SLOWS,
            by_device((gpu.bus, f"x{gpu.link.width} of x{gpu.link.max_width}{_port(host, gpu)}") for gpu in narrow),
        )
    return ok(by_device((gpu.bus, f"x{gpu.link.width}") for gpu in host.gpus))


def _port(host: Host, gpu: Gpu) -> str:
    lanes = host.bridge(gpu.bridges[-1]).link.max_width if gpu.bridges else None
    return "" if lanes is None else f" (port: x{lanes})"


@check("link-speed")
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
            "link-speed",
            Impact.SLOWS if slow_link or older else Impact.MINOR,
            by_device(
                (gpu.bus, f"{gpu.link.speed:g} of {gpu.link.max_speed:g} GT/s, port maximum {_port_speed(host, gpu):g}")
                for gpu in host.gpus
                if gpu in old or gpu in slow
            ),
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


@check("aer")
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
        return problem("aer.uncorrected", Impact.BREAKS, "; ".join(uncorrected))
    corrected = [f"{bus}: {errors.correctable}" for bus, errors in counters if errors.correctable]
    if corrected:
        return problem("aer.corrected", Impact.MINOR, f"corrected errors since boot: {'; '.join(corrected)}")
    return ok(f"no errors on {len(counters)} device(s)")


@check("topology")
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
        return problem("topology", Impact.MINOR if p2p_unused(host) else Impact.SLOWS, fact)
    return ok(fact)


def _contradictory(pair: GpuPair) -> bool:
    """Whether nvidia-smi reports another class than sysfs. NVLink (``NV18``) is not visible in sysfs."""
    return bool(pair.smi) and pair.kind != pair.smi and not str(pair.smi).startswith("NV")


@check("pcie-ipc")
def pcie_ipc(host: Host) -> Diagnosis:
    verdicts = {each.name: each.diagnose(host) for each in (_p2p.grant, _linux.iommu, acs)}
    lacking = [f"{name}: {verdict.fact}" for name, verdict in verdicts.items() if verdict.status is Status.PROBLEM]
    if lacking:
        return problem(
            "pcie-ipc",
            Impact.MINOR,
            "; ".join(lacking),
            fix=f"as for {', '.join(name for name, verdict in verdicts.items() if verdict.status is Status.PROBLEM)}; then "
            "sm120kit tune CONFIG measures it",
        )
    hidden = [name for name, verdict in verdicts.items() if verdict.status is Status.UNKNOWN]
    if hidden:
        return unknown(f"{' and '.join(hidden)} unknown", "sudo sm120kit doctor; sm120kit tune CONFIG measures it")
    return ok("P2P is granted, and neither IOMMU nor ACS redirects it; sm120kit tune CONFIG measures it")
