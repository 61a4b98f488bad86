"""The code that nvcc makes of a probe, kernel by kernel, kept by the digest of what goes in."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sm120kit import cubin, process
from sm120kit.errors import CompileFailed, NotEnoughMemory
from sm120kit.records import Arch, Kernel, KernelCode, Toolchain
from sm120kit.workspace import digest_of, locked, read_record, write_record

FLAGS = ("-std=c++17", "-O3", "-DNDEBUG", "-use_fast_math", "--expt-relaxed-constexpr", "-static-global-template-stub=false")
"""As FlashInfer compiles its kernels (flashinfer/jit/core.py)."""

_ENTRY = re.compile(r"^\s*(?:\.visible |\.weak )*\.entry (\S+?)\(", re.MULTILINE)
_FILE_HASH = re.compile(r"_GLOBAL__N__[0-9a-f]{8}_\d+_\w+?_[0-9a-f]{8}(?:_\d+)?|_INTERNAL_[0-9a-f]{8}_\d+_\w+?_[0-9a-f]{8}")


@dataclass(frozen=True)
class Unit:
    """A translation unit for nvcc. ``key`` names the content of everything that it includes."""

    source: str
    definitions: tuple[str, ...]
    includes: tuple[Path, ...]
    key: str


@dataclass(frozen=True)
class _Kept:
    kernels: tuple[KernelCode, ...]


def compile_unit(unit: Unit, arch: Arch, toolchain: Toolchain, cache: Path) -> tuple[KernelCode, ...]:
    """The kernels of a unit; a minute or two and 6 GB for each that is not in ``cache``.

    Raises:
        CompileFailed: nvcc refuses it, or makes no kernel of it.
        NotEnoughMemory: the system ended nvcc.
    """
    key = digest_of([unit.source, unit.definitions, unit.key, FLAGS, arch, toolchain.nvcc_version, toolchain.host_version])
    record = cache / "prove" / "code" / f"{key}.json"
    with locked(record.with_suffix(".lock"), f"the code of a probe ({key[:12]})"):
        if not record.is_file():
            with tempfile.TemporaryDirectory(prefix="sm120kit-prove-") as directory:
                write_record(record, _Kept(_compile(unit, arch, toolchain, Path(directory))))
    return read_record(_Kept, record).kernels


def _compile(unit: Unit, arch: Arch, toolchain: Toolchain, directory: Path) -> tuple[KernelCode, ...]:
    (directory / "probe.cu").write_text(unit.source)
    number = arch.removeprefix("sm_")
    done = process.run(
        [
            toolchain.cuda_home / "bin" / "nvcc",
            *FLAGS,
            *unit.definitions,
            *(word for path in unit.includes for word in ("-isystem", path)),
            f"-gencode=arch=compute_{number},code=sm_{number}",
            "-ccbin",
            toolchain.host_compiler,
            "-cubin",
            "--keep",
            "probe.cu",
            "-o",
            "probe.cubin",
        ],
        cwd=directory,
        check=False,
        tied=True,
    )
    if done.returncode:
        if re.search(r"Killed|out of memory|Cannot allocate memory", done.stderr):
            raise NotEnoughMemory("the system ended nvcc: a probe needs 6 GB to compile", "close something")
        errors = [line for line in done.stderr.splitlines() if re.search(r"\berror\b", line)]
        raise CompileFailed(
            f"nvcc refuses a probe: {errors[0] if errors else done.stderr.strip()[-300:]}",
            f"command: {process.paste_line(done.argv)}",
        )
    (ptx,) = directory.glob("*.ptx")
    kernels = [kernel for image in cubin.read(directory / "probe.cubin") for kernel in image.kernels]
    if not kernels:
        raise CompileFailed("nvcc made no kernel of a probe", f"command: {process.paste_line(done.argv)}")
    return coded(kernels, ptx.read_text())


def coded(kernels: Sequence[Kernel], ptx: str) -> tuple[KernelCode, ...]:
    """Kernels with the instructions that only their PTX tells apart, in an order that does not depend on file hashes."""
    parts = _ENTRY.split(ptx)
    bodies = dict(zip(parts[1::2], parts[2::2], strict=True))
    found = [
        KernelCode(
            name_sha256=hashlib.sha256(_FILE_HASH.sub("", kernel.name).encode()).hexdigest(),
            registers=kernel.registers,
            shared_bytes=kernel.shared_bytes,
            stack_bytes=kernel.stack_bytes,
            text_bytes=kernel.text_bytes,
            text_sha256=kernel.text_sha256,
            grid_waits=bodies[kernel.name].count("griddepcontrol.wait"),
            grid_launches=bodies[kernel.name].count("griddepcontrol.launch_dependents"),
        )
        for kernel in kernels
    ]
    return tuple(sorted(found, key=lambda one: (one.name_sha256, one.text_sha256)))
