"""Print the energy counters of the GPUs every ``PERIOD`` seconds, each time as a line of JSON, until the process is ended.

Run as a program: a call of NVML never returns when a GPU is wedged, and only a process can be given up. Exit code 1: the driver
does not answer. Source: NVML API reference, nvmlDeviceGetTotalEnergyConsumption (mJ since the driver was loaded).
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import pynvml

PERIOD = 0.1


def joules(handle: Any) -> float | None:
    """The counter of a GPU; None without one."""
    try:
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000
    except pynvml.NVMLError:
        return None


def computes(handle: Any) -> bool:
    """Whether a process computes on a GPU; false if that is unknown."""
    try:
        return bool(pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    except pynvml.NVMLError:
        return False


def sample() -> None:
    """Print the time (``time.perf_counter``), the counter of each GPU, and the GPUs on which a process computes."""
    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    busy = [index for index, handle in enumerate(handles) if computes(handle)]
    while True:
        before = time.perf_counter()
        counters = [joules(handle) for handle in handles]
        print(json.dumps({"at": (before + time.perf_counter()) / 2, "joules": counters, "busy": busy}), flush=True)
        time.sleep(PERIOD)


if __name__ == "__main__":
    try:
        sample()
    except pynvml.NVMLError as error:
        sys.exit(f"NVML: {error}")
