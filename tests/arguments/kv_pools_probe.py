"""Print what SGLang keeps of a token for models by their ``config.json``; runs in a Python that has SGLang, without a GPU.

``kv_pools_probe.py SUITES defaults`` reads names of classes from stdin and prints the ``config.json`` of those whose
configuration class has defaults; ``kv_pools_probe.py SUITES pools`` reads cases ``{name: {"argv": [...], "config": {...}}}``
and prints ``{name: {"refusal": text, "kind": data type, "token": bytes, "tokens": number}}``: bytes per token on one GPU as
SGLang's own pool configurator computes them, and the tokens for which ``MEMORY`` suffices. ``SUITES`` is the directory of the
checks of images, whose stand-in for a GPU it uses. The cache has the type that SGLang selects for a checkpoint without
quantization.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import textwrap
import traceback
import types
from functools import partial
from pathlib import Path
from typing import Any

import kv_specs_probe

ARGUMENTS = ["--skip-tokenizer-init", "--trust-remote-code", "--context-length", "32768"]
MEMORY = 40_000_000_000


def defaults(classes: list[str]) -> dict[str, Any]:
    """The ``config.json`` of classes whose configuration class has defaults."""
    from sglang.srt.utils.hf_transformers.common import _CONFIG_REGISTRY

    return kv_specs_probe.default_configs(classes, _CONFIG_REGISTRY)


def pool(case: dict[str, Any]) -> dict[str, Any]:
    """What the pool configurator computes, of a model that is not built."""
    import select_backends
    import torch
    from sglang.srt import runtime_context
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype
    from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator
    from sglang.srt.server_args import ServerArgs

    with tempfile.TemporaryDirectory() as directory:
        path = str(select_backends.write_model({"repository": "a/b", "config": case["config"]}, Path(directory)))
        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        whole = case["argv"] if "/model" in case["argv"] else ["--model-path", "/model", *ARGUMENTS, *case["argv"]]
        server = ServerArgs.from_cli_args(parser.parse_args([path if word == "/model" else word for word in whole]))
        server.resolve_once()
        model = ModelConfig.from_server_args(server)
        runtime_context.publish(server, role="scheduler")
        asked = runtime_context.get_model().kv_cache_dtype
        name, kind = configure_kv_cache_dtype(
            server_args_kv_cache_dtype=asked,
            model=None,
            model_dtype=torch.bfloat16,
            is_draft_worker=False,
            is_dflash=False,
            speculative_draft_attention_backend="",
        )
        pools = create_memory_pool_configurator(configurator(server, model, name or asked, kind))
        size = pools._cell_size if hasattr(pools, "_cell_size") else pools.bytes_per_full_token
        tokens = pools.calculate_pool_sizes(MEMORY, runtime_context.get_schedule().page_size or 1).max_total_num_tokens
        return {"refusal": "", "kind": str(kind).removeprefix("torch."), "token": float(size), "tokens": int(tokens)}


def configurator(server: Any, model: Any, name: str, kind: Any) -> Any:
    """What SGLang's worker makes pools with, for one GPU and a model of which nothing but its configuration is known."""
    import torch
    from sglang.srt import runtime_context
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.model_executor.model_runner_components.layer_setup import resolve_layer_indices
    from sglang.srt.model_executor.model_runner_components.load_model_utils import resolve_sliding_window_size
    from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import SpecAuxHiddenStateConfig
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    absent = types.SimpleNamespace()
    return KVCacheConfigurator(
        device="cuda",
        gpu_id=0,
        attn_dp_size=1,
        pp_size=1,
        pp_group=None,
        model=absent,
        model_config=model,
        server_args=server,
        kv_cache_dtype=kind,
        model_dtype=torch.bfloat16,
        page_size=runtime_context.get_schedule().page_size or 1,
        sliding_window_size=resolve_sliding_window_size(absent, model),
        spec_algorithm=SpeculativeAlgorithm.NONE,
        is_draft_worker=False,
        post_capture_kv_active=False,
        spec_aux_config=SpecAuxHiddenStateConfig(),
        is_hybrid_swa=model.is_hybrid_swa,
        is_hybrid_swa_compress=model.is_hybrid_swa_compress,
        use_mla_backend=model.attention_arch == AttentionArch.MLA,
        layer_info=resolve_layer_indices(model=absent, model_config=model, is_draft_worker=False),
        forward_stream=None,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=None,
        memory_pool_config=None,
        kv_cache_dtype_str=name,
    )


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """The pool's size, or why SGLang does not take the model."""
    try:
        return pool(case)
    except SystemExit as end:
        return {"refusal": f"exit code {end.code}"}
    except Exception as error:
        traceback.print_exc()
        return {"refusal": textwrap.shorten(f"{type(error).__name__}: {error}", 200)}


def main() -> None:
    """Answer on stdout; all else goes to stderr."""
    suites, command = Path(sys.argv[1]), sys.argv[2]
    sys.path[:0] = [str(suites / "engine"), str(suites / "sglang")]
    os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # of defaults, some are short
    stdout = os.dup(1)
    os.dup2(2, 1)
    import gpu

    gpu.install(kv_specs_probe.GPU)
    import backends

    backends.prepare()
    given = json.load(sys.stdin)
    if command == "defaults":
        answers = defaults(given)
    else:
        answers = gpu.forked({name: partial(answer, case) for name, case in given.items()}, 2)
    os.write(stdout, json.dumps(answers).encode())


if __name__ == "__main__":
    main()
