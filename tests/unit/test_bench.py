"""Reading streams, understanding them, workloads, receipts and their comparison; no server."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm120kit.bench import circumstances, clocks, compare, receipt, workload
from sm120kit.bench.receipt import Acceptance, Circumstances, Machine, Measured, Receipt, Served
from sm120kit.bench.sample import Sample, understand
from sm120kit.bench.sse import Event, Reader
from sm120kit.errors import BadReceipt, BadRecipe, NotComparable, UnknownName
from sm120kit.workspace import data_root


def events(reads: list[bytes]) -> list[Event]:
    reader = Reader()
    return [event for read in reads for event in reader.feed(read)]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_lines_comments_names_and_byte_order_mark(end: bytes) -> None:
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
    # A CR that comes last could be half of a CRLF: one more byte decides.
    assert events([end.join(lines) + end]) == [Event("message", "a\nb"), Event("error", "c"), Event("message", "")]


@given(
    st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"])), min_size=1, max_size=5),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.data(),
)
def test_however_it_is_cut(texts: list[str], end: str, data: st.DataObject) -> None:
    stream = "".join(f"data: {text}{end}{end}" for text in texts).encode() + b":"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)))))
    reads = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert [event.data for event in events(reads)] == texts


def test_what_was_cut_off_is_known() -> None:
    reader = Reader()
    reader.feed(b"data: a\n\n")
    assert not reader.incomplete
    reader.feed(b"data: b\n")
    assert reader.incomplete


def chunk(delta: dict[str, object] | None, finish: str | None = None, **more: object) -> bytes:
    choices = [] if delta is None else [{"delta": delta, "finish_reason": finish}]
    return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"


USAGE = {"prompt_tokens": 9, "completion_tokens": 6, "completion_tokens_details": {"reasoning_tokens": 4}}


def sample(reads: list[tuple[float, bytes]], error: str = "") -> Sample:
    return understand(reads, user=0, prompt=0, started=1.0, ended=9.0, status=200, error=error)


def test_reasoning_is_a_token_but_not_the_answer() -> None:
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
    # 6 tokens in 3 chunks: 4 of them after the first chunk, in one second.
    assert got.decode_tok_s == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("last", "error"),
    [
        (b"", "the stream ended without a finish reason"),
        (b"data: {", "the stream ended inside an event"),
        (b"data: {\n\n", "an event is not JSON: '{'"),
        (b"data: [1]\n\n", "an event is not JSON: '[1]'"),
        (b'data: {"error": {"message": "out of blocks"}}\n\n', "server: out of blocks"),
        (b'data: {"error": "gone"}\n\n', "server: gone"),
    ],
)
def test_a_stream_that_breaks_off_is_an_error_and_has_no_rate(last: bytes, error: str) -> None:
    got = sample([(2.0, chunk({"content": "a"})), (3.0, chunk({"content": "b"}, usage=USAGE)), (4.0, last)])
    assert (got.error, got.decode_tok_s) == (error, None)
    assert got.chunk_seconds == (2.0, 3.0)


def test_done_without_a_finish_reason_and_a_finish_without_done_are_both_an_end() -> None:
    assert sample([(2.0, chunk({"content": "a"})), (3.0, b"data: [DONE]\n\n")]).error == ""
    assert sample([(2.0, chunk({"content": "a"}, "length"))]).error == ""


def test_without_usage_there_is_no_rate() -> None:
    got = sample([(2.0, chunk({"content": "a"})), (3.0, chunk({"content": "b"}, "stop"))])
    assert (got.error, got.completion_tokens, got.decode_tok_s) == ("", None, None)


def test_completions_carry_text() -> None:
    body = b'data: {"choices": [{"text": "a", "finish_reason": "stop"}]}\n\n'
    assert sample([(2.0, body)]).first_answer == 2.0


# ---- workloads


@pytest.mark.parametrize("name", workload.names())
def test_every_workload_loads_and_asks(name: str) -> None:
    named = workload.load(name)
    cells = workload.cells(named.workload, 0)
    assert len(set(cells)) == len(cells)
    smallest = min(cells, key=lambda cell: (cell.users, cell.context_tokens))
    asked = workload.asks(named.workload, smallest, "m", named.workload.requests_per_user, "salt")
    assert len(asked) == smallest.users
    assert all(ask.body["stream_options"] == {"include_usage": True} for user in asked for ask in user)


def test_the_order_is_that_of_the_seed() -> None:
    work = workload.load("length-by-users").workload
    assert workload.cells(work, 1) == workload.cells(work, 1) != workload.cells(work, 2)
    assert set(workload.cells(work, 1)) == set(workload.cells(work, 2))


def test_a_smoke_run_is_the_smallest_cell_once() -> None:
    named = workload.load("length-by-users")
    small = workload.quick(named)
    assert workload.cells(small.workload, 0) == [workload.Cell(1, 1000, 0)]
    assert (small.name, small.sha256, small.workload.ignore_end) == (named.name, named.sha256, True)
    small = workload.quick(workload.load("sustained-decode"))
    assert (small.workload.seconds, small.workload.requests_per_user) == (0.0, 1)


def test_requests_go_on_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(workload.time, "monotonic", lambda: now)
    work = workload.load("context-scaling").workload
    first, second = workload.asks_for(30, work, workload.Cell(2, 8, 100), "m", "s")
    now = 200.0  # the time begins with a user's first request
    asked = [next(first)]
    now = 229.0
    asked.append(next(first))
    now = 230.0
    assert next(first, None) is None
    asked.append(next(second))
    assert len({ask.body["messages"][0]["content"] for ask in asked}) == 3, "no prefix cache helps"


def test_prefill_counts_what_no_cache_had() -> None:
    usage = {**USAGE, "prompt_tokens": 900, "prompt_tokens_details": {"cached_tokens": 100}}
    got = sample([(2.0, chunk({"content": "a"}, "length", usage=usage))])
    assert got.ttft is not None
    figures = receipt.summary(receipt.Measured(1, 1, 1000, (), (got, got), None, None))
    assert figures.prefill_tok_s == pytest.approx(800 / got.ttft)
    unknown = sample([(2.0, chunk({"content": "a"}, "length"))])
    assert receipt.summary(receipt.Measured(1, 1, 1000, (), (unknown,), None, None)).prefill_tok_s is None


def test_thinking_is_said_to_the_template() -> None:
    cell = workload.Cell(1, 8, 0)
    kwargs = {
        name: workload.asks(workload.load(name).workload, cell, "m", 1, "")[0][0].body.get("chat_template_kwargs")
        for name in ("seed-short-thinking-on", "real-prompts-thinking-off", "quick")
    }
    assert list(kwargs.values()) == [{"enable_thinking": True}, {"enable_thinking": False}, None]


def test_padding_differs_from_the_first_word_on() -> None:
    work = workload.load("context-scaling").workload
    cell = workload.Cell(2, 8, 4000)
    texts = [ask.body["messages"][0]["content"] for user in workload.asks(work, cell, "m", 3, "s") for ask in user]
    assert len({text[:40] for text in texts}) == len(texts) == 6
    assert all(len(text.split("\n\n")[0].split()) == 2000 for text in texts)


def test_a_bad_workload_names_every_problem(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('summary = "x"\nprompts = []\nusers = [0]\noutput_tokens = [1]\nusres = 3\n')
    with pytest.raises(BadRecipe) as caught:
        workload.load(str(file))
    assert all(word in caught.value.message for word in ("prompts: ", "users.0: ", str(file)))
    assert "usres: unknown key; did you mean 'users'?" in caught.value.message
    file.write_text("summary = ")
    with pytest.raises(BadRecipe, match=r"mine\.toml"):
        workload.load(str(file))
    with pytest.raises(UnknownName) as unknown:
        workload.load("quik")
    assert "did you mean 'quick'?" in unknown.value.message


# ---- receipts


def steady(user: int, first: float, interval: float, chunks: int, per_chunk: int = 1, error: str = "") -> Sample:
    times = tuple(first + i * interval for i in range(chunks))
    return Sample(
        user, 0, 0.0, times[-1], 200, error, times, chunks, first, first, 5, None, chunks * per_chunk, None, "stop", "m", ""
    )


def measured(*samples: Sample, users: int = 1, acceptance: Acceptance | None = None) -> Measured:
    return Measured(users, 100, 0, (), samples, 0.001, acceptance)


ABOUT = Circumstances("http://x", "m", "w", "0" * 64, "off", 0.0, 0, {"python": "3"}, {"gpu": "a"})


def made(*cells: Measured, about: Circumstances = ABOUT) -> Receipt:
    return Receipt(receipt.FORMAT, "2026-01-01T00:00:00+00:00", True, about, cells)


def test_figures_of_a_cell() -> None:
    got = receipt.summary(
        measured(steady(0, 1.0, 0.1, 101), steady(1, 2.0, 0.05, 201, per_chunk=2), users=2, acceptance=Acceptance(8, 6))
    )
    assert got.decode_tok_s == pytest.approx((10 + 40) / 2)
    assert (got.decode_lowest, got.decode_highest) == (pytest.approx(10), pytest.approx(40))
    assert got.total_tok_s == pytest.approx(50, rel=0.01)  # while both were decoding: seconds 2 to 11
    assert got.output_tok_s == pytest.approx((101 + 402) / 12)
    assert (got.tokens, got.chunks, got.errors, got.acceptance) == (503, 302, 0, 0.75)
    assert (got.ttft, got.ttft_p95) == (1.0, 2.0)


def test_together_counts_parts_of_intervals_at_both_ends() -> None:
    """Four users out of step, ten tokens each: whole chunks alone would make it a tenth less."""
    cell = measured(*(steady(user, 1.0 + user * 0.03, 0.1, 10) for user in range(4)), users=4)
    assert receipt.summary(cell).total_tok_s == pytest.approx(40)


def test_errors_are_counted_and_not_averaged() -> None:
    got = receipt.summary(measured(steady(0, 1.0, 0.1, 11), steady(0, 2.0, 9.0, 11, error="HTTP 500")))
    assert (got.requests, got.errors, got.tokens) == (2, 1, 11)
    assert got.decode_tok_s == pytest.approx(10)


def test_unknown_is_unknown() -> None:
    got = receipt.summary(measured(replace(steady(0, 1.0, 0.1, 11), completion_tokens=None), acceptance=Acceptance(0, 0)))
    assert (got.tokens, got.decode_tok_s, got.total_tok_s, got.output_tok_s, got.acceptance) == (None,) * 5
    assert got.chunks == 11
    nothing = receipt.summary(measured(steady(0, 1.0, 0.1, 3, error="x")))
    assert (nothing.ttft, nothing.itl_p50, nothing.errors) == (None, None, 1)


def test_a_receipt_comes_back_as_it_was(tmp_path: Path) -> None:
    was = made(measured(steady(0, 1.0, 0.1, 11), acceptance=Acceptance(3, 2)))
    receipt.write(tmp_path / "r.json", was)
    assert receipt.read(tmp_path / "r.json") == was


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "sm120kit.receipt/3"}', '{"format": "sm120kit.receipt/2"}'])
def test_what_is_no_receipt_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(BadReceipt, match=r"r\.json"):
        receipt.read(tmp_path / "r.json")
    with pytest.raises(BadReceipt, match="none"):
        receipt.read(tmp_path / "none")


def test_the_published_schema_is_that_of_receipts() -> None:
    published = Path(__file__).parents[2] / "docs" / "receipt.schema.json"
    assert json.loads(published.read_text()) == receipt.schema()


def test_receipts_that_differ_are_not_compared_unless_told() -> None:
    before = made(measured(steady(0, 1.0, 0.1, 11)))
    after = made(measured(steady(0, 1.0, 0.05, 11)), about=replace(ABOUT, thinking="on", given={"gpu": "b"}))
    with pytest.raises(NotComparable) as caught:
        compare.compare(before, after, ["thinking"])
    assert "given.gpu: a / b" in caught.value.message
    assert "thinking" not in caught.value.message
    found = compare.compare(before, after, ["thinking", "given.gpu"])
    (one,) = found.cells
    assert found.differ == {"thinking": ("off", "on"), "given.gpu": ("a", "b")}
    assert (one.ratio, one.beyond_spread) == (pytest.approx(2), True)


def test_a_difference_within_the_spread_is_none() -> None:
    before = made(measured(steady(0, 1.0, 0.1, 11), steady(0, 1.0, 0.08, 11)))
    after = made(measured(steady(0, 1.0, 0.09, 11), steady(0, 1.0, 0.07, 11)))
    (one,) = compare.compare(before, after, []).cells
    assert one.beyond_spread is False


def test_nothing_in_common_is_not_comparable() -> None:
    with pytest.raises(NotComparable, match="no cell in common"):
        compare.compare(made(measured(users=1)), made(measured(users=2)), [])


def test_a_partial_receipt_is_compared_only_when_told() -> None:
    whole = made(measured(steady(0, 1.0, 0.1, 11)))
    partial = replace(whole, complete=False)
    for pair in ((whole, partial), (partial, partial)):
        with pytest.raises(NotComparable, match="complete: "):
            compare.compare(*pair, [])
        assert len(compare.compare(*pair, ["complete"]).cells) == 1
    interrupted = replace(partial, cells=(replace(whole.cells[0], complete=False),))
    with pytest.raises(NotComparable, match="no cell in common"):
        compare.compare(whole, interrupted, ["complete"])


def test_with_restarts_the_spread_is_that_of_their_medians() -> None:
    """Requests from 5 to 20 tok/s in each start, whose medians are 10, 10.5 and 11: 12 is more than the spread."""
    starts = [(0.2, 0.1, 0.05), (0.2, 1 / 10.5, 0.05), (0.2, 1 / 11, 0.05)]
    before = made(
        *(replace(measured(*(steady(0, 1.0, gap, 11) for gap in gaps)), restart=number) for number, gaps in enumerate(starts))
    )
    faster = [replace(cell, samples=(steady(0, 1.0, 1 / 12, 11),)) for cell in before.cells]
    (one,) = compare.compare(before, made(*faster), []).cells
    assert (one.between, one.before, one.beyond_spread) == ("starts", pytest.approx((10.5, 10, 11)), True)
    (alone,) = compare.compare(before, made(faster[0]), []).cells
    assert (alone.between, alone.before, alone.beyond_spread) == ("requests", pytest.approx((10.5, 5, 20)), False)


def test_what_is_unknown_in_both_is_said() -> None:
    known = replace(ABOUT, machine=Machine(driver="580.1", gpus=()), served=Served(lock="b"))
    receipts = made(measured(steady(0, 1.0, 0.1, 11)), about=known)
    unknown = compare.compare(receipts, receipts, []).unknown
    assert "machine.cuda" in unknown and "served.image" in unknown
    assert not {"machine.driver", "machine.gpus", "served.lock"} & set(unknown)
    every = compare.compare(made(*receipts.cells), made(*receipts.cells), []).unknown
    assert compare.briefly(every) == "prompts_sha256, machine.*, served.*"
    known_after = compare.compare(made(*receipts.cells), receipts, ["machine.driver", "machine.gpus", "served.lock"])
    assert known_after.differ["machine.driver"] == ("unknown", "580.1") and "machine.driver" not in known_after.unknown
    with pytest.raises(NotComparable, match=r"served\.lock: b / unknown"):
        compare.compare(receipts, made(*receipts.cells), ["machine.driver", "machine.gpus"])


# ---- circumstances


def test_what_nvidia_smi_says_while_it_runs() -> None:
    said = """0, 2617, 597.31, 71, 0x0000000000000004
1, 300, [N/A], [N/A], [N/A]
0, 2400, 601.00, 74, 0x0000000000000000
0, 2500, 599.00, 73, 0x0000000000000021
0, 26"""
    found = clocks.understand(said)
    assert found is not None
    one, other = found
    assert (one.gpu, one.looks, one.sm_mhz, one.watts, one.hottest) == (0, 3, (2400, 2500, 2617), (597.31, 599.0, 601.0), 74)
    assert one.slowed == {"sw_power_cap": 1 / 3, "sw_thermal_slowdown": 1 / 3}
    assert (other.sm_mhz, other.watts, other.hottest, other.slowed) == ((300, 300, 300), None, None, None)
    assert clocks.lines(found)[1] == "GPU 1: SM 300 to 300 MHz, power unknown, heat unknown; slowed unknown"
    assert "sw_power_cap (33% of a cell), sw_thermal_slowdown (33% of a cell)" in clocks.lines(found)[0]
    assert clocks.understand("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.") is None


def test_the_revision_of_a_downloaded_model(tmp_path: Path) -> None:
    commit = "0123456789" * 4
    assert circumstances.revision(tmp_path / "snapshots" / commit) == commit
    beside = tmp_path / ".cache" / "huggingface" / "download"
    beside.mkdir(parents=True)
    assert circumstances.revision(tmp_path) is None
    (beside / "config.json.metadata").write_text(f"{commit}\netag\n1770000000.0\n")
    assert circumstances.revision(tmp_path) == commit


@pytest.mark.parametrize(
    ("url", "local"),
    [("http://127.0.0.1:8000", True), ("http://localhost", True), ("http://[::1]:1", True), ("http://10.0.0.1", False)],
)
def test_only_of_this_machine_something_is_known(url: str, local: bool) -> None:
    assert circumstances.is_local(url) is local
    if not local:
        assert circumstances.machine(url) == Machine()


def test_workloads_lie_where_the_tool_looks() -> None:
    assert (data_root() / "recipes" / "workloads" / "quick.toml").is_file()
