"""Settings that servers publish: a run is resumed on a server with the same ones only."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from hostile_server import hostile_server

from sm120kit import bench
from sm120kit.bench import MeasuredServer, Measurement, _run_settings, workload
from sm120kit.core.errors import NotComparable
from sm120kit.core.urls import Endpoint

SGLANG = {
    "kv_cache_dtype": "auto",
    "quantization": None,
    "speculative_algorithm": None,
    "api_key": "a",
    "random_seed": 1,
    "max_total_num_tokens": 100,
    "internal_states": [{"last_gen_throughput": 1.0}],
    "version": "0.5.23",
    "startup_time": 9.5,
}


def vllm(cache_dtype: str = "auto", blocks: int = 100, draft_tokens: int = 0) -> bytes:
    lines = [f'vllm:cache_config_info{{block_size="16",cache_dtype="{cache_dtype}",engine="0",num_gpu_blocks="{blocks}"}} 1.0']
    counter = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    lines += [f'{counter}{{engine="0",model_name="m",position="{each}"}} {blocks}.0' for each in range(draft_tokens)]
    return "\n".join(lines).encode() + b"\n"


def digest(path: str, body: bytes) -> str | None:
    with hostile_server() as server:
        server.respond(path, body)
        return _run_settings.published(Endpoint.parse(server.url)).get("settings_sha256")


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"random_seed": 2, "api_key": "b", "max_total_num_tokens": 99, "internal_states": [], "startup_time": 8.0}, True),
        ({"kv_cache_dtype": "fp8_e4m3"}, False),
        ({"speculative_algorithm": "EAGLE"}, False),
        ({"quantization": "modelopt_fp4"}, False),
    ],
)
def test_sglang(changes: dict[str, object], same: bool) -> None:
    before, after = (digest("/get_server_info", json.dumps({**SGLANG, **more}).encode()) for more in ({}, changes))
    assert before and after and (before == after) == same


def test_vllm() -> None:
    first = digest("/metrics", vllm())
    assert first and first == digest("/metrics", vllm(blocks=98)), "the number of blocks depends on free memory"
    assert len({first, digest("/metrics", vllm("fp8")), digest("/metrics", vllm(draft_tokens=3))}) == 3


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"vllm:cache_config_info 1\n"])
def test_server_that_publishes_no_settings(body: bytes) -> None:
    assert digest("/metrics", body) is None and digest("/get_server_info", body) is None


def test_resume_requires_the_same_settings() -> None:
    with hostile_server() as server:
        server.respond("/v1/models", b'{"data": [{"id": "m"}]}')

        def begin(metrics: bytes, resumed: bench.Result | None = None) -> bench.Result:
            server.respond("/metrics", metrics)
            measured = MeasuredServer(Endpoint.parse(server.url), "m")
            measurement = Measurement(workload.load("quick"), lambda result: None, resumed=resumed)
            return bench._first_result(measured, measurement, datetime.now(UTC))

        interrupted = begin(vllm())
        assert begin(vllm(blocks=98), interrupted) == interrupted
        with pytest.raises(NotComparable, match=r"differs in: reported\.settings_sha256"):
            begin(vllm("fp8"), interrupted)
