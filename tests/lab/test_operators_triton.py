"""The references of the programs that run vLLM's and SGLang's Triton kernels, without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from operator_programs import program


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    return program("vllm_triton", monkeypatch)


def test_interval_of_fp8_has_every_quantized_value(triton) -> None:  # type: ignore[no-untyped-def]
    import torch

    x = torch.randn(7, 256, dtype=torch.float64)
    low, high = x - x.abs() * 2**-9, x + x.abs() * 2**-9
    least, greatest = triton.fp8_interval(low, high)
    for share in (0.0, 0.3, 1.0):
        values = (low + (high - low) * share).view(7, 2, 128)
        scales = values.abs().amax(-1, keepdim=True) / 448
        quantized = ((values / scales).float().to(torch.float8_e4m3fn).double() * scales).view(7, 256)
        assert (least <= quantized).all() and (quantized <= greatest).all()
    exact = triton.fp8_interval(x, x)
    assert ((exact[1] - exact[0]).abs() <= exact[1].abs() * 1e-5).float().mean() > 0.99
    assert (torch.stack(triton.fp8_interval(torch.zeros(1, 128), torch.zeros(1, 128))) == 0).all()


def kernels_of_experts(experts, x, route):  # type: ignore[no-untyped-def]
    """What the kernels compute, token by token in fp32: inputs of both GEMMs quantized for FP8, results in bf16."""
    import torch

    def input_of(row: torch.Tensor) -> torch.Tensor:
        if experts.kind != "fp8":
            return row.float()
        blocks = row.float().view(-1, 128)
        scales = blocks.abs().amax(-1, keepdim=True) / 448
        return ((blocks / scales).to(torch.float8_e4m3fn).float() * scales).flatten()

    outputs = []
    for token, row in enumerate(x):
        contributions = []
        for expert, weight in zip(route[0][token].tolist(), route[1][token].tolist(), strict=True):
            gate, up = (experts.values(0, expert).float() @ input_of(row)).bfloat16().float().chunk(2)
            activated = (torch.nn.functional.silu(gate).bfloat16().float() * up).bfloat16()
            contributions.append((experts.values(1, expert).float() @ input_of(activated) * weight).bfloat16().float())
        outputs.append(torch.stack(contributions).sum(0).bfloat16())
    return torch.stack(outputs)


@pytest.mark.parametrize("kind", ["fp8", "bf16", "int4", "int4-zeros"])
def test_reference_of_experts(triton, kind: str) -> None:  # type: ignore[no-untyped-def]
    """Against plain loops over tokens; each fault that the program plants exceeds the bound."""
    import reference
    import torch

    shape = reference.MoeShape("small", 4, 256, 128, 2)
    experts = triton.TritonExperts.random(kind, shape)
    x = torch.randn(9, 256).bfloat16()
    route = reference.routed(reference.router_logits(9, shape, False), shape.active)
    expected = triton.experts_expected(experts, x, route)
    plain = torch.zeros(9, 256, dtype=torch.float64)
    for token in range(9):
        for expert, weight in zip(route[0][token].tolist(), route[1][token].tolist(), strict=True):
            gate, up = (experts.values(0, expert) @ x[token].double()).chunk(2)
            plain[token] += weight * (experts.values(1, expert) @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(expected.plain, plain, rtol=1e-5, atol=1e-6)
    compared = reference.compare(kernels_of_experts(experts, x, route), expected, "", "")
    assert compared.verdict == "right" and compared.cosine > 0.999
    faults = list(triton.moe_faults(experts, route))
    assert len(faults) == {"fp8": 5, "bf16": 3, "int4": 5, "int4-zeros": 7}[kind]
    for name, wrong, wrong_route in faults:
        assert reference.compare(kernels_of_experts(wrong, x, wrong_route), expected, "", "").verdict == "WRONG", name


def test_values_of_int4_weights(triton) -> None:  # type: ignore[no-untyped-def]
    import torch

    weights = torch.full((1, 2, 64), 0xF0, dtype=torch.uint8)
    scales = torch.full((1, 2, 1), 0.5, dtype=torch.bfloat16)
    experts = triton.TritonExperts("int4", weights, weights, (scales, scales))
    assert experts.values(0, 0)[0, :4].tolist() == [-4.0, 3.5, -4.0, 3.5]
    zeros = torch.full((1, 1, 1), 0x2F, dtype=torch.uint8)
    experts = replace(experts, zeros=(zeros, zeros))
    assert experts.values(0, 0)[:, :2].tolist() == [[-7.5, 0.0], [-1.0, 6.5]]


def test_reference_of_attention(triton) -> None:  # type: ignore[no-untyped-def]
    """Against a loop over tokens, with keys and values in pages; faults exceed the bound."""
    import reference
    import torch

    shape = triton.AttentionShape("small", 4, 2, 32, 5, True)
    lengths = ((3, 3), (2, 40), (1, 1))
    call = triton.UnifiedAttentionCall.random(shape, lengths, False, True)
    for cache in (call.keys, call.values):
        cache.copy_(torch.randn(cache.shape) * 16)
    expected = call.expected()
    rows, start = [], 0
    for sequence, (new, total) in enumerate(lengths):
        for token in range(total - new, total):
            for head in range(4):
                scores, values = [call.sinks[head].double()], [torch.zeros(32, dtype=torch.float64)]
                for other in range(max(0, token - 4), token + 1):
                    page, slot = call.pages[sequence, other // 16], other % 16
                    key, value = (cache[page, slot, head // 2].double() for cache in (call.keys, call.values))
                    scores.append(call.q[start + token - total + new, head].double() @ key * call.scales[0] / 32**0.5)
                    values.append(value * call.scales[1])
                rows.append(torch.softmax(torch.stack(scores), 0) @ torch.stack(values))
        start += new
    torch.testing.assert_close(expected.plain.flatten(0, 1), torch.stack(rows), rtol=1e-6, atol=1e-6)
    assert reference.compare(torch.stack(rows).view(expected.values.shape).bfloat16(), expected, "", "").verdict == "right"
    for name, changed in triton.attention_faults(call):
        if "left out" not in name:  # the length of the sequences is that of the reference
            assert reference.compare(changed.expected().values.bfloat16(), expected, "", "").verdict == "WRONG", name


@pytest.fixture
def sglang_triton(triton, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    import sglang_triton

    return sglang_triton


def attention_of_sglang(call):  # type: ignore[no-untyped-def]
    """What SGLang's Triton kernels compute, sequence by sequence in fp32."""
    import torch

    shape, dtype, outputs = call.shape, call.keys.dtype, []
    lengths = [new for new, _ in call.lengths]
    parts = zip(*(torch.split(each, lengths) for each in (call.q, call.k, call.v)), call.cached(), strict=True)
    for q, k, v, places in parts:
        group = shape.heads // shape.kv_heads
        keys, values = (cache[places].float().repeat_interleave(group, 1) for cache in (call.keys, call.values))
        rows = q if call.decode else q.to(dtype)
        scores = torch.einsum("qhd,khd->hqk", rows.float(), keys) * (shape.head_dim**-0.5 * call.scales[0])
        if not call.decode:
            own = torch.einsum("qhd,khd->hqk", q.float(), k.float().repeat_interleave(group, 1)) * shape.head_dim**-0.5
            scores = torch.cat((scores, own), -1)
        here = torch.arange(scores.shape[-1] - len(q), scores.shape[-1])[:, None]
        there = torch.arange(scores.shape[-1])
        hidden = (there > here) | (there < here - (shape.window - 1 if shape.window else scores.shape[-1]))
        scores = scores.masked_fill(hidden, float("-inf"))
        largest = scores.amax(-1, keepdim=True)
        p = torch.exp(scores - largest)
        total = p.sum(-1, keepdim=True)
        if call.sinks is not None:
            total = total + torch.exp(call.sinks.float()[:, None, None] - largest)
        out = torch.einsum("hqk,khd->qhd", p[..., : len(places)].to(dtype).float(), values) * call.scales[1]
        if not call.decode:
            out = out + torch.einsum(
                "hqk,khd->qhd", p[..., len(places) :].bfloat16().float(), v.float().repeat_interleave(group, 1)
            )
        outputs.append((out / total.permute(1, 0, 2)).bfloat16())
    return torch.cat(outputs)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("decode", "window", "sinks"), [(True, 0, False), (True, 0, True), (False, 0, False), (False, 16, True)]
)
def test_reference_of_sglangs_attention(  # type: ignore[no-untyped-def]
    sglang_triton, decode: bool, window: int, sinks: bool, fp8: bool
) -> None:
    import reference
    import torch

    shape = sglang_triton.AttentionShape("small", 4, 2, 64, window, sinks)
    lengths = ((1, 1), (1, 33), (1, 70)) if decode else ((5, 5), (33, 40), (1, 71))
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    call = sglang_triton.TritonAttentionCall.random(shape, lengths, decode, dtype)
    expected = call.expected()
    row = reference.compare(attention_of_sglang(call), expected, "", "")
    assert row.verdict == "right", row
    faults = dict(sglang_triton.attention_faults(call))
    assert len(faults) == 2 + 2 * fp8 + sinks + bool(window)
    for fault, changed in faults.items():
        assert reference.compare(attention_of_sglang(changed), expected, "", "").verdict == "WRONG", fault
