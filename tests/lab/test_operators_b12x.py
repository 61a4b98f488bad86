"""The references of the program for b12x's operators, without a GPU."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from operator_programs import program, runner

from sm120kit.core.data_roots import data_root


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    return program("b12x_nvfp4", monkeypatch)


def test_scales_are_interleaved_as_they_are_read(operators) -> None:  # type: ignore[no-untyped-def]
    import torch

    linear = torch.randint(0, 256, (2, 300, 10), dtype=torch.uint8)
    stored = operators.interleaved(linear)
    assert stored.shape == (2, 384, 12)
    for one, other in zip(linear, stored, strict=True):
        assert (operators.reference.unswizzled(other, 300, 10) == one).all()


def test_reference_of_the_gemm(operators) -> None:  # type: ignore[no-untyped-def]
    """Against elements multiplied one by one; each fault in the operands exceeds the bound."""
    import torch

    call, expected = operators.gemm_case(128, 128, 128)

    def product(wrong) -> torch.Tensor:  # type: ignore[no-untyped-def]
        a, b = (
            operators.dequantized(codes, operators.reference.unswizzled(scales, 128, 8))
            for codes, scales in ((wrong.a, wrong.scales_a), (wrong.b, wrong.scales_b))
        )
        return ((a[:, None] * b[None]).sum(-1) * wrong.alpha.double()).bfloat16()

    assert operators.reference.compare(product(call), expected, "", "").verdict == "right"
    for fault, wrong in operators.gemm_faults(call).items():
        assert operators.reference.compare(product(wrong), expected, "", "").verdict == "WRONG", fault


def layer_of(call, shape, torch, reference, random):  # type: ignore[no-untyped-def]
    """The fused MoE as b12x does it: slices of 128 columns in random order, each part and each sum rounded to bf16."""
    quantize = reference.quantized_interval
    output = torch.zeros(len(call.x), shape.hidden).bfloat16()
    parts = [
        (token, slot, first)
        for token in range(len(call.x))
        for slot in range(shape.active)
        for first in range(0, shape.width, 128)
    ]
    for index in torch.randperm(len(parts), generator=random).tolist():
        token, slot, first = parts[index]
        expert = int(call.experts[token, slot])
        w1 = reference.dequantized(call.w1[expert], reference.unswizzled(call.s1[expert], 2 * shape.width, shape.hidden // 16))
        w2 = reference.dequantized(call.w2[expert], reference.unswizzled(call.s2[expert], shape.hidden, shape.width // 16))
        scale1, scale2 = (each[expert].double() for each in (call.scale1, call.scale2))
        low, high = quantize(call.x[token].double(), call.x[token].double(), scale1)
        sums = w1 @ (low if first else high) * scale1 * call.alpha1[expert].double()
        inner = (sums[: shape.width] * torch.nn.functional.silu(sums[shape.width :])).bfloat16().double()
        low, high = quantize(inner, inner, scale2)
        columns = slice(first, first + 128)
        part = (w2[:, columns] @ high[columns] * scale2 * call.alpha2[expert].double()).bfloat16()
        output[token] += part * call.weights[token, slot].bfloat16()
    return output


def test_reference_of_fused_moe(operators) -> None:  # type: ignore[no-untyped-def]
    import torch

    reference = operators.reference
    shape = reference.MoeShape("small", 4, 64, 256, 2)
    layer, x = reference.MoeLayer.random(shape), torch.randn(5, 64).bfloat16()
    scale1, route = (
        448.0 * (0.75 + 0.5 * torch.rand(4)),
        reference.routed(reference.router_logits(5, shape, False), shape.active),
    )
    call, expected = operators.moe_call(layer, scale1, x, route), operators.moe_expected(layer, scale1, x, route)
    random = torch.Generator().manual_seed(1)
    right = reference.compare(layer_of(call, shape, torch, reference, random), expected, "", "")
    assert right.verdict == "right" and right.error_over_bound > 0.05 and right.cosine > 0.97
    for fault, wrong in operators.moe_faults(call, layer).items():
        assert reference.compare(layer_of(wrong, shape, torch, reference, random), expected, "", "").verdict == "WRONG", fault


def test_tokens_that_choose_the_same_experts(operators, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Right if all rows of an expert are computed; without those beyond 64, the row says that few tokens are wrong."""
    import torch

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    layer = operators.MoeLayer.random(shape := operators.MoeShape("small", 4, 256, 128, 2))
    call, expected = operators.moe_case(layer, torch.full((4,), 448.0), operators.HOT_TOKENS, True)
    assert (call.experts == call.experts[0]).all() and len(call.experts) > 64
    output = layer_of(call, shape, torch, operators.reference, torch.Generator().manual_seed(1))
    assert operators.attempt_moe(expected, lambda: output).verdict == "right"
    rows = operators.attempt_moe(expected, lambda: torch.where(torch.arange(72)[:, None] < 64, output, 0))
    assert rows.verdict == "WRONG" and "in 8 of 72 tokens and 16 of 144 tiles of 128 columns" in rows.why
    stale = output.clone()
    stale[1::2, 128:136] = output[1::2, :8]
    tiles = operators.attempt_moe(expected, lambda: stale)
    assert tiles.verdict == "WRONG" and "in 36 of 72 tokens and 36 of 144 tiles of 128 columns" in tiles.why


def test_cases_are_selected_by_name(operators, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    import torch

    asked: list[tuple[int, bool]] = []
    calls = operators.Calls(moes=[(operators.MoeShape("small", 4, 64, 128, 2), operators.MOE_TOKENS)])
    monkeypatch.setattr(operators, "FAULTY_TOKENS", ())
    monkeypatch.setattr(operators, "last_kernel", lambda: "static")
    monkeypatch.setattr(operators, "attempt_moe", lambda *_: operators.reference.OperatorRow("b12x_moe_fp4", "", "right"))

    def case(layer, scale1, tokens, hot):  # type: ignore[no-untyped-def]
        asked.append((tokens, hot))
        return operators.moe_call(layer, scale1, torch.zeros(1, 64), (torch.zeros(1, 2), torch.zeros(1, 2))), None

    monkeypatch.setattr(operators, "moe_case", case)
    report = operators.OperatorReport("b12x-operators", ())
    operators.check_moe(report, "moe-hot", calls)
    assert asked == [(72, True)]
    assert [row.case for row in report.rows] == ["small, 72 tokens with the same experts, kernel static"]
    operators.check_moe(report, "moe-small", calls)
    assert asked[1:] == [(tokens, False) for tokens in operators.MOE_TOKENS]
    operators.check_moe(report, "gemm", calls)
    assert len(asked) == 1 + len(operators.MOE_TOKENS)


def test_calls_of_a_recipe_have_the_workspace_that_its_kernels_were_compiled_for(operators) -> None:  # type: ignore[no-untyped-def]
    """The table of configuration A's image; patches/sglang allocates the workspace of up to 80 tokens."""
    import torch

    recipe = data_root() / "recipes" / "engines" / "sglang-0.5.11-b12x.toml"
    calls = operators.Calls.of_recipe(recipe)
    assert len(calls.gemms) == 62 and (1024, 1024, 3072) in calls.gemms
    ((shape, tokens),) = calls.moes
    assert (shape, sorted(tokens)[:3], len(tokens)) == (operators.MoeShape(recipe.stem, 256, 3072, 512, 8), [1, 2, 3], 25)
    allocated: list[tuple[int, ...]] = []

    class TpMoe:
        def select_tp_moe_backend(self, num_tokens: int, num_topk: int) -> str:
            return "static" if num_tokens * num_topk <= 640 else "dynamic"

        def allocate_tp_moe_workspace(self, x, *tensors, input_scales_static) -> str:  # type: ignore[no-untyped-def]
            allocated.append(tuple(x.shape) + tuple(tensors[-1].shape))
            return "largest"

        def allocate_tp_moe_workspace_pool(self) -> str:
            return "pool"

    def workspace(count: int, reserved: bool) -> str:
        layer = operators.MoeLayer.random(operators.MoeShape("small", 8, 64, 128, 8))
        route = torch.zeros(count, 8, dtype=torch.int32), torch.ones(count, 8)
        call = operators.moe_call(layer, torch.ones(8), torch.zeros(count, 64, dtype=torch.bfloat16), route)
        return str(replace(call, reserved=reserved).workspace(TpMoe()))

    assert [workspace(6, False), workspace(6, True), workspace(81, True)] == ["pool", "largest", "pool"]
    assert allocated == [(80, 64, 80, 8)]


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "No such file"), ("b12x = [", "Invalid value"), ("[base]\n", "no 'b12x'"), ("[b12x]\n", "no 'gemm'")],
)
def test_unusable_recipe_is_named(  # type: ignore[no-untyped-def]
    operators, monkeypatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, problem: str
) -> None:
    monkeypatch.setitem(sys.modules, "b12x", types.SimpleNamespace())
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (12, 0))
    path = tmp_path / "recipe.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit) as ended:
        runner()(["b12x_nvfp4", "--recipe", str(path)])
    assert ended.value.code == 2
    assert f"--recipe {path}: " in (printed := capsys.readouterr().err) and problem in printed


def test_scales_of_b12x_are_given_to_flashinfer_as_it_expects_them(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """FlashInfer multiplies ``w1_alpha`` with the input's scale, and divides by the scales of inputs. The worst call counts."""
    import torch

    flashinfer_b12x = program("flashinfer_b12x", monkeypatch)
    seen: list[dict[str, Any]] = []

    def fused_moe(*arguments: Any, output: torch.Tensor, **named: Any) -> None:
        seen.append(named | {"sizes": arguments[-2:]})
        output.copy_(expected.values)
        if len(seen) == 2:
            output[0, 0] += 1000

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    converted = types.SimpleNamespace(convert_sf_to_mma_layout=lambda scales, *sizes: sizes)
    monkeypatch.setitem(sys.modules, "flashinfer", types.SimpleNamespace(b12x_fused_moe=fused_moe))
    monkeypatch.setitem(sys.modules, "flashinfer.cute_dsl.utils", converted)
    monkeypatch.setattr(flashinfer_b12x, "CALLS", {flashinfer_b12x.MoeShape("small", 4, 128, 128, 2): (3,)})
    monkeypatch.setattr(flashinfer_b12x, "FAULTY_TOKENS", ())
    case = flashinfer_b12x.b12x_nvfp4.moe_case
    calls: list[Any] = []

    def recorded(*arguments: Any, **named: Any) -> Any:
        nonlocal expected
        call, expected = case(*arguments, **named)
        calls.append(call)
        return call, expected

    expected: Any = None
    monkeypatch.setattr(flashinfer_b12x.b12x_nvfp4, "moe_case", recorded)
    report = flashinfer_b12x.OperatorReport("flashinfer-b12x", ())
    flashinfer_b12x.check(report, "*")
    (row,), (call,) = report.rows, calls
    assert (row.verdict, row.case) == ("WRONG", "small, 3 tokens, 3 of 4 right")
    assert len(seen) == flashinfer_b12x.REPEATS and seen[0]["sizes"] == (4, 2)
    torch.testing.assert_close(seen[0]["w1_alpha"] * seen[0]["input_global_scale"], call.alpha1)
    torch.testing.assert_close(seen[0]["fc2_input_scale"] * call.scale2, torch.ones(4))
    assert torch.equal(seen[0]["w2_alpha"], call.alpha2)


def test_program_writes_the_record_of_what_it_compared(operators, monkeypatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    import torch

    row = operators.reference.OperatorRow("dense_gemm", "8x16x64", "right")
    monkeypatch.setattr(operators, "check_gemm", lambda report, *_: report.add(row))
    monkeypatch.setattr(operators, "check_moe", lambda report, *_: report.fault("planted", replace(row, verdict="WRONG")))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    monkeypatch.setitem(sys.modules, "b12x", types.SimpleNamespace(__version__="0.8.3"))
    assert runner()(["b12x_nvfp4", "--receipt", str(tmp_path / "receipt.json")]) == 0
    record = json.loads((tmp_path / "receipt.json").read_text())
    assert (record["kind"], record["capability"], record["faults"]) == ("b12x-operators", "12.0", {"planted": "detected"})
    assert [each["operator"] for each in record["rows"]] == ["dense_gemm"]


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4", "mxfp8", "w6a8_e2m3", "w6a8_e3m2", "mxfp6_e2m3", "mxfp6_e3m2"])
def test_reference_of_formats(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against operands read as they are stored; each fault exceeds the bound."""
    formats = program("b12x_formats", monkeypatch)
    import ml_dtypes
    import torch

    form = formats.FORMATS[recipe]
    call, expected = formats.gemm_case(recipe, 128, 128, 128)
    types = {"e2m3": ml_dtypes.float6_e2m3fn, "e3m2": ml_dtypes.float6_e3m2fn, "e2m1": ml_dtypes.float4_e2m1fn}

    def read(operand, packed: bool) -> torch.Tensor:  # type: ignore[no-untyped-def]
        values, scales = operand.stored(form, packed)
        stored = values.squeeze(-1).contiguous().view(torch.uint8)
        if operand.kind == "e4m3":
            elements = stored.view(torch.float8_e4m3fn).double()
        else:
            bits = 4 if operand.kind == "e2m1" else 6 if packed else 8
            stream = (stored.long().unsqueeze(-1) >> torch.arange(8) & 1).flatten(1)
            codes = (stream.view(len(stored), -1, bits) << torch.arange(bits)).sum(-1).to(torch.uint8)
            elements = torch.from_numpy(codes.numpy().view(types[operand.kind]).astype("float64"))
        rows = torch.arange(len(stored))[:, None]
        blocks = torch.arange(128 // form.block)[None]
        factors = scales.double()[rows % 32, rows // 32 % 4, rows // 128, blocks % 4, blocks // 4, 0]
        return elements * factors.repeat_interleave(form.block, -1)

    def product(wrong) -> torch.Tensor:  # type: ignore[no-untyped-def]
        return ((read(wrong.a, False) @ read(wrong.b, form.b in formats.FP6).T) * wrong.alpha.double()).bfloat16()

    assert formats.reference.compare(product(call), expected, "", "").verdict == "right"
    for fault, wrong in formats.gemm_faults(call).items():
        assert formats.reference.compare(product(wrong), expected, "", "").verdict == "WRONG", fault
