"""Kernels of Triton with seeded faults of synchronisation: ``triton_kernels.py [FAULT]`` prints digests of results.

Without FAULT, kernels that have none; with FAULT, a number from 1, the one kernel that has it. races.py runs all of them with
delays. All results are determined: sums of floating-point numbers have one order, and atomics add integers.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable

import torch
import triton
import triton.language as tl

ROWS, COLUMNS = 256, 256
FAULTS = (
    "split-K: no barrier before the ticket",
    "split-K: the ticket before the stores",
    "phases: one program too few is waited for",
    "phases: no barrier before the arrival",
)


@triton.jit
def softmax(x, out, n: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, n)
    values = tl.load(x + row * n + columns)
    shifted = tl.exp(values - tl.max(values, 0))
    tl.store(out + row * n + columns, shifted / tl.sum(shifted, 0))


@triton.jit
def normalize(x, out, n: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, n)
    values = tl.load(x + row * n + columns)
    centred = values - tl.sum(values, 0) / n
    tl.store(out + row * n + columns, centred * tl.rsqrt(tl.sum(centred * centred, 0) / n + 1e-6))


@triton.jit
def scan(x, out, n: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, n)
    tl.store(out + row * n + columns, tl.cumsum(tl.load(x + row * n + columns), 0))


@triton.jit
def sort(x, out, n: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, n)
    tl.store(out + row * n + columns, tl.sort(tl.load(x + row * n + columns)))


@triton.jit
def transpose(x, out, n: tl.constexpr, block: tl.constexpr):
    i, j = tl.program_id(0) * block + tl.arange(0, block), tl.program_id(1) * block + tl.arange(0, block)
    tile = tl.load(x + i[:, None] * n + j[None, :])
    tl.store(out + j[:, None] * n + i[None, :], tl.trans(tile))


@triton.jit
def count(x, out, n: tl.constexpr, bins: tl.constexpr):
    values = tl.load(x + tl.program_id(0) * n + tl.arange(0, n))
    tl.atomic_add(out + tl.arange(0, bins), tl.histogram(values, bins))


@triton.jit
def product(a, b, out, n: tl.constexpr, block: tl.constexpr, step: tl.constexpr):
    """A matrix product in a pipeline of copies."""
    i, j = tl.program_id(0) * block + tl.arange(0, block), tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros((block, block), tl.float32)
    for k in tl.range(0, n, step, num_stages=3):
        inner = k + tl.arange(0, step)
        total += tl.dot(tl.load(a + i[:, None] * n + inner[None, :]), tl.load(b + inner[:, None] * n + j[None, :]))
    tl.store(out + i[:, None] * n + j[None, :], total)


@triton.jit
def scaled(a, b, scales, out, kind: tl.constexpr, group: tl.constexpr, n: tl.constexpr):
    """A block-scaled product of one tile of n by n by n."""
    width: tl.constexpr = n // 2 if kind == "e2m1" else n
    i, inner = tl.arange(0, n), tl.arange(0, width)
    left = tl.load(a + i[:, None] * width + inner[None, :])
    right = tl.load(b + i[None, :] * width + inner[:, None])
    factors = tl.load(scales + i[:, None] * (n // group) + tl.arange(0, n // group)[None, :])
    tl.store(out + i[:, None] * n + i[None, :], tl.dot_scaled(left, factors, kind, right, factors, kind))


@triton.jit
def attend(q, k, v, out, n: tl.constexpr, width: tl.constexpr, block: tl.constexpr):
    """Attention of 64 queries, with maxima that are updated for each block of keys."""
    i, d = tl.program_id(0) * 64 + tl.arange(0, 64), tl.arange(0, width)
    queries = tl.load(q + i[:, None] * width + d[None, :])
    most, weight = tl.full((64,), -1e30, tl.float32), tl.zeros((64,), tl.float32)
    total = tl.zeros((64, width), tl.float32)
    for start in tl.range(0, n, block, num_stages=2):
        j = start + tl.arange(0, block)
        logits = tl.dot(queries, tl.trans(tl.load(k + j[:, None] * width + d[None, :]))) * 0.125
        new = tl.maximum(most, tl.max(logits, 1))
        decay, shares = tl.exp(most - new), tl.exp(logits - new[:, None])
        weight, most = weight * decay + tl.sum(shares, 1), new
        total = total * decay[:, None] + tl.dot(shares.to(tl.bfloat16), tl.load(v + j[:, None] * width + d[None, :]))
    tl.store(out + i[:, None] * width + d[None, :], total / weight[:, None])


@triton.jit
def split(x, parts, ticket, out, n: tl.constexpr, programs: tl.constexpr, fault: tl.constexpr):
    """Each program stores its part; the last one adds the parts of all."""
    me, columns = tl.program_id(0), tl.arange(0, n)
    if fault == 2:
        mine = tl.atomic_add(ticket, 1)
    tl.store(parts + me * n + columns, tl.load(x + me * n + columns) * 3)
    if fault != 2:
        if fault != 1:
            tl.debug_barrier()
        mine = tl.atomic_add(ticket, 1)
    if mine == programs - 1:
        total = tl.zeros((n,), tl.int32)
        for i in range(programs):
            total = total * 31 + tl.load(parts + i * n + columns, cache_modifier=".cg")
        tl.store(out + columns, total)


@triton.jit
def phases(x, parts, arrived, out, n: tl.constexpr, programs: tl.constexpr, fault: tl.constexpr):
    """All programs meet between two phases; the second reads what another one wrote in the first."""
    me, columns = tl.program_id(0), tl.arange(0, n)
    tl.store(parts + ((me * 7 + 3) % programs) * n + columns, tl.load(x + me * n + columns) + me)
    if fault != 4:
        tl.debug_barrier()
    tl.atomic_add(arrived, 1)
    while tl.atomic_add(arrived, 0) < (programs - 1 if fault == 3 else programs):
        pass
    tl.debug_barrier()
    other = (me + programs // 2) % programs
    tl.store(out + me * n + columns, tl.load(parts + other * n + columns, cache_modifier=".cg"))


def matrix(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def integers(*size: int, below: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.randint(0, below, size, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).to(dtype)


def by_row(kernel: Callable[..., None], x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    kernel[(ROWS,)](x, out, COLUMNS)
    return out


def transposed() -> torch.Tensor:
    x = matrix(ROWS, COLUMNS)
    out = torch.empty_like(x)
    transpose[(4, 4)](x, out, COLUMNS, 64)
    return out


def counted() -> torch.Tensor:
    out = torch.zeros(64, dtype=torch.int32, device="cuda")
    count[(64,)](integers(64, 256, below=64), out, 256, 64)
    return out


def multiplied(dtype: torch.dtype) -> torch.Tensor:
    a, b = (matrix(512, 512, seed=seed).to(dtype) for seed in (0, 1))
    out = torch.empty(512, 512, device="cuda")
    product[(8, 8)](a, b, out, 512, 64, 64)
    return out


def block_scaled(kind: str, group: int) -> torch.Tensor:
    """One tile; scales of groups of 16 are e4m3, others powers of two."""
    n = 128
    a, b = (integers(n, n // 2 if kind == "e2m1" else n, below=120, dtype=torch.uint8) for _ in range(2))
    if kind == "e4m3":
        a, b = a.view(torch.float8_e4m3fn), b.view(torch.float8_e4m3fn)
    scales = (integers(n, n // group, below=16) + (0x30 if group == 16 else 120)).to(torch.uint8)
    out = torch.empty(n, n, device="cuda")
    scaled[(1,)](a, b, scales.view(torch.float8_e4m3fn) if group == 16 else scales, out, kind, group, n)
    return out


def attention() -> torch.Tensor:
    q, k, v = (matrix(512, 64, seed=seed).bfloat16() for seed in range(3))
    out = torch.empty(512, 64, device="cuda")
    attend[(8,)](q, k, v, out, 512, 64, 64)
    return out


def met(kernel: Callable[..., None], fault: int = 0) -> torch.Tensor:
    """Kernels whose programs meet: 64 of them, all resident."""
    n, programs = 1024, 64
    x, parts = integers(programs, n, below=1000), torch.zeros(programs, n, dtype=torch.int32, device="cuda")
    counter, out = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.zeros(programs, n, dtype=torch.int32, device="cuda")
    kernel[(programs,)](x, parts, counter, out, n, programs, fault, num_warps=8)
    return out


HEALTHY: dict[str, Callable[[], torch.Tensor]] = {
    "softmax": lambda: by_row(softmax, matrix(ROWS, COLUMNS)),
    "normalization": lambda: by_row(normalize, matrix(ROWS, COLUMNS)),
    "scan": lambda: by_row(scan, integers(ROWS, COLUMNS, below=100)),
    "sort": lambda: by_row(sort, integers(ROWS, COLUMNS, below=10_000)),
    "transposition": transposed,
    "histogram": counted,
    "product of bf16": lambda: multiplied(torch.bfloat16),
    "product of f16": lambda: multiplied(torch.float16),
    "product of tf32": lambda: multiplied(torch.float32),
    "NVFP4 product": lambda: block_scaled("e2m1", 16),
    "MXFP4 product": lambda: block_scaled("e2m1", 32),
    "MXFP8 product": lambda: block_scaled("e4m3", 32),
    "attention": attention,
    "split-K": lambda: met(split),
    "phases": lambda: met(phases),
}


def digest(tensor: torch.Tensor) -> str:
    torch.cuda.synchronize()
    return hashlib.sha256(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def main() -> None:
    if fault := int(sys.argv[1]) if len(sys.argv) > 1 else 0:
        kernel, name = (split, "split-K") if fault < 3 else (phases, "phases")
        print(f"{name}: {digest(met(kernel, fault))}")
        return
    for name, run in HEALTHY.items():
        print(f"{name}: {digest(run())}", flush=True)


if __name__ == "__main__":
    main()
