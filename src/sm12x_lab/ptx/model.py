"""A scalar model of the instructions, from the PTX ISA and independent of ``functions.cu``.

Registers are arrays ``uint32[case, lane, word]`` with 32 lanes. Matrices are taken apart by the fragment tables of the ISA and
multiplied as matrices; conversions search a table of all values of the format.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Words = NDArray[Any]  # of uint32
    Values = NDArray[Any]  # of float64

FORMATS = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15), "e2m3": (2, 3, 1), "e3m2": (3, 2, 3), "e2m1": (2, 1, 1)}
"""Exponent bits, mantissa bits and bias."""


@cache
def values(name: str) -> Values:
    """The value of each code of a format, ``ue8m0`` and ``ue4m3`` included; the sign bit of ue4m3 has no meaning."""
    import numpy as np

    if name == "ue8m0":
        return np.array([*(2.0 ** (code - 127) for code in range(255)), np.nan])
    if name == "ue4m3":
        return np.tile(np.abs(values("e4m3")[:128]), 2)
    exponent_bits, mantissa_bits, bias = FORMATS[name]
    table = []
    for code in range(2 ** (1 + exponent_bits + mantissa_bits)):
        sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
        exponent, mantissa = code >> mantissa_bits & (2**exponent_bits - 1), code & (2**mantissa_bits - 1)
        if name == "e4m3" and (exponent, mantissa) == (15, 7):
            value = np.nan
        elif name == "e5m2" and exponent == 31:
            value = np.nan if mantissa else np.inf
        elif exponent:
            value = (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)
        else:
            value = mantissa / 2**mantissa_bits * 2.0 ** (1 - bias)
        table.append(sign * value)
    return np.array(table)


def mma(a: Words, b: Words, c: Values, types: tuple[str, str], scales: tuple[Values, Values] | None = None) -> Values:
    """D as float64 before its rounding: ``[case, 16, 8]``; ``c`` has the same shape.

    ``a`` and ``b`` are registers. ``scales`` are those of A, ``[case, 16, vector]``, and of B, ``[case, 8, vector]``. The sum
    of all scaled products and C is exact; it is rounded to odd, so that rounding D is its only rounding.
    """
    import numpy as np

    bits = 4 if types == ("e2m1", "e2m1") and scales is not None and scales[0].shape[2] > 1 else 8
    left, right = _elements(a, types[0], bits, (0, 1)), _elements(b, types[1], bits, (0,))
    depth = left.shape[2]
    vectors = scales[0].shape[2] if scales else 1
    terms = []
    with np.errstate(all="ignore"):
        for vector in range(vectors):
            chosen = slice(vector * depth // vectors, (vector + 1) * depth // vectors)
            products = left[:, :, None, chosen] * right[:, None, :, chosen]
            scale = scales[0][:, :, None, vector] * scales[1][:, None, :, vector] if scales else np.ones(c.shape)
            if _sum_is_exact(types, depth):
                products = products.sum(axis=-1, keepdims=True)
            terms.append(products * scale[..., None])
        return _exact_sums(np.concatenate([*terms, c[..., None]], axis=-1))


def _sum_is_exact(types: tuple[str, str], depth: int) -> bool:
    """Whether sums of ``depth`` products have at most the 53 bits of float64."""
    import numpy as np

    last = sum(1 - FORMATS[name][2] - FORMATS[name][1] for name in types)
    largest = np.prod([np.nanmax(np.where(np.isinf(values(name)), 0, values(name))) for name in types]) * depth
    return bool(np.log2(largest) - last < 53)


def _exact_sums(terms: Values) -> Values:
    """The sums over the last axis, rounded to odd: of the two neighbours of a sum that float64 lacks, the odd one."""
    import numpy as np

    flat = terms.reshape(-1, terms.shape[-1])
    with np.errstate(invalid="ignore"):
        total = flat.sum(axis=-1)  # infinities and NaN
    finite = np.isfinite(total)
    rows = flat[finite].tolist()
    nearest = np.array([math.fsum(row) for row in rows], np.float64)
    rest = np.array([math.fsum((*row, -sum)) for row, sum in zip(rows, nearest.tolist(), strict=True)], np.float64)
    even = nearest.view(np.int64) % 2 == 0
    total[finite] = np.where((rest != 0) & even, np.nextafter(nearest, np.copysign(np.inf, rest)), nearest)
    return np.asarray(total.reshape(terms.shape[:-1]), np.float64)


def _elements(registers: Words, name: str, bits: int, halves: tuple[int, ...]) -> Values:
    """The matrix ``[case, row, k]`` of a fragment; ``halves`` are the groups of 8 rows: two for A, one for B (its columns)."""
    import numpy as np

    per_register = 32 // bits
    depth = 2 * 4 * per_register
    codes = np.zeros((registers.shape[0], 8 * len(halves), depth), np.uint32)
    for lane in range(32):
        group, p = divmod(lane, 4)
        for index in range(registers.shape[2]):
            high, half = divmod(index, len(halves))
            for element in range(per_register):
                k = high * depth // 2 + p * per_register + element
                codes[:, group + 8 * half, k] = registers[:, lane, index] >> np.uint32(bits * element) & np.uint32(2**bits - 1)
    if bits == 8 and name == "e2m1":
        codes >>= np.uint32(2)
    table = values(name)
    return np.asarray(table[codes & np.uint32(len(table) - 1)])


def scale_matrix(registers: Words, kind: str, count: int, rows: int, selectors: tuple[int, int]) -> Values:
    """The scales ``[case, row, vector]`` of A (16 rows) or B (8 columns); ``selectors`` are byte and thread."""
    import numpy as np

    byte, thread = selectors
    result = np.zeros((registers.shape[0], rows, count))
    for row in range(rows):
        lane = 4 * (row % 8) + (2 * thread + row // 8 if rows == 16 else thread)
        for vector in range(count):
            result[:, row, vector] = values(kind)[registers[:, lane] >> np.uint32(8 * (byte + vector)) & np.uint32(255)]
    return result


def accumulators(registers: Words, half: bool) -> Values:
    """C as a matrix ``[case, 16, 8]`` from 4 registers of fp32 or 2 of f16x2."""
    import numpy as np

    words = np.ascontiguousarray(registers)
    flat = (words.view(np.float16) if half else words.view(np.float32)).astype(np.float64)
    result = np.zeros((registers.shape[0], 16, 8))
    for lane in range(32):
        for index in range(4):
            result[:, lane // 4 + 8 * (index // 2), lane % 4 * 2 + index % 2] = flat[:, lane, index]
    return result


def fragments(matrix: Values, half: bool) -> Words:
    """D as registers, rounded once; NaN has the canonical code."""
    import numpy as np

    with np.errstate(all="ignore"):
        if half:
            codes: Any = matrix.astype(np.float16).view(np.uint16)
            codes = np.where(np.isnan(matrix), np.uint16(0x7FFF), codes)
        else:
            codes = matrix.astype(np.float32).view(np.uint32)
            codes = np.where(np.isnan(matrix), np.uint32(0x7FFFFFFF), codes)
    result = np.zeros((matrix.shape[0], 32, 4), codes.dtype)
    for lane in range(32):
        for index in range(4):
            result[:, lane, index] = codes[:, lane // 4 + 8 * (index // 2), lane % 4 * 2 + index % 2]
    return result.view(np.uint32)


def to_narrow(x: NDArray[np.float32], name: str, relu: bool) -> Words:
    """The codes nearest to ``x``, ties to even, saturated; NaN becomes the largest value. relu makes negative values +0."""
    import numpy as np

    table = values(name)
    positive = table[: len(table) // 2]
    magnitude = np.minimum(np.abs(x.astype(np.float64)), positive[-1])
    distance = np.abs(magnitude[..., None] - positive)
    nearest = np.argmin(distance, axis=-1)
    above = np.minimum(nearest + 1, len(positive) - 1)
    tie = (np.take_along_axis(distance, above[..., None], -1)[..., 0] == distance.min(axis=-1)) & (nearest % 2 == 1)
    codes = np.where(tie, above, nearest)
    negative = np.signbit(x)
    codes = np.where(negative, 0 if relu else codes + len(positive), codes)
    return np.where(np.isnan(x), len(positive) - 1, codes).astype(np.uint32)


def from_narrow(codes: Words, name: str, relu: bool) -> Words:
    """The f16 codes of elements; relu makes negative values +0."""
    import numpy as np

    result = values(name)[codes]
    return np.where(relu & np.signbit(result), 0.0, result).astype(np.float16).view(np.uint16).astype(np.uint32)


def to_ue8m0(x: NDArray[np.float32], up: bool, finite: bool) -> Words:
    """The exponents of ``|x|`` rounded towards zero or up; NaN is 255, and so is what exceeds 2^127 unless ``finite``."""
    import numpy as np

    magnitude = np.abs(x.astype(np.float64))
    with np.errstate(all="ignore"):
        exponent = np.log2(magnitude)
        exponent = np.ceil(exponent) if up else np.floor(exponent)
    # log2 is rounded: correct the neighbours of powers of two
    for _ in range(2):
        power = np.ldexp(1.0, np.clip(np.nan_to_num(exponent, neginf=-200, posinf=200), -200, 200).astype(int))
        if up:
            exponent = np.where(power < magnitude, exponent + 1, np.where(power / 2 >= magnitude, exponent - 1, exponent))
        else:
            exponent = np.where(power > magnitude, exponent - 1, np.where(power * 2 <= magnitude, exponent + 1, exponent))
    codes = np.clip(np.where(magnitude == 0, -200, exponent) + 127, 0, 254 if finite else 255)
    codes = np.where(np.isinf(magnitude), 254 if finite else 255, codes)
    return np.where(np.isnan(x), 255, codes).astype(np.uint32)


def from_ue8m0(codes: Words) -> Words:
    """The bf16 codes of powers of two; NaN is 0x7fff."""
    import numpy as np

    bits = values("ue8m0")[codes].astype(np.float32).view(np.uint32) >> np.uint32(16)
    return np.where(codes == 255, np.uint32(0x7FFF), bits)


def ldmatrix(rows: NDArray[np.uint8], lanes: Words, count: int, bits: int) -> Words:
    """Registers ``[case, 32, count]`` from rows of 16 bytes ``[case, 32, 16]``; ``lanes`` has each lane's row."""
    import numpy as np

    result = np.zeros((rows.shape[0], 32, count), np.uint32)
    stream = np.unpackbits(rows, axis=-1, bitorder="little")
    cases = np.arange(rows.shape[0])
    for matrix in range(count):
        for lane in range(32):
            row = stream[cases, lanes[:, 8 * matrix + lane // 4]]
            for byte in range(4):
                first = bits * (4 * (lane % 4) + byte)
                code = row[:, first : first + bits] @ (1 << np.arange(bits, dtype=np.uint32))
                result[:, lane, matrix] |= (code << (8 * byte)).astype(np.uint32)
    return result


def ldmatrix_transposed(rows: NDArray[np.uint8], lanes: Words, count: int, bits: int) -> Words:
    """Registers ``[case, 32, 2 * count]`` of ldmatrix.m16n16.trans; arguments as those of :func:`ldmatrix`."""
    import numpy as np

    stream = np.unpackbits(rows, axis=-1, bitorder="little")[:, :, : 16 * bits].reshape(*rows.shape[:2], 16, bits)
    codes = stream @ (1 << np.arange(bits, dtype=np.uint32))
    result = np.zeros((rows.shape[0], 32, 2 * count, 4), np.uint8)
    for matrix in range(count):
        elements = np.take_along_axis(codes, lanes[:, 16 * matrix : 16 * matrix + 16, None].astype(np.int64), axis=1)
        transposed = elements.transpose(0, 2, 1)  # [case, row, k], a fragment of A with k in bytes
        for half in range(2):
            fragment = transposed[:, 8 * half : 8 * half + 8].reshape(-1, 32, 4)
            result[:, :, 2 * matrix + half] = fragment
    return np.ascontiguousarray(result).view(np.uint32)[:, :, :, 0]


def stmatrix_transposed(registers: Words, lanes: Words, memory: NDArray[np.uint8]) -> Words:
    """The rows of 16 bytes ``[case, 32, 4]`` after stmatrix.m16n8.trans of ``registers[case, 32, matrix]``.

    ``lanes`` has each lane's row, ``memory[case, 32, 16]`` the content before.
    """
    import numpy as np

    memory = memory.copy()
    cases = np.arange(len(memory))
    for matrix in range(registers.shape[2]):
        for column in range(8):  # of the matrix, which is a row in memory
            target = lanes[:, 8 * matrix + column]
            for row in range(16):
                holder, byte = row % 8 * 4 + column // 2, row // 8 * 2 + column % 2
                memory[cases, target, row] = registers[:, holder, matrix] >> np.uint32(8 * byte) & np.uint32(255)
    return np.ascontiguousarray(memory).view(np.uint32)


def mixed(operation: str, rounding: str, saturate: bool, inputs: list[Words], of: str) -> Words:
    """add, sub or fma of one fp32 value, the last input; the others are codes of ``f16`` or ``bf16``."""
    import numpy as np

    narrow = [
        codes.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32) if of == "f16" else codes << np.uint32(16)
        for codes in inputs[:-1]
    ]
    result = f32x2(operation, rounding, False, [*narrow, inputs[-1]])
    if not saturate:
        return result
    with np.errstate(invalid="ignore"):
        clamped = np.clip(result.view(np.float32), 0, 1)
    return np.where(np.isnan(clamped), np.float32(0), clamped).astype(np.float32).view(np.uint32)


def f32x2(operation: str, rounding: str, ftz: bool, inputs: list[Words]) -> Words:
    """add, sub, mul or fma of one fp32 value each, with ``rn``, ``rz``, ``rm`` or ``rp``, exactly rounded (by fractions)."""
    import numpy as np

    flat = [words.reshape(-1) for words in inputs]
    codes = [_arithmetic(operation, rounding, ftz, *map(int, group)) for group in zip(*flat, strict=True)]
    return np.array(codes, np.uint32).reshape(inputs[0].shape)


def _arithmetic(operation: str, rounding: str, ftz: bool, *codes: int) -> int:
    import math
    import struct
    from fractions import Fraction

    def flushed(code: int) -> int:
        return code & 0x80000000 if ftz and not code & 0x7F800000 else code

    inputs = [struct.unpack("<f", struct.pack("<I", flushed(code)))[0] for code in codes]
    if operation == "sub":
        inputs[1] = -inputs[1]
    x, y, z = (1.0, *inputs) if operation in ("add", "sub") else (*inputs, -0.0) if operation == "mul" else inputs
    if operation == "mul":
        z = math.copysign(0.0, x * y) if not math.isnan(x * y) else 0.0
    if not all(map(math.isfinite, inputs)):
        with_infinity = x * y + z  # in double: infinities and NaN are the same there
        return 0x7FFFFFFF if math.isnan(with_infinity) else 0x7F800000 | (0x80000000 if with_infinity < 0 else 0)
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    if exact == 0:
        product_sign, other_sign = math.copysign(1, x) * math.copysign(1, y), math.copysign(1, z)
        negative = product_sign < 0 if product_sign == other_sign else rounding == "rm"
        return 0x80000000 if negative else 0
    sign, magnitude = exact < 0, abs(exact)
    exponent = max(_floor_log2(magnitude), -126)
    steps = magnitude / Fraction(2) ** (exponent - 23)
    whole = steps.numerator // steps.denominator
    rest = steps - whole
    away = {"rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1), "rz": False}
    whole += away.get(rounding, rest > 0 and (rounding == "rm") == sign)
    code: int = whole + (exponent + 126 << 23)  # a carry enters the exponent
    if code >= 0x7F800000:
        code = 0x7F800000 if rounding == "rn" or (rounding == "rp" and not sign) or (rounding == "rm" and sign) else 0x7F7FFFFF
    if ftz and code < 0x800000:
        code = 0
    return code | (0x80000000 if sign else 0)


def _floor_log2(value: Any) -> int:
    """The exponent of a positive fraction."""
    from fractions import Fraction

    guess: int = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if value >= Fraction(2) ** guess else guess - 1
