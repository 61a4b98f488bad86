"""Stubs of the CUDA driver's library: they export the driver's functions, which all return one error code.

In a container without a GPU the checks of images, which run this file, load one that returns "no device": extensions that link
``libcuda.so.1`` can be loaded, and their code that needs no GPU can be run. It has the names that the libraries of the image
import, and is never part of an image. Compilers link with one that has all functions of ``cuda.h``.
"""

import platform
import re
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

SONAME = "libcuda.so.1"

NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE: the result of a driver without a GPU (cuda.h)."""

STUB_LIBRARY = 34
"""CUDA_ERROR_STUB_LIBRARY: the result of a stub to link with (cuda.h)."""

_DRIVER_CALL = re.compile(rb"(?<=\0)cu[A-Z]\w+(?=\0)")


def imported_names(paths: Iterable[Path]) -> list[str]:
    """Driver functions that libraries import: names in the dynamic string tables of libraries that need the driver's."""
    names = {"cuInit"}
    for path in paths:
        strings = dynamic_strings(path)
        if f"\0{SONAME}\0".encode() in strings:
            names |= {name.decode() for name in _DRIVER_CALL.findall(strings)}
    return sorted(names)


def dynamic_strings(path: Path) -> bytes:
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


def link_stub(header: str, machine: str) -> bytes:
    """A stub to link with, that has each function that the text of ``cuda.h`` names. It follows from its arguments alone."""
    return library(sorted(set(re.findall(r"\bcu[A-Z][A-Za-z0-9_]*", header))), machine, STUB_LIBRARY)


def _code(machine: str, result: int) -> tuple[int, bytes]:
    """The number of a machine in ELF, and the code of a function that returns ``result``."""
    return {
        "x86_64": (62, struct.pack("<BiB", 0xB8, result, 0xC3)),  # mov eax, result; ret
        "aarch64": (183, struct.pack("<II", 0x52800000 | result << 5, 0xD65F03C0)),  # mov w0, #result; ret
    }[machine]


def library(functions: Sequence[str], machine: str = "", result: int = NO_DEVICE) -> bytes:
    """A minimal ELF shared library, as bytes, that linkers and loaders take.

    Its functions have one address, take any arguments and return ``result``.
    """
    number, code = _code(machine or platform.machine(), result)
    strings = b"\0" + b"".join(name.encode() + b"\0" for name in (SONAME, *functions))
    offsets = [1]
    for name in (SONAME, *functions):
        offsets.append(offsets[-1] + len(name) + 1)
    page, count = 0x10000, len(functions) + 1
    start = 64 + 4 * 56
    table = _hash_table(functions)
    symbols_at = start + len(table) + -len(table) % 8
    strings_at = symbols_at + 24 * count
    text_at = strings_at + len(strings) + -len(strings) % 8
    dynamic_at = text_at + len(code) + -len(code) % 8
    symbol = [struct.pack("<IBBHQQ", offset, 0x12, 0, 4, text_at, len(code)) for offset in offsets[1:-1]]
    # SONAME, HASH, STRTAB, SYMTAB, STRSZ, SYMENT, NULL
    entries = ((14, 1), (4, start), (5, strings_at), (6, symbols_at), (10, len(strings)), (11, 24), (0, 0))
    dynamic = b"".join(struct.pack("<QQ", *entry) for entry in entries)
    names = (b"", b".hash", b".dynsym", b".dynstr", b".text", b".dynamic", b".shstrtab")
    section_names = b"".join(name + b"\0" for name in names)
    names_at = dynamic_at + len(dynamic)
    sections_at = names_at + len(section_names) + -len(section_names) % 8
    # name, type, flags, address, offset, size, link, info, alignment, size of entries
    sections = (
        (0, 0, 0, 0, 0, 0, 0, 0, 0),
        (5, 2, start, start, len(table), 2, 0, 8, 4),
        (11, 2, symbols_at, symbols_at, 24 * count, 3, 1, 8, 24),
        (3, 2, strings_at, strings_at, len(strings), 0, 0, 1, 0),
        (1, 6, text_at, text_at, len(code), 0, 0, 8, 0),
        (6, 3, dynamic_at + page, dynamic_at, len(dynamic), 3, 0, 8, 16),
        (3, 0, 0, names_at, len(section_names), 0, 0, 1, 0),
    )
    # type, flags, offset, address, physical address, size in file, in memory, alignment
    segments = (
        (1, 5, 0, 0, 0, dynamic_at, dynamic_at, page),
        (1, 6, dynamic_at, dynamic_at + page, dynamic_at + page, len(dynamic), len(dynamic), page),
        (2, 6, dynamic_at, dynamic_at + page, dynamic_at + page, len(dynamic), len(dynamic), 8),
        (0x6474E551, 6, 0, 0, 0, 0, 0, 16),
    )
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 3, number, 1, 0, 64, sections_at, 0, 64, 56, len(segments), 64, len(sections), len(sections) - 1
    )
    named = [(section_names.index(name + b"\0"), section) for name, section in zip(names, sections, strict=True)]
    parts = (
        (0, header + b"".join(struct.pack("<IIQQQQQQ", *segment) for segment in segments)),
        (start, table),
        (symbols_at, bytes(24) + b"".join(symbol)),
        (strings_at, strings),
        (text_at, code),
        (dynamic_at, dynamic),
        (names_at, section_names),
        (sections_at, b"".join(struct.pack("<IIQQQQIIQQ", name, *section) for name, section in named)),
    )
    content = bytearray()
    for offset, part in parts:
        content += bytes(offset - len(content)) + part
    return bytes(content)


def _hash_table(functions: Sequence[str]) -> bytes:
    """The table of DT_HASH (System V ABI, "Hash Table") of symbols 1 to n."""
    buckets = [0] * max(1, len(functions))
    chains = [0] * (len(functions) + 1)
    for index, name in enumerate(functions, 1):
        value = 0
        for byte in name.encode():
            value = (value << 4) + byte
            high = value & 0xF0000000
            value = (value ^ (high >> 24)) & ~high & 0xFFFFFFFF
        chains[index], buckets[value % len(buckets)] = buckets[value % len(buckets)], index
    return struct.pack(f"<II{len(buckets)}I{len(chains)}I", len(buckets), len(chains), *buckets, *chains)
