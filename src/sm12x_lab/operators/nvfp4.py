"""FlashInfer's NVFP4 operators, called as engines call them: quantization, GEMM, and fused MoE as a whole."""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import reference
import torch
from reference import (
    ACCUMULATION,
    HALF_ULP,
    MOE_SHAPES,
    Expected,
    MoeCall,
    MoeLayer,
    OperatorRow,
    attempt,
    dequantized,
    moe_call,
    moe_expected,
    moe_faults,
    quantized_interval,
    routed,
    router_logits,
    unswizzled,
)
from report import OperatorReport, Unusable

Tensor = torch.Tensor


@contextlib.contextmanager
def chosen(tactics: Mapping[str, int], seen: dict[str, Any]) -> Iterator[None]:
    """FlashInfer's autotuner returns ``tactics``, by operator, instead of what it would; ``seen`` gets the runners."""
    tuner = importlib.import_module("flashinfer.autotuner").AutoTuner
    original = tuner.choose_one

    def choose(self: Any, operator: str, runners: Sequence[Any], *arguments: Any, **keywords: Any) -> tuple[Any, int]:
        seen[operator] = runners[0]
        if operator in tactics:
            return runners[0], tactics[operator]
        runner, tactic = original(self, operator, runners, *arguments, **keywords)
        return runner, int(tactic)

    tuner.choose_one = choose
    try:
        yield
    finally:
        tuner.choose_one = original


def moe_tactics(call: MoeCall, expected: Expected, case: str) -> Iterator[OperatorRow]:
    """Every tactic of either GEMM beside the other's default.

    FlashInfer 0.7 numbers those of GEMM 2 from the number of GEMM 1's tactics on, as its autotuner does. 0.6 adds that number
    to every number below that of GEMM 2's tactics, also where the autotuner has added it: there they are numbered from 0
    (``setRunnerProfiles`` in flashinfer_cutlass_fused_moe_binding.cu of 0.6.6 and 0.7.2.post1).
    """
    seen: dict[str, Any] = {}
    with chosen({}, seen):
        attempt("cutlass_fused_moe", case, expected, call.run)
    if "trtllm::fused_moe::gemm1" not in seen:
        return
    runner = seen["trtllm::fused_moe::gemm1"].fused_moe_runner
    counts = int(runner.get_gemm1_tactic_count()), int(runner.get_gemm2_tactic_count())
    version = importlib.import_module("flashinfer").__version__.split(".")
    firsts = 0, counts[0] if (int(version[0]), int(version[1])) >= (0, 7) else 0
    for gemm, (first, count) in enumerate(zip(firsts, counts, strict=True), 1):
        for number in range(count):
            with chosen({f"trtllm::fused_moe::gemm{gemm}": first + number}, {}):
                yield attempt("cutlass_fused_moe", f"{case}, GEMM {gemm}, tactic {number}", expected, call.run)


def check_moe(report: OperatorReport, pattern: str) -> None:
    flashinfer = importlib.import_module("flashinfer")
    for number, shape in enumerate(MOE_SHAPES):
        if not fnmatch.fnmatch(f"moe-{shape.name}", pattern):
            continue
        layer = MoeLayer.random(shape)
        for tokens, skewed in ((1, False), (33, False), (300, False), (700, True)):
            x = torch.randn(tokens, shape.hidden, device=reference.DEVICE).bfloat16()
            route = routed(router_logits(tokens, shape, skewed), shape.active)
            codes, scales = flashinfer.fp4_quantize(x, layer.scale1, is_sf_swizzled_layout=False)
            inputs = dequantized(codes, scales.reshape(tokens, -1)) / layer.scale1.double()
            exactly = (inputs, torch.zeros_like(inputs))
            expected = moe_expected(layer, x, route, lambda _, exactly=exactly: exactly, rounds=True)  # type: ignore[misc]
            for quantized_input in (False, True):
                call = moe_call(layer, x, route, quantized_input)
                case = f"{shape.name}, {tokens} tokens{', skewed' * skewed}, {'NVFP4' if quantized_input else 'bf16'} input"
                report.add(attempt("cutlass_fused_moe", case, expected, call.run))
            if tokens != 33:
                continue
            for row in moe_tactics(call, expected, case):
                report.add(row)
            for fault, wrong in moe_faults(call, layer).items() if number == 0 else ():
                report.fault(f"cutlass_fused_moe: {fault}", attempt("", "", expected, wrong.run))
            if call.input_scales is not None and number == 0:
                linear = unswizzled(call.input_scales, tokens, shape.hidden // 16)
                padded = torch.zeros_like(call.input_scales.view(torch.uint8)).flatten()
                padded[: linear.numel()] = linear.flatten()
                wrong = replace(call, input_scales=padded.view_as(call.input_scales))
                report.fault("cutlass_fused_moe: the input's scales are row-major", attempt("", "", expected, wrong.run))


# ---- GEMM and quantization of FlashInfer


def check_mm(report: OperatorReport, pattern: str) -> None:
    if not fnmatch.fnmatch("mm", pattern):
        return
    flashinfer = importlib.import_module("flashinfer")
    shapes = [(1, 3072, 1024), (31, 1024, 3072), (300, 3072, 4096), (512, 512, 512)]
    for rows, columns, depth in shapes:
        for dtype in (torch.bfloat16, torch.float16):
            a, b = (torch.randn(size, depth, device=reference.DEVICE).to(dtype) for size in (rows, columns))
            scale_a, scale_b = (448 * 6 / tensor.abs().amax().float() for tensor in (a, b))
            (a4, sa), (b4, sb) = (flashinfer.nvfp4_quantize(t, s) for t, s in ((a, scale_a), (b, scale_b)))
            alpha = 1 / (scale_a * scale_b)
            exact_a = dequantized(a4, unswizzled(sa, rows, depth // 16))
            exact_b = dequantized(b4, unswizzled(sb, columns, depth // 16))
            values = exact_a @ exact_b.T * alpha.double()
            magnitudes = exact_a.abs() @ exact_b.abs().T * alpha.double()
            bound = values.abs() * HALF_ULP[dtype] * 1.01 + magnitudes * ACCUMULATION * 2 + 2.0**-24
            expected = Expected(values, bound, a.double() @ b.double().T)

            def call(
                backend: str,
                fault: str = "",
                operands: tuple[Tensor, ...] = (a4, b4, sa, sb, alpha),
                out: torch.dtype = dtype,
            ) -> Tensor:
                left, right, left_scales, right_scales, factor = operands
                if fault == "scales":
                    left_scales, right_scales = right_scales, left_scales
                factor = factor * 1.05 if fault == "alpha" else factor
                result: Tensor = flashinfer.mm_fp4(left, right.T, left_scales, right_scales.T, factor, out, backend=backend)
                return result

            case = f"{rows}x{columns}x{depth} {str(dtype).removeprefix('torch.')}"
            for backend in ("cutlass", "cudnn", "cute-dsl", "trtllm", "auto"):
                report.add(attempt("mm_fp4", f"{case}, {backend}", expected, lambda name=backend: call(name)))  # type: ignore[misc]
            seen: dict[str, Any] = {}
            with chosen({}, seen):
                attempt("mm_fp4", case, expected, lambda: call("cutlass"))
            for tactic in seen["fp4_gemm"].get_valid_tactics([], None) if seen else ():
                with chosen({"fp4_gemm": tactic}, {}):
                    report.add(attempt("mm_fp4", f"{case}, cutlass, tactic {tactic}", expected, lambda: call("cutlass")))
            if rows == columns and dtype is torch.bfloat16:
                wrong = attempt("", "", expected, lambda: call("cutlass", "scales"))
                report.fault("mm_fp4: the operands' scales change places", wrong)
                wrong = attempt("", "", expected, lambda: call("cutlass", "alpha"))
                report.fault("mm_fp4: alpha is 5 % too large", wrong)


def check_quantization(report: OperatorReport, pattern: str) -> None:
    if not fnmatch.fnmatch("quantize", pattern):
        return
    flashinfer = importlib.import_module("flashinfer")
    layouts = flashinfer.SfLayout
    for rows, columns, dtype in ((1, 3072, torch.bfloat16), (300, 4096, torch.bfloat16), (129, 512, torch.float16)):
        x = torch.randn(rows, columns, device=reference.DEVICE).to(dtype)
        scale = 448 * 6 / x.abs().amax().float()
        least, greatest = quantized_interval(x.double(), x.double(), scale.double())
        middle = (least + greatest) / 2
        expected = Expected(middle, (greatest - least) / 2 + middle.abs() * 2.0**-20 + 1e-12, x.double())
        blocks = columns // 16

        def linear(rows_: int = rows, blocks_: int = blocks, x_: Tensor = x, scale_: Tensor = scale) -> Tensor:
            codes, scales = flashinfer.fp4_quantize(x_, scale_, is_sf_swizzled_layout=False)
            return dequantized(codes, scales.reshape(rows_, blocks_)) / scale_.double()

        def layout(name: Any, fold: int, x_: Tensor = x, scale_: Tensor = scale) -> Tensor:
            codes, scales = flashinfer.nvfp4_quantize(x_, scale_, sfLayout=name)
            return dequantized(codes, unswizzled(scales, len(x_), x_.shape[1] // 16, fold)) / scale_.double()

        def batched(x_: Tensor = x, scale_: Tensor = scale) -> Tensor:
            codes, scales = flashinfer.nvfp4_batched_quantize(torch.stack((x_, x_)), scale_)
            half = scales.view(torch.uint8).reshape(2, -1)[1]
            return dequantized(codes[1], unswizzled(half, len(x_), x_.shape[1] // 16)) / scale_.double()

        case = f"{rows}x{columns} {str(dtype).removeprefix('torch.')}"
        report.add(attempt("fp4_quantize", f"{case}, row-major", expected, linear))
        for name, fold in ((layouts.layout_128x4, 128), (layouts.layout_8x4, 8)):
            report.add(attempt("nvfp4_quantize", f"{case}, {fold}x4", expected, lambda n=name, f=fold: layout(n, f)))  # type: ignore[misc]
        report.add(attempt("nvfp4_batched_quantize", case, expected, batched))
        if rows == 300:
            wrong = attempt("", "", expected, lambda: layout(layouts.layout_128x4, 8))
            report.fault("nvfp4_quantize: scales 128x4 are read as 8x4", wrong)


@contextlib.contextmanager
def autotuned(*, tune: bool) -> Iterator[None]:
    """Let FlashInfer's autotuner measure and choose tactics; fail if it has chosen none."""
    if not tune:
        yield
        return
    with importlib.import_module("flashinfer").autotune(True):
        yield
    if not importlib.import_module("flashinfer.autotuner").AutoTuner.get().profiling_cache:
        raise Unusable(
            "FlashInfer's autotuner has chosen no tactic, so that its default ones ran: is its module trtllm_utils there?"
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--autotune", action="store_true", help="let FlashInfer's autotuner measure and choose tactics")


def run(report: OperatorReport, options: argparse.Namespace) -> None:
    with autotuned(tune=options.autotune):
        check_quantization(report, options.only)
        check_mm(report, options.only)
        check_moe(report, options.only)
