"""Find capabilities in the configuration space of a PCI device.

Source: PCI Express Base Specification, chapter 7; offsets from Linux's include/uapi/linux/pci_regs.h.
"""

from __future__ import annotations

import struct

_LIST, _EXTENDED = 0x34, 0x100


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
