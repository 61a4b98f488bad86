"""The references of the program for FlashInfer's attention, without a GPU, and what it compared on one."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace

import pytest
from operator_programs import OPERATORS, program, runner


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    return program("attention", monkeypatch)


# ---- a paged cache


def paged(call, torch):  # type: ignore[no-untyped-def]
    """FA2: fp32, with probabilities and outputs rounded to bf16, and the scale of values applied to these."""
    heads, cache = call.heads, call.cache
    keys, values = cache.dequantized()
    values, group, outputs, first = values / cache.value_scale, heads.queries // heads.keys, [], 0
    for new, length, pages in zip(call.requests.new, call.requests.lengths, call.requests.pages, strict=True):
        q, first = call.queries[first : first + new].float(), first + new
        k, v = (pool[list(pages)].flatten(0, 1)[:length].repeat_interleave(group, 1).float() for pool in (keys, values))
        logits = torch.einsum("nhd,mhd->hnm", q, k) * heads.size**-0.5
        if call.causal:
            logits = logits.masked_fill(~torch.ones(new, length, dtype=torch.bool).tril(length - new), float("-inf"))
        weights = torch.exp(logits - logits.amax(-1, keepdim=True)).bfloat16().float()
        result = torch.einsum("hnm,mhd->nhd", weights, v) / weights.sum(-1).T.unsqueeze(-1)
        outputs.append((result.bfloat16().float() * cache.value_scale).bfloat16())
    return torch.cat(outputs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["bf16", "e4m3", "nvfp4"])
def test_reference_of_a_paged_cache(operators, kind: str, causal: bool) -> None:  # type: ignore[no-untyped-def]
    """Every fault exceeds the bound in some output; the kernel's roundings do not."""
    import torch

    heads = operators.Heads("small", 4, 2, 64, 16)
    case = operators.Case.random(heads, kind, (1, 5, 3), (17, 40, 16), causal)
    expected = case.exact.expected(operators.Arithmetic(1, 0, 0, 2), case.plain)
    right = operators.compare(paged(case.call, torch), expected, "", "")
    assert right.verdict == "right" and right.error_over_bound > 0.3 and right.cosine > 0.97
    faults = operators.faults(case.call)
    assert len(faults) == 6 + causal + (kind != "bf16") + 4 * (kind == "nvfp4")
    for fault, wrong in faults.items():
        assert operators.compare(paged(wrong, torch), expected, "", "").verdict == "WRONG", fault


def test_requests_read_their_pages_alone(operators) -> None:  # type: ignore[no-untyped-def]
    requests = operators.Requests.random((1, 1), (16, 40), 16)
    pages = [page for pages in requests.pages for page in pages]
    assert sorted(pages) == list(range(1, requests.page_count)) and [len(pages) for pages in requests.pages] == [2, 3]
    starts, indices, last = operators.Call(operators.Heads("", 4, 2, 64, 16), requests, None, None).table()
    assert (starts.tolist(), last.tolist()) == ([0, 1, 4], [16, 8])
    assert indices.tolist() == [*requests.pages[0][:1], *requests.pages[1]]


# ---- NVFP4 without a cache


def quantized(q, k, v, operators, torch):  # type: ignore[no-untyped-def]
    """As FlashInfer: means are subtracted, and block scales and keys are in the order of its kernels."""

    def stored(x):  # type: ignore[no-untyped-def]
        codes, blocks = operators.quantized(x.float())
        batch, heads, rows, columns = blocks.shape
        groups = blocks.view(torch.uint8).reshape(batch, heads, rows // 64, 4, 16, columns // 4, 4)
        return codes, groups.permute(0, 1, 2, 5, 4, 3, 6).reshape(blocks.shape).contiguous().view(blocks.dtype)

    q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % 128)) for x in (q, k - k.mean(-2, keepdim=True), v))
    means = q.unflatten(2, (-1, 128)).mean(3)
    q = q - means.repeat_interleave(128, 2)
    correction = means.float() @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).float().transpose(-2, -1)
    order = torch.tensor([32 * (row // 32) + 8 * (row % 8 // 2) + 2 * (row % 32 // 8) + row % 2 for row in range(k.shape[2])])
    (q4, qs), (k4, ks), (v4, vs) = stored(q), stored(k[:, :, order]), stored(v.transpose(-2, -1))
    return q4, k4, v4, qs, ks, vs, correction


def dense(call, operators, torch):  # type: ignore[no-untyped-def]
    """Tiles of 128 keys, with the maximum of the tiles before; probabilities are quantized in blocks of 16."""
    shape = call.shape
    q, k, v = call.dequantized()
    k, v = (x.repeat_interleave(shape.queries // shape.keys, 1) for x in (k, v))
    logits = ((q @ k.transpose(-2, -1)).float() + call.correction.repeat_interleave(128, 2)) * shape.size**-0.5
    position = torch.arange(k.shape[2])
    hidden = (position >= call.length).expand(len(position), -1)
    if shape.causal:
        hidden = hidden | (position > position.unsqueeze(-1))
    largest, total, sums = torch.full_like(logits[..., :1], -1e30), torch.zeros(1), torch.zeros(q.shape)
    for first in range(0, len(position), 128):
        tile, seen = logits[..., first : first + 128], ~hidden[:, first : first + 128]
        before, largest = largest, torch.maximum(largest, tile.masked_fill(~seen, -1e30).amax(-1, keepdim=True))
        weights, kept = 2688 * torch.exp(tile - largest) * seen, torch.exp(before - largest)
        blocks = weights.unflatten(-1, (-1, 16))
        scales = blocks.amax(-1, keepdim=True) / 6
        elements = operators.nearest_e2m1((blocks / scales.clamp(min=1e-8)).double())
        sums = sums * kept + (elements * operators.nearest_e4m3(scales)).flatten(-2) @ v[:, :, first : first + 128]
        total = total * kept + weights.sum(-1, keepdim=True)
    return (sums / total).bfloat16()[:, :, : shape.tokens]


@pytest.mark.parametrize("causal", [False, True])
def test_reference_of_nvfp4_attention(operators, causal: bool) -> None:  # type: ignore[no-untyped-def]
    import torch

    shape = operators.DenseShape(1, 4, 2, 200, 64, causal)
    q, k, v = (torch.randn(1, heads, 200, 64) * factor for heads, factor in ((4, 2.5), (2, 1.0), (2, 1.0)))
    call = operators.DenseCall(shape, shape.tokens, *quantized(q, k, v, operators, torch))
    plain = torch.nn.functional.scaled_dot_product_attention(
        q.double(), *(x.double().repeat_interleave(2, 1) for x in (k, v)), is_causal=causal
    )
    expected = operators.dense_expected(call, plain)
    right = operators.compare(dense(call, operators, torch), expected, "", "")
    assert right.verdict == "right" and right.error_over_bound > 0.3 and right.cosine > 0.95
    for fault, wrong in operators.dense_faults(call).items():
        assert operators.compare(dense(wrong, operators, torch), expected, "", "").verdict == "WRONG", fault


# ---- sparse latent attention


def sparse(call, operators, torch):  # type: ignore[no-untyped-def]
    """Chunks of 64 tokens from the bytes of the caches, each merged from bf16."""

    def e4m3(x):  # type: ignore[no-untyped-def]
        return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()

    def row(cache, stored, token: int):  # type: ignore[no-untyped-def]
        page, at = stored[token // cache.page], token % cache.page
        data, scales = page[576 * at : 576 * at + 576], page[576 * cache.page + 8 * at :][:7]
        return (
            data[:448].view(torch.float8_e4m3fn).float(),
            torch.exp2(scales.float() - 127),
            data[448:].view(torch.bfloat16).float(),
        )

    q = call.q.float()
    groups = q[..., :448].unflatten(-1, (7, 64))
    powers = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)))
    nope_q, outputs = (e4m3(groups / powers) * powers).flatten(-2), []
    for query in range(len(q)):
        chunks = []
        for cache, tokens, counts in zip(call.caches, call.indices, call.counts, strict=True):
            listed, stored = tokens[query, : counts[query]].tolist(), cache.stored()
            for first in range(0, len(listed), 64):
                rows = [row(cache, stored, token) for token in listed[first : first + 64] if token >= 0]
                codes, scales, rope = (torch.stack(parts) for parts in zip(*rows, strict=True))
                nope = codes * scales.repeat_interleave(64, 1)
                logits = (nope_q[query] @ nope.T + q[query, :, 448:] @ rope.T) * 512**-0.5
                largest = logits.amax(-1, keepdim=True)
                weights = torch.exp(logits - largest)
                total = weights.sum(-1, keepdim=True)
                parts = []
                for group in range(7):
                    scaled = weights * scales[:, group]
                    unit = scaled.amax(-1, keepdim=True) / 448
                    parts.append(e4m3(scaled / unit) @ codes[:, 64 * group : 64 * group + 64] * unit)
                parts.append(weights.bfloat16().float() @ rope)
                chunks.append(((torch.cat(parts, 1) / total).bfloat16().float(), largest + torch.log(total)))
        logarithms = torch.stack([lse for _, lse in chunks])
        weights = torch.exp(logarithms - logarithms.amax(0))
        total = weights.sum(0)
        if call.sink is not None:
            total = total + torch.exp(call.sink.unsqueeze(-1) - logarithms.amax(0))
        outputs.append((sum(weight * part for weight, (part, _) in zip(weights, chunks, strict=True)) / total).bfloat16())
    return torch.stack(outputs)


@pytest.mark.parametrize(("extra", "sink"), [(0, False), (70, True)])
def test_reference_of_sparse_latent_attention(operators, extra: int, sink: bool) -> None:  # type: ignore[no-untyped-def]
    import torch

    call = operators.SparseCall.random(operators.SparseShape(8, 2, 150, extra, 16, sink))
    expected = operators.sparse_expected(call)
    right = operators.compare(sparse(call, operators, torch), expected, "", "")
    assert right.verdict == "right" and right.error_over_bound > 0.3 and right.cosine > 0.99
    for fault, wrong in operators.sparse_faults(call).items():
        assert operators.compare(sparse(wrong, operators, torch), expected, "", "").verdict == "WRONG", fault


# ---- the program, and what it compared on a GPU


def test_program_writes_the_record_of_what_it_compared(operators, monkeypatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    import torch

    row = operators.OperatorRow("attention", "a case", "right")
    checks = {
        "a": lambda report, _: report.add(row),
        "b": lambda report, _: report.fault("planted", replace(row, verdict="WRONG")),
    }
    monkeypatch.setattr(operators, "CHECKS", checks)
    monkeypatch.setitem(sys.modules, "flashinfer", torch)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    arguments = ["attention", "--receipt", str(tmp_path / "receipt.json")]
    assert runner()(arguments) == 0
    record = json.loads((tmp_path / "receipt.json").read_text())
    assert (record["kind"], record["faults"]) == ("attention-operators", {"planted": "detected"})
    names = ("__main__.py", "attention.py", "reference.py", "report.py")
    assert record["program"] == {name: hashlib.sha256((OPERATORS / name).read_bytes()).hexdigest() for name in names}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with pytest.raises(SystemExit) as ended:
        runner()(arguments)
    assert ended.value.code == 2
