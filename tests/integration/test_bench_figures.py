"""Figures of servers whose schedule is known: rates, latencies and acceptance against what the server sent."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest
from schedule_server import schedule_server

from sm120kit.bench import (
    MeasuredServer,
    Measurement,
    _metrics,
    bench_environment,
    choose_model,
    client,
    run,
    workload,
)
from sm120kit.bench._metrics import Acceptance, PrefixCache
from sm120kit.bench.figures import summary
from sm120kit.bench.result_file import Machine, MeasuredCase, Result, Served
from sm120kit.core.urls import Endpoint

SECONDS_PER_TOKEN = 0.002
TOKENS = 256
RELAY = Path(__file__).parents[1] / "support" / "relay.py"
SERVER = RELAY.with_name("schedule_server.py")


@pytest.fixture
def measure(tmp_path: Path) -> Callable[..., MeasuredCase]:
    """Measures one case of a server: two users, two answers of 256 tokens each."""

    def measured(url: str) -> MeasuredCase:
        text = 'summary = "x"\nprompts = ["a"]\nconcurrency = [2]\noutput_tokens = [256]\nrequests_per_stream = 2\n'
        (tmp_path / "w.toml").write_text(text)
        saved: list[Result] = []
        endpoint = Endpoint.parse(url)
        server = MeasuredServer(endpoint, choose_model(endpoint, None))
        run(server, Measurement(workload.load(str(tmp_path / "w.toml")), saved.append))
        (case,) = saved[-1].cases
        assert not any(sample.error for sample in case.samples)
        return case

    return measured


def kept_its_schedule(case: MeasuredCase, per_chunk: int) -> bool:
    """On a busy machine a server or its reader may stall, and chunks arrive with the first: nothing true is known of those."""
    return all(sample.itl[0] > 0.5 * SECONDS_PER_TOKEN * per_chunk for sample in case.samples)


@pytest.mark.parametrize("owner", ["vllm", ""])
@pytest.mark.parametrize(("first_chunk", "per_chunk"), [(1, 4), (1, 16), (1, 1), (16, 16)])
def test_rate_with_several_tokens_in_a_chunk(
    owner: str, first_chunk: int, per_chunk: int, measure: Callable[..., MeasuredCase]
) -> None:
    """The schedule has the tokens of each chunk. A server that counts them is exact, any other within its bound."""
    with schedule_server(SECONDS_PER_TOKEN * per_chunk, 0.0, per_chunk, first_chunk, OWNER=owner) as url:
        case = next(case for _ in range(20) if kept_its_schedule(case := measure(url), per_chunk))
    figures = summary(case)
    true = [(TOKENS - first_chunk) / (sample.chunk_seconds[-1] - sample.chunk_seconds[0]) for sample in case.samples]
    assert figures.tokens == 4 * TOKENS and figures.decode_tok_s and figures.decode_at_least
    if owner or first_chunk == 1:
        assert figures.decode_tok_s == pytest.approx(median(true), rel=0.02), "a chunk may have arrived with the first"
        lowest, highest = (pytest.approx(rate, rel=0.05) for rate in (min(true), max(true)))
        assert (figures.decode_lowest, figures.decode_highest) == (lowest, highest)
    if owner:
        assert [sample.chunk_tokens and sample.chunk_tokens[:2] for sample in case.samples] == [(first_chunk, per_chunk)] * 4
        assert figures.decode_at_least == figures.decode_tok_s
    else:
        assert figures.decode_tok_s == pytest.approx(median(true), rel=0.02), "by the length of its text"
        assert figures.decode_at_least <= figures.decode_tok_s <= (figures.decode_at_most or 0)


def test_tunnel_is_not_the_machine_of_the_server(tmp_path: Path) -> None:
    """The machine of an engine on loopback is this one; behind a tunnel it is unknown unless stated."""
    engine = tmp_path / "vllm"
    engine.write_text(SERVER.read_text())
    with schedule_server(script=str(engine)) as url:
        assert bench_environment.machine(url).kernel == platform.release()
        relay = [sys.executable, RELAY, url.rpartition(":")[2], "vllm"]
        with subprocess.Popen(relay, stdout=subprocess.PIPE, text=True) as tunnel:
            assert tunnel.stdout
            far = f"http://127.0.0.1:{int(tunnel.stdout.readline())}"
            assert client.models(Endpoint.parse(far)) == ("schedule",)
            assert bench_environment.machine(far) == Machine()
            assert bench_environment.machine(far, given={"machine": "this"}).kernel == platform.release()
            assert bench_environment.machine(far, Served(configuration="x")).kernel == platform.release()
            tunnel.kill()
        assert bench_environment.machine(url, given={"machine": "another"}) == Machine()


VLLM = """# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",text="a } b"} 3e2
vllm:spec_decode_num_draft_tokens_total{engine="1"} nan
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 1.5e2
vllm:spec_decode_num_accepted_tokens_total{engine="1"} none
"""
SGLANG = """sglang:spec_accept_rate{tp_rank="0"} 0.75
sglang:spec_accept_rate{tp_rank="1"} +Inf
sglang:spec_accept_length{tp_rank="0"} 4.75
"""


def test_acceptance_by_gauges(measure: Callable[..., MeasuredCase], tmp_path: Path) -> None:
    (tmp_path / "metrics").write_text(SGLANG)
    with schedule_server(METRICS=str(tmp_path / "metrics"), OWNER="sglang") as url:
        case = measure(url)
    assert case.acceptance and (case.acceptance.rate, case.acceptance.length, case.acceptance.drafted) == (0.75, 4.75, None)
    assert case.acceptance.looks >= 1 and summary(case).acceptance == 0.75


def test_acceptance_by_counters(tmp_path: Path) -> None:
    file = tmp_path / "metrics"
    file.write_text(VLLM)
    with schedule_server(METRICS=str(file)) as url:
        server = Endpoint.parse(url)
        with _metrics.measured(server) as counted:
            file.write_text(VLLM.replace("3e2", "700").replace("1.5e2", "450"))
        assert counted().acceptance == Acceptance(400, 300)
        with _metrics.measured(server) as reset:
            file.write_text(VLLM)
        assert reset().acceptance is None, "counters that fall were reset"
        with _metrics.measured(server) as odd:
            file.write_text("vllm:spec_decode_num_draft_tokens_total nan\n" * 3)
        assert odd() == _metrics.CaseMetrics()


PROMPTS = 'vllm:prefix_cache_queries_total{engine="0"} %g\nvllm:prefix_cache_hits_total{engine="0"} %g\n'
SGLANG_PROMPTS = 'sglang:prompt_tokens_total{tp_rank="0"} %g\n'
SGLANG_HITS = 'sglang:cached_tokens_total{cache_source="device"} %g\nsglang:cached_tokens_total{cache_source="host"} %g\n'


@pytest.mark.parametrize(
    ("before", "after", "cache"),
    [
        (PROMPTS % (1e3, 100), PROMPTS % (3e3, 1600), PrefixCache(2000, 1500)),
        (SGLANG_PROMPTS % 1000, SGLANG_PROMPTS % 2000 + SGLANG_HITS % (400, 100), PrefixCache(1000, 500)),
        (SGLANG_PROMPTS % 1000, SGLANG_PROMPTS % 2000, PrefixCache(1000, 0)),
        (SGLANG_PROMPTS % 9 + SGLANG_HITS % (4, 1), SGLANG_PROMPTS % 19 + SGLANG_HITS % (8, 2), PrefixCache(10, 5)),
        (PROMPTS % (1e3, 100), PROMPTS % (10, 1), None),  # the server was started again
        (PROMPTS % (1e3, 100), PROMPTS % (1010, 200), None),  # more hits than prompt tokens
        (PROMPTS % (1e3, 100), PROMPTS.replace("%g", "NaN"), None),
        (PROMPTS % (1e3, 100), PROMPTS % (1e308, 1e308) * 2, None),  # their sum is infinite
        ("sglang:cache_hit_rate 0.5\n", "sglang:cache_hit_rate 0.5\n", None),
    ],
)
def test_prefix_cache_by_counters(before: str, after: str, cache: PrefixCache | None, tmp_path: Path) -> None:
    file = tmp_path / "metrics"
    file.write_text(before)
    with schedule_server(METRICS=str(file)) as url, _metrics.measured(Endpoint.parse(url)) as counted:
        file.write_text(after)
    assert counted().prefix_cache == cache
