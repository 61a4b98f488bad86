"""PCI devices from sysfs: links, BARs, error counters, ACS from configuration space, and topology from the tree itself."""

from __future__ import annotations

import re
import struct
from itertools import takewhile

from sm120kit.host.facts import PIX, PXB, Bridge, Errors, Link
from sm120kit.host.source import Source

DEVICES = "/sys/bus/pci/devices"
NVIDIA = "0x10de"
DISPLAY = ("0x0300", "0x0302")
"""PCI class: VGA compatible and 3D controller."""

# PCI Express Base Specification, chapter 7: offsets as Linux's include/uapi/linux/pci_regs.h has them.
_CAPABILITIES, _EXPRESS, _LINK_CONTROL = 0x34, 0x10, 0x10
_EXTENDED, _ACS, _ACS_CONTROL = 0x100, 0x000D, 0x06
ACS_REDIRECT = 0x04 | 0x08
"""P2P request redirect and completion redirect: what sends peer traffic up to the CPU."""


def nvidia_gpus(source: Source) -> tuple[str, ...]:
    """Addresses of NVIDIA GPUs, in the order of the bus."""
    found = source.names(DEVICES) or ()
    return tuple(
        bus
        for bus in found
        if source.text(f"{DEVICES}/{bus}/vendor") == NVIDIA and (source.text(f"{DEVICES}/{bus}/class") or "")[:6] in DISPLAY
    )


def passthrough(source: Source) -> tuple[str, ...]:
    """Addresses of devices that vfio-pci holds for guests."""
    return tuple(path.rpartition("/")[2] for path in source.glob("/sys/bus/pci/drivers/vfio-pci/*:*:*.*"))


def ancestry(source: Source, bus: str) -> tuple[str, tuple[str, ...]]:
    """A device's root complex, such as ``pci0000:00``, and the ports above it, nearest the CPU first."""
    parts = source.real(f"{DEVICES}/{bus}").resolve().parts
    root = next((part for part in parts if re.fullmatch(r"pci[0-9a-f]+:[0-9a-f]{2}", part)), "")
    above = [part for part in parts[:-1] if re.fullmatch(r"[0-9a-f]+:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", part)]
    return root, tuple(above)


def link(source: Source, bus: str) -> Link:
    """A device's end of its link, with ASPM as its link control register has it, else as sysfs has it."""
    place = f"{DEVICES}/{bus}"
    widths = [source.number(f"{place}/{which}_link_width") for which in ("current", "max")]
    speeds = [source.number(f"{place}/{which}_link_speed") for which in ("current", "max")]
    width, widest = (int(lanes) if lanes else None for lanes in widths)  # an absent link has width 0
    return Link(width, widest, speeds[0], speeds[1], _aspm(source, place))


def _aspm(source: Source, place: str) -> bool | None:
    config = source.raw(f"{place}/config") or b""
    at = _capability(config, _EXPRESS)
    if at is not None and at + _LINK_CONTROL < len(config):
        return bool(config[at + _LINK_CONTROL] & 0x3)
    states = [source.text(path) for path in source.glob(f"{place}/link/*_aspm")]
    return any(state == "1" for state in states) if states else None


def _capability(config: bytes, wanted: int) -> int | None:
    """Where a capability lies. Without root, sysfs shows 64 bytes: the list's head, but none of its members."""
    at, seen = config[_CAPABILITIES] if len(config) > 64 else 0, set[int]()
    while at >= 64 and at not in seen and at + 1 < len(config):
        seen.add(at)
        if config[at] == wanted:
            return at
        at = config[at + 1] & 0xFC
    return None


def acs(config: bytes) -> tuple[bool | None, int | None]:
    """Whether a port has ACS, and its control register; (None, None) where configuration space is not readable so far."""
    if len(config) <= _EXTENDED + 4:
        return None, None
    at, seen = _EXTENDED, set[int]()
    while at >= _EXTENDED and at not in seen and at + 8 <= len(config):
        seen.add(at)
        (header,) = struct.unpack_from("<I", config, at)
        if header & 0xFFFF == _ACS:
            return True, struct.unpack_from("<H", config, at + _ACS_CONTROL)[0]
        at = header >> 20
    return False, None


def bridge(source: Source, bus: str) -> Bridge:
    """A port's facts."""
    place = f"{DEVICES}/{bus}"
    has_acs, control = acs(source.raw(f"{place}/config") or b"")
    vendor = source.text(f"{place}/vendor") or ""
    return Bridge(bus, vendor, link(source, bus), has_acs, control, errors(source, bus))


def errors(source: Source, bus: str) -> Errors | None:
    """A device's AER totals."""
    totals = []
    for kind, total in (("correctable", "ERR_COR"), ("nonfatal", "ERR_NONFATAL"), ("fatal", "ERR_FATAL")):
        text = source.text(f"{DEVICES}/{bus}/aer_dev_{kind}") or ""
        found = re.search(rf"TOTAL_{total} (\d+)", text)
        if not found:
            return None
        totals.append(int(found[1]))
    return Errors(*totals)


def iommu_type(source: Source, bus: str) -> str | None:
    """How the IOMMU treats a device: ``identity`` (pass through), ``DMA`` or ``DMA-FQ`` (translated); None without a group."""
    return source.text(f"{DEVICES}/{bus}/iommu_group/type")


def aperture_mib(source: Source, bus: str) -> int | None:
    """The largest region of a device, in MiB: BAR1 on NVIDIA GPUs."""
    text = source.text(f"{DEVICES}/{bus}/resource")
    if text is None:
        return None
    spans = [(int(start, 16), int(end, 16)) for start, end in re.findall(r"^0x([0-9a-f]+) 0x([0-9a-f]+)", text, re.MULTILINE)]
    return max((end - start + 1 for start, end in spans[:6] if end > start), default=0) >> 20 if spans else None


def topology(first: tuple[str, tuple[str, ...], int | None], second: tuple[str, tuple[str, ...], int | None]) -> str | None:
    """The class of a pair in nvidia-smi's words, from (root complex, ports above, NUMA node) of each.

    PIX: at most one switch between them; PXB: several switches; PHB: one host bridge; NODE: several in one NUMA node; SYS:
    different NUMA nodes; None: NUMA nodes unknown (``nvidia-smi topo -m``, its legend).
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
