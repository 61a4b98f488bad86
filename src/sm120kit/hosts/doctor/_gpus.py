"""Checks of the GPUs: compute capability, driver, power, temperature and other processes."""

from __future__ import annotations

import re
from collections import Counter

from sm120kit.hosts.doctor._findings import (
    Diagnosis,
    HostCheck,
    Impact,
    Scope,
    by_device,
    check,
    not_applicable,
    ok,
    problem,
    unknown,
)
from sm120kit.hosts.facts import Host

BLACKWELL_FLOOR, DRIVER_FLOOR = (570,), (580, 65, 6)
"""The first driver for SM120, and the first for CUDA 13."""
CUDA_FLOOR = (13, 0)
POWER_SHARE = 0.8
"""A power limit below this share of the maximum is a problem."""
HOT_CELSIUS = 85
SMI = "nvidia-smi-q.xml"
RUN_SMI = "nvidia-smi -q"
WIKI = "github.com/Visual-Synthesizer/rtx6kpro"


@check("gpu", "an SM12x GPU is present", Scope.ANY, "CUDA C++ Programming Guide: compute capability 12.x is SM120 and SM121")
def gpu(host: Host) -> Diagnosis:
    if not host.gpus:
        return problem(
            Impact.BREAKS,
            f"no NVIDIA GPU found on the PCI bus; {host.missing_reason(SMI)}",
            cause="there is no GPU, it is not passed to this container or virtual machine, or it has fallen off the bus",
            consequence="kernels built by sm120kit cannot run on this host; building and inspecting work",
            fix="on the host: lspci -d 10de: and dmesg | grep -i xid; in a container: docker run --gpus all",
        )
    names = Counter(gpu.name or "unnamed GPU" for gpu in host.gpus)
    summary = ", ".join(name if count == 1 else f"{count} x {name}" for name, count in names.items())
    if all(gpu.capability is None for gpu in host.gpus):
        return unknown(
            f"{summary}; compute capability: {host.missing_reason(SMI)}", "nvidia-smi --query-gpu=compute_cap --format=csv"
        )
    unsupported = [gpu for gpu in host.gpus if gpu.capability and not gpu.capability.startswith("12.")]
    if len(unsupported) == len(host.gpus):
        return problem(
            Impact.BREAKS,
            f"{summary}: compute capability {', '.join(sorted({gpu.capability or '?' for gpu in unsupported}))}",
            cause="no GPU of this host is SM120 or SM121",
            consequence="kernels built for sm_120f or sm_121a do not load: no kernel image is available",
            fix="use the upstream wheels and images, which support this GPU",
        )
    return ok(summary)


@check(
    "driver", "the driver supports CUDA 13", Scope.GPU, "CUDA Toolkit 13.0 release notes, table of driver versions: 580.65.06"
)
def driver(host: Host) -> Diagnosis:
    other = [gpu.bus for gpu in host.gpus if gpu.driver and gpu.driver != "nvidia"]
    if other:
        names = ", ".join(sorted({gpu.driver or "" for gpu in host.gpus if gpu.bus in other}))
        return problem(
            Impact.BREAKS,
            f"{', '.join(other)}: bound to {names}",
            cause="the GPU is reserved for a virtual machine (vfio-pci), or another driver is bound to it (nouveau)",
            consequence="CUDA does not detect the GPU",
            fix="run sm120kit in the virtual machine, or release the GPU: remove vfio-pci.ids from the kernel command line, "
            "blacklist nouveau, reboot",
        )
    version = host.driver.version
    if version is None:
        return unknown(host.missing_reason("/proc/driver/nvidia/version", SMI), "cat /proc/driver/nvidia/version")
    if host.driver.cuda and not numbers(host.driver.cuda):
        return problem(
            Impact.BREAKS,
            f"driver {version}, CUDA {host.driver.cuda}",
            cause="nvidia-smi cannot load libcuda.so.1: the driver's compute libraries are not installed, or are of another "
            "version than the module; the host driver of vGPU has none",
            consequence="CUDA programs detect no GPU",
            fix="ldconfig -p | grep libcuda.so.1; install the driver's compute package, such as libnvidia-compute-580; in a "
            "container: NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        )
    if numbers(version) < DRIVER_FLOOR or (host.driver.cuda and numbers(host.driver.cuda) < CUDA_FLOOR):
        return problem(
            Impact.BREAKS if numbers(version) < BLACKWELL_FLOOR else Impact.MINOR,
            f"driver {version}, CUDA {host.driver.cuda or '?'}",
            cause="CUDA 13.0 requires driver 580.65.06 or newer",
            consequence="images of sm120kit, with CUDA 13, fail: CUDA driver version is insufficient for CUDA runtime version",
            fix="install the newest open driver of your distribution, such as nvidia-driver-580-open, and reboot",
        )
    return ok(f"driver {version}, CUDA {host.driver.cuda or '?'}")


def numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version; () for text such as "Not Found"."""
    return tuple(int(part) for part in re.findall(r"[0-9]{1,9}", version)) if re.match("[0-9]", version) else ()


@check(
    "open-module",
    "the open kernel module is loaded",
    Scope.GPU,
    "prathamesh.dev/2026/06/04/local-llm-blackwell; NVIDIA's README",
)
def open_module(host: Host) -> Diagnosis:
    if host.wsl:
        return not_applicable("WSL2 uses the Windows driver")
    if host.driver.open_module is None:
        return unknown(
            host.missing_reason("/proc/driver/nvidia/version"),
            "modinfo -F license nvidia (Dual MIT/GPL: the open module)",
        )
    if not host.driver.open_module:
        return problem(
            Impact.BREAKS,
            f"the proprietary kernel module {host.driver.version} is loaded",
            cause="Blackwell GPUs require the open kernel module",
            consequence='lspci lists the card, but nvidia-smi prints "No devices were found"',
            fix="install the -open variant of the driver package (nvidia-driver-580-open), remove the other variant, reboot",
        )
    return ok(f"open kernel module {host.driver.version}")


@check(
    "power-limit",
    "the power limit is at least 80 % of the maximum",
    Scope.DISCRETE,
    f"{WIKI} hardware/gpu-configs.md; loswald/rtxpro6000-bench",
)
def power_limit(host: Host) -> Diagnosis:
    limits = [(gpu.bus, gpu.power_limit, gpu.power_max) for gpu in host.gpus if gpu.power_limit and gpu.power_max]
    if not limits:
        return unknown(host.missing_reason(SMI), "nvidia-smi -q -d POWER")
    low = [(bus, f"{limit:.0f} of {maximum:.0f} W") for bus, limit, maximum in limits if limit < POWER_SHARE * maximum]
    if low:
        return problem(
            Impact.MINOR,
            by_device(low),
            cause="a lower power limit was set",
            consequence="at 400 of 600 W, prefill is 23 % slower in NVFP4 and 34 % in FP8; a single stream loses little",
            fix=f"sudo nvidia-smi -pl {max(maximum for _, _, maximum in limits):.0f}, if power supply and cooling permit",
        )
    return ok(by_device((bus, f"{limit:.0f} of {maximum:.0f} W") for bus, limit, maximum in limits))


@check("persistence", "persistence mode is enabled", Scope.GPU, f"{WIKI} benchmarks/inference-throughput/b650d4u-2gpu.md")
def persistence(host: Host) -> Diagnosis:
    if host.wsl:
        return not_applicable("WSL2 uses the Windows driver")
    if all(gpu.persistence is None for gpu in host.gpus):
        return unknown(host.missing_reason(SMI), RUN_SMI)
    disabled = [gpu.bus for gpu in host.gpus if gpu.persistence is False]
    if disabled:
        return problem(
            Impact.MINOR,
            f"disabled on {', '.join(disabled)}",
            cause="the driver's default",
            consequence="clocks and links power down between processes, and processes start more slowly",
            fix="sudo systemctl enable --now nvidia-persistenced, or sudo nvidia-smi -pm 1 after every boot",
        )
    return ok("enabled")


@check(
    "power-brake",
    "the HW power brake is not active",
    Scope.DISCRETE,
    "nvidia-smi manual: HW Power Brake Slowdown; " + WIKI,
)
def power_brake(host: Host) -> Diagnosis:
    if all(gpu.active is None for gpu in host.gpus):
        return unknown(host.missing_reason(SMI), "nvidia-smi -q -d PERFORMANCE")
    braked = [gpu.bus for gpu in host.gpus if "hw_power_brake_slowdown" in (gpu.active or ())]
    if braked:
        return problem(
            Impact.BREAKS,
            f"HW Power Brake Slowdown is active on {', '.join(braked)}",
            cause="the power supply, its cable or the board asserts the power brake signal",
            consequence="the GPU stays near 270 W; on load spikes it may fall off the bus (Xid 79)",
            fix="one 12V-2x6 cable per GPU from a single-rail supply with headroom for spikes; check the plugs' sense pins",
        )
    return ok("HW Power Brake Slowdown is not active")


@check("temperature", "no GPU is at 85 °C or thermally throttled", Scope.GPU, f"{WIKI} hardware/blackwell-power-limit-sweep.md")
def temperature(host: Host) -> Diagnosis:
    if all(gpu.temperature is None for gpu in host.gpus):
        return unknown(host.missing_reason(SMI), "nvidia-smi -q -d TEMPERATURE")
    throttled = ("hw_thermal_slowdown", "sw_thermal_slowdown")
    hot = [
        (gpu.bus, f"{gpu.temperature} °C")
        for gpu in host.gpus
        if (gpu.temperature or 0) >= HOT_CELSIUS or any(reason in (gpu.active or ()) for reason in throttled)
    ]
    if hot:
        return problem(
            Impact.SLOWS,
            by_device(hot),
            cause="insufficient airflow; passively cooled Server Edition cards require a chassis that blows air through them",
            consequence="the GPU lowers its clocks under load",
            fix="increase the airflow through the card, or lower the power limit: sudo nvidia-smi -pl WATTS",
        )
    return ok(by_device((gpu.bus, f"{gpu.temperature} °C") for gpu in host.gpus if gpu.temperature is not None))


@check(
    "processes",
    "no other process uses the GPUs",
    Scope.GPU,
    "brandonmmusic-max/sm120-moe-bench: NCCL p99 8.8 ms beside a stale process",
)
def processes(host: Host) -> Diagnosis:
    if all(gpu.processes is None for gpu in host.gpus):
        return unknown(host.missing_reason(SMI), "nvidia-smi --query-compute-apps=pid,name --format=csv")
    busy = [(gpu.bus, str(gpu.processes)) for gpu in host.gpus if gpu.processes]
    if busy:
        return problem(
            Impact.MINOR,
            f"compute processes: {by_device(busy)}",
            cause="a server is running, or a killed server left workers behind",
            consequence="less free GPU memory, and latencies of milliseconds instead of microseconds",
            fix="nvidia-smi --query-compute-apps=pid,name --format=csv, then stop unneeded processes",
        )
    return ok("no compute processes")


CHECKS: tuple[HostCheck, ...] = (gpu, driver, open_module, power_limit, persistence, power_brake, temperature, processes)
