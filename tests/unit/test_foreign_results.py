"""Read published result files, figures from github.com/Visual-Synthesizer/rtx6kpro and brandonmmusic-max/sm120-moe-bench."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sm120kit.bench import foreign_results
from sm120kit.bench._foreign_formats import Figure
from sm120kit.core.errors import BadInput


def file(tmp_path: Path, name: str, content: Any) -> Path:
    path = tmp_path / name
    path.write_text(json.dumps(content))
    return path


def figures(paths: list[Path]) -> tuple[Figure, ...]:
    read = foreign_results.read(paths)
    assert not read.refused
    return read.figures


def sweep(*rows: dict[str, Any], model: str = "Qwen3.5-122B", pool: int = 2424862, **more: Any) -> dict[str, Any]:
    return {"metadata": {"model": model, "max_total_tokens": pool}, "results": list(rows), **more}


def case(tok_s: float, concurrency: int = 1, context: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "concurrency": concurrency,
        "context_tokens": context,
        "aggregate_tps": tok_s,
        "total_tokens": int(30 * tok_s),
        "wall_time": 30.08,
        "num_completed": concurrency,
        "num_errors": 0,
        "server_spec_accept_rate": 0.0,
        **more,
    }


def test_plain_case_is_a_measurement_with_unknown_acceptance(tmp_path: Path) -> None:
    (figure,) = figures([file(tmp_path, "a.json", sweep(case(200.3)))])
    assert (figure.tok_s, figure.model, figure.refused, figure.acceptance) == (200.3, "Qwen3.5-122B", "", None)
    assert figure.notes == ("the model is a label; the tool did not query the server",)


def test_failed_cases_are_refused(tmp_path: Path) -> None:
    rows = (case(0.0, 2, num_completed=0, num_errors=2, server_spec_accept_rate=0.73), case(0.0), case(132.0, 4, num_errors=1))
    failed, zero, good = figures([file(tmp_path, "a.json", sweep(*rows))])
    assert failed.refused == "all 2 requests failed"
    assert zero.refused == "0.0 tok/s: the case failed"
    assert not good.refused


def test_short_answers_are_refused(tmp_path: Path) -> None:
    rows = sweep(case(100.2, total_tokens=20, wall_time=0.2), case(604.7, 16, total_tokens=16000, wall_time=26.5))
    short, long = figures([file(tmp_path, "no_think.json", rows)])
    assert short.refused.startswith("only 20 tokens") and not long.refused


def test_prefill_from_a_cache_is_refused(tmp_path: Path) -> None:
    prefill = {"8192": {"ttft_seconds": 0.454, "tok_per_sec": 21791.0}, "131072": {"ttft_seconds": 0.06, "tok_per_sec": 2.0e6}}
    decode, real, cached = figures([file(tmp_path, "a.json", sweep(case(200.3), prefill=prefill))])
    assert (real.what, real.context_tokens, real.refused, decode.refused) == ("prefill", 8192, "", "")
    assert cached.refused == "2,000,000 tok/s of prefill: a cache answered, or the request failed"


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
    with pytest.raises(BadInput, match=r"odd\.json"):
        foreign_results.read([path])


def test_one_unknown_file_does_not_stop_the_others(tmp_path: Path) -> None:
    kernels = {
        "M=1": {"M": 1, "gemm1_ms": {"avg": 0.0248, "med": 0.0247}},
        "kernel_launch_overhead_us": {"avg": 6.3, "med": 6.2},
    }
    prompts = {"short_statute": {"category": "short_factual", "prompt": "What is the statute of limitations?"}}
    odd = [file(tmp_path, "baseline_results.json", kernels), file(tmp_path, "klc_prompts.json", prompts)]
    read = foreign_results.read([*odd, file(tmp_path, "a.json", sweep(case(200.3)))])
    assert [figure.tok_s for figure in read.figures] == [200.3]
    assert list(read.refused) == [str(path) for path in odd] and all("unknown format" in text for text in read.refused.values())
    with pytest.raises(BadInput, match="klc_prompts"):
        foreign_results.read(odd)


def metric(mean: float, std: float = 0.0) -> dict[str, Any]:
    return {"mean": mean, "std": std, "values": [mean]}


def test_case_with_a_failure_is_refused_with_its_reason(tmp_path: Path) -> None:
    rows = (
        case(-3.0, failure_reason="repeated text", total_tokens=9000),
        case(252.0, failure_reason=""),
        case(-1.0, total_tokens=900),
    )
    loop, good, unnamed = figures([file(tmp_path, "decode.json", sweep(*rows))])
    assert loop.refused == "the case failed: repeated text"
    assert (good.refused, unnamed.refused) == ("", "-1.0 tok/s: the case failed")


def test_case_during_which_another_client_used_the_server_is_refused(tmp_path: Path) -> None:
    rows = (
        case(97.4, avg_running_reqs=1.9, max_running_reqs=2),
        case(145.0, avg_running_reqs=0.9),
        case(620.0, 8, avg_running_reqs=8.0),
    )
    shared, *alone = figures([file(tmp_path, "sprint.json", sweep(*rows))])
    assert shared.refused == "1.9 requests ran on average at concurrency 1: another client used the server"
    assert not any(figure.refused for figure in alone)


def test_vllm_bench_serve_and_sglang_bench_serving(tmp_path: Path) -> None:
    common = {"completed": 8, "duration": 20.0, "total_input_tokens": 1024, "total_output_tokens": 8000, "mean_tpot_ms": 5.0}
    vllm = {**common, "model_id": "Qwen3.5", "num_prompts": 9, "failed": 1, "max_concurrency": 4, "output_throughput": 400.0}
    decode, total = figures([file(tmp_path, "vllm.json", vllm)])
    assert (decode.what, decode.concurrency, decode.context_tokens, decode.tok_s, decode.model) == (
        "decode",
        4,
        128,
        800.0,
        "Qwen3.5",
    )
    assert (total.what, total.tok_s, total.refused) == ("output, prefill included", 400.0, "")
    assert decode.notes == ("1 of 9 requests failed",)

    sglang = {**common, "max_concurrency": None, "concurrency": 1.9, "output_throughput": 380.0}
    decode, total = figures([file(tmp_path, "sglang.json", sglang)])
    assert (decode.concurrency, decode.tok_s, decode.notes) == (
        2,
        380.0,
        ("concurrency is the mean number of requests in parallel",),
    )

    at_a_rate = {**vllm, "max_concurrency": None, "request_rate": 0.4, "max_concurrent_requests": 16, "mean_e2el_ms": 7500.0}
    decode, total = figures([file(tmp_path, "rate.json", at_a_rate)])
    assert (decode.concurrency, decode.refused, total.refused) == (3, "", ""), "8 requests in 20 s, of 7.5 s each"
    (unlimited,) = figures([file(tmp_path, "unlimited.json", {**vllm, "max_concurrency": None})])
    assert "mean_ttft_ms" in unlimited.refused and unlimited.concurrency is None
    without_latency = {**at_a_rate, "mean_e2el_ms": None, "mean_ttft_ms": 2505.0}
    decode, _ = figures([file(tmp_path, "estimated.json", without_latency)])
    assert (decode.concurrency, decode.refused, len(decode.notes)) == (3, "", 3), "2.505 s and 999 times 5 ms: 7.5 s"
    below_its_limit, _ = figures([file(tmp_path, "both.json", {**at_a_rate, "max_concurrency": 64})])
    assert (below_its_limit.concurrency, below_its_limit.tok_s) == (3, 600.0), "the rate did not fill the limit"
    filled, _ = figures([file(tmp_path, "inf.json", {**at_a_rate, "max_concurrency": 4, "request_rate": "inf"})])
    assert filled.concurrency == 4
    few, _ = figures([file(tmp_path, "few.json", {**vllm, "max_concurrency": 64})])
    assert few.concurrency == 9, "no more than there are requests"


def test_llama_benchy(tmp_path: Path) -> None:
    def run(context: int, *, prefilled: bool = False, concurrency: int = 2) -> dict[str, Any]:
        return {
            "concurrency": concurrency,
            "context_size": context,
            "prompt_size": 2048,
            "response_size": 32,
            "is_context_prefill_phase": prefilled,
            "pp_throughput": metric(9000.0, 12.0),
            "pp_req_throughput": metric(4500.0),
            "tg_throughput": None if prefilled else metric(96.5, 0.4),
            "tg_req_throughput": None if prefilled else metric(48.2),
            "ttfr": metric(230.0),
        }

    content = {
        "version": "0.4.0",
        "timestamp": "2026-11-22T10:00:00",
        "latency_mode": "generation",
        "latency_ms": 1.2,
        "model": "Qwen/Qwen3.5-122B-A10B",
        "prefix_caching_enabled": True,
        "max_concurrency": 2,
        "benchmarks": [run(0), run(4096, prefilled=True), run(4096)],
    }
    decode, prefill, loaded, deep, cached = figures([file(tmp_path, "benchy.json", content)])
    assert (decode.what, decode.concurrency, decode.context_tokens, decode.tok_s, decode.spread) == (
        "decode",
        2,
        2048,
        96.5,
        0.4,
    )
    assert decode.model == "Qwen/Qwen3.5-122B-A10B" and "answers of 32 tokens" in decode.notes[0] and not decode.refused
    assert (prefill.what, prefill.tok_s, prefill.refused, loaded.refused) == ("prefill", 9000.0, "", "")
    assert (deep.context_tokens, cached.refused) == (6144, "prefill after a cached prefix")


def test_case_of_fewer_requests_than_users_is_refused(tmp_path: Path) -> None:
    rows = (
        case(661.0, 128, avg_running_reqs=8.9, max_running_reqs=9),
        case(2901.0, 128, avg_running_reqs=117, max_running_reqs=117),
        case(215.6, 2, avg_running_reqs=1.3, max_running_reqs=2),
        case(105.0, avg_running_reqs=0.0, max_running_reqs=0),
    )
    few, queued, *full = figures([file(tmp_path, "queue.json", sweep(*rows))])
    assert (
        few.refused == "at most 9 requests ran at concurrency 128"
        and queued.refused == "at most 117 requests ran at concurrency 128"
    )
    assert not any(figure.refused for figure in full), "samples at the begin and end of a short case are lower"


def test_case_of_a_window_is_a_decode_rate_of_the_counted_context(tmp_path: Path) -> None:
    """server_spec_accept_rate of vLLM is a counter there; tokens of requests that were stopped count as events."""
    window = case(60.0, context=131072, measurement_seconds=30.0, input_seq_len_avg=128964.0, server_spec_accept_rate=1734.0)
    whole = case(323.8, 8, total_tokens=188, wall_time=33.8, server_spec_accept_rate=0.5)
    read = figures([file(tmp_path, "a.json", sweep(window, whole))])
    assert [(figure.what, figure.context_tokens, figure.acceptance) for figure in read] == [
        ("decode", 128964, None),
        ("output, prefill included", 0, 0.5),
    ]
    assert not any(figure.refused for figure in read)


def csv_file(tmp_path: Path, *rows: str) -> Path:
    path = tmp_path / "result.csv"
    path.write_text("\n".join(["model,test_name,t_s_mean,t_s_std,peak_ts_mean,ttfr_mean", *rows]))
    return path


def test_csv_of_llama_benchy(tmp_path: Path) -> None:
    rows = (
        "m,tg128,50.1,0.2,52.0,",
        "m,pp2048,2400.0,10.0,,820.0",
        "m,tg128 @ d4096 (c2),80.5,,90,",
        "m,ctx_pp @ d4096,2000,1,,9",
    )
    read = figures([csv_file(tmp_path, *rows)])
    assert [(figure.what, figure.concurrency, figure.context_tokens, figure.tok_s, figure.refused) for figure in read] == [
        ("decode", 1, 2048, 50.1, ""),
        ("prefill", 1, 2048, 2400.0, ""),
        ("decode", 2, 6144, 80.5, ""),
        ("prefill", 1, 4096, 2000.0, ""),
    ]
    alone, cached = figures([csv_file(tmp_path, "m,tg32,50,1,,", "m,pp8 @ d512,9,1,,")])
    assert (alone.refused, "cached" in cached.refused) == ("", True)
    (unknown,) = figures([csv_file(tmp_path, "m,tg32,50,1,,")])
    assert "length of its prompt" in unknown.refused


def test_files_are_read_by_their_content(tmp_path: Path) -> None:
    """Runs that SGLang appends to a file, with its Infinity; CSV with another name; a file with a byte order mark."""
    run = {"completed": 8, "duration": 20.0, "total_input_tokens": 1024, "total_output_tokens": 8000, "mean_tpot_ms": 5.0}
    lines = [
        json.dumps(run | {"max_concurrency": limit, "output_throughput": 1.0, "request_rate": float("inf")}) for limit in (2, 4)
    ]
    (tmp_path / "runs.jsonl").write_text("\n".join([*lines, ""]), "utf-8-sig")
    read = figures([tmp_path / "runs.jsonl"])
    assert [figure.concurrency for figure in read if figure.what == "decode"] == [2, 4]
    csv_file(tmp_path, "m,tg128,50.1,0.2,52.0,").rename(tmp_path / "result.txt")
    assert figures([tmp_path / "result.txt"])[0].tok_s == 50.1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Metric,avg,min,max\nRequest Latency (ms),1,1,1\n", "llama-benchy's columns model, t_s_mean, t_s_std, test_name"),
        ("Benchmark,,Timings\nType,Id,Start\n,,\n", "llama-benchy's columns"),
        ("| model | test |\n|---|---|\n| m | pp8 |\n", "neither JSON nor CSV"),
        ("{", "not JSON"),
        ("\xff", "not UTF-8"),
    ],
    ids=["aiperf", "guidellm", "markdown", "broken", "binary"],
)
@pytest.mark.parametrize("name", ["result.csv", "result.json"])
def test_reason_for_a_file_of_another_format(name: str, text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(BadInput) as refused:
        foreign_results.read([tmp_path / name])
    assert reason in refused.value.message and "llama-benchy" in refused.value.hint


@pytest.mark.parametrize(
    "row",
    [
        "m,tg32,\u0661,1,,",
        "m,tg32,1_0,1,,",
        "m,tg32,inf,1,,",
        f"m,tg32,{'9' * 5000},1,,",
        "m,other,1,1,,",
        "m,tg32,x,1,,",
        "m,tg32",
        "m,tg32 (c0),1,1,,",
        "m,tg²,1,1,,",
    ],
)
def test_csv_of_another_form_is_refused(tmp_path: Path, row: str) -> None:
    with pytest.raises(BadInput, match=r"result\.csv"):
        foreign_results.read([csv_file(tmp_path, row)])
