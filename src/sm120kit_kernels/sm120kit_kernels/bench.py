"""``python -m sm120kit_kernels.bench``: compare every kernel with the reference bit for bit, and time it against libraries.

Times are measured on an SM12x only. On any other GPU that can run this library, only the numbers are compared; without such a
GPU, the program exits with code 2.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Generator, Tensor

from sm120kit_kernels import exact, library, reference
from sm120kit_kernels.formats import get, swizzle_grouped_scales, swizzle_scales
from sm120kit_kernels.operators import gemm, grouped_gemm

DENSE = ((128, 128, 128), (1, 8, 32), (1, 128, 512), (200, 264, 96), (333, 1000, 160), (512, 384, 1024))
"""M, N, K to compare: complete tiles, single rows, ragged edges, K that is no multiple of a tile."""
GROUPED = (
    ((128, 128), 128, 128),
    ((0, 1, 0, 200, 7, 0), 264, 96),
    ((130, 0, 0, 3), 136, 640),
    (tuple((group * 37) % 65 for group in range(32)), 256, 1024),
    ((0, 0, 5), 8, 32),
)
"""Rows of each group, N and K: uneven groups, empty groups at the start, in the middle and at the end, single rows."""
TIMED = ((1, 4096, 4096), (16, 4096, 4096), (128, 4096, 4096), (4096, 4096, 4096), (8192, 8192, 8192))
FLUSH_BYTES = 256 * 2**20
"""Bytes written between two runs, so that no operand is in the L2 cache (96 MB on GB202)."""


def compare(name: str, device: torch.device, seed: int = 0) -> Iterator[tuple[str, int, int]]:
    """Run a kernel on all its shapes; yields the shape, the count of outputs that differ, and of all outputs."""
    format, family, tile = name.split("_")
    for number, shape in enumerate(DENSE if family == "dense" else GROUPED):
        generator = Generator().manual_seed(1000 * seed + number)
        rows, n, k = shape
        sizes = (rows,) if isinstance(rows, int) else rows
        ours, expected = _pair(sizes, n, k, format, tile, family == "grouped", generator, device)
        # As bytes, because NaN differs from itself.
        differ = int((ours.view(torch.int16) != expected.view(torch.int16)).sum())
        yield f"{'+'.join(map(str, sizes))} x {n} x {k}", differ, expected.numel()


def _pair(
    sizes: tuple[int, ...], n: int, k: int, format: str, tile: str, grouped: bool, generator: Generator, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The outputs of the kernel and of the reference."""
    a = exact.operand(sum(sizes), k, format, generator)
    bs = [exact.operand(n, k, format, generator) for _ in sizes]
    if not all(exact.is_exact(a, b, format) for b in bs):
        raise AssertionError(f"operands of {sizes} x {n} x {k} are not exact in float32")
    alpha = torch.tensor([2.0 ** (group % 3 - 1) for group in range(len(sizes))]).to(device)
    if not grouped:
        operands = tuple(x.to(device) for x in (a[0], bs[0][0], swizzle_scales(a[1]), swizzle_scales(bs[0][1])))
        return gemm(*operands, alpha, format=format, tile=tile), reference.gemm(*operands, alpha, format)
    offsets = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32)
    b = torch.stack([values for values, _ in bs])
    b_scales = torch.stack([swizzle_scales(factors) for _, factors in bs])
    operands = tuple(x.to(device) for x in (a[0], b, swizzle_grouped_scales(a[1], offsets), b_scales, offsets))
    return (
        grouped_gemm(*operands, alpha, format=format, tile=tile),
        reference.grouped_gemm(*operands, alpha, format),
    )


def competing_calls(format: str, m: int, n: int, k: int, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    """Calls that compute the same product, by name, of this and other installed libraries."""
    generator = Generator().manual_seed(m)
    (a, a_factors), (b, b_factors) = (exact.operand(rows, k, format, generator) for rows in (m, n))
    a, b, a_scales, b_scales = (x.to(device) for x in (a, b, swizzle_scales(a_factors), swizzle_scales(b_factors)))
    alpha = torch.ones(1, device=device)
    calls: dict[str, Callable[[], Tensor]] = {}
    for name in library.kernels():
        if name.startswith(f"{format}_dense_"):
            tile = name.rsplit("_", 1)[1]
            calls[f"sm120kit {tile}"] = lambda tile=tile: gemm(a, b, a_scales, b_scales, alpha, format=format, tile=tile)
    if format == "nvfp4":
        try:
            from flashinfer import mm_fp4
        except ImportError:
            pass
        else:
            factors = a_scales.view(torch.uint8), b_scales.view(torch.uint8).T
            calls["flashinfer mm_fp4 cutlass"] = lambda: mm_fp4(a, b.T, *factors, alpha, torch.bfloat16, backend="cutlass")
    form = get(format)
    if form.packed == 1 or hasattr(torch, "float4_e2m1fn_x2"):
        kind = form.value_type if form.packed == 1 else torch.float4_e2m1fn_x2
        left, right = a.view(kind), b.view(kind).T
        calls["torch _scaled_mm"] = lambda: torch._scaled_mm(
            left, right, scale_a=a_scales.flatten(), scale_b=b_scales.flatten(), out_dtype=torch.bfloat16
        )
    wide, high = torch.randn(m, k, device=device).bfloat16(), torch.randn(n, k, device=device).bfloat16()
    calls["torch bfloat16 matmul"] = lambda: wide @ high.T
    return calls


def microseconds(call: Callable[[], Tensor], repeats: int) -> float:
    """Median time of a call on the GPU, with a cold L2 cache."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for _ in range(5):
        call()
    spans = []
    for _ in range(repeats):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        spans.append(start.elapsed_time(end) * 1000)
    return sorted(spans)[len(spans) // 2]


def time_all(formats: list[str], shapes: list[tuple[int, int, int]], repeats: int, device: torch.device) -> None:
    """Print a line per format, shape and call, with its time, its error, or a note that its result differs."""
    for format, (m, n, k) in itertools.product(formats, shapes):
        print(f"{format} {m} x {n} x {k}")
        calls = competing_calls(format, m, n, k, device)
        ours = next((call for name, call in calls.items() if name.startswith("sm120kit")), None)
        for name, call in calls.items():
            try:
                result = call()
                spent = microseconds(call, repeats)
            except Exception as error:
                print(f"  {name:28} not timed: {str(error).splitlines()[0][:90]}")
                continue
            same = "matmul" in name or ours is None or bool(torch.allclose(result, ours(), rtol=1e-2, atol=0))
            remark = "" if same else "; its result differs from ours by more than 1 %"
            print(f"  {name:28} {spent:9.1f} us {2 * m * n * k / spent / 1e6:9.1f} TFLOP/s{remark}")


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 when all compared outputs are equal, 1 when some differ, 2 when nothing could be compared."""
    parser = argparse.ArgumentParser(prog="python -m sm120kit_kernels.bench", description=__doc__)
    parser.add_argument("--shape", action="append", type=_shape, metavar="MxNxK", help="time this product; may be repeated")
    parser.add_argument("--repeats", type=int, default=30, help="runs per time, of which the median is shown")
    parser.add_argument("--no-time", action="store_true", help="compare only")
    options = parser.parse_args(argv)
    shapes = options.shape or list(TIMED)
    print(f"sm120kit-kernels {library.build_info()['version']}")
    print(f"kernels: {', '.join(library.kernels()) or 'none'}; for {', '.join(library.archs()) or 'no GPU'}")
    problem = _problem()
    if problem:
        print(f"unverified on SM120: nothing was run: {problem}")
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    capability = torch.cuda.get_device_capability(device)
    gpu = f"{torch.cuda.get_device_name(device)}, compute capability {capability[0]}.{capability[1]}"
    wrong = 0
    for name in library.kernels():
        for shape, differ, outputs in compare(name, device):
            wrong += differ
            print(f"{name} {shape}: {'equal' if not differ else f'{differ} DIFFER'} of {outputs} outputs")
    print(f"{'every output has the bits of the reference' if not wrong else f'{wrong} outputs DIFFER'} on {gpu}")
    if capability[0] != 12:
        print("unverified on SM120, and not timed: this GPU is not an SM12x")
    elif not options.no_time and not wrong:
        formats = sorted({name.split("_")[0] for name in library.kernels() if "_dense_" in name})
        time_all(formats, shapes, options.repeats, device)
    return 1 if wrong else 0


def _shape(text: str) -> tuple[int, int, int]:
    """``16x4096x4096`` as M, N, K."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
    if not match or int(match[2]) % 8 or int(match[3]) % 32:
        raise argparse.ArgumentTypeError(f"{text!r} is not MxNxK with N a multiple of 8 and K of 32, such as 16x4096x4096")
    return int(match[1]), int(match[2]), int(match[3])


def _problem() -> str:
    """The reason why no kernel can run; empty if kernels can run."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA GPU"
    try:
        library.load()
        library.multiprocessors(torch.cuda.current_device())
    except RuntimeError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    sys.exit(main())
