"""Rewrite a module that a running program loads: the program that the preloaded driver (driver_shim.c) runs for each of them.

``python -m sm12x_lab.ptx.images IMAGE CUBIN`` reads the module in IMAGE (PTX, a fatbin or a cubin for SM12x), and writes
the module for Hopper to CUBIN. The directory of the run is ``SM120KIT_PTX_RUN``; it gets the module's record, and the figures
of its kernels on SM12x, which the preloaded driver reads. The arguments may also be those with which Triton runs ptxas.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shlex
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from sm12x_lab.ptx import library, perturb
from sm12x_lab.ptx.library import AssembledKernel, NativeModule
from sm12x_lab.ptx.perturb import DelaySite
from sm12x_lab.ptx.rewrite import rewrite, source_target
from sm120kit.core import toolchain
from sm120kit.core.atomic_writes import write_atomic
from sm120kit.core.errors import BadInput, Sm120kitError
from sm120kit.core.records import Toolchain
from sm120kit.kernels.cubin import device, fatbin
from sm120kit.kernels.cubin.elf import MAGIC as ELF_MAGIC
from sm120kit.kernels.cubin.fatbin import FatbinImage

RUN_DIRECTORY, NATIVE_CACHE, MINOR = "SM120KIT_PTX_RUN", "SM120KIT_PTX_NATIVE", "SM120KIT_PTX_MINOR"
FUNCTIONS, CAPTURED = "functions.ptx", "captured.list"
"""Files of a run's directory: the software functions; and lines ``KERNEL FILE``, the PTX of each kernel captured before."""

CUTE_DSL = "cute-dsl"
"""Subdirectory of a run's directory, in which CuTe DSL keeps PTX and machine code of what it compiles, by process."""

KEPT = "PTX that CuTe DSL kept"
"""Origin of such a module."""

FIGURES = ".figures"
"""Suffix of the figures of kernels on SM12x."""

RECORD = ".module.json"
"""Suffix of the record of a rewritten module."""

MANY_CALLS, QUICKLY = 800, "--Ofast-compile=max"
"""Kernels with more replaced instructions than this are assembled with this option. ptxas needs 11 s with it for one with 958
(b12x's MoE for many tokens), and had not finished after 200 s without it."""

_COPY_1D = re.compile(r"(\bcp\.(?:reduce\.)?async\.bulk\.(?:prefetch\.)?tensor\.)1d(\.[^;{]*\{[^,}]*)\}")
_ENTRY = re.compile(r"\.entry\s+([\w$]+)")
_BOUNDED = re.compile(r"\.entry\s+(?P<name>[\w$]+)\s*\([^)]*\)[^{;]*?\.(?:maxntid|reqntid)\s+(?P<sizes>[\d,\s]+)")
_CLUSTER = re.compile(r"\.entry\s+(?P<name>[\w$]+)\s*\([^)]*\)[^{;]*?\.reqnctapercluster\s+(?P<sizes>[\d,\s]+)")
_SM12X = re.compile(r"(?:sm|compute)_(12\d)([af]?)")


@dataclass(frozen=True)
class LoadedModule:
    """A module that a program loaded. ``origin`` is where its PTX came from; ``ptx`` is the digest of that text.

    ``ptxas`` is the option with which it was assembled, if there was one. ``sm120`` has its kernels as ptxas makes them for the
    target of the PTX. ``code`` names the machine code, and ``sites`` are those for delays in it.
    """

    origin: str
    ptx: str
    instructions: int = 0
    replaced: Mapping[str, int] = field(default_factory=dict)
    kernels: tuple[AssembledKernel, ...] = ()
    seconds: float = 0.0
    ptxas: str = ""
    sm120: NativeModule = field(default_factory=lambda: NativeModule(""))
    code: str = ""
    sites: tuple[DelaySite, ...] = ()


def captured_kernels(directory: Path) -> dict[str, Path]:
    """The PTX file of each kernel in a directory, by the kernel's name; the first file that has it."""
    files: dict[str, Path] = {}
    for path in sorted(directory.glob("*.ptx")):
        for name in _ENTRY.findall(path.read_text(encoding="ascii")):
            files.setdefault(name, path.resolve())
    return files


def read_captured(run: Path) -> dict[str, Path]:
    """The list of captured kernels in a run's directory."""
    lines = (line.split(" ", 1) for line in (run / CAPTURED).read_text().splitlines())
    return {name: Path(file) for name, file in lines}


def kept_files(run: Path) -> Iterator[Path]:
    """Machine code that CuTe DSL has kept beside its PTX.

    For the kernel with which it queries the occupancy, it uses a temporary directory of its own. Those of other users are not
    read.
    """
    yield from (run / CUTE_DSL).rglob("*.cubin")
    for directory in Path(tempfile.gettempdir()).glob("tmp*"):
        with suppress(OSError):
            if directory.stat().st_uid == os.geteuid():
                yield from directory.glob("*.cubin")


def kernel_names(text: str) -> set[str]:
    """The names of the kernels in PTX."""
    return set(_ENTRY.findall(text))


def kept_ptx(cubin: memoryview, files: Iterable[Path]) -> str | None:
    """The PTX beside the file that has the bytes of ``cubin``, if there is one.

    CuTe DSL writes PTX first. One that is newer than its machine code is of a later compile, which replaces the files.
    """
    for file in files:
        try:
            written = file.stat()
            if written.st_size >= len(cubin) and file.read_bytes()[: len(cubin)] == cubin:
                ptx = file.with_suffix(".ptx")
                text = _text(memoryview(ptx.read_bytes()))
                if ptx.stat().st_mtime_ns <= written.st_mtime_ns and kernel_names(text) == _kernels(cubin):
                    return text
        except OSError:  # of another program, which removes it
            continue
    return None


def module_ptx(image: memoryview, captured: Mapping[str, Path], kept: Iterable[Path] = ()) -> tuple[str, str]:
    """The PTX of a module and its origin. That of a module of machine code may be empty if all its kernels were captured.

    ``kept`` are files of machine code beside its PTX. The host code of CuTe DSL loads that machine code in a fatbin.

    Raises:
        BadInput: the module has machine code only, and a kernel was not captured.
        BadInput: the image is damaged.
    """
    machine_code: list[memoryview] = []
    if bytes(image[:4]) == fatbin.MAGIC:
        if (part := chosen(fatbin.images(image))) and not part.is_cubin:
            return _text(part.unpacked()), f"{part.arch} in a fatbin"
        machine_code = [part.unpacked()] if part else []
    elif bytes(image[:4]) == ELF_MAGIC:
        machine_code = [image]
    else:
        text = _text(image)
        for path in {captured[name] for name in kernel_names(text) if name in captured}:
            if path.read_text(encoding="ascii") == text:
                return text, f"captured {path.name}"
        return text, "PTX"
    if len(machine_code) == 1 and (ptx := kept_ptx(machine_code[0], kept)):
        return ptx, KEPT
    names = {name for cubin in machine_code for name in _kernels(cubin)}
    missing = sorted(names - captured.keys())
    if not missing:  # whoever looks a kernel up gets the captured one
        return _EMPTY, "machine code whose kernels were captured" if names else "no kernels"
    raise BadInput(
        f"a module for SM12x has machine code only, and no PTX was captured for {len(missing)} of its {len(names)} kernels: "
        f"{missing[0][:160]}",
        "capture it: sm120kit verify ptx RECIPE --capture DIR, then sm120kit verify run --ptx DIR; or compile it with PTX",
    )


def chosen(parts: Iterable[FatbinImage]) -> FatbinImage | None:
    """The PTX of the code that an SM120 GPU would run: of machine code, that for the same target; else the machine code itself.

    A target of one GPU, such as sm_120a, is taken before that of its family, and that before sm_120.
    """
    own = 120 + int(os.environ.get(MINOR) or 0)
    found: dict[tuple[bool, str, int], FatbinImage] = {}
    for part in parts:
        if match := _SM12X.fullmatch(part.arch):
            arch, suffix = int(match[1]), match[2]
            if arch == own or (arch < own and suffix != "a"):
                found.setdefault((part.is_cubin, suffix, arch), part)
    order = sorted(found, key=lambda key: (key[0], "fa".find(key[1]) if key[1] else -1, key[2]))
    if not order:
        return None
    _, suffix, arch = order[-1]
    return found.get((False, suffix, arch), found[order[-1]])


_EMPTY = ".version 8.8\n.target sm_120a\n.address_size 64\n"


def _kernels(cubin: memoryview) -> set[str]:
    elf = device.cubin(cubin)
    return {kernel.name for kernel in device.kernels(elf, device.arch(elf))}


def _text(image: memoryview) -> str:
    try:
        return bytes(image).rstrip(b"\0").decode("ascii")
    except UnicodeDecodeError as error:
        raise BadInput(
            f"the PTX of a module is not text: byte {error.start} is {error.object[error.start]:#04x}",
            "ptxas accepts ASCII only, without a byte order mark; otherwise the module is damaged",
        ) from error


def with_two_dimensions(text: str) -> str:
    """PTX of CuTe DSL whose copies of one dimension have two, as its tensor maps have at least: Hopper refuses others."""
    return _COPY_1D.sub(r"\g<1>2d\2, 0}", text)


def rewrite_image(image: bytes, cubin: Path, run: Path) -> LoadedModule:
    """Rewrite a module for Hopper and write its machine code to ``cubin``.

    Raises:
        BadInput: see :func:`module_ptx`; or an instruction has no replacement.
        CompileFailed: ptxas rejects the PTX for its own target.
    """
    started, tools = time.monotonic(), toolchain.find()
    text, origin = module_ptx(memoryview(image), read_captured(run), kept_files(run))
    native = library.assemble_natively(text, source_target(text), tools, Path(os.environ[NATIVE_CACHE]))
    own = with_two_dimensions(text) if origin == KEPT else text
    delayed, sites = perturb.with_delays(own) if (run / perturb.FLAG).exists() else (own, ())
    module = rewrite(delayed, lambda: library.read_functions((run / FUNCTIONS).read_text()))
    option = QUICKLY if sum(module.counts.values()) > MANY_CALLS * max(1, len(kernel_names(text))) else ""
    output = cubin.with_suffix(f".{os.getpid()}")
    try:
        with _with_option(option, tools) as quick:
            kernels = library.assemble(module.text, output, quick)
        content = output.read_bytes()
        write_atomic(run / figures_name(content), figures(text, native).encode())
        write_atomic(cubin, content)
    finally:
        output.unlink(missing_ok=True)
    return LoadedModule(
        origin,
        hashlib.sha256(text.encode()).hexdigest(),
        module.instruction_count,
        module.counts,
        tuple(kernels),
        round(time.monotonic() - started, 1),
        option,
        native,
        figures_name(content).removesuffix(FIGURES),
        sites,
    )


def figures_name(cubin: bytes) -> str:
    """The file of a run's directory with the figures of the kernels in rewritten machine code."""
    return f"{zlib.crc32(cubin):08x}-{len(cubin):x}{FIGURES}"


def figures(text: str, native: NativeModule) -> str:
    """Lines ``NAME REGISTERS BARRIERS SHARED THREADS CLUSTER`` of kernels on SM12x: per thread, per CTA, static bytes, most

    threads, CTAs of a cluster.
    """
    most, clusters = stated(_BOUNDED, text), stated(_CLUSTER, text)
    return "".join(
        f"{row.name} {row.registers} {row.barriers} {row.shared_bytes} {most.get(row.name, 1024)} {clusters.get(row.name, 1)}\n"
        for row in native.kernels
    )


def stated(directive: re.Pattern[str], text: str) -> dict[str, int]:
    """The product of the sizes that a directive states of each kernel."""
    return {kernel["name"]: math.prod(map(int, re.findall(r"\d+", kernel["sizes"]))) for kernel in directive.finditer(text)}


@contextmanager
def _with_option(option: str, tools: Toolchain) -> Iterator[Toolchain]:
    """A toolchain whose ptxas gets an option more."""
    with tempfile.TemporaryDirectory() as directory:
        if option:
            ptxas = Path(directory) / "bin" / "ptxas"
            ptxas.parent.mkdir()
            ptxas.write_text(f'#!/bin/sh\nexec {shlex.quote(str(tools.cuda_home / "bin" / "ptxas"))} {option} "$@"\n')
            ptxas.chmod(0o700)
            tools = replace(tools, cuda_home=Path(directory))
        yield tools


def main() -> int:
    """Rewrite the module named by the arguments; an error is printed, and its code returned."""
    run = Path(os.environ[RUN_DIRECTORY])
    image, cubin = _files(sys.argv[1:])
    content = image.read_bytes()
    try:
        module = rewrite_image(content, cubin, run)
    except Sm120kitError as error:
        print(f"sm120kit verify run: {error.message}\n  {error.hint}", file=sys.stderr)
        return error.exit_code
    write_atomic(run / f"{hashlib.sha256(content).hexdigest()}{RECORD}", json.dumps(asdict(module)).encode())
    return 0


def _files(arguments: Sequence[str]) -> tuple[Path, Path]:
    """Input and output: two files, or ``OPTIONS INPUT -o OUTPUT`` as ptxas takes them."""
    if "-o" not in arguments:
        image, cubin = arguments
        return Path(image), Path(cubin)
    at = arguments.index("-o")
    (image,) = (word for word in (*arguments[:at], *arguments[at + 2 :]) if not word.startswith("-"))
    return Path(image), Path(arguments[at + 1])


if __name__ == "__main__":
    sys.exit(main())
