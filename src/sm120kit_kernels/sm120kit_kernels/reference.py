"""Reference of the kernels in plain torch on any device: exact products, float64 sums, one rounding to bfloat16."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from sm120kit_kernels.formats import get, scale_shape, unswizzle_scales
from sm120kit_kernels.quantization import dequantize


def gemm(a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, alpha: Tensor, format: str) -> Tensor:
    """``alpha * A @ B.T``. The sum is rounded to float32, the type of the accumulator, before alpha and bfloat16."""
    form = get(format)
    factors = a.shape[1] * form.packed // form.vector
    left = dequantize(a, unswizzle_scales(a_scales, a.shape[0], factors), format)
    right = dequantize(b, unswizzle_scales(b_scales, b.shape[0], factors), format)
    return ((left @ right.T).float() * alpha.float()).to(torch.bfloat16)


def grouped_gemm(
    a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, offsets: Tensor, alpha: Tensor, format: str
) -> Tensor:
    """``alpha[g] * A_g @ B_g.T`` for the rows of each group, which has its own blocks of scale factors."""
    form = get(format)
    d = torch.empty((a.shape[0], b.shape[1]), dtype=torch.bfloat16, device=a.device)
    bounds = offsets.tolist()
    at = 0
    for group, (start, end) in enumerate(itertools.pairwise(bounds)):
        high, _ = scale_shape(end - start, a.shape[1] * form.packed, form)
        d[start:end] = gemm(a[start:end], b[group], a_scales[at : at + high], b_scales[group], alpha[group], format)
        at += high
    return d
