"""Figures of streams whose true rate is known, however their chunks arrive and are counted; their notes and names."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from sm120kit.bench import figures, result_export
from sm120kit.bench.figures import summary
from sm120kit.bench.result_file import FORMAT, Environment, MeasuredCase, Result
from sm120kit.bench.sample import Exchange, Sample, parse_sample
from sm120kit.bench.sse import MAX_EVENT_BYTES, Reader

RATE = 50.0
"""Tokens per second of every stream here."""
TOKENS = 200


def event(words: int, counted: int | None = None, finish: str | None = None) -> bytes:
    choice = {"delta": {"content": "tok " * words}, "finish_reason": finish}
    usage = {"usage": {"completion_tokens": counted}} if counted else {}
    return f"data: {json.dumps({'choices': [choice], **usage})}\n\n".encode()


def usage(**counts: object) -> bytes:
    return f"data: {json.dumps({'choices': [], 'usage': counts})}\n\n".encode()


def arrivals(chunks: list[int], flush: float = 0.0, counting: bool = False, begin: float = 1.0) -> list[tuple[float, bytes]]:
    """Chunks of so many tokens, each when its last one is generated, or at a proxy's next flush; the end is a flush, too."""
    reads, generated = [], 0
    for number, words in enumerate(chunks):
        generated += words
        when = begin + generated / RATE
        if flush and number < len(chunks) - 1:
            when = -(-when // flush) * flush
        reads.append((when, event(words, generated if counting else None, None)))
    return [*reads, (reads[-1][0], event(0, finish="stop") + usage(prompt_tokens=9, completion_tokens=generated))]


def sample(reads: list[tuple[float, bytes]], **changed: object) -> Sample:
    return replace(parse_sample(reads, Exchange(0, 0, 0.5, reads[-1][0], 200)), **changed)


def case(*samples: Sample, concurrency: int = 1, context: int = 0) -> MeasuredCase:
    return MeasuredCase(concurrency, TOKENS, context, (), samples, 0.0, None)


def result_of(*cases: MeasuredCase, model: str = "m") -> Result:
    about = Environment("http://h", model, "w", "0" * 64, "off", 0.0, {}, {})
    return Result(FORMAT, "2026-01-01T00:00:00+00:00", True, about, cases)


@pytest.mark.parametrize("counting", [True, False])
@pytest.mark.parametrize(
    ("chunks", "flush"),
    [
        ([1] * TOKENS, 0.0),
        ([1] * TOKENS, 0.25),
        ([1] * TOKENS, 1.0),
        ([1] + [4] * 50, 0.0),
        ([1] + [4] * 50, 0.25),
        ([16] + [1] * 184, 0.0),
        ([16] + [1] * 184, 0.25),
        ([2] * 100, 0.0),
        ([16, 184], 0.0),
        ([1, 199], 0.0),
    ],
)
def test_rate_of_a_request_and_total_are_those_of_the_server(chunks: list[int], flush: float, counting: bool) -> None:
    """One token or several in a chunk, more in the first, two chunks, or chunks that a proxy collects."""
    computed = summary(case(*(sample(arrivals(chunks, flush, counting, begin)) for begin in (1.0, 21.0, 41.0))))
    assert computed.decode_tok_s == pytest.approx(RATE, rel=0.02), "a step of 4 tokens takes 2 % of the time"
    assert computed.total_tok_s == pytest.approx(computed.decode_tok_s, rel=0.001)
    least, most = computed.decode_at_least, computed.decode_at_most
    assert least is not None and most is not None and least <= RATE * 1.02 and most >= RATE * 0.98
    if counting:
        assert least == most == computed.decode_tok_s


def test_first_tokens_at_once_as_chunks_are_left_out() -> None:
    """16 chunks in the first read, a few microseconds apart, then a chunk for each token."""
    reads = [(2.0 + number * 3e-6, event(1)) for number in range(16)]
    reads += [(2.0 + (number + 1) / RATE, event(1)) for number in range(184)]
    reads += [(9.0, event(0, finish="stop") + usage(completion_tokens=TOKENS))]
    assert sample(reads).decode_tok_s == pytest.approx(RATE, rel=1e-4)
    assert not figures.notes(result_of(case(sample(reads))))[:-1], "nothing is uncertain"


def test_notes_bound_the_rate_whatever_the_first_chunk_has() -> None:
    """The text is as long in each chunk, the tokens are not: no single number would be right."""
    reads = [(2.0, event(1)), (4.0, event(1)), (4.0, event(0, finish="stop") + usage(completion_tokens=64))]
    (note, *_) = figures.notes(result_of(case(sample(reads))))
    assert "0.5 to 31.5 tok/s" in note
    counted = [(2.0, event(1, 32)), (4.0, event(1, 64)), (4.0, event(0, finish="stop") + usage(completion_tokens=64))]
    assert not any("tok/s" in note for note in figures.notes(result_of(case(sample(counted)))))


REASONS: list[tuple[Callable[[], Sample], str]] = [
    (lambda: sample([*arrivals([1] * 100)[:-1], (4.0, event(0, finish="stop"))]), "usage"),
    (
        lambda: sample([*arrivals([1] * 100)[:-1], (4.0, event(0, finish="stop") + usage(completion_tokens=60))]),
        "60 tokens for 100",
    ),
    (
        lambda: sample([*arrivals([1] * 100)[:-1], (4.0, event(0, finish="stop") + usage(completion_tokens=99))]),
        "99 tokens for 100",
    ),
    (lambda: sample(arrivals([TOKENS])), "one chunk"),
    (lambda: sample([(2.0, data) for _, data in arrivals([1] * 100)]), "arrived together"),
    (lambda: sample([(2.0, event(0, finish="stop") + usage(completion_tokens=3))]), "no text"),
]


@pytest.mark.parametrize(("made", "reason"), REASONS, ids=[reason for _, reason in REASONS])
def test_unknown_rate_has_its_reason(made: Callable[[], Sample], reason: str) -> None:
    computed = summary(case(made()))
    assert (computed.decode_tok_s, computed.total_tok_s, computed.errors) == (None, None, 0)
    assert reason in computed.no_rate and any(reason in note for note in figures.notes(result_of(case(made()))))


def test_fewer_tokens_than_chunks_of_text_are_no_count() -> None:
    """A part of a tool call need not have a token of its own."""
    short = sample([*arrivals([1] * 100)[:-1], (4.0, event(0, finish="stop") + usage(completion_tokens=60))])
    assert (short.tokens, short.completion_tokens, summary(case(short)).output_tok_s) == (None, 60, None)
    call = {"choices": [{"delta": {"tool_calls": [{"function": {"arguments": "{"}}]}}]}
    calls = [(2.0 + number, f"data: {json.dumps(call)}\n\n".encode()) for number in range(4)]
    called = sample([*calls, (9.0, event(0, finish="tool_calls") + usage(completion_tokens=3))])
    assert (called.tokens, called.no_rate) == (3, "")


def test_unequal_requests_have_a_note() -> None:
    slow, fast = (sample(arrivals([1] * TOKENS, begin=1.0)) for _ in range(2))
    fast = replace(fast, chunk_seconds=tuple(1 + (moment - 1) / 4 for moment in fast.chunk_seconds))
    assert any("off the total" in note for note in figures.notes(result_of(case(fast, fast, slow, concurrency=3))))


def test_context_is_compared_with_the_count_of_the_server() -> None:
    def noted(prompt: int, context: int) -> list[str]:
        counted = sample(arrivals([1] * TOKENS), prompt_tokens=prompt, cached_tokens=0)
        return [note for note in figures.notes(result_of(case(counted, context=context))) if "prompt tokens" in note]

    assert "14,480" in noted(14480, 16384)[0] and "16,384" in noted(14480, 16384)[0]
    assert noted(16400, 16384) == noted(9, 0) == []
    assert summary(case(sample(arrivals([1] * TOKENS), prompt_tokens=14480))).prompt_tokens == 14480


def test_prefix_cache_is_that_of_usage() -> None:
    plain = sample(arrivals([1] * TOKENS), prompt_tokens=100)
    cached = replace(plain, cached_tokens=25)
    assert summary(case(cached, replace(cached, cached_tokens=75))).cache_hits == 0.5
    assert summary(case(cached, plain)).cache_hits is None, "one request is unknown"
    assert not any(note.startswith("cached") for note in figures.notes(result_of(case(cached))))
    assert any(note.startswith("cached") for note in figures.notes(result_of(case(plain))))


def test_exported_figures_have_the_names_and_values_that_are_shown() -> None:
    measured = result_of(case(*(sample(arrivals([1] + [4] * 50, begin=begin)) for begin in (1.0, 21.0))))
    computed = summary(measured.cases[0])
    heads, values = (
        [text.strip() for text in line.split("|")[1:-1]]
        for line in result_export.as_markdown([("a", measured)]).splitlines()[4:7:2]
    )
    shown = dict(zip(heads, values, strict=True))
    known = [name for name in result_export.FIGURES if getattr(computed, name) is not None]
    assert {"decode_tok_s", "prefill_tok_s", "ttft"} <= set(known) < set(result_export.FIGURES)
    for name in known:
        assert shown[figures.COLUMNS[name][0]] == figures.text(computed, name)
    assert figures.COLUMNS["acceptance"][0] not in heads, "unknown of every case"
    assert len({title for title, _ in figures.COLUMNS.values()}) == len(figures.COLUMNS)


HOSTILE = '=HYPERLINK("http://x")|<img src=x onerror=alert(1)>[a](javascript:b)\n# title `code` $x$'


@pytest.mark.parametrize("name", ["=1", "+1", "-1", "@a", "\t=1", " =1", "\r=1", "|a", "%0A"])
def test_names_are_no_formulas(name: str) -> None:
    """A spreadsheet computes a text that begins so."""
    result = result_of(case(sample(arrivals([1] * 9))), model=name)
    quoted = f"'{name.strip()}"
    rows = csv.reader(io.StringIO(result_export.as_csv([(name, result)]), newline=""))
    assert [*rows][1][:2] == [quoted] * 2
    assert f"\n{quoted}," in result_export.KINDS[".benchy.csv"]([("a", result)])


def test_names_of_models_are_no_markup() -> None:
    measured = [("@SUM(1)", result_of(case(sample(arrivals([1] * 9))), model=HOSTILE))]
    text = result_export.as_markdown(measured)
    assert not any(mark in text for mark in ("<img", "](", "`code`", "\n# title"))
    assert "<img" not in result_export.in_markdown(HOSTILE) and "|" not in result_export.in_markdown(HOSTILE)


# ---- the time of parsing


def seconds(work: Callable[[], object]) -> float:
    """Processor time of the fastest of three runs."""
    times = []
    for _ in range(3):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


STREAMS: dict[str, Callable[[int], list[bytes]]] = {
    "a line without end": lambda size: [b"x" * 50] * (size // 50),
    "a comment without end": lambda size: [b":", *[b"x" * 50] * (size // 50)],
    "data without a blank line": lambda size: [b"data: xxxxxxxxxxxxxxxxxxxxxxxxxxx\n"] * (size // 34),
    "carriage returns": lambda size: [b"\r" * 50] * (size // 50),
    "bytes": lambda size: [b"x"] * (size // 8),
    "events": lambda size: [b"data: x\n\n" * 5] * (size // 50),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_time_of_reading_a_stream_grows_with_its_length(kind: str) -> None:
    def read(size: int) -> Callable[[], None]:
        reads = STREAMS[kind](size)

        def work() -> None:
            reader = Reader()
            for each in reads:
                reader.feed(each)

        return work

    assert seconds(read(2_000_000)) < 3.5 * seconds(read(1_000_000)) + 0.05


def test_event_without_end_is_an_error_and_not_kept() -> None:
    reader = Reader()
    for _ in range(2 * MAX_EVENT_BYTES // 2**16):
        assert reader.feed(b"x" * 2**16) == []
    assert "4 MiB" in reader.problem and reader.feed(b"\n\ndata: a\n\n") == []
    got = parse_sample([(1.0, event(1)), (2.0, b"data: " + b"x" * (MAX_EVENT_BYTES + 1))], Exchange(0, 0, 0.0, 3.0, 200))
    assert "4 MiB" in got.error and len(got.chunk_seconds) == 1


def test_event_after_bare_carriage_returns_has_the_time_of_its_read() -> None:
    reader = Reader()
    assert [found.data for found in reader.feed(b"data: a\r\r")] == ["a"]
    assert reader.problem == "" and [found.data for found in reader.feed(b"\ndata: b\r\n\r")] == ["b"]
    assert [found.data for found in reader.feed(b"\ndata: c\n\n")] == ["c"]
    ends = event(1, finish="stop").replace(b"\n", b"\r")
    got = parse_sample([(1.0, event(1).replace(b"\n", b"\r")), (2.0, ends)], Exchange(0, 0, 0.0, 3.0, 200))
    assert (got.error, got.chunk_seconds) == ("", (1.0, 2.0))


def test_time_of_the_total_grows_with_the_requests() -> None:
    def total(requests: int) -> Callable[[], object]:
        samples = [sample(arrivals([1] * 8, begin=1.0 + number)) for number in range(requests)]
        return lambda: summary(case(*samples))

    assert seconds(total(1600)) < 3.5 * seconds(total(800)) + 0.05
