"""What SGLang selects for a command line on a GPU that is not there; for ``../engine/select_backends.py``.

A command line takes SGLang's own way up to the scheduler: parser, resolution of ``ServerArgs`` (0.5.11: its ``__post_init__``)
with the model's ``config.json``, and ``ModelConfig``. Layers are not created: what they select after that is not in the answer.
"""

from __future__ import annotations

import argparse

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
        if chosen := [
            f"{name.partition('_gemm')[0]}: {value}" if use == "layers" else str(value)
            for name, value in zip(names, values, strict=True)
            if value is not None
        ]:
            selected[use] = chosen
    return selected
