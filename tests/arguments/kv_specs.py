"""Compare what sm120kit computes of a model's KV cache with vLLM's own specifications: ``kv_specs.py [RECIPE]``.

vLLM's classes are built on torch's meta device, each with the defaults of its configuration class and with the ``config.json``
in ``recipes/checkpoints/``, in the environment of ``backends.py``. The specifications are written with those keys of
``config.json`` that matter to ``tests/unit/data/kv_specs.json``; ``test_kv_specs.py`` compares them.

For a recipe of SGLang, what its pools keep of a token of the same kinds of models is written to ``kv_pools.json`` for
``test_kv_pools.py``.

About 10 GB of disk, and an hour of two cores for some 200 classes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import backends

from sm120kit.core.data_roots import data_root
from sm120kit.engines import parser
from sm120kit.recipes.architectures import language_model
from sm120kit.serving import _kv_layout as kv_layout

DATA = Path(__file__).parents[1] / "unit" / "data" / "kv_specs.json"
MODELS = Path(__file__).with_name("kv_models.json")
"""``config.json`` of models whose configuration class has no default, or another one: facts from public engines' tests."""
PROBE, POOLS_PROBE = (Path(__file__).with_name(f"kv_{kind}_probe.py") for kind in ("specs", "pools"))
POOLS = DATA.with_name("kv_pools.json")
VARIANTS = {
    "deepseek-ai/DeepSeek-V4-Flash-0731": ["--max-running-requests 4", "--swa-full-tokens-ratio 0.5"],
    "deepseek-ai/DeepSeek-V4.1-Flash": ["--max-running-requests 4", "--swa-full-tokens-ratio 0.5"],
    "festr2/GLM-5-NVFP4-MTP": ["--kv-cache-dtype bf16"],
    "nvidia/GLM-5.3-Flash-NVFP4": ["--kv-cache-dtype bf16"],
}
"""Options of SGLang that change the pools of a model."""


def main() -> None:
    name = (sys.argv[1:] or ["vllm-0.33.0"])[0]
    with tempfile.TemporaryDirectory(prefix="sm120kit-kv-") as scratch:
        python, env = backends.engine_environment(name, Path(scratch))
        if name.startswith("sglang"):
            write_pools(name, python, env)
            return
        cases = ask(python, env, "defaults", {}) | recorded()
        write(name, cases, ask(python, env, "specs", cases))


def ask(python: Path, env: dict[str, str], command: str, cases: dict[str, Any]) -> dict[str, Any]:
    """What the probe prints in an environment."""
    return _answers([python, PROBE, backends.SUITES, command], env, cases)


def _answers(argv: list[Any], env: dict[str, str], given: Any) -> dict[str, Any]:
    done = subprocess.run(argv, input=json.dumps(given), env=env, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout))


def write_pools(name: str, python: Path, env: dict[str, str]) -> None:
    """Write a line for each model and its variants: keys that matter, arguments, and what SGLang keeps."""
    probe = [python, POOLS_PROBE, backends.SUITES]
    record = parser.load(name)
    assert record
    configs = pool_defaults(python, env, record.models["architectures"])
    configs |= {model: case["config"] for model, case in recorded().items()}
    cases = {}
    for model, config in configs.items():
        for options in ["", *VARIANTS.get(model, [])]:
            cases[f"{model} {options}".strip()] = {"argv": options.split(), "config": config}
    lines = []
    for case, found in sorted(_answers([*probe, "pools"], env, cases).items()):
        config = cases[case]["config"]
        known = {"config": needed(language_model(config)) | {"architectures": config.get("architectures")}}
        entry = found if found["refusal"] else found | {"argv": cases[case]["argv"]} | known
        lines.append(f"{json.dumps(case)}: {json.dumps(entry)}")
    POOLS.write_text(f'{{"recipe": {json.dumps(name)}, "cases": {{\n' + ",\n".join(lines) + "\n}}\n")


def pool_defaults(python: Path, env: dict[str, str], classes: tuple[str, ...]) -> dict[str, Any]:
    """The ``config.json`` of SGLang's classes whose configuration class has defaults."""
    return _answers([python, POOLS_PROBE, backends.SUITES, "defaults"], env, classes)


def recorded() -> dict[str, Any]:
    """Cases of known ``config.json``, without quantization, which does not change the cache."""
    models = dict(json.loads(MODELS.read_text()))
    for path in sorted((data_root() / "recipes" / "checkpoints").glob("*.json")):
        model = json.loads(path.read_text())
        models[model["repository"]] = {key: value for key, value in model["config"].items() if key != "quantization_config"}
    argv = ["/model", "--skip-tokenizer-init", "--trust-remote-code", "--dtype", "bfloat16", "--max-model-len", "65536"]
    return {
        name: {"argv": [*argv, *["--block-size", "256"] * ("V4" in name)], "config": config} for name, config in models.items()
    }


def write(name: str, cases: dict[str, Any], answers: dict[str, Any]) -> None:
    """Write a line for each case: its keys that matter and vLLM's specification, or why there is none."""
    lines = []
    for case, answer in sorted(answers.items()):
        entry = {"refusal": answer["refusal"]} if answer["refusal"] else {"rows": answer["rows"]}
        text = language_model(cases[case]["config"])
        lines.append(f"{json.dumps(case)}: {json.dumps(entry | ({} if answer['refusal'] else {'config': needed(text)}))}")
    DATA.write_text(f'{{"recipe": {json.dumps(name)}, "cases": {{\n' + ",\n".join(lines) + "\n}}\n")


def needed(text: dict[str, Any]) -> dict[str, Any]:
    """The keys that :mod:`sm120kit.serving._kv_layout` reads, or that make a size unknown."""
    config = kv_layout._Config(text)
    with suppress(kv_layout._Unknown):
        kv_layout._kv_cache(config)
    matters = config.read | {key for key in text if kv_layout._IRREGULAR.search(key) and not kv_layout._OTHERS.search(key)}
    return {key: value for key, value in text.items() if key in matters and value not in (None, [], {}, "", False)}


if __name__ == "__main__":
    main()
