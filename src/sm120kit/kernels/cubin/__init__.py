"""Read device code: archs and kernels of a shared object, object file, fatbin or cubin, in pure Python.

A cubin does not contain the number of spills; ptxas only prints it. It contains the stack size, the local memory per thread,
which includes spilled registers and arrays with run-time indices.
"""

import mmap
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from sm120kit.core.errors import BadInput
from sm120kit.core.outside import file_problem
from sm120kit.kernels.cubin import device, elf, fatbin
from sm120kit.kernels.cubin.cubin_records import Cubin, Kernel

_KINDS = "an ELF, fatbin or cubin"
_DAMAGED = "fetch or build it again; undamaged files of a newer toolkit may need a newer sm120kit"


def read(path: Path) -> tuple[Cubin, ...]:
    """The device images in a file, in file order.

    PTX and LTO code are listed without kernels, as ``compute_120a`` and ``lto_120a``. ``where`` numbers the images of a file
    from 1.

    Raises:
        BadInput: the file does not exist, is no ELF, fatbin or cubin, is damaged, or has no device code.
    """
    if why := file_problem(path):
        raise BadInput(f"{path} {why}", f"name {_KINDS}")
    try:
        with path.open("rb") as file:
            if not path.stat().st_size:
                raise BadInput(f"{path} is empty", f"name {_KINDS}")
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    if not (images := tuple(_cubins(path.name, data))):
        raise BadInput(f"{path} has no device code", "was it built for the CPU only, or its device code stripped?")
    return images


def matching(pattern: str, cubins: Sequence[Cubin]) -> tuple[Kernel, ...]:
    """The kernels that match a recipe's ``expect_kernels`` pattern.

    The pattern is a shell-style glob for the complete mangled name, optionally with ``@`` and a glob for the arch:
    ``*GemmUniversal*Sm120*@sm_120*``. It is case-sensitive; without ``@`` it matches any arch.
    """
    name, _, arch = pattern.partition("@")
    kernels = (kernel for cubin in cubins for kernel in cubin.kernels)
    return tuple(kernel for kernel in kernels if fnmatchcase(kernel.name, name) and fnmatchcase(kernel.arch, arch or "*"))


def _cubins(where: str, data: memoryview) -> Iterator[Cubin]:
    """The images of a file; errors name the file."""
    try:
        yield from _images(where, data)
    except BadInput as error:
        raise BadInput(f"{where}: {error.message}", error.hint or _DAMAGED) from error


def _images(where: str, data: memoryview) -> Iterator[Cubin]:
    if data[:4] == fatbin.MAGIC:
        sections = [data]
    elif data[:4] != elf.MAGIC:
        raise BadInput(f"not {_KINDS}: it starts with {bytes(data[:4]).hex(' ')}", f"name {_KINDS}")
    else:
        host = elf.Elf(data)
        if host.machine == elf.MACHINE_CUDA:
            yield _cubin(f"{where}#1", device.arch(host), host)
            return
        # After a device link, __nv_relfatbin still contains the linked code, which is unused.
        sections = [host.bytes_of(".nv_fatbin") or host.bytes_of("__nv_relfatbin")]
        if not sections[0] and host.type == elf.RELOCATABLE:
            for number, code in enumerate(_embedded(data), start=1):
                yield _cubin(f"{where}#{number}", device.arch(code), code)
            return
    for number, image in enumerate((image for section in sections for image in fatbin.images(section)), start=1):
        if not image.is_cubin:
            yield Cubin(f"{where}#{number}", image.arch, image.bytes, ())
            continue
        inner = device.cubin(image.unpacked())
        own = device.arch(inner)
        if own.rstrip("af") != image.arch.rstrip("af"):
            raise BadInput(f"image {number} is listed for {image.arch} but contains code for {own}")
        # In every toolkit, the f of a family target is only in the listing, and the a is only in the code.
        yield _cubin(f"{where}#{number}", image.arch if image.arch[-1] in "af" else own, inner)


def _embedded(data: memoryview) -> Iterator[elf.Elf]:
    """The cubins in the data of an object file, whole and without a fatbin: CuTe DSL writes kernels so."""
    content, offset = bytes(data), 0
    while (offset := content.find(elf.MAGIC, offset + 1)) > 0:
        try:
            code = elf.Elf(data[offset:])
        except BadInput:  # four bytes of data that begin no ELF
            continue
        if code.machine == elf.MACHINE_CUDA:
            yield elf.Elf(elf.cut(data, offset, code.extent, f"the cubin at byte {offset}"))


def _cubin(where: str, arch: str, code: elf.Elf) -> Cubin:
    return Cubin(where, arch, len(code.data), device.kernels(code, arch))
