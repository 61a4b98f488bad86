"""The software functions as PTX, and ptxas for sm_90a."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from sm120kit.core import process
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
    """A kernel as ptxas reports it: registers per thread, and bytes spilled to local memory."""

    name: str
    registers: int
    spill_bytes: int


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
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "module.ptx"
        source.write_text(text)
        ptxas = str(toolchain.cuda_home / "bin" / "ptxas")
        done = process.run([ptxas, f"-arch={arch}", "-v", str(source), "-o", str(output)], check=False)
    messages = done.stderr + done.stdout
    if done.returncode:
        error = re.search(r"line (\d+); error\s*: (.*)", messages)
        if not error:
            raise BadInput(f"ptxas failed for {arch}: {messages.strip()[-300:]}", "pass the PTX of a complete module")
        statement = text.splitlines()[int(error[1]) - 1].strip()
        raise BadInput(
            f"ptxas rejects for {arch}: {statement[:200]} ({error[2].strip()})",
            "the instruction has no replacement, or the PTX is newer than this ptxas",
        )
    spills = re.findall(r"Function properties for (\S+)\n.*?(\d+) bytes spill stores, (\d+) bytes spill loads", messages)
    spilled = {name: int(stores) + int(loads) for name, stores, loads in spills}
    kernels = re.findall(r"Compiling entry function '(\S+)' for .*?(?:\n.*?)*?Used (\d+) registers", messages)
    return [AssembledKernel(name, int(registers), spilled.get(name, 0)) for name, registers in kernels]
