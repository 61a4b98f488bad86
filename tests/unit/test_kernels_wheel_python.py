"""The Python code of the kernel wheel: formats compared by bits, layouts by formula, rounding by trying every value."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "src" / "sm120kit_kernels"))

from sm120kit_kernels import (
    dequantize,
    exact,
    global_scale,
    library,
    quantize,
    swizzle_grouped_scales,
    swizzle_scales,
    unswizzle_scales,
)


def minifloat(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """The value of a code by IEEE 754, without infinities."""
    mantissa = code & ((1 << mantissa_bits) - 1)
    exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) & 1 else 1.0
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (2**mantissa_bits + mantissa) * 2.0 ** (exponent - bias - mantissa_bits)


def e2m1(code: int) -> float:
    return minifloat(code, 2, 1, 1)


def e4m3(code: int) -> float:
    return minifloat(code, 4, 3, 7)


def every_byte(columns: int) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).repeat_interleave(columns).reshape(256, columns)


@pytest.mark.parametrize(("format", "scale"), [("nvfp4", e4m3), ("mxfp4", lambda code: 2.0 ** (code - 127))])
def test_dequantize_all_fp4_codes_with_all_scale_factors(format, scale):
    factors = torch.arange(256, dtype=torch.uint8)
    valid = [code for code in range(256) if code not in ((127, 255) if format == "nvfp4" else (255,))]
    vector = 16 if format == "nvfp4" else 32
    values = torch.arange(256, dtype=torch.uint8).reshape(1, -1).repeat(len(valid), 1)
    rows = factors[valid].reshape(-1, 1).repeat(1, 512 // vector)
    result = dequantize(values, rows, format)
    for row, code in enumerate(valid):
        expected = [e2m1(byte >> shift & 15) * scale(code) for byte in range(256) for shift in (0, 4)]
        assert result[row].tolist() == expected


def test_dequantize_all_fp8_codes():
    codes = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)[:224].reshape(1, -1)
    result = dequantize(codes.view(torch.float8_e4m3fn), torch.full((1, 7), 128, dtype=torch.uint8), "mxfp8")
    assert result[0].tolist() == [2 * e4m3(code) for code in codes[0].tolist()]


def test_scale_factor_nan_stays_nan():
    assert dequantize(torch.zeros(1, 16, dtype=torch.uint8), torch.full((1, 1), 255, dtype=torch.uint8), "mxfp4").isnan().all()
    assert dequantize(torch.zeros(1, 8, dtype=torch.uint8), torch.full((1, 1), 127, dtype=torch.uint8)).isnan().all()


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (128, 4), (129, 5), (300, 10)])
def test_swizzle_follows_the_formula_of_the_layout(rows, columns):
    scales = torch.randint(1, 256, (rows, columns), dtype=torch.uint8)
    blocks = swizzle_scales(scales)
    high, wide = -(-rows // 128) * 128, -(-columns // 4) * 4
    expected = [0] * (high * wide)
    for r in range(rows):
        for c in range(columns):
            at = ((r // 128) * (wide // 4) + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4
            expected[at] = int(scales[r, c])
    assert blocks.shape == (high, wide) and blocks.flatten().tolist() == expected
    assert torch.equal(unswizzle_scales(blocks, rows, columns), scales)


def test_swizzle_keeps_the_type_and_rejects_other_shapes():
    assert swizzle_scales(torch.zeros(3, 3).to(torch.float8_e4m3fn)).dtype == torch.float8_e4m3fn
    with pytest.raises(ValueError, match=r"shape \(4,\)"):
        swizzle_scales(torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"\(128, 4\).*200x8.*\(256, 8\)"):
        unswizzle_scales(torch.zeros(128, 4, dtype=torch.uint8), 200, 8)


def test_groups_have_separate_blocks():
    scales = torch.randint(0, 256, (140, 4), dtype=torch.uint8)
    blocks = swizzle_grouped_scales(scales, torch.tensor([0, 3, 3, 140]))
    assert blocks.shape == (128 + 256, 4)
    assert torch.equal(unswizzle_scales(blocks[:128], 3, 4), scales[:3])
    assert torch.equal(unswizzle_scales(blocks[128:], 137, 4), scales[3:])


def test_fp4_rounds_to_the_nearest_and_ties_to_even():
    """Compared with the nearest of all eight values, on a grid that contains every tie."""
    grid = torch.arange(-6, 6.001, 1 / 64)
    x = torch.zeros(grid.numel(), 32)
    x[:, 0], x[:, 1] = grid, 6.0  # 6 makes the scale factor 1
    values, factors = quantize(x, "mxfp4")
    assert factors.view(torch.uint8).eq(127).all()
    for number, got in zip(grid.tolist(), values[:, 0].tolist(), strict=True):
        distances = {code: abs(e2m1(code) - abs(number)) for code in range(8)}
        nearest = [code for code in range(8) if distances[code] == min(distances.values())]
        expected = nearest[0] if len(nearest) == 1 else next(code for code in nearest if code % 2 == 0)
        assert got & 7 == expected, number
        assert got >> 4 == 7, "the upper nibble is the next value"
        assert bool(got & 8) == (number < 0)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8"])
def test_representable_values_round_trip(format):
    values, factors = exact.operand(64, 256, format, torch.Generator().manual_seed(3))
    # quantize reproduces a scale factor if its block has a value near the largest.
    x = dequantize(values, factors, format).float()
    if format == "nvfp4":
        x[:, ::16] = 6.0 * factors.float()
    else:
        x[:, ::32] = (6.0 if format == "mxfp4" else 448.0) * torch.exp2(factors.view(torch.uint8).float() - 127)
    assert torch.equal(dequantize(*quantize(x, format), format).float(), x)


@pytest.mark.parametrize(("format", "bound"), [("nvfp4", 0.11), ("mxfp4", 0.13), ("mxfp8", 0.035)])
def test_quantization_error(format, bound):
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    scale = global_scale(x) if format == "nvfp4" else 1.0
    back = dequantize(*quantize(x, format, scale), format) / float(scale)
    assert float((back - x).norm() / x.norm()) < bound


def test_zeros_and_extremes_stay_finite():
    x = torch.zeros(3, 32)
    x[1], x[2, 5] = 1e-38, torch.finfo(torch.float32).max
    for format in ("nvfp4", "mxfp4", "mxfp8"):
        back = dequantize(*quantize(x, format), format)
        assert back.isfinite().all() and back[0].eq(0).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(2, 40),), "K a multiple of 32"),
        ((torch.zeros(2, 32, dtype=torch.int32),), "int32"),
        ((torch.full((1, 32), torch.nan),), "not finite"),
        ((torch.zeros(1, 32), "mxfp8", 2.0), "needs none"),
        ((torch.zeros(1, 32), "fp3"), "'fp3' is not supported; formats: nvfp4, mxfp4, mxfp8"),
    ],
)
def test_quantize_rejects_invalid_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        quantize(*arguments)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8"])
def test_exact_operands_are_exact(format):
    """Sums of the terms in float32, forwards and backwards, equal the float64 sums."""
    generator = torch.Generator().manual_seed(7)
    a, b = (exact.operand(4, exact.LARGEST_K, format, generator) for _ in range(2))
    assert exact.is_exact(a, b, format)
    terms = dequantize(*a, format)[:, None] * dequantize(*b, format)[None]
    assert torch.equal(terms.float().double(), terms)
    for order in (terms, terms.flip(-1)):
        assert torch.equal(torch.cumsum(order.float(), -1)[..., -1].double(), terms.sum(-1))
    assert not exact.is_exact((a[0], torch.full_like(a[1].view(torch.uint8), 0x7E if format == "nvfp4" else 160)), b, format)


@pytest.mark.parametrize(
    ("arch", "runs"),
    [
        ("sm_120f", {(12, 0), (12, 1)}),
        ("sm_120a", {(12, 0)}),
        ("sm_121a", {(12, 1)}),
        ("sm_90a", {(9, 0)}),
        ("sm_100f", {(10, 0), (10, 3)}),
    ],
)
def test_runs_on_by_arch_and_capability(arch, runs):
    everything = {(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)}
    assert {gpu for gpu in everything if library.runs_on(arch, gpu)} == runs


def test_package_without_compiled_kernels():
    assert library.kernels() == () and library.archs() == ()
    with pytest.raises(RuntimeError, match=r"no compiled kernels.*docs/build.md"):
        library.load()
