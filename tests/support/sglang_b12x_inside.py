"""Numbers of SGLang's b12x layers on the CPU; run by a Python that has b12x, its DSL and SGLang with ``patches/sglang``.

``contract`` prints for each fault, and for none, the relative error of the output against a MoE or GEMM in float64. The kernels
of b12x are replaced: experts by b12x's own CPU oracle, the GEMM by one that decodes its operands with b12x's own layouts. All
else is what runs on a GPU: SGLang loads, processes and passes the tensors of a checkpoint. ``server`` reads command lines as
JSON from stdin and prints what SGLang's parser and the validation behind it make of each. ``padding`` prints for batches of
verifications in a CUDA graph which states the rows have, and where their tokens begin.
"""

from __future__ import annotations

import contextlib
import json
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PARSER_PROBE = Path(__file__).with_name("parser_probe.py")  # sm120kit is not installed here
runpy.run_path(str(PARSER_PROBE))["stand_in"]("torchvision", "sgl_kernel", "flashinfer")
import torch  # noqa: E402

torch.manual_seed(12)
torch.Tensor.cuda = lambda tensor, *_, **__: tensor
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
EXPERTS, HIDDEN, INNER, TOP = 4, 256, 128, 2
RAGGED = (1, 6, 100, 129, 300)
"""Tokens of the GEMMs, most of them no multiple of anything."""
Rounding = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""What the tensor cores multiply for values, by the scale of the tensor."""


# A checkpoint in the format of ModelOpt, and float64 arithmetic on it


def quantize(values: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """NVFP4 of ``values`` [N, K] under the FP32 scale of the tensor: packed [N, K/2], and E4M3 block scales [N, K/16]."""
    blocks = values.double().reshape(values.shape[0], -1, 16)
    scales = (blocks.abs().amax(-1) / (6 * scale)).clamp(max=448).to(torch.float8_e4m3fn)
    ratio = blocks / (scales.double() * scale).clamp(min=1e-30).unsqueeze(-1)
    code = (ratio.abs().unsqueeze(-1) - E2M1).abs().argmin(-1) + 8 * (ratio < 0)
    code = code.reshape(values.shape).to(torch.uint8)
    return code[:, 0::2] | code[:, 1::2] << 4, scales


def decode(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values [N, K] in float64, without the scale of the tensor."""
    code = torch.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1).long()
    values = E2M1[code & 7] * (1 - 2 * (code >> 3))
    return values * scales.double().repeat_interleave(16, 1)


def activations(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What the tensor cores multiply for activations under the scale of an input."""
    return decode(*quantize(values, scale)) * scale.double()


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


class Experts:
    """Tensors of the experts of a layer as a checkpoint has them."""

    def __init__(self) -> None:
        shapes = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
        self.packed, self.scales, self.scale, self.input = {}, {}, {}, {}
        for expert in range(EXPERTS):
            for name, shape in shapes.items():
                weight = torch.randn(shape) * 0.02 * (expert + 1)
                # gate and up of an expert share a scale, as in ModelOpt's checkpoints
                self.scale[expert, name] = torch.tensor(0.02 * 4.5 * (expert + 1) / (6 * 448))
                self.packed[expert, name], self.scales[expert, name] = quantize(weight, self.scale[expert, name])
                self.input[expert, name] = torch.tensor((0.6 if name == "down" else 4.0) * (1 + expert / 4) / (6 * 448))

    def reference(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, rounded: Rounding = activations
    ) -> torch.Tensor:
        """The MoE in float64, with activations rounded to NVFP4 as the kernels do."""
        output = torch.zeros(x.shape, dtype=torch.float64)
        for token, chosen in enumerate(ids.tolist()):
            for slot, expert in enumerate(chosen):
                dense = {
                    name: decode(self.packed[expert, name], self.scales[expert, name]) * self.scale[expert, name].double()
                    for name in ("gate", "up", "down")
                }
                row = rounded(x[token : token + 1], self.input[expert, "gate"])
                gate, up = row @ dense["gate"].T, row @ dense["up"].T
                inner = rounded(gate * gate.sigmoid() * up, self.input[expert, "down"])
                output[token] += weights[token, slot].double() * (inner @ dense["down"].T)[0]
        return output


# SGLang


def stand_in_runtime(quant: Any) -> None:
    """What SGLang reads of a GPU and of a running server."""
    quant.is_blackwell_supported = lambda: True
    quant.use_symmetric_memory = lambda *_, **__: contextlib.nullcontext()
    quant.get_tp_group = quant.is_allocation_symmetric = lambda: None
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.current_stream = lambda device=None: SimpleNamespace(stream_id=0, device=device)


def layer_of(quant: Any, checkpoint: Experts) -> Any:
    """A layer of experts that SGLang loaded from a checkpoint and processed, with its method."""
    from sglang.srt.layers.moe import MoeRunnerConfig
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    config = MoeRunnerConfig(activation="silu", is_gated=True, apply_router_weight_on_input=False)
    method = quant.ModelOptNvFp4FusedMoEMethod(SimpleNamespace(is_checkpoint_nvfp4_serialized=True, group_size=16))
    layer = torch.nn.Module()
    vars(layer).update(
        num_experts=EXPERTS,
        num_local_experts=EXPERTS,
        hidden_size=HIDDEN,
        moe_runner_config=config,
        moe_ep_size=1,
        moe_ep_rank=0,
    )
    layer.dispatcher = SimpleNamespace(set_quant_config=lambda config: None)
    method.create_weights(layer, EXPERTS, HIDDEN, INNER, torch.bfloat16, weight_loader=None)
    method.create_moe_runner(layer, config)
    loader = SimpleNamespace(
        quant_method=method,
        quant_config=None,
        moe_runner_config=config,
        use_padded_loading=False,
        use_presharded_weights=False,
        use_triton_kernels=False,
    )
    for (expert, name), packed in checkpoint.packed.items():
        kind, shard = ("w2", "w2") if name == "down" else ("w13", "w1" if name == "gate" else "w3")
        load = FusedMoE._load_w2 if name == "down" else FusedMoE._load_w13
        for suffix, tensor in (("weight", packed), ("weight_scale", checkpoint.scales[expert, name])):
            parameter = getattr(layer, f"{kind}_{suffix}").data[expert]
            load(loader, parameter, 1 if name == "down" else 0, shard, tensor, 0)
        slot = (expert,) if name == "down" else (expert, int(name == "up"))
        getattr(layer, f"{kind}_weight_scale_2").data[slot] = checkpoint.scale[expert, name]
        getattr(layer, f"{kind}_input_scale").data[slot] = checkpoint.input[expert, name]
    return layer, method


def oracle(*tensors: torch.Tensor, workspace: Any, output: torch.Tensor, **flags: bool) -> torch.Tensor:
    """``b12x_moe_fp4`` by b12x's own CPU oracle, which takes scales of inputs that are not reciprocal."""
    from b12x.moe.fused.reference import moe_reference_f32

    x, scale1, w1, block1, alpha1, scale2, w2, block2, alpha2, weights, ids = tensors
    if flags["input_scales_are_reciprocal"]:
        scale1, scale2 = 1 / scale1, 1 / scale2
    assert flags["input_scales_static"] and ids.dtype == torch.int32 and output.is_contiguous()
    sizes = {"E": EXPERTS, "K": HIDDEN, "I_tp": INNER}
    shown = moe_reference_f32(x, w1, block1, alpha1, w2, block2, alpha2, scale1, scale2, ids, weights, **sizes)
    return output.copy_(shown)


def gemm(lhs: Any, rhs: Any, out: torch.Tensor, *, alpha: torch.Tensor, **options: Any) -> None:
    """``dense_gemm`` in float64: operands as b12x's kernel addresses them."""
    from b12x.moe.fused.reference import unswizzle_block_scale

    assert options == {"ab_dtype": "float4_e2m1fn", "sf_dtype": "float8_e4m3fn", "c_dtype": "bfloat16", "sf_vec_size": 16}
    decoded = []
    for packed, view in (lhs, rhs):
        assert packed.is_contiguous() and packed.shape[2] == 1, "the kernel reads rows of K/2 bytes from a pointer"
        storage = view.permute(5, 2, 4, 0, 1, 3).contiguous()
        assert storage.data_ptr() == view.data_ptr(), "the kernel reads the scales from a pointer"
        rows, columns = packed.shape[0], packed.shape[1] // 8
        decoded.append(decode(packed[:, :, 0], unswizzle_block_scale(storage, rows, columns)))
    out.copy_((decoded[0] @ decoded[1].T * alpha.double()).unsqueeze(-1))


def swapped(layer: Any, method: Any) -> None:
    from sglang.srt.layers.quantization.utils import reorder_w1w3_to_w3w1

    layer.w13_weight.data, layer.w13_weight_scale.data = reorder_w1w3_to_w3w1(
        layer.w13_weight.data, layer.w13_weight_scale.data
    )


def transposed(layer: Any, method: Any) -> None:
    layer.w2_weight.data = layer.w2_weight.data.transpose(1, 2).contiguous().reshape(layer.w2_weight.shape)


def not_reciprocal(layer: Any, method: Any) -> None:
    for name in ("w13_input_scale_quant", "w2_input_scale_quant"):
        getattr(layer, name).data = 1 / getattr(layer, name).data


def folded(layer: Any, method: Any) -> None:
    """The FP32 scale of each expert goes into its block scales, which are E4M3."""
    for kind in ("w13", "w2"):
        scale = getattr(layer, f"{kind}_weight_scale_2").data
        each = scale.reshape(EXPERTS, -1)[:, :1, None]
        blocks = getattr(layer, f"{kind}_weight_scale")
        blocks.data = (blocks.data.float() * each).to(torch.float8_e4m3fn)
        scale.fill_(1)


def no_input_scale(layer: Any, method: Any) -> None:
    layer.g1_alphas.data = layer.w13_weight_scale_2.data[:, 0].clone()


def not_swizzled(layer: Any, method: Any) -> None:
    layer.w13_blockscale_swizzled.data = layer.w13_weight_scale.data.clone()


BEFORE = {"swapped": swapped, "transposed": transposed, "folded": folded}
AFTER = {"not reciprocal": not_reciprocal, "alpha without input scale": no_input_scale, "scales not swizzled": not_swizzled}


def moe_errors(quant: Any) -> Iterator[tuple[str, float]]:
    import b12x.integration.tp_moe
    from sglang.srt.layers.moe import utils

    b12x.integration.tp_moe.b12x_moe_fp4 = oracle
    utils.MOE_RUNNER_BACKEND = utils.MoeRunnerBackend.B12X
    utils.MOE_A2A_BACKEND = utils.MoeA2ABackend.NONE
    checkpoint = Experts()
    x = torch.randn(5, HIDDEN).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP] for _ in range(5)])
    weights = torch.rand(5, TOP)
    expected = checkpoint.reference(x, ids, weights)
    dispatched = SimpleNamespace(
        hidden_states=x, hidden_states_scale=None, topk_output=SimpleNamespace(topk_weights=weights, topk_ids=ids)
    )
    for fault in ("", *BEFORE, *AFTER):
        layer, method = layer_of(quant, checkpoint)
        BEFORE.get(fault, lambda *_: None)(layer, method)
        method.process_weights_after_loading(layer)
        AFTER.get(fault, lambda *_: None)(layer, method)
        yield fault, error(method.apply(layer, dispatched).hidden_states, expected)


def gemm_errors(quant: Any) -> Iterator[tuple[str, Any]]:
    import b12x.gemm
    from b12x.cute.fp4 import swizzle_block_scale
    from sglang.srt.layers.quantization import fp4_utils

    b12x.gemm.dense_gemm = gemm
    fp4_utils.FP4_GEMM_RUNNER_BACKEND = fp4_utils.Fp4GemmRunnerBackend.B12X

    def fp4_quantize(x: torch.Tensor, reciprocal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As FlashInfer's: scales of whole blocks of 128 rows, of which those beyond the last token are not written."""
        packed, scales = quantize(x, 1 / reciprocal)
        padded = torch.full((-(-x.shape[0] // 128) * 128, scales.shape[1]), float("nan")).to(torch.float8_e4m3fn)
        padded[: x.shape[0]] = scales
        return packed, swizzle_block_scale(padded).view(torch.uint8)

    quant.fp4_quantize, quant.enable_flashinfer_fp4_gemm = fp4_quantize, True
    quant.fp4_gemm = lambda *operands: quant.b12x_fp4_gemm(*operands[:6])
    method = quant.ModelOptFp4LinearMethod(SimpleNamespace(is_checkpoint_nvfp4_serialized=True, group_size=16))
    for n, k in ((192, 256), (256, 512)):
        layer = torch.nn.Module()
        method.create_weights(layer, k, [n], k, n, torch.bfloat16, weight_loader=None)
        weight = torch.randn(n, k) * 0.02
        scale = weight.abs().max() / (6 * 448)
        layer.weight.data, layer.weight_scale.data = quantize(weight, scale)
        dense = decode(layer.weight.data, layer.weight_scale.data) * scale.double()
        layer.weight_scale_2.data.fill_(scale)
        layer.input_scale.data.fill_(4.0 / (6 * 448))
        method.process_weights_after_loading(layer)
        for tokens in RAGGED:
            x = torch.randn(tokens, k).bfloat16()
            expected = activations(x, layer.input_scale.data[0]) @ dense.T
            yield f"{tokens}x{n}x{k}", error(method.apply(layer, x), expected)
    operands = (*fp4_quantize(x, layer.input_scale_inv), layer.weight_scale_interleaved, layer.alpha, torch.bfloat16)
    yield "transposed view", refusal(quant.b12x_fp4_gemm, operands[0], layer.weight.T, *operands[1:])
    square = layer.weight.T.contiguous()
    yield "transposed copy", error(quant.b12x_fp4_gemm(operands[0], square, *operands[1:]), expected)
    narrow = torch.nn.Module()
    method.create_weights(narrow, 320, [128], 320, 128, torch.bfloat16, weight_loader=None)
    narrow.weight_scale_2.data.fill_(1), narrow.input_scale.data.fill_(1)
    yield "K of 320", refusal(method.process_weights_after_loading, narrow)
    yield "kernels up to 16384 tokens", len({quant.b12x_gemm_rows(tokens) for tokens in range(1, 16385)})
    yield "rows hold tokens", all(quant.b12x_gemm_rows(tokens) >= tokens for tokens in range(16385))


def refusal(function: Any, *arguments: Any) -> str:
    """The message of the ValueError that a call raises; empty if it raises none."""
    try:
        function(*arguments)
    except ValueError as error_:
        return str(error_)
    return ""


def layouts(quant: Any) -> Iterator[tuple[str, bool]]:
    from b12x.cute.fp4 import swizzle_block_scale

    for shape in ((4, 256, 16), (2, 192, 10), (130, 6)):
        scales = torch.rand(shape).to(torch.float8_e4m3fn)
        pair = (swizzle(scales).view(torch.uint8) for swizzle in (quant.swizzle_blockscale, swizzle_block_scale))
        yield "x".join(map(str, shape)), torch.equal(*pair)


SELECTED = (
    "attention_backend",
    "moe_runner_backend",
    "speculative_moe_runner_backend",
    "fp4_gemm_runner_backend",
    "kv_cache_dtype",
    "quantization",
    "page_size",
    "speculative_algorithm",
)
"""Of the arguments of every release."""


def server() -> None:
    """Print what SGLang selects on an RTX PRO 6000 for each command line, or the message with which it refuses it."""
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda *_: (12, 0)
    torch.cuda.get_device_name = lambda *_: "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"
    torch.cuda.device_count = lambda: 8
    torch.cuda.mem_get_info = lambda *_: (96 * 2**30, 96 * 2**30)
    torch.version.cuda = "13.0"
    from sglang.srt import server_args
    from sglang.srt.environ import envs

    answers = {}
    for name, argv in json.load(sys.stdin).items():
        # "NAME=VALUE" before the first option is a variable of the environment
        variables = dict(word.split("=", 1) for word in argv if not word.startswith("-") and word.startswith("SGLANG_"))
        with contextlib.ExitStack() as stack:
            for variable, value in variables.items():
                stack.enter_context(getattr(envs, variable).override(value == "1"))
            try:
                parsed = server_args.prepare_server_args([word for word in argv if not word.startswith("SGLANG_")])
            except (ValueError, AssertionError) as error_:
                answers[name] = str(error_)
            else:
                answers[name] = {key: getattr(parsed, key) for key in (*SELECTED, "mamba_scheduler_strategy")}
    print(json.dumps(answers))


def padding() -> None:
    """Print states and beginnings of the rows of a graph for four requests, by the lengths of the requests."""
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import MambaAttnBackendBase
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    rows, drafts = 4, 6
    answers = {}
    for lengths in ([25, 60, 77, 104], [25, 1, 77, 104], [1, 60], [25, 60]):
        backend = MambaAttnBackendBase.__new__(MambaAttnBackendBase)
        backend.topk = 1
        backend.state_indices_list = [torch.zeros(count, dtype=torch.int32) for count in range(1, rows + 1)]
        backend.query_start_loc_list = [torch.zeros(count + 1, dtype=torch.int32) for count in range(1, rows + 1)]
        backend.cached_cuda_graph_verify_query_start_loc = drafts * torch.arange(rows + 1, dtype=torch.int32)
        backend.req_to_token_pool = SimpleNamespace(get_mamba_indices=lambda slots: 10 * slots)
        spec_info = SimpleNamespace(draft_token=torch.zeros(drafts * len(lengths)), draft_token_num=drafts)
        slots, filled = torch.zeros(rows, dtype=torch.int64), torch.ones(rows, dtype=torch.int32)
        slots[: len(lengths)] = torch.arange(1, len(lengths) + 1)
        filled[: len(lengths)] = torch.tensor(lengths)
        found = backend._replay_metadata(rows, slots, ForwardMode.TARGET_VERIFY, spec_info, filled)
        answers[str(lengths)] = [found.mamba_cache_indices.tolist(), found.query_start_loc.tolist()]
    print(json.dumps(answers))


def main() -> None:
    if other := {"server": server, "padding": padding}.get("".join(sys.argv[1:])):
        other()
        return
    import sglang.srt.layers.quantization.modelopt_quant as quant

    stand_in_runtime(quant)
    print(json.dumps({"moe": dict(moe_errors(quant)), "gemm": dict(gemm_errors(quant)), "layouts": dict(layouts(quant))}))


if __name__ == "__main__":
    main()
