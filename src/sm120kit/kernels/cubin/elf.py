"""A minimal ELF reader for sections and symbols: 64-bit, little endian, with every offset checked before use."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from sm120kit.core.errors import BadInput

MAGIC = b"\x7fELF"
CLASS_64_LITTLE_ENDIAN = b"\x02\x01"
MACHINE_CUDA = 190
RELOCATABLE = 1
NOBITS = 8
NAME_LIMIT_BYTES = 1 << 16
"""CUTLASS's mangled names reach tens of kilobytes; a longer name indicates damage."""


def cut(data: memoryview, offset: int, size: int, what: str) -> memoryview:
    """``size`` bytes of ``data`` from ``offset``; BadInput if they exceed it. All readers of this package use it."""
    if offset + size > len(data):
        raise BadInput(f"{what} needs bytes {offset} to {offset + size} of {len(data)}")
    return data[offset : offset + size]


def unpack(layout: struct.Struct, data: memoryview, offset: int, what: str) -> tuple[int, ...]:
    """The integer fields of ``layout`` at ``offset``."""
    return layout.unpack(cut(data, offset, layout.size, what))


@dataclass(frozen=True)
class Section:
    """A section header. ``size`` is in bytes; a ``NOBITS`` section has no bytes in the file."""

    name: str
    kind: int
    offset: int
    size: int


@dataclass(frozen=True)
class Symbol:
    """A symbol. ``index`` is its position in the table; CUDA's attributes refer to kernels by it."""

    index: int
    name: str
    kind: int
    other: int
    section: int


class Elf:
    """An ELF file in memory.

    Raises:
        BadInput: not a 64-bit little-endian ELF, or an offset lies outside of it.
    """

    _HEADER = struct.Struct("<HHIQQQIHHHHHH")
    _SECTION = struct.Struct("<IIQQQQIIQQ")
    _SYMBOL = struct.Struct("<IBBHQQ")

    def __init__(self, data: memoryview) -> None:
        self.data = data
        ident = cut(data, 0, 16, "the ELF header")
        if ident[:4] != MAGIC or ident[4:6] != CLASS_64_LITTLE_ENDIAN:
            raise BadInput("not a 64-bit little-endian ELF")
        self.os_abi = ident[7]
        fields = unpack(self._HEADER, data, 16, "the ELF header")
        self.type, self.machine, self.flags = fields[0], fields[1], fields[6]
        self._sections_at, self._section_count, self._names_in = fields[5], fields[11], fields[12]
        self._segments_end = fields[4] + fields[8] * fields[9]

    @cached_property
    def sections(self) -> dict[str, Section]:
        """Sections by name; of several with one name, the first."""
        if not self._sections_at:
            return {}
        # Above 65,279 sections (a cubin of a few thousand kernels), the actual numbers are in section 0.
        first = unpack(self._SECTION, self.data, self._sections_at, "section 0")
        count = self._section_count or first[5]
        names_in = self._names_in if self._names_in != 0xFFFF else first[6]
        table = cut(self.data, self._sections_at, count * self._SECTION.size, "the section table")
        headers = list(self._SECTION.iter_unpack(table))
        if names_in >= len(headers):
            raise BadInput(f"section names are in section {names_in} of {len(headers)}")
        names = _Names(cut(self.data, headers[names_in][4], headers[names_in][5], "section names"))
        sections: dict[str, Section] = {}
        for name, kind, _, _, offset, size, *_ in headers:
            sections.setdefault(names.at(name), Section(names.at(name), kind, offset, size))
        return sections

    @property
    def extent(self) -> int:
        """Bytes from the header to the end of the last table or section, for an ELF that more data follows."""
        ends = [section.offset + section.size for section in self.sections.values() if section.kind != NOBITS]
        return max(16, self._segments_end, self._sections_at + self._section_count * self._SECTION.size, *ends)

    def bytes_of(self, name: str) -> memoryview:
        """The content of a section; empty if it does not exist or is ``NOBITS``."""
        section = self.sections.get(name)
        if section is None or section.kind == NOBITS:
            return self.data[:0]
        return cut(self.data, section.offset, section.size, f"section {name}")

    def symbols(self) -> Iterator[Symbol]:
        table = self.bytes_of(".symtab")
        names = _Names(self.bytes_of(".strtab"))
        for index in range(len(table) // self._SYMBOL.size):
            name, info, other, section, _, _ = self._SYMBOL.unpack_from(table, index * self._SYMBOL.size)
            yield Symbol(index, names.at(name), info & 0xF, other, section)


class _Names:
    """A string table."""

    def __init__(self, table: memoryview) -> None:
        self._table = bytes(table)

    def at(self, offset: int) -> str:
        if offset == 0:
            return ""
        end = self._table.find(b"\0", offset, offset + NAME_LIMIT_BYTES)
        if end < 0:
            raise BadInput(f"no name at byte {offset} of a string table of {len(self._table)}")
        return self._table[offset:end].decode(errors="backslashreplace")
