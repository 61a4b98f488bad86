"""Ask device code what it is: arch and kernels of a wheel, shared object, fatbin or cubin, in pure Python.

Nothing in a cubin counts spills: ptxas prints the number and forgets it. What it leaves is the stack, the local memory that a
thread needs; spilled registers live there, and so do arrays that are indexed at run time.
"""

from __future__ import annotations

import mmap
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from sm120kit import process
from sm120kit.cubin import device, elf, fatbin
from sm120kit.errors import BadArtifact, ToolchainMissing
from sm120kit.records import Cubin, Kernel

_MEMBER = re.compile(r"\.(so(\.\d+)*|o|cubin|fatbin)$")
_ZIP = b"PK\x03\x04"
_KINDS = "a wheel, ELF, fatbin or cubin"
_DAMAGED = "fetch or build it again; whole files of a newer toolkit may need a newer sm120kit"


def read(path: Path) -> tuple[Cubin, ...]:
    """The device images in a file, in the order in which they lie there.

    PTX and code for a later link are listed without kernels, as ``compute_120a`` and ``lto_120a``. ``where`` counts the images
    of one file or wheel member from 1.

    Raises:
        BadArtifact: no such file, not a wheel, ELF, fatbin or cubin, damaged, or without device code.
    """
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise BadArtifact(f"{path} {what}", f"name {_KINDS}")
    try:
        with path.open("rb") as file:
            if not path.stat().st_size:
                raise BadArtifact(f"{path} is empty", f"name {_KINDS}")
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise BadArtifact(f"{path} cannot be read: {error.strerror}") from error
    found = tuple(_wheel(path)) if data[:4] == _ZIP else tuple(_cubins(path.name, data))
    if not found:
        raise BadArtifact(f"{path} has no device code", "was it built for the CPU only, or its device code stripped?")
    return found


def matching(pattern: str, cubins: Sequence[Cubin]) -> tuple[Kernel, ...]:
    """Kernels that a recipe's ``expect_kernels`` pattern means.

    It is a shell-style pattern for the whole mangled name, and after an ``@`` one for the arch:
    ``*GemmUniversal*Sm120*@sm_120*``. Case counts; without ``@`` any arch will do.
    """
    name, _, arch = pattern.partition("@")
    kernels = (kernel for cubin in cubins for kernel in cubin.kernels)
    return tuple(kernel for kernel in kernels if fnmatchcase(kernel.name, name) and fnmatchcase(kernel.arch, arch or "*"))


def demangle(names: Sequence[str]) -> tuple[str, ...]:
    """The names as C++ has them, without parameters; unchanged where there is no ``c++filt`` or it cannot."""
    try:
        # The default limit of recursion refuses every name above 1,024 characters; CUTLASS's are longer.
        done = process.run(["c++filt", "--no-recurse-limit", "--no-params"], stdin="\n".join(names).encode(), check=False)
    except ToolchainMissing:
        return tuple(names)
    plain = done.stdout.splitlines()
    return tuple(plain) if done.returncode == 0 and len(plain) == len(names) else tuple(names)


def _cubins(where: str, data: memoryview) -> Iterator[Cubin]:
    """The images of one file; an error names the file."""
    try:
        yield from _images(where, data)
    except BadArtifact as error:
        raise BadArtifact(f"{where}: {error.message}", error.hint or _DAMAGED) from error


def _images(where: str, data: memoryview) -> Iterator[Cubin]:
    if data[:4] == fatbin.MAGIC:
        sections = [data]
    elif data[:4] != elf.MAGIC:
        raise BadArtifact(f"not {_KINDS}: it starts with {bytes(data[:4]).hex(' ')}", f"name {_KINDS}")
    else:
        host = elf.Elf(data)
        if host.machine == elf.MACHINE_CUDA:
            yield _cubin(f"{where}#1", device.arch(host), host)
            return
        # After a device link the code that went into it is still there, and dead.
        sections = [host.bytes_of(".nv_fatbin") or host.bytes_of("__nv_relfatbin")]
    for number, image in enumerate((image for section in sections for image in fatbin.images(section)), start=1):
        if not image.is_cubin:
            yield Cubin(f"{where}#{number}", image.arch, image.bytes, ())
            continue
        inner = device.cubin(image.unpacked())
        own = device.arch(inner)
        if own.rstrip("af") != image.arch.rstrip("af"):
            raise BadArtifact(f"image {number} is listed for {image.arch} and holds code for {own}")
        # Only the listing states the f of a family target in every toolkit; only the code states the a in every one.
        yield _cubin(f"{where}#{number}", image.arch if image.arch[-1] in "af" else own, inner)


def _cubin(where: str, arch: str, code: elf.Elf) -> Cubin:
    return Cubin(where, arch, len(code.data), device.kernels(code, arch))


def _wheel(path: Path) -> Iterator[Cubin]:
    """The images of every member that can have some."""
    for name, data in _members(path):
        yield from _cubins(name, data)


def _members(path: Path) -> Iterator[tuple[str, memoryview]]:
    try:
        with zipfile.ZipFile(path) as wheel:
            for member in wheel.infolist():
                if not _MEMBER.search(member.filename):
                    continue
                if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise BadArtifact(f"{path}: {member.filename} is compressed in a way that a wheel may not use", _DAMAGED)
                yield member.filename, memoryview(wheel.read(member))
    # What zipfile raises for a damaged archive, BadZipFile apart, depends on where the damage is.
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError, OverflowError) as error:
        raise BadArtifact(f"{path} is a damaged archive: {error}", _DAMAGED) from error
