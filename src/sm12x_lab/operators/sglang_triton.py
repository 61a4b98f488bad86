"""Compare the Triton kernels that SGLang runs on SM12x with float64 of the dequantized operands.

Needs torch, Triton and SGLang 0.5.11.

SGLang's own functions launch the kernels: FP8 linear layers with scales of blocks, as its back-end `triton` runs them, and
attention over a cache, as its back-end `triton` calls it. With an FP8 cache, the kernels round probabilities to e4m3, and in
`extend` also queries for what is cached; tokens of the call itself are read in bf16. Hopper has the mma of these kernels, so
their PTX runs as it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import reference
import torch
from engine_modules import require_sglang, sglang
from reference import FUNCTIONS, Expected, attempt
from report import OperatorReport
from vllm_triton import (
    BF16_SUMS,
    BLOCK,
    FP8_SUMS,
    LINEAR_SHAPES,
    AttentionShape,
    attention_probabilities,
    gemm_bound,
    linear_expected,
    random_fp8,
    run_checks,
)

Tensor = torch.Tensor

ATTENTION_SHAPES = (
    AttentionShape("qwen3.5-397b on 8 GPUs", 4, 1, 256),
    AttentionShape("gpt-oss-20b", 64, 8, 64, sinks=True),
    AttentionShape("gpt-oss-20b, window", 64, 8, 64, 128, True),
)
BATCHES = {
    "extend": ((5, 5), (130, 130), (33, 300), (1, 71)),
    "decode": ((1, 1), (1, 33), (1, 300), (1, 1000)),
}
"""For each sequence, the tokens of the call and all tokens with them."""
SPLITS = 8
"""Parts into which `decode` divides a cache, as by default (`--triton-attention-num-kv-splits`)."""
LEFT_OUT = 8
"""A fault. One token of a few hundred has less weight than the rounding of probabilities to e4m3."""
HALF_STEP = {torch.float8_e4m3fn: (2.0**-4, 2.0**-10), torch.bfloat16: (2.0**-8, 0.0)}
"""Error of a probability that is rounded to this type: relative, and of the largest one."""


def starts(lengths: list[int]) -> Tensor:
    """Where each sequence begins, and the end of the last."""
    return torch.tensor([0, *lengths], device=reference.DEVICE).cumsum(0).int()


@dataclass(frozen=True)
class TritonAttentionCall:
    """The arguments of SGLang's Triton attention.

    Caches have a row for each token, in any order: ``places`` are those of all tokens, by sequence. The keys and values of new
    tokens are ``k`` and ``v`` in `extend`; `decode` reads them from the cache. ``left_out`` tokens of each cache are not read.
    """

    shape: AttentionShape
    lengths: tuple[tuple[int, int], ...]
    decode: bool
    q: Tensor
    k: Tensor
    v: Tensor
    keys: Tensor
    values: Tensor
    scales: tuple[float, float]
    places: Tensor
    sinks: Tensor | None
    left_out: int = 0

    @classmethod
    def random(
        cls, shape: AttentionShape, lengths: tuple[tuple[int, int], ...], decode: bool, dtype: torch.dtype
    ) -> TritonAttentionCall:
        """Scales of an FP8 cache are powers of two: then bf16 has every dequantized value."""
        new, total = (sum(column) for column in zip(*lengths, strict=True))
        scales = (2.0**-5, 2.0**-4) if dtype is torch.float8_e4m3fn else (1.0, 1.0)

        def normal(tokens: int, heads: int) -> Tensor:
            return torch.randn(tokens, heads, shape.head_dim, device=reference.DEVICE)

        q, k, v = (normal(new, heads).bfloat16() for heads in (shape.heads, shape.kv_heads, shape.kv_heads))
        keys, values = ((normal(2 * total, shape.kv_heads) / scale).to(dtype) for scale in scales)
        places = torch.randperm(2 * total, device=reference.DEVICE)[:total]
        sinks = torch.randn(shape.heads, device=reference.DEVICE).bfloat16() + 3 if shape.sinks else None
        return cls(shape, lengths, decode, q, k, v, keys, values, scales, places, sinks)

    def cached(self) -> list[Tensor]:
        """The places of each sequence's tokens that are read from the cache."""
        each = torch.split(self.places, [total for _, total in self.lengths])
        counts = [total if self.decode else total - new for new, total in self.lengths]
        return [places[: max(count - self.left_out, min(count, 1))] for places, count in zip(each, counts, strict=True)]

    def run(self) -> Tensor:
        out, cached = torch.full_like(self.q, float("nan")), self.cached()
        cache_starts = starts([len(places) for places in cached])
        common = {"sm_scale": self.shape.head_dim**-0.5, "sinks": self.sinks}
        if self.decode:
            size = (len(cached), self.shape.heads, SPLITS)
            logits, sums = (torch.empty(*size, *rest, device=reference.DEVICE) for rest in ((self.shape.head_dim,), ()))
            splits = torch.full((len(cached),), SPLITS, dtype=torch.int32, device=reference.DEVICE)
            run = sglang("layers.attention.triton_ops.decode_attention", "decode_attention_fwd")
            buffers = (self.q, self.keys, self.values, out, cache_starts, torch.cat(cached), logits, sums, splits, SPLITS)
            run(*buffers, k_scale=self.scales[0], v_scale=self.scales[1], **common)
            return out
        run = sglang("layers.attention.triton_ops.extend_attention", "extend_attention_fwd")
        run(
            *(self.q, self.k, self.v, out, self.keys, self.values),
            *(starts([new for new, _ in self.lengths]), cache_starts, torch.cat(cached)),
            custom_mask=None,
            is_causal=True,
            mask_indptr=None,
            max_len_extend=max(new for new, _ in self.lengths),
            k_scale=self.scales[0],
            v_scale=self.scales[1],
            sliding_window_size=self.shape.window - 1 if self.shape.window else -1,
            **common,
        )
        return out

    def expected(self) -> Expected:
        """Attention in float64 of what the kernels multiply. The bound has the rounding of probabilities."""
        dtype, parts = self.keys.dtype, []
        fp8 = dtype is torch.float8_e4m3fn
        sums = FP8_SUMS if fp8 else BF16_SUMS
        lengths = [new for new, _ in self.lengths]
        each = (torch.split(tensor, lengths) for tensor in (self.q, self.k, self.v))
        for q, k, v, places in zip(*each, self.cached(), strict=True):
            kept = [
                (cache[places].double() * scale) for cache, scale in zip((self.keys, self.values), self.scales, strict=True)
            ]
            own = 0 if self.decode else len(q)
            parts.append(
                self._sequence(
                    [(q if self.decode or not fp8 else q.to(dtype)).double(), q.double()],
                    torch.cat([kept[0], k.double()[:own]]),
                    torch.cat([kept[1], v.double()[:own]]),
                    len(places),
                    sums,
                )
            )
        return Expected(*(torch.cat([getattr(part, name) for part in parts]) for name in ("values", "bound", "plain")))

    def _sequence(self, queries: list[Tensor], keys: Tensor, values: Tensor, cached: int, sums: float) -> Expected:
        """One sequence, whose ``cached`` first keys are multiplied by the first of two forms of its queries."""
        shape = self.shape
        keys, values = (tensor.repeat_interleave(shape.heads // shape.kv_heads, 1) for tensor in (keys, values))

        def logits(queries: list[Tensor], keys: Tensor) -> Tensor:
            parts = zip(queries, (keys[:cached], keys[cached:]), strict=True)
            result: Tensor = torch.cat([torch.einsum("qhd,khd->hqk", *part) for part in parts], -1) / shape.head_dim**0.5
            return result

        scores, sizes = logits(queries, keys), logits([query.abs() for query in queries], keys.abs())
        hidden, probabilities = attention_probabilities(scores, shape.window, self.sinks)
        outputs, magnitudes = (torch.einsum("hqk,khd->qhd", probabilities, tensor) for tensor in (values, values.abs()))
        relative, absolute = HALF_STEP[self.keys.dtype]
        largest = probabilities.amax(-1).T[..., None]
        seen = torch.einsum("qk,khd->qhd", (~hidden).double(), values.abs())
        rounding = magnitudes * relative * 1.01 + largest * seen * absolute
        unsure = sizes.masked_fill(hidden, 0).amax(-1).T[..., None] * sums + FUNCTIONS
        slack = magnitudes * (torch.expm1(2 * unsure) + sums) + rounding
        return Expected(outputs, gemm_bound(outputs, slack), outputs)


def attention_faults(call: TritonAttentionCall) -> Iterator[tuple[str, TritonAttentionCall]]:
    yield "the tokens in the cache are those of the place before", replace(call, places=call.places.roll(1))
    yield f"the last {LEFT_OUT} tokens of each cache are left out", replace(call, left_out=LEFT_OUT)
    if call.scales != (1.0, 1.0):
        yield "the keys' scale is twice as large", replace(call, scales=(call.scales[0] * 2, call.scales[1]))
        yield "the values' scale is twice as large", replace(call, scales=(call.scales[0], call.scales[1] * 2))
    if call.sinks is not None:
        yield "sinks are those of the head before", replace(call, sinks=call.sinks.roll(1))
    if call.shape.window:
        yield "the window is one token longer", replace(call, shape=replace(call.shape, window=call.shape.window + 1))


def check_attention(report: OperatorReport) -> None:
    for shape in ATTENTION_SHAPES:
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            for batch, lengths in BATCHES.items():
                if shape.window and batch == "decode":
                    continue  # there SGLang passes the places of the window's tokens
                call = TritonAttentionCall.random(shape, lengths, batch == "decode", dtype)
                case = f"{shape.name}, {'FP8' if dtype is torch.float8_e4m3fn else 'bf16'} cache"
                expected = call.expected()
                report.add(row := attempt(f"{batch}_attention_fwd", case, expected, call.run))
                if row.verdict == "right":
                    for fault, changed in attention_faults(call):
                        report.fault(f"{batch}_attention_fwd, {case}: {fault}", attempt("", "", expected, changed.run))


def check_linear_fp8(report: OperatorReport) -> None:
    linear = sglang("layers.quantization.fp8_utils", "triton_w8a8_block_fp8_linear")
    for columns, rows in LINEAR_SHAPES:
        elements, scales = random_fp8(rows, columns)
        for tokens in (1, 33, 300):
            x = torch.randn(tokens, columns, device=reference.DEVICE).bfloat16()
            expected = linear_expected(elements, scales, x)
            run = partial(linear, x, elements, [BLOCK, BLOCK])
            report.add(attempt("triton_w8a8_block_fp8_linear", f"{tokens}x{rows}x{columns}", expected, partial(run, scales)))
            if (columns, rows) == LINEAR_SHAPES[0] and tokens == 33:
                for fault, wrong in (
                    ("scales are those of the block of rows before", scales.roll(1, 0)),
                    ("scales are those of the block of columns before", scales.roll(1, 1)),
                ):
                    report.fault(f"triton_w8a8_block_fp8_linear: {fault}", attempt("", "", expected, partial(run, wrong)))


CHECKS: dict[str, Callable[[OperatorReport], None]] = {"linear-fp8": check_linear_fp8, "attention": check_attention}


def run(report: OperatorReport, options: argparse.Namespace) -> None:
    require_sglang()
    run_checks(CHECKS, report, options.only)
