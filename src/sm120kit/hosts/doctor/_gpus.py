"""Checks of the GPUs: compute capability, driver, power, temperature and other processes."""

import re
from collections import Counter

from sm120kit.hosts.doctor._findings import Diagnosis, Impact, by_device, check, not_applicable, ok, problem, unknown
from sm120kit.hosts.facts import Host

BLACKWELL_FLOOR, DRIVER_FLOOR = (570,), (580, 65, 6)
"""The first driver for SM120, and the first for CUDA 13."""
CUDA_FLOOR = (13, 0)
POWER_SHARE = 0.8
"""A power limit below this share of the maximum is a problem."""
HOT_CELSIUS = 85
SMI = "nvidia-smi-q.xml"
RUN_SMI = "nvidia-smi -q"


@check("gpu")
def gpu(host: Host) -> Diagnosis:
    if not host.gpus:
        return problem("gpu.absent", Impact.BREAKS, f"no NVIDIA GPU found on the PCI bus; {host.missing_reason(SMI)}")
    names = Counter(gpu.name or "unnamed GPU" for gpu in host.gpus)
    summary = ", ".join(name if count == 1 else f"{count} x {name}" for name, count in names.items())
    if all(gpu.capability is None for gpu in host.gpus):
        return unknown(
            f"{summary}; compute capability: {host.missing_reason(SMI)}", "nvidia-smi --query-gpu=compute_cap --format=csv"
        )
    unsupported = [gpu for gpu in host.gpus if gpu.capability and not gpu.capability.startswith("12.")]
    if len(unsupported) == len(host.gpus):
        return problem(
            "gpu.other",
            Impact.BREAKS,
            f"{summary}: compute capability {', '.join(sorted({gpu.capability or '?' for gpu in unsupported}))}",
        )
    return ok(summary)


@check("driver")
def driver(host: Host) -> Diagnosis:
    other = [gpu.bus for gpu in host.gpus if gpu.driver and gpu.driver != "nvidia"]
    if other:
        names = ", ".join(sorted({gpu.driver or "" for gpu in host.gpus if gpu.bus in other}))
        return problem("driver.bound", Impact.BREAKS, f"{', '.join(other)}: bound to {names}")
    version = host.driver.version
    if version is None:
        return unknown(host.missing_reason("/proc/driver/nvidia/version", SMI), "cat /proc/driver/nvidia/version")
    if host.driver.cuda and not numbers(host.driver.cuda):
        return problem("driver.libraries", Impact.BREAKS, f"driver {version}, CUDA {host.driver.cuda}")
    if numbers(version) < DRIVER_FLOOR or (host.driver.cuda and numbers(host.driver.cuda) < CUDA_FLOOR):
        return problem(
            "driver.old",
            Impact.BREAKS if numbers(version) < BLACKWELL_FLOOR else Impact.MINOR,
            f"driver {version}, CUDA {host.driver.cuda or '?'}",
        )
    return ok(f"driver {version}, CUDA {host.driver.cuda or '?'}")


def numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version; () for text such as "Not Found"."""
    return tuple(int(part) for part in re.findall(r"[0-9]{1,9}", version)) if re.match("[0-9]", version) else ()


@check("open-module")
def open_module(host: Host) -> Diagnosis:
    if host.wsl:
        return not_applicable("WSL2 uses the Windows driver")
    if host.driver.open_module is None:
        return unknown(
            host.missing_reason("/proc/driver/nvidia/version"), "modinfo -F license nvidia (Dual MIT/GPL: the open module)"
        )
    if not host.driver.open_module:
        return problem("open-module", Impact.BREAKS, f"the proprietary kernel module {host.driver.version} is loaded")
    return ok(f"open kernel module {host.driver.version}")


@check("power-limit")
def power_limit(host: Host) -> Diagnosis:
    limits = [(gpu.bus, gpu.power_limit, gpu.power_max) for gpu in host.gpus if gpu.power_limit and gpu.power_max]
    if not limits:
        return unknown(host.missing_reason(SMI), "nvidia-smi -q -d POWER")
    low = [(bus, f"{limit:.0f} of {maximum:.0f} W") for bus, limit, maximum in limits if limit < POWER_SHARE * maximum]
    if low:
        return problem(
            "power-limit",
            Impact.MINOR,
            by_device(low),
            fix=f"sudo nvidia-smi -pl {max(maximum for _, _, maximum in limits):.0f}, if power supply and cooling permit",
        )
    return ok(by_device((bus, f"{limit:.0f} of {maximum:.0f} W") for bus, limit, maximum in limits))


@check("persistence")
def persistence(host: Host) -> Diagnosis:
    if host.wsl:
        return not_applicable("WSL2 uses the Windows driver")
    if all(gpu.persistence is None for gpu in host.gpus):
        return unknown(host.missing_reason(SMI), RUN_SMI)
    disabled = [gpu.bus for gpu in host.gpus if gpu.persistence is False]
    if disabled:
        return problem("persistence", Impact.MINOR, f"disabled on {', '.join(disabled)}")
    return ok("enabled")


@check("power-brake")
def power_brake(host: Host) -> Diagnosis:
    if all(gpu.active is None for gpu in host.gpus):
        return unknown(host.missing_reason(SMI), "nvidia-smi -q -d PERFORMANCE")
    braked = [gpu.bus for gpu in host.gpus if "hw_power_brake_slowdown" in (gpu.active or ())]
    if braked:
        return problem("power-brake", Impact.BREAKS, f"HW Power Brake Slowdown is active on {', '.join(braked)}")
    return ok("HW Power Brake Slowdown is not active")


@check("temperature")
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
        return problem("temperature", Impact.SLOWS, by_device(hot))
    return ok(by_device((gpu.bus, f"{gpu.temperature} °C") for gpu in host.gpus if gpu.temperature is not None))


@check("processes")
def processes(host: Host) -> Diagnosis:
    if all(gpu.processes is None for gpu in host.gpus):
        return unknown(host.missing_reason(SMI), "nvidia-smi --query-compute-apps=pid,name --format=csv")
    busy = [(gpu.bus, str(gpu.processes)) for gpu in host.gpus if gpu.processes]
    if busy:
        return problem("processes", Impact.MINOR, f"compute processes: {by_device(busy)}")
    return ok("no compute processes")
