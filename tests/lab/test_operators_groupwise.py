"""The references of the program for FlashInfer's groupwise GEMMs, without a GPU.

FlashInfer's functions are replaced by loops over the stored operands, which read each scale from where the kernels read it.
"""

from __future__ import annotations

import json
import sys
import types

import pytest
from operator_programs import program, runner


@pytest.fixture
def groupwise(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    module = program("groupwise", monkeypatch)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    return module


def interleaved_at(stored, row: int, column: int) -> int:  # type: ignore[no-untyped-def]
    """A byte of the layout 128x4, whose blocks of 128 rows have as many columns as the tensor."""
    block = stored.flatten()[row // 128 * 128 * stored.shape[-1] :]
    inside = column // 4 * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
    return int(block[inside])


def powers_at(stored, rows: range, columns: int, vector: int, torch):  # type: ignore[no-untyped-def]
    table = [[2.0 ** (interleaved_at(stored, row, column) - 127) for column in range(columns)] for row in rows]
    return torch.tensor(table, dtype=torch.float64).reshape(len(rows), columns).repeat_interleave(vector, 1)


@pytest.fixture
def kernels(groupwise, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """The functions of ``flashinfer.gemm.gemm_base`` that the program calls."""
    import torch

    def fp8(a, b, scales_a, scales_b, major, scale_granularity_mnk, out) -> None:  # type: ignore[no-untyped-def]
        if major == "MN":
            scales_a, scales_b = scales_a.T, scales_b.T
        sums = torch.zeros(len(a), len(b))
        step_m, step_n, step_k = scale_granularity_mnk
        for begin in range(0, a.shape[1], step_k):
            part = a[:, begin : begin + step_k].float() @ b[:, begin : begin + step_k].float().T
            left = scales_a[:, begin // step_k].repeat_interleave(step_m)[: len(a), None]
            sums += part * left * scales_b[:, begin // step_k].repeat_interleave(step_n)[: len(b)]
        out.copy_(sums)

    def mxfp4(a, b, scales_a, scales_b, offsets, out, **tiles) -> None:  # type: ignore[no-untyped-def]
        count = b.shape[2] * 2 // 32
        for group, (first, last) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:], strict=False)):
            begin = (first + group * 127) // 128 * 128
            left = a[first:last].double() * powers_at(scales_a, range(begin, begin + last - first), count, 32, torch)
            elements = groupwise.reference.decode(b[group])
            right = elements * powers_at(scales_b[group], range(b.shape[1]), count, 32, torch)
            out[first:last] = left @ right.T

    def mm_mxfp8(a, b, scales_a, scales_b, out, backend, out_dtype):  # type: ignore[no-untyped-def]
        count = a.shape[1] // 32
        stored = [each.view(-1, -(-count // 4) * 4) for each in (scales_a, scales_b)]
        left = a.double() * powers_at(stored[0], range(len(a)), count, 32, torch)
        right = b.T.double() * powers_at(stored[1], range(b.shape[1]), count, 32, torch)
        return out.copy_(left @ right.T)

    def bmm_fp8(a, b, scale_a, scale_b, dtype, out, backend) -> None:  # type: ignore[no-untyped-def]
        out.copy_(a.float() @ b.float() * scale_a * scale_b)

    def mm_fp4(a, b, scales_a, scales_b, alpha, dtype, out, **options) -> None:  # type: ignore[no-untyped-def]
        count = a.shape[1] * 2 // options["block_size"]
        left, right = (
            groupwise.reference.decode(codes) * powers_at(scales, range(len(codes)), count, options["block_size"], torch)
            for codes, scales in ((a, scales_a), (b.T, scales_b.T))
        )
        out.copy_(left @ right.T * alpha)

    base = types.SimpleNamespace(
        mm_fp4=mm_fp4, gemm_fp8_nt_groupwise=fp8, group_gemm_mxfp4_nt_groupwise=mxfp4, mm_mxfp8=mm_mxfp8, bmm_fp8=bmm_fp8
    )
    monkeypatch.setattr(groupwise, "gemm_module", lambda: base)
    return base


def test_interleaved_scales_are_where_the_layout_has_them(groupwise) -> None:  # type: ignore[no-untyped-def]
    import torch

    linear = torch.randint(0, 256, (150, 6), dtype=torch.uint8)
    stored = groupwise.interleaved(linear)
    assert stored.shape == (256, 8)
    assert (groupwise.reference.unswizzled(stored, 150, 6) == linear).all()
    assert all(interleaved_at(stored, row, column) == linear[row, column] for row in range(150) for column in range(6))


@pytest.mark.parametrize("spoiled", [False, True])
def test_faults_are_planted_in_calls_that_are_right(groupwise, kernels, spoiled: bool) -> None:  # type: ignore[no-untyped-def]
    call = groupwise.PlainCall.random((256, 256, 384), (1, 128, 128), "K", ("e4m3", "bf16"))
    faults = {"rows": groupwise.replace(call, scales_a=call.scales_a.roll(1, 0)), "nothing": call}
    called = faults["rows"] if spoiled else call
    report = groupwise.OperatorReport("kind", ())
    groupwise.plant(report, "operator", "case", call.expected(), called, faults)
    assert [(row.case, row.verdict) for row in report.rows] == [
        ("case, in which faults are planted", "WRONG" if spoiled else "right")
    ]
    planted = {"operator, case: rows": "detected", "operator, case: nothing": "NOT DETECTED"}
    assert report.faults == ({} if spoiled else planted)


@pytest.mark.parametrize("major", ["K", "MN"])
@pytest.mark.parametrize("rows", [1, 128])
def test_reference_of_fp8(groupwise, kernels, rows: int, major: str) -> None:  # type: ignore[no-untyped-def]
    call = groupwise.PlainCall.random((256, 256, 384), (rows, 128, 128), major, ("e4m3", "bf16"))
    right = groupwise.attempt("", "", call.expected(), call.run)
    assert right.verdict == "right" and right.error_over_bound > 0.5, right
    for fault, wrong in groupwise.dense_faults(call).items():
        if rows == 128 or "change places" not in fault:
            assert groupwise.attempt("", "", call.expected(), wrong.run).verdict == "WRONG", fault


def test_reference_of_batches(groupwise, kernels) -> None:  # type: ignore[no-untyped-def]
    import torch

    one = groupwise.fp32_scales(1)
    call = groupwise.BatchCall(groupwise.fp8(3, 8, 64), groupwise.fp8(3, 24, 64), one, one, torch.float16)
    assert groupwise.attempt("", "", call.expected(), call.run).verdict == "right"
    for fault, wrong in groupwise.batch_faults(call).items():
        assert groupwise.attempt("", "", call.expected(), wrong.run).verdict == "WRONG", fault


def test_reference_of_grouped_mxfp4(groupwise, kernels) -> None:  # type: ignore[no-untyped-def]
    import torch

    call, expected = groupwise.grouped((132, 0, 60, 128, 12), (136, 128), "e4m3", torch.bfloat16)
    right = groupwise.attempt("", "", expected, call.run)
    assert right.verdict == "right" and right.error_over_bound > 0.5, right
    for fault, wrong in groupwise.grouped_faults(call).items():
        assert groupwise.attempt("", "", expected, wrong.run).verdict == "WRONG", fault


def test_reference_of_mxfp8(groupwise, kernels) -> None:  # type: ignore[no-untyped-def]
    import torch

    call, expected = groupwise.mxfp8((), 128, 128, 160, torch.bfloat16)
    right = groupwise.attempt("", "", expected, call.run)
    assert right.verdict == "right" and right.error_over_bound > 0.5, right
    for fault, wrong in groupwise.block_faults(call).items():
        assert groupwise.attempt("", "", expected, wrong.run).verdict == "WRONG", fault


def test_reference_of_mxfp4(groupwise, kernels) -> None:  # type: ignore[no-untyped-def]
    import torch

    call, expected = groupwise.fp4(128, 128, 192, False, torch.bfloat16)
    right = groupwise.attempt("", "", expected, call.run)
    assert right.verdict == "right" and right.error_over_bound > 0.5, right
    for fault, wrong in groupwise.block_faults(call).items():
        assert groupwise.attempt("", "", expected, wrong.run).verdict == "WRONG", fault


def test_tactics_are_those_of_the_back_end_that_is_called(groupwise, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    import torch

    used = []

    class Runner:
        def get_valid_tactics(self, inputs, profile):  # type: ignore[no-untyped-def]
            return [("tile", size) for size in inputs]

    tuner = type("AutoTuner", (), {"choose_one": lambda self, *arguments: None})
    monkeypatch.setitem(sys.modules, "flashinfer.autotuner", types.SimpleNamespace(AutoTuner=tuner))

    def run() -> torch.Tensor:
        _, tactic = tuner().choose_one("operator", [Runner()], tuning_config=None, inputs=[1, 2])
        used.append(tactic)
        return torch.ones(1)

    exact = groupwise.Expected(torch.ones(1), torch.ones(1), torch.ones(1))
    rows = list(groupwise.rows_of_tactics("operator", "case", exact, run))
    assert used == [-1, ("tile", 1), ("tile", 2)] and [row.case for row in rows][1] == "case, tactic ('tile', 2)"
    assert tuner().choose_one("other") is None


def test_groups_of_nvfp4_have_an_alpha_each(groupwise) -> None:  # type: ignore[no-untyped-def]
    import torch

    call, expected = groupwise.grouped((4, 0, 8), (16, 128), "nvfp4", torch.float16)
    assert call.alpha.shape == (3,) and call.offsets.tolist() == [0, 4, 4, 12] and expected.values.shape == (12, 16)
    left = groupwise.decode(call.a[4:]) * groupwise.scale_values(
        groupwise.reference.unswizzled(call.scales_a[256:384], 8, 8)
    ).repeat_interleave(16, -1)
    right = groupwise.decode(call.b[2]) * groupwise.scale_values(
        groupwise.reference.unswizzled(call.scales_b[2], 16, 8)
    ).repeat_interleave(16, -1)
    torch.testing.assert_close(expected.values[4:], left @ right.T * call.alpha[2].double())


def test_program_writes_the_record_of_what_it_compared(groupwise, monkeypatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    import torch

    checks = [name for name in vars(groupwise) if name.startswith("check_")]
    assert len(checks) == 7
    for name in checks:
        row = groupwise.reference.OperatorRow(name, "", "right")
        monkeypatch.setattr(groupwise, name, lambda report, names, row=row: names("mm-mxfp8-f16") and report.add(row))
    monkeypatch.setitem(sys.modules, "flashinfer", types.SimpleNamespace(__version__="0.7.2"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    assert runner()(["groupwise", "--only", "dense-*", "--only", "mm-*", "--receipt", str(tmp_path / "r")]) == 0
    record = json.loads((tmp_path / "r").read_text())
    assert (record["kind"], record["versions"]["flashinfer"]) == ("groupwise-operators", "0.7.2")
    assert sorted(row["operator"] for row in record["rows"]) == sorted(checks)


def test_groups_of_fp8_are_given_to_the_operator_and_to_the_module(groupwise, kernels, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    import torch

    def module(*arguments) -> None:  # type: ignore[no-untyped-def]
        _, _, a, b, scales_a, scales_b, out, offsets, n, k, *granularity, major = arguments
        assert b.shape[1:] == (n, k)
        for group, (first, last) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:], strict=False)):
            step = granularity[0]
            scales = scales_a[:, first // step : last // step] if major == "MN" else scales_a[first // step : last // step]
            part = out[first:last]
            kernels.gemm_fp8_nt_groupwise(a[first:last], b[group], scales, scales_b[group], major, granularity, part)

    def operator(a, b, scales_a, scales_b, offsets, *layout, out) -> None:  # type: ignore[no-untyped-def]
        if len(offsets) > 2:
            raise RuntimeError("several groups")
        module(None, None, a, b, scales_a, scales_b, out, offsets, *b.shape[1:], *layout[0], layout[1])

    kernels.group_gemm_fp8_nt_groupwise = operator
    kernels.get_gemm_sm120_module = lambda: types.SimpleNamespace(group_gemm_fp8_nt_groupwise=module)
    for major in groupwise.MAJORS:
        for sizes in ((128,), (0, 128, 256)):
            call, expected = groupwise.grouped_fp8(sizes, (128, 256), (128, 128, 128), major, ("e4m3", "bf16"))
            verdict = groupwise.attempt("", "", expected, call.run).verdict
            assert verdict == ("right" if len(sizes) == 1 else "refused")
            direct = groupwise.replace(call, direct=True)
            assert groupwise.attempt("", "", expected, direct.run).verdict == "right"
    call, expected = groupwise.grouped_fp8((300,), (128, 256), (1, 128, 128), "K", ("e4m3", "bf16"))
    for fault, wrong in groupwise.grouped_fp8_faults(call).items():
        assert groupwise.attempt("", "", expected, wrong.run).verdict == "WRONG", fault
    assert torch.equal(call.offsets, torch.tensor([0, 300], dtype=torch.int32))


# ---- the receipts
