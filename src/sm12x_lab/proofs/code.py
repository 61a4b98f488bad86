"""Compile a probe with nvcc and describe the machine code of each kernel; results are cached by the digest of all inputs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sm12x_lab.proofs.proof_records import KernelCode
from sm120kit.core import process
from sm120kit.core.digests import digest_of
from sm120kit.core.errors import CompileFailed, ResourceUnavailable
from sm120kit.core.locks import exclusive
from sm120kit.core.memory import ran_out_of_memory
from sm120kit.core.record_files import read_record, write_record
from sm120kit.core.records import Arch, Toolchain
from sm120kit.core.sandbox import Sandbox, wrap
from sm120kit.core.temporary import owned_directory
from sm120kit.kernels import cubin
from sm120kit.kernels.cubin.cubin_records import Kernel

FLAGS = ("-std=c++17", "-O3", "-DNDEBUG", "-use_fast_math", "--expt-relaxed-constexpr", "-static-global-template-stub=false")
"""As FlashInfer compiles its kernels (flashinfer/jit/core.py)."""

_ENTRY = re.compile(r"^\s*(?:\.visible |\.weak )*\.entry (\S+?)\(", re.MULTILINE)
_FILE_HASH = re.compile(r"_GLOBAL__N__[0-9a-f]{8}_\d+_\w+?_[0-9a-f]{8}(?:_\d+)?|_INTERNAL_[0-9a-f]{8}_\d+_\w+?_[0-9a-f]{8}")


@dataclass(frozen=True)
class TranslationUnit:
    """A translation unit for nvcc. ``key`` is the digest of all files that it includes."""

    source: str
    definitions: tuple[str, ...]
    includes: tuple[Path, ...]
    key: str


@dataclass(frozen=True)
class _CodeRecord:
    kernels: tuple[KernelCode, ...]


def compile_unit(
    unit: TranslationUnit, arch: Arch, toolchain: Toolchain, cache: Path, sandbox: Sandbox | None = None
) -> tuple[KernelCode, ...]:
    """The kernels of a translation unit; one that is not in ``cache`` takes a minute or two and 6 GB.

    Raises:
        CompileFailed: the unit does not compile, or contains no kernel.
        ResourceUnavailable: nvcc ran out of memory.
    """
    key = digest_of([unit.source, unit.definitions, unit.key, FLAGS, arch, toolchain.nvcc_version, toolchain.host_version])
    record = cache / "prove" / "code" / f"{key}.json"
    with exclusive(record.with_suffix(".lock"), f"the code of a probe ({key[:12]})"):
        if not record.is_file():
            with owned_directory(record.parent, ".work-") as directory:
                write_record(record, _CodeRecord(_compile(unit, arch, toolchain, directory, sandbox)))
    return read_record(_CodeRecord, record).kernels


def _compile(
    unit: TranslationUnit, arch: Arch, toolchain: Toolchain, directory: Path, sandbox: Sandbox | None
) -> tuple[KernelCode, ...]:
    (directory / "probe.cu").write_text(unit.source)
    number = arch.removeprefix("sm_")
    argv, env = wrap(
        [
            toolchain.cuda_home / "bin" / "nvcc",
            *FLAGS,
            *unit.definitions,
            *(argument for path in unit.includes for argument in ("-isystem", path)),
            f"-gencode=arch=compute_{number},code=sm_{number}",
            "-ccbin",
            toolchain.host_compiler,
            "-cubin",
            "--keep",
            "probe.cu",
            "-o",
            "probe.cubin",
        ],
        sandbox,
        read=[path for path in unit.includes if path.is_dir()],
        write=[directory],
    )
    done = process.run(argv, cwd=directory, env=env, check=False, tied=True)
    if done.returncode:
        if ran_out_of_memory(done.returncode, done.stderr):
            raise ResourceUnavailable("nvcc ran out of memory: a probe needs 6 GB to compile", "end other programs")
        errors = [line for line in done.stderr.splitlines() if re.search(r"\berror\b", line)]
        raise CompileFailed(
            f"nvcc does not compile a probe: {errors[0] if errors else done.stderr.strip()[-300:]}",
            f"command: {process.shell_line(done.argv)}",
        )
    outputs = [*directory.glob("probe*.ptx"), *directory.glob("probe.cubin")]
    if len(outputs) != 2 or any(path.is_symlink() or not path.is_file() for path in outputs):
        raise CompileFailed("nvcc wrote no PTX or no cubin for a probe", f"command: {process.shell_line(done.argv)}")
    ptx, code = outputs
    kernels = [kernel for image in cubin.read(code) for kernel in image.kernels]
    if not kernels:
        raise CompileFailed("a probe contains no kernel", f"command: {process.shell_line(done.argv)}")
    return kernel_codes(kernels, ptx.read_text())


def kernel_codes(kernels: Sequence[Kernel], ptx: str) -> tuple[KernelCode, ...]:
    """Describe kernels, with counts of griddepcontrol instructions from their PTX, in an order independent of file hashes."""
    parts = _ENTRY.split(ptx)
    bodies = dict(zip(parts[1::2], parts[2::2], strict=True))
    codes = [
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
    return tuple(sorted(codes, key=lambda code: (code.name_sha256, code.text_sha256)))
