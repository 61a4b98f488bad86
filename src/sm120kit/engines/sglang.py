"""SGLang."""

from __future__ import annotations

from collections.abc import Sequence

from sm120kit.engines.engine import MASTER_PORT, ApiKey, Engine, Node


class Sglang(Engine):
    """SGLang, which takes its API key only as an argument."""

    def model_arguments(self, model: str) -> tuple[str, ...]:
        """The model is the value of an option."""
        return ("--model-path", model)

    def metrics_arguments(self, arguments: Sequence[str]) -> tuple[str, ...]:
        """Metrics are off by default."""
        return () if "--enable-metrics" in arguments else ("--enable-metrics",)

    def node_arguments(self, node: Node) -> tuple[str, ...]:
        """Source: docs/references/multi_node_deployment."""
        head = node.addresses[0]
        return (*super().node_arguments(node), "--dist-init-addr", f"{f'[{head}]' if ':' in head else head}:{MASTER_PORT}")


SGLANG = Sglang(
    name="sglang",
    title="SGLang",
    port=30000,  # ServerArgs
    api_key=ApiKey("SM120KIT_API_KEY", ("--api-key", "$(SM120KIT_API_KEY)")),
    host_variable="SGLANG_HOST_IP",  # srt/utils/network.py
    options={
        "tensor_parallel": ("--tensor-parallel-size", "--tp-size"),
        "pipeline_parallel": ("--pipeline-parallel-size", "--pp-size"),
        "memory_share": ("--mem-fraction-static",),
        "context": ("--context-length",),
        "draft_steps": ("--speculative-num-steps",),
    },
    optional={
        ("--moe-runner-backend", "b12x"): "b12x",
        ("--fp4-gemm-backend", "b12x"): "b12x",
    },
    size_limit_bytes=18 * 2**30,
    in_head=("sglang-kernel",),
)
