"""The CUDA home of an engine's image: links to NVIDIA's wheels and a stub of the driver."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Sequence

from sm120kit.images._layers import LayerWriter

_HOME = "opt/cuda"
_MACHINES = {"amd64": (62, bytes.fromhex("b822000000c3")), "arm64": (183, bytes.fromhex("40048052c0035fd6"))}
"""e_machine of an architecture, and a function that returns 34, ``CUDA_ERROR_STUB_LIBRARY``."""


def write_cuda_home(layer: LayerWriter, wheels: str, libraries: Iterable[str], stub: bytes) -> None:
    """Write ``/opt/cuda``: links to the directory ``wheels`` of the image, whose ``lib`` has the files ``libraries``.

    Compilers look for libraries in ``lib64`` and without versions. ``lib``, which is on the library path, has those of CUDA 13.
    """
    for name in ("bin", "include", "nvvm"):
        layer.symlink(f"{_HOME}/{name}", f"/{wheels}/{name}")
    lib, lib64 = {}, {}
    for name in sorted(libraries):
        target = f"/{wheels}/lib/{name}"
        lib64[name] = target
        if ".so.13" in name:
            lib[name] = target
        if ".so." in name:
            lib64[name.partition(".so.")[0] + ".so"] = name
    layer.directory(f"{_HOME}/lib")
    for directory, links in (("lib", lib), ("lib64", lib64)):
        for name, target in sorted(links.items()):
            layer.symlink(f"{_HOME}/{directory}/{name}", target)
    layer.file(f"{_HOME}/lib64/stubs/libcuda.so", [stub], len(stub), mode=0o755)


def driver_stub(header: str, architecture: str) -> bytes:
    """A stub of libcuda.so.1 with the functions that the text of ``cuda.h`` names, which linkers require without a driver.

    A shared library that follows from its arguments alone; each function returns ``CUDA_ERROR_STUB_LIBRARY``.
    """
    names = sorted(set(re.findall(r"\bcu[A-Z][A-Za-z0-9_]*", header)))
    return shared_library("libcuda.so.1", names, architecture)


def shared_library(soname: str, functions: Sequence[str], architecture: str) -> bytes:
    """A minimal ELF shared library. All functions have one address and return 34."""
    machine, code = _MACHINES[architecture]
    strings = b"\0" + b"".join(name.encode() + b"\0" for name in (soname, *functions))
    offsets = [1]
    for name in (soname, *functions):
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
        "<HHIQQQIHHHHHH", 3, machine, 1, 0, 64, sections_at, 0, 64, 56, len(segments), 64, len(sections), len(sections) - 1
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
