"""The cache of the dynamic loader, ``/etc/ld.so.cache``, as ldconfig writes it for the libraries of a root file system.

ldconfig itself would need to run in that file system, which may be for another architecture. Format: elf/cache.c and
sysdeps/generic/dl-cache.h of glibc 2.36, the new format alone, without extensions.
"""

import functools
import itertools
import re
import struct
from collections.abc import Iterator
from pathlib import Path

from sm120kit.core.errors import BadInput
from sm120kit.kernels.cubin.elf import Elf

MACHINES = {"x86_64": (62, 0x0303, "x86_64-linux-gnu"), "aarch64": (183, 0x0A03, "aarch64-linux-gnu")}
"""ELF machine, flags in the cache, and the name of the library directories, by the kernel's name of an architecture."""

_HEADER = struct.Struct("<17s3sIIB3xI12x")
_ENTRY = struct.Struct("<iIIIQ")
_DYNAMIC = struct.Struct("<qQ")
_SONAME = 14
_LITTLE_ENDIAN = 2


def loader_cache(root: Path, machine: str) -> bytes:
    """The cache for the libraries in the loader's directories below ``root``, a file system with merged ``/usr``."""
    elf_machine, flags, triplet = MACHINES[machine]
    libraries: dict[str, str] = {}
    for directory in (f"/lib/{triplet}", "/lib", "/lib64"):
        for name in _names(root / f"usr{directory}", elf_machine):
            libraries.setdefault(name, f"{directory}/{name}")
    ordered = sorted(libraries, key=functools.cmp_to_key(_compare), reverse=True)
    strings = bytearray()
    entries = bytearray()
    start = _HEADER.size + len(ordered) * _ENTRY.size
    for name in ordered:
        offset = start + len(strings)
        strings += name.encode() + b"\0" + libraries[name].encode() + b"\0"
        entries += _ENTRY.pack(flags, offset, offset + len(name) + 1, 0, 0)
    header = _HEADER.pack(b"glibc-ld.so.cache", b"1.1", len(ordered), len(strings), _LITTLE_ENDIAN, 0)
    return header + bytes(entries) + bytes(strings)


def _names(directory: Path, elf_machine: int) -> Iterator[str]:
    """Names by which the libraries of a directory are found: each soname, and links for the linker such as ``libz.so``."""
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        if not re.match(r"(lib|ld-).*\.so", path.name) or (path.is_symlink() and not path.name.endswith(".so")):
            continue
        target = path.parent / path.readlink().name if path.is_symlink() else path
        if target.is_file() and (soname := _soname(target, elf_machine)) is not None:
            yield path.name if path.is_symlink() else soname or path.name


def _soname(path: Path, elf_machine: int) -> str | None:
    """The soname of a library, empty if it has none; None for a file that is no library of the machine."""
    try:
        elf = Elf(memoryview(path.read_bytes()))
        if elf.machine != elf_machine:
            return None
        dynamic, strings = bytes(elf.bytes_of(".dynamic")), bytes(elf.bytes_of(".dynstr"))
    except BadInput:  # a linker script
        return None
    whole = len(dynamic) - len(dynamic) % _DYNAMIC.size
    offset = next((value for tag, value in _DYNAMIC.iter_unpack(dynamic[:whole]) if tag == _SONAME), None)
    return "" if offset is None else strings[offset:].partition(b"\0")[0].decode()


def _compare(one: str, other: str) -> int:
    """Order of names in the cache, with numbers by value; ``_dl_cache_libcmp`` of elf/dl-cache.c."""
    for left, right in itertools.zip_longest(_parts(one), _parts(other), fillvalue=(0, 0)):
        if left != right:
            return 1 if left > right else -1
    return 0


def _parts(name: str) -> list[tuple[int, int]]:
    """Characters, and numbers, which come after them."""
    parts = re.findall(r"\d+|\D", name)
    return [(1, int(part)) if part.isdigit() else (0, ord(part)) for part in parts]
