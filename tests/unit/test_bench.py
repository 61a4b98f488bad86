"""Streams, samples, workloads, results and their comparison, without a server."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from typer.testing import CliRunner

from sm120kit.bench import bench_environment, compare_results, result_export, result_file, workload
from sm120kit.bench._metrics import Acceptance
from sm120kit.bench.figures import summary as figures_of
from sm120kit.bench.result_file import Environment, Machine, MeasuredCase, Result, Served
from sm120kit.bench.sample import Exchange, Sample, parse_sample
from sm120kit.bench.sse import Reader, ServerSentEvent
from sm120kit.cli import app
from sm120kit.core.data_roots import data_root
from sm120kit.core.errors import BadInput, NotComparable, NotFound
from sm120kit.core.urls import is_loopback


def events(reads: list[bytes]) -> list[ServerSentEvent]:
    reader = Reader()
    return [event for read in reads for event in reader.feed(read)]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_events_with_comments_names_and_byte_order_mark(end: bytes) -> None:
    lines = [
        b"\xef\xbb\xbf: hello",
        b"data: a",
        b"data:b",
        b"id: 3",
        b"",
        b"",
        b"event: error",
        b"data: c",
        b"",
        b"data",
        b"",
        b": end",
    ]
    assert events([end.join(lines) + end]) == [
        ServerSentEvent("message", "a\nb"),
        ServerSentEvent("error", "c"),
        ServerSentEvent("message", ""),
    ]


@settings(deadline=None)
@given(
    st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"])), min_size=1, max_size=5),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.data(),
)
def test_events_are_independent_of_read_boundaries(texts: list[str], end: str, data: st.DataObject) -> None:
    stream = "".join(f"data: {text}{end}{end}" for text in texts).encode() + b":"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)))))
    reads = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert [event.data for event in events(reads)] == texts


def test_incomplete_event_is_detected() -> None:
    reader = Reader()
    reader.feed(b"data: a\n\n")
    assert not reader.problem
    reader.feed(b"data: b\n")
    assert reader.problem


def chunk(delta: dict[str, object] | None, finish: str | None = None, **more: object) -> bytes:
    choices = [] if delta is None else [{"delta": delta, "finish_reason": finish}]
    return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"


USAGE = {"prompt_tokens": 9, "completion_tokens": 6, "completion_tokens_details": {"reasoning_tokens": 4}}


def sample(reads: list[tuple[float, bytes]], error: str = "", max_tokens: int | None = None) -> Sample:
    return parse_sample(reads, Exchange(0, 0, 1.0, 9.0, 200, max_tokens, error))


def test_reasoning_counts_for_ttft_but_not_for_ttfa() -> None:
    got = sample(
        [
            (1.1, chunk({"role": "assistant", "content": ""})),
            (1.5, chunk({"reasoning_content": "hm"})),
            (2.0, chunk({"reasoning": "hm"})),
            (2.5, chunk({"content": "yes"})),
            (3.5, chunk({}, "stop")),
            (3.6, chunk(None, usage=USAGE)),
        ]
    )
    assert (got.error, got.ttft, got.ttfa, got.answer_chunks) == ("", 0.5, 1.5, 1)
    assert (got.completion_tokens, got.reasoning_tokens, got.cached_tokens) == (6, 4, None)
    assert got.chunk_seconds == (1.5, 2.0, 2.5)
    # 6 tokens in 3 chunks of 2, 2 and 3 characters: after the first chunk, in a second, 2 to 5, by their text 4.29.
    assert got.chunk_sizes == (2, 2, 3) and got.decode_tok_s == pytest.approx(4.29, abs=0.01)
    assert got.decode_bounds == pytest.approx((2.0, 5.0))


@pytest.mark.parametrize(
    ("last", "error"),
    [
        (b"", "the stream ended without a finish reason"),
        (b"data: {", "the stream ended inside an event"),
        (b"data: {\n\n", "an event is not JSON: '{'"),
        (b"data: [1]\n\n", "an event is not JSON: '[1]'"),
        (b'data: {"error": {"message": "out of blocks"}}\n\n', "server: out of blocks"),
        (b'data: {"error": "gone"}\n\n', "server: gone"),
        (b'data: {"object": "error", "message": "too long", "code": 400}\n\n', "server: too long"),
        (b'data: {"detail": "Not Found"}\n\n', "server: Not Found"),
        (b'event: error\ndata: {"message": "aborted"}\n\n', "server: aborted"),
        (b'data: {"choices": [{"finish_reason": "abort"}]}\n\n', "server: the request ended with finish_reason 'abort'"),
        (b'data: {"choices": [{"finish_reason": "error"}]}\n\n', "server: the request ended with finish_reason 'error'"),
        (b'data: {"choices": ["a"]}\n\n', 'an event has no list of choices: \'{"choices": ["a"]}\''),
        (b'data: {"usage": [7]}\n\n', "usage has no counts of tokens: [7]"),
        (b'data: {"usage": "7"}\n\n', 'usage has no counts of tokens: "7"'),
        (b'data: {"usage": {"completion_tokens": -7}}\n\n', 'usage has no counts of tokens: {"completion_tokens": -7}'),
        (b'data: {"usage": {"completion_tokens": "7"}}\n\n', 'usage has no counts of tokens: {"completion_tokens": "7"}'),
        (b'data: {"usage": {"prompt_tokens": 1.5}}\n\n', 'usage has no counts of tokens: {"prompt_tokens": 1.5}'),
    ],
)
def test_broken_stream_has_an_error_and_no_rate(last: bytes, error: str) -> None:
    got = sample([(2.0, chunk({"content": "a"})), (3.0, chunk({"content": "b"}, usage=USAGE)), (4.0, last)])
    assert (got.error, got.decode_tok_s) == (error, None)
    assert got.chunk_seconds == (2.0, 3.0)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "choices",
                    "delta",
                    "usage",
                    "completion_tokens",
                    "finish_reason",
                    "model",
                    "error",
                    "content",
                    "token_ids",
                    "logprobs",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(st.lists(JSON, max_size=4))
def test_any_event_is_parsed(contents: list[object]) -> None:
    """Odd types, huge numbers and NaN are an error of the request or unknown; the sample can be stored and read."""
    reads = [(float(number), b"data: " + json.dumps(content).encode() + b"\n\n") for number, content in enumerate(contents, 1)]
    got = sample(reads)
    summed = figures_of(measured(got))
    json.dumps([got.decode_tok_s, got.decode_bounds, summed.total_tok_s, summed.prefill_tok_s], allow_nan=False)
    TypeAdapter(Sample).validate_python(asdict(got), strict=False)


def test_stream_ends_with_a_finish_reason_or_done() -> None:
    assert sample([(2.0, chunk({"content": "a"})), (3.0, b"data: [DONE]\n\n")]).error == ""
    assert sample([(2.0, chunk({"content": "a"}, "length"))]).error == ""


def test_more_tokens_than_requested_is_an_error() -> None:
    reads = [(2.0, chunk({"content": "a"})), (3.0, chunk({"content": "b"}, "length", usage={"completion_tokens": 8192}))]
    assert sample(reads, max_tokens=8192).error == ""
    none = [*reads, (3.1, chunk(None, usage={"completion_tokens": 0}))]
    assert "2 chunks" in sample(none).error
    nothing = [(2.0, chunk({}, "stop")), (3.1, chunk(None, usage={"completion_tokens": 0}))]
    assert "0 chunks" in sample(nothing).error
    assert all(count in sample(reads, max_tokens=4096).error for count in ("8,192", "4,096"))


def counting(form: str, counts: list[int]) -> list[tuple[float, bytes]]:
    """A stream with a chunk each second, whose events have the counts of tokens until then, or the tokens themselves."""
    reads, before = [], 0
    for number, count in enumerate(counts):
        tokens = list(range(count - before))
        choice: dict[str, object] = {"delta": {"content": "a"}, "finish_reason": None}
        choice |= {"ids": {"token_ids": tokens}, "logprobs": {"logprobs": {"content": tokens}}}.get(form, {})
        event = {"choices": [choice], "usage": {"completion_tokens": count} if form == "usage" else None}
        reads.append((2.0 + number, b"data: " + json.dumps(event).encode() + b"\n\n"))
        before = count
    return [*reads, (9.0, chunk({}, "stop")), (9.1, chunk(None, usage={"completion_tokens": 10}))]


@pytest.mark.parametrize("form", ["usage", "ids", "logprobs"])
def test_counts_of_tokens_in_the_stream(form: str) -> None:
    got = sample(counting(form, [1, 5, 9]))
    assert (got.completion_tokens, got.chunk_tokens) == (10, (1, 4, 4))
    assert (got.decode_tok_s, got.decode_bounds) == (4.0, (4.0, 4.0))


@pytest.mark.parametrize("counts", [[0, 0, 0], [5, 4, 9], [1, 5, 11], [3, 3, 3], [0, 4, 9]])
def test_counts_in_the_stream_that_cannot_be_are_not_used(counts: list[int]) -> None:
    got = sample(counting("usage", counts))
    assert (got.error, got.chunk_tokens, got.decode_tok_s) == ("", None, pytest.approx(10 / 3))
    assert got.decode_bounds == (1.0, 4.5)


def test_no_rate_without_usage() -> None:
    got = sample([(2.0, chunk({"content": "a"})), (3.0, chunk({"content": "b"}, "stop"))])
    assert (got.error, got.completion_tokens, got.decode_tok_s) == ("", None, None)


def test_text_of_completions() -> None:
    body = b'data: {"choices": [{"text": "a", "finish_reason": "stop"}]}\n\n'
    assert sample([(2.0, body)]).first_answer == 2.0


# ---- workloads


@pytest.mark.parametrize("name", workload.names())
def test_every_workload_loads_and_has_requests(name: str) -> None:
    named = workload.load(name)
    cases = workload.cases(named.workload, 0)
    assert len(set(cases)) == len(cases)
    smallest = min(cases, key=lambda case: (case.concurrency, case.context_tokens))
    concurrency = workload.requests(named.workload, smallest, "m", named.workload.requests_per_stream, "salt")
    assert len(concurrency) == smallest.concurrency
    assert all(request.body["stream_options"] == {"include_usage": True} for user in concurrency for request in user)


def test_seed_decides_the_order_of_cases() -> None:
    work = workload.load("length-by-concurrency").workload
    assert workload.cases(work, 1) == workload.cases(work, 1) != workload.cases(work, 2)
    assert set(workload.cases(work, 1)) == set(workload.cases(work, 2))


def test_quick_is_the_smallest_case_once() -> None:
    named = workload.load("length-by-concurrency")
    small = workload.quick(named)
    assert workload.cases(small.workload, 0) == [workload.Case(1, 1000, 0)]
    assert (small.name, small.sha256, small.workload.ignore_end) == (named.name, named.sha256, True)
    small = workload.quick(workload.load("sustained-decode"))
    assert (small.workload.seconds, small.workload.requests_per_stream) == (0.0, 1)


def test_requests_until_the_time_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(workload.time, "monotonic", lambda: now)
    work = workload.load("context-scaling").workload.model_copy(update={"requests_per_stream": 1})
    first, second = workload.requests(work, workload.Case(2, 8, 100), "m", 1, "s", 30)
    now = 200.0  # the time begins with a user's first request
    requests = [next(first)]
    now = 229.0
    requests.append(next(first))
    now = 230.0
    assert next(first, None) is None
    requests.append(next(second))
    three = workload.requests(work, workload.Case(1, 8, 0), "m", 3, "s", -1.0)
    assert len(list(three[0])) == 3, "the least number, although the time has passed"
    assert len({request.body["messages"][0]["content"] for request in requests}) == 3, "no prefix cache applies"


def test_prefill_counts_uncached_tokens() -> None:
    usage = {**USAGE, "prompt_tokens": 900, "prompt_tokens_details": {"cached_tokens": 100}}
    got = sample([(2.0, chunk({"content": "a"}, "length", usage=usage))])
    assert got.ttft is not None
    figures = figures_of(result_file.MeasuredCase(1, 1, 1000, (), (got, got), None, None))
    assert figures.prefill_tok_s == pytest.approx(800 / got.ttft)
    unknown = sample([(2.0, chunk({"content": "a"}, "length"))])
    assert figures_of(result_file.MeasuredCase(1, 1, 1000, (), (unknown,), None, None)).prefill_tok_s is None


def test_thinking_is_passed_to_the_chat_template() -> None:
    case = workload.Case(1, 8, 0)
    kwargs = {
        name: workload.requests(workload.load(name).workload, case, "m", 1, "")[0][0].body.get("chat_template_kwargs")
        for name in ("seed-short-thinking-on", "real-prompts-thinking-off", "quick")
    }
    assert list(kwargs.values()) == [{"enable_thinking": True}, {"enable_thinking": False}, None]


def test_padding_differs_from_its_first_word() -> None:
    work = workload.load("context-scaling").workload
    case = workload.Case(2, 8, 4000)
    texts = [request.body["messages"][0]["content"] for user in workload.requests(work, case, "m", 3, "s") for request in user]
    assert len({text[:40] for text in texts}) == len(texts) == 6
    assert all(len(text.split("\n\n")[0].split()) == 2000 for text in texts)


def test_bad_workload_reports_every_problem(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('summary = "x"\nprompts = []\nconcurrency = [0]\noutput_tokens = [1]\nouput_tokens = 3\n')
    with pytest.raises(BadInput) as caught:
        workload.load(str(file))
    assert all(word in caught.value.message for word in ("prompts: ", "concurrency.0: ", str(file)))
    assert "ouput_tokens: unknown key; did you mean 'output_tokens'?" in caught.value.message
    file.write_text("summary = ")
    with pytest.raises(BadInput, match=r"mine\.toml"):
        workload.load(str(file))
    with pytest.raises(NotFound) as unknown:
        workload.load("quik")
    assert "did you mean 'quick'?" in unknown.value.message


# ---- results


def steady(user: int, first: float, interval: float, chunks: int, per_chunk: int = 1, error: str = "") -> Sample:
    times = tuple(first + i * interval for i in range(chunks))
    return Sample(
        user, 0, 0.0, times[-1], 200, error, times, chunks, first, first, 5, None, chunks * per_chunk, None, "stop", "m", ""
    )


def measured(*samples: Sample, concurrency: int = 1, acceptance: Acceptance | None = None) -> MeasuredCase:
    return MeasuredCase(concurrency, 100, 0, (), samples, 0.001, acceptance)


ABOUT = Environment("http://x", "m", "w", "0" * 64, "off", 0.0, {"python": "3"}, {"gpu": "a"})


def result_of(*cases: MeasuredCase, about: Environment = ABOUT) -> Result:
    return Result(result_file.FORMAT, "2026-01-01T00:00:00+00:00", True, about, cases)


def test_summary_of_a_case() -> None:
    got = figures_of(
        measured(steady(0, 1.0, 0.1, 101), steady(1, 2.0, 0.05, 201, per_chunk=2), concurrency=2, acceptance=Acceptance(8, 6))
    )
    # The second stream has 201 chunks of 2 tokens; in the first may be one, or all that the others do not need.
    assert (got.decode_tok_s, got.decode_lowest, got.decode_highest) == (
        pytest.approx(25),
        pytest.approx(10),
        pytest.approx(40),
    )
    assert (got.decode_at_least, got.decode_at_most) == (pytest.approx((10 + 20) / 2), pytest.approx((10 + 40.1) / 2))
    assert got.total_tok_s == pytest.approx(50, rel=0.01)  # while both were decoding: seconds 2 to 11
    assert got.output_tok_s == pytest.approx((101 + 402) / 12)
    assert (got.tokens, got.chunks, got.errors, got.acceptance) == (503, 302, 0, 0.75)
    assert (got.ttft, got.ttft_p95) == (1.0, 2.0)


def test_total_rate_counts_partial_intervals_at_both_ends() -> None:
    """Four users out of step, ten tokens each: counting whole chunks only would give a tenth less."""
    case = measured(*(steady(user, 1.0 + user * 0.03, 0.1, 10) for user in range(4)), concurrency=4)
    assert figures_of(case).total_tok_s == pytest.approx(40)


def test_total_rate_excludes_the_time_before_the_next_first_token() -> None:
    """Four users at 100 tokens per second, three requests each, half a second until each first token."""
    later = [steady(user, 0.5 + turn * 1.49, 0.01, 100) for user in range(4) for turn in range(3)]
    assert figures_of(measured(*later, concurrency=4)).total_tok_s == pytest.approx(400)
    alone = measured(*(steady(0, 0.5 + turn * 1.49, 0.01, 100) for turn in range(3)))
    figures = figures_of(alone)
    assert (figures.total_tok_s, figures.decode_tok_s) == (pytest.approx(100), pytest.approx(100))


def test_failed_requests_are_counted_not_averaged() -> None:
    got = figures_of(measured(steady(0, 1.0, 0.1, 11), steady(0, 2.0, 9.0, 11, error="HTTP 500")))
    assert (got.requests, got.errors, got.tokens) == (2, 1, 11)
    assert got.decode_tok_s == pytest.approx(10)


def test_figures_are_unknown_without_data() -> None:
    got = figures_of(measured(replace(steady(0, 1.0, 0.1, 11), completion_tokens=None), acceptance=Acceptance(0, 0)))
    assert (got.tokens, got.decode_tok_s, got.total_tok_s, got.output_tok_s, got.acceptance) == (None,) * 5
    assert got.chunks == 11
    nothing = figures_of(measured(steady(0, 1.0, 0.1, 3, error="x")))
    assert (nothing.ttft, nothing.itl_p50, nothing.errors) == (None, None, 1)


def test_result_round_trip(tmp_path: Path) -> None:
    stored = result_of(measured(steady(0, 1.0, 0.1, 11), acceptance=Acceptance(3, 2)))
    result_file.write(tmp_path / "r.json", stored)
    assert result_file.read(tmp_path / "r.json") == stored


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "sm120kit.result/4"}', '{"format": "sm120kit.result/3"}'])
def test_other_files_are_refused_as_results(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(BadInput, match=r"r\.json"):
        result_file.read(tmp_path / "r.json")
    with pytest.raises(BadInput, match="none"):
        result_file.read(tmp_path / "none")


@pytest.mark.parametrize("kind", [".csv", ".benchy.csv", ".benchy.json", ".md", "of vllm bench serve"])
def test_exports_and_files_of_other_benchmarks_are_refused_with_the_remedy(kind: str, tmp_path: Path) -> None:
    file = tmp_path / f"result{kind}"
    named = [("r", result_of(measured(steady(0, 1.0, 0.1, 11))))]
    file.write_text(
        result_export.KINDS[kind](named) if kind in result_export.KINDS else '{"request_rate": 0.3, "completed": 9}'
    )
    for command in ("show", "compare"):
        refused = CliRunner().invoke(app, ["bench", command, *[str(file)] * 2]).exception
        assert isinstance(refused, BadInput) and str(file) in refused.message
        assert "sm120kit bench run" in refused.hint and "not read" in refused.hint


def test_published_schema_is_current() -> None:
    published = Path(__file__).parents[2] / "docs" / "result.schema.json"
    assert json.loads(published.read_text()) == result_file.schema()


def test_different_environment_are_refused_unless_ignored() -> None:
    before = result_of(measured(steady(0, 1.0, 0.1, 11)))
    after = result_of(measured(steady(0, 1.0, 0.05, 11)), about=replace(ABOUT, thinking="on", given={"gpu": "b"}))
    with pytest.raises(NotComparable) as caught:
        compare_results.compare(before, after, ["thinking"])
    assert "given.gpu: a / b" in caught.value.message
    assert "thinking" not in caught.value.message
    compared = compare_results.compare(before, after, ["thinking", "given.gpu"])
    assert compared.differ == {"thinking": ("off", "on"), "given.gpu": ("a", "b")}
    assert {gain.figure: gain.ratio for gain in compared.gains}["decode_tok_s"] == pytest.approx(2)


def test_comparison_has_errors_and_every_figure() -> None:
    """The rates are equal, but requests fail, or the first token takes 5 s longer."""
    good = measured(*(steady(0, 1.0 + start, 0.1, 11) for start in range(4)))
    failing = replace(good, samples=(good.samples[0], *(replace(one, error="HTTP 500") for one in good.samples[1:])))
    late = measured(*(replace(one, started=-5.0) for one in good.samples), concurrency=2)
    before = result_of(replace(good, concurrency=2), good)
    compared = compare_results.compare(before, result_of(late, failing), [])
    assert compared.failures == (compare_results.Failures((1, 100, 0), (0, 4), (3, 4)),) and compared.failures[0].more
    assert not compare_results.compare(result_of(failing), result_of(good), []).failures[0].more
    gains = {gain.figure: gain for gain in compared.gains if gain.concurrency == 2}
    assert gains["decode_tok_s"].ratio == pytest.approx(1)
    assert (gains["ttft"].before, gains["ttft"].after, gains["ttft"].interval) == ((2.0,), (7.0,), None)
    assert {"prefill_tok_s", "ttfa", "ttft_p95", "itl_p50", "itl_p99"} <= set(gains)


def test_times_between_chunks_are_unknown_if_the_client_lagged() -> None:
    case = measured(steady(0, 1.0, 0.1, 11))
    lagged = figures_of(replace(case, lag_seconds=0.5))
    assert (lagged.lagged, lagged.itl_p50, lagged.itl_p99) == (True, None, None)
    assert lagged.decode_tok_s == pytest.approx(10)
    assert figures_of(case).itl_p50 == pytest.approx(0.1)


def test_results_without_a_common_case_are_refused() -> None:
    with pytest.raises(NotComparable, match="no case in common"):
        compare_results.compare(result_of(measured(concurrency=1)), result_of(measured(concurrency=2)), [])


def test_partial_result_is_refused_unless_ignored() -> None:
    complete = result_of(measured(steady(0, 1.0, 0.1, 11)))
    partial = replace(complete, complete=False)
    for pair in ((complete, partial), (partial, partial)):
        with pytest.raises(NotComparable, match="complete: "):
            compare_results.compare(*pair, [])
        assert compare_results.compare(*pair, ["complete"]).gains
    interrupted = replace(partial, cases=(replace(complete.cases[0], complete=False),))
    with pytest.raises(NotComparable, match="no case in common"):
        compare_results.compare(complete, interrupted, ["complete"])


def test_starts_are_compared_in_pairs() -> None:
    """Each start is 20 % faster than the one with its number; of results with other numbers, the common starts count."""
    starts = [replace(measured(steady(0, 1.0, gap, 11)), restart=number) for number, gap in enumerate((0.1, 0.2, 0.4))]
    faster = [replace(measured(steady(0, 1.0, gap / 1.2, 11)), restart=number) for number, gap in enumerate((0.1, 0.2, 0.4))]
    (rate,) = (
        gain
        for gain in compare_results.compare(result_of(*starts), result_of(*faster), []).gains
        if gain.figure == "decode_tok_s"
    )
    assert (rate.before, rate.ratio) == (pytest.approx((10, 5, 2.5)), pytest.approx(1.2))
    assert rate.interval == pytest.approx((1.2, 1.2))
    one = compare_results.compare(result_of(*starts), result_of(faster[0]), []).gains
    assert {gain.interval for gain in one} == {None}


@pytest.mark.parametrize(("accepted", "after"), [(Acceptance(100, 0), (0.0,)), (None, ())])
def test_a_figure_that_is_lost_is_compared(accepted: Acceptance | None, after: tuple[float, ...]) -> None:
    """It has no ratio, and is not left out: drafts are accepted no more, or the server's metrics are absent."""
    before, later = (result_of(measured(steady(0, 1.0, 0.1, 11), acceptance=each)) for each in (Acceptance(100, 70), accepted))
    (lost,) = (gain for gain in compare_results.compare(before, later, []).gains if gain.figure == "acceptance")
    assert (lost.before, lost.after, lost.ratio, lost.interval) == ((0.7,), after, None, None)


def test_environment_unknown_in_both_are_listed() -> None:
    known = replace(ABOUT, machine=Machine(driver="580.1", gpus=()), served=Served(lock="b"))
    results = result_of(measured(steady(0, 1.0, 0.1, 11)), about=known)
    unknown = compare_results.compare(results, results, []).unknown
    assert "machine.cuda" in unknown and "served.image" in unknown
    assert not {"machine.driver", "machine.gpus", "served.lock"} & set(unknown)
    every = compare_results.compare(result_of(*results.cases), result_of(*results.cases), []).unknown
    assert compare_results.briefly(every) == "prompts_sha256, machine.*, served.*"
    known_after = compare_results.compare(result_of(*results.cases), results, ["machine.driver", "machine.gpus", "served.lock"])
    assert known_after.differ["machine.driver"] == ("unknown", "580.1") and "machine.driver" not in known_after.unknown
    with pytest.raises(NotComparable, match=r"served\.lock: b / unknown"):
        compare_results.compare(results, result_of(*results.cases), ["machine.driver", "machine.gpus"])


# ---- environment


def test_revision_of_a_downloaded_model(tmp_path: Path) -> None:
    commit = "0123456789" * 4
    assert bench_environment.revision(tmp_path / "snapshots" / commit) == commit
    metadata = tmp_path / ".cache" / "huggingface" / "download"
    metadata.mkdir(parents=True)
    assert bench_environment.revision(tmp_path) is None
    (metadata / "config.json.metadata").write_text(f"{commit}\netag\n1770000000.0\n")
    assert bench_environment.revision(tmp_path) == commit
    (metadata / "config.json.metadata").write_bytes(b"\xff\n")
    assert bench_environment.revision(tmp_path) is None
    (metadata / "config.json.metadata").unlink()
    os.mkfifo(metadata / "config.json.metadata")
    assert bench_environment.revision(tmp_path) is None, "it is not waited for a writer"


@pytest.mark.parametrize(
    ("url", "local"),
    [("http://127.0.0.1:8000", True), ("http://localhost", True), ("http://[::1]:1", True), ("http://10.0.0.1", False)],
)
def test_machine_is_known_only_on_loopback(url: str, local: bool) -> None:
    assert is_loopback(urlsplit(url).hostname or "") is local
    if not local:
        assert bench_environment.machine(url) == Machine()


def test_workloads_are_in_the_data_directory() -> None:
    assert (data_root() / "recipes" / "workloads" / "quick.toml").is_file()
