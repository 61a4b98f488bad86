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

from sm120kit.bench import Measurement, acceptance, circumstances, client, run, running_server, workload
from sm120kit.bench.acceptance import Acceptance
from sm120kit.bench.receipt import Machine, MeasuredCell, Receipt, Served, summary
from sm120kit.core.urls import Endpoint

SECONDS_PER_TOKEN = 0.002
TOKENS = 256
RELAY = Path(__file__).parents[1] / "support" / "relay.py"
SERVER = RELAY.with_name("schedule_server.py")


@pytest.fixture
def measure(tmp_path: Path) -> Callable[..., MeasuredCell]:
    """Measures one cell of a server: two users, two answers of 256 tokens each."""

    def measured(url: str) -> MeasuredCell:
        text = 'summary = "x"\nprompts = ["a"]\nusers = [2]\noutput_tokens = [256]\nrequests_per_user = 2\n'
        (tmp_path / "w.toml").write_text(text)
        saved: list[Receipt] = []
        run(running_server(Endpoint.parse(url)), Measurement(workload.load(str(tmp_path / "w.toml")), saved.append))
        (cell,) = saved[-1].cells
        assert not any(sample.error for sample in cell.samples)
        return cell

    return measured


@pytest.mark.parametrize("owner", ["vllm", ""])
@pytest.mark.parametrize(("first_chunk", "per_chunk"), [(1, 4), (1, 16), (1, 1), (16, 16)])
def test_rate_with_several_tokens_in_a_chunk(
    owner: str, first_chunk: int, per_chunk: int, measure: Callable[..., MeasuredCell]
) -> None:
    """The schedule has the tokens of each chunk. A server that counts them is exact, any other within its bound."""
    with schedule_server(SECONDS_PER_TOKEN * per_chunk, 0.0, per_chunk, first_chunk, OWNER=owner) as url:
        cell = measure(url)
    figures = summary(cell)
    true = [(TOKENS - first_chunk) / (sample.chunk_seconds[-1] - sample.chunk_seconds[0]) for sample in cell.samples]
    assert figures.tokens == 4 * TOKENS and figures.decode_tok_s and figures.decode_at_least
    if owner or first_chunk == 1:
        assert figures.decode_tok_s == pytest.approx(median(true))
        assert (figures.decode_lowest, figures.decode_highest) == (pytest.approx(min(true)), pytest.approx(max(true)))
    if owner:
        assert [sample.chunk_tokens and sample.chunk_tokens[:2] for sample in cell.samples] == [(first_chunk, per_chunk)] * 4
        assert figures.decode_at_least == figures.decode_tok_s
    else:
        assert figures.decode_at_least <= median(true) * 1.000001 <= figures.decode_tok_s * 1.000002


def test_tunnel_is_not_the_machine_of_the_server(tmp_path: Path) -> None:
    """The machine of an engine on loopback is this one; behind a tunnel it is unknown unless stated."""
    engine = tmp_path / "vllm"
    engine.write_text(SERVER.read_text())
    with schedule_server(script=str(engine)) as url:
        assert circumstances.machine(url).kernel == platform.release()
        relay = [sys.executable, RELAY, url.rpartition(":")[2], "vllm"]
        with subprocess.Popen(relay, stdout=subprocess.PIPE, text=True) as tunnel:
            assert tunnel.stdout
            far = f"http://127.0.0.1:{int(tunnel.stdout.readline())}"
            assert client.models(Endpoint.parse(far)) == ("schedule",)
            assert circumstances.machine(far) == Machine()
            assert circumstances.machine(far, given={"machine": "this"}).kernel == platform.release()
            assert circumstances.machine(far, Served(configuration="x")).kernel == platform.release()
            tunnel.kill()
        assert circumstances.machine(url, given={"machine": "another"}) == Machine()


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


def test_acceptance_by_gauges(measure: Callable[..., MeasuredCell], tmp_path: Path) -> None:
    (tmp_path / "metrics").write_text(SGLANG)
    with schedule_server(METRICS=str(tmp_path / "metrics"), OWNER="sglang") as url:
        cell = measure(url)
    assert cell.acceptance and (cell.acceptance.rate, cell.acceptance.length, cell.acceptance.drafted) == (0.75, 4.75, None)
    assert cell.acceptance.looks >= 1 and summary(cell).acceptance == 0.75


def test_acceptance_by_counters(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics"
    metrics.write_text(VLLM)
    with schedule_server(METRICS=str(metrics)) as url:
        server = Endpoint.parse(url)
        with acceptance.measured(server) as counted:
            metrics.write_text(VLLM.replace("3e2", "700").replace("1.5e2", "450"))
        assert counted() == Acceptance(400, 300)
        with acceptance.measured(server) as reset:
            metrics.write_text(VLLM)
        assert reset() is None, "counters that fall were reset"
        with acceptance.measured(server) as odd:
            metrics.write_text("vllm:spec_decode_num_draft_tokens_total nan\n" * 3)
        assert odd() is None
