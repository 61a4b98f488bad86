"""Compare every module of a small NVFP4 model that vLLM serves with float64 of its dequantized weights.

Needs torch, safetensors and vLLM 0.20.

It writes a Qwen3-MoE checkpoint of two layers with random weights as ModelOpt does: attention and experts in NVFP4. vLLM's own
``LLM`` loads it and generates tokens greedily. What each module gets and returns is recorded, and its output compared with
float64 of that input: so bounds stay tight, where those of a whole model with 4-bit activations would permit anything. Tokens
must be the most probable ones of the last hidden state. Faults are planted in the weights that vLLM has loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import reference
import torch
from reference import (
    ACCUMULATION,
    HALF_ULP,
    Expected,
    MoeLayer,
    MoeShape,
    OperatorRow,
    compare,
    moe_expected,
    quantized_interval,
    routed,
)
from report import OperatorReport
from vllm_layers import LinearWeights, linear_expected, require_vllm

Tensor = torch.Tensor
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 2, 256, 4, 2, 64
EXPERTS, ACTIVE, WIDTH, VOCABULARY = 8, 4, 128, 512
EPSILON, ROPE_THETA = 1e-6, 1e6
PROMPTS, TOKENS = (1, 7, 33, 70), 8
"""Lengths of the prompts, and tokens generated after each."""

INPUT_SCALE = 6.0 / (448 * 6)

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "moe_intermediate_size": WIDTH,
    "num_experts": EXPERTS,
    "num_experts_per_tok": ACTIVE,
    "norm_topk_prob": True,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "rms_norm_eps": EPSILON,
    "rope_theta": ROPE_THETA,
    "hidden_act": "silu",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": VOCABULARY - 1,
    "quantization_config": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "ignore": ["lm_head", "model.layers.*.mlp.gate"],
    },
}


# ---- the checkpoint


@dataclass(frozen=True)
class SmallModel:
    """The tensors of a checkpoint by name."""

    tensors: dict[str, Tensor]

    @classmethod
    def random(cls) -> SmallModel:
        tensors: dict[str, Tensor] = {}

        def plain(name: str, *size: int, scale: float = 1.0, offset: float = 0.0) -> None:
            tensors[name] = (offset + scale * torch.randn(size)).bfloat16()

        def quantized(name: str, rows: int, columns: int, tensor_scale: Tensor) -> None:
            codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
            scales = torch.randint(0x20, 0x48, (rows, columns // 16), dtype=torch.uint8)
            tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"] = codes, scales.view(torch.float8_e4m3fn)
            tensors[f"{name}.weight_scale_2"], tensors[f"{name}.input_scale"] = tensor_scale.clone(), torch.tensor(INPUT_SCALE)

        def tensor_scale(columns: int) -> Tensor:
            scale: Tensor = 0.4 / columns**0.5 * (0.75 + 0.5 * torch.rand(()))
            return scale

        plain("model.embed_tokens.weight", VOCABULARY, HIDDEN)
        for layer in range(LAYERS):
            prefix = f"model.layers.{layer}"
            shared = tensor_scale(HIDDEN)  # the parts of a merged layer share it
            for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
                quantized(f"{prefix}.self_attn.{name}_proj", heads * HEAD_DIM, HIDDEN, shared)
            quantized(f"{prefix}.self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM, tensor_scale(HEADS * HEAD_DIM))
            for name, size in (("input_layernorm", HIDDEN), ("post_attention_layernorm", HIDDEN)):
                plain(f"{prefix}.{name}.weight", size, scale=0.1, offset=1.0)
            for name in ("q_norm", "k_norm"):
                plain(f"{prefix}.self_attn.{name}.weight", HEAD_DIM, scale=0.1, offset=1.0)
            plain(f"{prefix}.mlp.gate.weight", EXPERTS, HIDDEN, scale=2.0 / HIDDEN**0.5)
            for expert in range(EXPERTS):
                shared = tensor_scale(HIDDEN)
                for name, rows, columns in (("gate", WIDTH, HIDDEN), ("up", WIDTH, HIDDEN), ("down", HIDDEN, WIDTH)):
                    scale = tensor_scale(WIDTH) if name == "down" else shared
                    quantized(f"{prefix}.mlp.experts.{expert}.{name}_proj", rows, columns, scale)
        plain("model.norm.weight", HIDDEN, scale=0.1, offset=1.0)
        plain("lm_head.weight", VOCABULARY, HIDDEN, scale=3.0 / HIDDEN**0.5)
        return cls(tensors)

    def write(self, directory: Path) -> None:
        importlib.import_module("safetensors.torch").save_file(self.tensors, directory / "model.safetensors", {"format": "pt"})
        (directory / "config.json").write_text(json.dumps(CONFIG, indent=1))


# ---- what modules return


@dataclass
class Recorded:
    """Inputs and outputs of the modules of vLLM's model, by module: one entry for each call.

    Inputs are copied before the call, as kernels of vLLM write to them.
    """

    calls: dict[str, list[tuple[Any, Any]]]

    @classmethod
    @contextlib.contextmanager
    def of(cls, model: Any) -> Iterator[Recorded]:
        """Record all calls of the modules while the context is entered."""
        record = cls({})

        def before(name: str) -> Callable[..., None]:
            def hook(module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
                record.calls.setdefault(name, []).append((copied((*arguments, *keywords.values())), None))

            return hook

        def after(name: str) -> Callable[..., None]:
            def hook(module: Any, arguments: tuple[Any, ...], output: Any) -> None:
                record.calls[name][-1] = (record.calls[name][-1][0], copied(output))

            return hook

        handles = []
        for name, module in model.named_modules():
            if name.endswith(MODULES):
                handles += [
                    module.register_forward_pre_hook(before(name), with_kwargs=True),
                    module.register_forward_hook(after(name)),
                ]
        try:
            yield record
        finally:
            for handle in handles:
                handle.remove()

    def tensors(self, name: str) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """The tensors that each call of a module gets and returns."""
        for given, returned in self.calls.get(name, ()):
            results = returned if isinstance(returned, tuple) else (returned,)
            yield (
                [value for value in given if isinstance(value, Tensor)],
                [value for value in results if isinstance(value, Tensor)],
            )


MODULES = ("norm", "qkv_proj", "o_proj", "rotary_emb", "attn", "gate", "experts")
"""Ends of the names of the modules that are recorded; the rotary embedding is one module of all layers."""


def copied(value: Any) -> Any:
    """A value with copies of its tensors: vLLM uses memory again."""
    if isinstance(value, Tensor):
        return value.clone()
    return tuple(copied(part) for part in value) if isinstance(value, (tuple, list)) else None


def within(values: Tensor, error: Tensor) -> Expected:
    """Values in bf16: ``error`` before the rounding."""
    return Expected(values, error + (values.abs() + error) * HALF_ULP[torch.bfloat16] * 1.01 + 1e-30, values)


def norm_expected(x: Tensor, weight: Tensor) -> Expected:
    """vLLM rounds before it multiplies by the weight."""
    values = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * weight
    return within(values, values.abs() * 2 * HALF_ULP[torch.bfloat16])


def dense_expected(x: Tensor, weight: Tensor) -> Expected:
    return within(x @ weight.T, x.abs() @ weight.abs().T * ACCUMULATION * 2)


def rotary_expected(positions: Tensor, heads: Tensor) -> Expected:
    """Pairs of elements that are half a head apart; sine and cosine are stored in bf16."""
    half = HEAD_DIM // 2
    frequencies = ROPE_THETA ** -(torch.arange(half, dtype=torch.float64, device=heads.device) / half)
    angles = positions.double()[:, None, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second = torch.split(heads, half, -1)
    values = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return within(values, torch.cat((first.abs() + second.abs(),) * 2, -1) * 2.0**-7)


def attention_expected(q: Tensor, k: Tensor, v: Tensor) -> Expected:
    """The last tokens of a sequence, whose keys and values are all given; probabilities may be rounded to bf16."""
    k, v = (tensor.repeat_interleave(HEADS // KV_HEADS, 1) for tensor in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
    hidden = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(1 + len(k) - len(q))
    probabilities = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
    values, magnitudes = (torch.einsum("hqk,khd->qhd", probabilities, tensor).flatten(1) for tensor in (v, v.abs()))
    return within(values, magnitudes * 2.0**-6)


@dataclass(frozen=True)
class ModuleRows:
    """Compares the recorded calls of a run with the model."""

    model: SmallModel
    recorded: Recorded

    def tensor(self, name: str) -> Tensor:
        return self.model.tensors[name].to(reference.DEVICE)

    def results(self) -> Iterator[tuple[str, Tensor, Expected]]:
        """Module, output and what is expected, for every call."""
        for number in range(LAYERS):
            layer = f"model.layers.{number}"
            yield from self.norms(f"{layer}.input_layernorm")
            yield from self.linear(f"{layer}.self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj"))
            for name in ("q_norm", "k_norm"):
                yield from self.norms(f"{layer}.self_attn.{name}")
            yield from self.rotary(f"{layer}.self_attn.rotary_emb")
            yield from self.attention(f"{layer}.self_attn.attn")
            yield from self.linear(f"{layer}.self_attn.o_proj", ("o_proj",))
            yield from self.norms(f"{layer}.post_attention_layernorm")
            yield from self.dense(f"{layer}.mlp.gate")
            yield from self.experts(f"{layer}.mlp")
        yield from self.norms("model.norm")

    def norms(self, name: str) -> Iterator[tuple[str, Tensor, Expected]]:
        """With a residual, its sum with the input is rounded to bf16 and returned as well."""
        weight = self.tensor(f"{name}.weight").double()
        for given, returned in self.recorded.tensors(name):
            x = given[0].double()
            if len(given) > 1:
                yield f"{name}, residual", returned[1], within(x + given[1].double(), torch.zeros_like(x))
                x = returned[1].double()
            yield name, returned[0], norm_expected(x, weight)

    def dense(self, name: str) -> Iterator[tuple[str, Tensor, Expected]]:
        for given, returned in self.recorded.tensors(name):
            yield name, returned[0], dense_expected(given[0].double(), self.tensor(f"{name}.weight").double())

    def linear(self, name: str, parts: Sequence[str]) -> Iterator[tuple[str, Tensor, Expected]]:
        prefixes = [f"{name.rpartition('.')[0]}.{part}" for part in parts]
        codes, scales = (
            torch.cat([self.tensor(f"{prefix}.{kind}") for prefix in prefixes]) for kind in ("weight", "weight_scale")
        )
        weights = LinearWeights(
            codes, scales, *(self.tensor(f"{prefixes[0]}.{kind}") for kind in ("weight_scale_2", "input_scale"))
        )
        for given, returned in self.recorded.tensors(name):
            yield name, returned[0], linear_expected(weights, given[0])

    def rotary(self, name: str) -> Iterator[tuple[str, Tensor, Expected]]:
        for (positions, *given), returned in self.recorded.tensors(name):
            for part, before, after in zip("qk", given, returned, strict=True):
                heads = before.double().view(len(positions), -1, HEAD_DIM)
                yield f"{name}, {part}", after.view_as(heads), rotary_expected(positions, heads)

    def attention(self, name: str) -> Iterator[tuple[str, Tensor, Expected]]:
        """Keys and values of a sequence are those of all calls since its first; prompts run one after another."""
        positions = [given[0] for given, _ in self.recorded.tensors(name.rpartition(".")[0])]
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for at, (given, returned) in zip(positions, self.recorded.tensors(name), strict=True):
            if int(at[0]) == 0:
                keys, values = [], []
            q, k, v = (tensor.double().view(len(at), -1, HEAD_DIM) for tensor in given[:3])
            keys.append(k)
            values.append(v)
            yield name, returned[0].view(len(at), -1), attention_expected(q, torch.cat(keys), torch.cat(values))

    def experts(self, name: str) -> Iterator[tuple[str, Tensor, Expected]]:
        """Tokens whose last chosen expert is not decided are left out: bf16 has few logits."""

        def stacked(parts: Sequence[str], kind: str) -> Tensor:
            names = [[f"{name}.experts.{expert}.{part}_proj.{kind}" for part in parts] for expert in range(EXPERTS)]
            return torch.stack([torch.cat([self.tensor(each) for each in of_expert]) for of_expert in names])

        def tensor_scales(part: str) -> Tensor:
            return torch.stack(
                [self.tensor(f"{name}.experts.{expert}.{part}_proj.weight_scale_2") for expert in range(EXPERTS)]
            )

        both, down = ("up", "gate"), ("down",)
        layer = MoeLayer(
            MoeShape("", EXPERTS, HIDDEN, WIDTH, ACTIVE),
            *(stacked(both, "weight"), stacked(both, "weight_scale"), tensor_scales("gate")),
            *(stacked(down, "weight"), stacked(down, "weight_scale"), tensor_scales("down")),
            *(torch.full(size, 1 / INPUT_SCALE, device=reference.DEVICE) for size in ((), (EXPERTS,))),
        )
        calls = zip(self.recorded.tensors(f"{name}.gate"), self.recorded.tensors(f"{name}.experts"), strict=True)
        for (_, routing), (given, returned) in calls:
            x, logits = given[0], routing[0].float()
            ordered = logits.sort(-1, descending=True).values
            decided = ordered[:, ACTIVE - 1] > ordered[:, ACTIVE]
            x, logits = x[decided], logits[decided]
            if not len(x):
                continue
            yield f"{name}.experts", returned[0][decided], self.expected_experts(layer, x, logits)

    def expected_experts(self, layer: MoeLayer, x: Tensor, logits: Tensor) -> Expected:
        low, high = quantized_interval(x.double(), x.double(), torch.tensor(1 / INPUT_SCALE, dtype=torch.float64))
        inputs = ((low + high) / 2, (high - low) / 2)
        return moe_expected(layer, x, routed(logits, ACTIVE), lambda _: inputs, rounds=True)


def merged(rows: Sequence[OperatorRow]) -> OperatorRow:
    """The calls of a module as one row: the largest error."""
    worst = max(rows, key=lambda row: (row.verdict != "right", row.error_over_bound))
    return replace(worst, outputs=sum(row.outputs for row in rows), case=f"{worst.case}, {len(rows)} calls")


# ---- vLLM


def engine(directory: Path, moe_backend: str, attention_backend: str) -> Any:
    """vLLM's LLM in this process, without compilation and CUDA graphs."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return importlib.import_module("vllm").LLM(
        model=str(directory),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=1,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=2**28,
        gpu_memory_utilization=0.1,
        async_scheduling=False,
        enable_prefix_caching=False,
        moe_backend=moe_backend,
        attention_backend=attention_backend,
        kernel_config={"enable_flashinfer_autotune": False},
    )


def generate(llm: Any, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The tokens that follow each prompt; one prompt after another."""
    parameters = importlib.import_module("vllm").SamplingParams(
        temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False
    )
    tokens = []
    for prompt in prompts:
        outputs = llm.generate([{"prompt_token_ids": list(prompt)}], parameters, use_tqdm=False)
        tokens.append(list(outputs[0].outputs[0].token_ids))
    return tokens


def row_before(values: Tensor) -> Tensor:
    """Each row of a parameter in the place of the next."""
    return values.view(torch.uint8).roll(1, 0).view(values.dtype)


def faults() -> Iterator[tuple[str, str, Callable[[Tensor], Tensor]]]:
    """Names of faults; the parameter in vLLM's model that has the fault, and how it is changed."""
    first, second = "model.layers.0", "model.layers.1"
    yield "w2 is that of the expert before", f"{first}.mlp.experts.w2_weight", row_before
    yield "w13's block scales are those of the expert before", f"{second}.mlp.experts.w13_weight_scale", row_before
    yield "w13's tensor scales are 1.2 times too large", f"{first}.mlp.experts.w13_weight_scale_2", lambda values: values * 1.2
    yield "the scale of q, k and v is 1.05 times too large", f"{second}.self_attn.qkv_proj.alpha", lambda values: values * 1.05
    yield "o's weight is that of the row before", f"{first}.self_attn.o_proj.weight", row_before


def rows_of(model: SmallModel, llm: Any, prompts: Sequence[Sequence[int]]) -> list[OperatorRow]:
    """A row for each module, and one for the tokens."""
    with Recorded.of(served_model(llm)) as recorded:
        tokens = generate(llm, prompts)
    rows: dict[str, list[OperatorRow]] = {}
    for name, output, expected in ModuleRows(model, recorded).results():
        rows.setdefault(name, []).append(compare(output, expected, "module", name))
    generated = [token for each in tokens for token in each]
    return [*map(merged, rows.values()), token_row(model, recorded, generated)]


def token_row(model: SmallModel, recorded: Recorded, generated: Sequence[int]) -> OperatorRow:
    """Tokens must be the most probable ones; logits that bf16 cannot tell apart are equal."""
    head = model.tensors["lm_head.weight"].to(reference.DEVICE).double()
    probable = first = 0
    for token, (_, returned) in zip(generated, recorded.tensors("model.norm"), strict=True):
        logits = returned[0][-1].double() @ head.T
        best, chosen = float(logits.max()), float(logits[token])
        first += int(logits.argmax()) == token
        probable += best - chosen <= (abs(best) + abs(chosen)) * HALF_ULP[torch.bfloat16] * 1.01
    why = f"{first} of {len(generated)} generated tokens are the first of the last hidden state, {probable} as probable in bf16"
    return OperatorRow(
        "LLM.generate", "tokens", "right" if probable == len(generated) else "WRONG", outputs=len(generated), why=why
    )


def check(report: OperatorReport, options: argparse.Namespace) -> None:
    model = SmallModel.random()
    prompts = [torch.randint(0, VOCABULARY - 1, (length,)).tolist() for length in PROMPTS]
    with tempfile.TemporaryDirectory() as directory:
        model.write(Path(directory))
        llm = engine(Path(directory), options.moe_backend, options.attention_backend)
        for row in rows_of(model, llm, prompts):
            report.add(row)
        parameters = dict(served_model(llm).named_parameters())
        before = {(row.operator, row.case) for row in rows_of(model, llm, prompts[1:2]) if row.verdict == "WRONG"}
        for name, parameter, change in faults():
            tensor = parameters[parameter].data
            original = tensor.clone()
            tensor.copy_(change(original))
            wrong = [row for row in rows_of(model, llm, prompts[1:2]) if (row.operator, row.case) not in before]
            tensor.copy_(original)
            report.fault(f"{options.moe_backend}: {name}", merged(wrong))


def served_model(llm: Any) -> Any:
    """The model that vLLM runs in this process."""
    return llm.llm_engine.model_executor.driver_worker.worker.get_model()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--moe-backend", default="auto", help="as of vllm serve")
    parser.add_argument("--attention-backend", default="TRITON_ATTN", help="as of vllm serve")


def run(report: OperatorReport, options: argparse.Namespace) -> None:
    require_vllm()
    check(report, options)
