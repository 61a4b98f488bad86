"""Compare the block-scaled GEMM of b12x 1.5 with each of its formats, and its fused NVFP4 MoE, with float64 of the operands.

Needs torch, b12x 1.5.1 and its CuTe DSL.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
from dataclasses import dataclass, replace
from functools import partial

import b12x_nvfp4
import reference
import torch
from b12x_nvfp4 import B12xMoeCall
from reference import ACCUMULATION, HALF_ULP, Expected, attempt, decode, interleaved, scale_values
from report import OperatorReport

Tensor = torch.Tensor

SHAPES = ((8, 1024, 3072), (300, 1024, 3072), (1, 3072, 512), (2048, 3072, 512), (512, 512, 512))
"""Rows, columns and depth; all but the last are those of the shared expert of Qwen3.5-122B on one of two GPUs."""

MOE_TOKENS, FAULTY_TOKENS = (1, 6, 33, 192), (6, 192)


@dataclass(frozen=True)
class Format:
    """Types of the elements of both operands, columns that share a scale, and whether scales are powers of two (``ue8m0``)."""

    a: str
    b: str
    block: int = 32
    powers: bool = True


FORMATS = {
    "nvfp4": Format("e2m1", "e2m1", 16, powers=False),
    "mxfp4": Format("e2m1", "e2m1"),
    "mxfp8": Format("e4m3", "e4m3"),
    "w6a8_e2m3": Format("e4m3", "e2m3"),
    "w6a8_e3m2": Format("e4m3", "e3m2"),
    "mxfp6_e2m3": Format("e2m3", "e2m3"),
    "mxfp6_e3m2": Format("e3m2", "e3m2"),
}
FP6 = {"e2m3": (3, 1), "e3m2": (2, 3)}
"""Bits of the mantissa, and bias, of the types of 6 bits."""


@dataclass(frozen=True)
class Operand:
    """Codes, one in each byte (of e2m1: two), their type, and row-major scales."""

    codes: Tensor
    kind: str
    scales: Tensor

    @classmethod
    def random(cls, kind: str, rows: int, depth: int, form: Format) -> Operand:
        """Elements of any code, but of e4m3 neither NaN nor the largest; scales of several binades."""
        device = reference.DEVICE
        columns = depth // 2 if kind == "e2m1" else depth
        codes = torch.randint(0, 64 if kind in FP6 else 256, (rows, columns), dtype=torch.uint8, device=device)
        if kind == "e4m3":
            codes = torch.where(codes & 0x7E == 0x7E, codes - 2, codes)
        low, high = (124, 131) if form.powers else (0x20, 0x48)
        scales = torch.randint(low, high, (rows, depth // form.block), dtype=torch.uint8, device=device)
        return cls(codes, kind, scales)

    def exact(self, form: Format) -> Tensor:
        """The values in float64."""
        if self.kind == "e2m1":
            values = decode(self.codes)
        elif self.kind == "e4m3":
            values = scale_values(self.codes)
        else:
            mantissa, bias = FP6[self.kind]
            fraction = (self.codes & (1 << mantissa) - 1).double() / 2**mantissa
            exponent = (self.codes & 31).long() >> mantissa
            values = torch.where(exponent > 0, (1 + fraction) * 2.0 ** (exponent - bias), fraction * 2.0 ** (1 - bias))
            values = torch.where(self.codes & 32 > 0, -values, values)
        scales = 2.0 ** (self.scales.double() - 127) if form.powers else scale_values(self.scales)
        result: Tensor = values * scales.repeat_interleave(form.block, dim=-1)
        return result

    def stored(self, form: Format, packed: bool) -> tuple[Tensor, Tensor]:
        """Elements and scales as b12x gets them. ``packed``: four elements of 6 bits lie in three bytes."""
        codes = self.codes
        if packed:
            one, two, three, four = codes.view(len(codes), -1, 4).unbind(-1)
            codes = torch.stack((one | two << 6, two >> 2 | three << 4, three >> 4 | four << 2), dim=-1).flatten(1)
        scales = interleaved(self.scales)
        rows, columns = scales.shape[0] // 128, scales.shape[1] // 4
        shape, strides = (32, 4, rows, 4, columns, 1), (16, 4, columns * 512, 1, 512, rows * columns * 512)
        view = scales.view(torch.float8_e8m0fnu if form.powers else torch.float8_e4m3fn).flatten().as_strided(shape, strides)
        return _stack(codes.view(torch.float8_e4m3fn) if self.kind == "e4m3" else codes), view


def _stack(matrix: Tensor) -> Tensor:
    """A matrix as the only one of a stack, the last dimension."""
    rows, columns = matrix.shape
    return matrix.contiguous().as_strided((rows, columns, 1), (columns, 1, rows * columns))


@dataclass(frozen=True)
class FormatCall:
    """The arguments of a GEMM; planted faults replace them."""

    recipe: str
    a: Operand
    b: Operand
    alpha: Tensor

    def run(self) -> Tensor:
        gemm, form = importlib.import_module("b12x.gemm"), FORMATS[self.recipe]
        rows, columns, packed = len(self.a.codes), len(self.b.codes), form.b in FP6
        query = gemm.DenseGemmQuery(
            recipe=self.recipe,
            entry_point="gemm.mm",
            weight_storage="packed" if packed else "native",
            output_dtype="bfloat16",
            batch=1,
            max_rows=rows,
            in_features=self.a.scales.shape[1] * form.block,
            out_features=columns,
            output_mode="provided",
        )
        out = torch.full((rows, columns), float("nan"), dtype=torch.bfloat16, device=reference.DEVICE)
        gemm.mm(self.a.stored(form, False), self.b.stored(form, packed), _stack(out), plan=gemm.plan(query), alpha=self.alpha)
        return out


def gemm_case(recipe: str, rows: int, columns: int, depth: int) -> tuple[FormatCall, Expected]:
    """Random operands, and what the GEMM must return."""
    form = FORMATS[recipe]
    a, b = Operand.random(form.a, rows, depth, form), Operand.random(form.b, columns, depth, form)
    alpha = torch.rand(1, device=reference.DEVICE) / depth
    exact_a, exact_b = a.exact(form), b.exact(form)
    values = exact_a @ exact_b.T * alpha.double()
    magnitudes = exact_a.abs() @ exact_b.abs().T * alpha.double()
    bound = values.abs() * HALF_ULP[torch.bfloat16] * 1.01 + magnitudes * ACCUMULATION * 2 + 2.0**-24
    return FormatCall(recipe, a, b, alpha), Expected(values, bound, values)


def gemm_faults(call: FormatCall) -> dict[str, FormatCall]:
    """Calls with a planted fault; the operands have the same shape."""
    a, b = call.a, call.b
    return {
        "the operands' scales change places": replace(call, a=replace(a, scales=b.scales), b=replace(b, scales=a.scales)),
        "the scales of A are those of the block before": replace(call, a=replace(a, scales=a.scales.roll(1, 1))),
        "the scales of B are those of the row before": replace(call, b=replace(b, scales=b.scales.roll(1, 0))),
        "the elements of A are those of the column before": replace(call, a=replace(a, codes=a.codes.roll(1, 1))),
        "the lowest bit of each element of B is inverted": replace(
            call, b=replace(b, codes=b.codes ^ (0x11 if b.kind == "e2m1" else 1))
        ),
        "alpha is 5 % too large": replace(call, alpha=call.alpha * 1.05),
    }


# ---- fused MoE


def run_experts(call: B12xMoeCall) -> Tensor:
    """Call the fused MoE of b12x 1.5, which divides the weights' scales by those of its inputs itself."""
    moe, preparation = importlib.import_module("b12x.moe.fused_moe"), importlib.import_module("b12x.preparation")
    experts, hidden, width = len(call.w1), call.x.shape[1], 2 * call.w2.shape[2]
    weights = moe.PackedWeights(
        w13=call.w1.clone(),  # may be prepared in place
        w2=call.w2.clone(),
        w13_block_scales=call.s1.flatten(1).clone(),
        w2_block_scales=call.s2.flatten(1).clone(),
        w13_global_scales=call.alpha1 * call.scale1,
        w2_global_scales=call.alpha2 * call.scale2,
        input_scale=call.scale1.clone(),
        intermediate_scale=call.scale2.clone(),
    )
    layer = moe.plan_weights(
        source=moe.PackedSource(format="modelopt_nvfp4", w13_layout="w13"),
        activation=moe.ActivationSpec(mode="a4", nonlinearity="silu", io_dtype=torch.bfloat16),
        geometry=moe.MoEGeometry(num_experts=experts, hidden_size=hidden, intermediate_size=width),
    )
    prepared = moe.prepare_weights(plan=layer, weights=weights)
    capacity = moe.ExecutionCapacity(max_tokens=len(call.x), top_k=call.experts.shape[1])
    plan = moe.plan_execution(experts=prepared, capacity=capacity)
    state = preparation.require_prepared(plan, "moe.decode", call.x.device)
    scratch = tuple(torch.empty(each.shape, dtype=each.dtype, device=call.x.device) for each in state.scratch.scratch_specs())
    output = torch.full_like(call.x, float("nan"))
    binding = moe.bind(
        plan,
        scratch=scratch,
        a=call.x,
        experts=prepared,
        topk_weights=call.weights,
        topk_ids=call.experts,
        output=output,
        input_scales_static=True,
    )
    moe.run(binding=binding)
    torch.cuda.synchronize()
    return output


def check_moe(report: OperatorReport, pattern: str) -> None:
    counts = [tokens for tokens in MOE_TOKENS if fnmatch.fnmatch(f"moe-{tokens}", pattern)]
    for shape in b12x_nvfp4.MOE_SHAPES if counts else ():
        layer = reference.MoeLayer.random(shape)
        scale1 = 448.0 * (0.75 + 0.5 * torch.rand(shape.experts, device=reference.DEVICE))
        for tokens in counts:
            x = torch.randn(tokens, shape.hidden, device=reference.DEVICE).bfloat16()
            route = reference.routed(reference.router_logits(tokens, shape, False), shape.active)
            call = b12x_nvfp4.moe_call(layer, scale1, x, route)
            expected = b12x_nvfp4.moe_expected(layer, scale1, x, route)
            report.add(attempt("moe.fused_moe", f"{shape.name}, {tokens} tokens", expected, partial(run_experts, call)))
            for fault, wrong in b12x_nvfp4.moe_faults(call, layer).items() if tokens in FAULTY_TOKENS else ():
                report.fault(f"moe.fused_moe, {tokens} tokens: {fault}", attempt("", "", expected, partial(run_experts, wrong)))


# ---- the program


def check(report: OperatorReport, pattern: str) -> None:
    for recipe in FORMATS:
        if not fnmatch.fnmatch(recipe, pattern):
            continue
        for shape in SHAPES:
            call, expected = gemm_case(recipe, *shape)
            report.add(attempt("gemm.mm", f"{recipe}, {'x'.join(map(str, shape))}", expected, call.run))
            for fault, wrong in gemm_faults(call).items() if shape[0] == shape[1] else ():
                report.fault(f"gemm.mm, {recipe}: {fault}", attempt("", "", expected, wrong.run))


def run(report: OperatorReport, options: argparse.Namespace) -> None:
    check(report, options.only)
    check_moe(report, options.only)
