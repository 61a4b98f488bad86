"""Compare FlashInfer's NVFP4 operators, called as engines call them, with float64 of the dequantized operands.

A program for a Python that has torch and FlashInfer; it needs nothing else of sm120kit:

    sm120kit verify run -- python nvfp4.py              a Hopper GPU
    python nvfp4.py                                     an SM12x GPU

Fused MoE runs as a whole: routing, quantization, both GEMMs, activation and finalize. Each output has a bound of its own: the
reference keeps the interval of every intermediate value that fp32 accumulation permits, through the rounding to bf16,
SwiGLU and the quantization to NVFP4. Faults are planted in the arguments, and each must be detected.

Exit codes: 0, every operator that ran is right; 1, one is wrong; 54, a planted fault was not detected.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import importlib
import importlib.metadata
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

Tensor = torch.Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MIDPOINTS = (0.25, 0.75 - 1e-12, 1.25, 1.75 - 1e-12, 2.5, 3.5 - 1e-12, 5.0)
"""Above the midpoint the next value is nearest; at it, the one with an even code."""

ACCUMULATION = 2.0**-21
"""Error of fp32 accumulation, relative to the sum of magnitudes."""
FUNCTIONS = 2.0**-18
"""Error of the fast exponential and reciprocals of the kernels, relative to the result."""
HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Error of a rounding, relative to the result."""

DEVICE = "cuda"


@dataclass(frozen=True)
class OperatorRow:
    """A comparison. ``error_over_bound`` above 1 is wrong; ``cosine`` is to the operator without quantized activations."""

    operator: str
    case: str
    verdict: str
    error_over_bound: float = 0.0
    relative_rms: float = 0.0
    cosine: float = 0.0
    outputs: int = 0
    why: str = ""


@dataclass(frozen=True)
class Expected:
    """What an operator must return, the bound of each output's error, and the result without quantized activations."""

    values: Tensor
    bound: Tensor
    plain: Tensor


# ---- formats


def decode(codes: Tensor) -> Tensor:
    """Packed e2m1 as float64; the low four bits are the first element."""
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).long()
    return torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64, device=codes.device)[nibbles]


def scale_values(scales: Tensor) -> Tensor:
    """Bytes of e4m3 as float64."""
    return scales.contiguous().view(torch.uint8).view(torch.float8_e4m3fn).double()


def unswizzled(scales: Tensor, rows: int, columns: int, fold: int = 128) -> Tensor:
    """Row-major scales of the layouts 128x4 (folds of 32 rows) and 8x4."""
    flat = scales.contiguous().view(torch.uint8).flatten()
    tiles_m, tiles_k = -(-rows // fold), -(-columns // 4)
    flat = flat[: tiles_m * tiles_k * fold * 4]
    if fold == 128:
        plain = flat.view(tiles_m, tiles_k, 32, 4, 4).permute(0, 3, 2, 1, 4)
    else:
        plain = flat.view(tiles_m, tiles_k, fold, 4).permute(0, 2, 1, 3)
    return plain.reshape(tiles_m * fold, tiles_k * 4)[:rows, :columns]


def dequantized(codes: Tensor, linear_scales: Tensor) -> Tensor:
    """Elements times block scales, without the scale of the tensor; float64."""
    elements = decode(codes)
    return elements * scale_values(linear_scales).repeat_interleave(16, dim=-1)


def nearest_e2m1(values: Tensor) -> Tensor:
    table = torch.tensor(E2M1, dtype=torch.float64, device=values.device)
    at = torch.bucketize(values.abs(), torch.tensor(MIDPOINTS, dtype=torch.float64, device=values.device))
    return table[at] * values.sign()


def nearest_e4m3(values: Tensor) -> Tensor:
    return values.clamp(max=448.0).float().to(torch.float8_e4m3fn).double()


def quantized_interval(low: Tensor, high: Tensor, scale: Tensor | float) -> tuple[Tensor, Tensor]:
    """The least and the greatest dequantized value of elements in [low, high]; ``scale`` is that of the tensor."""
    low, high = (values.reshape(*values.shape[:-1], values.shape[-1] // 16, 16) for values in (low, high))
    crosses = (low <= 0) & (high >= 0)
    nearest_zero = torch.where(crosses, torch.zeros_like(low), torch.minimum(low.abs(), high.abs()))
    ends = ((nearest_zero, 1 - FUNCTIONS), (torch.maximum(low.abs(), high.abs()), 1 + FUNCTIONS))
    least, greatest = (nearest_e4m3(values.amax(-1, keepdim=True) * scale / 6 * slack) for values, slack in ends)
    first, last = (values.float().to(torch.float8_e4m3fn).view(torch.uint8).int() for values in (least, greatest))
    blocks = []
    for step in range(
        int((last - first).max()) + 1 if first.numel() else 1
    ):  # every block scale between the least and the greatest
        block_scale = scale_values(torch.minimum(first + step, last).to(torch.uint8))
        for end, sign in ((low, -1), (high, 1)):
            value = end + sign * end.abs() * FUNCTIONS
            steps = torch.where(block_scale > 0, value * scale / block_scale.clamp(min=1e-30), torch.zeros_like(value))
            blocks.append(nearest_e2m1(steps) * block_scale / scale)
    stacked = torch.stack(blocks)
    return stacked.amin(0).flatten(-2), stacked.amax(0).flatten(-2)


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.float().to(dtype).double()


# ---- comparisons


def compare(got: Tensor, expected: Expected, operator: str, case: str) -> OperatorRow:
    values = got.double()
    errors = (values - expected.values).abs()
    if values.shape != expected.values.shape:
        return OperatorRow(
            operator, case, "WRONG", float("inf"), why=f"{tuple(values.shape)}, expected {tuple(expected.values.shape)}"
        )
    finite = bool(torch.isfinite(values).all() and torch.isfinite(expected.bound).all())
    ratio = float((errors / expected.bound).max()) if finite else float("inf")
    rms = float(errors.square().mean().sqrt() / expected.values.square().mean().sqrt())
    cosine = float(torch.nn.functional.cosine_similarity(values.flatten(), expected.plain.flatten(), dim=0))
    verdict = "right" if finite and ratio <= 1 else "WRONG"
    return OperatorRow(operator, case, verdict, ratio, rms, cosine, values.numel(), "" if finite else "not finite")


def attempt(operator: str, case: str, expected: Expected, call: Callable[[], Tensor]) -> OperatorRow:
    """Run and compare; an operator that raises is refused, with the beginning of its message."""
    try:
        got = call()
        torch.cuda.synchronize()
    except Exception as error:  # every library raises its own types
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return (
            OperatorRow(operator, case, "refused", why=why)
            if usable()
            else OperatorRow(operator, case, "WRONG", float("inf"), why=why)
        )
    return compare(got, expected, operator, case)


def usable() -> bool:
    """Whether the GPU still works: a kernel that crashed is not a call that was refused, and ends all that follows."""
    try:
        torch.cuda.synchronize()
    except Exception:  # of CUDA, by whichever library it comes
        return False
    return True


# ---- fused MoE


@dataclass(frozen=True)
class MoeShape:
    """One layer of a model on one GPU; ``width`` is that of an expert divided by the GPUs."""

    name: str
    experts: int
    hidden: int
    width: int
    active: int


MOE_SHAPES = (
    MoeShape("qwen3.5-122b-tp2", 256, 3072, 512, 8),
    MoeShape("qwen3.5-397b-tp4", 512, 4096, 256, 10),
)


@dataclass(frozen=True)
class MoeLayer:
    """Weights as a checkpoint has them: packed elements, row-major block scales, one scale for each expert's tensors."""

    shape: MoeShape
    w1: Tensor
    s1: Tensor
    g1: Tensor
    w2: Tensor
    s2: Tensor
    g2: Tensor
    scale1: Tensor
    scale2: Tensor

    @classmethod
    def random(cls, shape: MoeShape) -> MoeLayer:
        """Elements of any code; block scales of all mantissas in [0.125, 4). The first half of w1 is up, the second gate."""

        def weights(rows: int, columns: int) -> tuple[Tensor, Tensor]:
            codes = torch.randint(0, 256, (shape.experts, rows, columns // 2), dtype=torch.uint8, device=DEVICE)
            scales = torch.randint(0x20, 0x48, (shape.experts, rows, columns // 16), dtype=torch.uint8, device=DEVICE)
            return codes, scales

        def globals_(typical: float) -> Tensor:
            return typical * (0.5 + torch.rand(shape.experts, device=DEVICE))

        w1, w2 = weights(2 * shape.width, shape.hidden), weights(shape.hidden, shape.width)
        g1, g2 = globals_(0.4 / shape.hidden**0.5), globals_(0.4 / shape.width**0.5)
        scale2 = 40.0 * (0.75 + 0.5 * torch.rand(shape.experts, device=DEVICE))
        return cls(shape, *w1, g1, *w2, g2, torch.tensor(448.0 * 6 / 6.0, device=DEVICE), scale2)


@dataclass(frozen=True)
class MoeCall:
    """The arguments of a call of ``cutlass_fused_moe``; planted faults replace them."""

    tokens: Tensor
    input_scales: Tensor | None
    experts: Tensor
    routing: Tensor
    w1: Tensor
    w2: Tensor
    scales: tuple[Tensor, ...]
    hidden: int

    def run(self) -> Tensor:
        fused_moe = importlib.import_module("flashinfer.fused_moe")
        output = torch.full((len(self.experts), self.hidden), float("nan"), dtype=torch.bfloat16, device=DEVICE)
        fused_moe.cutlass_fused_moe(
            self.tokens,
            self.experts,
            self.routing,
            self.w1.view(torch.long),
            self.w2.view(torch.long),
            torch.bfloat16,
            quant_scales=list(self.scales),
            input_sf=self.input_scales,
            output=output,
        )
        return output


def router_logits(tokens: int, shape: MoeShape, skewed: bool) -> Tensor:
    """The router's output for each token; ``skewed`` prefers few experts."""
    logits = torch.randn(tokens, shape.experts, device=DEVICE)
    if skewed:
        logits[:, : shape.active // 2] += 8.0
    return logits


def routed(logits: Tensor, active: int) -> tuple[Tensor, Tensor]:
    """Experts and weights of each token, by softmax and top-k as the engines do."""
    weights, experts = torch.topk(torch.softmax(logits, dim=-1), active, dim=-1)
    return experts.int(), weights / weights.sum(-1, keepdim=True)


def moe_call(layer: MoeLayer, x: Tensor, route: tuple[Tensor, Tensor], quantized_input: bool) -> MoeCall:
    """Arguments as vLLM and SGLang make them: block scales interleaved, ``alpha`` the product of both tensors' scales."""
    flashinfer = importlib.import_module("flashinfer")
    tokens, input_scales = (x, None)
    if quantized_input:
        tokens, input_scales = flashinfer.fp4_quantize(x, layer.scale1, is_sf_swizzled_layout=True)
    w1_scales, w2_scales = (
        flashinfer.block_scale_interleave(scales).reshape(scales.shape).view(torch.int32) for scales in (layer.s1, layer.s2)
    )
    alpha1, alpha2 = layer.g1 / layer.scale1, layer.g2 / layer.scale2
    scales = (layer.scale1, w1_scales, alpha1, layer.scale2, w2_scales, alpha2)
    return MoeCall(tokens, input_scales, *route, layer.w1, layer.w2, scales, layer.shape.hidden)


def moe_expected(
    layer: MoeLayer, x: Tensor, route: tuple[Tensor, Tensor], inputs: Callable[[int], tuple[Tensor, Tensor]], rounds: bool
) -> Expected:
    """The layer in float64, expert by expert.

    ``inputs`` returns the activations as an expert gets them quantized, and how much each may differ; ``rounds``: intermediate
    values are rounded to bf16.
    """

    def to_bf16(value: Tensor) -> Tensor:
        return rounded(value, torch.bfloat16) if rounds else value

    experts, weights = route[0].long(), route[1].double()
    width = layer.shape.width
    values, plain, bound, magnitudes = (
        torch.zeros(len(x), layer.shape.hidden, dtype=torch.float64, device=DEVICE) for _ in range(4)
    )
    for expert in sorted(set(experts.flatten().tolist())):
        token, slot = torch.where(experts == expert)
        factor = weights[token, slot].unsqueeze(-1)
        w1 = dequantized(layer.w1[expert], layer.s1[expert]) * layer.g1[expert].double()
        w2 = dequantized(layer.w2[expert], layer.s2[expert]) * layer.g2[expert].double()
        activations, unsure = (tensor[token] for tensor in inputs(expert))
        sums, error = activations @ w1.T, (activations.abs() * ACCUMULATION + unsure) @ w1.abs().T
        ends = [to_bf16(sums + sign * error) for sign in (-1, 1)]
        products = torch.stack([a[:, :width] * torch.nn.functional.silu(b[:, width:]) for a in ends for b in ends])
        low, high = products.amin(0), products.amax(0)
        low, high = to_bf16(low - low.abs() * FUNCTIONS), to_bf16(high + high.abs() * FUNCTIONS)
        least, greatest = quantized_interval(low, high, layer.scale2[expert].double())
        middle = (least + greatest) / 2
        part = middle @ w2.T
        values.index_add_(0, token, part * factor)
        magnitudes.index_add_(0, token, part.abs() * factor)
        slack = (greatest - least) / 2 @ w2.abs().T + middle.abs() @ w2.abs().T * ACCUMULATION
        bound.index_add_(0, token, slack * factor)
        exact = x[token].double() @ w1.T
        plain.index_add_(0, token, (exact[:, :width] * torch.nn.functional.silu(exact[:, width:])) @ w2.T * factor)
    # An epilogue that finalizes rounds each contribution and each of their sums.
    roundings = (layer.shape.active + 1) * HALF_ULP[torch.bfloat16]
    return Expected(values, bound + roundings * magnitudes * 1.01 + 1e-30, plain)


def moe_faults(call: MoeCall, layer: MoeLayer) -> dict[str, MoeCall]:
    """Calls with a planted fault."""
    scales = call.scales

    def with_scale(at: int, value: Tensor) -> MoeCall:
        return replace(call, scales=(*scales[:at], value, *scales[at + 1 :]))

    halves = torch.cat(call.w1.chunk(2, dim=1)[::-1], dim=1)
    return {
        "gate and up change places": replace(call, w1=halves),
        "w1's scales are those of the expert before": with_scale(1, scales[1].roll(1, 0)),
        "w2's scales are those of the expert before": with_scale(4, scales[4].roll(1, 0)),
        "w1's scales are not interleaved": with_scale(1, layer.s1.contiguous().view(torch.int32)),
        "alpha of GEMM 1 is that of the expert before": with_scale(2, scales[2].roll(1)),
        "alpha of GEMM 2 is that of the expert before": with_scale(5, scales[5].roll(1)),
        "intermediate scale of the expert before": with_scale(3, scales[3].roll(1)),
        "routing weights of the slot before": replace(call, routing=call.routing.roll(1, 1).contiguous()),
        "one token's experts are those of the token before": replace(call, experts=call.experts.roll(1, 0).contiguous()),
    }


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
            x = torch.randn(tokens, shape.hidden, device=DEVICE).bfloat16()
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
            a, b = (torch.randn(size, depth, device=DEVICE).to(dtype) for size in (rows, columns))
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
        x = torch.randn(rows, columns, device=DEVICE).to(dtype)
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


# ---- the program


def distribution_version(name: str) -> str:
    """The version of an installed distribution; empty if none has the name, as of a package that is a directory on the path."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


class OperatorReport:
    """Rows and planted faults, printed as they come; the record states the versions of ``packages``."""

    def __init__(self, kind: str, packages: Sequence[str]) -> None:
        self.kind, self.packages = kind, packages
        self.rows: list[OperatorRow] = []
        self.faults: dict[str, str] = {}
        self.started = time.monotonic()

    def add(self, row: OperatorRow) -> None:
        self.rows.append(row)
        figures = f"error/bound {row.error_over_bound:.3f}, rms {row.relative_rms:.2e}, cosine {row.cosine:.5f}"
        seconds = time.monotonic() - self.started
        print(f"{seconds:6.1f} s  {row.operator}: {row.case}: {row.verdict}: {row.why or figures}", flush=True)

    def fault(self, name: str, row: OperatorRow) -> None:
        self.faults[name] = "detected" if row.verdict == "WRONG" else "NOT DETECTED"
        print(f"planted: {name}: {self.faults[name]}, error/bound {row.error_over_bound:.1f} {row.why}", flush=True)

    @property
    def missed(self) -> list[str]:
        return [name for name, outcome in self.faults.items() if outcome == "NOT DETECTED"]

    def record(self) -> dict[str, Any]:
        modules = {name: sys.modules[name] for name in self.packages if name in sys.modules}
        return {
            "format": 1,
            "kind": self.kind,
            "gpu": torch.cuda.get_device_name(),
            "capability": ".".join(map(str, torch.cuda.get_device_capability())),
            "versions": {
                name: str(getattr(module, "__version__", "") or distribution_version(name)) for name, module in modules.items()
            },
            "seconds": round(time.monotonic() - self.started, 1),
            "rows": [asdict(row) for row in self.rows],
            "faults": self.faults,
        }

    def finish(self, receipt: Path | None) -> int:
        """Write the record, print the counts and return the exit code."""
        if receipt:
            receipt.write_text(json.dumps(self.record(), indent=1) + "\n")
        counts = {verdict: sum(row.verdict == verdict for row in self.rows) for verdict in ("right", "WRONG", "refused")}
        print(f"{counts}; planted faults detected: {len(self.faults) - len(self.missed)} of {len(self.faults)}")
        if not counts["right"] + counts["WRONG"]:
            print("nothing was compared: every call was refused, or --only matches none")
            return 2
        if self.missed:
            return 54
        return 0 if counts["right"] and not counts["WRONG"] else 1


def argument_parser(description: str, only: str = "") -> argparse.ArgumentParser:
    """A parser with the options of every program: the receipt, the seed, and, described by ``only``, which calls are made."""
    parser = argparse.ArgumentParser(description=description)
    if only:
        parser.add_argument("--only", default="*", metavar="GLOB", help=only)
    parser.add_argument("--receipt", type=Path, metavar="FILE", help="write the rows as JSON")
    parser.add_argument("--seed", type=int, default=1)
    return parser


@contextlib.contextmanager
def autotuned(parser: argparse.ArgumentParser, *, tune: bool) -> Iterator[None]:
    """Let FlashInfer's autotuner measure and choose tactics; end the program if it has chosen none."""
    if not tune:
        yield
        return
    with importlib.import_module("flashinfer").autotune(True):
        yield
    if not importlib.import_module("flashinfer.autotuner").AutoTuner.get().profiling_cache:
        parser.error(
            "FlashInfer's autotuner has chosen no tactic, so that its default ones ran: is its module trtllm_utils there?"
        )


def main() -> int:
    parser = argument_parser("Compare FlashInfer's NVFP4 operators with float64.", only="moe-NAME, mm, quantize")
    parser.add_argument("--autotune", action="store_true", help="let FlashInfer's autotuner measure and choose tactics")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    report = OperatorReport("nvfp4-operators", ("flashinfer", "torch"))
    with autotuned(parser, tune=options.autotune):
        check_quantization(report, options.only)
        check_mm(report, options.only)
        check_moe(report, options.only)
    return report.finish(options.receipt)


if __name__ == "__main__":
    sys.exit(main())
