"""vLLM."""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, cast

from sm120kit.core.errors import did_you_mean
from sm120kit.core.outside import MAX_DEPTH, integer, parse_json
from sm120kit.engines.engine import (
    MASTER_PORT,
    NCCL,
    AllReduce,
    ApiKey,
    Engine,
    LogSigns,
    Metrics,
    ModelParsers,
    Node,
    adapter,
    assigned,
    tested_texts,
    texts,
)


class Vllm(Engine):
    """vLLM, whose metrics are always on.

    Spelling is that of ``FlexibleArgumentParser`` (0.19.1 to 0.33.0, vllm/utils/argparse_utils.py).
    """

    def spelled(self, argv: Sequence[str]) -> list[str]:
        """Dashes for underscores, ``--optimization-level`` for ``-O``, and an option's dotted keys as one JSON object."""
        plain: list[str] = []
        objects: dict[str, dict[str, Any]] = {}
        following = iter(list(_dashed(argv)))
        for word in following:
            name, equals, value = word.partition("=")
            if name.startswith("-") and "." in name:
                keys = _nested(name, value if equals else next(following, None))
                _merge(objects.setdefault(name.partition(".")[0], {}), keys)
            else:
                plain.append(word)
        return [*plain, *(word for option, keys in objects.items() for word in (option, json.dumps(keys)))]

    def contradictions(self, options: Mapping[str, str], models: Mapping[str, Sequence[str]]) -> Iterator[str]:
        """Source: entrypoints/common/cli_args.py, ``validate_parsed_serve_args``, ``validate_api_server_args`` (0.33.0)."""
        tools = options.get("--tool-call-parser", "")
        if "--enable-auto-tool-choice" in options and tools in ("", "None"):
            yield "--enable-auto-tool-choice requires --tool-call-parser"
        elif "--enable-auto-tool-choice" in options and "--tool-parser-plugin" not in options:
            known = models.get("tools", ())
            if known and tools not in known:
                yield f"--tool-call-parser: no parser {tools[:80]!r}{did_you_mean(tools, known)}"
        yield from (f"{one} and {other} exclude each other" for one, other in _EXCLUSIVE if {one, other} <= options.keys())
        if _SUPERVISED in options:
            yield from _supervised(options)
        if "--enable-log-outputs" in options and "--enable-log-requests" not in options:
            yield "--enable-log-outputs requires --enable-log-requests"

    def hidden_names(self, names: Sequence[str]) -> tuple[str, ...]:
        """``--no-enable-x`` of ``--enable-x, --disable-x``, for names before its inverse (0.33.0, ``EnableDisableAction``)."""
        declared: list[str] = []
        for name in names:
            if _inverse(name) in declared:
                return tuple(f"--no-{each[2:]}" for each in declared if each.startswith("--"))
            declared.append(name)
        return ()

    def mtp_arguments(self, draft_tokens: int) -> tuple[str, ...]:
        """Draft tokens beyond the MTP layers are drafted by these again (0.33.0, vllm/config/speculative.py)."""
        return ("--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": draft_tokens}))

    def draft_arguments(self, method: str, repository: str, draft_tokens: int) -> tuple[str, ...]:
        table = {"method": method, "model": repository, "num_speculative_tokens": draft_tokens}
        return ("--speculative-config", json.dumps(table))

    def speculation(self, options: Mapping[str, str]) -> tuple[str, int, bool] | None:
        """``--speculative-config``; a method without a ``model`` is that of the checkpoint's own layers, or of n-grams."""
        try:
            table = parse_json(options.get("--speculative-config") or options["-sc"])
            method, count = str(table.get("method") or "draft_model"), int(table["num_speculative_tokens"])
        except (KeyError, ValueError, TypeError, AttributeError):
            return None
        return (method, count, "mtp" in method and not table.get("model")) if count > 0 else None

    def model_names(self, package: Path) -> dict[str, list[str]]:
        """Source: model_executor/models/registry.py, config/speculative.py, and the registries of parsers (0.33.0)."""
        models = package / "vllm/model_executor/models/registry.py"
        values = {
            "architectures": [
                *texts(assigned(models, "_TEXT_GENERATION_MODELS")),
                *texts(assigned(models, "_MULTIMODAL_MODELS")),
            ],
            "mtp": [*tested_texts(package / "vllm/config/speculative.py", "hf_config_override")],
            "quantizations": [
                *texts(assigned(package / "vllm/model_executor/layers/quantization/__init__.py", "QuantizationMethods"))
            ],
            "templates": [each.name for each in (package / "vllm/transformers_utils/chat_templates").glob("*.jinja")],
            "reasoning": [*texts(assigned(package / "vllm/reasoning/__init__.py", "_REASONING_PARSERS_TO_REGISTER"))],
            "tools": [*texts(assigned(package / "vllm/tool_parsers/__init__.py", "_TOOL_PARSERS_TO_REGISTER"))],
        }
        pooling = chain(*(texts(assigned(models, f"_{kind}_MODELS")) for kind in _POOLING))
        values["pooling"] = [*{*pooling} - {*values["architectures"]}]
        return {kind: sorted(set(names)) for kind, names in values.items()}

    def model_arguments(self, model: str) -> tuple[str, ...]:
        """The model is a positional argument."""
        return (model,)

    def node_arguments(self, node: Node) -> tuple[str, ...]:
        """Source: docs/serving/parallelism_scaling.md, "Running vLLM with MultiProcessing"."""
        master = ("--master-addr", node.addresses[0], "--master-port", str(MASTER_PORT))
        return (*super().node_arguments(node), *master, *["--headless"] * (node.rank > 0))


_POOLING = ("EMBEDDING", "LATE_INTERACTION", "REWARD", "TOKEN_CLASSIFICATION", "SEQUENCE_CLASSIFICATION")
_SUPERVISED = "--data-parallel-multi-port-external-lb"
_EXCLUSIVE = (
    ("--grpc", "--grpc-port"),
    ("--enable-per-request-metrics", "--disable-log-stats"),
    *(
        (name, _SUPERVISED)
        for name in (
            "--grpc",
            "--grpc-port",
            "--uds",
            "--data-parallel-rank",
            "--data-parallel-external-lb",
            "--data-parallel-hybrid-lb",
        )
    ),
)
"""Options that the server refuses together."""


def _supervised(options: Mapping[str, str]) -> Iterator[str]:
    """Source: entrypoints/launchers/dp_supervisor.py ``validate_multi_port_external_lb_args`` (0.33.0)."""
    size, local = (options.get(name, "1") for name in ("--data-parallel-size", "--data-parallel-size-local"))
    if size.isdecimal() and local.isdecimal() and (int(local) < 2 or int(size) < int(local) or int(size) % int(local)):
        yield f"{_SUPERVISED} requires --data-parallel-size-local above 1 that divides --data-parallel-size"
    if options.get("--api-server-count", "1") not in ("1", "None", ""):
        yield f"{_SUPERVISED} requires --api-server-count 1"


def parser(stand_in: Callable[..., None]) -> tuple[argparse.ArgumentParser, Callable[[list[str]], object]]:
    """The parser of ``vllm serve``, with the validation of its values that follows."""
    import contextlib
    import importlib

    from vllm import platforms
    from vllm.platforms.cpu import CpuPlatform

    platforms._current_platform = CpuPlatform()  # no platform is detected without a GPU, and defaults need a platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for package in ("common", "launchers", "openai"):  # of 0.33, of 0.32, before
        with contextlib.suppress(ModuleNotFoundError):
            cli_args = importlib.import_module(f"vllm.entrypoints.{package}.cli_args")
            break
    last = getattr(cli_args, "validate_api_server_args", None)
    if last is None:  # before 0.33
        last = importlib.import_module("vllm.entrypoints.openai.api_server").validate_api_server_args
    parser = cli_args.make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    parser.register("dataclass", "--speculative-config", importlib.import_module("vllm.config").SpeculativeConfig)

    def parse(argv: list[str]) -> object:
        parsed = parser.parse_args(argv)
        cli_args.validate_parsed_serve_args(parsed)
        last(parsed)
        return parsed

    return parser, parse


def _inverse(name: str) -> str:
    prefixes = {"--enable-": "--disable-", "--disable-": "--enable-"}
    return next((other + name.removeprefix(prefix) for prefix, other in prefixes.items() if name.startswith(prefix)), "")


def _settings_file(text: str) -> None:
    if text.rpartition(".")[2] not in ("yaml", "yml"):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is no .yaml or .yml file")


def _template(text: str) -> None:
    """A chat template or a file; without either form the server searches a file of that name, which images have not."""
    if not re.search(r"[{}\n/.]", text):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is neither a template nor a file")


def _efforts(text: str) -> None:
    """``ReasoningEffort`` of renderers/params.py (0.33.0)."""
    table = parse_json(text)
    if table is not None and not (isinstance(table, dict) and all(isinstance(each, str) for each in table.values())):
        raise argparse.ArgumentTypeError("not a JSON object of texts")
    if unknown := sorted({*(table or ())} - {"none", "minimal", "low", "medium", "high", "xhigh", "max"}):
        raise argparse.ArgumentTypeError(f"unknown effort {unknown[0][:80]!r}")


def _limited(text: str, limit: int) -> None:
    if not 0 <= int(text) <= limit:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to {limit}")


def _integer(text: str) -> int:
    """An integer; suffixes are powers of 1000 (``k``, ``m``, ``g``, ``t``), or of 1024 (``K``, ``M``, ``G``, ``T``)."""
    match = re.fullmatch(r"(\d{1,20})(\.\d{1,20})?([kmgtKMGT])", text.strip())
    if not match or (match[2] and match[3].isupper()):
        return integer(re.sub(r"(?<=\d)_(?=\d)", "", text.strip()))  # as Python's int()
    power = "kmgt".index(match[3].lower()) + 1
    return int(match[1]) * 1024**power if match[3].isupper() else int(float(match[1] + (match[2] or "")) * 1000**power)


def _json(text: str) -> object:
    """JSON whose numbers may have a suffix."""
    return parse_json(_NUMBER.sub(lambda match: str(_integer(match[1])) if match[1] else match[0], text))


_NUMBER = re.compile(r'"(?:[^"\\]|\\.)*"|\b(\d{1,20}(?:\.\d{1,20})?[kKmMgGtT])\b')
"""Texts of JSON, and numbers outside of them that have a suffix."""


def _dashed(argv: Sequence[str]) -> Iterator[str]:
    """Words with dashes in the names of options, up to the first dot."""
    for word, following in pairwise([*argv, ""]):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            option, dot, keys = name.partition(".")
            yield "".join((option.replace("_", "-"), dot, keys, equals, value))
        elif word.startswith("-O") and word != "-O":
            yield from ("--optimization-level", word[2:].removeprefix("="))
        else:
            yield "--optimization-level" if word == "-O" and following in ("0", "1", "2", "3") else word


def _nested(name: str, value: str | None) -> dict[str, Any]:
    """The object of an option's dotted keys: JSON or text, with ``+`` a list of texts."""
    _, *keys = name.removesuffix("+").split(".")
    if value is None or len(keys) > MAX_DEPTH:
        raise ValueError(f"argument {name[:80]}: expected one argument")
    content: Any = value.split(",")
    if not name.endswith("+"):
        try:
            content = parse_json(value)
        except ValueError:
            content = value
    return cast("dict[str, Any]", reduce(lambda inner, key: {key: inner}, reversed(keys), content))


def _merge(into: dict[str, Any], update: dict[str, Any]) -> None:
    """Add keys to an object: objects are merged, lists are joined, all else replaces."""
    for key, value in update.items():
        present = into.get(key)
        if isinstance(present, dict) and isinstance(value, dict):
            _merge(present, value)
        else:
            into[key] = [*present, *value] if isinstance(present, list) and isinstance(value, list) else value


PARSERS = (
    ModelParsers(r"^gpt_oss", "openai_gptoss", "openai"),
    ModelParsers(r"^qwen3_?(5|6)|^qwen4|qwen3\.[5-9]", "qwen3", "qwen3_xml"),
    ModelParsers(r"^qwen3\S* .*coder", "", "qwen3_xml"),
    ModelParsers(r"^qwen3(_moe|_next)? .*instruct", "", "hermes"),
    ModelParsers(r"^qwen3(_moe|_next)? ", "qwen3", "hermes"),
    ModelParsers(r"^qwen2 .*r1-distill", "deepseek_r1", ""),
    ModelParsers(r"^qwen2(_moe)? ", "", "hermes"),
    ModelParsers(r"^deepseek_v41", "deepseek_v41", "deepseek_v41"),
    ModelParsers(r"^deepseek_v4", "deepseek_v4", "deepseek_v4"),
    ModelParsers(r"^deepseek_v32", "deepseek_v3", "deepseek_v32"),
    ModelParsers(r"^deepseek_v3 .*v3\.1", "deepseek_v3", "deepseek_v31"),
    ModelParsers(r"^deepseek_v3 .*r1", "deepseek_r1", "deepseek_v3"),
    ModelParsers(r"^deepseek_v3 .*v3(-|$)", "", "deepseek_v3"),
    ModelParsers(r"^glm5|^glm_moe_dsa|^glm4_moe_lite|^glm4_moe .*4\.7", "glm47", "glm47"),
    ModelParsers(r"^glm4(v|_moe|v_moe) ", "glm45", "glm45"),
    ModelParsers(r"^minimax_m3", "minimax_m3", "minimax_m3"),
    ModelParsers(r"^minimax_m2", "minimax_m2", "minimax_m2"),
    ModelParsers(r"^kimi_k3", "kimi_k3", "kimi_k3"),
    ModelParsers(r"^kimi_k2|kimi-k2", "kimi_k2", "kimi_k2"),
    ModelParsers(r"^gemma4", "gemma4", "gemma4"),
    ModelParsers(r"^nemotron_h\S* .*nemotron-3", "nemotron_v3", "qwen3_coder"),
    ModelParsers(r"^mimo_v2", "mimo", "mimo"),
    ModelParsers(r"^(mistral3?|ministral3?) .*reasoning", "mistral", "mistral"),
    ModelParsers(r"^step3p5", "step3p5", "step3p5"),
    ModelParsers(r"^step5", "step5", "step5"),
    ModelParsers(r"^seed_oss", "seed_oss", "seed_oss"),
    ModelParsers(r"^hy_v4", "hy_v4", "hy_v4"),
    ModelParsers(r"^hy_v3", "hy_v3", "hy_v3"),
    ModelParsers(r"^inkling", "inkling", "inkling"),
    ModelParsers(r"^laguna", "poolside_v1", "poolside_v1"),
    ModelParsers(r"^llama4", "", "llama4_pythonic"),
    ModelParsers(r"^llama .*llama-3\.[1-3].*instruct", "", "llama3_json"),
)
"""Source: the models that each parser's docstring names, and vLLM's recipes (github.com/vllm-project/recipes)."""


VLLM = Vllm(
    name="vllm",
    title="vLLM",
    port=8000,  # `vllm serve --help`
    repository="vllm-project/vllm",
    log=LogSigns(
        words=("vllm", "(enginecore", "(apiserver pid="),
        texts=("vllm", "llm engine (", " version"),
        version=r"(?:vllm api server version|llm engine \(|vllm==|vllm version {0,40}:?|[\u2580-\u259f] {1,9}version"
        r"|utils\.py:\d{1,5}\] {1,40}version) ?",
    ),
    api_key=ApiKey("VLLM_API_KEY"),  # envs.py
    host_variable="VLLM_HOST_IP",  # envs.py
    all_reduces={
        **NCCL,
        "custom": AllReduce(),
        "pcie-ipc": AllReduce(environment={"VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC": "1"}),  # envs.py of 0.33.0
    },
    options={
        "tensor_parallel": ("--tensor-parallel-size", "-tp"),
        "pipeline_parallel": ("--pipeline-parallel-size", "-pp"),
        "memory_share": ("--gpu-memory-utilization",),
        "context": ("--max-model-len",),
        "step_tokens": ("--max-num-batched-tokens",),
        "kv_type": ("--kv-cache-dtype",),
        "reasoning_parser": ("--reasoning-parser",),
        "tool_parser": ("--tool-call-parser",),
        "model": ("--model",),
        "served_name": ("--served-model-name",),
        "host": ("--host",),
        "port": ("--port",),
        "revision": ("--revision",),
        "api_key": ("--api-key",),
        "nodes": ("--nnodes", "--node-rank", "--master-addr", "--master-port"),
    },
    files=(
        "--chat-template",
        "--speculative-config",
        "--reasoning-parser-plugin",
        "--tool-parser-plugin",
        "--config",
        "--log-config-file",
        "--ssl-keyfile",
        "--ssl-certfile",
        "--ssl-ca-certs",
        "--tokenizer",
        "--hf-config-path",
        "--generation-config",
        "--lora-modules",
        "--mm-encoder-fp8-scale-path",
        "--allowed-local-media-path",
    ),
    programs=("vllm serve", "vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main serve"),
    model_parsers=PARSERS,
    quantizations={"auto-round": "inc", "gptq": "gptq_marlin", "awq": "awq_marlin"},
    tool_arguments=("--enable-auto-tool-choice",),
    any_context="auto",
    parser=parser,
    parse_integer=_integer,
    types={
        "human_readable_int": _integer,
        "<lambda>": lambda text: text.lower().replace("-", "_"),  # of back-ends (engine/arg_utils.py)
        "parse_dataclass": _json,
        "--config": _settings_file,
        "--chat-template": _template,
        "--grpc-port": lambda text: _limited(text, 65_535),
        "--lora-modules": lambda text: adapter(text, "name", "path", json_only=bool(text) and ("=" not in text or "," in text)),
        "--reasoning-effort-map": _efforts,
        "--sse-keep-alive-interval": lambda text: _limited(text, sys.maxsize),
        "human_readable_int_or_auto": lambda text: -1 if text.strip().lower() == "auto" else _integer(text),
    },
    optional_types=frozenset(("_optional_type",)),
    metrics=Metrics(  # docs/usage/metrics; 0.19.1 and 0.33.0, vllm/v1/metrics/loggers.py
        prompt_tokens="vllm:prefix_cache_queries_total",
        cached_tokens="vllm:prefix_cache_hits_total",
        drafted="vllm:spec_decode_num_draft_tokens_total",
        accepted="vllm:spec_decode_num_accepted_tokens_total",
    ),
    counts_tokens=True,  # 0.20.0, entrypoints/openai/engine/protocol.py
    salts_cache=True,
    optional={  # extras in its METADATA
        ("--load-format", "fastsafetensors"): "fastsafetensors",
        ("--load-format", "instanttensor"): "instanttensor",
        ("--load-format", "runai_streamer"): "runai-model-streamer",
        ("--load-format", "runai_streamer_sharded"): "runai-model-streamer",
        ("--load-format", "tensorizer"): "tensorizer",
        ("--distributed-executor-backend", "ray"): "ray",
        ("--moe-backend", "b12x"): "b12x",
        ("--linear-backend", "b12x"): "b12x",
    },
)
