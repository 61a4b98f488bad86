"""Read facts of PCI devices from sysfs: links, BARs, error counters, ACS from configuration space, topology from the tree.

Capabilities: PCI Express Base Specification, chapter 7; offsets from Linux's include/uapi/linux/pci_regs.h.
"""

import re
import struct
from itertools import takewhile
from typing import Any

from sm120kit.hosts.facts._fact_records import PIX, PXB, Bridge, ErrorCounters, Link
from sm120kit.hosts.facts._reader import HostReader

DEVICES = "/sys/bus/pci/devices"
NVIDIA = "0x10de"
DISPLAY = ("0x0300", "0x0302")
"""PCI class: VGA compatible and 3D controller."""

_LIST, _EXTENDED = 0x34, 0x100
_EXPRESS, _LINK_CONTROL = 0x10, 0x10
_ACS, _ACS_CONTROL = 0x000D, 0x06
CLASSES = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""Topology classes of pairs of GPUs, nearest first."""
ACS_REDIRECT = 0x04 | 0x08
"""P2P request redirect and completion redirect: either sends peer traffic up to the CPU."""


def nvidia_gpus(reader: HostReader) -> tuple[str, ...]:
    """Addresses of NVIDIA GPUs, in bus order."""
    devices = reader.names(DEVICES) or ()
    return tuple(
        bus
        for bus in devices
        if reader.text(f"{DEVICES}/{bus}/vendor") == NVIDIA and (reader.text(f"{DEVICES}/{bus}/class") or "")[:6] in DISPLAY
    )


def passthrough(reader: HostReader) -> tuple[str, ...]:
    """Addresses of devices that are bound to vfio-pci, for virtual machines."""
    return tuple(path.rpartition("/")[2] for path in reader.glob("/sys/bus/pci/drivers/vfio-pci/*:*:*.*"))


def ancestry(reader: HostReader, bus: str) -> tuple[str, tuple[str, ...]]:
    """A device's root complex, such as ``pci0000:00``, and the ports above it, nearest the CPU first."""
    parts = reader.real(f"{DEVICES}/{bus}").resolve().parts
    root = next((part for part in parts if re.fullmatch(r"pci[0-9a-f]+:[0-9a-f]{2}", part)), "")
    above = [part for part in parts[:-1] if re.fullmatch(r"[0-9a-f]+:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", part)]
    return root, tuple(above)


def link(reader: HostReader, bus: str) -> Link:
    """A device's end of its link. ASPM is read from the link control register, else from sysfs."""
    directory = f"{DEVICES}/{bus}"
    widths = [reader.number(f"{directory}/{which}_link_width") for which in ("current", "max")]
    speeds = [reader.number(f"{directory}/{which}_link_speed") for which in ("current", "max")]
    width, max_width = (int(lanes) if lanes else None for lanes in widths)  # an absent link has width 0
    return Link(width, max_width, speeds[0], speeds[1], _aspm(reader, directory))


def _aspm(reader: HostReader, directory: str) -> bool | None:
    config = reader.raw(f"{directory}/config") or b""
    offset = capability(config, _EXPRESS)
    if offset is not None and offset + _LINK_CONTROL < len(config):
        return bool(config[offset + _LINK_CONTROL] & 0x3)
    states = [reader.text(path) for path in reader.glob(f"{directory}/link/*_aspm")]
    return any(state == "1" for state in states) if states else None


def acs(config: bytes) -> tuple[bool | None, int | None]:
    """Whether a port has ACS, and its control register; (None, None) when extended configuration space is not readable."""
    offset = extended(config, _ACS)
    if not offset:
        return (None, None) if offset is None else (False, None)
    return True, struct.unpack_from("<H", config, offset + _ACS_CONTROL)[0]


def gpu_fields(reader: HostReader, bus: str, *, aperture: bool) -> dict[str, Any]:
    """Fields of the :class:`Gpu` at an address; its ``aperture`` if nvidia-smi does not state it."""
    root, bridges = ancestry(reader, bus)
    node = reader.number(f"{DEVICES}/{bus}/numa_node")
    fields = {
        "root_complex": root,
        "bridges": bridges,
        "numa_node": None if node is None or node < 0 else int(node),
        "link": link(reader, bus),
        "iommu": iommu_type(reader, bus),
        "errors": errors(reader, bus),
    }
    return fields | ({"aperture_mib": aperture_mib(reader, bus)} if aperture else {})


def bridge(reader: HostReader, bus: str) -> Bridge:
    """Facts of a port."""
    directory = f"{DEVICES}/{bus}"
    has_acs, control = acs(reader.raw(f"{directory}/config") or b"")
    return Bridge(bus, link(reader, bus), has_acs, control, errors(reader, bus))


def errors(reader: HostReader, bus: str) -> ErrorCounters | None:
    """Totals of a device's AER counters; None when a counter is not readable."""
    totals = []
    for kind, total in (("correctable", "ERR_COR"), ("nonfatal", "ERR_NONFATAL"), ("fatal", "ERR_FATAL")):
        text = reader.text(f"{DEVICES}/{bus}/aer_dev_{kind}") or ""
        match = re.search(rf"TOTAL_{total} (\d+)", text)
        if not match:
            return None
        totals.append(int(match[1]))
    return ErrorCounters(*totals)


def iommu_type(reader: HostReader, bus: str) -> str | None:
    """Type of a device's IOMMU group: ``identity`` (passthrough), ``DMA`` or ``DMA-FQ`` (translated); None without one."""
    return reader.text(f"{DEVICES}/{bus}/iommu_group/type")


def aperture_mib(reader: HostReader, bus: str) -> int | None:
    """Size in MiB of a device's largest region, which is BAR1 on NVIDIA GPUs; 0 when it is not assigned."""
    text = reader.text(f"{DEVICES}/{bus}/resource")
    if text is None:
        return None
    spans = [(int(start, 16), int(end, 16)) for start, end in re.findall(r"^0x([0-9a-f]+) 0x([0-9a-f]+)", text, re.MULTILINE)]
    return max((end - start + 1 for start, end in spans[:6] if end > start), default=0) >> 20 if spans else None


def topology(first: tuple[str, tuple[str, ...], int | None], second: tuple[str, tuple[str, ...], int | None]) -> str | None:
    """Topology class of two GPUs, from (root complex, ports above, NUMA node) of each.

    PIX: at most one PCIe switch between them; PXB: several switches; PHB: one host bridge; NODE: several host bridges in one
    NUMA node; SYS: different NUMA nodes; None: NUMA nodes unknown. Source: legend of ``nvidia-smi topo -m``.
    """
    root, above, node = first
    other_root, other_above, other_node = second
    if root == other_root:
        shared = len(list(takewhile(lambda ports: ports[0] == ports[1], zip(above, other_above, strict=False))))
        if not shared:
            return "PHB"
        return PIX if max(len(above), len(other_above)) - shared <= 1 else PXB
    if node is None or other_node is None:
        return None
    return "NODE" if node == other_node else "SYS"


def capability(config: bytes, identifier: int) -> int | None:
    """Offset of a capability. Without root, sysfs shows 64 bytes: the head of the capability list, but no element."""
    offset, visited = config[_LIST] if len(config) > 64 else 0, set[int]()
    while offset >= 64 and offset not in visited and offset + 1 < len(config):
        visited.add(offset)
        if config[offset] == identifier:
            return offset
        offset = config[offset + 1] & 0xFC
    return None


def extended(config: bytes, identifier: int) -> int | None:
    """Offset of an extended capability; 0 if the device has none, None if extended configuration space is not readable."""
    if len(config) <= _EXTENDED + 4:
        return None
    offset, visited = _EXTENDED, set[int]()
    while offset >= _EXTENDED and offset not in visited and offset + 8 <= len(config):
        visited.add(offset)
        (header,) = struct.unpack_from("<I", config, offset)
        if header & 0xFFFF == identifier:
            return offset
        offset = header >> 20
    return 0
