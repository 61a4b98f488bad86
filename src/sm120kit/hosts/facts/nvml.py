"""Print the GPUs that NVIDIA's driver lists, with its version, as JSON.

Run as a program: a call of NVML never returns when a GPU is wedged, and only a process can be given up. Exit code 1: the driver
does not answer. Source: NVML API reference.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pynvml

REASONS = {
    "gpu_idle": 0x1,
    "applications_clocks_setting": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
    "display_clock_setting": 0x100,
}
"""nvidia-smi's names of the reasons for lowered clocks -> bits of nvmlClocksEventReasons."""
MIB = 1 << 20


def supported(query: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a query; None where driver or GPU do not support it."""
    try:
        return query(*arguments)
    except pynvml.NVMLError:
        return None


def inventory() -> dict[str, Any]:
    """Version of the driver, newest CUDA version that it supports, and its GPUs by address, in their order.

    Memory in MiB, power in W, temperature in degrees Celsius.
    """
    pynvml.nvmlInit()
    gpus = {}
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        gpus[pynvml.nvmlDeviceGetPciInfo(handle).busId] = _gpu(handle)
    return {"driver": supported(pynvml.nvmlSystemGetDriverVersion), "cuda": _cuda(), "gpus": gpus}


def _cuda() -> str | None:
    try:
        number = pynvml.nvmlSystemGetCudaDriverVersion_v2()
    except pynvml.NVMLError_LibraryNotFound:
        return "Not Found"  # as nvidia-smi prints it: there is no libcuda.so.1
    except pynvml.NVMLError:
        return None
    return f"{number // 1000}.{number % 1000 // 10}"


def _gpu(handle: Any) -> dict[str, Any]:
    capability = supported(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    memory = supported(pynvml.nvmlDeviceGetMemoryInfo, handle)
    aperture = supported(pynvml.nvmlDeviceGetBAR1MemoryInfo, handle)
    limit = supported(pynvml.nvmlDeviceGetPowerManagementLimit, handle)
    limits = supported(pynvml.nvmlDeviceGetPowerManagementLimitConstraints, handle)
    persistence = supported(pynvml.nvmlDeviceGetPersistenceMode, handle)
    state = supported(pynvml.nvmlDeviceGetPerformanceState, handle)
    processes = supported(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
    reasons = supported(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    if reasons is None:  # drivers before 535
        reasons = supported(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    return {
        "name": supported(pynvml.nvmlDeviceGetName, handle),
        "capability": capability and ".".join(map(str, capability)),
        "memory_mib": memory and memory.total // MIB,
        "used_mib": memory and memory.used // MIB,
        "aperture_mib": aperture and aperture.bar1Total // MIB,
        "power_limit": limit and limit / 1000,
        "power_max": limits and limits[1] / 1000,
        "persistence": None if persistence is None else bool(persistence),
        "state": None if state is None or state > pynvml.NVML_PSTATE_15 else f"P{state}",
        "temperature": supported(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        "active": None if reasons is None else [name for name, bit in REASONS.items() if reasons & bit],
        "processes": None if processes is None else len(processes),
    }


if __name__ == "__main__":
    try:
        print(json.dumps(inventory()))
    except pynvml.NVMLError as error:
        sys.exit(f"NVML: {error}")
