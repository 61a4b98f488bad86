"""Compare the emulated mma, written after the PTX ISA's tables, with an independent model after CuTe's layouts."""

from __future__ import annotations

import ctypes
import random
from itertools import product
from math import inf, isnan, ldexp, nan
from pathlib import Path

import pytest

from sm12x_lab import emulation
from sm120kit.core import process, toolchain

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
        [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{emulation.SOURCES}", directory / "face.cpp", "-o", output]
    )
    return ctypes.CDLL(str(output))


Fragments = tuple[list[int], list[int], list[int], list[int]]  # registers of all lanes: A (4 each), B (2), scales of A, of B


def bits_of(name: str) -> tuple[int, int]:
    """Bits of an element in a register, and elements per register."""
    return (4, 8) if KINDS[name][0] == 64 else (8, 4)


def code_of(name: str, kind: str, code: int) -> int:
    """A code as stored in a register: a 4-bit code of the 8-bit instruction is in bits 2 to 5."""
    return code << 2 if KINDS[name][0] == 32 and kind == "e2m1" else code


def fill(name: str, codes_a: list[int], codes_b: list[int], scale_a: int, scale_b: int) -> Fragments:
    """Fragments with alternating codes and equal scales."""
    bits, per = bits_of(name)
    _, kind_a, kind_b, _, _ = KINDS[name]
    registers = []
    for codes, count, kind in ((codes_a, 4, kind_a), (codes_b, 2, kind_b)):
        turns = (code_of(name, kind, codes[i % len(codes)]) for i in range(32 * count * per))
        registers.append([sum(next(turns) << bits * i for i in range(per)) for _ in range(32 * count)])
    return registers[0], registers[1], [scale_a * 0x01010101] * 32, [scale_b * 0x01010101] * 32


def emulated(library: ctypes.CDLL, name: str, fragments: Fragments, c: list[float]) -> list[float]:
    d = (ctypes.c_float * 128)()
    getattr(library, name)(*((ctypes.c_uint32 * len(words))(*words) for words in fragments), (ctypes.c_float * 128)(*c), d)
    return list(d)


def modelled(name: str, fragments: Fragments, c: list[float]) -> dict[tuple[int, int], tuple[int, float]]:
    """By row and column: the index of the result among the registers, and its value."""
    k, kind_a, kind_b, kind_sf, vector = KINDS[name]
    bits, per = bits_of(name)
    layout_a, layout_b = (A64, B64) if k == 64 else (A32, B32)
    a, b, *scales = fragments

    def unpacked(registers: list[int], layout: Layout, count: int, rows: int, kind: str) -> list[float]:
        out = [0.0] * (rows * k)
        for lane, value in product(range(32), range(count * per)):
            code = registers[lane * count + value // per] >> bits * (value % per) & (1 << bits) - 1
            at = offset(layout[0], lane) + offset(layout[1], value)
            out[at] = element(kind, code >> 2 if k == 32 and kind == "e2m1" else code)
        return out

    values_a = unpacked(a, layout_a, 4, 16, kind_a)
    values_b = unpacked(b, layout_b, 2, 8, kind_b)
    results = {}
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
        results[row, column] = at, ctypes.c_float(want).value
    return results


def agree(library: ctypes.CDLL, name: str, fragments: Fragments, c: list[float], exact: bool = True) -> list[float]:
    d = emulated(library, name, fragments, c)
    for at, want in modelled(name, fragments, c).values():
        same = d[at] == want or (isnan(want) and isnan(d[at]))
        assert same or (not exact and d[at] == pytest.approx(want, rel=1e-6)), (d[at], want)
    return d


@pytest.mark.parametrize(("name", "extreme"), list(product(KINDS, (False, True))))
def test_mma_equals_the_model_on_random_fragments(library: ctypes.CDLL, name: str, extreme: bool) -> None:
    """Random fragments, with random bits in the lanes whose scale is not selected; ``extreme`` has all scale codes with NaN."""
    kind_sf = KINDS[name][3]
    dice = random.Random(name)
    for _ in range(12):
        a = [dice.getrandbits(32) for _ in range(128)]
        b = [dice.getrandbits(32) for _ in range(64)]
        codes = range(256) if extreme else (range(56, 64) if kind_sf == "ue4m3" else range(126, 129))
        scales = [[int.from_bytes(bytes(dice.choice(codes) for _ in range(4)), "little") for _ in range(32)] for _ in range(2)]
        for lane in range(32):  # lanes that are not selected must not affect the result
            if lane % 4 > 1:
                scales[0][lane] = dice.getrandbits(32)
            if lane % 4:
                scales[1][lane] = dice.getrandbits(32)
        c = [float(dice.randrange(-8, 9)) for _ in range(128)]
        agree(library, name, (a, b, scales[0], scales[1]), c, exact=not extreme)


ONE = {"ue4m3": 0x38, "ue8m0": 127}
LARGEST = {"e2m1": (0x7, 6.0), "e4m3": (0x7E, 448.0)}
NAN_SCALE = {"ue4m3": 0x7F, "ue8m0": 0xFF}


@pytest.mark.parametrize("name", KINDS)
def test_mma_of_all_pairs_of_codes(library: ctypes.CDLL, name: str) -> None:
    """All 16 e2m1 and all 256 e4m3 codes without NaN in each operand, each with every code of the other operand."""
    _, kind_a, kind_b, kind_sf, _ = KINDS[name]
    codes = {"e2m1": list(range(16)), "e4m3": [code for code in range(256) if code & 127 != 127]}
    several = {"e2m1": list(range(16)), "e4m3": [0x00, 0x80, 0x01, 0x08, 0x38, 0xB8, 0x7E, 0xFE]}
    for code in several[kind_b]:
        agree(library, name, fill(name, codes[kind_a], [code], ONE[kind_sf], ONE[kind_sf]), [0.0] * 128)
    for code in several[kind_a]:
        agree(library, name, fill(name, [code], codes[kind_b], ONE[kind_sf], ONE[kind_sf]), [0.0] * 128)


@pytest.mark.parametrize("name", KINDS)
def test_mma_of_the_largest_values(library: ctypes.CDLL, name: str) -> None:
    k, kind_a, kind_b, kind_sf, _ = KINDS[name]
    (code_a, a), (code_b, b) = LARGEST[kind_a], LARGEST[kind_b]
    scales = [(0x7E, 0x7E, 448.0 * 448.0)] if kind_sf == "ue4m3" else [(254, 0, 1.0), (254, 127 - 24, ldexp(1.0, 103))]
    for scale_a, scale_b, factor in scales:
        d = agree(library, name, fill(name, [code_a], [code_b], scale_a, scale_b), [0.0] * 128)
        assert set(d) == {a * b * factor * k}
    if kind_sf == "ue8m0":  # beyond the range of fp32
        assert set(agree(library, name, fill(name, [code_a], [code_b], 254, 254), [0.0] * 128)) == {inf}


@pytest.mark.parametrize("name", KINDS)
def test_mma_with_zero_and_smallest_scale(library: ctypes.CDLL, name: str) -> None:
    """ue4m3 has a zero; the smallest ue8m0 is 2^-127."""
    k, kind_a, kind_b, kind_sf, _ = KINDS[name]
    (code_a, a), (code_b, b) = LARGEST[kind_a], LARGEST[kind_b]
    c = [float(1 + i) for i in range(128)]
    d = agree(library, name, fill(name, [code_a], [code_b], 0, ONE[kind_sf]), c)
    assert d == c
    results = agree(library, name, fill(name, [code_a], [code_b], 0, ONE[kind_sf]), [0.0] * 128)
    assert set(results) == {0.0 if kind_sf == "ue4m3" else a * b * k * ldexp(1.0, -127)}


@pytest.mark.parametrize(("name", "operand"), list(product(KINDS, (0, 1))))
def test_nan_scale_affects_its_row_or_column_only(library: ctypes.CDLL, name: str, operand: int) -> None:
    kind_sf = KINDS[name][3]
    fragments = fill(name, [0], [0], ONE[kind_sf], ONE[kind_sf])
    fragments[2 + operand][4 * 3] = NAN_SCALE[kind_sf]  # lane 12 has the scales of row 3, or of column 3
    d = agree(library, name, fragments, [1.0] * 128)
    for (row, column), (at, _) in modelled(name, fragments, [1.0] * 128).items():
        assert isnan(d[at]) == ((row, column)[operand] == 3)


@pytest.mark.parametrize(("name", "operand"), [(name, i) for name in KINDS for i in (0, 1) if KINDS[name][1 + i] == "e4m3"])
def test_nan_element_affects_its_row_or_column_only(library: ctypes.CDLL, name: str, operand: int) -> None:
    """Both e4m3 NaN codes, against zeros and ordinary numbers."""
    kind_sf = KINDS[name][3]
    for code in (0x7F, 0xFF):
        fragments = fill(name, [0], [0], ONE[kind_sf], ONE[kind_sf])
        fragments[operand][(4, 2)[operand] * 4 * 3] = code  # the first element of row 3, or of column 3
        d = agree(library, name, fragments, [1.0] * 128)
        for (row, column), (at, _) in modelled(name, fragments, [1.0] * 128).items():
            assert isnan(d[at]) == ((row, column)[operand] == 3)
