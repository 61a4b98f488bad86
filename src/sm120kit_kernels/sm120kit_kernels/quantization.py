"""Convert real numbers to block-scaled formats and back, in plain torch; for tests and weights, not optimized."""

from __future__ import annotations

import torch
from torch import Tensor

from sm120kit_kernels.formats import E2M1, Format, get

_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Midpoints between neighbouring values of E2M1; a value at a midpoint is rounded to the neighbour with the even code."""


def global_scale(x: Tensor) -> Tensor:
    """The factor with which NVFP4 uses the full range of its scale factors: ``448 * 6 / max|x|`` as one float32."""
    return (448.0 * 6.0) / x.detach().abs().amax().float().clamp_min(torch.finfo(torch.float32).tiny)


def quantize(x: Tensor, format: str = "nvfp4", scale: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """Round a matrix ``[rows, K]`` to a format. Returns values and scale factors ``[rows, K / vector]``, not yet swizzled.

    ``x`` is about ``dequantize(values, factors) / scale``. ``scale`` is for NVFP4 only, see :func:`global_scale`; multiply
    ``alpha`` of the product by its inverse. MX formats use the power of two of the OCP specification (section 6.3).
    """
    form = get(format)
    if x.dim() != 2 or x.shape[1] % 32 or not x.is_floating_point():
        raise ValueError(
            f"x is {x.dtype} of shape {tuple(x.shape)}; expected a floating-point [rows, K] with K a multiple of 32"
        )
    if not bool(torch.isfinite(x).all()):
        raise ValueError("x has values that are not finite; block-scaled formats cannot represent them")
    if form.name != "nvfp4" and not (isinstance(scale, float) and scale == 1.0):
        raise ValueError(f"scale is for nvfp4; {form.name} has powers of two as scale factors and needs none")
    blocks = (x.float() * scale).reshape(x.shape[0], -1, form.vector)
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    if form.scale_type == torch.float8_e4m3fn:
        factors = (largest / form.largest).clamp_max(448.0).to(form.scale_type)
        real = factors.float()
    else:
        exponent = torch.frexp(largest).exponent - 1 - form.exponent
        codes = torch.where(largest > 0, exponent + 127, 127).clamp(0, 254)
        factors = codes.to(torch.uint8).view(form.scale_type)
        real = torch.ldexp(torch.ones_like(largest), codes - 127)
    scaled = torch.where(real > 0, blocks / real, 0.0).clamp(-form.largest, form.largest).reshape(x.shape)
    return _encode(scaled, form), factors.squeeze(-1)


def dequantize(values: Tensor, factors: Tensor, format: str = "nvfp4") -> Tensor:
    """The real numbers, exact, as float64 ``[rows, K]``; ``factors`` are ``[rows, K / vector]``, not swizzled."""
    form = get(format)
    if form.scale_type == torch.float8_e4m3fn:
        real = factors.view(form.scale_type).float().double()
    else:
        # 255 is NaN, all other codes are powers of two (OCP Microscaling Formats, section 5.4.1).
        codes = factors.view(torch.uint8).int()
        real = torch.ldexp(torch.ones_like(codes, dtype=torch.float64), codes - 127)
        real = torch.where(codes == 255, torch.nan, real)
    return _decode(values, form) * real.repeat_interleave(form.vector, dim=1)


def _encode(scaled: Tensor, form: Format) -> Tensor:
    if form.packed == 1:
        return scaled.to(form.value_type)
    size = scaled.abs()
    codes = torch.zeros_like(size, dtype=torch.uint8)
    for index, bound in enumerate(_BOUNDS):
        codes += size > bound if index % 2 == 0 else size >= bound
    codes |= torch.signbit(scaled).to(torch.uint8) << 3
    return codes[:, 0::2] | codes[:, 1::2] << 4


def _decode(values: Tensor, form: Format) -> Tensor:
    if form.packed == 1:
        return values.view(form.value_type).float().double()
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64, device=values.device)
    codes = values.view(torch.uint8).int()
    return table[torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)]
