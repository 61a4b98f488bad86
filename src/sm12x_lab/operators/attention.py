"""Compare FlashInfer's attention, called as engines call it, with float64 of the dequantized queries, keys and values.

Needs torch and FlashInfer 0.7.2.

A paged cache has bf16, FP8 (e4m3) or NVFP4 keys and values; pages are in random order, and requests have lengths of their own.
Attention of NVFP4 queries, keys, values and probabilities has no cache, the sparse latent attention of DeepSeek V4 has one of
FP8 and bf16. Each output has a bound of its own: of a softmax in float64, the error of fp32 accumulation in its logits, and the
roundings and quantizations of probabilities, partial results and outputs. Faults are planted in cache, page table, lengths and
scales; each must be detected.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import reference
import torch
from reference import (
    ACCUMULATION,
    FUNCTIONS,
    HALF_ULP,
    MIDPOINTS,
    Expected,
    OperatorRow,
    attempt,
    compare,
    decode,
    nearest_e2m1,
    nearest_e4m3,
    scale_values,
)
from report import OperatorReport

Tensor = torch.Tensor

ROUNDING = HALF_ULP[torch.bfloat16]
LOG2E = 1.4426950408889634

KINDS = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "nvfp4": torch.uint8}
"""Types of keys and values, and what FlashInfer calls them; NVFP4 is packed, two elements a byte."""


@dataclass(frozen=True)
class Heads:
    """Attention of a model on one GPU; ``page`` is the number of tokens in a page of the cache, ``kinds`` are its types."""

    name: str
    queries: int
    keys: int
    size: int
    page: int
    kinds: tuple[str, ...] = tuple(KINDS)


HEADS = (
    Heads("qwen3.5-122b-tp2", 16, 1, 256, 64),
    Heads("qwen3.5-397b-tp4", 8, 1, 256, 64),
    Heads("qwen3.6-35b", 16, 2, 256, 64),
    Heads("minimax-m2.5-tp2", 24, 4, 128, 16, ("e4m3",)),
)

LENGTHS = (1, 17, 64, 65, 300, 1000, 4000)
"""Tokens in the cache of a request: pages with one token, full pages, and enough to be divided among CTAs."""
SHORT = (17, 300, 65)
"""Lengths with which faults are planted: each token counts."""


@dataclass(frozen=True)
class Requests:
    """New tokens and tokens in the cache of each request, and the pages of the cache that these are in."""

    new: tuple[int, ...]
    lengths: tuple[int, ...]
    pages: tuple[tuple[int, ...], ...]

    @classmethod
    def random(cls, new: Sequence[int], lengths: Sequence[int], page: int) -> Requests:
        """Requests whose pages are in random order; one page is of no request, and each has one page more than it needs."""
        counts = [length // page + 1 for length in lengths]
        order = torch.split(torch.randperm(sum(counts)) + 1, counts)
        return cls(tuple(new), tuple(lengths), tuple(tuple(pages.tolist()) for pages in order))

    @property
    def page_count(self) -> int:
        return 1 + sum(map(len, self.pages))

    def longer(self, tokens: int) -> Requests:
        """The same requests with more tokens in the cache, or fewer."""
        return replace(self, lengths=tuple(length + tokens for length in self.lengths))


@dataclass(frozen=True)
class Cache:
    """Keys and values, each [page, token, head, element], as FlashInfer gets them; block scales are those of NVFP4."""

    kind: str
    keys: Tensor
    values: Tensor
    key_blocks: Tensor | None
    value_blocks: Tensor | None
    key_scale: float
    value_scale: float

    @classmethod
    def of(cls, kind: str, keys: Tensor, values: Tensor) -> Cache:
        """A cache quantized from fp32; the scales of keys and values differ."""
        if kind == "bf16":
            return cls(kind, keys.bfloat16(), values.bfloat16(), None, None, 1.0, 1.0)
        if kind == "e4m3":
            keys, values = ((tensor / scale).to(torch.float8_e4m3fn) for tensor, scale in ((keys, 0.045), (values, 0.025)))
            return cls(kind, keys, values, None, None, 0.045, 0.025)
        (key_codes, key_blocks), (value_codes, value_blocks) = quantized(keys / 0.045), quantized(values / 0.025)
        return cls(kind, key_codes, value_codes, key_blocks, value_blocks, 0.045, 0.025)

    @property
    def blocks(self) -> tuple[Tensor, Tensor] | None:
        if self.key_blocks is None or self.value_blocks is None:
            return None
        return self.key_blocks, self.value_blocks

    def dequantized(self) -> tuple[Tensor, Tensor]:
        """Keys and values in float64."""
        pairs = ((self.keys, self.key_blocks, self.key_scale), (self.values, self.value_blocks, self.value_scale))
        keys, values = (elements(codes, blocks) * scale for codes, blocks, scale in pairs)
        return keys, values


def quantized(values: Tensor) -> tuple[Tensor, Tensor]:
    """Packed e2m1 and block scales of NVFP4, nearest to ``values``."""
    blocks = values.double().reshape(*values.shape[:-1], -1, 16)
    scales = nearest_e4m3(blocks.abs().amax(-1) / 6)
    steps = blocks / scales.clamp(min=1e-30).unsqueeze(-1)
    midpoints = torch.tensor(MIDPOINTS, dtype=torch.float64, device=values.device)
    codes = (torch.bucketize(steps.abs(), midpoints) + 8 * (steps < 0)).to(torch.uint8).flatten(-2)
    return codes[..., 0::2] | codes[..., 1::2] << 4, scales.float().to(torch.float8_e4m3fn)


def elements(codes: Tensor, blocks: Tensor | None) -> Tensor:
    """Elements of a cache times their block scales, in float64."""
    if blocks is None:
        return codes.double()
    result: Tensor = decode(codes) * scale_values(blocks).repeat_interleave(16, dim=-1)
    return result


# ---- the reference


@dataclass(frozen=True)
class Arithmetic:
    """What a kernel rounds to bf16: probabilities, their factors from tile to tile, partial results, and outputs."""

    probabilities: int
    factors: int
    partial: int
    outputs: int


@dataclass(frozen=True)
class Reference64:
    """Attention in float64. ``magnitudes`` has values without signs, ``spread`` their deviation from the output.

    ``doubt`` is what the logits' errors may change a probability by, relative to it; ``lse`` is the logarithm to base 2 of the
    softmax's denominator.
    """

    outputs: Tensor
    magnitudes: Tensor
    spread: Tensor
    doubt: Tensor
    lse: Tensor

    @classmethod
    def of(cls, heads: Heads, requests: Requests, queries: Tensor, cache: tuple[Tensor, Tensor], causal: bool) -> Reference64:
        """``cache`` has keys and values of the whole cache; a causal mask ends with the last token of the cache."""
        parts = []
        for q, length, pages in zip(torch.split(queries, list(requests.new)), requests.lengths, requests.pages, strict=True):
            keys, values = (pool[list(pages)].flatten(0, 1)[:length] for pool in cache)
            parts.append(cls._request(heads, q.double(), keys, values, causal))
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in cls.__dataclass_fields__))

    @classmethod
    def _request(cls, heads: Heads, q: Tensor, keys: Tensor, values: Tensor, causal: bool) -> Reference64:
        count, group = len(q), heads.queries // heads.keys
        rows = q.reshape(count, heads.keys, group, -1).permute(1, 2, 0, 3).flatten(1, 2)
        columns, v = keys.permute(1, 2, 0), values.permute(1, 0, 2)
        logits = rows @ columns * heads.size**-0.5
        magnitudes = (rows.abs() @ columns.abs() * heads.size**-0.5).amax(-1, keepdim=True)
        if causal:
            first = len(keys) - count
            visible = torch.ones(count, len(keys), dtype=torch.bool, device=q.device).tril(first)
            logits = logits.masked_fill(~visible.repeat(group, 1), float("-inf"))
        weights = torch.softmax(logits, dim=-1)
        outputs = weights @ v
        spread = (weights @ v.square() - outputs.square()).clamp(min=0).sqrt()
        lse = torch.logsumexp(logits, dim=-1, keepdim=True) * LOG2E
        doubt = 2 * ACCUMULATION * (1 + magnitudes + logits.amax(-1, keepdim=True).abs())
        steps = ACCUMULATION + len(keys) / 16 * 2.0**-23
        parts = (outputs, weights @ v.abs() * (1 + steps), spread, doubt + steps, lse)
        return cls(*(part.reshape(heads.keys, group, count, -1).permute(2, 0, 1, 3).flatten(1, 2) for part in parts))

    def expected(self, arithmetic: Arithmetic, plain: Reference64) -> Expected:
        """Outputs and their bounds.

        A rounding of probabilities also changes their sum, by which the result is divided: the error is at most the rounding
        times the mean deviation of the values from the result, which is at most their standard deviation.
        """
        relative = arithmetic.probabilities * ROUNDING + self.doubt
        bound = relative * self.spread + self.doubt * self.magnitudes
        bound = bound + (arithmetic.factors + arithmetic.partial) * ROUNDING * self.magnitudes
        bound = bound + arithmetic.outputs * ROUNDING * (self.outputs.abs() + bound)
        return Expected(self.outputs, bound * 1.01 + 2.0**-30, plain.outputs)

    def expected_lse(self, arithmetic: Arithmetic, plain: Reference64) -> Expected:
        bound = (arithmetic.probabilities * ROUNDING + self.doubt) * LOG2E + self.lse.abs() * 2.0**-22
        return Expected(self.lse.squeeze(-1), (bound * 1.01).squeeze(-1), plain.lse.squeeze(-1))


# ---- operators


@dataclass(frozen=True)
class Call:
    """The arguments of an operator; planted faults replace them."""

    heads: Heads
    requests: Requests
    queries: Tensor
    cache: Cache
    causal: bool = False

    def table(self) -> tuple[Tensor, Tensor, Tensor]:
        """Where each request's pages begin, the pages, and the number of tokens in the last."""
        used = [-(-length // self.heads.page) for length in self.requests.lengths]
        starts = torch.tensor([0, *used], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        pages = [page for pages, count in zip(self.requests.pages, used, strict=True) for page in pages[:count]]
        last = [(length - 1) % self.heads.page + 1 for length in self.requests.lengths]
        indices, lengths = (torch.tensor(numbers, dtype=torch.int32, device=reference.DEVICE) for numbers in (pages, last))
        return starts.to(reference.DEVICE), indices, lengths

    def scales(self) -> dict[str, Any]:
        """Scales as vLLM and SGLang pass them; those of a cache in bf16 are left out."""
        if self.cache.kind == "bf16":
            return {}
        return {"k_scale": self.cache.key_scale, "v_scale": self.cache.value_scale, "kv_cache_sf": self.cache.blocks}


def workspace() -> Tensor:
    return torch.zeros(256 * 2**20, dtype=torch.uint8, device=reference.DEVICE)


@dataclass(frozen=True)
class Fa2Result:
    """``divided``: partial results of several CTAs, rounded to bf16, were merged."""

    outputs: Tensor
    lse: Tensor
    divided: bool


Fa2 = Callable[[Call, Tensor], Fa2Result]


def prefill(call: Call, buffer: Tensor) -> Fa2Result:
    """FA2 of new tokens, whose keys and values are in the cache already."""
    flashinfer = importlib.import_module("flashinfer")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(buffer, "NHD", backend="fa2")
    starts = torch.tensor([0, *call.requests.new], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return planned(wrapper, call, (starts.to(reference.DEVICE), *call.table()), causal=call.causal)


def decode_fa2(call: Call, buffer: Tensor, tensor_cores: bool = True) -> Fa2Result:
    """FA2 of one new token a request, by the kernels of prefill or by those without tensor cores."""
    flashinfer = importlib.import_module("flashinfer")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(buffer, "NHD", use_tensor_cores=tensor_cores, backend="fa2")
    return planned(wrapper, call, call.table())


def planned(wrapper: Any, call: Call, table: tuple[Tensor, ...], **options: bool) -> Fa2Result:
    heads, cache = call.heads, call.cache
    types = {"q_data_type": torch.bfloat16, "kv_data_type": KINDS[cache.kind]}
    wrapper.plan(*table, heads.queries, heads.keys, heads.size, heads.page, **types, **options)
    outputs, lse = wrapper.run(call.queries, (cache.keys, cache.values), return_lse=True, **call.scales())
    return Fa2Result(outputs, lse, bool(wrapper._plan_info[-1]))


def decode_xqa(call: Call, buffer: Tensor) -> Tensor:
    """``trtllm_batch_decode_with_kv_cache``, which is XQA on SM12x, with heads before tokens in each page, as in vLLM."""
    flashinfer = importlib.import_module("flashinfer")
    heads, requests, cache = call.heads, call.requests, call.cache
    steps = requests.new[0]
    width = max(map(len, requests.pages))
    table = [[*pages, *[0] * (width - len(pages))] for pages in requests.pages]
    mask = None
    if steps > 1:
        rows = [[(2 << row) - 1, 0] for row in range(steps)]
        mask = torch.tensor([rows] * len(table), dtype=torch.uint16).to(reference.DEVICE)
    pools = [pool.transpose(1, 2).contiguous() for pool in (cache.keys, cache.values, *(cache.blocks or ()))]
    result: Tensor = flashinfer.decode.trtllm_batch_decode_with_kv_cache(
        call.queries,
        (pools[0], pools[1]),
        buffer,
        torch.tensor(table, dtype=torch.int32, device=reference.DEVICE),
        torch.tensor(requests.lengths, dtype=torch.int32, device=reference.DEVICE),
        width * heads.page,
        bmm1_scale=cache.key_scale * heads.size**-0.5,
        bmm2_scale=cache.value_scale,
        kv_layout="HND",
        q_len_per_req=steps,
        mask=mask,
        kv_cache_sf=(pools[2], pools[3]) if cache.blocks else None,
    )
    return result


# ---- planted faults


def faults(call: Call) -> dict[str, Call]:
    """Calls with a planted fault."""
    requests, cache = call.requests, call.cache

    def stored(**fields: Any) -> Call:
        return replace(call, cache=replace(cache, **fields))

    def paged(first: dict[int, int]) -> Call:
        pages = tuple((first.get(at, pages[0]), *pages[1:]) for at, pages in enumerate(requests.pages))
        return replace(call, requests=replace(requests, pages=pages))

    last = len(requests.pages) - 1
    planted = {
        "the first page of a request is another": paged({last: 0}),
        "the first pages of two requests change places": paged({0: requests.pages[last][0], last: requests.pages[0][0]}),
        "queries are those of the head before": replace(call, queries=call.queries.roll(1, 1)),
    }
    if all(new < length for new, length in zip(requests.new, requests.lengths, strict=True)):
        planted["the last token of the cache is left out"] = replace(call, requests=requests.longer(-1))
    if call.causal:
        planted["the causal mask is one token late"] = replace(call, requests=requests.longer(1))
    if call.heads.keys > 1:
        planted["keys are those of the head before"] = stored(keys=rolled(cache.keys, 2))
        planted["values are those of the head before"] = stored(values=rolled(cache.values, 2))
    if cache.kind != "bf16":
        planted["the scales of keys and values change places"] = stored(
            key_scale=cache.value_scale, value_scale=cache.key_scale
        )
    if cache.blocks:
        keys, values = cache.blocks
        pages, _, heads, blocks = values.shape
        interleaved = values.reshape(pages, -1, 4, heads, blocks).movedim(2, -1).reshape(values.shape)
        planted |= {
            "block scales of keys are those of the token before": stored(key_blocks=rolled(keys, 1)),
            "block scales of values are those of the block before": stored(value_blocks=rolled(values, 3)),
            "block scales of values are interleaved by 4 tokens": stored(value_blocks=interleaved),
            "block scales of keys and values change places": stored(key_blocks=values, value_blocks=keys),
        }
    return planted


def rolled(tensor: Tensor, dimension: int) -> Tensor:
    return tensor.view(torch.uint8).roll(1, dimension).view(tensor.dtype)


# ---- comparisons


@dataclass(frozen=True)
class Case:
    """A call with random contents, the reference, and the reference of a cache that is not quantized."""

    call: Call
    exact: Reference64
    plain: Reference64

    @classmethod
    def random(cls, heads: Heads, kind: str, new: Sequence[int], lengths: Sequence[int], causal: bool = False) -> Case:
        requests = Requests.random(new, lengths, heads.page)
        shape = (requests.page_count, heads.page, heads.keys, heads.size)
        keys, values = (torch.randn(shape, device=reference.DEVICE) for _ in range(2))
        queries = (2.5 * torch.randn(sum(new), heads.queries, heads.size, device=reference.DEVICE)).bfloat16()
        cache = Cache.of(kind, keys, values)
        exact = Reference64.of(heads, requests, queries, cache.dequantized(), causal)
        plain = Reference64.of(heads, requests, queries, (keys.double(), values.double()), causal)
        return cls(Call(heads, requests, queries, cache, causal), exact, plain)

    @property
    def name(self) -> str:
        requests = self.call.requests
        least, greatest = min(requests.lengths), max(requests.lengths)
        tokens = f"{sum(requests.new)} tokens of {len(requests.new)} requests, {least} to {greatest} in the cache"
        return f"{self.call.heads.name}, {self.call.cache.kind}, {tokens}{', causal' * self.call.causal}"


def decoding(heads: Heads, kind: str, batch: int) -> Case:
    """One token a request; one request alone is the longest, others are the list and random lengths."""
    lengths = [max(LENGTHS)]
    if batch > 1:
        lengths = [*LENGTHS, *torch.randint(2, 600, (batch - len(LENGTHS),)).tolist()]
    return Case.random(heads, kind, [1] * batch, lengths)


def check_fa2(report: OperatorReport, operator: str, run: Fa2, case: Case, probabilities: int, plant: bool) -> None:
    """Outputs and logarithms of denominators of a call, and its faults."""
    call, buffer = case.call, workspace()
    kept: list[Fa2Result] = []

    def first() -> Tensor:
        kept.append(run(call, buffer))
        return kept[0].outputs

    def expected(divided: bool) -> tuple[Expected, Expected]:
        arithmetic = Arithmetic(probabilities, 0, int(divided), 1 if call.cache.kind == "bf16" else 2)
        return case.exact.expected(arithmetic, case.plain), case.exact.expected_lse(arithmetic, case.plain)

    row = attempt(operator, case.name, expected(False)[0], first)
    if not kept:
        report.add(row)
        return
    outputs, lse = expected(kept[0].divided)
    name = f"{case.name}{', keys divided' * kept[0].divided}"
    report.add(compare(kept[0].outputs, outputs, operator, name))
    report.add(compare(kept[0].lse, lse, operator, f"{name}: lse"))
    for fault, wrong in faults(call).items() if plant else ():
        outcome = attempt("", "", outputs, lambda wrong=wrong: run(wrong, buffer).outputs)
        report.fault(f"{operator}, {call.cache.kind}, {call.heads.name}: {fault}", outcome)


def check_prefill(report: OperatorReport, pattern: str) -> None:
    for heads, kind in chosen("prefill", pattern):
        for new, lengths, causal in (
            ((1, 17, 33, 128, 5), (1, 17, 300, 4000, 64), True),
            ((9, 60), (65, 1000), True),
            ((9, 60), (65, 1000), False),
        ):
            case = Case.random(heads, kind, new, lengths, causal)
            check_fa2(report, "BatchPrefillWithPagedKVCache", prefill, case, 1, plant=causal and len(new) == 2)


def check_decode(report: OperatorReport, pattern: str) -> None:
    for heads, kind in chosen("decode", pattern):
        cases = [*(decoding(heads, kind, batch) for batch in (1, 7, 64)), Case.random(heads, kind, [1] * 3, SHORT)]
        for case in cases:
            check_fa2(report, "BatchDecodeWithPagedKVCache", decode_fa2, case, 1, plant=case is cases[-1])


def check_cuda_cores(report: OperatorReport, pattern: str) -> None:
    operator, run = "BatchDecodeWithPagedKVCache, CUDA cores", partial(decode_fa2, tensor_cores=False)
    for heads, kind in chosen("cuda-cores", pattern):
        if kind == "nvfp4":  # there is no such kernel
            continue
        cases = [*(decoding(heads, kind, batch) for batch in (1, 7, 64)), Case.random(heads, kind, [1] * 3, SHORT)]
        for case in cases:
            check_fa2(report, operator, run, case, 0, plant=case is cases[-1])


def check_xqa(report: OperatorReport, pattern: str) -> None:
    """XQA also rounds the factor from tile to tile, its product, and what CTAs and groups of warps add up."""
    operator = "trtllm_batch_decode_with_kv_cache (XQA)"
    for heads, kind in chosen("xqa", pattern):
        arithmetic = Arithmetic(1, 2, 1 if heads.size == 256 else 3, 1)
        single = [*(decoding(heads, kind, batch) for batch in (1, 7, 64)), Case.random(heads, kind, [1] * 3, SHORT)]
        drafts = [Case.random(heads, kind, [5] * 3, SHORT, causal=True)] if kind == "e4m3" else []
        for case in (*single, *drafts):
            call, expected, buffer = case.call, case.exact.expected(arithmetic, case.plain), workspace()
            row = attempt(operator, case.name, expected, partial(decode_xqa, call, buffer))
            report.add(row)
            plant = row.verdict == "right" and call.requests.lengths == SHORT
            for fault, wrong in faults(call).items() if plant else ():
                outcome = attempt("", "", expected, partial(decode_xqa, wrong, buffer))
                report.fault(f"{operator}, {kind}, {heads.name}, {call.requests.new[0]} tokens a request: {fault}", outcome)


# ---- attention of NVFP4 queries, keys, values and probabilities


@dataclass(frozen=True)
class DenseShape:
    """Attention without a cache, of ``tokens`` queries and keys."""

    batch: int
    queries: int
    keys: int
    tokens: int
    size: int
    causal: bool


DENSE_SHAPES = (
    DenseShape(2, 8, 2, 300, 128, True),
    DenseShape(1, 8, 8, 1000, 128, False),
    DenseShape(1, 6, 3, 128, 64, True),
    DenseShape(1, 4, 2, 17, 128, False),
)


@dataclass(frozen=True)
class DenseCall:
    """The arguments of ``nvfp4_attention_sm120_fwd``; planted faults replace them.

    Block scales are in groups of 64 rows and 4 columns, values are transposed, and keys are in the order of the accumulators
    of an MMA; ``correction`` has the logits of the means that were subtracted from queries.
    """

    shape: DenseShape
    length: int
    q: Tensor
    k: Tensor
    v: Tensor
    q_blocks: Tensor
    k_blocks: Tensor
    v_blocks: Tensor
    correction: Tensor

    def run(self) -> Tensor:
        flashinfer = importlib.import_module("flashinfer")
        tensors = (self.q, self.k, self.v, self.q_blocks, self.k_blocks, self.v_blocks, self.correction)
        options = {"causal": self.shape.causal, "return_lse": False, "unpadded_k_len": self.length}
        outputs: Tensor = flashinfer.nvfp4_attention_sm120_fwd(*tensors, **options)
        return outputs[:, :, : self.shape.tokens]

    def dequantized(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values in float64, [batch, head, token, element]."""
        q, k, v = (
            decode(codes) * scale_values(folded(blocks)).repeat_interleave(16, dim=-1)
            for codes, blocks in ((self.q, self.q_blocks), (self.k, self.k_blocks), (self.v, self.v_blocks))
        )
        return q, in_order(k), v.transpose(-2, -1)


def folded(blocks: Tensor) -> Tensor:
    """Row-major block scales of groups of 64 rows and 4 columns."""
    batch, heads, rows, columns = blocks.shape
    groups = blocks.view(torch.uint8).reshape(batch, heads, rows // 64, columns // 4, 16, 4, 4)
    return groups.permute(0, 1, 2, 5, 4, 3, 6).reshape(blocks.shape)


def dense_expected(call: DenseCall, plain: Tensor) -> Expected:
    """The operator in float64, from its quantized arguments.

    Probabilities are quantized to NVFP4 in blocks of 16 tokens. A block's scale is rounded to e4m3 relative to the largest
    probability of the tokens before, so each probability has an interval.
    """
    shape = call.shape
    group, factor = shape.queries // shape.keys, shape.size**-0.5
    q, k, v = call.dequantized()
    k, v = (tensor.repeat_interleave(group, dim=1) for tensor in (k, v))
    correction = call.correction.double().repeat_interleave(q.shape[2] // call.correction.shape[2], dim=2)
    logits = (q @ k.transpose(-2, -1) + correction) * factor
    magnitudes = (q.abs() @ k.abs().transpose(-2, -1) + correction.abs()) * factor
    position = torch.arange(logits.shape[-1], device=logits.device)
    hidden = (position >= shape.tokens).expand(logits.shape[-2:])
    if shape.causal:
        hidden = hidden | (position > torch.arange(logits.shape[-2], device=logits.device).unsqueeze(-1))
    logits = logits.masked_fill(hidden, float("-inf"))
    weights = torch.exp(logits - logits.amax(-1, keepdim=True))
    doubt = 2 * ACCUMULATION * (1 + 2 * magnitudes.amax(-1, keepdim=True))
    blocks = weights.reshape(*weights.shape[:-1], -1, 16)
    scales = blocks.amax(-1, keepdim=True) / 6
    steps = blocks / scales.clamp(min=1e-300)
    slack = 2 * doubt.unsqueeze(-1) + FUNCTIONS
    least, greatest = (nearest_e2m1(steps * (1 + sign * slack)) * scales * (1 + sign * 2.0**-4) for sign in (-1, 1))
    middle, half = ((greatest + sign * least).flatten(-2) / 2 for sign in (1, -1))
    half = half + 2.0**-10 / 448 * (weights > 0) + doubt * middle
    total = weights.sum(-1, keepdim=True)
    values, bound = middle @ v / total, half @ v.abs() / total
    bound = bound + (doubt + ACCUMULATION + logits.shape[-1] / 64 * 2.0**-23) * (middle @ v.abs() / total)
    bound = bound + ROUNDING * (values.abs() + bound)
    rows = slice(0, shape.tokens)
    return Expected(values[:, :, rows], bound[:, :, rows] * 1.01 + 2.0**-30, plain)


def dense_faults(call: DenseCall) -> dict[str, DenseCall]:
    """Calls with a planted fault."""
    planted = {
        "block scales of keys are row-major": replace(call, k_blocks=folded(call.k_blocks).view(call.k_blocks.dtype)),
        "block scales of keys are those of the block before": replace(call, k_blocks=rolled(call.k_blocks, 3)),
        "block scales of values are those of the block before": replace(call, v_blocks=rolled(call.v_blocks, 3)),
        "keys are in the order of tokens": replace(call, k=in_order(call.k)),
        "queries are those of the head before": replace(call, q=call.q.roll(1, 1), q_blocks=rolled(call.q_blocks, 1)),
        "values are those of the head before": replace(call, v=call.v.roll(1, 1), v_blocks=rolled(call.v_blocks, 1)),
        "the correction is left out": replace(call, correction=torch.zeros_like(call.correction)),
    }
    if call.shape.causal:
        planted["the causal mask is left out"] = replace(call, shape=replace(call.shape, causal=False))
    else:
        planted["the last token is left out"] = replace(call, length=call.length - 1)
    return planted


def in_order(k: Tensor) -> Tensor:
    """Keys in the order of tokens."""
    row = torch.arange(k.shape[2], device=k.device)
    token = row // 32 * 32 + row % 32 // 8 * 2 + row % 8 // 2 * 8 + row % 2
    return k[:, :, token.argsort()].contiguous()


def check_dense(report: OperatorReport, pattern: str) -> None:
    if not fnmatch.fnmatch("dense-nvfp4", pattern):
        return
    flashinfer = importlib.import_module("flashinfer")
    operator = "nvfp4_attention_sm120"
    for number, shape in enumerate(DENSE_SHAPES):
        q, k, v = (
            (factor * torch.randn(shape.batch, heads, shape.tokens, shape.size, device=reference.DEVICE)).bfloat16()
            for factor, heads in ((2.5, shape.queries), (1.0, shape.keys), (1.0, shape.keys))
        )
        wide_k, wide_v = (tensor.double().repeat_interleave(shape.queries // shape.keys, dim=1) for tensor in (k, v))
        plain = torch.nn.functional.scaled_dot_product_attention(q.double(), wide_k, wide_v, is_causal=shape.causal)
        heads = f"{shape.queries} heads, {shape.keys} of keys, of {shape.size}"
        case = f"{shape.batch} x {shape.tokens} tokens, {heads}{', causal' * shape.causal}"
        try:
            call = DenseCall(shape, shape.tokens, *flashinfer.nvfp4_attention_sm120_quantize_qkv(q, k, v))
        except Exception as error:  # every library raises its own types
            report.add(OperatorRow(operator, case, "refused", why=f"{type(error).__name__}: {str(error)[:200]}"))
            continue
        expected = dense_expected(call, plain)
        report.add(attempt(operator, case, expected, call.run))
        for fault, wrong in dense_faults(call).items() if number < 2 else ():
            report.fault(f"{operator}, {case}: {fault}", attempt("", "", expected, wrong.run))


# ---- sparse latent attention


NOPE, ROPE, GROUP, CHUNK = 448, 64, 64, 64
"""Of DeepSeek V4: elements of a token in FP8, elements in bf16, FP8 elements of one scale, and tokens whose probabilities are
quantized together."""

FP8_MMA = 2.0**-12
"""Error of an FP8 MMA of Hopper, whose accumulator has 14 bits, relative to the sum of magnitudes."""


@dataclass(frozen=True)
class SparseShape:
    """``topk`` tokens of a cache for each query, and of a second cache; ``heads`` are those of one GPU."""

    heads: int
    queries: int
    topk: int
    extra: int
    page: int
    sink: bool


SPARSE_SHAPES = (
    SparseShape(32, 7, 512, 0, 64, False),
    SparseShape(32, 3, 128, 200, 256, True),
    SparseShape(8, 1, 512, 64, 64, True),
    SparseShape(64, 33, 65, 0, 2, False),
)


@dataclass(frozen=True)
class Latents:
    """A cache of DeepSeek V4: pages of rows, 448 elements in e4m3 and 64 in bf16, and then the scales (ue8m0) of all rows."""

    codes: Tensor
    scales: Tensor
    rope: Tensor
    page: int

    @classmethod
    def random(cls, tokens: int, page: int) -> Latents:
        spread = 2.0 ** torch.randint(-3, 2, (tokens, NOPE // GROUP, 1), device=reference.DEVICE)
        values = torch.randn(tokens, NOPE // GROUP, GROUP, device=reference.DEVICE) * spread
        exponents = torch.ceil(torch.log2(values.abs().amax(-1) / 448))
        codes = (values / 2.0 ** exponents.unsqueeze(-1)).flatten(1).to(torch.float8_e4m3fn)
        rope = torch.randn(tokens, ROPE, device=reference.DEVICE).bfloat16()
        return cls(codes, (exponents + 127).to(torch.uint8), rope, page)

    def stored(self) -> Tensor:
        rows = torch.cat([self.codes.view(torch.uint8), self.rope.view(torch.uint8)], dim=1)
        footer = torch.nn.functional.pad(self.scales, (0, 1))
        return torch.cat([part.reshape(len(rows) // self.page, -1) for part in (rows, footer)], dim=1)

    def selected(self, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, scales and bf16 elements of tokens, in float64."""
        at = indices.clamp(min=0).long()
        return self.codes.double()[at], torch.pow(2.0, self.scales.double() - 127)[at], self.rope.double()[at]


@dataclass(frozen=True)
class SparseCall:
    """The arguments of ``sparse_mla_sm120_decode_dsv4``; planted faults replace them. Tokens below 0 are left out."""

    shape: SparseShape
    q: Tensor
    caches: tuple[Latents, ...]
    indices: tuple[Tensor, ...]
    counts: tuple[Tensor, ...]
    sink: Tensor | None
    chunks: int | None = None

    @classmethod
    def random(cls, shape: SparseShape) -> SparseCall:
        q = (2 * torch.randn(shape.queries, shape.heads, NOPE + ROPE, device=reference.DEVICE)).bfloat16()
        widths = [width for width in (shape.topk, shape.extra) if width]
        caches = tuple(Latents.random(2048, page) for page, _ in zip((shape.page, 64), widths, strict=False))
        indices, counts = [], []
        for width in widths:
            tokens = torch.rand(shape.queries, 2048, device=reference.DEVICE).argsort(-1)[:, :width].int()
            tokens[:, width // 3] = -1
            indices.append(tokens)
            counts.append(torch.randint(width // 2, width + 1, (shape.queries,), dtype=torch.int32, device=reference.DEVICE))
        sink = 3 * torch.randn(shape.heads, device=reference.DEVICE) if shape.sink else None
        return cls(shape, q, caches, tuple(indices), tuple(counts), sink)

    def run(self) -> Tensor:
        module = importlib.import_module("flashinfer.mla._sparse_mla_sm120")
        splits = sum(-(-part.shape[1] // CHUNK) for part in self.indices)
        scratch = 8 if self.shape.heads == 8 else -(-self.shape.heads // 16) * 16
        partial_outputs = torch.empty(len(self.q), scratch, splits, NOPE + ROPE, dtype=torch.bfloat16, device=reference.DEVICE)
        partial_lse = torch.empty(len(self.q), scratch, splits, device=reference.DEVICE)
        outputs = torch.full_like(self.q, float("nan"))
        lse = torch.empty(self.q.shape[:2], device=reference.DEVICE)
        extra = {}
        if len(self.caches) > 1:
            extra = {
                "extra_kv_cache": self.caches[1].stored(),
                "extra_indices": self.indices[1],
                "extra_topk_length": self.counts[1],
            }
        module.sparse_mla_sm120_decode_dsv4(
            self.q,
            self.caches[0].stored(),
            self.indices[0],
            partial_outputs,
            partial_lse,
            outputs,
            lse,
            (NOPE + ROPE) ** -0.5,
            topk_length=self.counts[0],
            attn_sink=self.sink,
            chunks_per_block=self.chunks,
            **extra,
        )
        return outputs


def padded(tensor: Tensor, dimension: int) -> Tensor:
    """Zeros are added until the size is a multiple of ``CHUNK``."""
    missing = -tensor.shape[dimension] % CHUNK
    return torch.nn.functional.pad(tensor, [0, 0] * (tensor.ndim - 1 - dimension) + [0, missing])


def sparse_expected(call: SparseCall) -> Expected:
    """The operator in float64.

    The kernel quantizes queries to e4m3 with a power of 2 for 64 elements, and a chunk's probabilities, times the scale of 64
    elements of each value, to e4m3 with a scale for each head. Partial results are rounded to bf16.
    """
    q = call.q.double()
    groups = q[..., :NOPE].reshape(*q.shape[:2], -1, GROUP)
    powers = torch.pow(2.0, torch.ceil(torch.log2(groups.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)))
    quantized_q = ((groups / powers).float().to(torch.float8_e4m3fn).double() * powers).flatten(-2)
    parts = []
    for cache, indices, counts in zip(call.caches, call.indices, call.counts, strict=True):
        codes, scales, rope = (padded(tensor, 1) for tensor in cache.selected(indices))
        valid = padded((indices >= 0) & (torch.arange(indices.shape[1], device=q.device) < counts.unsqueeze(-1)), 1)
        parts.append((codes, scales, rope, valid))
    codes, scales, rope, valid = (torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True))
    nope = codes * scales.repeat_interleave(GROUP, dim=-1)
    factor = (NOPE + ROPE) ** -0.5

    def scores(left: Tensor, middle: Tensor, right: Tensor, last: Tensor) -> Tensor:
        result: Tensor = (left @ middle.transpose(-2, -1) + right @ last.transpose(-2, -1)) * factor
        return result

    def softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
        logits = logits.masked_fill(~valid.unsqueeze(1), float("-inf"))
        largest = logits.amax(-1, keepdim=True)
        weights = torch.exp(logits - largest)
        total = weights.sum(-1, keepdim=True)
        if call.sink is not None:
            total = total + torch.exp(call.sink.double().reshape(1, -1, 1) - largest)
        return weights, total

    logits = scores(quantized_q, nope, q[..., NOPE:], rope)
    magnitudes = scores(quantized_q.abs(), nope.abs(), q[..., NOPE:].abs(), rope.abs())
    doubt = 2 * ACCUMULATION * (1 + 2 * magnitudes.amax(-1, keepdim=True))
    weights, total = softmax(logits)
    # [query, head, chunk, token, group]
    scaled = (weights.unsqueeze(-1) * scales.unsqueeze(1)).reshape(*weights.shape[:2], -1, CHUNK, NOPE // GROUP)
    largest = scaled.amax(-2, keepdim=True).clamp(min=1e-10) / 448
    slack = 2 * doubt.reshape(*doubt.shape, 1, 1) + FUNCTIONS
    ends = [(nearest_e4m3(scaled / largest * (1 + sign * slack)) * largest).flatten(2, 3) for sign in (-1, 1)]
    middle, half = (ends[1] + ends[0]) / 2, (ends[1] - ends[0]) / 2
    grouped = codes.reshape(*codes.shape[:2], -1, GROUP)

    def products(left: Tensor, right: Tensor) -> Tensor:
        result: Tensor = torch.einsum("qhtg,qtge->qhge", left, right).flatten(-2) / total
        return result

    values = torch.cat([products(middle, grouped), weights @ rope / total], dim=-1)
    sums = torch.cat([products(middle, grouped.abs()), weights @ rope.abs() / total], dim=-1)
    bound = torch.cat([products(half, grouped.abs()) + FP8_MMA * sums[..., :NOPE], ROUNDING * sums[..., NOPE:]], dim=-1)
    bound = bound + (3 * doubt + codes.shape[1] / 16 * 2.0**-23 + ROUNDING) * sums
    bound = bound + ROUNDING * (values.abs() + bound)
    plain_weights, plain_total = softmax(scores(q[..., :NOPE], nope, q[..., NOPE:], rope))
    plain = plain_weights @ torch.cat([nope, rope], dim=-1) / plain_total
    return Expected(values, bound * 1.01 + 2.0**-30, plain)


def sparse_faults(call: SparseCall) -> dict[str, SparseCall]:
    """Calls with a planted fault."""
    cache, others = call.caches[0], call.caches[1:]

    def stored(**fields: Any) -> SparseCall:
        return replace(call, caches=(replace(cache, **fields), *others))

    another = call.indices[0].clone()
    another[:, 0] = (another[:, 0] + 1) % len(cache.codes)
    planted = {
        "scales are those of the token before": stored(scales=cache.scales.roll(1, 0)),
        "scales are those of the group before": stored(scales=cache.scales.roll(1, 1)),
        "elements in bf16 are those of the token before": stored(rope=cache.rope.roll(1, 0)),
        "queries are those of the head before": replace(call, q=call.q.roll(1, 1)),
        "one token of the list is another": replace(call, indices=(another, *call.indices[1:])),
        "the last token of each list is left out": replace(call, counts=tuple(count - 1 for count in call.counts)),
    }
    if call.sink is not None:
        planted["the sink is that of the head before"] = replace(call, sink=call.sink.roll(1))
    if others:
        planted["lists of both caches have the same tokens"] = replace(
            call, indices=(call.indices[0], call.indices[0].repeat(1, 2)[:, : call.shape.extra].contiguous())
        )
    return planted


def check_sparse(report: OperatorReport, pattern: str) -> None:
    if not fnmatch.fnmatch("sparse-mla", pattern):
        return
    operator = "sparse_mla_sm120_decode_dsv4"
    for number, shape in enumerate(SPARSE_SHAPES):
        call = SparseCall.random(shape)
        expected = sparse_expected(call)
        lists = f"{shape.topk}{f' and {shape.extra}' * bool(shape.extra)} tokens each"
        case = f"{shape.queries} queries of {shape.heads} heads, {lists}, pages of {shape.page}{', sink' * shape.sink}"
        for chunks in (None, 1, 3):
            name = f"{case}{f', {chunks} chunks a CTA' if chunks else ''}"
            report.add(attempt(operator, name, expected, replace(call, chunks=chunks).run))
        for fault, wrong in sparse_faults(call).items() if number < 2 else ():
            report.fault(f"{operator}, {case}: {fault}", attempt("", "", expected, wrong.run))


def chosen(operator: str, pattern: str) -> Iterator[tuple[Heads, str]]:
    """Models and types of the cache that ``pattern`` names: OPERATOR-TYPE-MODEL."""
    for kind in KINDS:
        for heads in HEADS:
            if kind in heads.kinds and fnmatch.fnmatch(f"{operator}-{kind}-{heads.name}", pattern):
                yield heads, kind


# ---- the program


CHECKS: Mapping[str, Callable[[OperatorReport, str], None]] = {
    "prefill": check_prefill,
    "decode": check_decode,
    "cuda-cores": check_cuda_cores,
    "xqa": check_xqa,
    "dense": check_dense,
    "sparse": check_sparse,
}


def run(report: OperatorReport, options: argparse.Namespace) -> None:
    for check in CHECKS.values():
        check(report, options.only)
