"""Print what SGLang selects for configurations on a GPU that is not there; run by a Python that has the engine.

Input and output are those of ``select_vllm.py``. Each command line takes SGLang's own way up to the scheduler: parser,
resolution of ``ServerArgs`` (0.5.11: its ``__post_init__``) with the model's ``config.json``, and ``ModelConfig``. Layers are
not created: what they select after that is not in the answer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import traceback
from typing import Any

import gpu

USES = {
    "attention": ("attention_backend",),
    "attention, prefill": ("prefill_attention_backend",),
    "attention, decode": ("decode_attention_backend",),
    "attention of images": ("mm_attention_backend",),
    "linear attention": ("linear_attn_backend", "mamba_backend"),
    "KV cache": ("kv_cache_dtype",),
    "experts": ("moe_runner_backend",),
    "draft: experts": ("speculative_moe_runner_backend",),
    "layers": ("fp4_gemm_runner_backend", "fp8_gemm_runner_backend"),
    "sampling": ("sampling_backend",),
    "state of linear attention": ("mamba_scheduler_strategy",),
}
"""Fields of ``ServerArgs`` by use. A field that is None was not decided there."""


def select(argv: list[str]) -> dict[str, list[str]]:
    """The back-ends by use after SGLang's validation of a command line. Raises SGLang's own errors."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(prog="sglang.launch_server")
    ServerArgs.add_cli_args(parser)
    server = ServerArgs.from_cli_args(parser.parse_args(argv))
    resolved = server
    if hasattr(server, "resolve_once"):  # 0.5.23: decisions are kept apart from the arguments
        server.resolve_once()
        resolved = argparse.Namespace(**server.resolved_dict())
    if hasattr(server, "check_server_args"):
        server.check_server_args()
    model = ModelConfig.from_server_args(server)
    selected: dict[str, list[str]] = {"quantization": [str(model.quantization)]}
    for use, names in USES.items():
        values = [getattr(resolved, name, None) for name in names]
        if chosen := [
            f"{name.partition('_gemm')[0]}: {value}" if use == "layers" else str(value)
            for name, value in zip(names, values, strict=True)
            if value is not None
        ]:
            selected[use] = chosen
    return selected


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """The selection or the refusal for a configuration."""
    os.environ.update(case["environment"])
    gpu.install(gpu.gpu_from(case["gpu"]))
    try:
        return {"refusal": "", "selected": select(case["argv"])}
    except SystemExit as end:
        return {"refusal": f"exit code {end.code}", "selected": {}}
    except Exception as error:
        traceback.print_exc()
        return {"refusal": f"{type(error).__name__}: {error}", "selected": {}}


def main() -> None:
    """Answer for each configuration in a process of its own."""
    cases = json.load(sys.stdin)
    gpus = [gpu.gpu_from(case["gpu"]) for case in cases.values()]
    assert len({each.capability for each in gpus}) == 1, "the engine caches the capability: one kind of GPU a process"
    gpu.install(gpus[0])
    with contextlib.redirect_stdout(sys.stderr):
        import sglang.srt.configs.model_config
        import sglang.srt.server_args  # noqa: F401

        answers = {name: gpu.forked(answer, case) for name, case in cases.items()}
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
