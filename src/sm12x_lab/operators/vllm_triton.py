"""Compare the Triton kernels that vLLM runs on SM12x with float64 of the dequantized operands.

Needs torch, Triton and vLLM 0.20.

vLLM's own functions launch the kernels, and choose tiles by the name of the GPU: ``--gpu``. Hopper has the mma of these
kernels, so their PTX runs as it is; its tensor cores keep fewer bits of a sum than fp32, which the bounds permit. Between the
GEMMs of a MoE, vLLM runs its activation kernel, which needs PTX for SM12x: the code for Hopper in official wheels is not for
the 256-bit accesses that vLLM chooses for capability 10 and more than 128 rows.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import reference
import torch
from engine_modules import called, configured, created, is_chosen, processed, refused, require_vllm, vllm
from reference import FUNCTIONS, HALF_ULP, Expected, MoeShape, attempt, nearest_e4m3, rounded, routed, router_logits
from report import OperatorReport

Tensor = torch.Tensor
Interval = tuple[Tensor, Tensor]

BLOCK = 128
"""Elements of a row, and rows, that share a scale."""
FP8_SUMS, BF16_SUMS = 2.0**-11, 2.0**-15
"""Error of a sum of products on a tensor core of Hopper, relative to the sum of magnitudes."""
SCALING = 2.0**-22
"""Error of a division or multiplication by a scale."""

FP8_BACKENDS = (
    ("selected", ""),
    ("Triton", "CutlassFp8BlockScaledMMKernel,MarlinFP8ScaledMMLinearKernel"),
)
"""Block-scaled FP8 layers with the back-end that vLLM selects, and without those before Triton's."""

LINEAR_SHAPES = ((256, 384), (5120, 14336), (6144, 5120), (5120, 34816), (17408, 5120))
"""Inputs and outputs: a small layer; attention and MLP of Qwen3.5-27B."""

SMALL_MOE = MoeShape("small", 8, 256, 128, 4)
MOE_SHAPES = {
    "fp8": (SMALL_MOE, MoeShape("qwen3.6-35b-a3b", 256, 2048, 512, 8)),
    "bf16": (SMALL_MOE, MoeShape("qwen3.6-35b-a3b", 256, 2048, 512, 8)),
    "int4": (SMALL_MOE, MoeShape("qwen3.5-122b-a10b", 256, 3072, 1024, 8)),
}


def to_bf16(values: Tensor) -> Tensor:
    result: Tensor = rounded(values, torch.bfloat16)
    return result


def gemm_bound(values: Tensor, slack: Tensor) -> Tensor:
    """Error of an output in bf16 whose sum may differ by ``slack``."""
    bound: Tensor = (values.abs() + slack) * HALF_ULP[torch.bfloat16] * 1.01 + slack + 1e-30
    return bound


# ---- FP8


def fp8_interval(low: Tensor, high: Tensor) -> Interval:
    """The least and the greatest value of elements in [low, high] after quantization to e4m3 with a scale for each block."""
    low, high = (values.reshape(*values.shape[:-1], -1, BLOCK) for values in (low, high))
    nearest_zero = torch.where((low <= 0) & (high >= 0), torch.zeros_like(low), torch.minimum(low.abs(), high.abs()))
    amax = [magnitudes.amax(-1, keepdim=True) for magnitudes in (nearest_zero, torch.maximum(low.abs(), high.abs()))]
    scales = [(amax[0] / 448 * (1 - SCALING)).clamp(min=1e-13), (amax[1] / 448 * (1 + SCALING)).clamp(min=1e-13)]
    least, greatest = torch.full_like(low, float("inf")), torch.full_like(low, float("-inf"))
    for end in (low, high):
        for divisor in scales:
            for slack in (1 - SCALING, 1 + SCALING):
                code = nearest_e4m3(end.abs() / divisor * slack) * end.sign()
                for scale in scales:
                    least, greatest = torch.minimum(least, code * scale), torch.maximum(greatest, code * scale)
    return least.flatten(-2), greatest.flatten(-2)


def random_fp8(rows: int, columns: int, *leading: int) -> tuple[Tensor, Tensor]:
    """Elements of e4m3, and their scales by blocks."""
    elements = torch.randn(*leading, rows, columns, device=reference.DEVICE).to(torch.float8_e4m3fn)
    blocks = (*leading, -(-rows // BLOCK), -(-columns // BLOCK))
    return elements, (0.5 + torch.rand(blocks, device=reference.DEVICE)) / columns**0.5


def fp8_values(elements: Tensor, scales: Tensor) -> Tensor:
    """Elements times the scales of their blocks, in float64."""
    wide: Tensor = scales.double().repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    return elements.double() * wide[..., : elements.shape[-2], : elements.shape[-1]]


def fp8_layer(elements: Tensor, scales: Tensor, prefix: str) -> Any:
    """vLLM's linear layer of a checkpoint in FP8 with block scales."""
    config = vllm("model_executor.layers.quantization.fp8", "Fp8Config")(True, "dynamic", None, [BLOCK, BLOCK])
    make = vllm("model_executor.layers.linear", "ReplicatedLinear")
    rows, columns = elements.shape
    options = {"bias": False, "params_dtype": torch.bfloat16, "quant_config": config, "prefix": prefix}
    # The layer reads the type of its input from the configuration of the model, and that of its output from torch. It quantizes
    # with vLLM's kernel, as with --enforce-eager.
    current = vllm("config", "get_current_vllm_config")()
    current.model_config = SimpleNamespace(dtype=torch.bfloat16)
    current.compilation_config.custom_ops = ["all"]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = created(lambda: make(columns, rows, **options))
    finally:
        torch.set_default_dtype(before)
    for name, tensor in (("weight", elements), ("weight_scale_inv", scales)):
        parameter = getattr(layer, name)
        parameter.weight_loader(parameter, tensor)
    return processed(layer)


def linear_expected(elements: Tensor, scales: Tensor, x: Tensor) -> Expected:
    weights = fp8_values(elements, scales)
    least, greatest = fp8_interval(x.double(), x.double())
    middle, unsure = (least + greatest) / 2, (greatest - least) / 2
    values = middle @ weights.T
    slack = (middle.abs() * FP8_SUMS + unsure) @ weights.abs().T
    return Expected(values, gemm_bound(values, slack), x.double() @ weights.T)


@contextmanager
def without(kernels: str) -> Iterator[None]:
    """vLLM selects none of these kernels of linear layers."""
    name = "VLLM_DISABLED_KERNELS"
    before = os.environ.pop(name, None)
    os.environ.update({name: kernels} if kernels else {})
    try:
        yield
    finally:
        os.environ.pop(name, None)
        os.environ.update({name: before} if before else {})


def check_linear_fp8(report: OperatorReport) -> None:
    for columns, rows in LINEAR_SHAPES:
        elements, scales = random_fp8(rows, columns)
        inputs = [torch.randn(tokens, columns, device=reference.DEVICE).bfloat16() for tokens in (1, 33, 300)]
        expectations = [linear_expected(elements, scales, x) for x in inputs]
        for backend, disabled in FP8_BACKENDS:
            with without(disabled), configured():
                case = f"{rows}x{columns}, {backend}"
                try:
                    layer = fp8_layer(elements, scales, case)
                except Exception as error:  # vLLM raises many types
                    report.add(refused("FP8 linear", case, error))
                    continue
                kernel = type(layer.quant_method.fp8_linear).__name__
                for x, expected in zip(inputs, expectations, strict=True):
                    row = attempt("FP8 linear", f"{case} ({kernel}), {len(x)} tokens", expected, partial(called, layer, x))
                    report.add(row)
                if columns != LINEAR_SHAPES[0][0] or row.verdict != "right":
                    continue
                for fault, wrong in (
                    ("the weight's scales are those of the block before", (elements, scales.roll(1, 1))),
                    ("the weight's scales are those of the rows before", (elements, scales.roll(1, 0))),
                    ("the weight's rows are those before", (elements.view(torch.uint8).roll(1, 0).view_as(elements), scales)),
                ):
                    outcome = attempt("", "", expectations[1], partial(called, fp8_layer(*wrong, f"{case} {fault}"), inputs[1]))
                    report.fault(f"FP8 linear, {kernel}: {fault}", outcome)


# ---- INT8


def check_linear_int8(report: OperatorReport) -> None:
    """Products of integers are exact; the result is scaled in fp32 and rounded, and so is its sum with the bias."""
    scaled_mm = vllm("model_executor.layers.quantization.compressed_tensors.triton_scaled_mm", "triton_scaled_mm")
    for columns, rows in LINEAR_SHAPES[:3]:
        for tokens in (1, 33, 100, 300):
            a, b = (
                torch.randint(-127, 128, (size, columns), dtype=torch.int8, device=reference.DEVICE) for size in (tokens, rows)
            )
            scale_a, scale_b = ((0.5 + torch.rand(size, 1, device=reference.DEVICE)) / 4096 for size in (tokens, rows))
            for with_bias in (False, True):
                bias = torch.randn(rows, device=reference.DEVICE).bfloat16() if with_bias else None
                values = a.double() @ b.double().T * scale_a.double() * scale_b.double().T
                bound = gemm_bound(values, values.abs() * SCALING)
                if bias is not None:
                    values = values + bias.double()
                    bound = bound + gemm_bound(values, bound)
                expected = Expected(values, bound, values)

                def mm(
                    scale_a: Tensor = scale_a,
                    scale_b: Tensor = scale_b,
                    a: Tensor = a,
                    b: Tensor = b,
                    bias: Tensor | None = bias,
                ) -> Tensor:
                    result: Tensor = scaled_mm(a, b.T, scale_a, scale_b, torch.bfloat16, bias)
                    return result

                report.add(attempt("triton_scaled_mm", f"INT8 {tokens}x{rows}x{columns}{', bias' * with_bias}", expected, mm))
                if columns == LINEAR_SHAPES[0][0] and tokens == 33 and not with_bias:
                    wrong = attempt("", "", expected, partial(mm, scale_a.roll(1, 0)))
                    report.fault("triton_scaled_mm: a's scales are those of the row before", wrong)
                    wrong = attempt("", "", expected, partial(mm, scale_b=scale_b.roll(1, 0)))
                    report.fault("triton_scaled_mm: b's scales are those of the row before", wrong)


# ---- fused MoE


@dataclass(frozen=True)
class TritonExperts:
    """Arguments of ``fused_experts``: the first half of w1 is gate, the second up. ``zeros`` of int4 are packed along rows."""

    kind: str
    w1: Tensor
    w2: Tensor
    scales: tuple[Tensor, ...] = ()
    zeros: tuple[Tensor, ...] = ()

    @classmethod
    def random(cls, kind: str, shape: MoeShape) -> TritonExperts:
        sizes = ((2 * shape.width, shape.hidden), (shape.hidden, shape.width))
        if kind == "fp8":
            (w1, s1), (w2, s2) = (random_fp8(*size, shape.experts) for size in sizes)
            return cls(kind, w1, w2, (s1, s2))
        if kind == "bf16":
            w1, w2 = (
                (torch.randn(shape.experts, *size, dtype=torch.bfloat16, device=reference.DEVICE) / size[1] ** 0.5)
                for size in sizes
            )
            return cls(kind, w1, w2)

        def codes(rows: int, columns: int) -> Tensor:
            return torch.randint(0, 256, (shape.experts, rows, columns), dtype=torch.uint8, device=reference.DEVICE)

        def int4_scales(rows: int, columns: int) -> Tensor:
            random = torch.rand(shape.experts, rows, columns // BLOCK, device=reference.DEVICE)
            scales: Tensor = ((0.5 + random) / (5 * columns**0.5)).bfloat16()
            return scales

        w1, w2 = (codes(rows, columns // 2) for rows, columns in sizes)
        zeros = tuple(codes(rows // 2, columns // BLOCK) for rows, columns in sizes) if kind == "int4-zeros" else ()
        return cls(kind, w1, w2, tuple(int4_scales(*size) for size in sizes), zeros)

    def values(self, number: int, expert: int) -> Tensor:
        """The dequantized weights of an expert; those of int4 are rounded to bf16."""
        weights = (self.w1, self.w2)[number][expert]
        if not self.scales:
            return weights.double()
        scales = self.scales[number][expert]
        if self.kind == "fp8":
            return fp8_values(weights, scales)
        zeros = nibbles(self.zeros[number][expert], 0).repeat_interleave(BLOCK, -1) if self.zeros else 8
        values: Tensor = (nibbles(weights, 1) - zeros) * scales.double().repeat_interleave(BLOCK, -1)
        return to_bf16(values)

    def run(self, x: Tensor, route: tuple[Tensor, Tensor]) -> Tensor:
        config = vllm("model_executor.layers.fused_moe.config")
        options: Any = {}
        if self.kind == "fp8":
            options["quant_config"] = config.fp8_w8a8_moe_quant_config(*self.scales, block_shape=[BLOCK, BLOCK])
        elif self.scales:
            zeros = self.zeros or (None, None)
            options["quant_config"] = config.int4_w4a16_moe_quant_config(*self.scales, *zeros, block_shape=[0, BLOCK])
        run = vllm("model_executor.layers.fused_moe.fused_moe", "fused_experts")
        result: Tensor = run(x, self.w1, self.w2, route[1].float(), route[0], **options)
        return result


def nibbles(packed: Tensor, dimension: int) -> Tensor:
    """Integers of 4 bits; the low ones are first."""
    pair = torch.stack((packed & 15, packed >> 4), dim=dimension + 1)
    result: Tensor = pair.flatten(dimension, dimension + 1).double()
    return result


def experts_expected(experts: TritonExperts, x: Tensor, route: tuple[Tensor, Tensor]) -> Expected:
    """The layer in float64, expert by expert. Both GEMMs, the activation and each contribution are rounded to bf16."""
    chosen, weights = route[0].long(), route[1].double()
    values, plain, bound, magnitudes = (torch.zeros(x.shape, dtype=torch.float64, device=x.device) for _ in range(4))
    sums_error = FP8_SUMS if experts.kind == "fp8" else BF16_SUMS

    def quantized(low: Tensor, high: Tensor) -> Interval:
        least, greatest = fp8_interval(low, high) if experts.kind == "fp8" else (low, high)
        return (least + greatest) / 2, (greatest - least) / 2

    for expert in sorted(set(chosen.flatten().tolist())):
        token, slot = torch.where(chosen == expert)
        factor = weights[token, slot].unsqueeze(-1)
        w1, w2 = (experts.values(number, expert) for number in (0, 1))
        exact = x[token].double()
        middle, unsure = quantized(exact, exact)
        sums, error = middle @ w1.T, (middle.abs() * sums_error + unsure) @ w1.abs().T
        (gate_low, up_low), (gate_high, up_high) = (to_bf16(sums + sign * error).chunk(2, -1) for sign in (-1, 1))
        gates = [torch.nn.functional.silu(gate) for gate in (gate_low, gate_high)]
        gates = [gate * (1 + sign * FUNCTIONS) for gate in gates for sign in (-1, 1)]
        products = torch.stack([gate * up for gate in (*gates, *map(to_bf16, gates)) for up in (up_low, up_high)])
        middle, unsure = quantized(to_bf16(products.amin(0)), to_bf16(products.amax(0)))
        part = middle @ w2.T
        values.index_add_(0, token, part * factor)
        magnitudes.index_add_(0, token, part.abs() * factor)
        bound.index_add_(0, token, (middle.abs() * sums_error + unsure) @ w2.abs().T * factor)
        gate, up = (exact @ w1.T).chunk(2, -1)
        plain.index_add_(0, token, (torch.nn.functional.silu(gate) * up) @ w2.T * factor)
    roundings = (route[0].shape[1] + 1) * HALF_ULP[torch.bfloat16]
    return Expected(values, bound + roundings * (magnitudes + bound) * 1.01 + 1e-30, plain)


def moe_faults(
    experts: TritonExperts, route: tuple[Tensor, Tensor]
) -> Iterator[tuple[str, TritonExperts, tuple[Tensor, Tensor]]]:
    def before(values: Tensor) -> Tensor:
        return values.view(torch.uint8).roll(1, 0).view(values.dtype)

    halves = experts.w1.view(torch.uint8).chunk(2, 1)
    yield "gate and up change places", replace(experts, w1=torch.cat(halves[::-1], 1).view(experts.w1.dtype)), route
    yield "w2 is that of the expert before", replace(experts, w2=before(experts.w2)), route
    yield "routing weights of the slot before", experts, (route[0], route[1].roll(1, 1).contiguous())
    for number in range(len(experts.scales)):
        scales = [*experts.scales]
        scales[number] = before(scales[number])
        yield f"w{number + 1}'s scales are those of the expert before", replace(experts, scales=tuple(scales)), route
        if experts.zeros:
            zeros = [*experts.zeros]
            zeros[number] = before(zeros[number])
            yield f"w{number + 1}'s zeros are those of the expert before", replace(experts, zeros=tuple(zeros)), route


def check_moe(report: OperatorReport, kind: str) -> None:
    """int4 with few tokens for an expert runs a CUDA kernel in vLLM: only the larger calls are Triton's."""
    for shape in MOE_SHAPES[kind.partition("-")[0]]:
        if kind == "int4-zeros" and shape is not SMALL_MOE:
            continue
        experts = TritonExperts.random(kind, shape)
        for tokens in (1, 33, 300):
            if kind.startswith("int4") and tokens * shape.active <= 6 * shape.experts:
                continue
            x = torch.randn(tokens, shape.hidden, device=reference.DEVICE).bfloat16()
            route = routed(router_logits(tokens, shape, tokens == 300), shape.active)
            expected = experts_expected(experts, x, route)
            with configured():
                case = f"{kind}, {shape.name}, {tokens} tokens"
                report.add(row := attempt("fused_experts", case, expected, partial(experts.run, x, route)))
                if shape is SMALL_MOE and tokens == 33 and row.verdict == "right":
                    for fault, wrong, wrong_route in moe_faults(experts, route):
                        outcome = attempt("", "", expected, partial(wrong.run, x, wrong_route))
                        report.fault(f"fused_experts, {kind}: {fault}", outcome)


# ---- attention


@dataclass(frozen=True)
class AttentionShape:
    """Attention of a layer; ``window`` is the number of tokens that a token attends to, 0 for all."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    sinks: bool = False


ATTENTION_SHAPES = (
    AttentionShape("qwen3.5-27b", 24, 4, 256),
    AttentionShape("gpt-oss-120b", 64, 8, 64, sinks=True),
    AttentionShape("gpt-oss-120b, window", 64, 8, 64, 128, True),
)
BATCHES = {
    "prefill": ((5, 5), (130, 130), (33, 300), (1, 71)),
    "decode": ((1, 1), (1, 300), (1, 1000)),
    "decode in segments": ((1, 1), (1, 300), (1, 1000)),
}
"""For each sequence, the tokens of the call and all tokens with them."""
PAGE, SEGMENTS = 16, 16


def attention_probabilities(scores: Tensor, window: int, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Which keys each query does not attend to, and the probabilities of all keys.

    ``scores`` are of heads, queries and keys; the queries are those of the last tokens. ``window`` is as in a shape.
    """
    _, queries, keys = scores.shape
    here = torch.arange(keys - queries, keys, device=scores.device)[:, None]
    there = torch.arange(keys, device=scores.device)
    hidden = (there > here) | (there <= here - (window or keys + 1))
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, queries, 1)), -1)
    return hidden, torch.softmax(scores, -1)[..., :keys]


@dataclass(frozen=True)
class UnifiedAttentionCall:
    """The arguments of vLLM's Triton attention. Keys and values are in pages of a cache."""

    shape: AttentionShape
    lengths: tuple[tuple[int, int], ...]
    segments: bool
    q: Tensor
    keys: Tensor
    values: Tensor
    scales: tuple[Tensor, Tensor]
    pages: Tensor
    totals: Tensor
    sinks: Tensor | None

    @classmethod
    def random(
        cls, shape: AttentionShape, lengths: tuple[tuple[int, int], ...], segments: bool, fp8: bool
    ) -> UnifiedAttentionCall:
        """Scales of an FP8 cache are powers of two: then bf16 has every dequantized value."""
        pages_each = -(-max(total for _, total in lengths) // PAGE)
        pages = torch.randperm(len(lengths) * pages_each, device=reference.DEVICE).int().view(len(lengths), pages_each)
        dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
        size = (pages.numel(), PAGE, shape.kv_heads, shape.head_dim)
        keys, values = (torch.zeros(size, device=reference.DEVICE).to(dtype) for _ in range(2))
        q = torch.randn(sum(new for new, _ in lengths), shape.heads, shape.head_dim, device=reference.DEVICE).bfloat16()
        scales = tuple(torch.tensor(scale if fp8 else 1.0, device=reference.DEVICE) for scale in (2.0**-5, 2.0**-4))
        totals = torch.tensor([total for _, total in lengths], dtype=torch.int32, device=reference.DEVICE)
        sinks = torch.randn(shape.heads, device=reference.DEVICE).bfloat16() + 3 if shape.sinks else None
        return cls(shape, lengths, segments, q, keys, values, scales, pages, totals, sinks)  # type: ignore[arg-type]

    @property
    def fp8(self) -> bool:
        return self.keys.dtype == torch.float8_e4m3fn

    def store(self, tokens: Sequence[Tensor], slots: Tensor) -> None:
        """Write keys and values of tokens to the cache with vLLM's kernel."""
        store = vllm("v1.attention.ops.triton_reshape_and_cache_flash", "triton_reshape_and_cache_flash")
        store(*tokens, self.keys, self.values, slots, "fp8" if self.fp8 else "auto", *self.scales)

    def slots(self) -> Tensor:
        """The places of all tokens of all sequences."""
        rows = []
        for pages, (_, total) in zip(self.pages.long(), self.lengths, strict=True):
            at = torch.arange(total, device=pages.device)
            rows.append(pages[at // PAGE] * PAGE + at % PAGE)
        return torch.cat(rows)

    def cached(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens as the cache has them, in float64."""
        keys, values = (
            cache.flatten(0, 1)[self.slots()].double() * scale.double()
            for cache, scale in zip((self.keys, self.values), self.scales, strict=True)
        )
        return keys, values

    def run(self) -> Tensor:
        shape, out = self.shape, torch.full_like(self.q, float("nan"))
        starts = torch.tensor([0, *(new for new, _ in self.lengths)], device=reference.DEVICE).cumsum(0).int()
        expanded = [scale.expand(len(self.lengths), shape.kv_heads) for scale in self.scales]
        segmented: Any = {}
        if self.segments:
            size = (len(self.lengths), shape.heads, SEGMENTS)
            maxima, sums = (torch.empty(size, device=reference.DEVICE) for _ in range(2))
            segmented = {
                "seq_threshold_3D": len(self.lengths),
                "num_par_softmax_segments": SEGMENTS,
                "softmax_segm_output": torch.empty(*size, shape.head_dim, device=reference.DEVICE),
                "softmax_segm_max": maxima,
                "softmax_segm_expsum": sums,
            }
        mode = vllm("v1.kv_cache_interface", "KVQuantMode")
        vllm("v1.attention.ops.triton_unified_attention", "unified_attention")(
            q=self.q,
            k=self.keys,
            v=self.values,
            out=out,
            cu_seqlens_q=starts,
            max_seqlen_q=max(new for new, _ in self.lengths),
            seqused_k=self.totals,
            max_seqlen_k=int(self.totals.max()),
            softmax_scale=shape.head_dim**-0.5,
            causal=True,
            window_size=(shape.window - 1, 0) if shape.window else (-1, -1),
            block_table=self.pages,
            softcap=0,
            q_descale=None,
            k_descale=expanded[0],
            v_descale=expanded[1],
            sinks=self.sinks,
            kv_quant_mode=mode.FP8_PER_TENSOR if self.fp8 else mode.NONE,
            **segmented,
        )
        return out

    def expected(self) -> Expected:
        """Attention in float64; probabilities may be rounded to bf16."""
        shape, parts = self.shape, []
        keys, values = self.cached()
        queries = torch.split(self.q.double(), [new for new, _ in self.lengths])
        totals = [total for _, total in self.lengths]
        for q, k, v in zip(queries, torch.split(keys, totals), torch.split(values, totals), strict=True):
            k, v = (tensor.repeat_interleave(shape.heads // shape.kv_heads, 1) for tensor in (k, v))
            scores, sizes = (torch.einsum("qhd,khd->hqk", *pair) / shape.head_dim**0.5 for pair in ((q, k), (q.abs(), k.abs())))
            hidden, probabilities = attention_probabilities(scores, shape.window, self.sinks)
            outputs, magnitudes = (torch.einsum("hqk,khd->qhd", probabilities, tensor) for tensor in (v, v.abs()))
            unsure = sizes.masked_fill(hidden, 0).amax(-1).T[..., None] * BF16_SUMS + FUNCTIONS
            slack = magnitudes * (torch.expm1(2 * unsure) + HALF_ULP[torch.bfloat16] + BF16_SUMS)
            parts.append(Expected(outputs, gemm_bound(outputs, slack), outputs))
        return Expected(*(torch.cat([getattr(part, name) for part in parts]) for name in ("values", "bound", "plain")))


def attention_faults(call: UnifiedAttentionCall) -> Iterator[tuple[str, UnifiedAttentionCall]]:
    yield "the sequences' pages change places", replace(call, pages=call.pages.roll(1, 0))
    yield "the last token of each sequence is left out", replace(call, totals=(call.totals - 1).clamp(min=1))
    if call.fp8:
        yield "the keys' scale is twice as large", replace(call, scales=(call.scales[0] * 2, call.scales[1]))
        yield "the values' scale is 1.05 times as large", replace(call, scales=(call.scales[0], call.scales[1] * 1.05))
    if call.sinks is not None:
        yield "sinks are those of the head before", replace(call, sinks=call.sinks.roll(1))
    if call.shape.window:
        wider = replace(call.shape, window=call.shape.window + 1)
        yield "the window is one token longer", replace(call, shape=wider)


def check_attention(report: OperatorReport) -> None:
    for shape in ATTENTION_SHAPES:
        for fp8 in (False, True):
            for batch, lengths in BATCHES.items():
                call = UnifiedAttentionCall.random(shape, lengths, batch == "decode in segments", fp8)
                case = f"{shape.name}, {'FP8' if fp8 else 'bf16'} cache"
                slots = call.slots()
                tokens = [
                    torch.randn(len(slots), shape.kv_heads, shape.head_dim, device=reference.DEVICE).bfloat16() for _ in "kv"
                ]
                stored = [
                    nearest_e4m3((tensor.double() / scale).abs()) * tensor.double().sign() * scale if fp8 else tensor.double()
                    for tensor, scale in zip(tokens, call.scales, strict=True)
                ]
                exact = torch.cat(stored)

                def cached(call: UnifiedAttentionCall = call, tokens: list[Tensor] = tokens, slots: Tensor = slots) -> Tensor:
                    call.store(tokens, slots)
                    return torch.cat(call.cached())

                if batch == "prefill":
                    bits = Expected(exact, torch.full_like(exact, 1e-30), exact)
                    report.add(attempt("triton_reshape_and_cache_flash", case, bits, cached))
                    wrong = attempt("", "", bits, partial(cached, slots=slots.roll(1)))
                    report.fault(f"triton_reshape_and_cache_flash, {case}: tokens are stored in the places before", wrong)
                cached()
                expected = call.expected()
                report.add(row := attempt("unified_attention", f"{case}, {batch}", expected, call.run))
                if row.verdict == "right" and fp8 and batch != "decode":
                    for fault, changed in attention_faults(call):
                        outcome = attempt("", "", expected, changed.run)
                        report.fault(f"unified_attention, {case}, {batch}: {fault}", outcome)


# ---- the program


def named(gpu: str) -> None:
    """vLLM chooses tiles for this GPU."""
    vllm("platforms", "current_platform").get_device_name = lambda device_id=0: gpu


CHECKS: dict[str, Callable[[OperatorReport], None]] = {
    "linear-fp8": check_linear_fp8,
    "linear-int8": check_linear_int8,
    **{f"moe-{kind}": partial(check_moe, kind=kind) for kind in ("fp8", "bf16", "int4", "int4-zeros")},
    "attention": check_attention,
}


def run_checks(checks: Mapping[str, Callable[[OperatorReport], None]], report: OperatorReport, pattern: str) -> None:
    """Run the checks that ``--only`` names."""
    for name, check in checks.items():
        if is_chosen(name, pattern):
            check(report)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpu", default="NVIDIA RTX PRO 6000 Blackwell Server Edition", help="the GPU whose tiles vLLM chooses"
    )


def run(report: OperatorReport, options: argparse.Namespace) -> None:
    require_vllm()
    named(options.gpu)
    run_checks(CHECKS, report, options.only)
