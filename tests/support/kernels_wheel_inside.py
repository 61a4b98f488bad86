"""Tests of an installed sm120kit-kernels wheel; test_kernels_wheel.py runs them with the wheel that it builds.

The expected products come from an independent model: values by their bits, scale factors by the formula of their layout, sums
in float64, bfloat16 by its bits.
"""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch

import sm120kit_kernels as kernels
from sm120kit_kernels import bench, library

VECTOR = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}
FORMATS = tuple(VECTOR)


def minifloat(codes: np.ndarray, exponent_bits: int, mantissa_bits: int, bias: int) -> np.ndarray:
    mantissa = (codes & ((1 << mantissa_bits) - 1)).astype(np.float64)
    exponent = (codes >> mantissa_bits & ((1 << exponent_bits) - 1)).astype(np.int64)
    sign = np.where(codes >> (exponent_bits + mantissa_bits) & 1, -1.0, 1.0)
    normal = np.ldexp(1 + mantissa / 2**mantissa_bits, exponent - bias)
    return sign * np.where(exponent == 0, np.ldexp(mantissa, 1 - bias - mantissa_bits), normal)


def real(values: torch.Tensor, blocks: torch.Tensor, format: str) -> np.ndarray:
    """The matrix that values and swizzled scale factors represent."""
    stored = values.view(torch.uint8).numpy().astype(np.int64)
    if format == "mxfp8":
        matrix = minifloat(stored, 4, 3, 7)
    else:
        codes = np.stack((stored & 15, stored >> 4), axis=-1).reshape(stored.shape[0], -1)
        matrix = minifloat(codes, 2, 1, 1)
    rows, k = matrix.shape
    r, c = np.indices((rows, k))
    c //= VECTOR[format]
    wide = -(-k // VECTOR[format] // 4) * 4
    at = ((r // 128) * (wide // 4) + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4
    factors = blocks.view(torch.uint8).numpy().flatten().astype(np.int64)[at]
    return matrix * (minifloat(factors, 4, 3, 7) if format == "nvfp4" else np.exp2(factors.astype(np.float64) - 127))


def bfloat16_bits(x: np.ndarray) -> np.ndarray:
    """Round to the nearest bfloat16, ties to even."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def expected(a: np.ndarray, b: np.ndarray, alpha: float) -> np.ndarray:
    return bfloat16_bits((a @ b.T).astype(np.float32) * np.float32(alpha))


def bits(d: torch.Tensor) -> np.ndarray:
    return d.view(torch.int16).numpy().view(np.uint16)


def operand(rows: int, k: int, format: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return kernels.quantize(torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)), format)


def problem(m: int, n: int, k: int, format: str) -> tuple[torch.Tensor, ...]:
    (a, sa), (b, sb) = operand(m, k, format, 1), operand(n, k, format, 2)
    return a, b, kernels.swizzle_scales(sa), kernels.swizzle_scales(sb), torch.tensor([0.75])


def grouped_problem(sizes: tuple[int, ...], n: int, k: int, format: str) -> tuple[torch.Tensor, ...]:
    a, sa = operand(sum(sizes), k, format, 3)
    bs = [operand(n, k, format, 4 + group) for group in range(len(sizes))]
    offsets = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32)
    return (
        a,
        torch.stack([b for b, _ in bs]),
        kernels.swizzle_grouped_scales(sa, offsets),
        torch.stack([kernels.swizzle_scales(sb) for _, sb in bs]),
        offsets,
        torch.arange(1, len(sizes) + 1) / 4,
    )


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 32), (128, 128, 128), (200, 264, 96), (333, 40, 160)])
def test_gemm_on_the_cpu(m: int, n: int, k: int, format: str) -> None:
    a, b, sa, sb, alpha = problem(m, n, k, format)
    d = kernels.gemm(a, b, sa, sb, alpha, format=format)
    assert d.dtype == torch.bfloat16
    assert (bits(d) == expected(real(a, sa, format), real(b, sb, format), 0.75)).all()
    assert torch.equal(kernels.gemm(a, b, sa, sb, format=format), kernels.gemm(a, b, sa, sb, torch.ones(1), format=format))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("sizes", [(5,), (0, 1, 0, 200, 7, 0), (128, 128), (0, 0, 3)])
def test_grouped_gemm_on_the_cpu(sizes: tuple[int, ...], format: str) -> None:
    a, b, sa, sb, offsets, alpha = grouped_problem(sizes, 24, 96, format)
    d = kernels.grouped_gemm(a, b, sa, sb, offsets, alpha, format=format)
    at = 0
    for group, size in enumerate(sizes):
        start, high = int(offsets[group]), -(-size // 128) * 128
        left = real(a[start : start + size], sa[at : at + high], format) if size else np.zeros((0, 96))
        at += high
        assert (bits(d[start : start + size]) == expected(left, real(b[group], sb[group], format), (group + 1) / 4)).all()


def test_gemm_without_rows() -> None:
    a, b, sa, sb, alpha = problem(4, 8, 32, "nvfp4")
    assert kernels.gemm(a[:0], b, sa[:0], sb, alpha).shape == (0, 8)


@pytest.mark.parametrize("format", FORMATS)
def test_operators_trace_under_compile(format: str) -> None:
    """In one graph, with fake tensors of the output's shape and type, and with a dynamic M."""
    arguments = problem(40, 16, 64, format)

    def layer(*operands: torch.Tensor) -> torch.Tensor:
        return kernels.gemm(*operands, format=format).float().relu() + 1

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    assert torch.equal(compiled(*arguments), layer(*arguments))
    other = problem(300, 16, 64, format)
    assert torch.equal(compiled(*other), layer(*other))
    grouped = grouped_problem((3, 0, 9), 16, 64, format)
    step = torch.compile(lambda *x: kernels.grouped_gemm(*x, format=format) * 2, fullgraph=True, backend="eager")
    assert torch.equal(step(*grouped), kernels.grouped_gemm(*grouped, format=format) * 2)


def test_operators_pass_opcheck() -> None:
    """``opcheck`` tests schema, fake tensors and ahead-of-time tracing. It does not support FP8, hence bytes."""
    a, b, sa, sb, alpha = problem(40, 16, 64, "nvfp4")
    scales = sa.view(torch.uint8), sb.view(torch.uint8)
    torch.library.opcheck(torch.ops.sm120kit.gemm.default, (a, b, *scales, alpha, "nvfp4", ""))
    a, b, sa, sb, offsets, alpha = grouped_problem((3, 0, 9), 16, 64, "mxfp4")
    scales = sa.view(torch.uint8), sb.view(torch.uint8)
    torch.library.opcheck(torch.ops.sm120kit.grouped_gemm.default, (a, b, *scales, offsets, alpha, "mxfp4", ""))


def test_meta_tensors_have_output_shapes() -> None:
    arguments = [x.to("meta") for x in problem(40, 16, 64, "nvfp4")]
    d = kernels.gemm(*arguments)
    assert (d.shape, d.dtype, d.device.type) == ((40, 16), torch.bfloat16, "meta")


DENSE_FAULTS = {
    "format": ({"format": "fp4"}, ValueError, "'fp4' is not supported; formats: nvfp4, mxfp4, mxfp8"),
    "type": ({"a": torch.zeros(40, 32)}, TypeError, "a is torch.float32; nvfp4 values are torch.uint8"),
    "k": ({"a": torch.zeros(40, 20, dtype=torch.uint8)}, ValueError, "a has K=40; K must be a positive multiple of 32"),
    "no k": ({"a": torch.zeros(40, 0, dtype=torch.uint8)}, ValueError, "a has K=0"),
    "other k": ({"b": torch.zeros(16, 64, dtype=torch.uint8)}, ValueError, "a has K=64 and b has K=128"),
    "n": ({"b": torch.zeros(12, 32, dtype=torch.uint8)}, ValueError, "b has N=12; N must be a positive multiple of 8"),
    "dimensions": ({"a": torch.zeros(1, 40, 32, dtype=torch.uint8)}, ValueError, r"\(1, 40, 32\); expected \[rows, K\]"),
    "strides": (
        {"a": torch.zeros(32, 40, dtype=torch.uint8).T},
        ValueError,
        r"a has strides \(1, 40\); it must be contiguous",
    ),
    "scale layout": (
        {"a_scales": torch.zeros(40, 4, dtype=torch.uint8)},
        ValueError,
        r"\(40, 4\); expected \(128, 4\).*swizzle",
    ),
    "scale type": ({"b_scales": torch.zeros(128, 4)}, TypeError, "b_scales is torch.float32; .* are torch.float8_e4m3fn"),
    "alpha": ({"alpha": torch.ones(2)}, ValueError, r"alpha is torch.float32 of shape \(2,\); expected 1"),
    "alpha type": ({"alpha": torch.ones(1).double()}, ValueError, "alpha is torch.float64"),
    "device": ({"alpha": torch.ones(1, device="meta")}, ValueError, "on one device; they are on .*'alpha': 'meta'"),
}


@pytest.mark.parametrize("fault", DENSE_FAULTS)
def test_gemm_rejects_invalid_operands(fault: str) -> None:
    changed, error, message = DENSE_FAULTS[fault]
    valid = dict(zip(("a", "b", "a_scales", "b_scales", "alpha"), problem(40, 16, 64, "nvfp4"), strict=True))
    kernels.gemm(**valid)
    with pytest.raises(error, match=message):
        kernels.gemm(**{**valid, **changed})


GROUPED_FAULTS = {
    "groups": ({"b": torch.zeros(0, 16, 32, dtype=torch.uint8)}, "b has no groups"),
    "dimensions": ({"b": torch.zeros(16, 32, dtype=torch.uint8)}, r"expected \[groups, N, K\]"),
    "offsets type": ({"offsets": torch.tensor([0, 3, 3, 12])}, r"offsets is torch.int64 of shape \(4,\); expected"),
    "offsets size": ({"offsets": torch.tensor([0, 12], dtype=torch.int32)}, r"shape \(2,\); expected .* \(4,\)"),
    "offsets end": ({"offsets": torch.tensor([0, 3, 3, 13], dtype=torch.int32)}, "do not rise from 0 to the 12 rows"),
    "offsets fall": ({"offsets": torch.tensor([0, 4, 3, 12], dtype=torch.int32)}, "do not rise"),
    "scale rows": ({"a_scales": torch.zeros(128, 4, dtype=torch.uint8)}, "a_scales has 128 rows; .* need 256"),
    "scale layout": (
        {"a_scales": torch.zeros(12, 4, dtype=torch.uint8)},
        r"\(12, 4\); expected \[rows, 4\] with rows a multiple",
    ),
    "alpha": ({"alpha": torch.ones(1)}, "expected 3"),
}


@pytest.mark.parametrize("fault", GROUPED_FAULTS)
def test_grouped_gemm_rejects_invalid_operands(fault: str) -> None:
    changed, message = GROUPED_FAULTS[fault]
    names = ("a", "b", "a_scales", "b_scales", "offsets", "alpha")
    valid = dict(zip(names, grouped_problem((3, 0, 9), 16, 64, "nvfp4"), strict=True))
    kernels.grouped_gemm(**valid)
    with pytest.raises(ValueError, match=message):
        kernels.grouped_gemm(**{**valid, **changed})


def test_library_lists_its_kernels() -> None:
    assert kernels.build_info() == {"version": "0.1.0"} and kernels.kernels() and kernels.archs()
    assert all(library.load().shared_bytes(name) <= 101376 for name in kernels.kernels())
    for name in kernels.kernels():
        format, family, tile = name.split("_")
        assert library.choose(format, family, "") in kernels.kernels() and library.choose(format, family, tile) == name
        with pytest.raises(ValueError, match=f"no {family} {format} kernel has tile='9x9x9'; tiles: .*{tile}"):
            library.choose(format, family, "9x9x9")
    with pytest.raises(RuntimeError, match="no dense fp3 kernel was compiled"):
        library.choose("fp3", "dense", "")


@pytest.mark.parametrize("shape", ["16", "16x64", "16x12x64", "16x64x40", "0x64x64"])
def test_bench_rejects_invalid_shapes(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(["--shape", shape])
    assert f"'{shape}' is not MxNxK" in capsys.readouterr().err


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that the wheel was compiled for")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the other tests run on it")
def test_cuda_path_without_a_gpu_raises(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="CUDA device 0: "):
        library.load().multiprocessors(0)
    plain = torch.zeros(4, dtype=torch.uint8)
    name = kernels.kernels()[0]
    with pytest.raises(ValueError, match="must be on one CUDA device; one has device type 1"):
        library.load().launch(name, *[plain] * 6, plain.view(2, 2), plain, 64, 1, 1)
    with pytest.raises(ValueError, match="no kernel nothing was compiled"):
        library.load().workspace_bytes("nothing", 1, 1, 1, 1, 1)
    assert bench.main([]) == 2
    assert "unverified on SM120: nothing was run: torch sees no CUDA GPU" in capsys.readouterr().out


@on_gpu
@pytest.mark.parametrize("name", kernels.kernels())
def test_gpu_outputs_equal_the_reference(name: str) -> None:
    for seed in range(2):
        for shape, differ, outputs in bench.compare(name, torch.device("cuda"), seed):
            assert differ == 0, f"{shape}: {differ} of {outputs} differ"


@on_gpu
@pytest.mark.parametrize("name", kernels.kernels())
def test_gpu_streams_graphs_and_compile(name: str) -> None:
    """The kernel runs on the current stream, can be recorded in a graph that reads offsets at replay, and traces."""
    format, family, tile = name.split("_")
    call = kernels.gemm if family == "dense" else kernels.grouped_gemm
    inputs = problem(133, 264, 160, format) if family == "dense" else grouped_problem((66, 0, 67), 264, 160, format)
    operands = [x.cuda() for x in inputs]
    expected = call(*[x.cpu() for x in operands], format=format)

    def run() -> torch.Tensor:
        return call(*operands, format=format, tile=tile)

    def error(d: torch.Tensor) -> float:
        return float((d.cpu().double() - expected.double()).norm() / expected.double().norm())

    assert error(run()) < 2e-3
    side, values, copy = torch.cuda.Stream(), operands[0].view(torch.uint8), operands[0].view(torch.uint8).clone()
    values.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # a kernel on another stream would read the zeros
        values.copy_(copy)
        d = run()
    side.synchronize()
    assert error(d) < 2e-3
    with torch.cuda.stream(side):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            d = run()
    d.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert error(d) < 2e-3
    compiled = torch.compile(lambda *x: call(*x, format=format, tile=tile).float() * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*operands), run().float() * 2)


@on_gpu
@pytest.mark.parametrize("offsets", [[0, 3, 3, 13], [0, 4, 3, 12], [1, 4, 4, 12], [0, 3, 3, 12]])
def test_gpu_wrong_offsets_stop_the_kernel(offsets: list[int]) -> None:
    """In a separate process, because a stopped kernel destroys its CUDA context. The last case needs more scale factors."""
    name = next((name for name in kernels.kernels() if "_grouped_" in name), None)
    if name is None:
        pytest.skip("needs a grouped kernel")
    program = (
        "import sys, torch\n"
        "import sm120kit_kernels as kernels\n"
        f"format, offsets = {name.split('_')[0]!r}, {offsets!r}\n"
        "a, sa = kernels.quantize(torch.randn(12, 64), format)\n"
        "b, sb = kernels.quantize(torch.randn(16, 64), format)\n"
        "sa, sb = (kernels.swizzle_scales(x).view(torch.uint8) for x in (sa, sb))\n"
        "b, sb = torch.stack([b.view(torch.uint8)] * 3).view(b.dtype), torch.stack([sb] * 3)\n"
        "operands = (x.cuda() for x in (a, b, sa, sb, torch.tensor(offsets, dtype=torch.int32)))\n"
        "kernels.grouped_gemm(*operands, format=format)\n"
        "torch.cuda.synchronize()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode != 0 and "sm120kit_kernels: group" in done.stdout, done.stderr[-500:]
