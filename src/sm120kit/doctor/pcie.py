"""PCIe: ACS, BARs, links, errors and topology."""

from __future__ import annotations

from collections import Counter

from sm120kit.doctor.model import Check, Impact, Scope, Verdict, check, each, not_applicable, ok, problem, unknown
from sm120kit.host import Gpu, Host
from sm120kit.host.facts import SWITCHED
from sm120kit.host.pci import ACS_REDIRECT, DEVICES

WIKI = "github.com/Visual-Synthesizer/rtx6kpro"
AWAKE = ("P0", "P1", "P2")
"""Performance states in which a GPU keeps its link at full speed."""
OFFERED_LANES = 16
LARGE_SWITCH = 4


@check(
    "acs",
    "no port sends peer traffic up to the CPU",
    Scope.BARE_PAIR,
    f"NVIDIA/nccl#2079; NCCL manual, troubleshooting; {WIKI} hardware/pcie-bandwidth.md",
)
def acs(host: Host) -> Verdict:
    if not host.bridges:
        return not_applicable("no PCIe ports above the GPUs")
    redirecting = [port for port in host.bridges if (port.acs or 0) & ACS_REDIRECT]
    if redirecting:
        buses = [port.bus for port in redirecting]
        fix = "for port in " + " ".join(buses) + '; do sudo setpci -s "$port" ECAP_ACS+6.w=0000; done'
        fix += " (after every boot, from a oneshot systemd unit; pci=noacs does not clear what firmware has set)"
        if host.passthrough:
            fix = f"first end the passthrough of {', '.join(host.passthrough)}: without ACS its groups merge. Then {fix}"
        return problem(
            Impact.BREAKS,
            "ACSCtl " + ", ".join(f"{port.acs:#06x} at {port.bus}" for port in redirecting),
            cause="ACS request or completion redirect is set on these root or switch ports, often by firmware",
            consequence="NCCL with two ranks may hang, or a switch forwards 50 GB/s both ways together instead of 103",
            fix=fix,
        )
    if any(port.has_acs is None for port in host.bridges):
        return unknown(
            "configuration space beyond 64 bytes is for root only",
            "sudo sm120kit doctor, or sudo lspci -vvv | grep ACSCtl",
        )
    return ok(f"no redirect on {len(host.bridges)} port(s)")


@check(
    "bar1",
    "a GPU's memory is wholly visible on the bus",
    Scope.DISCRETE,
    f"{WIKI} hardware/pcie-bandwidth.md; noonghunna/club-3090 docs/PCIE_P2P.md §4",
)
def bar1(host: Host) -> Verdict:
    if host.wsl:
        return not_applicable("WSL2 hides the PCIe tree")
    if host.virtual:
        return unknown("what a guest sees of BARs proves nothing", "sm120kit doctor on the host")
    if any(gpu.aperture_mib is None for gpu in host.gpus):
        return unknown(host.why("nvidia-smi-q.xml"), "nvidia-smi -q -d MEMORY | grep -A1 BAR1")
    homeless = [gpu.bus for gpu in host.gpus if gpu.aperture_mib == 0]
    if homeless:
        return problem(
            Impact.BREAKS,
            f"{', '.join(homeless)}: no BAR is assigned",
            cause='the kernel found no room for the BARs (dmesg: "BAR 1: no space")',
            consequence="the driver does not start the GPU",
            fix="BIOS: Above 4G Decoding on; else pci=realloc on the kernel command line; unused USB4 off; with more than "
            "12 GPUs displaymodeselector to compute mode",
        )
    small = [gpu for gpu in host.gpus if (gpu.aperture_mib or 0) < (gpu.memory_mib or 257)]
    if small:
        return problem(
            Impact.BREAKS if len(host.gpus) > 1 else Impact.MINOR,
            each((gpu.bus, f"BAR1 {gpu.aperture_mib} MiB for {gpu.memory_mib or '?'} MiB of memory") for gpu in small),
            cause="Resizable BAR is off",
            consequence="no P2P between GPUs; loading a model is slower",
            fix="BIOS: Re-Size BAR Support on, besides Above 4G Decoding (two settings); on RTX PRO cards displaymodeselector "
            "can make it permanent",
        )
    return ok(each((gpu.bus, f"BAR1 {gpu.aperture_mib} MiB") for gpu in host.gpus))


@check(
    "link-width", "links have all their lanes", Scope.DISCRETE, f"{WIKI} hardware/gpu-configs.md, daily-summaries 2026-04-22"
)
def link_width(host: Host) -> Verdict:
    if host.virtual or host.wsl:
        return not_applicable("a guest does not see the real links")
    if any(gpu.link.width is None or gpu.link.max_width is None for gpu in host.gpus):
        return unknown(
            host.why(*(f"{DEVICES}/{gpu.bus}/current_link_width" for gpu in host.gpus)), "sudo lspci -vv | grep LnkSta:"
        )
    narrow = [gpu for gpu in host.gpus if (gpu.link.width or 0) < min(gpu.link.max_width or 0, OFFERED_LANES)]
    if narrow:
        return problem(
            Impact.SLOWS,
            each((gpu.bus, f"x{gpu.link.width} of x{gpu.link.max_width}{_port(host, gpu)}") for gpu in narrow),
            cause="the slot has fewer lanes, shares them with an M.2, or a riser or dirty contact lost some",
            consequence="one narrow GPU drags every collective down: prefill fell from 9,000 to 1,000 tok/s",
            fix="another slot (see the board's block diagram), BIOS bifurcation x16, cables below 30 cm, reseat the card",
        )
    return ok(each((gpu.bus, f"x{gpu.link.width}") for gpu in host.gpus))


def _port(host: Host, gpu: Gpu) -> str:
    lanes = host.bridge(gpu.bridges[-1]).link.max_width if gpu.bridges else None
    if lanes is None:
        return ""
    return f" (the slot's port has x{lanes})"


@check(
    "link-speed",
    "links run at the GPU's generation",
    Scope.DISCRETE,
    f"{WIKI} hardware/gpu-configs.md, daily-summaries 2026-04-17, 2026-05-10",
)
def link_speed(host: Host) -> Verdict:
    if host.virtual or host.wsl:
        return not_applicable("a guest does not see the real links")
    if any(gpu.link.speed is None or gpu.link.max_speed is None for gpu in host.gpus):
        return unknown(
            host.why(*(f"{DEVICES}/{gpu.bus}/current_link_speed" for gpu in host.gpus)), "sudo lspci -vv | grep LnkSta:"
        )
    old = [gpu for gpu in host.gpus if _offered(host, gpu) < (gpu.link.max_speed or 0)]
    slow = [gpu for gpu in host.gpus if gpu.state in AWAKE and (gpu.link.speed or 0) < (gpu.link.max_speed or 0)]
    if old or slow:
        return problem(
            Impact.SLOWS,
            each(
                (gpu.bus, f"{gpu.link.speed:g} of {gpu.link.max_speed:g} GT/s, port up to {_offered(host, gpu):g}")
                for gpu in host.gpus
                if gpu in old or gpu in slow
            ),
            cause="the slot, riser or retimer is of an older generation, or the link fell back",
            consequence="every step down halves P2P bandwidth: 26 GB/s where Gen5 x16 has 52 to 56",
            fix="a Gen5 slot or riser; BIOS: link speed Gen5 for this slot; for poor risers, set Gen4 on purpose",
        )
    if all(gpu.link.speed == gpu.link.max_speed for gpu in host.gpus):
        return ok(each((gpu.bus, f"{gpu.link.speed:g} GT/s") for gpu in host.gpus))
    return unknown(
        "idle GPUs lower their link speed: "
        + each((gpu.bus, f"now {gpu.link.speed:g} of {gpu.link.max_speed:g} GT/s") for gpu in host.gpus),
        "sm120kit doctor again while a model answers",
    )


def _offered(host: Host, gpu: Gpu) -> float:
    """The fastest speed that the port above a GPU offers; the GPU's own where that is not known."""
    offered = host.bridge(gpu.bridges[-1]).link.max_speed if gpu.bridges else None
    return offered or gpu.link.max_speed or 0.0


@check(
    "aer",
    "PCIe counts no errors",
    Scope.DISCRETE,
    f"{WIKI} daily-summaries 2026-03-07, 2026-05-12; Linux Documentation/ABI sysfs-bus-pci-devices-aer_stats",
)
def aer(host: Host) -> Verdict:
    if host.wsl:
        return not_applicable("WSL2 hides the PCIe tree")
    seen = [(gpu.bus, gpu.errors) for gpu in host.gpus] + [(port.bus, port.errors) for port in host.bridges]
    counted = [(bus, errors) for bus, errors in seen if errors]
    if not counted:
        paths = [f"{DEVICES}/{gpu.bus}/aer_dev_correctable" for gpu in host.gpus]
        return unknown(host.why(*paths), "dmesg | grep -i aer")
    bad = [
        f"{bus}: {errors.nonfatal} nonfatal, {errors.fatal} fatal" for bus, errors in counted if errors.nonfatal or errors.fatal
    ]
    if bad:
        return problem(
            Impact.BREAKS,
            "; ".join(bad),
            cause="a link that is not stable: cable, riser, retimer, contact or heat",
            consequence="transfers fail, and the GPU falls off the bus",
            fix="shorter or better cable or riser, reseat, cool the slot below 88 °C, or set it to Gen4; dmesg | grep -i aer",
        )
    worn = [f"{bus}: {errors.correctable}" for bus, errors in counted if errors.correctable]
    if worn:
        return problem(
            Impact.MINOR,
            f"corrected errors since boot: {'; '.join(worn)}",
            cause="bits are repeated on a marginal link",
            consequence="some bandwidth; a sign of what may come",
            fix="run doctor again after some load: when the count grows, better cable or riser, or Gen4 for this slot",
        )
    return ok(f"none on {len(counted)} device(s)")


@check(
    "topology",
    "every pair of GPUs is near",
    Scope.PAIR,
    f"nvidia-smi topo -m, legend; {WIKI} hardware/topology.md, optimization/pcie-oneshot-allreduce.md",
)
def topology(host: Host) -> Verdict:
    if host.wsl:
        return not_applicable("WSL2 hides the PCIe tree")
    doubtful = [
        pair for pair in host.pairs if pair.kind and pair.said and pair.kind != pair.said and not pair.said.startswith("NV")
    ]
    if doubtful or any(pair.kind is None for pair in host.pairs):
        pair = next(pair for pair in host.pairs if pair in doubtful or pair.kind is None)
        return unknown(
            f"{pair.first} and {pair.second}: sysfs says {pair.kind or 'nothing'}, nvidia-smi {pair.said or 'nothing'}",
            "nvidia-smi topo -m; lspci -tv",
        )
    counts = Counter(pair.kind for pair in host.pairs)
    fact = ", ".join(f"{count} x {kind}" for kind, count in sorted(counts.items(), key=str))
    if counts["SYS"] and host.environment.get("NCCL_P2P_LEVEL") != "SYS":
        return problem(
            Impact.SLOWS,
            fact,
            cause="some GPUs hang on different sockets, and NCCL does not use P2P that far by itself",
            consequence="all-reduce over all GPUs goes through host memory; one-shot all-reduce loses 4 to 16 % across sockets",
            fix="NCCL_P2P_LEVEL=SYS for models over all GPUs; else choose GPUs of one socket with CUDA_VISIBLE_DEVICES",
        )
    return ok(fact)


@check(
    "posted-writes",
    "no switch is a bottleneck for concurrent writes",
    Scope.BARE_PAIR,
    f"{WIKI} hardware/collapse-report.md (cause undetermined there)",
)
def posted_writes(host: Host) -> Verdict:
    groups = Counter(gpu.bridges[:-1] for gpu in host.gpus if len(gpu.bridges) > 1)
    if not any(pair.kind in SWITCHED for pair in host.pairs):
        return not_applicable("no PCIe switch between GPUs")
    several = len(groups) > 1 and (host.cpu.sockets or 1) > 1
    if several or any(count >= LARGE_SWITCH for count in groups.values()):
        return problem(
            Impact.MINOR,
            f"{len(groups)} switch(es) with {', '.join(str(count) for count in sorted(groups.values()))} GPUs",
            cause="on some boards posted writes collapse when two or more GPUs write through one switch port to another root",
            consequence="37 falls to 2.7 GB/s (Broadcom PEX890xx, dual Turin), 52 to 6 (Microchip, 4 GPUs); reads stay fast",
            fix="sm120kit doctor --measure; when it collapses: NCCL_ALGO=Ring, and one root switch above the others",
        )
    return ok(f"{len(groups)} switch(es)")


CHECKS: tuple[Check, ...] = (acs, bar1, link_width, link_speed, aer, topology, posted_writes)
