"""Compare the reader of device code with NVIDIA's tools: the output of ptxas at compile time, and of cuobjdump."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from sm120kit.core import toolchain
from sm120kit.kernels import cubin

SOURCE = r"""
__device__ __noinline__ int callee(int* p, int n) { int a[32]; for (int i = 0; i < n; ++i) a[p[i] & 31] = i; return a[n & 31]; }
__global__ void calls(int* p, int n) {
  int b[16];
  for (int i = 0; i < n; ++i) b[p[i] & 15] = i;
  p[0] = callee(p, n) + b[p[1] & 15];
}
template <int N> __global__ void __launch_bounds__(1024) spills(float* p) {
  float a[N];
#pragma unroll
  for (int i = 0; i < N; ++i) a[i] = p[i * 32 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) p[i * 64 + threadIdx.x] = a[N - 1 - i] * a[i];
}
template __global__ void spills<128>(float*);
extern __shared__ int dynamic[];
__global__ void both(int* p) {
  __shared__ int fixed[100];
  fixed[threadIdx.x] = p[0];
  dynamic[threadIdx.x] = p[1];
  __syncthreads();
  p[threadIdx.x] = dynamic[p[2]] + fixed[p[3]];
}
"""
ARCHS = ("80", "90a", "120a", "120f", "121a")
SYSTEM_SHARED_BYTES = 1024
"""From sm_90 on, cuobjdump includes the system's part of a CTA's shared memory, for kernels with a section for it."""

Usage = dict[tuple[str, str], tuple[int, int, int]]
"""(arch, kernel) -> registers, stack bytes, static shared bytes."""


def tool(name: str) -> str:
    """A program of the CUDA toolkit that builds use, by default the wheels of the extras ``cuda`` and ``dev``."""
    home = toolchain.find().cuda_home
    program = shutil.which(name, path=home / "bin")
    if not program:
        pytest.skip(f"no {name} in {home}/bin")
    return program


def output_of(*argv: str | Path) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A shared object for several archs, and the output of ptxas."""
    nvcc, directory = tool("nvcc"), tmp_path_factory.mktemp("oracle")
    (directory / "kernels.cu").write_text(SOURCE)
    library = directory / "kernels.so"
    targets = [option for arch in ARCHS for option in ("-gencode", f"arch=compute_{arch},code=sm_{arch}")]
    packed = ("-Xfatbin=-compress-all", "--compress-mode=size")
    linked = ("-Xcompiler=-fPIC", "-shared", "-cudart=none")
    output = output_of(nvcc, *targets, *packed, *linked, "-Xptxas=-v", "-o", library, directory / "kernels.cu")
    return library, output


def usage(library: Path) -> Usage:
    return {
        (kernel.arch, kernel.name): (kernel.registers, kernel.stack_bytes, kernel.shared_bytes)
        for image in cubin.read(library)
        for kernel in image.kernels
    }


def test_reader_agrees_with_ptxas(compiled: tuple[Path, str]) -> None:
    library, output = compiled

    def number(unit: str, line: str) -> int:
        match = re.search(rf"(\d+) {unit}", line)
        return int(match[1]) if match else 0

    expected: Usage = {}
    for name, arch, used in re.findall(r"entry function '(\S+)' for '(\S+)'\n(?:.*\n)*?.*(Used .*)", output):
        expected[arch, name] = (
            number("registers", used),
            number("bytes cumulative stack size", used),
            number("bytes smem", used),
        )
    assert len(expected) == 3 * len(ARCHS)
    assert {arch: stack > 0 for (arch, name), (_, stack, _) in expected.items() if "spills" in name} == dict.fromkeys(
        (f"sm_{arch}" for arch in ARCHS), True
    )
    assert usage(library) == expected


def test_reader_agrees_with_cuobjdump(compiled: tuple[Path, str]) -> None:
    library, _ = compiled
    cuobjdump = tool("cuobjdump")
    expected: Usage = {}
    arch = ""
    for line in output_of(cuobjdump, "-res-usage", library).splitlines():
        if line.startswith("arch = "):
            arch = line.removeprefix("arch = ")
        elif line.startswith(" Function "):
            name = line.removeprefix(" Function ").rstrip(":")
        elif "REG:" in line:
            registers, stack, shared = (int(re.findall(rf"{key}:(\d+)", line)[0]) for key in ("REG", "STACK", "SHARED"))
            system = SYSTEM_SHARED_BYTES if int(re.findall(r"\d+", arch)[0]) >= 90 and shared else 0
            expected[arch, name] = (registers, stack, shared - system)
    assert usage(library) == expected
    listed = re.findall(r"\.(sm_\w+)\.cubin", output_of(cuobjdump, "-lelf", library))
    assert [image.arch.rstrip("f") for image in cubin.read(library)] == listed
