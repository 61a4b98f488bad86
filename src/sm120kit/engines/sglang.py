"""SGLang."""

import argparse
import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from sm120kit.core.outside import integer, parse_json
from sm120kit.engines.engine import (
    MASTER_PORT,
    NCCL,
    OWN_OFF,
    AllReduce,
    ApiKey,
    Engine,
    LogSigns,
    Metrics,
    ModelParsers,
    Node,
    adapter,
    assigned,
    function,
    tested_texts,
    texts,
)


class Sglang(Engine):
    """SGLang, which takes its API key only as an argument."""

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

    def mtp_arguments(self, draft_tokens: int) -> tuple[str, ...]:
        """A chain of drafts; the number of draft tokens includes the verified one. DeepSeek-V4 has no other name for EAGLE."""
        return ("--speculative-algorithm", "EAGLE", *self._counts(draft_tokens, chain=True))

    def draft_arguments(self, method: str, repository: str, draft_tokens: int) -> tuple[str, ...]:
        """DFlash and DSpark draft a block at once, the others a chain."""
        counts = self._counts(draft_tokens, chain=method not in ("dflash", "dspark"))
        return ("--speculative-algorithm", method.upper(), "--speculative-draft-model-path", repository, *counts)

    def _counts(self, draft_tokens: int, *, chain: bool) -> Iterator[str]:
        numbers = {"num-steps": draft_tokens, "eagle-topk": 1} if chain else {}
        for name, number in {**numbers, "num-draft-tokens": draft_tokens + 1}.items():
            yield from (f"--speculative-{name}", str(number))

    def speculation(self, options: Mapping[str, str]) -> tuple[str, int, bool] | None:
        """``--speculative-algorithm``, which without a draft model uses the checkpoint's own layers, or n-grams.

        A chain has a token for each step; a tree or a block has the verified one among its draft tokens.
        """
        method = (options.get("--speculative-algorithm") or options.get("--speculative-algo") or "").lower()
        steps, branches, tokens = (
            self.integer(options.get(f"--speculative-{name}") or "") for name in ("num-steps", "eagle-topk", "num-draft-tokens")
        )
        count = steps if steps and branches in (None, 1) else (tokens or 2) - 1
        draft = options.keys() & {"--speculative-draft-model-path", "--speculative-draft-model"}
        return (method, max(count, 1), method in ("nextn", "eagle") and not draft) if method else None

    def model_names(self, package: Path) -> dict[str, list[str]]:
        """Source: ``EntryClass`` of srt/models, srt/configs/model_config.py (0.5.23). Parsers are choices of its options."""
        classes = [
            each.id
            for file in sorted((package / "sglang/srt/models").rglob("*.py"))
            if (value := assigned(file, "EntryClass"))
            for each in ast.walk(value)
            if isinstance(each, ast.Name)
        ]
        layers = package / "sglang/srt/layers/quantization/__init__.py"
        methods = [*texts(assigned(layers, "BASE_QUANTIZATION_METHODS"))]
        configs = package / "sglang/srt/configs/model_config.py"
        drafts = tested_texts(configs, "_config_draft_model")
        windows = [
            *texts(function(configs, "is_hybrid_swa_model")),
            *(name for constant in ("SWA_SINK_ARCHS", "MIMO_V2_MODEL_ARCHS") for name in texts(assigned(configs, constant))),
        ]
        pooling = {*tested_texts(configs, "is_generation_model")}
        return {
            "architectures": sorted({name for name in classes if _GENERATES.search(name)} - pooling),
            "pooling": sorted(pooling),
            "mtp": sorted(set(drafts)),
            "quantizations": sorted({*methods, "mxfp4"}),
            "windows": sorted({name for name in windows if _GENERATES.search(name) and name[:1].isupper()}),
        }

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


def _integer(text: str) -> int:
    """An integer; suffixes are powers of 1000 (``k``, ``M``, ``G``, ``T``), or of 1024 with an ``i``.

    Source: srt/utils/common.py (0.5.23).
    """
    match = re.fullmatch(r"(\d{1,20})(\.\d{1,20})?(Ki|Mi|Gi|Ti|k|M|G|T)", text.strip())
    if not match or (match[2] and match[3].endswith("i")):
        return integer(re.sub(r"(?<=\d)_(?=\d)", "", text.strip()))  # as Python's int()
    power = "KMGT".index(match[3][0].upper()) + 1
    return int(match[1]) * 1024**power if match[3].endswith("i") else int(Decimal(match[1] + (match[2] or "")) * 1000**power)


def _phases(text: str) -> object:
    """The JSON object of ``--cuda-graph-config``, of which only the keys and their kind are checked."""
    table = parse_json(text)
    if not isinstance(table, dict) or not all(isinstance(each, dict) for each in table.values()):
        raise argparse.ArgumentTypeError("not a JSON object of objects")
    if unknown := sorted(table.keys() - {"decode", "prefill"}):
        raise argparse.ArgumentTypeError(f"unknown phase {unknown[0][:80]!r}, not decode or prefill")
    return table


def _overrides(text: str) -> object:
    table = parse_json(text)
    if not isinstance(table, dict):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a JSON object")
    return table


_GENERATES = re.compile(r"^(?!.*(NextN|MTP|Eagle|DSpark|DFlash|Draft|Reward|Classification|Embedding|Assistant|Transformers))")
"""Classes of models that generate text by themselves. ``Transformers...`` stand in for all others."""


def parser(stand_in: Callable[..., None]) -> tuple[argparse.ArgumentParser, Callable[[list[str]], object]]:
    """The parser of ``sglang.launch_server``."""
    import argparse

    # Imported with the parser but not used by it: code for GPUs, or built for a torch with CUDA.
    stand_in("torchvision", "sgl_kernel", "flashinfer")
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(prog="sglang.launch_server")
    ServerArgs.add_cli_args(parser)
    return parser, parser.parse_args


PARSERS = (
    ModelParsers(r"^gpt_oss", "gpt-oss", "gpt-oss"),
    ModelParsers(r"^qwen3_?(5|6)|^qwen4|qwen3\.[5-9]", "qwen3", "qwen3_coder"),
    ModelParsers(r"^qwen3\S* .*coder", "", "qwen3_coder"),
    ModelParsers(r"^qwen3(_moe|_next)? .*instruct", "", "qwen"),
    ModelParsers(r"^qwen3(_moe|_next)? ", "qwen3", "qwen"),
    ModelParsers(r"^qwen2 .*r1-distill", "deepseek-r1", ""),
    ModelParsers(r"^qwen2(_moe)? ", "", "qwen"),
    ModelParsers(r"^deepseek_v41", "deepseek-v41", "deepseekv41"),
    ModelParsers(r"^deepseek_v4", "deepseek-v4", "deepseekv4"),
    ModelParsers(r"^deepseek_v32", "deepseek-v3", "deepseekv32"),
    ModelParsers(r"^deepseek_v3 .*v3\.1", "deepseek-v3", "deepseekv31"),
    ModelParsers(r"^deepseek_v3 .*r1", "deepseek-r1", "deepseekv3"),
    ModelParsers(r"^deepseek_v3 .*v3(-|$)", "", "deepseekv3"),
    ModelParsers(r"^glm5|^glm_moe_dsa|^glm4_moe_lite|^glm4_moe .*4\.7", "glm45", "glm47"),
    ModelParsers(r"^glm4(v|_moe|v_moe) ", "glm45", "glm"),
    ModelParsers(r"^minimax_m3", "minimax-m3", "minimax-m3"),
    ModelParsers(r"^minimax_m2", "minimax", "minimax-m2"),
    ModelParsers(r"^kimi_k3", "kimi_k3", "kimi_k3"),
    ModelParsers(r"^kimi_k2|kimi-k2", "kimi_k2", "kimi_k2"),
    ModelParsers(r"^gemma4", "gemma4", "gemma4"),
    ModelParsers(r"^nemotron_h\S* .*nemotron-3", "nemotron_3", "qwen3_coder"),
    ModelParsers(r"^mimo_v2", "mimo", "mimo"),
    ModelParsers(r"^(mistral3?|ministral3?) .*reasoning", "mistral", "mistral"),
    ModelParsers(r"^step3p5", "step3p5", "step3p5"),
    ModelParsers(r"^hy_v[34]", "hunyuan", "hunyuan"),
    ModelParsers(r"^inkling", "inkling", "inkling"),
    ModelParsers(r"^laguna", "poolside_v1", "poolside_v1"),
    ModelParsers(r"^llama4", "", "pythonic"),
    ModelParsers(r"^llama .*llama-3\.[1-3].*instruct", "", "llama3"),
)
"""Source: the models that each detector's docstring names, and SGLang's cookbook (0.5.23, srt/parser/reasoning_parser.py,
srt/function_call)."""


SGLANG = Sglang(
    name="sglang",
    title="SGLang",
    port=30000,  # ServerArgs
    parser=parser,
    parse_integer=_integer,
    types={
        "human_readable_int": _integer,
        "json_list_type": parse_json,
        "parse_cuda_graph_config_arg": _phases,
        "--json-model-override-args": _overrides,  # srt/configs/model_config.py: they update those of config.json
        "--lora-paths": lambda text: adapter(text.strip(), "lora_name", "lora_path"),  # srt/arg_groups/argparse_actions.py
    },
    repository="sgl-project/sglang",
    log=LogSigns(
        words=(
            "sglang",
            "sgl_kernel",
            "launch_server",
            "scheduler hit an exception",
            "received sigquit from a child process",
            "server_args=serverargs(",
            "decode batch",
            "prefill batch",
            "the server is fired up and ready to roll",
        ),
        texts=("sglang",),
        version=r"sglang(?:==| version ?:?|:) ?",
    ),
    api_key=ApiKey("SM120KIT_API_KEY", ("--api-key", "$(SM120KIT_API_KEY)")),
    host_variable="SGLANG_HOST_IP",  # srt/utils/network.py
    all_reduces={
        **NCCL,
        "custom": AllReduce(),
        # srt/environ.py of 0.5.23. Its own comes first where it has one (srt/distributed/parallel_state.py).
        "pcie-ipc": AllReduce(OWN_OFF, {"SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "1"}),
    },
    options={
        "tensor_parallel": ("--tensor-parallel-size", "--tp-size"),
        "pipeline_parallel": ("--pipeline-parallel-size", "--pp-size"),
        "memory_share": ("--mem-fraction-static",),
        "context": ("--context-length",),
        "step_tokens": ("--chunked-prefill-size",),
        "windows": ("--swa-full-tokens-ratio",),
        "states": ("--mamba-full-memory-ratio",),
        "draft_steps": ("--speculative-num-steps",),
        "kv_type": ("--kv-cache-dtype",),
        "reasoning_parser": ("--reasoning-parser",),
        "tool_parser": ("--tool-call-parser",),
        "model": ("--model-path", "--model"),
        "served_name": ("--served-model-name",),
        "host": ("--host",),
        "port": ("--port",),
        "revision": ("--revision",),
        "api_key": ("--api-key",),
        "nodes": ("--nnodes", "--node-rank", "--dist-init-addr", "--nccl-init-addr"),
    },
    files=(
        "--chat-template",
        "--completion-template",
        "--tool-server",
        "--config",
        "--decrypted-config-file",
        "--lmcache-config-file",
        "--pdmux-config-path",
        "--ssl-keyfile",
        "--ssl-certfile",
        "--ssl-ca-certs",
        "--tokenizer-path",
        "--speculative-draft-model-path",
        "--speculative-ngram-external-corpus-path",
        "--lora-paths",
        "--quantization-param-path",
    ),
    programs=("sglang.launch_server", "sglang serve"),
    model_parsers=PARSERS,
    share_of_free=True,  # at the start of the engine (0.5.23, srt/mem_cache/kv_cache_configurator.py)
    memory_share=0.85,  # activations and CUDA graphs are beside it
    fp8_cache="fp8_e4m3",
    quantizations={"gptq": "gptq_marlin", "auto-round": "auto-round"},
    other_gpus=frozenset({"w4afp8", "petit_nvfp4", "modelslim", "mxfp_w4a8"}),
    pools={"windows": 0.8, "states": 0.9},  # 0.5.23, srt/arg_groups/fields/schedule.py
    # 0.5.11 and 0.5.23, srt/observability/metrics_collector.py. cached_tokens is absent before the first hit; the gauge
    # sglang:cache_hit_rate is that of the latest batch, and 0 in each that decodes. Acceptance is of the latest 40 steps or
    # --decode-log-interval (0.5.11, srt/observability/scheduler_metrics_mixin.py). gen_throughput stays when no request runs.
    metrics=Metrics(
        prompt_tokens="sglang:prompt_tokens_total",
        cached_tokens="sglang:cached_tokens_total",
        accept_rate="sglang:spec_accept_rate",
        accept_length="sglang:spec_accept_length",
    ),
    info_path="/get_server_info",
    counts_tokens=True,  # 0.5.11, srt/entrypoints/openai/protocol.py
    salts_cache=True,
    optional={
        ("--moe-runner-backend", "b12x"): "b12x",
        ("--fp4-gemm-backend", "b12x"): "b12x",
    },
    size_limit_bytes=18 * 2**30,
)
