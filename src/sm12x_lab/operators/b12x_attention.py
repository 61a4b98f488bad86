"""Compare b12x's paged attention, called from Python, with float64 softmax attention of what the pages contain.

Needs torch, b12x 0.8.3 and its CuTe DSL.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import itertools
from dataclasses import dataclass, replace

import reference
import torch
from reference import ACCUMULATION, FUNCTIONS, HALF_ULP, Expected, attempt
from report import OperatorReport

Tensor = torch.Tensor

PAGE = 64
HEADS = ((16, 1, 256), (8, 1, 256), (32, 8, 128))
"""Heads of queries, heads of keys and values, and their size. First: Qwen3.5-122B on one of two GPUs."""
TYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "fp8-turbo": torch.float8_e4m3fn}
"""Types of keys and values. With `turbo`, b12x rounds queries to FP8 as well and multiplies by block-scaled MMAs; for several
requests, it does so in `extend` only."""
CACHED = {"any lengths": (1, 63, 64, 65, 500, 1337), "whole pages": (64, 64, 128, 192, 512, 1344)}
"""Tokens in the cache of each request, new ones included."""
NEW = {"decode": (1,) * 6, "extend": (1, 40, 64, 5, 100, 33)}


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of a call; planted faults replace them. Scales of keys and values are those of the requests."""

    q: Tensor
    keys: Tensor
    values: Tensor
    pages: Tensor
    cached: Tensor
    starts: Tensor
    scales: tuple[Tensor, Tensor] | None
    turbo: bool = False

    def run(self) -> Tensor:
        attention = importlib.import_module("b12x.integration.attention")
        workspace = attention.PagedAttentionWorkspace.for_tensors(
            mode=attention.infer_paged_attention_mode(self.starts),
            q=self.q,
            k_cache=self.keys,
            v_cache=self.values,
            attn_mode="turbo" if self.turbo else "default",
        )
        workspace.prepare(self.pages, self.cached, self.starts)
        output = torch.full_like(self.q, float("nan"))
        key_scale, value_scale = self.scales or (None, None)
        workspace.run(self.q, self.keys, self.values, output=output, k_descale=key_scale, v_descale=value_scale)
        return output


def attention_call(
    heads: tuple[int, int, int], dtype: torch.dtype, cached: tuple[int, ...], new: tuple[int, ...]
) -> AttentionCall:
    """Random queries, keys and values; the scales of FP8 are powers of two, so that they can be applied anywhere."""
    query_heads, cache_heads, size = heads
    device, pages = reference.DEVICE, [-(-tokens // PAGE) for tokens in cached]
    table = torch.zeros(len(cached), max(pages), dtype=torch.int32)
    order = torch.randperm(sum(pages) + 3).to(torch.int32)
    for number, count in enumerate(pages):
        table[number, :count], order = order[:count], order[count:]
    caches = [torch.randn(sum(pages) + 3, PAGE, cache_heads, size, device=device) for _ in range(2)]
    q = torch.randn(sum(new), query_heads, size, device=device).bfloat16()
    scales = None
    if dtype is torch.float8_e4m3fn:
        exponents = torch.tensor([[0, 1, -1, 0, 1, -1], [1, 0, -1, -1, 0, 1]], device=device)
        scales = (2.0 ** exponents[0].float(), 2.0 ** exponents[1].float())
    starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32, device=device)
    lengths = torch.tensor(cached, dtype=torch.int32, device=device)
    return AttentionCall(q, caches[0].to(dtype), caches[1].to(dtype), table.to(device), lengths, starts, scales)


def attention_expected(call: AttentionCall) -> Expected:
    """The attention in float64, request by request, and the bound of each output.

    Probabilities and the parts of a divided cache are rounded to bf16, and the sum of the parts again. An error of a score is
    one of its probability, and of the sum of probabilities.
    """
    half_ulp = HALF_ULP[torch.bfloat16]
    outputs, bounds = torch.zeros_like(call.q, dtype=torch.float64), torch.zeros_like(call.q, dtype=torch.float64)
    repeat = call.q.shape[1] // call.keys.shape[2]
    starts = call.starts.tolist()
    for number, tokens in enumerate(call.cached.tolist()):
        first, last = starts[number], starts[number + 1]
        used = call.pages[number, : -(-tokens // PAGE)].long()
        keys, values = (
            cache[used].flatten(0, 1)[:tokens].double().repeat_interleave(repeat, 1) for cache in (call.keys, call.values)
        )
        if call.scales:
            keys, values = (side * scale[number].double() for side, scale in zip((keys, values), call.scales, strict=True))
        q = call.q[first:last].to(torch.float8_e4m3fn if call.turbo else torch.bfloat16).double() * call.q.shape[2] ** -0.5
        scores, magnitudes = (torch.einsum("qhd,khd->hqk", *pair) for pair in ((q, keys), (q.abs(), keys.abs())))
        positions = torch.arange(tokens, device=q.device)
        later = positions[None] > torch.arange(tokens - (last - first), tokens, device=q.device)[:, None]
        scores = scores.masked_fill(later, float("-inf"))
        probabilities = scores.softmax(-1)
        doubt = magnitudes * ACCUMULATION + scores.abs().nan_to_num(posinf=0.0) * FUNCTIONS + FUNCTIONS
        exact = torch.einsum("hqk,khd->qhd", probabilities, values)
        parts = torch.einsum("hqk,khd->qhd", probabilities * (doubt + 2 * half_ulp + ACCUMULATION), values.abs())
        total = torch.einsum("hqk,hqk->qh", probabilities, doubt).unsqueeze(-1)
        outputs[first:last] = exact
        bounds[first:last] = parts * 1.02 + exact.abs() * (total + half_ulp) + 1e-30
    return Expected(outputs, bounds, outputs)


def attention_faults(call: AttentionCall) -> dict[str, AttentionCall]:
    """Calls with a planted fault."""
    changed = call.pages.clone()
    changed[5, 3], changed[5, 4] = call.pages[5, 2], call.pages[5, 3]
    faults = {
        "a page of one request is that before": replace(call, pages=changed),
        "the requests' pages are those of the request before": replace(call, pages=call.pages.roll(1, 0)),
        "one token of the cache less": replace(call, cached=(call.cached - 1).clamp(min=1)),
        "keys and values change places": replace(call, keys=call.values, values=call.keys),
        "queries are 5 % too large": replace(call, q=call.q * 1.05),
        "the query's heads are those before": replace(call, q=call.q.roll(1, 1)),
    }
    if call.scales:
        faults["scales of keys are those of the request before"] = replace(
            call, scales=(call.scales[0].roll(1), call.scales[1])
        )
        faults["scales of values are those of the request before"] = replace(
            call, scales=(call.scales[0], call.scales[1].roll(1))
        )
    return faults


def check(report: OperatorReport, pattern: str) -> None:
    for name, dtype in TYPES.items():
        for mode, new in NEW.items():
            turbo = name.endswith("turbo")
            if not fnmatch.fnmatch(f"{mode}-{name}", pattern) or (turbo and mode == "decode"):
                continue
            for heads, (lengths, cached) in itertools.product(HEADS, CACHED.items()):
                call = replace(attention_call(heads, dtype, cached, new), turbo=turbo)
                expected = attention_expected(call)
                case = f"{mode}, {name}, {heads[0]} heads on {heads[1]} of {heads[2]}, {lengths}"
                row = attempt("paged_attention", case, expected, call.run)
                report.add(row)
                for fault, wrong in attention_faults(call).items() if heads == HEADS[0] and row.verdict == "right" else ():
                    report.fault(f"paged_attention, {mode}, {name}, {lengths}: {fault}", attempt("", "", expected, wrong.run))


def run(report: OperatorReport, options: argparse.Namespace) -> None:
    check(report, options.only)
