"""Read published result files, figures from github.com/Visual-Synthesizer/rtx6kpro and brandonmmusic-max/sm120-moe-bench."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sm120kit.bench import published
from sm120kit.core.errors import BadReceipt


def file(tmp_path: Path, name: str, content: Any) -> Path:
    path = tmp_path / name
    path.write_text(json.dumps(content))
    return path


def sweep(*rows: dict[str, Any], model: str = "Qwen3.5-122B", pool: int = 2424862, **more: Any) -> dict[str, Any]:
    return {"metadata": {"model": model, "max_total_tokens": pool}, "results": list(rows), **more}


def cell(tok_s: float, users: int = 1, context: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "concurrency": users,
        "context_tokens": context,
        "aggregate_tps": tok_s,
        "total_tokens": int(30 * tok_s),
        "wall_time": 30.08,
        "num_completed": users,
        "num_errors": 0,
        "server_spec_accept_rate": 0.0,
        **more,
    }


def test_plain_cell_is_a_measurement_with_unknown_acceptance(tmp_path: Path) -> None:
    (figure,) = published.read([file(tmp_path, "a.json", sweep(cell(200.3)))])
    assert (figure.tok_s, figure.model, figure.refused, figure.acceptance) == (200.3, "Qwen3.5-122B", "", None)
    assert figure.notes == ("the model is a label; the tool did not query the server",)


def test_failed_cells_are_refused(tmp_path: Path) -> None:
    rows = (cell(0.0, 2, num_completed=0, num_errors=2, server_spec_accept_rate=0.73), cell(0.0), cell(132.0, 4, num_errors=1))
    failed, zero, good = published.read([file(tmp_path, "a.json", sweep(*rows))])
    assert failed.refused == "all 2 requests failed"
    assert zero.refused == "0.0 tok/s: the cell failed"
    assert not good.refused


def test_short_answers_are_refused(tmp_path: Path) -> None:
    rows = [
        {"users": 1, "output_len": 1000, "system_tps": 100.2, "per_user_tps": 100.2, "total_tokens": 20, "time": 0.2},
        {"users": 16, "output_len": 1000, "system_tps": 604.7, "per_user_tps": 37.8, "total_tokens": 16000, "time": 26.5},
    ]
    short, long = published.read([file(tmp_path, "k64_no_think.json", rows)])
    assert short.refused == "only 20 tokens for each user in 0.2 s"
    assert not long.refused


def test_users_and_context_from_labels(tmp_path: Path) -> None:
    rows = [
        {"label": "1 user, 1K output", "tok_s": 282.94, "comp_tokens": 3000, "time": 10.6},
        {"label": "1 user, 32K ctx", "tok_s": 141.28, "comp_tokens": 1000, "time": 7.08},
    ]
    first, second = published.read([file(tmp_path, "k64_results.json", rows)])
    assert (first.users, first.context_tokens, second.context_tokens) == (1, 0, 32768)
    assert not first.refused and "wall time" in first.notes[0]


def test_prefill_from_a_cache_is_refused(tmp_path: Path) -> None:
    prefill = {"8192": {"ttft_seconds": 0.454, "tok_per_sec": 21791.0}, "131072": {"ttft_seconds": 0.06, "tok_per_sec": 2.0e6}}
    decode, real, cached = published.read([file(tmp_path, "a.json", sweep(cell(200.3), prefill=prefill))])
    assert (real.what, real.context_tokens, real.refused, decode.refused) == ("prefill", 8192, "", "")
    assert cached.refused == "2,000,000 tok/s of prefill: the prefix cache answered"


def test_faster_with_context_beyond_the_spread_is_refused(tmp_path: Path) -> None:
    def mean(tok_s: float, sd: float, users: int, context: int) -> dict[str, Any]:
        return {"concurrency": users, "context_tokens": context, "aggregate_tps_mean": tok_s, "aggregate_tps_stdev": sd}

    rows = (mean(194.0, 2.8, 1, 0), mean(813.4, 1.5, 8, 0), mean(215.7, 33.1, 1, 16384), mean(935.3, 12.5, 8, 16384))
    figures = published.read([file(tmp_path, "mean.json", sweep(*rows))])
    assert [bool(figure.refused) for figure in figures] == [False, False, False, True]
    assert figures[3].refused == "faster with 16,384 tokens of context than without (813.4): a cache answered"


def test_kv_pool_of_another_model_is_refused(tmp_path: Path) -> None:
    named = file(tmp_path, "a.json", sweep(cell(200.3)))
    other = file(tmp_path, "sglang_m25_b12x.json", sweep(cell(128.5), model="MiniMax-M2.5"))
    own = file(tmp_path, "own.json", sweep(cell(128.5), model="MiniMax-M2.5", pool=167574))
    assert [bool(figure.refused) for figure in published.read([named, other, own])] == [False, True, False]
    assert "2,424,862 tokens is that of Qwen3.5-122B in a.json" in published.read([named, other])[1].refused


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "[1]",
        '[{"tok_s": 1}]',
        '{"results": [{}], "metadata": {"model": "x"}}',
        '{"results": [], "metadata": []}',
    ],
)
def test_unknown_formats_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "odd.json"
    path.write_text(text)
    with pytest.raises(BadReceipt, match=r"odd\.json"):
        published.read([path])
