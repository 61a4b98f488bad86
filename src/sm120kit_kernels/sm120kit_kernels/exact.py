"""Random operands whose product is exact in float32 in any order, so that a kernel can be compared bit for bit.

Every term is a multiple of a small power of two, and the absolute terms of no output add up to more than 2**24 of these units.
Scale factors differ in every coordinate, because constant factors would hide errors of their layout.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from sm120kit_kernels.formats import get
from sm120kit_kernels.quantization import dequantize

LARGEST_K = 1024
"""The largest K with exact products of :func:`operand`; :func:`is_exact` checks a pair of operands."""

_UNIT = {"nvfp4": 2.0**-8, "mxfp4": 2.0**-2, "mxfp8": 2.0**-8}
"""Every term is a multiple of this unit, the product of the lowest bits of two values and two scale factors."""


def operand(rows: int, k: int, format: str, generator: Generator) -> tuple[Tensor, Tensor]:
    """Values and scale factors ``[rows, K / vector]``, on the CPU: all codes of FP4, 48 of E4M3, two binades of scale."""
    form = get(format)

    def random(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    if form.packed == 2:
        values = random(0, 256, rows, k // 2)
    else:
        # 0.5 to 3.75 in eighths and quarters of their binade, either sign.
        values = (random(0x30, 0x48, rows, k) | random(0, 2, rows, k) << 7).view(form.value_type)
    if form.scale_type == torch.float8_e4m3fn:
        factors = random(0x38, 0x48, rows, k // form.vector)
    else:
        factors = random(127, 129, rows, k // form.vector)
    return values, factors.view(form.scale_type)


def is_exact(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], format: str) -> bool:
    """Whether every partial sum of ``A @ B.T``, in any order, is a float32."""
    left, right = dequantize(*a, format).abs(), dequantize(*b, format).abs()
    return a[0].shape[0] == 0 or bool((left @ right.T).max() / _UNIT[format] <= 2.0**24)
