"""The references and reports of the operators' program, without a GPU."""

from __future__ import annotations

import contextlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from operator_programs import program, runner


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    return program("reference", monkeypatch)


def test_formats_of_operators(reference) -> None:  # type: ignore[no-untyped-def]
    import torch

    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, -0.76], dtype=torch.float64)
    assert reference.nearest_e2m1(ties).tolist() == [0, 1, 1, 2, 2, 4, 4, 6, -1]
    assert reference.decode(torch.tensor([[0x72, 0xF8]], dtype=torch.uint8)).tolist() == [[1, 6, -0.0, -6]]
    linear = torch.arange(300 * 8).reshape(300, 8).remainder(251).to(torch.uint8)
    for fold in (128, 8):
        blocks = torch.zeros(-(-300 // fold) * fold * 8, dtype=torch.uint8)
        for row in range(300):
            for column in range(8):
                tile = (row // fold * 2 + column // 4) * fold * 4
                inside = row % 32 * 16 + row % 128 // 32 * 4 if fold == 128 else row % 8 * 4
                blocks[tile + inside + column % 4] = linear[row, column]
        assert (reference.unswizzled(blocks, 300, 8, fold) == linear).all()


def test_reference_of_fused_moe(reference) -> None:  # type: ignore[no-untyped-def]
    """Against a plain loop over tokens; and a wrong scale exceeds the bound."""
    import torch

    torch.manual_seed(0)
    shape = reference.MoeShape("small", 4, 64, 32, 2)
    layer = reference.MoeLayer.random(shape)
    x = torch.randn(5, 64).bfloat16()
    experts, weights = reference.routed(reference.router_logits(5, shape, False), shape.active)
    inputs = (x.double(), torch.zeros(5, 64, dtype=torch.float64))
    expected = reference.moe_expected(layer, x, (experts, weights), lambda expert: inputs, rounds=True)
    plain = torch.zeros(5, 64, dtype=torch.float64)
    for token in range(5):
        for expert, weight in zip(experts[token].tolist(), weights[token].tolist(), strict=True):
            w1 = reference.dequantized(layer.w1[expert], layer.s1[expert]) * layer.g1[expert].double()
            w2 = reference.dequantized(layer.w2[expert], layer.s2[expert]) * layer.g2[expert].double()
            up, gate = (w1 @ x[token].double()).chunk(2)
            plain[token] += weight * (w2 @ (up * torch.nn.functional.silu(gate)))
    torch.testing.assert_close(expected.plain, plain, rtol=1e-5, atol=1e-6)
    assert reference.compare(expected.values.bfloat16(), expected, "", "").verdict == "right"
    assert torch.nn.functional.cosine_similarity(expected.values.flatten(), plain.flatten(), dim=0) > 0.98
    assert reference.compare((expected.values * 1.3).bfloat16(), expected, "", "").verdict == "WRONG"
    assert reference.compare(torch.full_like(x, float("nan")), expected, "", "").why == "not finite"


def test_fault_of_an_operator_that_is_refused_is_not_detected(reference) -> None:  # type: ignore[no-untyped-def]
    from report import OperatorReport

    report = OperatorReport("operators", ())
    report.fault("a", reference.OperatorRow("", "", "refused"))
    report.fault("b", reference.OperatorRow("", "", "WRONG"))
    assert report.missed == ["a"]


@pytest.fixture
def vllm_layers(reference, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    import vllm_layers

    return vllm_layers


def test_reference_of_a_linear_layer(reference, vllm_layers) -> None:  # type: ignore[no-untyped-def]
    """Against the layer with the input quantized to the nearest values; a fault in a scale exceeds the bound."""
    import torch

    torch.manual_seed(0)
    shape = vllm_layers.LinearShape("small", 64, (48, 16))
    weights = vllm_layers.LinearWeights.random(shape)
    x = torch.randn(5, 64).bfloat16()
    blocks = x.double().view(5, 4, 16)
    scales = reference.nearest_e4m3(blocks.abs().amax(-1, keepdim=True) / weights.input_scale.double() / 6)
    quantized = reference.nearest_e2m1(blocks / weights.input_scale.double() / scales) * scales * weights.input_scale.double()
    w = reference.dequantized(weights.codes, weights.scales) * weights.tensor_scale.double()
    output = quantized.view(5, 64) @ w.T
    expected = vllm_layers.linear_expected(weights, x)
    assert reference.compare(output.bfloat16(), expected, "", "").verdict == "right"
    assert reference.compare((output * 1.05).bfloat16(), expected, "", "").verdict == "WRONG"
    torch.testing.assert_close(expected.plain, x.double() @ w.T)


def test_experts_of_a_layer_share_the_largest_input_scale_or_have_their_own(reference, vllm_layers) -> None:  # type: ignore[no-untyped-def]
    import torch

    torch.manual_seed(0)
    shape = reference.MoeShape("small", 4, 64, 32, 2)
    weights = reference.MoeLayer.random(shape)
    x, logits = torch.randn(5, 64).bfloat16(), reference.router_logits(5, shape, False)
    shared, own = (vllm_layers.served(weights, x, logits, per_expert) for per_expert in (False, True))
    assert (shared.plain == own.plain).all() and (shared.values != own.values).any()
    first, second = vllm_layers.input_scales(weights)
    assert len(set(first.tolist())) == len(set(second.tolist())) == shape.experts
    uniform = reference.MoeLayer(**{**vars(weights), "scale2": (1 / second.max()).expand(shape.experts)})
    uniform_own = vllm_layers.served(uniform, x, logits, True)
    assert (uniform_own.values != shared.values).any()  # the first GEMM's scales differ


def test_expert_offsets_count_block_scales_in_multiples_of_128(vllm_layers) -> None:  # type: ignore[no-untyped-def]
    starts, blocks = vllm_layers.expert_offsets((1, 0, 130))
    assert starts.tolist() == [0, 1, 1, 131] and blocks.tolist() == [0, 128, 128, 384]


def test_an_expert_without_tokens_has_an_empty_interval(reference) -> None:  # type: ignore[no-untyped-def]
    import torch

    for rows in (0, 2):
        low, high = reference.quantized_interval(torch.zeros(rows, 64), torch.ones(rows, 64), 448.0)
        assert low.shape == high.shape == (rows, 64)


@pytest.fixture
def sglang_model(reference, vllm_layers, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    import sglang_model

    return sglang_model


def test_queries_and_keys_are_those_of_their_layer_in_one_rotary_embedding(reference, sglang_model) -> None:  # type: ignore[no-untyped-def]
    import torch

    torch.manual_seed(0)
    model = sglang_model.SmallModel.random()
    heads, keys, size = sglang_model.HEADS, sglang_model.KV_HEADS, sglang_model.HEAD_DIM
    calls: dict[str, list[tuple[Any, Any]]] = {}
    for tokens in (3, 1):
        for number in range(sglang_model.LAYERS):
            layer = f"model.layers.{number}.self_attn"
            qkv = torch.randn(tokens, (heads + 2 * keys) * size).bfloat16()
            calls.setdefault(f"{layer}.qkv_proj", []).append(((), (qkv, None)))
            parts = torch.split(qkv.view(tokens, -1, size), [heads, keys, keys], 1)[:2]
            normalized = [
                torch.nn.functional.rms_norm(part.float(), (size,), model.tensors[f"{layer}.{name}_norm.weight"].float(), 1e-6)
                for name, part in zip("qk", parts, strict=True)
            ]
            q, k = (part.bfloat16().flatten(1) for part in normalized)
            calls.setdefault("model.layers.0.self_attn.rotary_emb", []).append(((torch.arange(tokens), q, k, None), (q, k)))

    def verdicts() -> list[str]:
        rows = sglang_model.SglangRows(model, sglang_model.Recorded(calls))
        found = [row for number in range(sglang_model.LAYERS) for row in rows.normalized(number)]
        return [reference.compare(output, expected, "module", name).verdict for name, output, expected in found]

    assert verdicts() == ["right"] * 8
    calls["model.layers.0.self_attn.rotary_emb"].reverse()
    calls["model.layers.0.self_attn.rotary_emb"].sort(key=lambda call: len(call[0][0]), reverse=True)
    assert verdicts() == ["WRONG"] * 8


def test_b12x_has_a_bound_for_the_parts_that_it_adds(reference, sglang_model) -> None:  # type: ignore[no-untyped-def]
    import torch
    from sglang_layers import moe_expected

    torch.manual_seed(0)
    shape = reference.MoeShape("small", 4, 128, 128, 2)
    weights = reference.MoeLayer.random(shape)
    x, logits = torch.randn(5, 128).bfloat16(), reference.router_logits(5, shape, False)
    auto, shared, b12x = (moe_expected(weights, backend, x, logits) for backend in ("auto", "flashinfer_cutlass", "b12x"))
    assert (auto.values != shared.values).any()
    assert ((auto.values - b12x.values).abs() <= auto.bound + b12x.bound).all()
    assert ((shared.values - b12x.values).abs() > shared.bound + b12x.bound).any()  # with one input scale for all experts


def test_an_interval_has_every_block_scale_between_its_ends(reference) -> None:  # type: ignore[no-untyped-def]
    import torch

    low = torch.linspace(0.5, 4.9, 16, dtype=torch.float64).unsqueeze(0)
    high = low.clone()
    low[0, 0], high[0, 0] = 5.0, 9.0
    least, greatest = reference.quantized_interval(low, high, 16.0)
    for largest in torch.linspace(5.0, 9.0, 41, dtype=torch.float64):
        block_scale = reference.nearest_e4m3(largest * 16 / 6)
        values = reference.nearest_e2m1(low[0, 1:] * 16 / block_scale) * block_scale / 16
        assert ((least[0, 1:] <= values) & (values <= greatest[0, 1:])).all()


@pytest.mark.parametrize(("version", "second"), [("0.6.8.post1", [0, 1, 2]), ("0.7.2.post1", [2, 3, 4])])
def test_tactics_of_gemm_2_are_numbered_as_the_release_expects(  # type: ignore[no-untyped-def]
    reference, monkeypatch: pytest.MonkeyPatch, version: str, second: list[int]
) -> None:
    """Two tactics of GEMM 1, three of GEMM 2; the operator asks the autotuner for one of each."""

    class AutoTuner:
        def choose_one(self, operator: str, runners: list[Any], *arguments: Any) -> tuple[Any, int]:
            return runners[0], -1

    monkeypatch.setitem(sys.modules, "flashinfer", types.SimpleNamespace(__version__=version))
    monkeypatch.setitem(sys.modules, "flashinfer.autotuner", types.SimpleNamespace(AutoTuner=AutoTuner))
    kernels = types.SimpleNamespace(get_gemm1_tactic_count=lambda: 2, get_gemm2_tactic_count=lambda: 3)
    runner = types.SimpleNamespace(fused_moe_runner=kernels)
    calls: list[tuple[int, int]] = []

    class Call:
        def run(self) -> Any:
            first, second = (AutoTuner().choose_one(f"trtllm::fused_moe::gemm{gemm}", [runner])[1] for gemm in (1, 2))
            calls.append((first, second))
            raise RuntimeError("no GPU")

    from nvfp4 import moe_tactics

    rows = list(moe_tactics(Call(), None, "case"))
    assert calls == [(-1, -1), (0, -1), (1, -1), *((-1, number) for number in second)]
    assert [row.case for row in rows] == [f"case, GEMM {g}, tactic {n}" for g, n in ((1, 0), (1, 1), (2, 0), (2, 1), (2, 2))]


def test_changed_parameter_is_another_tensor(reference) -> None:  # type: ignore[no-untyped-def]
    """With the layout of the original, at another address; the model has the original afterwards."""
    import sglang_model
    import torch

    model = torch.nn.Module()
    model.layer = torch.nn.Module()
    model.layer.weight = original = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).T)
    with sglang_model.changed_parameter(model, "layer.weight", lambda values: values * 2):
        changed = model.layer.weight
        assert changed.data_ptr() != original.data_ptr() and changed.stride() == original.stride()
        assert (changed == original * 2).all()
    assert model.layer.weight is original


@pytest.mark.parametrize(("chosen", "code"), [({}, 2), ({"tactic": 1}, 0)])
def test_layers_after_the_autotuner_require_that_it_chose_a_tactic(  # type: ignore[no-untyped-def]
    vllm_layers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chosen: dict[str, int], code: int
) -> None:
    import torch

    tuner = types.SimpleNamespace(AutoTuner=types.SimpleNamespace(get=lambda: types.SimpleNamespace(profiling_cache=chosen)))
    monkeypatch.setitem(sys.modules, "flashinfer.autotuner", tuner)
    package = types.SimpleNamespace(__version__="0.6.8.post1", autotune=lambda tune: contextlib.nullcontext())
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setattr(vllm_layers, "configured", contextlib.nullcontext)
    for name in ("require_vllm", "check_quantization", "check_fp4_mm", "check_fp8_mm", "check_linear"):
        monkeypatch.setattr(vllm_layers, name, lambda *_: None)
    row = vllm_layers.reference.OperatorRow("FusedMoE", "small, auto", "right")
    monkeypatch.setattr(vllm_layers, "check_moe", lambda report, pattern: (report.add(row), report.fault("x", wrong)))
    wrong = vllm_layers.reference.OperatorRow("FusedMoE", "", "WRONG")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    receipt = tmp_path / "receipt.json"
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__version__="0.20.0"))
    try:
        ended = runner()(["vllm_layers", "--autotune", "--receipt", str(receipt)])
    except SystemExit as end:
        ended = end.code
    assert (ended, receipt.exists()) == (code, not code)
