"""Compare vLLM's NVFP4 layers and its own GEMM and quantization operators with float64 of the dequantized operands.

Needs torch and vLLM 0.20.

Layers are vLLM's: created by its ModelOpt configuration, loaded by its weight loaders, processed and called as in its models,
on one GPU. Every back-end with quantized activations is selected in turn; what one refuses is listed. Faults are planted in
weights, scales and processed layers.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import nvfp4
import reference
import torch
from reference import (
    ACCUMULATION,
    FUNCTIONS,
    HALF_ULP,
    MOE_SHAPES,
    Expected,
    MoeLayer,
    MoeShape,
    attempt,
    dequantized,
    moe_expected,
    quantized_interval,
    rounded,
    routed,
    router_logits,
    unswizzled,
)
from report import OperatorReport, Unusable

Tensor = torch.Tensor

SMALL_MOE = MoeShape("small", 8, 256, 128, 4)

MOE_BACKENDS = ("auto", "flashinfer_cutlass", "cutlass")
LINEAR_BACKENDS = ("", "flashinfer-cutlass", "cutlass", "flashinfer-cudnn")
"""Values of ``--moe-backend`` and of ``VLLM_NVFP4_GEMM_BACKEND`` with quantized activations; the first lets vLLM select."""


def vllm(module: str, name: str = "") -> Any:
    """A module of vLLM, or what it calls ``name``."""
    found = importlib.import_module(f"vllm.{module}" if module else "vllm")
    return getattr(found, name) if name else found


def is_chosen(name: str, pattern: str) -> bool:
    return fnmatch.fnmatch(name, pattern)


# ---- vLLM as a process of one GPU


@contextlib.contextmanager
def configured(moe_backend: str = "auto") -> Iterator[Any]:
    """The configuration of vLLM that layers are created and called with."""
    config = vllm("config", "VllmConfig")(kernel_config=vllm("config", "KernelConfig")(moe_backend=moe_backend))
    with vllm("config", "set_current_vllm_config")(config):
        parallel = vllm("distributed.parallel_state")
        if not parallel.model_parallel_is_initialized():
            rendezvous = Path(tempfile.mkdtemp()) / "rendezvous"
            parallel.init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
            parallel.initialize_model_parallel(1, 1)
            vllm("v1.worker.workspace", "init_workspace_manager")(torch.device(reference.DEVICE))
        with vllm("forward_context", "set_forward_context")(None, config):
            yield config


def modelopt() -> Any:
    """The configuration of a ModelOpt NVFP4 checkpoint."""
    return vllm("model_executor.layers.quantization.modelopt", "ModelOptNvFp4Config")(True, None, [], 16)


def created(make: Callable[[], Any]) -> Any:
    """A layer with its weights uninitialized in the GPU's memory; NaN where the type has it."""
    with torch.device(reference.DEVICE):
        layer = make()
    for parameter in layer.parameters():
        parameter.data.view(torch.uint8).fill_(0xFF)
    return layer


def processed(layer: Any) -> Any:
    layer.quant_method.process_weights_after_loading(layer)
    return layer


# ---- linear layers


@dataclass(frozen=True)
class LinearShape:
    """A linear layer on one GPU; several ``outputs`` are the parts of a merged layer."""

    name: str
    inputs: int
    outputs: tuple[int, ...]


LINEAR_SHAPES = (
    LinearShape("small", 256, (128, 128)),
    LinearShape("padded", 208, (80,)),
    LinearShape("qwen3.5-122b-tp2 gate_up", 3072, (512, 512)),
    LinearShape("qwen3.5-122b-tp2 down", 512, (3072,)),
    LinearShape("qwen3.5-397b-tp4 gate_up", 4096, (256, 256)),
    LinearShape("qwen3.5-397b-tp4 down", 256, (4096,)),
)


@dataclass(frozen=True)
class LinearWeights:
    """Weights as a ModelOpt checkpoint has them: the parts of a merged layer have the same scales of their tensors."""

    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor
    input_scale: Tensor

    @classmethod
    def random(cls, shape: LinearShape) -> LinearWeights:
        rows, columns = sum(shape.outputs), shape.inputs
        codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=reference.DEVICE)
        scales = torch.randint(0x20, 0x48, (rows, columns // 16), dtype=torch.uint8, device=reference.DEVICE)
        tensor_scale = 0.4 / columns**0.5 * (0.5 + torch.rand((), device=reference.DEVICE))
        return cls(codes, scales, tensor_scale, torch.tensor(6.0 / (448 * 6), device=reference.DEVICE))


def linear_layer(shape: LinearShape, weights: LinearWeights, order: tuple[int, ...] = ()) -> Any:
    """vLLM's layer with these weights; ``order`` other than 0, 1... loads the parts of a merged layer into wrong places."""
    linear = vllm("model_executor.layers.linear")
    options = {"bias": False, "quant_config": modelopt(), "params_dtype": torch.bfloat16, "prefix": f"linear {shape.name}"}
    if len(shape.outputs) > 1:
        layer = created(lambda: linear.MergedColumnParallelLinear(shape.inputs, list(shape.outputs), **options))
    else:
        layer = created(lambda: linear.RowParallelLinear(shape.inputs, shape.outputs[0], **options))
    parts = order or tuple(range(len(shape.outputs)))
    for name, tensor in (("weight", weights.codes), ("weight_scale", weights.scales.view(torch.float8_e4m3fn))):
        parameter = getattr(layer, name)
        for part, rows in zip(parts, torch.split(tensor, list(shape.outputs)), strict=True):
            parameter.weight_loader(parameter, rows, *([part] if len(parts) > 1 else []))
    for name, scale in (("weight_scale_2", weights.tensor_scale), ("input_scale", weights.input_scale)):
        parameter = getattr(layer, name)
        for part in parts:
            parameter.weight_loader(parameter, scale, *([part] if len(parts) > 1 else []))
    return processed(layer)


def linear_expected(weights: LinearWeights, x: Tensor) -> Expected:
    """The layer in float64; the bound has the quantization of the input, the accumulation and the rounding of the output."""
    w = dequantized(weights.codes, weights.scales) * weights.tensor_scale.double()
    least, greatest = quantized_interval(x.double(), x.double(), 1 / weights.input_scale.double())
    middle = (least + greatest) / 2
    values, magnitudes = middle @ w.T, middle.abs() @ w.abs().T
    slack = (greatest - least) / 2 @ w.abs().T + magnitudes * ACCUMULATION * 2
    bound = (values.abs() + slack) * HALF_ULP[x.dtype] * 1.01 + slack + 1e-30
    return Expected(values, bound, x.double() @ w.T)


def changed_layer(make: Callable[[], Any], change: Callable[[Any], object]) -> Callable[[], Any]:
    """A layer with a fault: made, and then changed."""

    def changed() -> Any:
        layer = make()
        change(layer)
        return layer

    return changed


def linear_faults(shape: LinearShape, weights: LinearWeights) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names of faults, and layers with them."""
    changed = partial(changed_layer, partial(linear_layer, shape, weights))

    def replaced(**tensors: Tensor) -> Callable[[], Any]:
        return partial(linear_layer, shape, replace(weights, **tensors))

    plain = weights.scales.view(torch.float8_e4m3fn)
    yield "gate and up change places", lambda: linear_layer(shape, weights, (1, 0))
    yield "the weight's scales are not swizzled", changed(lambda layer: layer.weight_scale.data.copy_(plain))
    yield "the weight's tensor scale is applied twice", changed(lambda layer: layer.alpha.data.mul_(layer.weight_global_scale))
    yield "alpha lacks the input's scale", changed(lambda layer: layer.alpha.data.div_(layer.input_global_scale))
    yield (
        "the input's scale is not inverted",
        changed(lambda layer: layer.input_global_scale_inv.data.copy_(layer.input_global_scale)),
    )
    yield "the elements of each byte change places", replaced(codes=weights.codes << 4 | weights.codes >> 4)
    yield "the weight's scales are those of the row before", replaced(scales=weights.scales.roll(1, 0))


def check_linear(report: OperatorReport, pattern: str) -> None:
    if not is_chosen("linear", pattern):
        return
    for shape in LINEAR_SHAPES:
        weights = LinearWeights.random(shape)
        inputs = [torch.randn(tokens, shape.inputs, device=reference.DEVICE).bfloat16() for tokens in (1, 33, 300)]
        for backend in LINEAR_BACKENDS:
            with linear_backend(backend), configured():
                case = f"{shape.name}, {backend or 'auto'}"
                try:
                    layer = linear_layer(shape, weights)
                except Exception as error:  # vLLM raises many types
                    report.add(refused("linear", case, error))
                    continue
                kernel = type(layer.quant_method.kernel).__name__
                for x in inputs:
                    name = f"{case} ({kernel}), {len(x)} tokens"
                    row = attempt("linear", name, linear_expected(weights, x), partial(called, layer, x))
                    report.add(row)
                if shape.name == "small" and backend and row.verdict == "right":
                    x = inputs[1]
                    for fault, make in linear_faults(shape, weights):
                        outcome = attempt("", "", linear_expected(weights, x), partial(called, make(), x))
                        report.fault(f"linear, {kernel}: {fault}", outcome)


def called(layer: Any, x: Tensor) -> Tensor:
    result = layer(x)
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


def refused(operator: str, case: str, error: Exception) -> reference.OperatorRow:
    why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return reference.OperatorRow(operator, case, "refused", why=why)


@contextlib.contextmanager
def linear_backend(name: str) -> Iterator[None]:
    """Let vLLM use this back-end for NVFP4 linear layers."""
    variable = "VLLM_NVFP4_GEMM_BACKEND"
    os.environ.pop(variable, None)
    if name:
        os.environ[variable] = name
    try:
        yield
    finally:
        os.environ.pop(variable, None)


# ---- fused MoE


def input_scales(layer: MoeLayer) -> tuple[Tensor, Tensor]:
    """``input_scale`` of both GEMMs for each expert, as calibration finds them."""
    factors = torch.linspace(1.0, 0.8, layer.shape.experts, device=reference.DEVICE)
    return factors / layer.scale1, 1 / layer.scale2


def load_experts(layer: Any, weights: MoeLayer, gate: str) -> None:
    """Load the tensors of all experts by the engine's own loaders; ``gate`` names the half that is the gate, "w1" or "w3"."""
    up = "w3" if gate == "w1" else "w1"
    half = weights.shape.width
    first, second = input_scales(weights)

    def load(name: str, shard: str, expert: int, tensor: Tensor) -> None:
        parameter = getattr(layer, name)
        parameter.weight_loader(parameter, tensor, name, shard_id=shard, expert_id=expert)

    block_scales = [scales.view(torch.float8_e4m3fn) for scales in (weights.s1, weights.s2)]
    for expert in range(weights.shape.experts):
        for shard, rows in ((up, slice(0, half)), (gate, slice(half, None))):
            load("w13_weight", shard, expert, weights.w1[expert, rows])
            load("w13_weight_scale", shard, expert, block_scales[0][expert, rows])
            load("w13_weight_scale_2", shard, expert, weights.g1[expert])
            load("w13_input_scale", shard, expert, first[expert])
        load("w2_weight", "w2", expert, weights.w2[expert])
        load("w2_weight_scale", "w2", expert, block_scales[1][expert])
        load("w2_weight_scale_2", "w2", expert, weights.g2[expert])
        load("w2_input_scale", "w2", expert, second[expert])


def moe_layer(weights: MoeLayer, prefix: str, gate: str = "w1", **options: Any) -> Any:
    """vLLM's FusedMoE with these weights; ``gate`` other than "w1" loads gate and up into each other's places."""
    shape = weights.shape
    make = vllm("model_executor.layers.fused_moe", "FusedMoE")
    layer = created(
        lambda: make(
            num_experts=shape.experts,
            top_k=shape.active,
            hidden_size=shape.hidden,
            intermediate_size=shape.width,
            params_dtype=torch.bfloat16,
            quant_config=modelopt(),
            prefix=prefix,
            **{"renormalize": True, **options},
        )
    )
    load_experts(layer, weights, gate)
    return processed(layer)


def served(weights: MoeLayer, x: Tensor, logits: Tensor, per_expert: bool) -> Expected:
    """The layer in float64, with the input scales that the back-end uses: each expert's, or the largest for all experts."""
    first, second = input_scales(weights)
    if not per_expert:
        first, second = first.max().expand_as(first), second.max().expand_as(second)

    def inputs(expert: int) -> tuple[Tensor, Tensor]:
        least, greatest = quantized_interval(x.double(), x.double(), 1 / first[expert].double())
        return (least + greatest) / 2, (greatest - least) / 2

    layer = MoeLayer(**{**vars(weights), "scale2": 1 / second})
    return moe_expected(layer, x, routed(logits, weights.shape.active), inputs, rounds=True)


def moe_faults(weights: MoeLayer, prefix: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names of faults, and layers with them."""
    numbers = iter(range(100))

    def made(**options: Any) -> Any:
        return moe_layer(weights, f"{prefix}.{next(numbers)}", **options)

    changed = partial(changed_layer, made)

    def linear_scales(layer: Any) -> None:
        plain = weights.s2.view(torch.float8_e4m3fn)
        layer.w2_weight_scale.data.view(torch.uint8).flatten()[: plain.numel()].copy_(plain.view(torch.uint8).flatten())

    yield "w1 and w3 change places", lambda: made(gate="w3")
    yield (
        "the experts' input scales are folded into the weights' twice",
        changed(lambda layer: layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)),
    )
    yield "w2's scales are not swizzled", changed(linear_scales)
    yield (
        "w13's block scales are those of the expert before",
        changed(
            lambda layer: layer.w13_weight_scale.data.copy_(
                layer.w13_weight_scale.data.view(torch.uint8).roll(1, 0).view(torch.float8_e4m3fn)
            )
        ),
    )
    yield "w2 is that of the expert before", changed(lambda layer: layer.w2_weight.data.copy_(layer.w2_weight.data.roll(1, 0)))
    yield (
        "w2's tensor scale is that of the expert before",
        changed(lambda layer: layer.w2_weight_scale_2.data.copy_(layer.w2_weight_scale_2.data.roll(1, 0))),
    )
    yield "routing weights are not normalized", lambda: made(renormalize=False)


def check_moe(report: OperatorReport, pattern: str) -> None:
    """``(x, router logits) -> output`` of FusedMoE, vLLM's routing included."""
    for shape in (SMALL_MOE, *MOE_SHAPES):
        if not is_chosen(f"moe-{shape.name}", pattern):
            continue
        weights = MoeLayer.random(shape)
        calls = []
        for tokens, skewed in ((1, False), (33, False), (300, True)):
            x = torch.randn(tokens, shape.hidden, device=reference.DEVICE).bfloat16()
            calls.append((x, router_logits(tokens, shape, skewed)))
        expectations: dict[tuple[bool, int], Expected] = {}
        for backend in MOE_BACKENDS:
            with configured(backend):
                prefix = f"{shape.name}.{backend}"
                try:
                    layer = moe_layer(weights, prefix)
                except Exception as error:  # vLLM raises many types
                    report.add(refused("FusedMoE", f"{shape.name}, {backend}", error))
                    continue
                selected = layer.quant_method.nvfp4_backend.value
                per_expert = selected == "VLLM_CUTLASS"
                for number, (x, logits) in enumerate(calls):
                    key = (per_expert, number)
                    if key not in expectations:
                        expectations[key] = served(weights, x, logits, per_expert)
                    case = f"{shape.name}, {backend} ({selected}), {len(x)} tokens"
                    row = attempt("FusedMoE", case, expectations[key], partial(layer, x.clone(), logits))
                    report.add(row)
                if shape is SMALL_MOE and backend != "auto" and row.verdict == "right":
                    x, logits = calls[1]
                    for fault, make in moe_faults(weights, prefix):
                        outcome = attempt("", "", expectations[per_expert, 1], partial(make(), x.clone(), logits))
                        report.fault(f"FusedMoE, {selected}: {fault}", outcome)


# ---- operators of vLLM


def check_quantization(report: OperatorReport, pattern: str) -> None:
    if not is_chosen("quantize", pattern):
        return
    ops = vllm("_custom_ops")
    for rows, columns, dtype in ((1, 3072, torch.bfloat16), (300, 4096, torch.bfloat16), (129, 512, torch.float16)):
        x = torch.randn(rows, columns, device=reference.DEVICE).to(dtype)
        scale = 448 * 6 / x.abs().amax().float()
        expected = interval_expected(x.double(), x.double(), scale)
        case = f"{rows}x{columns} {str(dtype).removeprefix('torch.')}"

        def quantized(swizzled: bool, x: Tensor = x, scale: Tensor = scale, read: bool | None = None) -> Tensor:
            codes, scales = ops.scaled_fp4_quant(x, scale, is_sf_swizzled_layout=swizzled)
            return values_of(codes, scales, swizzled if read is None else read) / scale.double()

        report.add(attempt("scaled_fp4_quant", f"{case}, row-major", expected, partial(quantized, False)))
        report.add(attempt("scaled_fp4_quant", f"{case}, 128x4", expected, partial(quantized, True)))
        if rows == 300:
            wrong = attempt("", "", expected, partial(quantized, True, read=False))
            report.fault("scaled_fp4_quant: scales 128x4 are read as row-major", wrong)
        gate, up = x.double().chunk(2, dim=1)
        products = torch.nn.functional.silu(gate) * up
        low, high = (rounded(products + sign * products.abs() * FUNCTIONS, dtype) for sign in (-1, 1))
        scale = 448 * 6 / products.abs().amax().float()
        expected = interval_expected(low, high, scale)

        def fused(x: Tensor = x, scale: Tensor = scale) -> Tensor:
            codes, scales = ops.create_fp4_output_tensors(len(x), x.shape[1] // 2, x.device, True)
            torch.ops._C.silu_and_mul_nvfp4_quant(codes, scales, x, scale)
            return values_of(codes, scales, True) / scale.double()

        report.add(attempt("silu_and_mul_nvfp4_quant", case, expected, fused))
        report.add(attempt("scaled_fp4_experts_quant", case, *experts_quantized(ops, x)))


def interval_expected(low: Tensor, high: Tensor, scale: Tensor) -> Expected:
    least, greatest = quantized_interval(low, high, scale.double())
    middle = (least + greatest) / 2
    return Expected(middle, (greatest - least) / 2 + middle.abs() * 2.0**-20 + 1e-12, (low + high) / 2)


def values_of(codes: Tensor, scales: Tensor, swizzled: bool) -> Tensor:
    """Quantized values without the scale of the tensor."""
    rows, blocks = len(codes), codes.shape[1] // 8
    flat = scales.view(torch.uint8)
    plain = unswizzled(flat, rows, blocks) if swizzled else flat.flatten()[: rows * blocks].view(rows, blocks)
    values: Tensor = dequantized(codes, plain)
    return values


def expert_offsets(counts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Where each expert's rows begin, and its block scales, of which each expert has a multiple of 128 rows."""
    starts, blocks = [0], [0]
    for count in counts:
        starts.append(starts[-1] + count)
        blocks.append(blocks[-1] + -(-count // 128) * 128)
    first, second = (torch.tensor(values, dtype=torch.int32, device=reference.DEVICE) for values in (starts, blocks))
    return first, second


def experts_quantized(ops: Any, x: Tensor) -> tuple[Expected, Callable[[], Tensor]]:
    """Rows of four experts, one of them without rows, each with a scale of its own."""
    rows = len(x)
    counts = (rows - rows // 2, 0, rows // 2 - rows // 3, rows // 3)
    starts, blocks = expert_offsets(counts)
    scales = (448 * 6 / x.abs().amax().float()) * torch.tensor((1.0, 0.5, 0.7, 0.9), device=reference.DEVICE)
    each = scales.repeat_interleave(torch.tensor(counts, device=reference.DEVICE)).double().unsqueeze(-1)
    segments = zip(torch.split(x.double(), list(counts)), scales, strict=True)
    expected = joined([interval_expected(part, part, scale) for part, scale in segments if len(part)])

    def call() -> Tensor:
        codes, block_scales = ops.scaled_fp4_experts_quant(x, scales, starts, blocks, 1)
        begin = blocks.tolist()
        segments = zip(torch.split(codes, list(counts)), begin, strict=False)
        return torch.cat([values_of(part, block_scales[at:], True) for part, at in segments if len(part)]) / each

    return expected, call


def joined(parts: list[Expected]) -> Expected:
    """Expectations of the rows of several experts."""
    return Expected(*(torch.cat([getattr(part, name) for part in parts]) for name in ("values", "bound", "plain")))


def check_fp4_mm(report: OperatorReport, pattern: str) -> None:
    if not is_chosen("fp4-mm", pattern):
        return
    ops = vllm("_custom_ops")
    for rows, columns, depth in ((1, 3072, 1024), (31, 1024, 3072), (300, 3072, 4096), (512, 512, 512)):
        for dtype in (torch.bfloat16, torch.float16):
            a, b = (torch.randn(size, depth, device=reference.DEVICE).to(dtype) for size in (rows, columns))
            scale_a, scale_b = (448 * 6 / tensor.abs().amax().float() for tensor in (a, b))
            (a4, sa), (b4, sb) = (ops.scaled_fp4_quant(t, s) for t, s in ((a, scale_a), (b, scale_b)))
            alpha = 1 / (scale_a * scale_b)
            exact_a, exact_b = values_of(a4, sa, True), values_of(b4, sb, True)
            expected = gemm_expected(exact_a, exact_b, alpha.double(), dtype, a.double() @ b.double().T)
            case = f"{rows}x{columns}x{depth} {str(dtype).removeprefix('torch.')}"

            def mm(
                scales: tuple[Tensor, Tensor] = (sa, sb),
                a4: Tensor = a4,
                b4: Tensor = b4,
                alpha: Tensor = alpha,
                out: Any = dtype,
            ) -> Tensor:
                result: Tensor = ops.cutlass_scaled_fp4_mm(a4, b4, *scales, alpha, out)
                return result

            report.add(attempt("cutlass_scaled_fp4_mm", case, expected, mm))
            if rows == columns and dtype is torch.bfloat16:
                wrong = attempt("", "", expected, partial(mm, (sb, sa)))
                report.fault("cutlass_scaled_fp4_mm: the operands' scales change places", wrong)
                wrong = attempt("", "", expected, partial(mm, alpha=alpha * 1.05))
                report.fault("cutlass_scaled_fp4_mm: alpha is 5 % too large", wrong)
    check_group_mm(report, ops)


def gemm_expected(a: Tensor, b: Tensor, factor: Tensor | float, dtype: torch.dtype, plain: Tensor | None = None) -> Expected:
    """``a @ b.T`` times ``factor``: fp32 accumulation, one rounding."""
    values, magnitudes = a @ b.T * factor, a.abs() @ b.abs().T * factor
    bound = values.abs() * HALF_ULP[dtype] * 1.01 + magnitudes * ACCUMULATION * 2 + 2.0**-24
    return Expected(values, bound, values if plain is None else plain)


def check_group_mm(report: OperatorReport, ops: Any) -> None:
    """Grouped GEMM: experts with 1, no, 33 and 300 rows."""
    counts, columns, depth = (1, 0, 33, 300), 512, 768
    x = torch.randn(sum(counts), depth, device=reference.DEVICE).bfloat16()
    weights = LinearWeights.random(LinearShape("", depth, (columns,) * len(counts)))
    codes = weights.codes.view(len(counts), columns, -1)
    scales = weights.scales.view(len(counts), columns, -1)
    swizzle = vllm("model_executor.layers.quantization.utils.nvfp4_utils", "swizzle_blockscale")
    starts, blocks = expert_offsets(counts)
    scale = 448 * 6 / x.abs().amax().float()
    a4, sa = ops.scaled_fp4_experts_quant(x, scale.expand(len(counts)).contiguous(), starts, blocks, 1)
    alphas = (0.5 + torch.rand(len(counts), device=reference.DEVICE)) / scale
    sizes = torch.tensor([(count, columns, depth) for count in counts], dtype=torch.int32, device=reference.DEVICE)
    parts = []
    for expert, count in enumerate(counts):
        if count:
            begin = int(blocks[expert])
            a = values_of(a4[int(starts[expert]) : int(starts[expert]) + count], sa[begin:], True)
            parts.append(gemm_expected(a, dequantized(codes[expert], scales[expert]), alphas[expert].double(), torch.bfloat16))
    expected = joined(parts)

    def call(alphas: Tensor = alphas, offsets: Tensor = blocks[:-1]) -> Tensor:
        out = torch.full((len(x), columns), float("nan"), dtype=torch.bfloat16, device=reference.DEVICE)
        b_scales = swizzle(scales.view(torch.float8_e4m3fn))
        ops.cutlass_fp4_moe_mm(out, a4, codes, sa, b_scales, alphas, sizes, starts[:-1], offsets)
        return out

    report.add(attempt("cutlass_fp4_group_mm", f"rows {counts}, {columns}x{depth}", expected, call))
    report.fault("cutlass_fp4_group_mm: alphas of the expert before", attempt("", "", expected, lambda: call(alphas.roll(1))))
    wrong = attempt("", "", expected, lambda: call(offsets=starts[:-1].contiguous()))
    report.fault("cutlass_fp4_group_mm: scales begin where the rows do", wrong)


def check_fp8_mm(report: OperatorReport, pattern: str) -> None:
    """FP8 GEMM with scales of tensors, of tokens and channels, and of blocks of 128."""
    if not is_chosen("fp8-mm", pattern):
        return
    ops = vllm("_custom_ops")
    shapes = ((1, 3072, 1024), (17, 512, 512), (31, 1024, 3072), (64, 512, 1024), (300, 3072, 1024), (512, 512, 4096))
    for rows, columns, depth in shapes:
        for dtype in (torch.bfloat16, torch.float16):
            case = f"{rows}x{columns}x{depth} {str(dtype).removeprefix('torch.')}"
            a, b = (torch.randn(size, depth, device=reference.DEVICE).to(torch.float8_e4m3fn) for size in (rows, columns))
            kinds: dict[str, tuple[Tensor, Tensor]] = {
                "tensor": (positive(1, 1), positive(1, 1)),
                "token and channel": (positive(rows, 1), positive(columns, 1)),
            }
            if dtype is torch.bfloat16:
                kinds["block"] = (positive(depth // 128, rows).T, positive(columns // 128, depth // 128))
            for kind, (sa, sb) in kinds.items():
                if kind == "block":
                    wide = sb.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
                    exact_a, exact_b = a.double() * sa.double().repeat_interleave(128, 1), b.double() * wide
                else:
                    exact_a, exact_b = a.double() * sa.double(), b.double() * sb.double()
                expected = gemm_expected(exact_a, exact_b, 1.0, dtype)
                bias = torch.randn(columns, device=reference.DEVICE).to(dtype) if kind == "token and channel" else None
                if bias is not None:
                    values = expected.values + bias.double()
                    expected = Expected(values, expected.bound + values.abs() * HALF_ULP[dtype] * 1.01, values)

                def mm(
                    sa: Tensor = sa, sb: Tensor = sb, a: Tensor = a, b: Tensor = b, bias: Tensor | None = bias, out: Any = dtype
                ) -> Tensor:
                    result: Tensor = ops.cutlass_scaled_mm(a, b.T, sa, sb.T, out, bias)
                    return result

                report.add(attempt("cutlass_scaled_mm", f"{case}, scales by {kind}", expected, mm))
                if rows == columns and dtype is torch.bfloat16 and kind != "tensor":
                    wrong = attempt("", "", expected, partial(mm, sa=shifted(sa)))
                    report.fault(f"cutlass_scaled_mm, scales by {kind}: a's scales are those of the row before", wrong)
                    wrong = attempt("", "", expected, partial(mm, sb=sb.roll(1, 0)))
                    report.fault(f"cutlass_scaled_mm, scales by {kind}: b's scales are those before", wrong)
    for rows in (1, 17, 33, 300):
        a, b = (
            torch.randint(-8, 9, (size, 512), device=reference.DEVICE).float().to(torch.float8_e4m3fn) for size in (rows, 256)
        )
        values = rounded(a.double() @ b.double().T * 0.5, torch.bfloat16)
        one, half = torch.ones(1, 1, device=reference.DEVICE), torch.full((1, 1), 0.5, device=reference.DEVICE)
        exact = Expected(values, torch.full_like(values, 1e-30), values)
        row = attempt(
            "cutlass_scaled_mm",
            f"{rows}x256x512, integers",
            exact,
            partial(ops.cutlass_scaled_mm, a, b.T, one, half, torch.bfloat16),
        )
        report.add(row)


def positive(*size: int) -> Tensor:
    return 0.01 * (0.5 + torch.rand(size, device=reference.DEVICE))


def shifted(scales: Tensor) -> Tensor:
    """Scales of the row before, with the strides of ``scales``."""
    return scales.T.roll(1, -1).T


# ---- the program


def require_vllm() -> None:
    """Fail unless vLLM can be imported and detects SM12x: on another GPU it selects other kernels."""
    try:
        capability = vllm("platforms", "current_platform").get_device_capability()
    except ImportError as error:
        raise Unusable(f"vLLM cannot be imported by {sys.executable}: {error}") from error
    if capability is None or capability.major != 12:
        raise Unusable(f"vLLM detects {capability}, not 12.x; on a Hopper GPU, use sm12x-lab run")
    print(f"vLLM {vllm('').__version__} detects compute capability {capability.major}.{capability.minor}", flush=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--autotune", action="store_true", help="let FlashInfer's autotuner measure and choose tactics")


def run(report: OperatorReport, options: argparse.Namespace) -> None:
    require_vllm()
    with configured():
        for check in (check_quantization, check_fp4_mm, check_fp8_mm):
            check(report, options.only)
    with nvfp4.autotuned(tune=options.autotune):
        check_linear(report, options.only)
        check_moe(report, options.only)
