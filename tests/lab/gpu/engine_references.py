"""What the kernels of ``engine_kernels.py`` must return: float64 of the same inputs, and the error that each output may have.

``expected(NAME)`` is a pair of outputs and bounds; with ``fault``, of inputs of which a part has another place, which a
comparison must see. Hopper executes the plain ``mma`` of these kernels itself: 2^-11 (FP8) and 2^-15 (bf16) of the sum of
magnitudes are permitted for that, and a rounding of probabilities and outputs to bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import engine_kernels as kernels
import torch
from engine_kernels import HEADS, KEY_HEADS, LENGTHS, PAGE, WIDTH, values

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]

ROUNDING, FP8_SUMS, BF16_SUMS, FUNCTIONS = 2.0**-8, 2.0**-11, 2.0**-15, 2.0**-18


def rounded(outputs: Tensor, slack: Tensor) -> Pair:
    """Outputs in bf16 whose sums may differ by ``slack``."""
    return outputs, (outputs.abs() + slack) * ROUNDING * 1.01 + slack + 1e-30


def attended(q: Tensor, k: Tensor, v: Tensor) -> Pair:
    """Causal attention of the last tokens of a sequence: [token, head, element]."""
    q, k, v = (tensor.double() for tensor in (q, k, v))
    k, v = (tensor.repeat_interleave(HEADS // KEY_HEADS, 1) for tensor in (k, v))
    hidden = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(len(k) - len(q) + 1)
    scores, sizes = (torch.einsum("qhd,khd->hqk", *pair) * WIDTH**-0.5 for pair in ((q, k), (q.abs(), k.abs())))
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
    outputs, magnitudes = (torch.einsum("hqk,khd->qhd", weights, tensor) for tensor in (v, v.abs()))
    unsure = sizes.masked_fill(hidden, 0).amax(-1).T[..., None] * BF16_SUMS + FUNCTIONS
    return rounded(outputs, magnitudes * (torch.expm1(2 * unsure) + ROUNDING + BF16_SUMS))


def joined(parts: Sequence[Pair]) -> Pair:
    return torch.cat([outputs for outputs, _ in parts]), torch.cat([bound for _, bound in parts])


def moved(tensor: Tensor, fault: bool) -> Tensor:
    return tensor.view(torch.uint8).roll(1, 0).view(tensor.dtype) if fault else tensor


def paged_attention(fault: bool, queries: Sequence[int]) -> Pair:
    keys, contents, table = kernels.paged()
    q = values(sum(queries), HEADS, WIDTH).split(list(queries))
    flat, at = (moved(keys.flatten(0, 1), fault), contents.flatten(0, 1)), torch.arange(max(LENGTHS), device=keys.device)
    places = [
        pages.long()[at[:length] // PAGE] * PAGE + at[:length] % PAGE for pages, length in zip(table, LENGTHS, strict=True)
    ]
    return joined([attended(each, flat[0][place], flat[1][place]) for each, place in zip(q, places, strict=True)])


def prefill(fault: bool) -> Pair:
    q, k, v = (values(sum(LENGTHS), heads, WIDTH, seed=seed) for seed, heads in enumerate((HEADS, KEY_HEADS, KEY_HEADS)))
    return joined([attended(*each) for each in zip(*(t.split(list(LENGTHS)) for t in (q, moved(k, fault), v)), strict=True)])


def contiguous_decode(fault: bool) -> Pair:
    k, v = (values(sum(LENGTHS), KEY_HEADS, WIDTH, seed=seed).split(list(LENGTHS)) for seed in (1, 2))
    q = values(len(LENGTHS), HEADS, WIDTH).split(1)
    return joined([attended(each, moved(keys, fault), contents) for each, keys, contents in zip(q, k, v, strict=True)])


def extend(fault: bool) -> Pair:
    new = 32
    cached = [values(sum(LENGTHS), KEY_HEADS, WIDTH, seed=seed).split(list(LENGTHS)) for seed in (1, 2)]
    q, k, v = (values(new * 3, heads, WIDTH, seed=seed) for seed, heads in ((3, HEADS), (4, KEY_HEADS), (5, KEY_HEADS)))
    parts = zip(q.split(new), moved(k, fault).split(new), v.split(new), *cached, strict=True)
    return joined([attended(each, torch.cat((keys, k)), torch.cat((contents, v))) for each, k, v, keys, contents in parts])


def scaled_by_blocks(fault: bool) -> Pair:
    a, b = (values(size, 512, seed=size).to(torch.float8_e4m3fn).double() for size in (200, 384))
    of_a, of_b = (values(rows, 4, seed=seed, dtype=torch.float32).abs().double() for rows, seed in ((200, 5), (3, 6)))
    a = a * moved(of_a, fault).repeat_interleave(128, 1)
    b = b * of_b.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return rounded(a @ b.T, a.abs() @ b.abs().T * FP8_SUMS)


def experts(fault: bool) -> Pair:
    """Pair i is of token i // 2, and each expert has 32 pairs."""
    x, w = values(64, 256).double(), moved(values(4, 384, 256, seed=1), fault).double()
    chosen, pairs = w.repeat_interleave(32, 0), x.repeat_interleave(2, 0)
    outputs, sizes = (
        torch.einsum("pk,pnk->pn", *each).view(64, 2, 384) for each in ((pairs, chosen), (pairs.abs(), chosen.abs()))
    )
    return rounded(outputs, sizes * BF16_SUMS)


def top(fault: bool) -> Pair:
    """The logits that are kept; others are the least number. The last token of top-p may be either."""
    logits = values(16, 32_000, dtype=torch.float32)
    least = torch.finfo(torch.float32).min
    k, p = torch.arange(10, 170, 10, device=logits.device), torch.linspace(0.5, 0.95, 16, device=logits.device).double()
    ranked, order = logits.double().sort(-1, descending=True)
    ranked[torch.arange(32_000, device=logits.device) >= moved(k, fault)[:, None]] = float("-inf")
    shares = torch.softmax(ranked, -1)
    before = shares.cumsum(-1) - shares
    kept = ranked.masked_fill(before >= p[:, None], least).clamp(min=least)
    unsure = 1e39 * ((before - p[:, None]).abs() < 1e-5).double() + 1e-30
    back = order.argsort(-1)
    return kept.gather(-1, back), unsure.gather(-1, back)


def delta_rule(fault: bool) -> Pair:
    """Token by token. The kernels compute chunks of 64 in bf16: permitted is 1/16 of a head's root mean square."""
    q, k, v = (values(1, 512, 4, 128, seed=seed)[0] for seed in range(3))
    k = torch.nn.functional.normalize(k.float(), dim=-1).bfloat16()
    gate, beta = (values(1, 512, 4, seed=seed, dtype=torch.float32)[0] for seed in (4, 5))
    decay, beta = torch.nn.functional.logsigmoid(gate).double().exp(), beta.sigmoid().bfloat16().double()
    q, k, v = q.double() * 128**-0.5, moved(k, fault).double(), v.double()
    state, rows = torch.zeros(4, 128, 128, dtype=torch.float64, device=q.device), []
    for t in range(512):
        state = state * decay[t, :, None, None]
        change = (v[t] - torch.einsum("hk,hkv->hv", k[t], state)) * beta[t, :, None]
        state = state + torch.einsum("hk,hv->hkv", k[t], change)
        rows.append(torch.einsum("hk,hkv->hv", q[t], state))
    outputs = torch.stack(rows)
    return outputs[None], outputs.square().mean((0, 2), keepdim=True).sqrt().expand_as(outputs)[None] / 16


REFERENCES: dict[str, Callable[[bool], Pair]] = {
    "vLLM unified attention, prefill": lambda fault: paged_attention(fault, (33, 64, 100)),
    "vLLM unified attention, decode": lambda fault: paged_attention(fault, (1, 1, 1)),
    "vLLM decode attention": lambda fault: paged_attention(fault, (1, 1, 1)),
    "vLLM prefill attention": prefill,
    "vLLM FP8 GEMM": scaled_by_blocks,
    "vLLM experts": experts,
    "vLLM top-k and top-p": top,
    "vLLM gated delta rule": delta_rule,
    "SGLang decode attention": contiguous_decode,
    "SGLang extend attention": extend,
    "SGLang FP8 GEMM": scaled_by_blocks,
}


def expected(name: str, fault: bool = False) -> Pair:
    """What a kernel must return; ``fault``: of inputs in which rows are those of the row before."""
    return REFERENCES[name](fault)
