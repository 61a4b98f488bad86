"""Compare b12x's NVFP4 GEMM and its three fused MoE kernels, called from Python, with float64 of the dequantized operands.

Needs torch, b12x and its CuTe DSL.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import reference
import torch
from reference import (
    ACCUMULATION,
    FUNCTIONS,
    HALF_ULP,
    Expected,
    MoeLayer,
    MoeShape,
    OperatorRow,
    attempt,
    dequantized,
    interleaved,
    quantized_interval,
    rounded,
    routed,
    router_logits,
)
from report import OperatorReport, Unusable

Tensor = torch.Tensor

GEMM_SHAPES = (
    *((8, 1024, 3072), (300, 1024, 3072), (2048, 1024, 3072)),
    *((1, 3072, 512), (48, 3072, 512), (2048, 3072, 512)),
    (512, 512, 512),
)
"""Rows, columns and depth; all but the last are those of the shared expert of Qwen3.5-122B on one of two GPUs."""

MOE_SHAPES = (MoeShape("qwen3.5-122b-tp2", 256, 3072, 512, 8),)
MOE_TOKENS = (1, 5, 6, 33, 192, 512)
"""With 8 experts for each, b12x selects its kernel `micro` for up to 5 tokens, `static` for up to 80, else `dynamic`."""
HOT_TOKENS = 72
"""Tokens of the case ``moe-hot``, which choose the same experts: more than half of a tile of 128 rows of `static`."""
FAULTY_TOKENS = (5, 6, 192)
"""Calls in which faults are planted: one for each kernel."""


@dataclass(frozen=True)
class Calls:
    """Rows, columns and depth of GEMMs, and tokens of each layer of experts."""

    gemms: Sequence[tuple[int, int, int]] = GEMM_SHAPES
    moes: Sequence[tuple[MoeShape, Sequence[int]]] = tuple((shape, MOE_TOKENS) for shape in MOE_SHAPES)
    reserved: bool = False
    """The kernels micro and static are compiled for the largest workspace that they can have, as SGLang calls them."""

    @classmethod
    def of_recipe(cls, path: Path) -> Calls:
        """The calls of the table ``[b12x]`` of a recipe."""
        table = tomllib.loads(path.read_text())["b12x"]
        return cls(
            [(rows, layer["n"], layer["k"]) for layer in table["gemm"] for rows in layer["rows"]],
            [
                (MoeShape(path.stem, layer["experts"], layer["hidden"], layer["inner"], layer["top_k"]), layer["tokens"])
                for layer in table["moe"]
            ],
            reserved=True,
        )


SLICE = 128
"""Columns of the intermediate activations that a CTA of the MoE kernels multiplies before it adds to the output."""

TILE = 128
"""Columns of the output that a CTA computes at a time."""

KEPT: list[Any] = []
"""b12x caches views of weights and scales by address: what it has seen must not be freed while it runs."""


# ---- GEMM


@dataclass(frozen=True)
class GemmCall:
    """Operands of ``dense_gemm``: packed elements, scales as b12x stores them, and a factor."""

    a: Tensor
    b: Tensor
    scales_a: Tensor
    scales_b: Tensor
    alpha: Tensor

    def run(self) -> Tensor:
        gemm, fp4 = importlib.import_module("b12x.gemm"), importlib.import_module("b12x.cute.fp4")
        depth = 2 * self.a.shape[1]
        operands = [
            (codes.unsqueeze(-1), fp4.as_grouped_scale_view(scales.unsqueeze(0), len(codes), depth))
            for codes, scales in ((self.a, self.scales_a), (self.b, self.scales_b))
        ]
        out = torch.full((len(self.a), len(self.b), 1), float("nan"), dtype=torch.bfloat16, device=reference.DEVICE)
        types = {"ab_dtype": "float4_e2m1fn", "sf_dtype": "float8_e4m3fn", "c_dtype": "bfloat16", "sf_vec_size": 16}
        KEPT.append((self, operands, out))
        gemm.dense_gemm(*operands, out, alpha=self.alpha, **types)
        return out[:, :, 0]


def gemm_case(rows: int, columns: int, depth: int) -> tuple[GemmCall, Expected]:
    """Elements of any code, block scales of all mantissas in [0.125, 4), and what the GEMM must return."""
    device = reference.DEVICE
    codes = [torch.randint(0, 256, (size, depth // 2), dtype=torch.uint8, device=device) for size in (rows, columns)]
    scales = [torch.randint(0x20, 0x48, (size, depth // 16), dtype=torch.uint8, device=device) for size in (rows, columns)]
    alpha = torch.rand(1, device=device) / depth
    a, b = (dequantized(*pair) for pair in zip(codes, scales, strict=True))
    values, magnitudes = (left @ right.T * alpha.double() for left, right in ((a, b), (a.abs(), b.abs())))
    bound = values.abs() * HALF_ULP[torch.bfloat16] * 1.01 + magnitudes * ACCUMULATION * 2 + 2.0**-24
    stored = [interleaved(each) for each in scales]
    return GemmCall(codes[0], codes[1], stored[0], stored[1], alpha), Expected(values, bound, values)


def gemm_faults(call: GemmCall) -> dict[str, GemmCall]:
    """Calls with a planted fault; the operands have the same shape."""
    linear = reference.unswizzled(call.scales_a, len(call.a), call.a.shape[1] // 8).contiguous().view_as(call.scales_a)
    return {
        "the operands' scales change places": replace(call, scales_a=call.scales_b, scales_b=call.scales_a),
        "the scales of A are row-major": replace(call, scales_a=linear),
        "the scales of B are those of the row before": replace(call, scales_b=call.scales_b.roll(16)),
        "the elements of a byte change places": replace(call, a=call.a << 4 | call.a >> 4),
        "alpha is 5 % too large": replace(call, alpha=call.alpha * 1.05),
    }


def check_gemm(report: OperatorReport, pattern: str, calls: Calls) -> None:
    if not fnmatch.fnmatch("gemm", pattern):
        return
    for shape in calls.gemms:
        call, expected = gemm_case(*shape)
        report.add(attempt("dense_gemm", "x".join(map(str, shape)), expected, call.run))
        if shape[0] == shape[1]:
            for fault, wrong in gemm_faults(call).items():
                report.fault(f"dense_gemm: {fault}", attempt("", "", expected, wrong.run))


# ---- fused MoE


@dataclass(frozen=True)
class B12xMoeCall:
    """The arguments of ``b12x_moe_fp4``; planted faults replace them. Both input scales have a value for each expert."""

    x: Tensor
    scale1: Tensor
    w1: Tensor
    s1: Tensor
    alpha1: Tensor
    scale2: Tensor
    w2: Tensor
    s2: Tensor
    alpha2: Tensor
    weights: Tensor
    experts: Tensor
    reserved: bool = False

    def workspace(self, moe: Any) -> Any:
        """One that b12x enlarges; or, if the kernel is not dynamic, the largest one that kernels of its kind can have."""
        tokens, active = self.experts.shape

        def is_small(count: int) -> bool:
            return bool(moe.select_tp_moe_backend(num_tokens=count, num_topk=active) == "static")

        if not self.reserved or not is_small(tokens):
            return moe.allocate_tp_moe_workspace_pool()
        while is_small(tokens + 1):
            tokens += 1
        largest = self.x.new_empty(tokens, self.x.shape[1]), self.experts.new_empty(tokens, active)
        weights = self.scale1, self.w1, self.scale2, self.w2
        return moe.allocate_tp_moe_workspace(largest[0], *weights, largest[1], input_scales_static=True)

    def run(self) -> Tensor:
        moe = importlib.import_module("b12x.integration.tp_moe")
        output = torch.full_like(self.x, float("nan"))
        workspace = self.workspace(moe)
        KEPT.append((self, output, workspace))
        moe.b12x_moe_fp4(
            *(self.x, self.scale1, self.w1, self.s1, self.alpha1),
            *(self.scale2, self.w2, self.s2, self.alpha2, self.weights, self.experts),
            workspace=workspace,
            output=output,
            input_scales_are_reciprocal=True,
            input_scales_static=True,
        )
        return output


def moe_call(layer: MoeLayer, scale1: Tensor, x: Tensor, route: tuple[Tensor, Tensor]) -> B12xMoeCall:
    """Arguments as SGLang's integration makes them; ``scale1`` are the experts' scales of the input."""
    s1, s2 = (interleaved(scales).view(torch.float8_e4m3fn) for scales in (layer.s1, layer.s2))
    gate_up, down = (layer.w1, s1, layer.g1 / scale1), (layer.w2, s2, layer.g2 / layer.scale2)
    return B12xMoeCall(x, scale1, *gate_up, layer.scale2, *down, route[1].float(), route[0])


def moe_expected(layer: MoeLayer, scale1: Tensor, x: Tensor, route: tuple[Tensor, Tensor]) -> Expected:
    """The layer in float64, expert by expert, with the intervals that fp32 accumulation and quantization permit."""
    experts, weights = route[0].long(), route[1].double()
    width, half_ulp = layer.shape.width, HALF_ULP[torch.bfloat16]
    values, plain, slack, positive, negative = (
        torch.zeros(len(x), layer.shape.hidden, dtype=torch.float64, device=reference.DEVICE) for _ in range(5)
    )
    for expert in sorted(set(experts.flatten().tolist())):
        token, slot = torch.where(experts == expert)
        factor = weights[token, slot].unsqueeze(-1)
        w1 = dequantized(layer.w1[expert], layer.s1[expert]) * layer.g1[expert].double()
        w2 = dequantized(layer.w2[expert], layer.s2[expert]) * layer.g2[expert].double()
        exact = x[token].double()
        least, greatest = quantized_interval(exact, exact, scale1[expert].double())
        middle, unsure = (least + greatest) / 2, (greatest - least) / 2
        sums, error = middle @ w1.T, (middle.abs() * ACCUMULATION + unsure) @ w1.abs().T
        products = torch.stack(
            [up * torch.nn.functional.silu(gate) for up in ends(sums, error, width) for gate in ends(sums, error, -width)]
        )
        low, high = products.amin(0), products.amax(0)
        low, high = (rounded(end + sign * end.abs() * FUNCTIONS, torch.bfloat16) for end, sign in ((low, -1), (high, 1)))
        least, greatest = quantized_interval(low, high, layer.scale2[expert].double())
        middle, unsure = (least + greatest) / 2, (greatest - least) / 2
        for first in range(0, width, SLICE):
            columns = slice(first, first + SLICE)
            inner, matrix = middle[:, columns], w2[:, columns]
            part = inner @ matrix.T * factor
            doubt = (unsure[:, columns] + inner.abs() * ACCUMULATION) @ matrix.abs().T * factor
            doubt = doubt + part.abs() * half_ulp * 2.02  # times alpha, and times the routing weight
            values.index_add_(0, token, part)
            slack.index_add_(0, token, doubt)
            positive.index_add_(0, token, part.clamp(min=0) + doubt)
            negative.index_add_(0, token, (-part).clamp(min=0) + doubt)
        sums = exact @ w1.T
        plain.index_add_(0, token, sums[:, :width] * torch.nn.functional.silu(sums[:, width:]) @ w2.T * factor)
    # Sums of any of the parts lie between those of the negative and of the positive ones, and each is rounded.
    additions = layer.shape.active * -(-width // SLICE)
    bound = slack + additions * half_ulp * torch.maximum(positive, negative) * (1 + additions * half_ulp)
    return Expected(values, bound + 1e-30, plain)


def ends(sums: Tensor, error: Tensor, width: int) -> list[Tensor]:
    """The least and the greatest values of the first or, if ``width`` is negative, the last columns."""
    columns = slice(0, width) if width > 0 else slice(width, None)
    return [(sums + sign * error)[:, columns] for sign in (-1, 1)]


def moe_faults(call: B12xMoeCall, layer: MoeLayer) -> dict[str, B12xMoeCall]:
    """Calls with a planted fault."""
    linear = layer.s1.contiguous().view(torch.float8_e4m3fn)
    return {
        "gate and up change places": replace(call, w1=torch.cat(call.w1.chunk(2, dim=1)[::-1], dim=1)),
        "w1's scales are those of the expert before": replace(call, s1=call.s1.view(torch.uint8).roll(1, 0).view_as(call.s1)),
        "w2's scales are those of the expert before": replace(call, s2=call.s2.view(torch.uint8).roll(1, 0).view_as(call.s2)),
        "w1's scales are not interleaved": replace(call, s1=linear),
        "alpha of GEMM 1 is that of the expert before": replace(call, alpha1=call.alpha1.roll(1)),
        "alpha of GEMM 2 is that of the expert before": replace(call, alpha2=call.alpha2.roll(1)),
        "the input's scale is that of the expert before": replace(call, scale1=call.scale1.roll(1)),
        "intermediate scale of the expert before": replace(call, scale2=call.scale2.roll(1)),
        "routing weights of the slot before": replace(call, weights=call.weights.roll(1, 1).contiguous()),
        "one token's experts are those of the token before": replace(call, experts=call.experts.roll(1, 0).contiguous()),
    }


def last_kernel() -> str:
    """The kernel that b12x selected for the last call."""
    (key, _) = importlib.import_module("b12x.integration.tp_moe")._LAST_KERNEL
    return str(key[0]) if key else "none"


def moe_case(layer: MoeLayer, scale1: Tensor, tokens: int, hot: bool) -> tuple[B12xMoeCall, Expected]:
    """A call with random tokens and experts, or with the same experts for all tokens, and what it must return."""
    shape = layer.shape
    x = torch.randn(tokens, shape.hidden, device=reference.DEVICE).bfloat16()
    logits = router_logits(tokens, shape, False)
    route = routed(logits[:1].repeat(tokens, 1) if hot else logits, shape.active)
    return moe_call(layer, scale1, x, route), moe_expected(layer, scale1, x, route)


def attempt_moe(expected: Expected, call: Callable[[], Tensor]) -> OperatorRow:
    """Run and compare. ``why`` of a wrong row says where it is wrong: in all tiles of a token, or in single tiles of many."""
    outputs: list[Tensor] = []

    def run() -> Tensor:
        outputs.append(call())
        return outputs[0]

    row = attempt("b12x_moe_fp4", "", expected, run)
    if row.verdict != "WRONG" or row.why:
        return row
    wrong = (outputs[0].double() - expected.values).abs() > expected.bound
    tiles = wrong.unflatten(1, (-1, TILE)).any(-1)
    where = (
        f"{int(wrong.sum())} outputs beyond the bound, in {int(tiles.any(-1).sum())} of {len(tiles)} tokens and "
        f"{int(tiles.sum())} of {tiles.numel()} tiles of {TILE} columns"
    )
    return replace(row, why=f"error/bound {row.error_over_bound:.3f}, rms {row.relative_rms:.2e}: {where}")


def check_moe(report: OperatorReport, pattern: str, calls: Calls) -> None:
    for shape, counts in calls.moes:
        cases = [(tokens, False) for tokens in counts if fnmatch.fnmatch(f"moe-{shape.name}", pattern)]
        cases += [(HOT_TOKENS, True)] if fnmatch.fnmatch("moe-hot", pattern) else []
        if not cases:
            continue
        layer = MoeLayer.random(shape)
        scale1 = 448.0 * (0.75 + 0.5 * torch.rand(shape.experts, device=reference.DEVICE))
        for tokens, hot in cases:
            call, expected = moe_case(layer, scale1, tokens, hot)
            call = replace(call, reserved=calls.reserved)
            row = attempt_moe(expected, call.run)
            which = f"{tokens} tokens with the same experts" if hot else f"{tokens} tokens"
            report.add(replace(row, case=f"{shape.name}, {which}, kernel {last_kernel()}"))
            for fault, wrong in moe_faults(call, layer).items() if tokens in FAULTY_TOKENS else ():
                report.fault(f"b12x_moe_fp4, {last_kernel()}: {fault}", attempt("", "", expected, wrong.run))


# ---- the program


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--recipe", type=Path, metavar="FILE", help="the calls of the table [b12x] of this recipe")


def run(report: OperatorReport, options: argparse.Namespace) -> None:
    try:
        calls = Calls.of_recipe(options.recipe) if options.recipe else Calls()
    except (OSError, ValueError) as problem:
        raise Unusable(f"--recipe {options.recipe}: {problem}") from problem
    except KeyError as key:
        raise Unusable(
            f"--recipe {options.recipe}: there is no {key}; name a recipe with a table [b12x], such as sglang-0.5.11-b12x.toml"
        ) from key
    check_gemm(report, options.only, calls)
    check_moe(report, options.only, calls)
