"""SGLang."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sm120kit.engines.engine import MASTER_PORT, ApiKey, Engine, LogSigns, Metrics, Node


class Sglang(Engine):
    """SGLang, which takes its API key only as an argument."""

    def settings(self, info: Mapping[str, Any], metrics: str) -> dict[str, Any]:
        """The server's arguments, beside which the answer has state."""
        return {name: value for name, value in info.items() if not _NOT_SETTINGS.fullmatch(name)}

    def prompt_request(self, model: str, tokens: Sequence[Sequence[int]], top: int) -> tuple[str, dict[str, Any]]:
        """``input_top_logprobs`` of ``/generate`` (0.5.23, managers/tokenizer_manager.py)."""
        if top < 1:
            raise ValueError("requires a number of tokens")
        return "/generate", {
            "input_ids": [list(window) for window in tokens],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": top,
        }

    def prompt_positions(self, answer: Any) -> list[list[list[tuple[Any, Any]]]]:
        """An entry is a list of (log-probability, id, text)."""
        listed = [result["meta_info"]["input_top_logprobs"][1:] for result in answer]
        return [[[(token, value) for value, token, *_ in place] for place in places] for places in listed]

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


_NOT_SETTINGS = re.compile(
    r"status|internal_states|startup_time|max_total_num_tokens|max_req_input_len|hicache_object_layout|kv_event_sources"
    r"|kv_events|launch_command|random_seed|.*port|.*(?:api_key|password|watermark_key).*"
)
"""Keys of ``/get_server_info`` that are state, drawn or measured at each start, or secret (0.5.11 and 0.5.23,
srt/entrypoints/http_server.py ``server_info``, srt/managers/scheduler.py ``get_init_info``)."""


def parser(stand_in: Callable[..., None]) -> tuple[argparse.ArgumentParser, Callable[[list[str]], object]]:
    """The parser of ``sglang.launch_server``."""
    import argparse

    # Imported with the parser but not used by it: code for GPUs, or built for a torch with CUDA.
    stand_in("torchvision", "sgl_kernel", "flashinfer")
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(prog="sglang.launch_server")
    ServerArgs.add_cli_args(parser)
    return parser, parser.parse_args


SGLANG = Sglang(
    name="sglang",
    title="SGLang",
    first_release="0.5.9",
    port=30000,  # ServerArgs
    parser=parser,
    repository="sgl-project/sglang",
    log=LogSigns(
        words=(
            b"sglang",
            b"sgl_kernel",
            b"launch_server",
            b"scheduler hit an exception",
            b"received sigquit from a child process",
            b"server_args=serverargs(",
            b"decode batch",
            b"prefill batch",
            b"the server is fired up and ready to roll",
        ),
        texts="sglang",
        version=rb"sglang(?:==| version ?:?|:) ?",
    ),
    api_key=ApiKey("SM120KIT_API_KEY", ("--api-key", "$(SM120KIT_API_KEY)")),
    host_variable="SGLANG_HOST_IP",  # srt/utils/network.py
    options={
        "tensor_parallel": ("--tensor-parallel-size", "--tp-size"),
        "pipeline_parallel": ("--pipeline-parallel-size", "--pp-size"),
        "memory_share": ("--mem-fraction-static",),
        "context": ("--context-length",),
        "draft_steps": ("--speculative-num-steps",),
    },
    # 0.5.11 and 0.5.23, srt/observability/metrics_collector.py. cached_tokens is absent before the first hit; the gauge
    # sglang:cache_hit_rate is that of the latest batch, and 0 in each that decodes. Acceptance is of the latest 40 steps or
    # --decode-log-interval (0.5.11, srt/observability/scheduler_metrics_mixin.py). gen_throughput stays when no request runs.
    metrics=Metrics(
        running="sglang:num_running_reqs",
        waiting="sglang:num_queue_reqs",
        kv_cache="sglang:token_usage",
        prompt_tokens="sglang:prompt_tokens_total",
        cached_tokens="sglang:cached_tokens_total",
        accept_rate="sglang:spec_accept_rate",
        accept_length="sglang:spec_accept_length",
        throughput="sglang:gen_throughput",
    ),
    info_path="/get_server_info",
    counts_tokens=True,  # 0.5.11, srt/entrypoints/openai/protocol.py
    optional={
        ("--moe-runner-backend", "b12x"): "b12x",
        ("--fp4-gemm-backend", "b12x"): "b12x",
    },
    size_limit_bytes=18 * 2**30,
    in_head=("sglang-kernel",),
)
