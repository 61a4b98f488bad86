"""Compare every module of a small NVFP4 model that SGLang's ModelRunner runs with float64 of its dequantized weights.

Needs torch, safetensors and SGLang 0.5.11.

It writes the checkpoint of vllm_model.py, two layers of Qwen3-MoE in NVFP4. SGLang's ModelRunner loads it and runs prompts and
generated tokens, in batches of one request that SGLang's ScheduleBatch makes. What each module gets and returns is recorded,
and its output compared with float64 of that input. Tokens must be the most probable ones of the last hidden state. Faults are
planted in the weights that SGLang has loaded. With --engine, sglang.Engine serves the same checkpoint, and must generate the
same tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import b12x_nvfp4
import torch
from reference import Expected, MoeLayer, OperatorRow, compare, routed
from report import OperatorReport
from sglang_layers import require_sglang, sglang
from vllm_model import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    PROMPTS,
    TOKENS,
    VOCABULARY,
    ModuleRows,
    Recorded,
    SmallModel,
    merged,
    norm_expected,
    row_before,
    token_row,
)

Tensor = torch.Tensor


# ---- SGLang


def server_options(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of a server for one request at a time, without CUDA graphs."""
    return {
        "model_path": str(directory),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "quantization": "modelopt_fp4",
        "context_length": 256,
        "max_running_requests": 1,
        "max_total_tokens": 1024,
        "mem_fraction_static": 0.5,
        "chunked_prefill_size": -1,
        "attention_backend": options.attention_backend,
        "sampling_backend": "pytorch",
        "fp4_gemm_runner_backend": options.fp4_gemm_backend,
        "moe_runner_backend": options.moe_runner_backend,
        "disable_cuda_graph": True,
        "disable_piecewise_cuda_graph": True,
        "disable_radix_cache": True,
        "disable_overlap_schedule": True,
        "disable_flashinfer_autotune": True,
        "random_seed": options.seed,
    }


def runner(directory: Path, options: argparse.Namespace) -> Any:
    """SGLang's ModelRunner in this process."""
    arguments = sglang("server_args")
    server = arguments.ServerArgs(**server_options(directory, options))
    arguments.set_global_server_args_for_scheduler(server)
    sglang("layers.moe", "initialize_moe_config")(server)
    sglang("layers.quantization.fp4_utils", "initialize_fp4_gemm_config")(server)
    return sglang("model_executor.model_runner", "ModelRunner")(
        model_config=sglang("configs.model_config", "ModelConfig").from_server_args(server),
        mem_fraction_static=server.mem_fraction_static,
        gpu_id=0,
        tp_rank=0,
        tp_size=1,
        moe_ep_rank=0,
        moe_ep_size=1,
        pp_rank=0,
        pp_size=1,
        nccl_port=arguments.PortArgs.init_new(server).nccl_port,
        server_args=server,
    )


def generate(model: Any, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The tokens that follow each prompt; one prompt after another."""
    steps = importlib.import_module("sglang.bench_one_batch")
    parameters = sglang("sampling.sampling_params", "SamplingParams")(temperature=0.0, max_new_tokens=TOKENS)
    request_of = sglang("managers.schedule_batch", "Req")
    tokens = []
    for number, prompt in enumerate(prompts):
        model.req_to_token_pool.clear()
        model.token_to_kv_pool_allocator.clear()
        request = request_of(rid=str(number), origin_input_text="", origin_input_ids=list(prompt), sampling_params=parameters)
        request.fill_ids = request.origin_input_ids
        request.logprob_start_len = -1
        request.set_extend_input_len(len(request.fill_ids))
        following, _, batch = steps.extend([request], model)
        generated = following.tolist()
        while len(generated) < TOKENS:
            following, _ = steps.decode(following, batch, model)
            generated += following.tolist()
        tokens.append(generated)
    return tokens


def engine_row(directory: Path, options: argparse.Namespace, prompts: Sequence[Sequence[int]], tokens: object) -> OperatorRow:
    """SGLang's Engine, with its scheduler in a process of its own, must generate the tokens of the ModelRunner."""
    engine = importlib.import_module("sglang").Engine(**server_options(directory, options), skip_server_warmup=True)
    parameters = {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True}
    try:
        served = [engine.generate(input_ids=list(prompt), sampling_params=parameters)["output_ids"] for prompt in prompts]
    finally:
        engine.shutdown()
    why = f"{sum(map(len, served))} tokens of {len(served)} prompts, those of the ModelRunner: {served == tokens}"
    return OperatorRow(
        "Engine.generate", "tokens", "right" if served == tokens else "WRONG", outputs=sum(map(len, served)), why=why
    )


# ---- comparisons


@dataclass(frozen=True)
class SglangRows(ModuleRows):  # type: ignore[misc]
    """SGLang normalizes queries and keys with one kernel, which is no module; its rotary embedding gets what that returns."""

    moe_backend: str = ""

    def results(self) -> Iterator[tuple[str, Tensor, Expected]]:
        for number in range(LAYERS):
            layer = f"model.layers.{number}"
            yield from self.norms(f"{layer}.input_layernorm")
            yield from self.linear(f"{layer}.self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj"))
            yield from self.normalized(number)
            yield from self.rotary(f"{layer}.self_attn.rotary_emb")
            yield from self.attention(f"{layer}.self_attn.attn")
            yield from self.linear(f"{layer}.self_attn.o_proj", ("o_proj",))
            yield from self.norms(f"{layer}.post_attention_layernorm")
            yield from self.dense(f"{layer}.mlp.gate")
            yield from self.experts(f"{layer}.mlp")
        yield from self.norms("model.norm")

    def normalized(self, number: int) -> Iterator[tuple[str, Tensor, Expected]]:
        """The rotary embedding, one module of all layers, is called for each in turn."""
        layer = f"model.layers.{number}.self_attn"
        calls = list(self.recorded.tensors("model.layers.0.self_attn.rotary_emb"))[number::LAYERS]
        for (_, returned), ((positions, *heads), _) in zip(self.recorded.tensors(f"{layer}.qkv_proj"), calls, strict=True):
            parts = returned[0].double().view(len(positions), -1, HEAD_DIM).split((HEADS, KV_HEADS, KV_HEADS), 1)
            for part, before, after in zip("qk", parts, heads, strict=False):
                expected = norm_expected(before, self.tensor(f"{layer}.{part}_norm.weight").double())
                yield f"{layer}.{part}_norm", after.view_as(before), expected

    def expected_experts(self, layer: MoeLayer, x: Tensor, logits: Tensor) -> Expected:
        if self.moe_backend != "b12x":
            return super().expected_experts(layer, x, logits)
        return b12x_nvfp4.moe_expected(layer, layer.scale2, x, routed(logits, layer.shape.active))


def faults() -> Iterator[tuple[str, str, Callable[[Tensor], Tensor]]]:
    """Names of faults; the parameter in SGLang's model that has the fault, and how it is changed."""
    first, second = "model.layers.0", "model.layers.1"
    yield "w2 is that of the expert before", f"{first}.mlp.experts.w2_weight", row_before
    yield "w13's block scales are those of the expert before", f"{second}.mlp.experts.w13_blockscale_swizzled", row_before
    yield "w13's tensor scales are 1.2 times too large", f"{first}.mlp.experts.g1_alphas", lambda values: values * 1.2
    yield "the scale of q, k and v is 1.05 times too large", f"{second}.self_attn.qkv_proj.alpha", lambda values: values * 1.05
    yield "o's weight is that of the row before", f"{first}.self_attn.o_proj.weight", row_before
    yield "k's norm is that of the element before", f"{first}.self_attn.k_norm.weight", lambda values: values.roll(1)


@contextlib.contextmanager
def changed_parameter(model: torch.nn.Module, name: str, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """A model whose parameter is another tensor: b12x keeps copies of scales, by address, and misses a change in place."""
    owner, _, attribute = name.rpartition(".")
    module = model.get_submodule(owner)
    original = getattr(module, attribute)
    setattr(module, attribute, torch.nn.Parameter(original.data.clone().copy_(change(original.data)), requires_grad=False))
    try:
        yield
    finally:
        setattr(module, attribute, original)


def rows_of(model: SmallModel, run: Any, prompts: Sequence[Sequence[int]], moe_backend: str) -> list[OperatorRow]:
    """A row for each module, and one for the tokens."""
    with Recorded.of(run.model) as recorded:
        tokens = generate(run, prompts)
    rows: dict[str, list[OperatorRow]] = {}
    for name, output, expected in SglangRows(model, recorded, moe_backend).results():
        rows.setdefault(name, []).append(compare(output, expected, "module", name))
    generated = [token for each in tokens for token in each]
    sampled = replace(token_row(model, recorded, generated), operator="ModelRunner.sample")
    return [*map(merged, rows.values()), sampled]


def check(report: OperatorReport, options: argparse.Namespace) -> None:
    model = SmallModel.random()
    prompts = [torch.randint(0, VOCABULARY - 1, (length,)).tolist() for length in PROMPTS]
    backend = options.moe_runner_backend
    with tempfile.TemporaryDirectory() as directory:
        model.write(Path(directory))
        run = runner(Path(directory), options)
        for row in rows_of(model, run, prompts, backend):
            report.add(row)
        before = {(row.operator, row.case) for row in rows_of(model, run, prompts[1:2], backend) if row.verdict == "WRONG"}
        for name, parameter, change in faults():
            with changed_parameter(run.model, parameter, change):
                wrong = [row for row in rows_of(model, run, prompts[1:2], backend) if (row.operator, row.case) not in before]
            report.fault(f"{backend}: {name}", merged(wrong))
        if options.engine:
            report.add(engine_row(Path(directory), options, prompts, generate(run, prompts)))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--moe-runner-backend", default="flashinfer_cutlass", help="as of sglang.launch_server")
    parser.add_argument("--fp4-gemm-backend", default="flashinfer_cutlass", help="as of sglang.launch_server")
    parser.add_argument("--attention-backend", default="triton", help="as of sglang.launch_server")
    parser.add_argument(
        "--engine", action="store_true", help="compare the tokens of sglang.Engine with those of its ModelRunner"
    )


def run(report: OperatorReport, options: argparse.Namespace) -> None:
    require_sglang()
    check(report, options)
