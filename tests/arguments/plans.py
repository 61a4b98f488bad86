"""Compare plans of repositories of the Hub with an engine itself: ``plans.py [RECIPE]``.

Repositories with the ``config.json`` of published models, or the defaults of classes of transformers and vLLM, and a shard of
the size of vLLM's parameters, are published by a Hub on this host. ``sm120kit plan`` derives a configuration of each; vLLM
takes its command line to the model on torch's meta device, in the environment of ``backends.py``. What both say is written to
``tests/unit/data/plans.json``; ``tests/unit/test_plans.py`` compares them.

SGLang selects without a model: its pools are compared, not its weights. Shards have the size of vLLM's record, and
``plans_sglang.json`` the answers; a repository that has no plan for SGLang has the reason.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import backends  # first: it adds tests/support to sys.path
import kv_specs
from huggingface_hub import constants
from model_hub import huge_shard, model_hub

from sm120kit.core.errors import Mismatch, NotFound
from sm120kit.engines import parser
from sm120kit.images import backends as recorded_backends
from sm120kit.recipes import arguments
from sm120kit.serving.flight_plan import flight_plan
from sm120kit.serving.served_model import ServeRequest, planned_model

ENGINE = "vllm-0.33.0"
DATA = Path(__file__).parents[1] / "unit" / "data" / "plans.json"
GPU = "rtx-pro-6000"
REPOSITORIES = {
    "Qwen3-8B": "Qwen3ForCausalLM",
    "Qwen3-30B-A3B": "Qwen3MoeForCausalLM",
    "Qwen3-Next-80B-A3B-Instruct": "Qwen3-Next 80B-A3B",
    "Qwen3.8-27B-FP8": "Qwen/Qwen3.8-27B-FP8",
    "Qwen3.6-27B-NVFP4": "nvidia/Qwen3.6-27B-NVFP4",
    "Qwen3.6-35B-A3B-NVFP4": "nvidia/Qwen3.6-35B-A3B-NVFP4",
    "Qwen3.5-122B-A10B-NVFP4": "txn545/Qwen3.5-122B-A10B-NVFP4",
    "MiniMax-M2.7-NVFP4": "nvidia/MiniMax-M2.7-NVFP4",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "GLM-5.3-Flash": "GLM-5.3-Flash",
    "Llama-3.1-8B-Instruct": "LlamaForCausalLM",
    "Llama-4-Scout-17B-16E-Instruct": "Llama 4 Scout",
    "Mixtral-8x7B-Instruct-v0.1": "MixtralForCausalLM",
    "gemma-4-26B-A4B-it": "Gemma 4 26B-A4B",
    "gemma-2-9b-it": "Gemma2ForCausalLM",
    "NVIDIA-Nemotron-3-Super-120B-A12B-BF16": "Nemotron-3 Super",
    "Kimi-Linear-48B-A3B-Instruct": "Kimi Linear 48B-A3B",
    "MiMo-V2-Flash": "MiMo-V2-Flash",
    "LFM2-1.2B": "LFM2 1.2B",
    "Falcon-H1-1.5B-Instruct": "FalconH1ForCausalLM",
    "granite-4.0-h-small": "GraniteMoeHybridForCausalLM",
    "Phi-4": "Phi3ForCausalLM",
}
"""Repositories by name, with the case of ``kv_specs.py`` whose ``config.json`` they have."""


def main() -> None:
    name = (sys.argv[1:] or [ENGINE])[0]
    with tempfile.TemporaryDirectory(prefix="sm120kit-plans-") as scratch:
        python, env = backends.engine_environment(name, Path(scratch))
        record(name, python, env)


def record(name: str, python: Path, env: dict[str, str]) -> None:
    """Write the record of an engine's recipe, with a Python that has the engine."""
    engine = name.partition("-")[0]
    every = defaults(name, python, env) | kv_specs.recorded()
    configs = {name: whole_config(case, every[case]["config"]) for name, case in REPOSITORIES.items()}
    sizes = weights(python, env, configs) if engine == "vllm" else recorded_weights()
    with hub(configs, sizes, engine) as plans:
        cases = {name: engine_case(name, configs[name], argv) for name, (_, argv) in plans.items() if argv}
        theirs = backends.probe(python, env, engine, cases)
    entries = {name: {"plan": plan, "engine": theirs.get(name, {})} for name, (plan, _) in plans.items()}
    lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items()]
    path = DATA if engine == "vllm" else DATA.with_name("plans_sglang.json")
    path.write_text(f'{{"recipe": {json.dumps(name)}, "repositories": {{\n' + ",\n".join(lines) + "\n}}\n")


def defaults(name: str, python: Path, env: dict[str, str]) -> dict[str, Any]:
    """Cases with the defaults of classes that an engine has."""
    if name.startswith("vllm"):
        return kv_specs.ask(python, env, "defaults", {})
    record = parser.load(name)
    assert record
    found = kv_specs.pool_defaults(python, env, record.models["architectures"])
    return {case: {"config": config} for case, config in found.items()}


def weights(python: Path, env: dict[str, str], configs: dict[str, Any]) -> dict[str, int]:
    """The bytes of vLLM's parameters on one GPU."""
    alone = {name: engine_case(name, config, ["/model"]) for name, config in configs.items()}
    return {name: answer["weights"] for name, answer in backends.probe(python, env, "vllm", alone).items()}


def recorded_weights() -> dict[str, int]:
    """The bytes of all GPUs in vLLM's record."""
    plans = {name: entry["plan"] for name, entry in json.loads(DATA.read_text())["repositories"].items()}
    return {name: plan["weights"] * plan["gpus"] for name, plan in plans.items()}


def whole_config(case: str, config: dict[str, Any]) -> dict[str, Any]:
    """The ``config.json`` of a case, with its quantization if it is one of a published checkpoint."""
    path = recorded_backends.recorded_config(case)
    return dict(json.loads(path.read_text())["config"]) if path.is_file() else config


def engine_case(name: str, config: dict[str, Any], argv: list[str]) -> dict[str, Any]:
    """A case of the probe."""
    gpu = {"name": "NVIDIA RTX PRO 6000", **recorded_backends.GPUS["RTX PRO 6000"]}
    return {"argv": argv, "environment": {}, "gpu": gpu, "model": {"repository": f"me/{name}", "config": config}}


@contextmanager
def hub(configs: dict[str, Any], sizes: dict[str, int], engine: str) -> Iterator[dict[str, tuple[dict[str, Any], list[str]]]]:
    """The plan and the command line of each repository, as a Hub on this host has it."""
    with tempfile.TemporaryDirectory() as text, model_hub("nobody/nothing", Path(text)) as running:
        constants.ENDPOINT, constants.HF_HUB_CACHE = running.url, text
        constants.HUGGINGFACE_CO_URL_TEMPLATE = f"{running.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        for name, config in configs.items():
            running.repositories[f"me/{name}"] = {
                "config.json": json.dumps(config).encode(),
                "model.safetensors": huge_shard(sizes[name] or 10**9),
            }
        yield {name: planned(f"me/{name}", engine) for name in configs}


def planned(repository: str, engine: str) -> tuple[dict[str, Any], list[str]]:
    """What a plan has on a repository, and the arguments of the server; without any, why the engine does not serve it."""
    try:
        served = planned_model(ServeRequest(repository, engine=engine, gpu=GPU), Path("/"))
    except (Mismatch, NotFound) as error:
        return {"refused": error.message}, []
    plan = flight_plan(served, (), Path("/"))
    known = {"gpus": plan.gpus, "arguments": plan.arguments, "weights": plan.memory.weight_bytes}
    known |= {"token": plan.memory.kv_bytes_per_token, "why": plan.memory.reason if plan.memory.fits is None else ""}
    known |= {"source": plan.backends.source, "selected": plan.backends.selected}
    return known, list(arguments.serve_arguments(served.configuration))


if __name__ == "__main__":
    main()
