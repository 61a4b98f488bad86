"""A stub of the CUDA driver's library for containers without a GPU: exports the driver's functions, which return "no device".

With it, extensions that link ``libcuda.so.1`` can be loaded, and their code that needs no GPU can be run. The stub is created
in the container for its machine, with the names that the libraries of the image import; it is never part of an image.
"""

import platform
import re
import struct

SONAME = "libcuda.so.1"

NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE: the result of a driver without a GPU (cuda.h)."""

CODE = {
    "x86_64": (62, struct.pack("<BiB", 0xB8, NO_DEVICE, 0xC3)),  # mov eax, 100; ret
    "aarch64": (183, struct.pack("<II", 0x52800000 | NO_DEVICE << 5, 0xD65F03C0)),  # mov w0, #100; ret
}
"""By machine: its number in ELF, and the code of the function."""

_DRIVER_CALL = re.compile(rb"(?<=\0)cu[A-Z]\w+(?=\0)")


def imported_names(paths):
    """Driver functions that libraries import: names in the dynamic string tables of libraries that need the driver's."""
    names = {"cuInit"}
    for path in paths:
        strings = dynamic_strings(path)
        if f"\0{SONAME}\0".encode() in strings:
            names |= {name.decode() for name in _DRIVER_CALL.findall(strings)}
    return sorted(names)


def dynamic_strings(path):
    """The dynamic string table of a 64-bit little-endian ELF file; empty for any other file."""
    with path.open("rb") as file:
        head = file.read(64)
        if len(head) < 64 or head[:6] != b"\x7fELF\x02\x01":
            return b""
        (start,) = struct.unpack_from("<Q", head, 40)
        size, count = struct.unpack_from("<HH", head, 58)
        file.seek(start)
        sections = file.read(size * count)
        for offset in range(0, len(sections), size):
            (kind,) = struct.unpack_from("<I", sections, offset + 4)
            (link,) = struct.unpack_from("<I", sections, offset + 40)
            if kind == 6:  # SHT_DYNAMIC, whose link is its string table
                start, length = struct.unpack_from("<QQ", sections, link * size + 24)
                file.seek(start)
                return file.read(length)
    return b""


def library(names, machine=""):
    """Build a shared object, as bytes, whose functions ``names`` take any arguments and return :data:`NO_DEVICE`.

    It has two segments: code, symbols, hash table and strings, read-only; and the dynamic section, which the loader writes to.
    All names refer to the same function. The layout follows the System V ABI, chapters 4 and 5.
    """
    number, code = CODE[machine or platform.machine()]
    strings, offsets = b"\0", []
    for name in [*names, SONAME]:
        offsets.append(len(strings))
        strings += name.encode() + b"\0"
    function = 64 + 4 * 56  # after the ELF header and four program headers
    symbols = function + 16
    symbol_table = bytes(24) + b"".join(struct.pack("<IBBHQQ", name, 0x12, 0, 1, function, len(code)) for name in offsets[:-1])
    hashes = symbols + len(symbol_table)
    # A single bucket, a chain from the last symbol to the first.
    hash_table = struct.pack(f"<{4 + len(names)}I", 1, len(names) + 1, len(names), 0, *range(len(names)))
    text = hashes + len(hash_table)
    tags = ((14, offsets[-1]), (4, hashes), (5, text), (6, symbols), (10, len(strings)), (11, 24), (0, 0))
    dynamic = b"".join(struct.pack("<QQ", *tag) for tag in tags)
    size = text + len(strings)
    begin = (size + 15) // 16 * 16
    page = 0x10000  # the largest page size of either machine

    def segment(kind, flags, start, length, alignment, shift):
        return struct.pack("<IIQQQQQQ", kind, flags, start, start + shift, start + shift, length, length, alignment)

    header = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 3, number, 1, 0, 64, 0, 0, 64, 56, 4, 64, 0, 0)
    headers = (
        segment(1, 5, 0, size, page, 0),  # PT_LOAD, read and execute
        segment(1, 6, begin, len(dynamic), page, page),  # PT_LOAD, read and write
        segment(2, 6, begin, len(dynamic), 8, page),  # PT_DYNAMIC
        segment(0x6474E551, 6, 0, 0, 16, 0),  # PT_GNU_STACK: a stack that is not executable
    )
    body = b"".join((header, *headers, code.ljust(16, b"\0"), symbol_table, hash_table, strings))
    return body.ljust(begin, b"\0") + dynamic
