"""What NVIDIA's driver says: nvidia-smi's XML and matrices, and /proc/driver/nvidia."""

from __future__ import annotations

import re
from dataclasses import dataclass
from xml.etree import ElementTree

from sm120kit.host.facts import Driver
from sm120kit.host.source import Source


@dataclass(frozen=True)
class Said:
    """nvidia-smi's view of one GPU."""

    name: str | None
    capability: str | None
    memory_mib: int | None
    aperture_mib: int | None
    power_limit: float | None
    power_max: float | None
    persistence: bool | None
    state: str | None
    temperature: int | None
    active: tuple[str, ...] | None
    processes: int | None


def address(text: str) -> str:
    """nvidia-smi's ``00000000:01:00.0`` as sysfs has it."""
    domain, _, rest = text.strip().lower().partition(":")
    return f"{domain[-4:]:0>4}:{rest}"


def gpus(source: Source) -> tuple[dict[str, Said], str | None, str | None]:
    """What nvidia-smi says of each GPU by its address, in its own order, the driver's version, and the newest CUDA it runs."""
    text = source.said("nvidia-smi-q.xml")
    if text is None:
        return {}, None, None
    try:
        log = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        source.unread["nvidia-smi-q.xml"] = f"not XML: {error}"
        return {}, None, None
    capabilities = dict(_capabilities(source.said("nvidia-smi-compute-cap.csv") or ""))
    found = {}
    for gpu in log.iter("gpu"):
        bus = address(gpu.get("id", ""))
        found[bus] = _said(gpu, capabilities.get(bus))
    return found, _value(log, "driver_version"), _value(log, "cuda_version")


def _capabilities(text: str) -> list[tuple[str, str]]:
    rows = [line.split(",") for line in text.splitlines()]
    return [(address(row[0]), row[1].strip()) for row in rows if len(row) == 2]


def _said(gpu: ElementTree.Element, capability: str | None) -> Said:
    memory, aperture = (_number(gpu, f"{part}_memory_usage/total") for part in ("fb", "bar1"))
    temperature = _number(gpu, "temperature/gpu_temp")
    mode = _value(gpu, "persistence_mode")
    reasons = gpu.find("clocks_event_reasons")
    if reasons is None:
        reasons = gpu.find("clocks_throttle_reasons")
    processes = gpu.find("processes")
    return Said(
        _value(gpu, "product_name"),
        capability,
        None if memory is None else int(memory),
        None if aperture is None else int(aperture),
        _number(gpu, "gpu_power_readings/current_power_limit", "gpu_power_readings/power_limit", "power_readings/power_limit"),
        _number(gpu, "gpu_power_readings/max_power_limit", "power_readings/max_power_limit"),
        None if mode is None else mode == "Enabled",
        _value(gpu, "performance_state"),
        None if temperature is None else int(temperature),
        None if reasons is None else tuple(_reason(each.tag) for each in reasons if each.text == "Active"),
        None if processes is None else sum(each.text == "C" for each in processes.iter("type")),
    )


def _reason(tag: str) -> str:
    return re.sub(r"^clocks_(event|throttle)_reason_", "", tag)


def _value(element: ElementTree.Element, path: str) -> str | None:
    text = (element.findtext(path) or "").strip()
    return text if text and text not in ("N/A", "[N/A]") else None


def _number(element: ElementTree.Element, *paths: str) -> float | None:
    for path in paths:
        found = re.match(r"\d+(\.\d+)?", _value(element, path) or "")
        if found:
            return float(found[0])
    return None


def matrix(text: str | None) -> dict[tuple[int, int], str]:
    """The cells of ``nvidia-smi topo``: (row, column) -> word. Its legend and columns that are no GPU are left out."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in (text or "").splitlines()]
    header = next((words for words in lines if words[:1] == ["GPU0"] and "X" not in words), [])
    columns = [int(word[3:]) for word in header if re.fullmatch(r"GPU\d+", word)]
    cells: dict[tuple[int, int], str] = {}
    for words in lines:
        if words and re.fullmatch(r"GPU\d+", words[0]) and "X" in words:
            cells |= {(int(words[0][3:]), column): word for column, word in zip(columns, words[1:], strict=False)}
    return cells


def driver(source: Source, version: str | None, cuda: str | None) -> Driver:
    """The kernel module; under WSL2 there is none, and ``version`` is what nvidia-smi says.

    Its registry keys are read from /proc: the sysfs parameter reads empty even when they are set.
    """
    banner = source.text("/proc/driver/nvidia/version")
    found = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", banner or "")
    hmm = source.text("/sys/module/nvidia_uvm/parameters/uvm_disable_hmm")
    return Driver(
        found[1] if found else version,
        None if banner is None else "Open Kernel Module" in banner,
        registry(source.text("/proc/driver/nvidia/params")),
        cuda,
        None if hmm is None else hmm in ("Y", "1"),
    )


def registry(params: str | None) -> dict[str, str] | None:
    """The keys of ``RegistryDwords: "A=1;B=0x11"``; None when there is no such line."""
    found = re.search(r'^RegistryDwords: "(.*)"', params or "", re.MULTILINE)
    if not found:
        return None
    words = [word.partition("=") for word in found[1].split(";") if word.strip()]
    return {name.strip(): value.strip() for name, _, value in words}
