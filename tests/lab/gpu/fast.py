"""Speed and error of block-scaled MMAs under ``verify run --fast``: ``sm12x-lab run --fast -- python3 fast.py [JSON]``.

Products of 4096 x 4096 x 4096 by Triton's ``dot_scaled``, one kernel for each format. Prints TFLOP/s, the median of ten, and
the largest error of 64 rows against float64, relative to the sum of the magnitudes of an output's terms. ``--compile`` needs
no GPU: it prints how many block-scaled MMAs the PTX for SM120 of each format has.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import triton
import triton.language as tl

SIZE, BLOCK = 4096, 128
FORMATS = {
    "NVFP4": ("e2m1", "e2m1", 16),
    "MXFP4": ("e2m1", "e2m1", 32),
    "MXFP8": ("e4m3", "e4m3", 32),
    "MXFP8, e5m2": ("e5m2", "e5m2", 32),
    "FP8 x MXFP4": ("e4m3", "e2m1", 32),
}
"""Types of the elements, and elements that share a scale: ue4m3 for 16, ue8m0 for 32."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
DTYPES = {"e2m1": torch.uint8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@triton.jit
def product(  # noqa: PLR0913
    a, b, scales_a, scales_b, out, n, kind_a: tl.constexpr, kind_b: tl.constexpr, group: tl.constexpr, block: tl.constexpr
):
    """A tile of ``block`` x ``block`` of the product of two row-major matrices, the second transposed."""
    packed_a: tl.constexpr = 2 if kind_a == "e2m1" else 1
    packed_b: tl.constexpr = 2 if kind_b == "e2m1" else 1
    i, j = tl.program_id(0) * block + tl.arange(0, block), tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros((block, block), tl.float32)
    for k in tl.range(0, n, block, num_stages=2):
        inner_a, inner_b = k // packed_a + tl.arange(0, block // packed_a), k // packed_b + tl.arange(0, block // packed_b)
        factors = k // group + tl.arange(0, block // group)
        left = tl.load(a + i[:, None] * (n // packed_a) + inner_a[None, :])
        right = tl.load(b + j[None, :] * (n // packed_b) + inner_b[:, None])
        of_left = tl.load(scales_a + i[:, None] * (n // group) + factors[None, :])
        of_right = tl.load(scales_b + j[:, None] * (n // group) + factors[None, :])
        total = tl.dot_scaled(left, of_left, kind_a, right, of_right, kind_b, total)
    tl.store(out + i[:, None] * n + j[None, :], total)


def operand(kind: str, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a random matrix on the CPU."""
    elements = torch.randn(SIZE, SIZE).to(DTYPES[kind]) if kind != "e2m1" else torch.randint(0, 256, (SIZE, SIZE // 2)).byte()
    low, high = (0x20, 0x48) if group == 16 else (124, 131)
    return elements, torch.randint(low, high, (SIZE, SIZE // group)).byte()


def exact(codes: torch.Tensor, scales: torch.Tensor, kind: str, group: int) -> torch.Tensor:
    """Rows in float64."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64)
    values = table[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()] if kind == "e2m1" else codes.double()
    factors = scales.view(torch.float8_e4m3fn).double() if group == 16 else 2.0 ** (scales.double() - 127)
    return values * factors.repeat_interleave(group, -1)


def measured(kind_a: str, kind_b: str, group: int) -> tuple[float, float]:
    """TFLOP/s and the largest relative error."""
    operands = [operand(kind, group) for kind in (kind_a, kind_b)]
    stored = [[each.cuda() for each in pair] for pair in operands]
    scales = [pair[1].view(torch.float8_e4m3fn) if group == 16 else pair[1] for pair in stored]
    out = torch.empty(SIZE, SIZE, device="cuda")

    def run() -> None:
        grid = (SIZE // BLOCK, SIZE // BLOCK)
        product[grid](stored[0][0], stored[1][0], *scales, out, SIZE, kind_a, kind_b, group, BLOCK, num_warps=8)

    times = []
    for _ in range(13):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    left, right = (
        exact(pair[0][:64], pair[1][:64], kind, group) for pair, kind in zip(operands, (kind_a, kind_b), strict=True)
    )
    errors = (out[:64, :64].double().cpu() - left @ right.T).abs() / (left.abs() @ right.abs().T)
    return 2 * SIZE**3 / sorted(times[3:])[5] / 1e9, float(errors.max())


def compiled(kind_a: str, kind_b: str, group: int) -> str:
    """The PTX for SM120."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = {"e2m1": "*u8", "e4m3": "*fp8e4nv", "e5m2": "*fp8e5"}
    scale = "*fp8e4nv" if group == 16 else "*u8"
    types = {"a": names[kind_a], "b": names[kind_b], "scales_a": scale, "scales_b": scale, "out": "*fp32", "n": "i32"}
    constants = {"kind_a": kind_a, "kind_b": kind_b, "group": group, "block": BLOCK}
    divisible = {(at,): [["tt.divisibility", 16]] for at in range(6)}
    source = ASTSource(product, {**types, **dict.fromkeys(constants, "constexpr")}, constants, divisible)
    return str(triton.compile(source, target=GPUTarget("cuda", 120, 32), options={"num_warps": 8}).asm["ptx"])


def main() -> int:
    torch.manual_seed(1)
    if sys.argv[1:2] == ["--compile"]:
        for name, form in FORMATS.items():
            print(f"{name}: {compiled(*form).count('block_scale')} mma")
        return 0
    rows = {}
    for name, form in FORMATS.items():
        speed, error = measured(*form)
        rows[name] = {"tflops": round(speed, 1), "error": error}
        print(f"{name}: {speed:.1f} TFLOP/s, error {error:.3g}", flush=True)
    if sys.argv[1:]:
        Path(sys.argv[1]).write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
