"""Settings that a server publishes, as a digest: a restart with other flags has another one."""

from __future__ import annotations

import re
from typing import Any

from sm120kit.bench import client
from sm120kit.bench.metrics import metrics_of
from sm120kit.core.outside import parse_json
from sm120kit.core.state import digest_of
from sm120kit.core.urls import Endpoint

CACHE_CONFIG = "vllm:cache_config_info"
DRAFT_POSITIONS = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
"""vLLM's gauge whose labels are all fields of its ``CacheConfig`` (vllm/config/cache.py ``metrics_info``, vllm/v1/metrics/
loggers.py ``log_metrics_info``), and its counter with a label for each draft token (vllm/v1/spec_decode/metrics.py)."""
MEASURED_BY_VLLM = frozenset(("engine", "num_gpu_blocks", "num_cpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency"))
"""Labels that vLLM measures at its start, which differ between starts with the same flags."""
NOT_SETTINGS = re.compile(
    r"status|internal_states|startup_time|max_total_num_tokens|max_req_input_len|hicache_object_layout|kv_event_sources"
    r"|kv_events|launch_command|random_seed|.*port|.*(?:api_key|password|watermark_key).*"
)
"""Keys of SGLang's ``/get_server_info`` that are state, drawn or measured at each start, or secret (SGLang 0.5.11 and 0.5.23,
srt/entrypoints/http_server.py ``server_info``, srt/managers/scheduler.py ``get_init_info``); the others are its arguments."""


def published(server: Endpoint) -> dict[str, str]:
    """``settings_sha256``, the digest of the settings that a server publishes; empty if it publishes none."""
    settings = _of_sglang(server) or _of_vllm(metrics_of(server))
    return {"settings_sha256": digest_of(settings)} if settings else {}


def _of_sglang(server: Endpoint) -> dict[str, Any]:
    import httpx2

    try:
        about = parse_json(client.get(server, "/get_server_info").content)
    except (httpx2.HTTPError, ValueError):
        return {}
    return {name: value for name, value in about.items() if not NOT_SETTINGS.fullmatch(name)} if isinstance(about, dict) else {}


def _of_vllm(metrics: str) -> dict[str, Any]:
    engines = {
        tuple(sorted((name, value) for name, value in labels if name not in MEASURED_BY_VLLM))
        for labels in _labels(metrics, CACHE_CONFIG)
    }
    positions = {value for labels in _labels(metrics, DRAFT_POSITIONS) for name, value in labels if name == "position"}
    return {"cache": sorted(engines), "draft_tokens": len(positions)} if engines else {}


def _labels(metrics: str, name: str) -> list[list[tuple[str, str]]]:
    """The labels of each line of a metric."""
    lines = re.findall(rf"^{re.escape(name)}\{{([^\n]*)\}}", metrics, re.MULTILINE)
    return [re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', line) for line in lines]
