"""The emulated mma, written from the PTX ISA's tables, against a model written from CuTe's layouts: two sources, one truth."""

from __future__ import annotations

import ctypes
import random
from itertools import product
from math import isnan, ldexp, nan
from pathlib import Path

import pytest

from sm120kit import emulate, process, toolchain

SOURCE = """
#include "instructions.hpp"
using namespace emulate;
template <int K, Element A, Element B, Scale S, int V>
void mma(uint32_t const* a, uint32_t const* b, uint32_t const* sfa, uint32_t const* sfb, float const* c, float* d) {
  MmaLane lanes[32];
  std::array<MmaLane*, 32> all;
  for (int l = 0; l < 32; ++l) {
    lanes[l] = {{a[4*l], a[4*l+1], a[4*l+2], a[4*l+3]}, {b[2*l], b[2*l+1]}, sfa[l], sfb[l], {c[4*l], c[4*l+1], c[4*l+2], c[4*l+3]}, {}};
    all[l] = &lanes[l];
  }
  block_scaled_mma<K, A, B, S, V>(all);
  for (int l = 0; l < 32; ++l) for (int i = 0; i < 4; ++i) d[4*l+i] = lanes[l].d[i];
}
#define FACE(NAME, ...) extern "C" void NAME(uint32_t* a, uint32_t* b, uint32_t* sfa, uint32_t* sfb, float* c, float* d) { mma<__VA_ARGS__>(a, b, sfa, sfb, c, d); }
FACE(nvfp4, 64, Element::e2m1, Element::e2m1, Scale::ue4m3, 16)
FACE(mxfp4, 64, Element::e2m1, Element::e2m1, Scale::ue8m0, 32)
FACE(mxfp8, 32, Element::e4m3, Element::e4m3, Scale::ue8m0, 32)
FACE(fp8xmxfp4, 32, Element::e4m3, Element::e2m1, Scale::ue8m0, 32)
FACE(mxfp4xfp8, 32, Element::e2m1, Element::e4m3, Scale::ue8m0, 32)
"""  # noqa: E501

Layout = tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]
# (thread modes, value modes), each (extent, stride), into row + 16 k (A), column + 8 k (B), row + 16 column (C).
# Source: cute/atom/mma_traits_sm120.hpp and mma_traits_sm80.hpp.
A64: Layout = (((4, 128), (8, 1)), ((8, 16), (2, 8), (2, 512)))
B64: Layout = (((4, 64), (8, 1)), ((8, 8), (2, 256)))
A32: Layout = (((4, 64), (8, 1)), ((4, 16), (2, 8), (2, 256)))
B32: Layout = (((4, 32), (8, 1)), ((4, 8), (2, 128)))
C: Layout = (((4, 32), (8, 1)), ((2, 16), (2, 8)))
SFA_THREADS = ((2, 8), (2, 0), (8, 1))
SFB_THREADS = ((4, 0), (8, 1))


def offset(modes: tuple[tuple[int, int], ...], index: int) -> int:
    total = 0
    for extent, stride in modes:
        total += index % extent * stride
        index //= extent
    return total


def minifloat(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) & 1 else 1.0
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = code & (1 << mantissa_bits) - 1
    if not exponent:
        return sign * ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)


def element(kind: str, code: int) -> float:
    if kind == "e2m1":
        return minifloat(code & 15, 2, 1, 1)
    return nan if code & 127 == 127 else minifloat(code, 4, 3, 7)


def scale(kind: str, code: int) -> float:
    if kind == "ue8m0":
        return nan if code == 255 else ldexp(1.0, code - 127)
    return nan if code & 127 == 127 else minifloat(code & 127, 4, 3, 7)


KINDS = {
    "nvfp4": (64, "e2m1", "e2m1", "ue4m3", 16),
    "mxfp4": (64, "e2m1", "e2m1", "ue8m0", 32),
    "mxfp8": (32, "e4m3", "e4m3", "ue8m0", 32),
    "fp8xmxfp4": (32, "e4m3", "e2m1", "ue8m0", 32),
    "mxfp4xfp8": (32, "e2m1", "e4m3", "ue8m0", 32),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    directory = tmp_path_factory.mktemp("instructions")
    (directory / "face.cpp").write_text(SOURCE)
    compiler, _ = toolchain.host_compiler()
    output: Path = directory / "face.so"
    process.run(
        [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{emulate.SOURCES}", directory / "face.cpp", "-o", output]
    )
    return ctypes.CDLL(str(output))


@pytest.mark.parametrize(("name", "extreme"), list(product(KINDS, (False, True))))
def test_mma_is_what_cute_takes_it_for(library: ctypes.CDLL, name: str, extreme: bool) -> None:
    """Random fragments, with junk in the lanes whose scale is not selected; extreme ones have all scale codes, so NaN too."""
    k, kind_a, kind_b, kind_sf, vector = KINDS[name]
    dice = random.Random(name)
    bits, per = (4, 8) if k == 64 else (8, 4)
    layout_a, layout_b = (A64, B64) if k == 64 else (A32, B32)
    for _ in range(12):
        a = [dice.getrandbits(32) for _ in range(128)]
        b = [dice.getrandbits(32) for _ in range(64)]
        codes = range(256) if extreme else (range(56, 64) if kind_sf == "ue4m3" else range(126, 129))
        scales = [[int.from_bytes(bytes(dice.choice(codes) for _ in range(4)), "little") for _ in range(32)] for _ in range(2)]
        for lane in range(32):  # what is not selected must not matter
            if lane % 4 > 1:
                scales[0][lane] = dice.getrandbits(32)
            if lane % 4:
                scales[1][lane] = dice.getrandbits(32)
        c = [float(dice.randrange(-8, 9)) for _ in range(128)]
        d = (ctypes.c_float * 128)()
        getattr(library, name)(
            *((ctypes.c_uint32 * len(words))(*words) for words in (a, b, *scales)), (ctypes.c_float * 128)(*c), d
        )

        def unpacked(registers: list[int], layout: Layout, count: int, rows: int, kind: str) -> list[float]:
            out = [0.0] * (rows * k)
            for lane, value in product(range(32), range(count * per)):
                code = registers[lane * count + value // per] >> bits * (value % per) & (1 << bits) - 1
                at = offset(layout[0], lane) + offset(layout[1], value)
                out[at] = element(kind, code >> 2 if k == 32 and kind == "e2m1" else code)
            return out

        values_a = unpacked(a, layout_a, 4, 16, kind_a)
        values_b = unpacked(b, layout_b, 2, 8, kind_b)
        for row, column in product(range(16), range(8)):
            lane_a = next(lane for lane in range(32) if lane % 4 < 2 and offset(SFA_THREADS, lane) == row)
            lane_b = next(lane for lane in range(32) if lane % 4 < 1 and offset(SFB_THREADS, lane) == column)
            (at,) = (i for i in range(128) if offset(C[0], i // 4) + offset(C[1], i % 4) == row + 16 * column)
            want = c[at]
            for x in range(k):
                shift = 8 * (x // vector)
                sfa = scale(kind_sf, scales[0][lane_a] >> shift & 255)
                sfb = scale(kind_sf, scales[1][lane_b] >> shift & 255)
                want += values_a[row + 16 * x] * sfa * values_b[column + 8 * x] * sfb
            want = ctypes.c_float(want).value
            assert d[at] == want or (isnan(want) and isnan(d[at])) or (extreme and d[at] == pytest.approx(want, rel=1e-6))
