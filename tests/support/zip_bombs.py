"""Small zip archives that unpack to large files."""

from __future__ import annotations

import struct
import zlib

PART = 2**24


def wheel(name: str, parts: int, stated: int | None = None) -> bytes:
    """A wheel with a member of ``parts`` times 16 MiB of zeros, whose header may state ``stated`` bytes instead."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    piece = packer.compress(bytes(PART)) + packer.flush(zlib.Z_FULL_FLUSH)  # can be repeated
    data = piece * parts + packer.flush()
    size = parts * PART if stated is None else stated
    common = struct.pack("<HHHHHIIIHH", 20, 0, 8, 0, 0x21, 0, len(data), size, len(name), 0)
    local = b"PK\x03\x04" + common + name.encode()
    listed = b"PK\x01\x02" + struct.pack("<H", 20) + common + struct.pack("<HHHII", 0, 0, 0, 0, 0) + name.encode()
    end = b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 1, 1, len(listed), len(local) + len(data), 0)
    return local + data + listed + end
