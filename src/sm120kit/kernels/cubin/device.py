"""Read a cubin: its arch, and each kernel's registers, shared memory, stack and code.

A cubin is an ELF for EM_CUDA. Attributes are records of a format byte, an identifier byte and a value (CUDA calls them EIATTR
in ``.nv.info`` and EICOMPAT in ``.nv.compat``); `cuobjdump -elf` prints their names.
"""

import hashlib
import re
import struct
from collections.abc import Iterator

from sm120kit.core.errors import BadInput
from sm120kit.kernels.cubin.cubin_records import Kernel
from sm120kit.kernels.cubin.elf import MACHINE_CUDA, Elf, cut

RESERVED_SHARED_BYTES = 1024
"""Shared memory in bytes that the system reserves per CTA (CUDA C++ Programming Guide, shared memory by compute capability)."""

_SIZED = 0x04
_FRAME_SIZE, _MIN_STACK_SIZE, _REGISTER_COUNT = 0x11, 0x12, 0x2F
_ACCELERATOR_TARGET = 0x09
_EXECUTABLE, _FUNCTION, _ENTRY = 2, 2, 0x10
_PER_SYMBOL = struct.Struct("<II")
_INSTRUCTION_BYTES, _OPCODE, _OMMA = 16, 0xFFF, 0x47F
"""SM12x: nvdisasm 12.8 prints ``OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X`` for instructions whose lowest 12 bits are 47f."""


def cubin(data: memoryview) -> Elf:
    """The ELF of a cubin.

    Raises:
        BadInput: the data is not an ELF for CUDA.
    """
    elf = Elf(data)
    if elf.machine != MACHINE_CUDA:
        raise BadInput(f"a device image is an ELF for machine {elf.machine}; CUDA's is {MACHINE_CUDA}")
    return elf


def arch(elf: Elf) -> str:
    """The arch according to the cubin, such as ``sm_120a``.

    The number is in ``e_flags``. The ``a`` is in ``e_flags`` up to CUDA 12.9, and in ``.nv.compat`` from 13.0 on. The ``f`` of
    a family target has no field: only the note with ptxas's command line distinguishes ``sm_120f`` from ``sm_120``.
    """
    match elf.os_abi:
        case 0x41:
            number, accelerated = elf.flags >> 8 & 0xFF, bool(elf.flags & 0x8)
        case 0x33:
            number, accelerated = elf.flags & 0xFF, bool(elf.flags & 0x800)
        case other:
            raise BadInput(f"a cubin of the unknown ABI {other:#x}")
    accelerated = accelerated or any(key == _ACCELERATOR_TARGET and value[0] for key, value in _attributes(elf, ".nv.compat"))
    if accelerated:
        return f"sm_{number}a"
    family = re.search(rb"-arch sm_%df\b" % number, bytes(elf.bytes_of(".note.nv.tkinfo")))
    return f"sm_{number}{'f' if family else ''}"


def kernels(elf: Elf, arch: str) -> tuple[Kernel, ...]:
    """The entry functions that a cubin defines, sorted by name; functions that only device code can call are not included.

    Before the device link, the sizes are too small: the stack is the kernel's own frame, and shared memory is incomplete.
    """
    attributes: dict[tuple[int, int], int] = {}
    for key, value in _attributes(elf, ".nv.info"):
        if key in (_REGISTER_COUNT, _FRAME_SIZE, _MIN_STACK_SIZE) and len(value) == _PER_SYMBOL.size:
            symbol, number = _PER_SYMBOL.unpack(value)
            attributes[symbol, key] = number
    symbols = list(elf.symbols())
    # From sm_90 on, a CTA's shared memory starts with the system's part, and the linker includes it in a kernel's section.
    system_first = elf.type == _EXECUTABLE and any(symbol.name == ".nv.reservedSmem.offset0" for symbol in symbols)
    reserved = RESERVED_SHARED_BYTES if system_first else 0
    result = []
    for symbol in symbols:
        if symbol.kind != _FUNCTION or not symbol.other & _ENTRY or not symbol.section:
            continue
        if (symbol.index, _REGISTER_COUNT) not in attributes or f".text.{symbol.name}" not in elf.sections:
            raise BadInput(f"kernel {symbol.name} has no code or no register count")
        text = elf.bytes_of(f".text.{symbol.name}")
        shared = elf.sections.get(f".nv.shared.{symbol.name}")
        # The minimal stack is the kernel's frame plus the frames of the functions that it calls.
        stack = attributes.get((symbol.index, _MIN_STACK_SIZE), attributes.get((symbol.index, _FRAME_SIZE), 0))
        result.append(
            Kernel(
                name=symbol.name,
                arch=arch,
                registers=attributes[symbol.index, _REGISTER_COUNT],
                shared_bytes=max(shared.size - reserved, 0) if shared else 0,
                stack_bytes=stack,
                text_bytes=len(text),
                text_sha256=hashlib.sha256(text).hexdigest(),
                fp4_mma=_fp4_instructions(text) if arch.startswith("sm_12") else 0,
            )
        )
    return tuple(sorted(result, key=lambda kernel: kernel.name))


def _fp4_instructions(text: memoryview) -> int:
    low = (int.from_bytes(text[offset : offset + 2], "little") for offset in range(0, len(text), _INSTRUCTION_BYTES))
    return sum(word & _OPCODE == _OMMA for word in low)


def _attributes(elf: Elf, section: str) -> Iterator[tuple[int, memoryview]]:
    """The records of an attribute section: a 16-bit value, or a 16-bit size and that many bytes."""
    data, offset = elf.bytes_of(section), 0
    while offset < len(data):
        layout, key = cut(data, offset, 4, section)[:2]
        if layout == _SIZED:
            size = int.from_bytes(data[offset + 2 : offset + 4], "little")
            yield key, cut(data, offset + 4, size, section)
            offset += 4 + size
        else:
            yield key, data[offset + 2 : offset + 4]
            offset += 4
