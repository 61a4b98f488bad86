"""Print vLLM's own KV cache specifications of models by their ``config.json``; runs in a Python that has vLLM, without a GPU.

``kv_specs_probe.py SUITES defaults`` prints a case for each class of vLLM's registry whose configuration class has defaults;
``kv_specs_probe.py SUITES specs`` reads cases ``{name: {"argv": [...], "config": {...}}}`` from stdin and prints ``{name:
{"refusal": text, "rows": [[kind, bytes, window, layers], ...]}}``: bytes per token, or of a state, with the layers of a kind.
``SUITES`` is the directory of the checks of images, whose stand-in for a GPU it uses.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import textwrap
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

GPU = {"name": "NVIDIA RTX PRO 6000", "capability": [12, 0], "multiprocessors": 188, "memory_gb": 96.0}
ARGUMENTS = ["/model", "--skip-tokenizer-init", "--trust-remote-code", "--dtype", "bfloat16"]
LONGEST = 131_072


def defaults() -> dict[str, Any]:
    """A case for each class of the registry, with the defaults of its configuration class in transformers or vLLM."""
    import vllm.transformers_utils.config as own
    from vllm.model_executor.models import registry

    cases = {}
    names = {**registry._TEXT_GENERATION_MODELS, **registry._MULTIMODAL_MODELS}
    for name, config in default_configs(names, own._CONFIG_REGISTRY).items():
        longest = config.get("max_position_embeddings") or (config.get("text_config") or {}).get("max_position_embeddings")
        length = ["--max-model-len", str(min(longest, LONGEST))] if longest else []
        blocks = ["--block-size", "256"] if "V4" in name else []
        cases[name] = {"argv": [*ARGUMENTS, *length, *blocks], "config": config}
    return cases


def default_configs(names: Iterable[str], own: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The ``config.json`` of classes whose configuration class, in transformers or an engine's ``own``, has defaults."""
    warnings.simplefilter("ignore")
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    types: dict[str, str] = {}
    for name, mapping in vars(modeling_auto).items():
        if name.startswith("MODEL_") and name.endswith("MAPPING_NAMES"):
            for kind, classes in mapping.items():
                for each in [classes] if isinstance(classes, str) else classes:
                    types.setdefault(each, kind)
    by_stem = {re.sub(r"[^a-z0-9]", "", kind): kind for kind in (*CONFIG_MAPPING, *own)}
    found = {}
    for name in names:
        stem = re.sub(r"[^a-z0-9]", "", re.sub(r"(For[A-Z]\w+|Model|LMHeadModel)$", "", name).lower())
        kind = types.get(name) or by_stem.get(stem)
        if kind is None:
            continue
        try:
            made = (own[kind] if kind in own else CONFIG_MAPPING[kind])()
            config = made.to_dict() | {"architectures": [name], "model_type": kind}
            json.dumps(config)
        except Exception:  # a class without defaults
            continue
        found[name] = config
    return found


def row(spec: Any) -> tuple[str, float, int | None]:
    """Kind, bytes per token or of a state, and window of a layer's specification."""
    kind = type(spec).__name__
    if kind == "MambaSpec":
        return kind, spec.state_content_size_bytes, None
    ring = spec.block_size if kind == "CircularBufferSpec" else None
    window = ring or getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    return kind, spec.real_page_size_bytes / spec.block_size, window


def specs(case: dict[str, Any]) -> dict[str, Any]:
    """The specifications of all layers of a model that is built on torch's meta device."""
    import backends
    import gpu
    import select_backends
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.usage.usage_lib import UsageContext

    gpu.install(GPU)
    with tempfile.TemporaryDirectory() as directory:
        model = str(select_backends.write_model({"repository": "a/b", "config": case["config"]}, Path(directory)))
        argv = [model if argument == "/model" else argument for argument in case["argv"]]
        config = AsyncEngineArgs.from_cli_args(backends.parse(argv)).create_engine_config(UsageContext.OPENAI_API_SERVER)
        with set_current_vllm_config(config):
            gpu.fake_process_groups(1)
            parallel_state.init_distributed_environment(1, 0, "env://", 0, "fake")
            parallel_state.initialize_model_parallel(1)
            torch.set_default_dtype(config.model_config.dtype)
            with torch.device("meta"), gpu.on_meta():
                initialize_model(vllm_config=config)
            layers = config.compilation_config.static_forward_context.values()
            found = (layer.get_kv_cache_spec(config) for layer in layers if hasattr(layer, "get_kv_cache_spec"))
            rows = Counter(row(spec) for spec in found if spec is not None)
    return {"refusal": "", "rows": [[*each, number] for each, number in rows.items()]}


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """The specifications, or why vLLM does not build the model."""
    try:
        return specs(case)
    except SystemExit as end:
        return {"refusal": f"exit code {end.code}", "rows": []}
    except Exception as error:
        traceback.print_exc()
        return {"refusal": textwrap.shorten(f"{type(error).__name__}: {error}", 200), "rows": []}


def main() -> None:
    """Answer on stdout; all else goes to stderr."""
    suites, command = Path(sys.argv[1]), sys.argv[2]
    sys.path[:0] = [str(suites / "engine"), str(suites / "vllm")]
    stdout = os.dup(1)
    os.dup2(2, 1)
    import gpu

    gpu.install(GPU)
    import backends

    backends.prepare()
    if command == "defaults":
        answers = defaults()
    else:
        answers = gpu.forked({name: partial(answer, case) for name, case in json.load(sys.stdin).items()}, 2)
    os.write(stdout, json.dumps(answers).encode())


if __name__ == "__main__":
    main()
