"""The GPUs themselves: which they are, driver, power, temperature, and who uses them."""

from __future__ import annotations

from collections import Counter

from sm120kit.doctor.model import Check, Impact, Scope, Verdict, check, each, not_applicable, ok, problem, unknown
from sm120kit.host import Host

DRIVER_FLOOR = (580, 65, 6)
CUDA_FLOOR = (13, 0)
POWER_SHARE = 0.8
HOT_CELSIUS = 85
SMI = "nvidia-smi-q.xml"
RUN_SMI = "nvidia-smi -q"
WIKI = "github.com/Visual-Synthesizer/rtx6kpro"


@check("gpu", "an SM12x GPU is there", Scope.ANY, "CUDA C++ Programming Guide: compute capability 12.x is SM120 and SM121")
def gpu(host: Host) -> Verdict:
    if not host.gpus:
        return problem(
            Impact.BREAKS,
            f"no NVIDIA GPU found on the PCI bus, and nvidia-smi: {host.why(SMI)}",
            cause="there is none, it is not passed into this container or guest, or it has fallen off the bus",
            consequence="nothing that sm120kit builds can run here; building and inspecting work",
            fix="on the host: lspci -d 10de: and dmesg | grep -i xid; in a container: docker run --gpus all",
        )
    names = Counter(gpu.name or "unnamed GPU" for gpu in host.gpus)
    named = ", ".join(name if count == 1 else f"{count} x {name}" for name, count in names.items())
    if all(gpu.capability is None for gpu in host.gpus):
        return unknown(f"{named}; compute capability: {host.why(SMI)}", "nvidia-smi --query-gpu=compute_cap --format=csv")
    strangers = [gpu for gpu in host.gpus if gpu.capability and not gpu.capability.startswith("12.")]
    if len(strangers) == len(host.gpus):
        return problem(
            Impact.BREAKS,
            f"{named}: compute capability {', '.join(sorted({gpu.capability or '?' for gpu in strangers}))}",
            cause="no GPU here is an SM120 or SM121",
            consequence="kernels built for sm_120f or sm_121a do not load: no kernel image is available",
            fix="use the upstream wheels and images; they are made for this GPU",
        )
    return ok(named)


@check("driver", "the driver runs CUDA 13", Scope.GPU, "CUDA Toolkit 13.0 release notes, table of driver versions: 580.65.06")
def driver(host: Host) -> Verdict:
    held = [gpu.bus for gpu in host.gpus if gpu.driver and gpu.driver != "nvidia"]
    if held:
        names = ", ".join(sorted({gpu.driver or "" for gpu in host.gpus if gpu.bus in held}))
        return problem(
            Impact.BREAKS,
            f"{', '.join(held)}: held by {names}",
            cause="the GPU is reserved for a virtual machine (vfio-pci) or another driver took it (nouveau)",
            consequence="CUDA does not see it",
            fix="run sm120kit in the guest, or free it: no vfio-pci.ids on the kernel command line, blacklist nouveau, reboot",
        )
    version = host.driver.version
    if version is None:
        return unknown(host.why("/proc/driver/nvidia/version", SMI), "cat /proc/driver/nvidia/version")
    if _numbers(version) < DRIVER_FLOOR or (host.driver.cuda and _numbers(host.driver.cuda) < CUDA_FLOOR):
        return problem(
            Impact.BREAKS,
            f"driver {version}, CUDA {host.driver.cuda or '?'}",
            cause="CUDA 13.0 needs driver 580.65.06 or newer",
            consequence="CUDA 13 programs end with: CUDA driver version is insufficient for CUDA runtime version",
            fix="install the newest open driver of your distribution, such as nvidia-driver-580-open, and reboot",
        )
    return ok(f"driver {version}, CUDA {host.driver.cuda or '?'}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


@check(
    "open-module",
    "the open kernel module is loaded",
    Scope.GPU,
    "prathamesh.dev/2026/06/04/local-llm-blackwell; NVIDIA's README",
)
def open_module(host: Host) -> Verdict:
    if host.wsl:
        return not_applicable("under WSL2 the driver is Windows's")
    if host.driver.open_module is None:
        return unknown(host.why("/proc/driver/nvidia/version"), "modinfo -F license nvidia (Dual MIT/GPL is the open one)")
    if not host.driver.open_module:
        return problem(
            Impact.BREAKS,
            f"the proprietary module {host.driver.version} is loaded",
            cause="Blackwell GPUs run with the open kernel module only",
            consequence='lspci shows the card and nvidia-smi says "No devices were found"',
            fix="install the -open flavour of the driver package (nvidia-driver-580-open), remove the other, reboot",
        )
    return ok(f"open kernel module {host.driver.version}")


@check(
    "power-limit",
    "the power limit is near the maximum",
    Scope.DISCRETE,
    f"{WIKI} hardware/gpu-configs.md; loswald/rtxpro6000-bench",
)
def power_limit(host: Host) -> Verdict:
    known = [(gpu.bus, gpu.power_limit, gpu.power_max) for gpu in host.gpus if gpu.power_limit and gpu.power_max]
    if not known:
        return unknown(host.why(SMI), "nvidia-smi -q -d POWER")
    low = [(bus, f"{limit:.0f} of {most:.0f} W") for bus, limit, most in known if limit < POWER_SHARE * most]
    if low:
        return problem(
            Impact.SLOWS,
            each(low),
            cause="a power limit was set",
            consequence="400 of 600 W cost 23 % in NVFP4 and 34 % in FP8 prefill; a single stream loses little",
            fix=f"sudo nvidia-smi -pl {max(most for _, _, most in known):.0f}, if power supply and cooling allow it",
        )
    return ok(each((bus, f"{limit:.0f} of {most:.0f} W") for bus, limit, most in known))


@check("persistence", "persistence mode is on", Scope.GPU, f"{WIKI} benchmarks/inference-throughput/b650d4u-2gpu.md")
def persistence(host: Host) -> Verdict:
    if host.wsl:
        return not_applicable("under WSL2 the driver is Windows's")
    if all(gpu.persistence is None for gpu in host.gpus):
        return unknown(host.why(SMI), RUN_SMI)
    off = [gpu.bus for gpu in host.gpus if gpu.persistence is False]
    if off:
        return problem(
            Impact.MINOR,
            f"off on {', '.join(off)}",
            cause="the driver's default",
            consequence="clocks and links go to sleep between processes, and starts are slower",
            fix="sudo systemctl enable --now nvidia-persistenced, or sudo nvidia-smi -pm 1 after every boot",
        )
    return ok("on")


@check(
    "power-brake", "nothing outside slows the GPU down", Scope.DISCRETE, "nvidia-smi manual: HW Power Brake Slowdown; " + WIKI
)
def power_brake(host: Host) -> Verdict:
    if all(gpu.active is None for gpu in host.gpus):
        return unknown(host.why(SMI), "nvidia-smi -q -d PERFORMANCE")
    braked = [gpu.bus for gpu in host.gpus if "hw_power_brake_slowdown" in (gpu.active or ())]
    if braked:
        return problem(
            Impact.BREAKS,
            f"HW Power Brake Slowdown is active on {', '.join(braked)}",
            cause="the power supply, its cable or the board asserts the power brake",
            consequence="the GPU stays near 270 W; on load spikes it may fall off the bus (Xid 79)",
            fix="one 12V-2x6 cable per GPU from a single-rail supply with headroom for spikes; check the plugs' sense pins",
        )
    return ok("no power brake")


@check("temperature", "no GPU is too hot", Scope.GPU, f"{WIKI} hardware/blackwell-power-limit-sweep.md")
def temperature(host: Host) -> Verdict:
    if all(gpu.temperature is None for gpu in host.gpus):
        return unknown(host.why(SMI), "nvidia-smi -q -d TEMPERATURE")
    throttled = ("hw_thermal_slowdown", "sw_thermal_slowdown")
    hot = [
        (gpu.bus, f"{gpu.temperature} °C")
        for gpu in host.gpus
        if (gpu.temperature or 0) >= HOT_CELSIUS or any(reason in (gpu.active or ()) for reason in throttled)
    ]
    if hot:
        return problem(
            Impact.SLOWS,
            each(hot),
            cause="too little air; passive Server Edition cards need a chassis that blows through them",
            consequence="clocks go down under load",
            fix="more air through the card, or a lower limit: sudo nvidia-smi -pl WATTS",
        )
    return ok(each((gpu.bus, f"{gpu.temperature} °C") for gpu in host.gpus if gpu.temperature is not None))


@check(
    "processes",
    "nobody else uses the GPUs",
    Scope.GPU,
    "brandonmmusic-max/sm120-moe-bench: NCCL p99 8.8 ms beside a stale process",
)
def processes(host: Host) -> Verdict:
    if all(gpu.processes is None for gpu in host.gpus):
        return unknown(host.why(SMI), "nvidia-smi --query-compute-apps=pid,name --format=csv")
    busy = [(gpu.bus, str(gpu.processes)) for gpu in host.gpus if gpu.processes]
    if busy:
        return problem(
            Impact.MINOR,
            f"compute processes: {each(busy)}",
            cause="a server runs, or one that was killed left workers behind",
            consequence="less memory, and latencies that jump from microseconds to milliseconds",
            fix="nvidia-smi --query-compute-apps=pid,name --format=csv, and stop what should not be there",
        )
    return ok("no compute process")


CHECKS: tuple[Check, ...] = (gpu, driver, open_module, power_limit, persistence, power_brake, temperature, processes)
