"""SGLang 0.5.23 with ``patches/sglang`` and b12x 1.5.1, on the CPU: numbers of layers, kernels, command lines.

The environment has the locked wheels, without those with CUDA, and a torch for the CPU: 2 GB, some minutes.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from patched_engine import STATES, PatchedEngine

from sm120kit import recipes
from sm120kit.core.data_roots import data_root
from sm120kit.recipes import configurations

RECIPE = "sglang-0.5.23-b12x"
CONFIGURATION = configurations.load("qwen3.5-122b-nvfp4-2x-rtx-pro-6000-b12x")
INSIDE = Path(__file__).parents[2] / "support" / "sglang_b12x_1_5_inside.py"
CHECKPOINT = data_root() / "recipes" / "checkpoints" / f"{CONFIGURATION.model.repository.replace('/', '--')}.json"
LIBRARIES = r"b12x|nvidia-cutlass-dsl|cuda-(python|bindings|pathfinder)$"
"""Distributions of the lockfile that b12x imports, besides those that the parser imports."""
ROUNDED_TO_BF16 = 0.003
"""Relative error of a result in BF16 in the Frobenius norm: it is 2 ** -9 / sqrt(3) on average."""
FAULTS = {"swapped", "transposed", "folded", "not_reciprocal", "plain_scales", "other_layout"}
OPTIONS = ("--moe-runner-backend", "--fp4-gemm-backend")


class Engine:
    """SGLang without and with its patches, and a model's configuration."""

    def __init__(self, scratch: Path) -> None:
        self.sglang = PatchedEngine(RECIPE, scratch, LIBRARIES)
        self.model = scratch / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps(json.loads(CHECKPOINT.read_text())["config"]))

    def run(self, *arguments: str, state: str = "patched", stdin: str = "", variables: Mapping[str, str] = {}) -> Any:
        given = {**CONFIGURATION.environment, **variables}
        return self.sglang.answer(INSIDE, *arguments, state=state, stdin=stdin, variables=given)

    def answers(self, lines: dict[str, list[str]], state: str = "patched") -> Any:
        return self.run("server", state=state, stdin=json.dumps(lines))

    @property
    def command(self) -> list[str]:
        return ["--model-path", str(self.model), *CONFIGURATION.arguments]

    @property
    def without_b12x(self) -> list[str]:
        line = self.command
        for option in OPTIONS:
            index = line.index(option)
            del line[index : index + 2]
        return line


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(tmp_path_factory.mktemp("sglang"))


@pytest.fixture(scope="module")
def contract(engine: Engine) -> Any:
    return engine.run("contract", str(engine.model))


def test_experts_are_right_and_seeded_faults_are_not(contract: Any) -> None:
    errors = contract["moe"]
    assert errors[""] < ROUNDED_TO_BF16 and errors["loaded again"] < ROUNDED_TO_BF16
    assert min(errors[fault] for fault in FAULTS) > 0.05, errors
    assert errors["no tokens"][0] == 0


def test_dense_layers_are_right_for_any_number_of_tokens(contract: Any) -> None:
    shapes = {name: value for name, value in contract["gemm"].items() if re.fullmatch(r"\d+x\d+x\d+", name)}
    assert len(shapes) == 10 and max(shapes.values()) < ROUNDED_TO_BF16, shapes


def test_layers_that_b12x_cannot_compute_are_refused(contract: Any) -> None:
    refused = contract["refused"] | {name: contract["gemm"][name] for name in ("not transposed", "copied", "K of 320")}
    assert len(refused) == 9 and all(" b12x " in f" {message}" for message in refused.values()), refused
    assert "320" in refused["K of 320"] and "192" in refused["inner size"]


TABLE = recipes.load_engine(RECIPE).b12x
REQUEST = {
    "sm_count": TABLE.sm_count,
    "moe": [layer.model_dump() | {"tokens": [1, 8, 4096, 16384]} for layer in TABLE.moe],
    "gemm": [layer.model_dump() | {"rows": [1, 2]} for layer in TABLE.gemm[:1]],
}
"""A part of the recipe's kernels: for few tokens, two for more, and dense ones."""


@pytest.fixture(scope="module")
def compiled(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the image's program prints in the environment of the recipe."""
    request = tmp_path_factory.mktemp("request") / "request.json"
    request.write_text(json.dumps(REQUEST))
    program = data_root() / "image_programs" / "b12x" / "compile.py"
    return engine.sglang.answer(program, str(request), state="patched", variables=recipes.load_engine(RECIPE).env)


def test_sglang_finds_the_kernels_of_an_image_that_the_entrypoint_adds(engine: Engine, compiled: Any, tmp_path: Path) -> None:
    classes = [launch["kernel"] for kernel in compiled["kernels"] for launch in kernel["launches"]]
    assert classes == ["MoEMicroKernelSilu", *2 * ["_DynamicMoELaunch"], *2 * ["_DenseGemmLaunch"]]
    calls = [*(f"experts: {tokens} tokens" for tokens in (1, 8, 4096, 16384)), "GEMM: 1 x 1024 x 3072", "GEMM: 2 x 1024 x 3072"]
    lookup = partial(engine.run, "kernels", str(engine.model), stdin=json.dumps(REQUEST))
    cache = {"B12X_COMPILE_CACHE_DIR": str(tmp_path / "cache")}
    assert lookup(variables=cache) == dict.fromkeys(calls, False)
    shutil.copyfile(data_root() / "image_programs" / "serve.py", tmp_path / "serve.py")
    for path, content in compiled["entries"].items():
        entry = tmp_path / "b12x" / "entries" / path
        entry.parent.mkdir(parents=True, exist_ok=True)
        entry.write_bytes(base64.b64decode(content))
    add = "import runpy; runpy.run_path('serve.py')['add_b12x_entries']()"
    subprocess.run([sys.executable, "-c", add], cwd=tmp_path, env=os.environ | cache, check=True)
    assert lookup(variables=cache) == dict.fromkeys(calls, True)


def test_command_lines(engine: Engine) -> None:
    """The configuration passes SGLang's validation, and what b12x lacks is refused."""
    refusals = {
        "expert parallelism: --ep-size is 2": ["--ep-size", "2"],
        "no all-to-all: --moe-a2a-backend is 'deepep'": ["--moe-a2a-backend", "deepep"],
        "unset SGLANG_MOE_NVFP4_DISPATCH": [],
        "needs --quantization modelopt_fp4": ["--quantization", "fp8"],
    }
    lines = {message: [*engine.command, *more] for message, more in refusals.items()}
    lines["unset SGLANG_MOE_NVFP4_DISPATCH"].insert(0, "SGLANG_MOE_NVFP4_DISPATCH")
    answers = engine.answers(lines | {"": engine.command})
    chosen = answers.pop("")
    assert isinstance(chosen, dict), chosen
    names = ("moe_runner_backend", "speculative_moe_runner_backend", "fp4_gemm_runner_backend")
    assert {chosen[name] for name in names} == {"b12x"}
    assert chosen["attention_backend"] == "flashinfer" and chosen["kv_cache_dtype"] == "fp8_e4m3"
    assert all(isinstance(answer, str) and message in answer for message, answer in answers.items()), answers


def test_without_b12x_sglang_selects_what_it_selects_unpatched(engine: Engine) -> None:
    line = engine.without_b12x
    lines = {"default": line}
    for option, choices in zip(OPTIONS, (("flashinfer_cutlass", "triton"), ("flashinfer_cutlass",)), strict=True):
        lines |= {f"{option} {choice}": [*line, option, choice] for choice in choices}
    released, patched = (engine.answers(lines, state) for state in STATES)
    assert patched == released
    assert all(isinstance(answer, dict) for answer in patched.values()), patched
