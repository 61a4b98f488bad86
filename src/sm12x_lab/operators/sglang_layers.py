"""Compare SGLang's NVFP4 layers with float64 of the dequantized operands.

Needs torch and SGLang 0.5.11.

Layers are SGLang's: created by its ModelOpt configuration, loaded by its weight loaders, processed and called as in its models,
on one GPU. Every back-end with NVFP4 for SM12x is selected in turn, also b12x of patches/sglang; what one refuses is listed.
Faults are planted in weights, scales and processed layers.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import b12x_nvfp4
import reference
import torch
from reference import MOE_SHAPES, Expected, MoeLayer, MoeShape, attempt, routed, router_logits
from report import OperatorReport, Unusable
from vllm_layers import (
    LINEAR_SHAPES,
    SMALL_MOE,
    LinearShape,
    LinearWeights,
    called,
    changed_layer,
    created,
    input_scales,
    is_chosen,
    linear_expected,
    load_experts,
    processed,
    refused,
    served,
)

Tensor = torch.Tensor

LINEAR_BACKENDS = ("auto", "flashinfer_cutlass", "cutlass", "b12x")
MOE_BACKENDS = ("auto", "flashinfer_cutlass", "b12x")
"""Values of ``--fp4-gemm-backend`` and ``--moe-runner-backend``; the first lets SGLang select."""

CASES = ((1, False), (33, False), (300, True))
"""Numbers of tokens, and whether few experts are preferred; b12x compiles for minutes for more than 33 tokens."""
B12X_CASES = ((1, False), (6, False), (33, False))

KEPT: list[Any] = []
"""b12x caches views of weights by address: layers that it has seen must not be freed."""


def sglang(module: str, name: str = "") -> Any:
    """A module of SGLang's runtime, or what it calls ``name``."""
    found = importlib.import_module(f"sglang.srt.{module}")
    return getattr(found, name) if name else found


# ---- SGLang as a process of one GPU


@contextlib.contextmanager
def configured(linear: str = "auto", moe: str = "auto") -> Iterator[None]:
    """The arguments of a server that layers are created and called with."""
    arguments = sglang("server_args")
    server = arguments.ServerArgs(model_path="dummy", fp4_gemm_runner_backend=linear, moe_runner_backend=moe)
    arguments.set_global_server_args_for_scheduler(server)
    sglang("layers.moe", "initialize_moe_config")(server)
    sglang("layers.quantization.fp4_utils", "initialize_fp4_gemm_config")(server)
    parallel = sglang("distributed.parallel_state")
    if not parallel.model_parallel_is_initialized():
        rendezvous = Path(tempfile.mkdtemp()) / "rendezvous"
        parallel.init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
        parallel.initialize_model_parallel(1)
    with sglang("utils.common", "DynamicGradMode")():
        yield


def modelopt() -> Any:
    """The configuration of a ModelOpt NVFP4 checkpoint."""
    return sglang("layers.quantization.modelopt_quant", "ModelOptFp4Config")(True, None, 16, [], {})


# ---- linear layers


def linear_layer(shape: LinearShape, weights: LinearWeights, order: tuple[int, ...] = ()) -> Any:
    """SGLang's layer with these weights; ``order`` other than 0, 1... loads the parts of a merged layer into wrong places."""
    linear = sglang("layers.linear")
    options = {"bias": False, "quant_config": modelopt(), "params_dtype": torch.bfloat16, "prefix": f"linear {shape.name}"}
    parts = order or tuple(range(len(shape.outputs)))
    merged = len(parts) > 1
    if merged:
        layer = created(lambda: linear.MergedColumnParallelLinear(shape.inputs, list(shape.outputs), **options))
    else:
        layer = created(lambda: linear.RowParallelLinear(shape.inputs, shape.outputs[0], **options))

    def load(name: str, part: int, tensor: Tensor) -> None:
        parameter = getattr(layer, name)
        parameter.weight_loader(parameter, tensor, *([part] if merged else []))

    for name, tensor in (("weight", weights.codes), ("weight_scale", weights.scales.view(torch.float8_e4m3fn))):
        for part, rows in zip(parts, torch.split(tensor, list(shape.outputs)), strict=True):
            load(name, part, rows)
    for part in parts:
        load("weight_scale_2", part, weights.tensor_scale)
        load("input_scale", part, weights.input_scale)
    KEPT.append(layer)
    return processed(layer)


def linear_faults(shape: LinearShape, weights: LinearWeights) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names of faults, and layers with them."""
    changed = partial(changed_layer, partial(linear_layer, shape, weights))

    def replaced(**tensors: Tensor) -> Callable[[], Any]:
        return partial(linear_layer, shape, replace(weights, **tensors))

    plain = weights.scales.view(torch.float8_e4m3fn)
    yield "gate and up change places", lambda: linear_layer(shape, weights, (1, 0))
    yield "the weight's scales are not swizzled", changed(lambda layer: layer.weight_scale_interleaved.data.copy_(plain))
    yield "the weight's tensor scale is applied twice", changed(lambda layer: layer.alpha.data.mul_(layer.weight_scale_2.max()))
    yield "alpha lacks the input's scale", changed(lambda layer: layer.alpha.data.div_(layer.input_scale.max()))
    yield "the input's scale is not inverted", changed(lambda layer: layer.input_scale_inv.data.copy_(layer.input_scale.max()))
    yield "the elements of each byte change places", replaced(codes=weights.codes << 4 | weights.codes >> 4)
    yield "the weight's scales are those of the row before", replaced(scales=weights.scales.roll(1, 0))


def check_linear(report: OperatorReport, pattern: str, backends: str) -> None:
    if not is_chosen("linear", pattern):
        return
    for shape in LINEAR_SHAPES:
        weights = LinearWeights.random(shape)
        inputs = [torch.randn(tokens, shape.inputs, device=reference.DEVICE).bfloat16() for tokens in (1, 33, 300)]
        for backend in (name for name in LINEAR_BACKENDS if is_chosen(name, backends)):
            case = f"{shape.name}, {backend}"
            try:
                with configured(linear=backend):
                    layer = linear_layer(shape, weights)
            except Exception as error:  # SGLang raises many types
                report.add(refused("linear", case, error))
                continue
            with configured(linear=backend):
                selected = sglang("layers.quantization.fp4_utils", "get_fp4_gemm_runner_backend")().value
                for x in inputs:
                    name = f"{case} ({selected}), {len(x)} tokens"
                    row = attempt("linear", name, linear_expected(weights, x), partial(called, layer, x))
                    report.add(row)
                if shape.name == "small" and backend != "auto" and row.verdict == "right":
                    x = inputs[1]
                    for fault, make in linear_faults(shape, weights):
                        outcome = attempt("", "", linear_expected(weights, x), partial(called, make(), x))
                        report.fault(f"linear, {selected}: {fault}", outcome)


# ---- fused MoE


def moe_layer(weights: MoeLayer, gate: str = "w1") -> Any:
    """SGLang's FusedMoE with these weights; ``gate`` other than "w1" loads gate and up into each other's places."""
    shape = weights.shape
    make = sglang("layers.moe.fused_moe_triton.layer", "FusedMoE")
    layer = created(
        lambda: make(
            num_experts=shape.experts,
            top_k=shape.active,
            hidden_size=shape.hidden,
            intermediate_size=shape.width,
            layer_id=0,
            params_dtype=torch.bfloat16,
            quant_config=modelopt(),
            prefix="model.layers.0.mlp.experts",
        )
    )
    load_experts(layer, weights, gate)
    KEPT.append(layer)
    return processed(layer)


def routed_moe(layer: Any, shape: MoeShape, x: Tensor, logits: Tensor, renormalize: bool = True) -> Tensor:
    """SGLang's routing and its layer."""
    choose = sglang("layers.moe.topk", "TopK")(top_k=shape.active, renormalize=renormalize, layer_id=0)
    output: Tensor = layer(x, choose(x, logits))
    return output


def moe_expected(weights: MoeLayer, backend: str, x: Tensor, logits: Tensor) -> Expected:
    """What the back-end must return: b12x adds parts in bf16, and FlashInfer uses the largest input scale for all experts."""
    if backend != "b12x":
        return served(weights, x, logits, per_expert=backend == "auto")
    first, second = input_scales(weights)
    layer = MoeLayer(**{**vars(weights), "scale2": 1 / second})
    return b12x_nvfp4.moe_expected(layer, 1 / first, x, routed(logits, weights.shape.active))


def moe_faults(weights: MoeLayer) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names of faults, and layers with them."""
    changed = partial(changed_layer, partial(moe_layer, weights))

    def rolled(name: str) -> Callable[[], Any]:
        def change(layer: Any) -> None:
            values = getattr(layer, name).data
            plain = values.view(torch.uint8) if values.element_size() == 1 else values
            values.copy_(plain.roll(1, 0).view(values.dtype))

        with_fault: Callable[[], Any] = changed(change)
        return with_fault

    def linear_scales(layer: Any) -> None:
        plain = weights.s2.flatten()
        layer.w2_blockscale_swizzled.data.view(torch.uint8).flatten()[: plain.numel()].copy_(plain)

    yield "w1 and w3 change places", lambda: moe_layer(weights, gate="w3")
    yield "the input's scale is applied twice", changed(lambda layer: layer.g1_alphas.data.div_(layer.w13_input_scale_quant))
    yield "w2's scales are not swizzled", changed(linear_scales)
    yield "w13's block scales are those of the expert before", rolled("w13_blockscale_swizzled")
    yield "w2 is that of the expert before", rolled("w2_weight")
    yield "w2's tensor scale is that of the expert before", rolled("g2_alphas")


def check_moe(report: OperatorReport, pattern: str, backends: str) -> None:
    """``(x, router logits) -> output`` of TopK and FusedMoE."""
    for shape in (SMALL_MOE, *MOE_SHAPES):
        if not is_chosen(f"moe-{shape.name}", pattern):
            continue
        weights = MoeLayer.random(shape)
        inputs = {
            case: (
                torch.randn(case[0], shape.hidden, device=reference.DEVICE).bfloat16(),
                router_logits(case[0], shape, case[1]),
            )
            for case in dict.fromkeys((*CASES, *B12X_CASES))
        }
        for backend in (name for name in MOE_BACKENDS if is_chosen(name, backends)):
            try:
                with configured(moe=backend):
                    layer = moe_layer(weights)
            except Exception as error:  # SGLang raises many types
                report.add(refused("FusedMoE", f"{shape.name}, {backend}", error))
                continue
            with configured(moe=backend):
                for tokens, skewed in B12X_CASES if backend == "b12x" else CASES:
                    x, logits = inputs[tokens, skewed]
                    expected = moe_expected(weights, backend, x, logits)
                    case = f"{shape.name}, {backend}, {tokens} tokens"
                    row = attempt("FusedMoE", case, expected, partial(routed_moe, layer, shape, x.clone(), logits))
                    report.add(row)
                if shape is SMALL_MOE and row.verdict == "right":
                    x, logits = inputs[33, False]
                    expected = moe_expected(weights, backend, x, logits)
                    for fault, make in moe_faults(weights):
                        wrong = attempt("", "", expected, partial(routed_moe, make(), shape, x.clone(), logits))
                        report.fault(f"FusedMoE, {backend}: {fault}", wrong)
                    wrong = attempt("", "", expected, partial(routed_moe, layer, shape, x.clone(), logits, renormalize=False))
                    report.fault(f"FusedMoE, {backend}: routing weights are not normalized", wrong)


# ---- the program


def require_sglang() -> None:
    """Fail unless SGLang can be imported and the GPU is SM12x: on another GPU it selects other kernels."""
    try:
        version = importlib.import_module("sglang").__version__
        is_sm120 = sglang("utils.common", "is_sm120_supported")()
    except ImportError as error:
        raise Unusable(f"SGLang cannot be imported by {sys.executable}: {error}") from error
    if not is_sm120:
        raise Unusable("SGLang does not detect SM12x; on a Hopper GPU, use sm12x-lab run")
    print(f"SGLang {version} detects compute capability {'.'.join(map(str, torch.cuda.get_device_capability()))}", flush=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", default="*", metavar="GLOB", help="auto, flashinfer_cutlass, cutlass, b12x")


def run(report: OperatorReport, options: argparse.Namespace) -> None:
    require_sglang()
    check_linear(report, options.only, options.backend)
    check_moe(report, options.only, options.backend)
