"""What SGLang selects for a command line on a GPU that is not there; for ``../engine/select_backends.py``.

A command line takes SGLang's own way up to the scheduler: parser, resolution of ``ServerArgs`` (0.5.11: its ``__post_init__``)
with the model's ``config.json``, ``ModelConfig``, and the GEMM back-ends, which the scheduler decides before it loads a model.
Layers are not created: what they select after that is not in the answer.
"""

import argparse
import importlib
import inspect
from typing import Any

USES = {
    "attention": ("attention_backend",),
    "attention, prefill": ("prefill_attention_backend",),
    "attention, decode": ("decode_attention_backend",),
    "attention of images": ("mm_attention_backend",),
    "linear attention": ("linear_attn_backend", "mamba_backend"),
    "KV cache": ("kv_cache_dtype",),
    "experts": ("moe_runner_backend",),
    "draft: experts": ("speculative_moe_runner_backend",),
    "sampling": ("sampling_backend",),
    "state of linear attention": ("mamba_scheduler_strategy",),
}
"""Fields of ``ServerArgs`` by use. A field that is None was not decided there."""


def prepare() -> None:
    """Import what all configurations share, once."""
    import sglang.srt.configs.model_config
    import sglang.srt.server_args  # noqa: F401


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
        if chosen := [str(value) for value in values if value is not None]:
            selected[use] = chosen
    if resolved.speculative_algorithm is None:
        selected.pop("draft: experts", None)
    return selected | {"layers": [f"{kind}: {gemm(kind, server)}" for kind in ("fp4", "fp8")]}


def gemm(kind: str, server: Any) -> str:
    """The back-end of the GEMMs of linear layers with this type of weights, as the scheduler initializes it."""
    module = importlib.import_module(f"sglang.srt.layers.quantization.{kind}_utils")
    initialize = getattr(module, f"initialize_{kind}_gemm_config")
    if inspect.signature(initialize).parameters:
        initialize(server)
    else:  # 0.5.23: it reads what the process published
        importlib.import_module("sglang.srt.runtime_context").publish(server, role="scheduler")
        initialize()
    return str(getattr(module, f"get_{kind}_gemm_runner_backend")().value)
