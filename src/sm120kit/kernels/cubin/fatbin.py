"""Read fatbins, NVIDIA's container for device images, as a file or in a section of a host ELF.

The format has no public specification. This module follows the files that CUDA 13.0 writes, and its results equal those of
cuobjdump: a container is a 16-byte header and entries; an entry is a header of at least 64 bytes and an image, plain or
compressed.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from sm120kit.core.errors import BadInput
from sm120kit.kernels.cubin.elf import cut, unpack

MAGIC = b"\x50\xed\x55\xba"
IMAGE_LIMIT_BYTES = 1 << 30
"""Limit of the unpacked size of an image, so that a damaged size is not allocated."""

_CONTAINER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQIIHHIIIQQQ")
_LZ4, _ZSTD = 0x2000, 0x8000
_SUFFIXES = ((0x10_0000, "a"), (0x20_0000, "f"))
_PREFIXES = {1: "compute", 2: "sm", 8: "lto"}


@dataclass(frozen=True)
class FatbinImage:
    """An entry. ``arch`` is ``sm_120a`` for machine code, ``compute_120a`` for PTX, ``lto_120a`` for code of a later link."""

    arch: str
    stored: memoryview
    compression: int
    bytes: int

    @property
    def is_cubin(self) -> bool:
        return self.arch.startswith("sm_")

    def unpacked(self) -> memoryview:
        """The uncompressed image.

        Raises:
            BadInput: the stored data does not unpack to the size in its entry.
        """
        if not self.compression:
            return self.stored
        if self.bytes > IMAGE_LIMIT_BYTES:
            raise BadInput(f"an image claims to unpack to {self.bytes} bytes; more than {IMAGE_LIMIT_BYTES} is not credible")
        plain = (_zstd if self.compression == _ZSTD else _lz4)(self.stored, self.bytes)
        if len(plain) != self.bytes:
            raise BadInput(f"an image unpacks to {len(plain)} bytes; its entry states {self.bytes}")
        return memoryview(plain)


def images(data: memoryview) -> Iterator[FatbinImage]:
    """The entries of all containers in ``data``, in order. Linkers concatenate containers with zeros between them."""
    offset = 0
    while offset < len(data):
        word = bytes(data[offset : offset + 4])
        if not any(word):
            offset += 4
            continue
        if word != MAGIC:
            raise BadInput(f"no fatbin at byte {offset}: {word.hex(' ')} instead of {MAGIC.hex(' ')}")
        _, _, header, size = unpack(_CONTAINER, data, offset, "a fatbin header")
        if header < _CONTAINER.size:
            raise BadInput(f"a fatbin states a header of {header} bytes; it has at least {_CONTAINER.size}")
        yield from _entries(cut(data, offset + header, size, "a fatbin"))
        offset += header + size


def _entries(data: memoryview) -> Iterator[FatbinImage]:
    offset = 0
    while offset < len(data):
        fields = unpack(_ENTRY, data, offset, "a fatbin entry")
        kind, _, header, size, packed_size, _, _, _, sm, _, _, flags, _, plain_size = fields
        if header < _ENTRY.size:
            raise BadInput(f"a fatbin entry states a header of {header} bytes; it has at least {_ENTRY.size}")
        stored = cut(data, offset + header, size, "a fatbin entry's image")
        compression = flags & (_LZ4 | _ZSTD)
        if compression:
            stored = cut(stored, 0, packed_size, "a compressed image")
        suffix = next((letter for bit, letter in _SUFFIXES if flags & bit), "")
        arch = f"{_PREFIXES.get(kind, f'kind{kind}')}_{sm}{suffix}"
        yield FatbinImage(arch, stored, compression, plain_size if compression else size)
        offset += header + size


def _zstd(packed: memoryview, size: int) -> bytes:
    """Unpack a Zstandard frame (nvcc 13: PTX, and cubins with ``-Xfatbin=-compress-all`` or debug information)."""
    import zstandard

    # Reads the size of the entry, not that of the frame, so that a damaged frame does not cause a huge allocation.
    unpacker = zstandard.ZstdDecompressor(max_window_size=max(size, 1 << 27))
    try:
        return unpacker.stream_reader(packed).read(size)
    except zstandard.ZstdError as error:
        raise BadInput(f"a Zstandard image does not unpack: {error}") from error


def _lz4(packed: memoryview, size: int) -> bytes:
    """Unpack an LZ4 block (``--compress-mode=speed``, and older toolkits)."""
    source, out, at = bytes(packed), bytearray(), 0

    def length(nibble: int) -> int:
        nonlocal at
        total, more = nibble, 255 if nibble == 15 else 0
        while more == 255:
            more = source[at]
            at += 1
            total += more
        return total

    try:
        while at < len(source):
            token = source[at]
            at += 1
            literals = length(token >> 4)
            out += source[at : at + literals]
            at += literals
            if at >= len(source):
                break
            distance = source[at] | source[at + 1] << 8
            at += 2
            match = length(token & 15) + 4
            if not 0 < distance <= len(out) or len(out) + match > size:
                raise BadInput(f"an LZ4 image repeats {match} bytes from {distance} back after {len(out)} of {size} bytes")
            run = out[-distance:][:match]
            out += (run * (match // distance + 1))[:match]
    except IndexError:
        raise BadInput(f"an LZ4 image ends within a sequence, after {len(out)} of {size} bytes") from None
    return bytes(out)
