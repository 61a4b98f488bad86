"""SGLang with ``patches/sglang`` and b12x, on the CPU: tensors that b12x is given, and command lines that SGLang accepts.

The environment has the locked wheels, without those with CUDA, and a torch for the CPU: 2 GB, some minutes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from patched_engine import STATES, PatchedEngine

from sm120kit.recipes import configurations

RECIPE = "sglang-0.5.11-b12x"
CONFIGURATION = configurations.load("qwen3.5-122b-nvfp4-2x-rtx-pro-6000")
INSIDE = Path(__file__).parents[2] / "support" / "sglang_b12x_inside.py"
LIBRARIES = r"b12x|nvidia-cutlass-dsl|cuda-(python|bindings|pathfinder)$"
"""Distributions of the lockfile that b12x imports, besides those that the parser imports."""
MODEL = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head", "mtp*"]},
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 3072,
        "num_hidden_layers": 48,
        "vocab_size": 248320,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1024,
        "shared_expert_intermediate_size": 1024,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 64,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "mtp_num_hidden_layers": 1,
        "max_position_embeddings": 262144,
    },
}
"""Sizes as in recipes/checkpoints/txn545--Qwen3.5-122B-A10B-NVFP4.json."""


class Engine:
    """SGLang without and with its patches, and a model's configuration."""

    def __init__(self, scratch: Path) -> None:
        self.sglang = PatchedEngine(RECIPE, scratch, LIBRARIES)
        self.model = scratch / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps(MODEL))

    def run(self, *arguments: str, state: str = "patched", stdin: str = "") -> Any:
        return self.sglang.answer(INSIDE, *arguments, state=state, stdin=stdin, variables=CONFIGURATION.environment)

    def answers(self, lines: dict[str, list[str]], state: str = "patched") -> Any:
        return self.run("server", state=state, stdin=json.dumps(lines))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(tmp_path_factory.mktemp("sglang"))


@pytest.fixture(scope="module")
def contract(engine: Engine) -> Any:
    return engine.run("contract")


def command(engine: Engine) -> list[str]:
    return ["--model-path", str(engine.model), *CONFIGURATION.arguments]


def test_experts_are_right_and_planted_faults_are_not(contract: Any) -> None:
    """Against a MoE in float64 that rounds activations as the kernels do; what remains is BF16 and ties."""
    errors = contract["moe"]
    assert errors.pop("") < 0.02
    assert len(errors) == 6 and min(errors.values()) > 0.1, errors


def test_dense_layers_are_right_for_any_number_of_tokens(contract: Any) -> None:
    shapes = {name: value for name, value in contract["gemm"].items() if re.fullmatch(r"\d+x\d+x\d+", name)}
    assert len(shapes) == 10 and max(shapes.values()) < 0.003, shapes
    assert contract["gemm"]["kernels up to 16384 tokens"] == 31 and contract["gemm"]["rows hold tokens"]


def test_weight_that_b12x_cannot_read_is_refused(contract: Any) -> None:
    assert contract["gemm"]["transposed view"] == "b12x needs the FP4 weight as [N, K/2], not transposed."
    assert contract["gemm"]["transposed copy"] > 0.5, "of a square weight: only its numbers show it"
    assert "multiples of 128; a layer has 320" in contract["gemm"]["K of 320"]


def test_scales_have_the_layout_of_b12x(contract: Any) -> None:
    assert len(contract["layouts"]) == 3 and all(contract["layouts"].values())


def test_configuration_passes_the_validation_of_sglang(engine: Engine) -> None:
    line = command(engine)
    strategy = line.index("--mamba-scheduler-strategy")
    answers = engine.answers({"whole": line, "no buffer": line[:strategy] + line[strategy + 2 :]})
    whole = answers["whole"]
    assert isinstance(whole, dict), whole
    assert {whole[key] for key in ("moe_runner_backend", "speculative_moe_runner_backend", "fp4_gemm_runner_backend")} == {
        "b12x"
    }
    assert whole["attention_backend"] == "flashinfer" and whole["kv_cache_dtype"] == "fp8_e4m3"
    assert "please use --mamba-scheduler-strategy extra_buffer" in answers["no buffer"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--ep-size", "2"], "b12x does not support expert parallelism: --ep-size is 2, not 1."),
        (["--moe-a2a-backend", "deepep"], "b12x has no all-to-all: --moe-a2a-backend is 'deepep', not 'none'."),
        (["SGLANG_MOE_NVFP4_DISPATCH=1"], "b12x quantizes activations itself: unset SGLANG_MOE_NVFP4_DISPATCH"),
        (["--quantization", "fp8"], "b12x needs --quantization modelopt_fp4."),
    ],
)
def test_what_b12x_lacks_is_refused(engine: Engine, more: list[str], message: str) -> None:
    answer = engine.answers({"": [*command(engine), *more]})[""]
    assert isinstance(answer, str) and message in answer


def test_without_b12x_sglang_selects_what_it_selects_unpatched(engine: Engine) -> None:
    line = command(engine)
    for option in ("--moe-runner-backend", "--fp4-gemm-backend"):
        index = line.index(option)
        del line[index : index + 2]
    lines = {"default": line}
    for option, choices in (("--moe-runner-backend", ("flashinfer_cutlass", "triton")), ("--fp4-gemm-backend", ("cutlass",))):
        lines |= {f"{option} {choice}": [*line, option, choice] for choice in choices}
    released, patched = (engine.answers(lines, state) for state in STATES)
    assert patched == released
    assert all(isinstance(answer, dict) for answer in patched.values()), patched


def test_a_prompt_of_one_token_is_no_padding(engine: Engine) -> None:
    """In verifications of drafts by a CUDA graph of four rows: states are ten times the number of a request."""
    released, patched = (engine.run("padding", state=state) for state in STATES)
    whole, two = [[10, 20, 30, 40], [0, 6, 12, 18, 24]], [[10, 20, -1, -1], [0, 6, 12, 12, 12]]
    assert patched == {"[25, 60, 77, 104]": whole, "[25, 1, 77, 104]": whole, "[1, 60]": two, "[25, 60]": two}
    assert released["[25, 1, 77, 104]"] == [[10, 20, 30, -1], [0, 6, 12, 18, 18]], "the last request has lost its state"
