"""Read facts from NVIDIA's driver: nvidia-smi's XML and matrices, and /proc/driver/nvidia."""

import re
from typing import Any
from xml.etree import ElementTree

from sm120kit.hosts.facts._fact_records import Driver
from sm120kit.hosts.facts._reader import HostReader

GpuFields = dict[str, Any]
"""Fields of a :class:`Gpu` by name; those that nvidia-smi does not state are None."""


def address(text: str) -> str:
    """Convert nvidia-smi's ``00000000:01:00.0`` to the form of sysfs, ``0000:01:00.0``."""
    domain, _, rest = text.strip().lower().partition(":")
    return f"{domain[-4:]:0>4}:{rest}"


def gpus(reader: HostReader) -> tuple[dict[str, GpuFields], str | None, str | None]:
    """GPUs by address, in nvidia-smi's order; the driver's version; and the newest CUDA version that it supports."""
    text = reader.command_output("nvidia-smi-q.xml")
    if text is None:
        return {}, None, None
    try:
        log = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        reader.unread["nvidia-smi-q.xml"] = f"not XML: {error}"
        return {}, None, None
    capabilities = dict(_capabilities(reader.command_output("nvidia-smi-compute-cap.csv") or ""))
    by_address = {}
    for gpu in log.iter("gpu"):
        bus = address(gpu.get("id", ""))
        by_address[bus] = _smi_gpu(gpu, capabilities.get(bus))
    return by_address, _value(log, "driver_version"), _value(log, "cuda_version")


def _capabilities(text: str) -> list[tuple[str, str]]:
    rows = [line.split(",") for line in text.splitlines()]
    return [(address(row[0]), row[1].strip()) for row in rows if len(row) == 2]


def _smi_gpu(gpu: ElementTree.Element, capability: str | None) -> GpuFields:
    def whole(path: str) -> int | None:
        number = _number(gpu, path)
        return None if number is None else int(number)

    mode, processes = _value(gpu, "persistence_mode"), gpu.find("processes")
    reasons = gpu.find("clocks_event_reasons")
    if reasons is None:
        reasons = gpu.find("clocks_throttle_reasons")
    current = ("gpu_power_readings/current_power_limit", "gpu_power_readings/power_limit", "power_readings/power_limit")
    return {
        "name": _value(gpu, "product_name"),
        "capability": capability,
        "memory_mib": whole("fb_memory_usage/total"),
        "used_mib": whole("fb_memory_usage/used"),
        "aperture_mib": whole("bar1_memory_usage/total"),
        "power_limit": _number(gpu, *current),
        "power_max": _number(gpu, "gpu_power_readings/max_power_limit", "power_readings/max_power_limit"),
        "persistence": None if mode is None else mode == "Enabled",
        "state": _value(gpu, "performance_state"),
        "temperature": whole("temperature/gpu_temp"),
        "active": None if reasons is None else tuple(_reason(reason.tag) for reason in reasons if reason.text == "Active"),
        "processes": None if processes is None else sum(kind.text == "C" for kind in processes.iter("type")),
    }


def _reason(tag: str) -> str:
    return re.sub(r"^clocks_(event|throttle)_reason_", "", tag)


def _value(element: ElementTree.Element, path: str) -> str | None:
    text = (element.findtext(path) or "").strip()
    return text if text and text not in ("N/A", "[N/A]") else None


def _number(element: ElementTree.Element, *paths: str) -> float | None:
    for path in paths:
        match = re.match(r"\d+(\.\d+)?", _value(element, path) or "")
        if match:
            return float(match[0])
    return None


def matrix(text: str | None) -> dict[tuple[int, int], str]:
    """Cells of ``nvidia-smi topo``: (row, column) -> text. The legend and columns of other devices are ignored."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in (text or "").splitlines()]
    header = next((line for line in lines if line[:1] == ["GPU0"] and "X" not in line), [])
    columns = [int(name[3:]) for name in header if re.fullmatch(r"GPU\d+", name)]
    cells: dict[tuple[int, int], str] = {}
    for line in lines:
        if line and re.fullmatch(r"GPU\d+", line[0]) and "X" in line:
            cells |= {(int(line[0][3:]), column): cell for column, cell in zip(columns, line[1:], strict=False)}
    return cells


def driver(reader: HostReader, version: str | None, cuda: str | None) -> Driver:
    """Facts of the kernel module. Under WSL2 there is none: ``version``, from nvidia-smi, is used instead.

    Registry keys are read from /proc: the sysfs parameter reads empty even when they are set.
    """
    banner = reader.text("/proc/driver/nvidia/version")
    match = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", banner or "")
    hmm = reader.text("/sys/module/nvidia_uvm/parameters/uvm_disable_hmm")
    return Driver(
        match[1] if match else version,
        None if banner is None else "Open Kernel Module" in banner,
        registry(reader.text("/proc/driver/nvidia/params")),
        cuda,
        None if hmm is None else hmm in ("Y", "1"),
    )


def registry(params: str | None) -> dict[str, str] | None:
    """Keys and values of the line ``RegistryDwords: "A=1;B=0x11"``; None without such a line."""
    match = re.search(r'^RegistryDwords: "(.*)"', params or "", re.MULTILINE)
    if not match:
        return None
    entries = [entry.partition("=") for entry in match[1].split(";") if entry.strip()]
    return {name.strip(): value.strip() for name, _, value in entries}
