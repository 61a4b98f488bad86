"""The references and reports of the operators' program, without a GPU."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
from operator_programs import program


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


def test_an_expert_without_tokens_has_an_empty_interval(reference) -> None:  # type: ignore[no-untyped-def]
    import torch

    for rows in (0, 2):
        low, high = reference.quantized_interval(torch.zeros(rows, 64), torch.ones(rows, 64), 448.0)
        assert low.shape == high.shape == (rows, 64)


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
