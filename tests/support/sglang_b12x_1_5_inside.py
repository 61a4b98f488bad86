"""Numbers of the layers of SGLang 0.5.23 with b12x 1.5.1 on the CPU; run by a Python that has both, and ``patches/sglang``.

``contract`` prints the relative error of dense layers and experts, without and with a seeded fault, against float64: SGLang
makes, loads and processes the layers of a checkpoint, and b12x prepares the weights. The kernels of b12x are replaced: experts
by its own CPU oracle, the GEMM by one that decodes operands with its own layouts. ``kernels`` reads the table ``b12x`` of a
recipe from stdin and prints whether b12x finds the kernel of each call, with tensors that have no memory: all checks of b12x
before a launch are those of a GPU. ``server`` reads command
lines as JSON from stdin and prints what SGLang selects for each, or the message with which it refuses it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers.utils import import_utils

import_utils.is_torchvision_available()  # remembered: what stands in for it below has no version

import torch  # noqa: E402
from sglang_b12x_inside import (  # noqa: E402
    E2M1,
    EXPERTS,
    HIDDEN,
    INNER,
    RAGGED,
    SELECTED,
    TOP,
    Experts,
    activations,
    decode,
    error,
    quantize,
    refusal,
)

GPU = {
    "is_available": True,
    "get_device_capability": (12, 0),
    "get_device_name": "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    "device_count": 8,
    "current_device": 0,
    "mem_get_info": (96 * 2**30, 96 * 2**30),
}
"""Answers of ``torch.cuda``."""
TOKENS = 24
TIES_TO_EVEN = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
"""Codes of E2M1: of two that are as near, the first here is taken."""
CHOSEN = ("--moe-runner-backend", "b12x", "--fp4-gemm-backend", "b12x")
VARIABLE = "SGLANG_MOE_NVFP4_DISPATCH"


def describe_gpu() -> None:
    for name, answer in GPU.items():
        setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    torch.version.cuda = "13.0"


def direct_operators() -> None:
    """Import SGLang's layers with Python functions where it registers operators for a GPU."""
    from sglang.srt.utils import custom_op

    register = custom_op.register_custom_op
    custom_op.register_custom_op = lambda function=None, **_: function or (lambda each: each)
    import sglang.srt.layers.quantization.modelopt_quant
    import sglang.srt.managers.schedule_batch  # noqa: F401 - imported by a first call, with tensors that need memory

    custom_op.register_custom_op = register


def arguments(argv: list[str]) -> Any:
    """SGLang's arguments after its own resolution and validation."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    server = ServerArgs.from_cli_args(parser.parse_args(argv))
    server.resolve_once()
    server.check_server_args()
    return server


def publish(model: str) -> None:
    """Decide the back-ends for a server of ``model`` on one GPU as its scheduler does."""
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.runtime_context import publish as published

    published(arguments(["--model-path", model, "--quantization", "modelopt_fp4", *CHOSEN]), role="scheduler")
    initialize_moe_config()
    initialize_fp4_gemm_config()
    get_parallel().override_permanently(moe_ep_rank=0, moe_tp_rank=0, tp_rank=0, tp_group=None)


def rounded(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """As ``activations``, with the nearest value decided in float32, as b12x does: no difference but BF16 remains."""
    blocks, reciprocal = values.float().reshape(values.shape[0], -1, 16), 1 / scale.float()
    scales = (blocks.abs().amax(-1) * reciprocal / 6).clamp(max=448).to(torch.float8_e4m3fn)
    ratio = blocks / (scales.float() / reciprocal).clamp(min=1e-30).unsqueeze(-1)
    distance = (ratio.abs().unsqueeze(-1) - E2M1[TIES_TO_EVEN].float()).abs()
    code = (TIES_TO_EVEN[distance.argmin(-1)] + 8 * (ratio < 0)).reshape(values.shape).to(torch.uint8)
    return decode(code[:, 0::2] | code[:, 1::2] << 4, scales) * scale.double()


def quantization() -> Any:
    from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config

    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": [], "packed_modules_mapping": {}}
    return ModelOptFp4Config.from_config(config)


# Experts


def experts_layer(inner: int = INNER, **options: Any) -> Any:
    """SGLang's own layer of experts."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    sizes = {"num_experts": EXPERTS, "top_k": TOP, "hidden_size": HIDDEN, "intermediate_size": inner, "layer_id": 0}
    given = {**sizes, "params_dtype": torch.bfloat16, "prefix": "model.layers.0.mlp.experts", **options}
    return FusedMoE(quant_config=quantization(), **given)


def load(layer: Any, checkpoint: Experts) -> None:
    """Load a checkpoint by SGLang's own loader."""
    names = {"gate": ("w1", "w13"), "up": ("w3", "w13"), "down": ("w2", "w2")}
    values = {"weight": checkpoint.packed, "weight_scale": checkpoint.scales}
    values |= {"weight_scale_2": checkpoint.scale, "input_scale": checkpoint.input}
    for suffix, tensors in values.items():
        for (expert, name), tensor in tensors.items():
            shard, kind = names[name]
            layer.weight_loader(getattr(layer, f"{kind}_{suffix}"), tensor, f"{kind}_{suffix}", shard, expert)


def routes(generator: torch.Generator) -> Any:
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    logits = torch.rand(TOKENS, EXPERTS, generator=generator)
    weights, ids = logits.softmax(-1).topk(TOP)
    return StandardTopKOutput(weights, ids.int(), logits)


def stand_in_kernel() -> None:
    """b12x's own CPU oracle instead of plan, binding and launch."""
    from b12x.moe import fused_moe
    from b12x.moe._shared.kernels.reference import moe_reference_f32
    from b12x.moe.fused_moe import _impl

    def run(binding: dict[str, Any]) -> None:
        experts, output = binding["experts"], binding["output"]
        assert binding["topk_ids"].dtype == torch.int32 and binding["topk_weights"].dtype == torch.float32
        assert binding["input_scales_static"] and output.is_contiguous() and binding["scratch"].numel() == 512
        if experts.w13_layout == "w31":  # as before a launch
            _impl._ensure_w13_kernel_order_inplace(experts.w1_fp4, experts.w1_blockscale, n=INNER, k=HIDDEN, quant_mode="nvfp4")
        weights = [getattr(experts, f"w{each}_{part}") for each in (1, 2) for part in ("fp4", "blockscale", "alphas")]
        scales, routed = (experts.a1_gscale, experts.a2_gscale), (binding["topk_ids"], binding["topk_weights"])
        output.copy_(moe_reference_f32(binding["a"], *weights, *scales, *routed, EXPERTS, HIDDEN, INNER))

    scratch = SimpleNamespace(shape=(512,), dtype=torch.uint8)
    fused_moe.Caps = lambda **sizes: SimpleNamespace(**sizes)
    fused_moe.plan = lambda caps: SimpleNamespace(scratch_specs=lambda: (scratch,))
    fused_moe.bind = lambda plan, **operands: operands
    fused_moe.run = run


def swapped(layer: Any) -> None:
    for name in ("w13_weight", "w13_weight_scale"):
        parameter = getattr(layer, name)
        parameter.data = parameter.data.roll(INNER, 1)


def transposed(layer: Any) -> None:
    layer.w2_weight.data = layer.w2_weight.data.transpose(1, 2).contiguous().reshape(layer.w2_weight.shape)


def folded(layer: Any) -> None:
    """The FP32 scale of each expert goes into its block scales, which are E4M3."""
    for kind in ("w13", "w2"):
        scale, blocks = getattr(layer, f"{kind}_weight_scale_2").data, getattr(layer, f"{kind}_weight_scale")
        blocks.data = (blocks.data.float() * scale.reshape(EXPERTS, -1)[:, :1, None]).to(torch.float8_e4m3fn)
        scale.fill_(1)


def not_reciprocal(layer: Any) -> None:
    for name in ("w13_input_scale_quant", "w2_input_scale_quant"):
        getattr(layer, name).data = 1 / getattr(layer, name).data
    prepared_again(layer)


def plain_scales(layer: Any) -> None:
    """The block scales are rows and columns, not the layout of the kernels."""
    from b12x.moe._shared.kernels.reference import unswizzle_block_scale

    for expert in range(EXPERTS):
        scales = layer.w13_blockscale_swizzled.data[expert]
        scales.copy_(unswizzle_block_scale(scales.clone(), *scales.shape).to(scales.dtype))


def other_layout(layer: Any) -> None:
    from b12x.moe import fused_moe

    plan_weights = fused_moe.plan_weights
    fused_moe.plan_weights = lambda **given: plan_weights(**{**given, "w13_layout": "gate_up"})
    prepared_again(layer)
    fused_moe.plan_weights = plan_weights


def prepared_again(layer: Any) -> None:
    from sglang.srt import b12x

    del layer.b12x_experts
    b12x.prepare_experts(layer)


BEFORE = (swapped, transposed, folded)
AFTER = (not_reciprocal, plain_scales, other_layout)
"""Faults before and after SGLang processes the weights."""


def moe_errors() -> Iterator[tuple[str, Any]]:
    checkpoint, generator = Experts(), torch.Generator().manual_seed(5)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    chosen = routes(generator)
    expected = checkpoint.reference(x, chosen.topk_ids, chosen.topk_weights, rounded)
    stand_in_kernel()

    def made(fault: Callable[[Any], None] | None = None) -> Any:
        layer = experts_layer()
        load(layer, checkpoint)
        if fault in BEFORE:
            fault(layer)
        layer.quant_method.process_weights_after_loading(layer)
        if fault in AFTER:
            fault(layer)
        return layer

    right = made()
    yield "", error(right(x, chosen), expected)
    for fault in (*BEFORE, *AFTER):
        yield fault.__name__, error(made(fault)(x, chosen), expected)
    yield "no tokens", list(right(x[:0], type(chosen)(*(each[:0] for each in chosen))).shape)
    yield "loaded again", error(reloaded(right, checkpoint)(x, chosen), expected)


def reloaded(layer: Any, checkpoint: Experts) -> Any:
    """A layer after an update with other weights and one with those of ``checkpoint``: a graph still has its addresses."""
    addresses = prepared_addresses(layer)
    for each in (Experts(), checkpoint):
        load(layer, each)
        layer.quant_method.process_weights_after_loading(layer)
    assert prepared_addresses(layer) == addresses
    return layer


def prepared_addresses(layer: Any) -> dict[str, int]:
    return {name: value.data_ptr() for name, value in vars(layer.b12x_experts).items() if isinstance(value, torch.Tensor)}


# Dense layers


def dense_layer(n: int, k: int) -> Any:
    """SGLang's own linear layer with the weights of a checkpoint, before it processes them; and the weights in float64."""
    from sglang.srt.layers.linear import ReplicatedLinear

    layer = ReplicatedLinear(k, n, bias=False, params_dtype=torch.bfloat16, quant_config=quantization(), prefix="model.proj")
    weight = torch.randn(n, k) * 0.02
    scale = weight.abs().max() / (6 * 448)
    packed, scales = quantize(weight, scale)
    loaded = {"weight": packed, "weight_scale": scales, "weight_scale_2": scale, "input_scale": torch.tensor(4.0 / (6 * 448))}
    for name, tensor in loaded.items():
        layer.weight_loader(getattr(layer, name), tensor)
    return layer, decode(packed, scales) * scale.double()


def fp4_quantize(x: torch.Tensor, reciprocal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As FlashInfer's: scales of whole blocks of 128 rows, of which those beyond the last token are not written."""
    from sglang.srt.layers.quantization.utils import swizzle_blockscale

    packed, scales = quantize(x, 1 / reciprocal)
    padded = torch.full((-(-x.shape[0] // 128) * 128, scales.shape[1]), float("nan")).to(torch.float8_e4m3fn)
    padded[: x.shape[0]] = scales
    return packed, swizzle_blockscale(padded).view(torch.uint8)


def decoded_product(
    lhs: torch.Tensor,
    lhs_scales: torch.Tensor,
    rhs: torch.Tensor,
    rhs_scales: torch.Tensor,
    alpha: torch.Tensor,
    *,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``mm_nvfp4`` in float64: operands as b12x's kernel addresses them, by its own checks and layouts."""
    from b12x.gemm.blockscaled._a16 import scale_storage
    from b12x.moe._shared.kernels.reference import unswizzle_block_scale

    values = []
    for packed, scales in ((lhs, lhs_scales), (rhs, rhs_scales)):
        rows, columns = packed.shape[0], packed.shape[1] * 2
        assert packed.is_contiguous(), "the kernel reads rows of K/2 bytes from a pointer"
        values.append(decode(packed, unswizzle_block_scale(scale_storage(scales, rows, columns, 16), rows, columns // 16)))
    return (values[0] @ values[1].T * alpha.double()).to(out_dtype)


def gemm_errors() -> Iterator[tuple[str, Any]]:
    import sglang.srt.layers.quantization.modelopt_quant as quant
    from b12x.gemm import blockscaled
    from sglang.srt import b12x

    blockscaled.mm_nvfp4, quant.fp4_quantize = decoded_product, fp4_quantize
    for n, k in ((192, 256), (256, 512)):
        layer, dense = dense_layer(n, k)
        layer.quant_method.process_weights_after_loading(layer)
        for tokens in RAGGED:
            x = torch.randn(tokens, k).bfloat16()
            expected = activations(x, layer.input_scale.data[0]) @ dense.T
            yield f"{tokens}x{n}x{k}", error(layer(x)[0], expected)
    packed, scales = fp4_quantize(x, layer.input_scale_inv)
    rest = (scales, layer.weight_scale_interleaved.T, layer.alpha, torch.bfloat16)
    yield "not transposed", refusal(b12x.fp4_gemm, packed, layer.weight, *rest)
    yield "copied", refusal(b12x.fp4_gemm, packed, layer.weight.T.contiguous(), *rest)
    narrow, _ = dense_layer(128, 320)
    yield "K of 320", refusal(narrow.quant_method.process_weights_after_loading, narrow)


# What is refused when a layer is made or loaded


def refused_layers() -> Iterator[tuple[str, str]]:
    options = {
        "activation": {"activation": "gelu"},
        "clamped": {"swiglu_limit": 7.0},
        "router weight": {"apply_router_weight_on_input": True},
        "float16": {"params_dtype": torch.float16},
        "inner size": {"inner": 192},
    }
    for name, given in options.items():
        yield name, refusal(lambda given=given: experts_layer(**given))
    layer, checkpoint = experts_layer(), Experts()
    checkpoint.scale[2, "up"] = 2 * checkpoint.scale[2, "up"]
    load(layer, checkpoint)
    yield "two scales", refusal(layer.quant_method.process_weights_after_loading, layer)


# Kernels that b12x looks up on a GPU


def server_environment() -> dict[str, str]:
    """The variables of CuTe DSL that SGLang sets when a server starts, as read: that module needs libraries for a GPU."""
    import sglang

    source = Path(sglang.__file__).with_name("srt") / "entrypoints" / "engine.py"
    return dict(re.findall(r'os\.environ\["(CUTE_\w+)"\] = "(\w+)"', source.read_text()))


def kernels() -> Iterator[tuple[str, bool]]:
    """Whether b12x finds the kernel of each of SGLang's calls for the layers of a table, in the environment of a server."""
    sys.path.append(str(Path(__file__).parents[2] / "image_programs" / "b12x"))
    import compile_1_5
    from torch._subclasses.fake_tensor import FakeTensorMode

    os.environ.update(server_environment())
    table = json.load(sys.stdin)
    compile_1_5.without_gpu(table["sm_count"])
    calls = compile_1_5.sglang_calls(table)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device(compile_1_5.DEVICE):
        for name, call in calls:
            found = compile_1_5.looked_up(lambda _, call=call: call(), 0, compiles=False)
            yield name, not any(found.values())


# Command lines


def server() -> Iterator[tuple[str, Any]]:
    from sglang.srt.environ import envs

    for name, argv in json.load(sys.stdin).items():
        given = argv[1:] if argv[0] == VARIABLE else argv
        with envs.SGLANG_MOE_NVFP4_DISPATCH.override(True) if given != argv else contextlib.nullcontext():
            try:
                resolved = arguments(given).resolved_dict()
            except (ValueError, AssertionError) as error_:
                yield name, str(error_)
            else:
                yield name, {key: resolved[key] for key in SELECTED}


def main() -> None:
    describe_gpu()
    what, *model = sys.argv[1:]
    if what == "server":
        print(json.dumps(dict(server())))
        return
    direct_operators()
    publish(*model)
    if what == "kernels":
        print(json.dumps(dict(kernels())))
        return
    print(json.dumps({"gemm": dict(gemm_errors()), "moe": dict(moe_errors()), "refused": dict(refused_layers())}))


if __name__ == "__main__":
    main()
