"""The torch operators ``sm120kit::gemm`` and ``sm120kit::grouped_gemm``: checks, shapes for tracing, CPU and CUDA."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from sm120kit_kernels import library, reference
from sm120kit_kernels.formats import ROWS, Format, get, round_up, scale_shape

_K, _N = 32, 8
"""K and N must be multiples of these: TMA requires rows of A, B and D to start at multiples of 16 bytes."""


def gemm(
    a: Tensor,
    b: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    alpha: Tensor | None = None,
    *,
    format: str = "nvfp4",
    tile: str = "",
) -> Tensor:
    """``alpha * A @ B.T`` as bfloat16 ``[M, N]``.

    ``a`` is ``[M, K]`` and ``b`` ``[N, K]``: FP4 as uint8 with two values per byte, FP8 as float8_e4m3fn. Scale factors have
    the layout of :func:`~sm120kit_kernels.swizzle_scales`. ``alpha`` is one float32 on the same device, 1 by default. ``tile``,
    such as ``128x128x128``, selects a compiled kernel; CPU tensors use the reference, which ignores it.
    """
    if alpha is None:
        alpha = torch.ones(1, dtype=torch.float32, device=a.device)
    d: Tensor = torch.ops.sm120kit.gemm(a, b, a_scales, b_scales, alpha, format, tile)
    return d


def grouped_gemm(
    a: Tensor,
    b: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    offsets: Tensor,
    alpha: Tensor | None = None,
    *,
    format: str = "nvfp4",
    tile: str = "",
) -> Tensor:
    """``alpha[g] * A_g @ B_g.T`` for the rows of each group, as bfloat16 ``[M, N]``, M being the rows of all groups together.

    ``b`` is ``[groups, N, K]``; ``offsets`` are ``groups + 1`` int32 on the same device, from 0 to M: group g has rows
    ``offsets[g]:offsets[g + 1]`` and may be empty. ``a_scales`` have the layout of
    :func:`~sm120kit_kernels.swizzle_grouped_scales`, optionally in a longer buffer; ``b_scales`` are ``[groups, ...]``, each
    with the layout of :func:`~sm120kit_kernels.swizzle_scales`. ``alpha`` is one float32 per group. On CUDA only the GPU reads
    ``offsets``: the call does not wait, and wrong offsets stop the kernel.
    """
    if alpha is None:
        alpha = torch.ones(b.shape[:1], dtype=torch.float32, device=a.device)
    d: Tensor = torch.ops.sm120kit.grouped_gemm(a, b, a_scales, b_scales, offsets, alpha, format, tile)
    return d


@torch.library.custom_op("sm120kit::gemm", mutates_args=(), device_types="cpu")
def _gemm(a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, alpha: Tensor, format: str, tile: str) -> Tensor:
    _check_gemm(a, b, a_scales, b_scales, alpha, format)
    return reference.gemm(a, b, a_scales, b_scales, alpha, format)


@_gemm.register_fake
def _(a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, alpha: Tensor, format: str, tile: str) -> Tensor:
    _check_gemm(a, b, a_scales, b_scales, alpha, format)
    return a.new_empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16)


@_gemm.register_kernel("cuda")
def _(a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, alpha: Tensor, format: str, tile: str) -> Tensor:
    form = _check_gemm(a, b, a_scales, b_scales, alpha, format)
    name = library.choose(format, "dense", tile)
    d = a.new_empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16)
    if d.numel():
        library.launch(name, a, b, a_scales, b_scales, alpha, alpha, d, a.shape[1] * form.packed, 1)
    return d


@torch.library.custom_op("sm120kit::grouped_gemm", mutates_args=(), device_types="cpu")
def _grouped_gemm(
    a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, offsets: Tensor, alpha: Tensor, format: str, tile: str
) -> Tensor:
    _check_grouped(a, b, a_scales, b_scales, offsets, alpha, format)
    bounds = offsets.tolist()
    if bounds[0] != 0 or bounds[-1] != a.shape[0] or bounds != sorted(bounds):
        raise ValueError(f"offsets={bounds} do not rise from 0 to the {a.shape[0]} rows of a")
    rows = sum(round_up(end - start, ROWS) for start, end in itertools.pairwise(bounds))
    if a_scales.shape[0] < rows:
        raise ValueError(
            f"a_scales has {a_scales.shape[0]} rows; these groups, each in blocks of {ROWS} rows, need {rows} "
            "(swizzle_grouped_scales)"
        )
    return reference.grouped_gemm(a, b, a_scales, b_scales, offsets, alpha, format)


@_grouped_gemm.register_fake
def _(
    a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, offsets: Tensor, alpha: Tensor, format: str, tile: str
) -> Tensor:
    _check_grouped(a, b, a_scales, b_scales, offsets, alpha, format)
    return a.new_empty((a.shape[0], b.shape[1]), dtype=torch.bfloat16)


@_grouped_gemm.register_kernel("cuda")
def _(
    a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, offsets: Tensor, alpha: Tensor, format: str, tile: str
) -> Tensor:
    form = _check_grouped(a, b, a_scales, b_scales, offsets, alpha, format)
    name = library.choose(format, "grouped", tile)
    d = a.new_empty((a.shape[0], b.shape[1]), dtype=torch.bfloat16)
    if d.numel():
        library.launch(name, a, b, a_scales, b_scales, alpha, offsets, d, a.shape[1] * form.packed, b.shape[0])
    return d


def _check_gemm(a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, alpha: Tensor, format: str) -> Format:
    """Check the operands; errors contain the value and the supported values."""
    form = get(format)
    _check_values("a", a, form, 2)
    _check_values("b", b, form, 2)
    _check_same_k(a, b, form)
    _check_n(b.shape[0])
    k = a.shape[1] * form.packed
    _check_scales("a_scales", a_scales, scale_shape(a.shape[0], k, form), form)
    _check_scales("b_scales", b_scales, scale_shape(b.shape[0], k, form), form)
    _check_alpha(alpha, 1)
    _check_devices(a=a, b=b, a_scales=a_scales, b_scales=b_scales, alpha=alpha)
    return form


def _check_grouped(
    a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, offsets: Tensor, alpha: Tensor, format: str
) -> Format:
    form = get(format)
    _check_values("a", a, form, 2)
    _check_values("b", b, form, 3)
    _check_same_k(a, b, form)
    groups, n = b.shape[0], b.shape[1]
    _check_n(n)
    if groups == 0:
        raise ValueError("b has no groups; expected [groups, N, K] with at least one")
    k = a.shape[1] * form.packed
    high, wide = scale_shape(n, k, form)
    _check_scales("b_scales", b_scales, (groups, high, wide), form)
    if a_scales.dim() != 2 or a_scales.shape[1] != wide or a_scales.shape[0] % ROWS:
        raise ValueError(
            f"a_scales has shape {tuple(a_scales.shape)}; expected [rows, {wide}] with rows a multiple of {ROWS} "
            "(swizzle_grouped_scales)"
        )
    _check_scales("a_scales", a_scales, tuple(a_scales.shape), form)
    if offsets.dtype != torch.int32 or tuple(offsets.shape) != (groups + 1,) or not offsets.is_contiguous():
        raise ValueError(
            f"offsets is {offsets.dtype} of shape {tuple(offsets.shape)}; expected contiguous int32 of shape ({groups + 1},)"
        )
    _check_alpha(alpha, groups)
    _check_devices(a=a, b=b, a_scales=a_scales, b_scales=b_scales, offsets=offsets, alpha=alpha)
    return form


def _check_values(name: str, tensor: Tensor, form: Format, dimensions: int) -> None:
    types = (form.value_type, *((torch.float4_e2m1fn_x2,) if form.packed == 2 and hasattr(torch, "float4_e2m1fn_x2") else ()))
    if tensor.dtype not in types:
        raise TypeError(f"{name} is {tensor.dtype}; {form.name} values are {' or '.join(map(str, types))}")
    if tensor.dim() != dimensions:
        expected = "[rows, K]" if dimensions == 2 else "[groups, N, K]"
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {expected}")
    k = tensor.shape[-1] * form.packed
    if k == 0 or k % _K:
        raise ValueError(f"{name} has K={k}; K must be a positive multiple of {_K}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}; it must be contiguous in rows of K")


def _check_same_k(a: Tensor, b: Tensor, form: Format) -> None:
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(f"a has K={a.shape[-1] * form.packed} and b has K={b.shape[-1] * form.packed}; they must be equal")


def _check_n(n: int) -> None:
    if n == 0 or n % _N:
        raise ValueError(f"b has N={n}; N must be a positive multiple of {_N}")


def _check_scales(name: str, tensor: Tensor, shape: tuple[int, ...], form: Format) -> None:
    if tensor.dtype not in (form.scale_type, torch.uint8):
        raise TypeError(f"{name} is {tensor.dtype}; scale factors of {form.name} are {form.scale_type} (or its bytes as uint8)")
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; expected {shape}: scale factors in blocks of 128x4 (swizzle_scales)"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}; it must be contiguous")


def _check_alpha(alpha: Tensor, size: int) -> None:
    if alpha.dtype != torch.float32 or alpha.numel() != size or not alpha.is_contiguous():
        raise ValueError(f"alpha is {alpha.dtype} of shape {tuple(alpha.shape)}; expected {size} contiguous float32")


def _check_devices(**tensors: Tensor) -> None:
    devices = {name: str(tensor.device) for name, tensor in tensors.items()}
    if len(set(devices.values())) > 1:
        raise ValueError(f"all tensors must be on one device; they are on {devices}")
