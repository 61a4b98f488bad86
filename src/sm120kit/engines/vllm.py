"""vLLM."""

from __future__ import annotations

from sm120kit.engines.engine import MASTER_PORT, ApiKey, Engine, Node


class Vllm(Engine):
    """vLLM, whose metrics are always on."""

    def model_arguments(self, model: str) -> tuple[str, ...]:
        """The model is a positional argument."""
        return (model,)

    def node_arguments(self, node: Node) -> tuple[str, ...]:
        """Source: docs/serving/parallelism_scaling.md, "Running vLLM with MultiProcessing"."""
        master = ("--master-addr", node.addresses[0], "--master-port", str(MASTER_PORT))
        return (*super().node_arguments(node), *master, *["--headless"] * (node.rank > 0))


VLLM = Vllm(
    name="vllm",
    title="vLLM",
    port=8000,  # `vllm serve --help`
    api_key=ApiKey("VLLM_API_KEY"),  # envs.py
    host_variable="VLLM_HOST_IP",  # envs.py
    parallel={
        "tensor_parallel": ("--tensor-parallel-size", "-tp"),
        "pipeline_parallel": ("--pipeline-parallel-size", "-pp"),
    },
    optional={  # extras in its METADATA
        ("--load-format", "fastsafetensors"): "fastsafetensors",
        ("--load-format", "instanttensor"): "instanttensor",
        ("--load-format", "runai_streamer"): "runai-model-streamer",
        ("--load-format", "runai_streamer_sharded"): "runai-model-streamer",
        ("--load-format", "tensorizer"): "tensorizer",
        ("--moe-backend", "b12x"): "b12x",
        ("--linear-backend", "b12x"): "b12x",
    },
)
