"""Compare FlashInfer's FP8, MXFP8, MXFP4 and grouped NVFP4 GEMMs for SM120 with float64 of the dequantized operands.

Needs torch and FlashInfer 0.7.2.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import reference
import torch
from reference import ACCUMULATION, HALF_ULP, Expected, OperatorRow, attempt, decode, interleaved, scale_values
from report import OperatorReport

Tensor = torch.Tensor

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
OUTPUTS = {"bf16": torch.bfloat16, "f16": torch.float16}
MAJORS = ("K", "MN")
GRANULARITIES = ((1, 128, 128), (128, 128, 128))

DENSE_SHAPES = ((4, 512, 128), (60, 1536, 5120), (300, 5120, 6144), (16, 5120, 17408), (256, 256, 512))
"""Rows, columns and depth; those with 5120 are layers of Qwen3.5-27B FP8."""
LIMITS = (
    ((60, 192, 256), GRANULARITIES[0]),
    ((60, 256, 192), GRANULARITIES[0]),
    ((60, 256, 256), GRANULARITIES[1]),
)
"""Columns, depth and rows that are no multiples of the scales' granularity."""
BATCHES = ((1, 60, 1536, 5120), (3, 48, 200, 192), (2, 300, 256, 512))
MXFP8_SHAPES = ((1, 3072, 1024), (31, 1024, 3072), (300, 5120, 4096), (512, 512, 512), (40, 160, 160))
FP4_SHAPES = ((1, 3072, 1024), (31, 1024, 3072), (300, 3072, 4096), (512, 512, 512), (40, 160, 192))
GROUPS = {
    "one group": (300,),
    "ragged and empty groups": (0, 4, 60, 128, 0, 300, 132, 8),
    "40 groups": (8,) * 40,
}
GROUPED_SHAPES = ((200, 384), (1024, 3072))
"""Columns and depth of grouped GEMMs; the first are multiples of no tile of 128 and 256."""
TILES_N = (32, 64, 128)
BACKENDS = (
    ("mm", "mxfp8", ("cutlass", "cudnn", "cute-dsl", "trtllm")),
    *(("b12x", kind, ("b12x", "auto")) for kind in ("mxfp8", "nvfp4", "mxfp4")),
)
"""Back-ends of dense GEMMs with scales in blocks, the one with tactics first, by the names for ``--only``."""


def gemm_module() -> Any:
    return importlib.import_module("flashinfer.gemm.gemm_base")


def unwritten(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=reference.DEVICE)


# ---- operands


def fp8(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    return torch.randn(*shape, device=reference.DEVICE).to(dtype)


def fp32_scales(*shape: int) -> Tensor:
    """Scales of all mantissas in [0.125, 2)."""
    return torch.ldexp(1 + torch.rand(shape, device=reference.DEVICE), torch.randint(-3, 1, shape, device=reference.DEVICE))


def byte_scales(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, device=reference.DEVICE)


def powers(scales: Tensor) -> Tensor:
    """Bytes of ue8m0 as float64, from a table: PyTorch compiles ``exp2`` for the GPU that it detects, and without PTX."""
    table = torch.tensor([2.0 ** (exponent - 127) for exponent in range(256)], dtype=torch.float64, device=scales.device)
    return table[scales.long()]


def scaled(elements: Tensor, scales: Tensor, rows: int, columns: int) -> Tensor:
    """Float64 elements times scales, each of which belongs to a block of ``rows`` x ``columns`` elements."""
    wide = scales.double().repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return elements.double() * wide[..., : elements.shape[-2], : elements.shape[-1]]


def product(a: Tensor, b: Tensor, dtype: torch.dtype, factor: Tensor | float = 1.0) -> Expected:
    """``a @ b.mT * factor`` with the bound of fp32 accumulation and of the rounding to ``dtype``."""
    values, magnitudes = a @ b.mT * factor, a.abs() @ b.abs().mT * factor
    bound = values.abs() * HALF_ULP[dtype] * 1.01 + magnitudes * ACCUMULATION * 2 + 2.0**-24
    return Expected(values, bound, values)


def joined(parts: Sequence[Expected]) -> Expected:
    """The outputs of all groups, one below the other."""
    return Expected(*(torch.cat([getattr(part, name) for part in parts]) for name in ("values", "bound", "plain")))


# ---- FP8 with fp32 scales


@dataclass(frozen=True)
class PlainCall:
    """Operands of ``gemm_fp8_nt_groupwise``; scales are kept row by row, and stored as ``major`` tells."""

    a: Tensor
    b: Tensor
    scales_a: Tensor
    scales_b: Tensor
    granularity: tuple[int, int, int]
    major: str
    dtype: torch.dtype

    @classmethod
    def random(cls, shape: Sequence[int], granularity: tuple[int, int, int], major: str, types: tuple[str, str]) -> PlainCall:
        rows, columns, depth = shape
        step_m, step_n, step_k = granularity
        a, b = (fp8(size, depth, dtype=FP8[types[0]]) for size in (rows, columns))
        counts = [(-(-size // step), -(-depth // step_k)) for size, step in ((rows, step_m), (columns, step_n))]
        return cls(a, b, fp32_scales(*counts[0]), fp32_scales(*counts[1]), granularity, major, OUTPUTS[types[1]])

    def stored(self, scales: Tensor) -> Tensor:
        return scales.contiguous() if self.major == "K" else scales.mT.contiguous()

    def expected(self) -> Expected:
        step_m, step_n, step_k = self.granularity
        a, b = scaled(self.a, self.scales_a, step_m, step_k), scaled(self.b, self.scales_b, step_n, step_k)
        return product(a, b, self.dtype)

    def run(self) -> Tensor:
        out = unwritten(len(self.a), len(self.b), dtype=self.dtype)
        scales = self.stored(self.scales_a), self.stored(self.scales_b)
        gemm_module().gemm_fp8_nt_groupwise(
            self.a, self.b, *scales, self.major, scale_granularity_mnk=self.granularity, out=out
        )
        return out


def other_major(scales: Tensor) -> Tensor:
    """What a call reads that takes the scales of one order for those of the other."""
    return scales.mT.contiguous().view(scales.shape)


def one_column_more(scales: Tensor) -> Tensor:
    """What a call reads whose scales have rows that are one longer."""
    wide = torch.cat((scales, torch.ones_like(scales[:, :1])), 1).flatten()
    return wide[: scales.numel()].view(scales.shape)


class Runnable(Protocol):
    """An operator with its operands."""

    def run(self) -> Tensor: ...


def plant(
    report: OperatorReport, operator: str, case: str, expected: Expected, call: Runnable, faults: Mapping[str, Runnable]
) -> None:
    """Compare a call, and if its result is right, the same call with each fault."""
    unmodified = attempt(operator, f"{case}, in which faults are planted", expected, call.run)
    report.add(unmodified)
    for fault, wrong in faults.items() if unmodified.verdict == "right" else ():
        report.fault(f"{operator}, {case}: {fault}", attempt("", "", expected, wrong.run))


def dense_faults(call: PlainCall) -> dict[str, PlainCall]:
    """Calls with a planted fault, of operands with the same shape."""
    return {
        "the operands' scales change places": replace(call, scales_a=call.scales_b, scales_b=call.scales_a),
        "a's scales are those of the rows before": replace(call, scales_a=call.scales_a.roll(1, 0)),
        "b's scales are those of the depth before": replace(call, scales_b=call.scales_b.roll(1, 1)),
        "scales are stored in the other order": replace(
            call, scales_a=other_major(call.scales_a), scales_b=other_major(call.scales_b)
        ),
        "rows of scales are one longer": replace(
            call, scales_a=one_column_more(call.scales_a), scales_b=one_column_more(call.scales_b)
        ),
        "rows of b begin one too late": replace(call, b=call.b.view(torch.uint8).roll(1, 0).view(call.b.dtype)),
    }


def check_dense(report: OperatorReport, names: Names) -> None:
    """All granularities, orders of scales and types."""
    operator = "gemm_fp8_nt_groupwise"
    for (element, output), major, granularity in itertools.product(itertools.product(FP8, OUTPUTS), MAJORS, GRANULARITIES):
        if not names(f"dense-{element}-{output}-{major}"):
            continue
        for shape in DENSE_SHAPES:
            shape = (-(-shape[0] // granularity[0]) * granularity[0], *shape[1:])
            call = PlainCall.random(shape, granularity, major, (element, output))
            case = f"{by(shape)} {element} to {output}, scales of {by(granularity)}, {major}"
            report.add(attempt(operator, case, call.expected(), call.run))
        if (element, output) != ("e4m3", "bf16"):
            continue
        call = PlainCall.random((384, 384, 384), granularity, major, (element, output))
        faults = {
            fault: wrong for fault, wrong in dense_faults(call).items() if granularity[0] == 128 or "change places" not in fault
        }
        plant(report, operator, f"scales of {by(granularity)}, {major}", call.expected(), call, faults)


def check_limits(report: OperatorReport, names: Names) -> None:
    """Sizes that CUTLASS refuses: the operator must not return without an error."""
    if not names("limits"):
        return
    for shape, granularity in LIMITS:
        call = PlainCall.random(shape, granularity, "K", ("e4m3", "bf16"))
        case = f"{by(shape)}, scales of {by(granularity)}, which CUTLASS does not implement"
        report.add(attempt("gemm_fp8_nt_groupwise", case, call.expected(), call.run))


@dataclass(frozen=True)
class BatchCall:
    """Operands of ``bmm_fp8``, with a scale for each tensor."""

    a: Tensor
    b: Tensor
    scale_a: Tensor
    scale_b: Tensor
    dtype: torch.dtype

    def expected(self) -> Expected:
        return product(self.a.double(), self.b.double(), self.dtype, self.scale_a.double() * self.scale_b.double())

    def run(self) -> Tensor:
        out = unwritten(*self.a.shape[:2], self.b.shape[1], dtype=self.dtype)
        gemm_module().bmm_fp8(self.a, self.b.mT, self.scale_a, self.scale_b, self.dtype, out=out, backend="cutlass")
        return out


def batch_faults(call: BatchCall) -> dict[str, BatchCall]:
    return {
        "the scale of a is 5 % too large": replace(call, scale_a=call.scale_a * 1.05),
        "b is that of the batch before": replace(call, b=call.b.view(torch.uint8).roll(1, 0).view(call.b.dtype)),
    }


def check_batches(report: OperatorReport, names: Names) -> None:
    for output, (batch, rows, columns, depth) in itertools.product(OUTPUTS, BATCHES):
        if not names(f"bmm-fp8-{output}"):
            continue
        call = BatchCall(fp8(batch, rows, depth), fp8(batch, columns, depth), fp32_scales(1), fp32_scales(1), OUTPUTS[output])
        report.add(attempt("bmm_fp8", f"{by((batch, rows, columns, depth))} {output}, cutlass", call.expected(), call.run))
        if output == "bf16" and batch == 3:
            plant(report, "bmm_fp8", "cutlass", call.expected(), call, batch_faults(call))


@dataclass(frozen=True)
class GroupedFp8Call:
    """Operands of ``group_gemm_fp8_nt_groupwise``; ``direct``: of the module's function, past the Python operator."""

    groups: tuple[PlainCall, ...]
    offsets: Tensor
    direct: bool

    def run(self) -> Tensor:
        first = self.groups[0]
        a = torch.cat([each.a.view(torch.uint8) for each in self.groups]).view(first.a.dtype)
        b = torch.stack([each.b.view(torch.uint8) for each in self.groups]).view(first.b.dtype)
        scales_a = first.stored(torch.cat([each.scales_a for each in self.groups]))
        scales_b = torch.stack([each.stored(each.scales_b) for each in self.groups])
        out = unwritten(len(a), b.shape[1], dtype=first.dtype)
        base = gemm_module()
        if not self.direct:
            base.group_gemm_fp8_nt_groupwise(a, b, scales_a, scales_b, self.offsets, first.granularity, first.major, out=out)
            return out
        workspaces = [torch.zeros(2**25, dtype=torch.uint8, device=a.device) for _ in range(2)]
        base.get_gemm_sm120_module().group_gemm_fp8_nt_groupwise(
            *workspaces, a, b, scales_a, scales_b, out, self.offsets, *b.shape[1:], *first.granularity, first.major
        )
        return out


def offsets_of(sizes: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device=reference.DEVICE)


def moved(offsets: Tensor, by_rows: int) -> Tensor:
    """Offsets of groups whose second half begins ``by_rows`` too late."""
    wrong = offsets.clone()
    wrong[len(wrong) // 2 : -1] += by_rows
    return wrong


def grouped_fp8(
    sizes: Sequence[int], shape: Sequence[int], granularity: tuple[int, int, int], major: str, types: tuple[str, str]
) -> tuple[GroupedFp8Call, Expected]:
    groups = tuple(PlainCall.random((rows, *shape), granularity, major, types) for rows in sizes)
    expected = joined([each.expected() for each in groups])
    return GroupedFp8Call(groups, offsets_of(sizes), direct=False), expected


def check_grouped_fp8(report: OperatorReport, names: Names) -> None:
    """The operator, which refuses several groups on SM12x; and then the module's function with them."""
    operator = "group_gemm_fp8_nt_groupwise"
    variants = itertools.product(itertools.product(FP8, OUTPUTS), MAJORS, GRANULARITIES)
    for ((element, output), major, granularity), (groups, sizes) in itertools.product(variants, GROUPS.items()):
        whole = [-(-rows // granularity[0]) * granularity[0] for rows in sizes]
        case = f"{groups} x 1024x3072 {element} to {output}, scales of {by(granularity)}, {major}"
        for kind, direct in (("grouped", False), ("direct", True)):
            if names(f"{kind}-fp8-{element}-{output}-{major}"):
                call, expected = grouped_fp8(whole, (1024, 3072), granularity, major, (element, output))
                text = f"{case}, the module's function" if direct else case
                report.add(attempt(operator, text, expected, replace(call, direct=direct).run))
        first = (element, output, granularity[0], groups) == ("e4m3", "bf16", 1, "one group")
        if first and names(f"grouped-fp8-e4m3-bf16-{major}"):
            call, expected = grouped_fp8(whole, (1024, 3072), granularity, major, (element, output))
            plant(report, operator, major, expected, call, grouped_fp8_faults(call))


def grouped_fp8_faults(call: GroupedFp8Call) -> dict[str, GroupedFp8Call]:
    (group,) = call.groups
    begins = torch.tensor([0, 4], dtype=torch.int32, device=call.offsets.device)
    return {
        "a's scales are those of the rows before": replace(call, groups=(replace(group, scales_a=group.scales_a.roll(1, 0)),)),
        "b's scales are those of the depth before": replace(call, groups=(replace(group, scales_b=group.scales_b.roll(1, 1)),)),
        "the group ends 4 rows too early": replace(call, offsets=call.offsets - begins),
    }


# ---- grouped GEMMs with scales in blocks


@dataclass(frozen=True)
class GroupedCall:
    """Operands of the grouped GEMMs with block scales; ``alpha`` belongs to NVFP4."""

    a: Tensor
    b: Tensor
    scales_a: Tensor
    scales_b: Tensor
    offsets: Tensor
    alpha: Tensor | None
    dtype: torch.dtype
    tiles: tuple[int, int, bool]

    def run(self) -> Tensor:
        out = unwritten(len(self.a), self.b.shape[1], dtype=self.dtype)
        tile_n, tile_k, swap = self.tiles
        options = {"tile_n": tile_n, "tile_k": tile_k, "swap_ab": swap, "out": out}
        base, operands = gemm_module(), (self.a, self.b, self.scales_a, self.scales_b, self.offsets)
        if self.alpha is None:
            base.group_gemm_mxfp4_nt_groupwise(*operands, **options)
        else:
            base.group_gemm_nvfp4_nt_groupwise(*operands, alpha=self.alpha, **options)
        return out


def scales_of_groups(groups: Sequence[Tensor]) -> Tensor:
    """Interleaved scales of all groups; each begins at a multiple of 128 rows that leaves room for those before."""
    columns = -(-groups[0].shape[1] // 4) * 4
    total = sum(len(each) for each in groups)
    stored = torch.zeros((total + len(groups) * 127) // 128 * 128, columns, dtype=torch.uint8, device=reference.DEVICE)
    rows = 0
    for number, scales in enumerate(groups):
        if not len(scales):
            continue
        begin, block = (rows + number * 127) // 128 * 128, interleaved(scales)
        stored[begin : begin + len(block)] = block
        rows += len(scales)
    return stored


def grouped(sizes: Sequence[int], shape: tuple[int, int], element: str, dtype: torch.dtype) -> tuple[GroupedCall, Expected]:
    """Operands of e2m1 times ``element``: nvfp4, or mxfp4 times e4m3 or e5m2."""
    columns, depth = shape
    nv = element == "nvfp4"
    vector, low, high = (16, 0x20, 0x48) if nv else (32, 123, 131)
    values_of = scale_values if nv else powers
    rows = sum(sizes)
    a = byte_scales(0, 256, rows, depth // 2) if nv else fp8(rows, depth, dtype=FP8[element])
    b = byte_scales(0, 256, len(sizes), columns, depth // 2)
    scales_a, scales_b = (byte_scales(low, high, *each, depth // vector) for each in ((rows,), (len(sizes), columns)))
    alpha = (0.5 + torch.rand(len(sizes), device=reference.DEVICE)) / depth if nv else None
    parts = []
    left_codes, left_scales = (torch.split(each, list(sizes)) for each in (a.view(torch.uint8), scales_a))
    for number, (codes, scales) in enumerate(zip(left_codes, left_scales, strict=True)):
        left = decode(codes) if nv else codes.view(a.dtype).double()
        left = left * values_of(scales).repeat_interleave(vector, -1)
        right = decode(b[number]) * values_of(scales_b[number]).repeat_interleave(vector, -1)
        parts.append(product(left, right, dtype, 1.0 if alpha is None else alpha[number].double()))
    stored_b = torch.stack([interleaved(each) for each in scales_b])
    stored_a = scales_of_groups(left_scales)
    return GroupedCall(a, b, stored_a, stored_b, offsets_of(sizes), alpha, dtype, (128, 128, True)), joined(parts)


def grouped_faults(call: GroupedCall) -> dict[str, GroupedCall]:
    """Calls with a planted fault."""
    faults = {
        "b is that of the group before": replace(call, b=call.b.roll(1, 0)),
        "b's scales are those of the group before": replace(call, scales_b=call.scales_b.roll(1, 0)),
        "a's scales begin a block of 128 rows too late": replace(call, scales_a=call.scales_a.roll(128, 0)),
        "a's scales are one byte early": replace(call, scales_a=call.scales_a.flatten().roll(-1).view_as(call.scales_a)),
        "groups begin 4 rows too late": replace(call, offsets=moved(call.offsets, 4)),
        "groups begin one row too late": replace(call, offsets=moved(call.offsets, 1)),
    }
    if call.alpha is not None:
        faults["alpha is that of the group before"] = replace(call, alpha=call.alpha.roll(1))
    return faults


def check_grouped(report: OperatorReport, names: Names) -> None:
    """Every tile, with and without exchanged operands."""
    for element, output in itertools.product((*FP8, "nvfp4"), OUTPUTS):
        nv = element == "nvfp4"
        operator = f"group_gemm_{'nvfp4' if nv else 'mxfp4'}_nt_groupwise"
        if not names(f"grouped-{'nvfp4' if nv else f'mxfp4-{element}'}-{output}"):
            continue
        for shape, (groups, sizes) in itertools.product(GROUPED_SHAPES, GROUPS.items()):
            call, expected = grouped(sizes, shape, element, OUTPUTS[output])
            for tiles in itertools.product(TILES_N, (128, 256) if nv else (128,), (True, False)):
                case = f"{groups} x {by(shape)}{'' if nv else f' {element}'} to {output}, {tiles_text(tiles)}"
                report.add(attempt(operator, case, expected, replace(call, tiles=tiles).run))
        if output != "bf16" or element == "e5m2":
            continue
        call, expected = grouped((132, 60, 128, 300), (1024, 1024), element, OUTPUTS[output])
        for swap in (True, False):
            called = replace(call, tiles=(128, 128, swap))
            plant(report, operator, f"operands {'' if swap else 'not '}exchanged", expected, called, grouped_faults(called))


def tiles_text(tiles: tuple[int, int, bool]) -> str:
    return f"tile 128x{tiles[0]}x{tiles[1]}{', operands exchanged' * tiles[2]}"


# ---- dense GEMMs with scales in blocks


@contextlib.contextmanager
def chosen(tactic: Any, seen: list[tuple[Any, list[Any]]]) -> Iterator[None]:
    """FlashInfer's autotuner returns the first runner with ``tactic``; ``seen`` gets that runner and its inputs."""
    tuner = importlib.import_module("flashinfer.autotuner").AutoTuner
    original = tuner.choose_one

    def choose(self: Any, custom_op: str, runners: list[Any], tuning_config: Any, inputs: list[Any]) -> tuple[Any, Any]:
        seen.append((runners[0], inputs))
        return runners[0], tactic

    tuner.choose_one = choose
    try:
        yield
    finally:
        tuner.choose_one = original


def rows_of_tactics(operator: str, case: str, expected: Expected, run: Callable[[], Tensor]) -> Iterator[OperatorRow]:
    """Each tactic of the back-end that ``run`` names; none if that is refused."""
    seen: list[tuple[Any, list[Any]]] = []
    with chosen(-1, seen):
        attempt(operator, case, expected, run)
    for runner, inputs in seen[:1]:
        for tactic in runner.get_valid_tactics(inputs, None):
            with chosen(tactic, []):
                yield attempt(operator, f"{case}, tactic {tactic}", expected, run)


@dataclass(frozen=True)
class Fp4Call:
    """Operands of ``mm_fp4``, with interleaved scales: NVFP4, or MXFP4."""

    a: Tensor
    b: Tensor
    scales_a: Tensor
    scales_b: Tensor
    alpha: Tensor
    dtype: torch.dtype
    nvfp4: bool
    backend: str = "b12x"

    def run(self) -> Tensor:
        out = unwritten(len(self.a), len(self.b), dtype=self.dtype)
        operands = self.a, self.b.T, self.scales_a, self.scales_b.T, self.alpha, self.dtype, out
        gemm_module().mm_fp4(*operands, block_size=16 if self.nvfp4 else 32, use_nvfp4=self.nvfp4, backend=self.backend)
        return out


def fp4(rows: int, columns: int, depth: int, nv: bool, dtype: torch.dtype) -> tuple[Fp4Call, Expected]:
    codes = [byte_scales(0, 256, size, depth // 2) for size in (rows, columns)]
    vector, low, high, values_of = (16, 0x20, 0x48, scale_values) if nv else (32, 123, 131, powers)
    scales = [byte_scales(low, high, size, depth // vector) for size in (rows, columns)]
    alpha = (0.5 + torch.rand(1, device=reference.DEVICE)) / depth
    exact = [scaled(decode(each), values_of(factor), 1, vector) for each, factor in zip(codes, scales, strict=True)]
    stored = [interleaved(each) for each in scales]
    call = Fp4Call(codes[0], codes[1], stored[0], stored[1], alpha, dtype, nv)
    return call, product(exact[0], exact[1], dtype, alpha.double())


@dataclass(frozen=True)
class Mxfp8Call:
    """Operands of ``mm_mxfp8`` and ``bmm_mxfp8``, with interleaved scales."""

    a: Tensor
    b: Tensor
    scales_a: Tensor
    scales_b: Tensor
    dtype: torch.dtype
    backend: str = "cutlass"

    def run(self) -> Tensor:
        out = unwritten(*self.a.shape[:-1], self.b.shape[-2], dtype=self.dtype)
        operands = self.a, self.b.mT, self.scales_a.flatten(), self.scales_b.flatten()
        operator = gemm_module().mm_mxfp8 if self.a.dim() == 2 else gemm_module().bmm_mxfp8
        result: Tensor = operator(*operands, out=out, backend=self.backend, **{self._dtype_name(): self.dtype})
        return result

    def _dtype_name(self) -> str:
        return "out_dtype" if self.a.dim() == 2 else "dtype"


def mxfp8(batch: Sequence[int], rows: int, columns: int, depth: int, dtype: torch.dtype) -> tuple[Mxfp8Call, Expected]:
    """Scales are those of all matrices of a batch, one below the other, as ``mxfp8_quantize`` stores them."""
    operands = [fp8(*batch, size, depth) for size in (rows, columns)]
    scales = [byte_scales(123, 131, *each.shape[:-1], depth // 32) for each in operands]
    exact = [scaled(each, powers(factor), 1, 32) for each, factor in zip(operands, scales, strict=True)]
    stored = [interleaved(each.flatten(0, -2)) for each in scales]
    return Mxfp8Call(operands[0], operands[1], stored[0], stored[1], dtype), product(exact[0], exact[1], dtype)


def block_faults(call: Mxfp8Call | Fp4Call) -> dict[str, Runnable]:
    """Calls with a planted fault."""
    if isinstance(call, Fp4Call):
        own: dict[str, Runnable] = {
            "b's elements are those of the row before": replace(call, b=call.b.roll(1, 0)),
            "alpha is 5 % too large": replace(call, alpha=call.alpha * 1.05),
        }
    else:
        linear = reference.unswizzled(call.scales_b, *call.scales_b.shape).contiguous()
        own = {"b's scales are row-major": replace(call, scales_b=linear)}
    late = call.scales_a.flatten().roll(1).view_as(call.scales_a)
    return own | {
        "the operands' scales change places": replace(call, scales_a=call.scales_b, scales_b=call.scales_a),
        "a's scales are one byte late": replace(call, scales_a=late),
    }


def check_blocks(report: OperatorReport, names: Names) -> None:
    """Back-ends of ``mm_mxfp8`` and ``mm_fp4``: CUTLASS with all its tactics, and the kernels of CuTe DSL, `b12x`."""
    for (name, kind, backends), output in itertools.product(BACKENDS, OUTPUTS):
        operator = "mm_mxfp8" if kind == "mxfp8" else "mm_fp4"
        shapes = MXFP8_SHAPES if kind == "mxfp8" else FP4_SHAPES
        for rows, columns, depth in shapes if names(f"{name}-{kind}-{output}") else ():
            call, expected = dense(kind, rows, columns, depth, OUTPUTS[output])
            case = f"{kind} {by((rows, columns, depth))} {output}"
            for backend in backends:
                report.add(attempt(operator, f"{case}, {backend}", expected, replace(call, backend=backend).run))
            square, call = rows == columns and output == "bf16", replace(call, backend=backends[0])
            if name == "mm" or square:
                for row in rows_of_tactics(operator, f"{case}, {call.backend}", expected, call.run):
                    report.add(row)
            if square:
                plant(report, operator, f"{kind}, {call.backend}", expected, call, block_faults(call))


def check_mxfp8_batches(report: OperatorReport, names: Names) -> None:
    for output, (batch, rows) in itertools.product(OUTPUTS, ((1, 300), (3, 128), (3, 60))):
        if names(f"bmm-mxfp8-{output}"):
            call, expected = mxfp8((batch,), rows, 256, 512, OUTPUTS[output])
            report.add(attempt("bmm_mxfp8", f"{by((batch, rows, 256, 512))} {output}, cutlass", expected, call.run))


def dense(kind: str, rows: int, columns: int, depth: int, dtype: torch.dtype) -> tuple[Mxfp8Call | Fp4Call, Expected]:
    if kind == "mxfp8":
        return mxfp8((), rows, columns, depth, dtype)
    return fp4(rows, columns, depth, kind == "nvfp4", dtype)


# ---- the program


class Names:
    """The checks that the command line selects."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns = patterns

    def __call__(self, name: str) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for pattern in self.patterns)


def by(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))


def run(report: OperatorReport, options: argparse.Namespace) -> None:
    names = Names([options.only])
    for check in (
        check_dense,
        check_batches,
        check_limits,
        check_blocks,
        check_mxfp8_batches,
        check_grouped,
        check_grouped_fp8,
    ):
        check(report, names)
