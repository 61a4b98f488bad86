"""The software functions as PTX, and ptxas for sm_90a."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from sm12x_lab.ptx.syntax import header
from sm120kit.core import process
from sm120kit.core.atomic_writes import write_atomic
from sm120kit.core.digests import digest_of, file_sha256
from sm120kit.core.errors import BadInput, CompileFailed
from sm120kit.core.records import Toolchain

SOURCE = Path(__file__).with_name("functions.cu")
FAST = SOURCE.with_name("fast.cu")
"""Functions of functions.cu with the arithmetic of Hopper's tensor cores; a self-test never has them."""
FLAGS = ("-ptx", "-rdc=true", "-O3", "-fmad=false", "-std=c++17", "-gencode", "arch=compute_90a,code=sm_90a")
"""-rdc=true keeps functions that nothing calls; -fmad=false keeps the order of roundings that functions.cu states."""

REWRITER = (
    "../gpu_tests/cpp/block_scaled_mma.cuh",  # has a function that functions.cu uses
    "functions.cu",
    "forms.py",
    "library.py",
    "model.py",
    "rewrite.py",
    "selftest.py",
    "syntax.py",
)
"""The files that determine the result of a self-test."""

_FUNCTION = re.compile(r"^\.visible (\.func .*?\b(sm120_\w+)\(.*?^\})", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class SoftwareFunctions:
    """The PTX of each software function, of PTX ISA ``version``."""

    functions: dict[str, str]
    version: str


@dataclass(frozen=True)
class AssembledKernel:
    """A kernel as ptxas reports it: registers per thread, and bytes spilled to local memory; barriers and static shared memory
    in bytes per CTA."""

    name: str
    registers: int
    spill_bytes: int
    barriers: int = 0
    shared_bytes: int = 0


def rewriter_digest() -> str:
    """The sha256 of the rewriter's sources, its model and its forms."""
    return digest_of([[name, file_sha256(SOURCE.parent / name)] for name in REWRITER])


def compile_functions(toolchain: Toolchain) -> SoftwareFunctions:
    """Compile functions.cu to PTX for sm_90a; about a second.

    Raises:
        CompileFailed: nvcc rejects it.
    """
    return read_functions(functions_ptx(toolchain))


def functions_ptx(toolchain: Toolchain, source: Path = SOURCE) -> str:
    """The PTX of functions.cu or fast.cu, a module.

    Raises:
        CompileFailed: nvcc rejects it.
    """
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "functions.ptx"
        nvcc = str(toolchain.cuda_home / "bin" / "nvcc")
        done = process.run([nvcc, "-ccbin", toolchain.host_compiler, *FLAGS, str(source), "-o", str(output)], check=False)
        if done.returncode:
            raise CompileFailed(f"nvcc rejects {source.name}: {done.stderr.strip()[-300:]}", "use CUDA 12.9 or newer")
        return output.read_text()


def read_functions(text: str) -> SoftwareFunctions:
    """The software functions in the PTX of functions.cu; one that follows another of its name replaces it."""
    version = re.search(r"^\.version (\S+)", text, re.MULTILINE)
    assert version
    return SoftwareFunctions({match[2]: match[1] for match in _FUNCTION.finditer(text)}, version[1])


def assemble(text: str, output: Path, toolchain: Toolchain, arch: str = "sm_90a") -> list[AssembledKernel]:
    """Assemble a module with ptxas and return its kernels.

    Raises:
        BadInput: ptxas rejects it; the message has the first error with the instruction.
    """
    status, messages = _ptxas(text, output, toolchain, arch)
    if status:
        raise BadInput(
            f"ptxas rejects for {arch}: {_first_error(text, messages)}",
            "the instruction has no replacement, or the PTX is newer than this ptxas",
        )
    return _kernels(messages)


def _ptxas(text: str, output: Path, toolchain: Toolchain, arch: str) -> tuple[int, str]:
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "module.ptx"
        source.write_text(text)
        ptxas = str(toolchain.cuda_home / "bin" / "ptxas")
        done = process.run([ptxas, f"-arch={arch}", "-v", str(source), "-o", str(output)], check=False)
    return done.returncode, done.stderr + done.stdout


def _first_error(text: str, messages: str) -> str:
    """The statement of the first error that ptxas reports, and its reason; or the end of the messages."""
    error = re.search(r"line (\d+); (?:error|fatal)\s*: (.*)", messages)
    if not error:
        return messages.strip()[-300:]
    return f"{text.splitlines()[int(error[1]) - 1].strip()[:200]} ({error[2].strip()})"


_SPILLS = re.compile(r"Function properties for (\S+)\n.*?(\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(
    r"Compiling entry function '(\S+)' for .*?(?:\n.*?)*?"
    r"Used (\d+) registers(?:, used (\d+) barriers)?(?:, \d+ bytes cumulative stack size)?(?:, (\d+) bytes smem)?"
)


def _kernels(messages: str) -> list[AssembledKernel]:
    spilled = {name: int(stores) + int(loads) for name, stores, loads in _SPILLS.findall(messages)}
    return [
        AssembledKernel(name, int(registers), spilled.get(name, 0), int(barriers or 0), int(shared or 0))
        for name, registers, barriers, shared in _USED.findall(messages)
    ]


@dataclass(frozen=True)
class NativeModule:
    """A module as ptxas assembles it for ``arch``, the target that its author chose.

    ``unknown`` is why its kernels are not known: the PTX is of a later ISA than that of ptxas.
    """

    arch: str
    kernels: tuple[AssembledKernel, ...] = ()
    unknown: str = ""


NATIVE = "ptx-native"
"""Directory of the state's cache with the results of :func:`assemble_natively`."""


def assemble_natively(text: str, arch: str, toolchain: Toolchain, cache: Path) -> NativeModule:
    """Assemble a module for its own target ``arch``, as the driver of an SM12x GPU or a build does before it can run.

    ``cache`` is a directory of results by the digest of the PTX.

    Raises:
        CompileFailed: ptxas rejects it for this target: it runs on no such GPU.
    """
    from pydantic import TypeAdapter

    entry = cache / f"{digest_of([text, toolchain.nvcc_version])}.json"
    stored = TypeAdapter(NativeModule)
    if entry.is_file():
        return stored.validate_json(entry.read_bytes())
    with tempfile.TemporaryDirectory() as directory:
        module = _native_module(text, Path(directory) / "native.cubin", toolchain, arch)
    cache.mkdir(parents=True, exist_ok=True)
    write_atomic(entry, stored.dump_json(module))
    return module


def _native_module(text: str, output: Path, toolchain: Toolchain, arch: str) -> NativeModule:
    status, messages = _ptxas(text, output, toolchain, arch)
    later = re.search(r"Unsupported \.version (\S+); current version is '(\S+)'", messages)
    if status and later:
        text = _lowered(text, later[2])
        status, messages = _ptxas(text, output, toolchain, arch)
        if status and "not supported on .target" not in messages:
            return NativeModule(arch, unknown=f"PTX ISA {later[1]}; ptxas has {later[2]}: {_first_error(text, messages)}")
    if status:
        raise CompileFailed(
            f"ptxas rejects the module for its own target {arch}: {_first_error(text, messages)}",
            "no SM12x GPU can load it; write the code path of this target without the instruction",
        )
    return NativeModule(arch, tuple(_kernels(messages)))


def _lowered(text: str, version: str) -> str:
    start, end = header(text)["version"].span("value")
    return f"{text[:start]}{version}{text[end:]}"
