"""The compiler and emulator for another machine: unpacked without root, a program and a library for it compiled and run.

NVIDIA's compiler for that machine gives the same device code as this machine's.
"""

from __future__ import annotations

import platform
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from sm120kit import sources
from sm120kit.core.digests import file_sha256
from sm120kit.core.records import Toolchain
from sm120kit.core.workspace import Workspace
from sm120kit.recipes.cross_tools import CrossTools, cross_tools
from sm120kit.recipes.locked_toolchain import compilers
from sm120kit.recipes.target import resolve_flashinfer
from sm120kit.sources.run_options import Options
from sm120kit.wheels._check import tvm_ffi_loader
from sm120kit.wheels.build_records import Module

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the tools are for x86_64")


KERNEL = """
#include <cuda_fp16.h>
template <int N> __global__ void axpy(__half2 *y, const __half2 *x, __half2 a, int n) {
  __shared__ __half2 tile[N];
  for (int i = blockIdx.x * N + threadIdx.x; i < n; i += gridDim.x * N) {
    tile[threadIdx.x] = __hfma2(a, x[i], y[i]);
    __syncthreads();
    y[i] = __hadd2(tile[threadIdx.x], tile[N - 1 - threadIdx.x]);
    __syncthreads();
  }
}
void launch(__half2 *y, const __half2 *x, int n) { axpy<128><<<8, 128>>>(y, x, __half2half2(__half(2.0f)), n); }
"""
COMPILER = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-cccl", "nvidia-cuda-runtime")


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Options:
    return Options(Workspace.open(tmp_path_factory.mktemp("state")))


@pytest.fixture(scope="module")
def tools(options: Options) -> CrossTools:
    made = cross_tools("aarch64", options)
    assert cross_tools("aarch64", options) == made
    return made


def compiled(tools: CrossTools, source: str, path: Path, *flags: str) -> Path:
    subprocess.run([tools.compiler, "-x", "c++", "-", *flags, "-o", path], input=source, text=True, check=True)
    return path


def test_program_for_another_machine_is_compiled_and_run(tools: CrossTools, tmp_path: Path) -> None:
    source = (
        "#include <iostream>\n#include <sys/utsname.h>\nint main() { utsname name; uname(&name); std::cout << name.machine; }"
    )
    program = compiled(tools, source, tmp_path / "program")
    assert tools.compiler_version().startswith("aarch64-linux-gnu-g++")
    assert subprocess.run([*tools.emulation, program], capture_output=True, text=True).stdout == "aarch64"
    assert str(tools.root).encode() not in program.read_bytes()


@pytest.mark.parametrize(("body", "problem"), [("return 0;", ""), ("return absent();", "absent")])
def test_module_for_another_machine_is_loaded_by_the_emulator(
    body: str, problem: str, tools: CrossTools, tmp_path: Path
) -> None:
    library = compiled(tools, "int other() { return 1; }", tmp_path / "other.so", "-shared", "-fPIC")
    compiled(tools, f"int absent(); int call() {{ {body} }}", tmp_path / "module.so", "-shared", "-fPIC")
    toolchain = replace(Toolchain(Path(), "", str(tools.compiler), ""), machine="aarch64", emulator=tools.emulation)
    problems = tvm_ffi_loader(library, tmp_path, toolchain)(Module("module", "module.so", (), ()))
    assert bool(problems) == bool(problem) and all(problem in text for text in problems)


@pytest.fixture
def emulated(tools: CrossTools, options: Options, tmp_path: Path) -> Path:
    """The CUDA home of the locked compiler for aarch64. The programs that its nvcc starts are run by the emulator."""
    target = resolve_flashinfer("flashinfer", options)
    (closure,) = (each for each in target.lock.closures if each.machine == "aarch64")
    wheels = [wheel for wheel in closure.wheels if wheel.name in COMPILER]
    sources.unpack_wheels(sources.wheelhouse(wheels, options.workspace), tmp_path / "aarch64", closure.python, "aarch64")
    (home,) = (tmp_path / "aarch64" / "nvidia").iterdir()
    for name in ("bin/cudafe++", "bin/ptxas", "bin/fatbinary", "nvvm/bin/cicc"):
        program = (home / name).rename(home / f"{name}.aarch64")
        (home / name).write_text(f'#!/bin/sh\nexec {" ".join(map(str, tools.emulation))} {program} "$@"\n')
        (home / name).chmod(0o755)
    return home


def test_native_and_cross_compiler_give_the_same_device_code(
    tools: CrossTools, emulated: Path, options: Options, tmp_path: Path
) -> None:
    """The aarch64 compiler, as on a DGX Spark, and this machine's with the host compiler of either machine."""
    own = compilers(resolve_flashinfer("flashinfer", options))
    nvcc, kernel = own.cuda_home / "bin" / "nvcc", tmp_path / "kernel.cu"
    kernel.write_text(KERNEL)
    commands = {
        "host": [nvcc, "-ccbin", own.host_compiler],
        "cross": [nvcc, "-ccbin", tools.compiler],
        "native": [*tools.emulation, emulated / "bin" / "nvcc", "-ccbin", tools.compiler],
    }
    for name, command in commands.items():
        subprocess.run([*command, "-arch=sm_121a", "-O3", "-cubin", kernel, "-o", tmp_path / name], check=True)
    digests = {name: file_sha256(tmp_path / name) for name in commands}
    assert len({*digests.values()}) == 1, digests
