"""Regrouped units in the real compiler: the same kernels and exported functions as the units that a generator wrote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sm120kit.core import process, toolchain
from sm120kit.kernels import cubin
from sm120kit.wheels.flashinfer_generators import regrouped

HEADER = """
#pragma once
namespace {
__device__ float halved(float value) { return value * 0.5f; }
}
template <int Width, class Element>
__global__ void scale(Element* data) {
  __shared__ Element tile[Width];
  tile[threadIdx.x] = data[threadIdx.x];
  __syncthreads();
  data[threadIdx.x] = Element(halved(float(tile[Width - 1 - threadIdx.x]))) * Element(Width);
}
template <int Width, class Element>
void launch(Element* data) {
  scale<Width><<<1, Width>>>(data);
}
#define INSTANTIATE(Element, Width) template void launch<Width, Element>(Element*);
"""

TABLE = {"units": "scale_*.cu", "instantiation": r"INSTANTIATE\(\w+, (\d+)\)", "into": r"width_\1.cu"}


def library(sources: Sequence[Path], directory: Path) -> Path:
    """Compile each source and link all of them."""
    tools = toolchain.find()
    directory.mkdir(exist_ok=True)
    objects = []
    for source in sources:
        objects.append(directory / f"{source.stem}.o")
        argv = [tools.cuda_home / "bin" / "nvcc", "-ccbin", tools.host_compiler, "-arch=sm_120f", "-Xcompiler=-fPIC"]
        process.run([*argv, f"-I{source.parent.parent}", "-c", source, "-o", objects[-1]])
    process.run([tools.host_compiler, "-shared", *objects, "-o", directory / "scale.so"])
    return directory / "scale.so"


def kernels(library: Path) -> dict[str, tuple[str, int, int, int]]:
    """The code and resources of each kernel by name."""
    return {
        kernel.name: (kernel.text_sha256, kernel.registers, kernel.shared_bytes, kernel.stack_bytes)
        for image in cubin.read(library)
        for kernel in image.kernels
    }


def launchers(library: Path) -> set[str]:
    lines = process.run(["nm", "-D", "--defined-only", library]).stdout.splitlines()
    return {name for name in (line.split()[-1] for line in lines) if "launch" in name}


def test_regrouped_units_have_the_same_kernels_and_functions(tmp_path: Path) -> None:
    (tmp_path / "scale.cuh").write_text(HEADER)
    (tmp_path / "generated").mkdir()
    sources = []
    for element in ("float", "double"):
        sources.append(tmp_path / "generated" / f"scale_{element}.cu")
        calls = "\n".join(f"INSTANTIATE({element}, {width})" for width in (64, 128))
        sources[-1].write_text(f'#include "scale.cuh"\n{calls}\n')
    (tmp_path / "regrouped").mkdir()
    units = regrouped(sources, [TABLE], tmp_path / "regrouped")
    assert [unit.name for unit in units] == ["width_128.cu", "width_64.cu"]
    before, after = library(sources, tmp_path / "before"), library(units, tmp_path / "after")
    assert len(kernels(before)) == 4
    assert kernels(after) == kernels(before)
    assert len(launchers(before)) == 4
    assert launchers(after) == launchers(before)
