"""Verdicts of the probes on recorded requests and answers."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from loopback import http_served

from sm120kit import probes
from sm120kit.bench.client import EndedRequest
from sm120kit.bench.sample import Exchange
from sm120kit.core.errors import NotFound, ServerFailed
from sm120kit.core.urls import Endpoint
from sm120kit.probes import ProbeVerdict, probe_session, structured_answers, word_copy
from sm120kit.probes.answer_text import ANSWER_TEXT
from sm120kit.probes.cached_prefixes import CACHED_PREFIXES
from sm120kit.probes.decode_by_prefill import DECODE_BY_PREFILL
from sm120kit.probes.known_text import KNOWN_TEXT
from sm120kit.probes.log_probabilities import LOG_PROBABILITIES
from sm120kit.probes.needles import NEEDLES
from sm120kit.probes.probe_prompts import COLOURS, codes, needle
from sm120kit.probes.probe_records import AnsweredToken, CannotBeJudged, ProbeExchange, RecordedAnswer, ToolCall
from sm120kit.probes.probe_session import Ask, ProbeSession, ServerProbe
from sm120kit.probes.recorded_answer import answer_of
from sm120kit.probes.reference_answers import REFERENCE_SERVER
from sm120kit.probes.repeated_requests import REPEATED_REQUESTS, WAYS
from sm120kit.probes.same_distributions import difference, problem
from sm120kit.probes.structured_answers import STRUCTURED_ANSWERS
from sm120kit.probes.token_counts import TOKEN_COUNTS
from sm120kit.probes.word_copy import REQUEST, WORD_COPY

OK, WRONG, UNKNOWN = ProbeVerdict.OK, ProbeVerdict.WRONG, ProbeVerdict.UNKNOWN


def token(text: str, **shares: float) -> AnsweredToken:
    """A token of a distribution; ``shares`` are probabilities by token, those of the rest are small."""
    top = tuple((name, math.log(share)) for name, share in (shares or {text: 0.9, "other": 0.05}).items())
    return AnsweredToken(text, dict(top).get(text, -9.0), top)


def spoken(*tokens: AnsweredToken, **more: Any) -> RecordedAnswer:
    answer = RecordedAnswer(content="".join(f" {each.text}" for each in tokens), tokens=tokens, finish_reason="length")
    return replace(answer, **more)


def verdict(
    probe: ServerProbe, answers: Mapping[str, RecordedAnswer], bodies: Mapping[str, dict[str, Any]] | None = None
) -> ProbeVerdict:
    recorded = {label: ProbeExchange(label, "", (bodies or {}).get(label, {}), answer) for label, answer in answers.items()}
    try:
        return probe.judge(recorded).verdict
    except CannotBeJudged:
        return UNKNOWN


def answers_by_way(alone: RecordedAnswer, **changed: RecordedAnswer) -> dict[str, RecordedAnswer]:
    """Answers to two questions."""
    return {f"{way}/{number}": changed.get(way, alone) for way in ("alone", "crowd-alone", *WAYS) for number in (0, 1)}


SAME = [token(f"w{number}") for number in range(12)]


@pytest.mark.parametrize("way", WAYS)
def test_a_token_that_another_way_of_asking_changes_is_a_fault_unless_two_are_about_equally_likely(way: str) -> None:
    alone = spoken(*SAME, token("a", a=0.46, b=0.44), *SAME)
    tie = spoken(*SAME, token("b", a=0.44, b=0.46), token("elsewhere"))
    other = spoken(*SAME, token("b", a=0.02, b=0.95))
    assert verdict(REPEATED_REQUESTS, answers_by_way(alone)) is OK
    assert verdict(REPEATED_REQUESTS, answers_by_way(alone, **{way: tie})) is OK
    assert verdict(REPEATED_REQUESTS, answers_by_way(alone, **{way: other})) is WRONG
    chosen_wrongly = spoken(*SAME, token("b", a=0.8, b=0.1))
    surely = spoken(*SAME, token("a", a=0.8, b=0.1))
    assert verdict(REPEATED_REQUESTS, answers_by_way(surely, **{way: chosen_wrongly})) is WRONG


def test_one_request_of_a_batch_may_be_a_tie_of_experts_and_one_of_two_batches_is_a_fault() -> None:
    alone = spoken(*SAME, token("a", a=0.96, b=0.001), *SAME)
    far = spoken(*SAME, token("b", a=0.001, b=0.96), token("elsewhere"))
    answers = answers_by_way(alone)
    assert verdict(REPEATED_REQUESTS, answers | {"among/0": far}) is OK
    assert verdict(REPEATED_REQUESTS, answers | {"among/0": far, "crowd-last/1": far}) is WRONG


@pytest.mark.parametrize(("way", "expected"), [("among", OK), ("crowd-last", OK), ("again", WRONG)])
def test_two_ties_in_a_batch_are_rounding_where_numbers_depend_on_the_batch(way: str, expected: ProbeVerdict) -> None:
    """As a healthy mixture of experts in BF16 has them; a server that is exact elsewhere has none."""
    noisy = [token(f"w{number}", **{f"w{number}": 0.9, "z": 0.02}) for number in range(12)]
    exact = [token(f"w{number}", **{f"w{number}": 0.9, "z": 0.025}) for number in range(12)]
    tie = [token("a", a=0.6, b=0.2), token("a", a=0.6, b=0.39)]
    answers = answers_by_way(spoken(*exact, tie[0], *exact))
    assert verdict(REPEATED_REQUESTS, answers_by_way(spoken(*exact, tie[0]), **{way: spoken(*noisy, tie[1])})) is expected
    apart = {f"{way}/0": spoken(*exact, tie[1]), "crowd-among/1": spoken(*exact, tie[1])}
    assert verdict(REPEATED_REQUESTS, answers | apart) is WRONG


def test_a_first_request_that_fails_does_not_hide_log_probabilities() -> None:
    """It may compile for longer than a request may take."""
    posts: list[dict[str, Any]] = []

    class Cold(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            listed = {"content": [{"token": "one", "logprob": -0.1, "top_logprobs": []}]}
            choice = {"index": 0, "message": {"role": "assistant", "content": "one"}, "logprobs": listed}
            body = json.dumps({"choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": 1}}).encode()
            self.send_response(503 if len(posts) == 1 else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            pass

    with http_served(Cold) as url:
        session = ProbeSession(Endpoint.parse(url), "small", "seed", time.monotonic() + 60)
        session.measure()
    assert session.lists and all("logprobs" in each for each in posts)


@contextmanager
def answering(answer: Callable[[str], bytes]) -> Iterator[tuple[str, list[str]]]:
    """The URL of a server that answers each path, and the paths that were asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            body = answer(self.path)
            self.send_response(200 if body else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with suppress(OSError):  # the client has given up
                self.wfile.write(body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, *arguments: Any) -> None:
            pass

    with http_served(Handler) as url:
        yield url, asked


TEXT_ANSWER = json.dumps({"choices": [{"text": " one", "finish_reason": "length"}]}).encode()


def test_a_path_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Event()
    with answering(lambda path: TEXT_ANSWER if "chat" in path or ended.wait(60) else b"") as (url, asked):
        session = ProbeSession(Endpoint.parse(url), "small", "seed", time.monotonic() + 60)
        with monkeypatch.context() as limited:
            for limit in ("REQUEST_SECONDS", "TOKENIZE_SECONDS"):
                limited.setattr(probe_session, limit, 0.3)
            assert [session.token_ids("a") for _ in range(3)] == [None] * 3
            answers = session.send(session.text(str(number), "a") for number in range(3))
        with pytest.raises(CannotBeJudged):
            KNOWN_TEXT.ask(session)
        (chat,) = session.send([session.chat("chat", "a")])
        ended.set()
    assert all("0.3 s" in answer.error for answer in answers) and len(session.exchanges) == 4 and not chat.error
    # A busy machine may not have sent a request before its time was over.
    assert asked.count("/tokenize") <= 1 and asked.count("/v1/completions") <= 1 and "/v1/chat/completions" in asked


def test_a_server_without_a_chat_template_is_probed_with_texts() -> None:
    with answering(lambda path: TEXT_ANSWER if path == "/v1/completions" else b"") as (url, asked):
        session = ProbeSession(Endpoint.parse(url), "small", "seed", time.monotonic() + 60)
        session.measure()
        chats = asked.count("/v1/chat/completions")
        chat, text = session.send([session.chat("chat", "a"), session.text("text", "a")])
    assert session.lists and "404" in chat.error and text.content == " one" and chats == asked.count("/v1/chat/completions")


@pytest.mark.parametrize("drip", [b"", b" "], ids=["silent", "drip"])
def test_a_server_that_does_not_answer_in_time_is_an_error(drip: bytes) -> None:
    class Slow(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            listed = b'{"data": [{"id": "small"}]}' if self.path == "/v1/models" else b""
            self.send_response(200 if listed else 404)
            self.end_headers()
            self.wfile.write(listed)

        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            while True:
                try:
                    self.wfile.write(drip)
                    self.wfile.flush()
                    self.connection.settimeout(0.1)
                    if not self.connection.recv(1):
                        return
                except TimeoutError:
                    continue
                except OSError:
                    return

        def log_message(self, *arguments: Any) -> None:
            pass

    with http_served(Slow) as url, pytest.raises(ServerFailed, match="time limit"):
        probes.verify(probes.VerifiedServer(Endpoint.parse(url), "small"), seconds=2.5)


def test_log_probabilities_that_no_float_has_the_exponential_of_are_compared() -> None:
    one = spoken(AnsweredToken("a", 900.0, (("a", 900.0),)), AnsweredToken("b", -1.0))
    other = spoken(AnsweredToken("a", -9e3, (("a", -9e3),)), AnsweredToken("c", -1.0))
    assert problem([difference(one, other)] * 2)


def test_lists_without_a_common_token_are_far_apart() -> None:
    """A lower bound that counts all unlisted tokens as one has no divergence here."""
    assert problem([difference(spoken(token("a", a=0.9, b=0.05)), spoken(token("c", c=0.9, d=0.05)))] * 2)
    assert not problem([difference(spoken(token("a", a=0.5, b=0.02)), spoken(token("a", a=0.5, c=0.02)))])


def test_without_log_probabilities_only_equal_answers_are_judged() -> None:
    plain, other = RecordedAnswer(content="one two"), RecordedAnswer(content="one three")
    assert verdict(REPEATED_REQUESTS, answers_by_way(plain)) is OK
    assert verdict(REPEATED_REQUESTS, answers_by_way(plain, stream=replace(plain, content="one two"))) is OK
    assert verdict(REPEATED_REQUESTS, answers_by_way(plain, among=other)) is UNKNOWN


def test_text_that_a_stream_loses_is_a_fault_and_half_a_character_at_its_end_is_none() -> None:
    alone = spoken(*SAME)
    assert verdict(REPEATED_REQUESTS, answers_by_way(alone, stream=replace(alone, content="w0"))) is WRONG
    assert verdict(REPEATED_REQUESTS, answers_by_way(replace(alone, content=alone.content + "\ufffd"), stream=alone)) is OK


def test_a_request_that_failed_cannot_be_judged() -> None:
    failed = RecordedAnswer(error="HTTP 400: no logprobs")
    for probe in (*probes.PROBES, REFERENCE_SERVER):
        labels = ("alone/0", "tool/whole", "tool/stream", "schema", "cold", "text", "shuffled", "short/red", "long/red")
        assert verdict(probe, dict.fromkeys(labels, failed)) is UNKNOWN, probe.name


def test_cached_prefixes_compare_with_prompts_that_are_cold() -> None:
    one, two = spoken(*SAME), spoken(*[token(each.text, **{each.text: 0.3, "b": 0.28}) for each in SAME])
    good = {"cold": one, "again": one, "turn": two, "turn again": two, "other": one, "turn cold": two, "other cold": one}
    good = {f"{label}/{number}": answer for label, answer in good.items() for number in range(3)}
    assert verdict(CACHED_PREFIXES, good) is OK
    for label in ("again", "turn again", "other"):
        changed = {f"{label}/{number}": two if good[f"{label}/0"] is one else one for number in (0, 1)}
        assert verdict(CACHED_PREFIXES, {**good, **changed}) is WRONG, label
    assert verdict(CACHED_PREFIXES, {"cold/0": one, "again/0": one}) is OK


def cuts(last: AnsweredToken, read: dict[int, int]) -> dict[str, RecordedAnswer]:
    whole = spoken(*SAME, prompt_tokens=5)
    again = {f"a/{number}": spoken(SAME[number], prompt_tokens=5 + number) for number in range(1, 10)}
    return {"a/whole": whole, **again, **{f"a/{number}": spoken(last, prompt_tokens=tokens) for number, tokens in read.items()}}


def test_a_token_that_prefill_computes_otherwise_is_a_fault_if_the_text_is_read_as_the_same_tokens() -> None:
    other = token("x", x=0.9, y=0.05)
    assert verdict(DECODE_BY_PREFILL, cuts(SAME[11], {11: 16})) is OK
    assert verdict(DECODE_BY_PREFILL, cuts(other, {10: 15, 11: 16})) is WRONG
    assert verdict(DECODE_BY_PREFILL, cuts(other, {11: 16})) is OK, "one may be a tie of two experts"
    assert verdict(DECODE_BY_PREFILL, cuts(other, {10: 14, 11: 15})) is OK
    assert verdict(DECODE_BY_PREFILL, {"a/whole": spoken(*SAME, prompt_tokens=5)}) is UNKNOWN


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (token("a", a=0.6, b=0.3), OK),
        (AnsweredToken("a", 0.5, (("a", 0.5),)), WRONG),
        (token("a", a=0.8, b=0.7), WRONG),
        (token("b", a=0.8, b=0.1), WRONG),
        (token("b", a=0.41, b=0.4), OK),
        (AnsweredToken("a", -0.1, (("b", -3.0), ("c", -4.0))), WRONG),
        (AnsweredToken("a", -0.1), UNKNOWN),
    ],
)
def test_log_probabilities(found: AnsweredToken, expected: ProbeVerdict) -> None:
    assert verdict(LOG_PROBABILITIES, {"chat/0": spoken(found)}) is expected


def document(colour: str, code: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": needle(colour, code)}]}


def needles(long: Sequence[bool], short: bool = True) -> tuple[dict[str, RecordedAnswer], dict[str, dict[str, Any]]]:
    """Answers of a server that recalls the codes at these depths."""
    known, answers, bodies = codes("a"), dict[str, RecordedAnswer](), dict[str, dict[str, Any]]()
    for number, colour in enumerate(COLOURS):
        right = {"short": short, "long": long[number], "changed": long[number]}
        for way in right if number < 3 else ("long", "changed"):
            code = known[colour] + (way == "changed")
            bodies[f"{way}/{colour}"] = document(colour, code)
            said = str(code if right[way] else 0)
            answers[f"{way}/{colour}"] = spoken(token(said), token("end"))
    answers["repeated/0"] = answers[f"long/{COLOURS[0]}"]
    return answers, bodies


def test_needles() -> None:
    every = [True] * len(COLOURS)
    middle = [number not in (3, 4) for number in range(len(COLOURS))]
    assert verdict(NEEDLES, *needles(every)) is OK
    assert verdict(NEEDLES, *needles(middle)) is WRONG, "what is lost does not influence the answer"
    assert verdict(NEEDLES, *needles([number != 3 for number in range(8)])) is OK, "one miss is not a fault"
    assert verdict(NEEDLES, *needles([False] * 8, short=False)) is UNKNOWN, "a model that recalls nothing"
    answers, bodies = needles([False] * 8)
    assert verdict(NEEDLES, {label: replace(answer, tokens=()) for label, answer in answers.items()}, bodies) is WRONG


@pytest.mark.parametrize(
    ("short", "long", "expected"),
    [("a b c", "a b c d e f", OK), ("a b c", "a b x y z", WRONG), ("a c", "a b c d e f", UNKNOWN)],
)
def test_copied_words(short: str, long: str, expected: ProbeVerdict) -> None:
    asked = {"short/0": "a b c", "long/0": "a b c d e f"}
    bodies = {label: {"messages": [{"content": f"{REQUEST} {words}"}]} for label, words in asked.items()}
    answers = {"short/0": RecordedAnswer(content=short), "long/0": RecordedAnswer(content=long)}
    assert verdict(WORD_COPY, answers, bodies) is expected


def test_known_text() -> None:
    def scored(nats: float, count: int = 10) -> RecordedAnswer:
        return RecordedAnswer(tokens=tuple(AnsweredToken("1", -nats) for _ in range(count)))

    good = {
        "text": scored(3.0),
        "shuffled": scored(6.0),
        "far": replace(scored(9.0, 50), tokens=scored(9.0, 50).tokens + scored(3.1).tokens),
    }
    assert verdict(KNOWN_TEXT, good) is OK
    for label, nats in (("text", 7.0), ("shuffled", 3.1), ("far", 6.0)):
        assert verdict(KNOWN_TEXT, {**good, label: scored(nats, 60 if label == "far" else 10)}) is WRONG, label


PROSE = (
    "The sky is blue because the light of the sun is scattered by the air, and blue light is scattered more than the other "
    "colours that are in it, so it comes to us from all sides."
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (PROSE, OK),
        (f"<think>{PROSE}</think>{PROSE}", OK),
        (f"<think>{PROSE}", WRONG),
        (PROSE.replace("e", "\ufffd"), WRONG),
        (f"{PROSE}<|im_end|>", WRONG),
        ("!" * 60, WRONG),
        ("Sure: " + "the the " * 20, WRONG),
        ("天空是蓝色的因为阳光被空气散射" * 4, WRONG),
        ("xqv blorp zint " * 3 + "kwe nuf drim tol ska vel pru gim hok " * 5, WRONG),
        ("", WRONG),
        (f"\ufeff{PROSE}", WRONG),
        (PROSE.replace(" ", "\u200b "), WRONG),
        (f"{PROSE} \U0001f469\u200d\U0001f52c", OK),
    ],
)
def test_text(text: str, expected: ProbeVerdict) -> None:
    answers = {f"question/{number}": RecordedAnswer(content=text, finish_reason="stop") for number in range(4)}
    assert verdict(ANSWER_TEXT, answers) is expected


def test_thoughts_that_a_server_does_not_send_cannot_be_judged() -> None:
    cut = RecordedAnswer(completion_tokens=48, finish_reason="length")
    answers = {f"question/{number}": cut for number in range(4)}
    assert verdict(ANSWER_TEXT, answers) is UNKNOWN
    assert verdict(REPEATED_REQUESTS, answers_by_way(cut)) is UNKNOWN, "empty answers are not the same answer"
    assert verdict(ANSWER_TEXT, {label: replace(cut, tokens=(token("a"),)) for label in answers}) is WRONG
    assert verdict(ANSWER_TEXT, {label: replace(cut, finish_reason="stop") for label in answers}) is WRONG


def test_an_answer_that_was_cut_may_end_within_a_character_and_within_a_thought() -> None:
    for reason in ("length", None):
        cut = RecordedAnswer(content=f"<think>{PROSE}\ufffd", finish_reason=reason)
        assert verdict(ANSWER_TEXT, {f"question/{number}": cut for number in range(4)}) is OK


def call(arguments: str, name: str = "get_weather") -> RecordedAnswer:
    return RecordedAnswer(tool_calls=(ToolCall(name, arguments),), finish_reason="tool_calls")


GOOD_CALL, GOOD_JSON = (
    call('{"city": "Paris"}'),
    RecordedAnswer(content='{"city": "Paris", "inhabitants": 2000000}', finish_reason="stop"),
)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, OK),
        ({"tool/whole": call('{"city": "Par')}, WRONG),
        ({"tool/stream": call('{"city": "Paris"')}, WRONG),
        ({"tool/whole": call("{}", "get_time")}, WRONG),
        ({"tool/whole": RecordedAnswer(finish_reason="tool_calls")}, WRONG),
        ({"tool/whole": RecordedAnswer(content='<tool_call>{"name": "get_weather"}</tool_call>')}, WRONG),
        ({"schema": RecordedAnswer(content='{"city": "Paris"', finish_reason="stop")}, WRONG),
        ({"schema": RecordedAnswer(content='{"city": "Paris"}', finish_reason="stop")}, WRONG),
        ({"schema": RecordedAnswer(content='{"city": "Pa', finish_reason="length")}, OK),
        ({"tool/whole": RecordedAnswer(content="It rains."), "tool/stream": RecordedAnswer(error="HTTP 400")}, OK),
        ({label: RecordedAnswer(content="It rains.") for label in ("tool/whole", "tool/stream", "schema")}, UNKNOWN),
    ],
)
def test_tool_calls_and_json(changed: dict[str, RecordedAnswer], expected: ProbeVerdict) -> None:
    answers = {"tool/whole": GOOD_CALL, "tool/stream": GOOD_CALL, "schema": GOOD_JSON, **changed}
    assert verdict(STRUCTURED_ANSWERS, answers) is expected


def counted(prompt: int, completion: int = 12, cached: int = 0) -> RecordedAnswer:
    return spoken(*SAME, prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)


COUNTS = {
    "tokenized": spoken(*SAME * 10),
    "text": counted(121),
    "text again": counted(121, cached=112),
    "chat": counted(130),
    "three messages": counted(380),
    "whole": counted(20),
    "stream": counted(20),
}


@pytest.mark.parametrize(
    ("label", "changed", "expected"),
    [
        ("text", counted(120), OK),
        ("text", counted(240), WRONG),
        ("text", counted(121, 24), WRONG),
        ("text again", counted(9, cached=112), WRONG),
        ("chat", counted(121), WRONG),
        ("three messages", counted(130), WRONG),
        ("stream", counted(20, 4), WRONG),
        ("stream", RecordedAnswer(error="HTTP 400"), OK),
    ],
)
def test_counts_of_tokens(label: str, changed: RecordedAnswer, expected: ProbeVerdict) -> None:
    assert verdict(TOKEN_COUNTS, COUNTS) is OK
    assert verdict(TOKEN_COUNTS, {**COUNTS, label: changed}) is expected
    assert verdict(TOKEN_COUNTS, {label: replace(answer, prompt_tokens=None) for label, answer in COUNTS.items()}) is UNKNOWN


def ended(*documents: object, raw: bytes = b"") -> EndedRequest:
    content = raw or b"".join(b"data: " + json.dumps(document).encode() + b"\n\n" for document in documents)
    return [(0.1, content[:7]), (0.2, content[7:])], Exchange(0, 0, 0.0, 1.5, 200)


def test_an_answer_is_the_same_as_a_stream_and_at_once() -> None:
    listed = {"content": [{"token": "a", "logprob": -0.1, "top_logprobs": [{"token": "a", "logprob": -0.1}]}]}
    function = {"name": "f", "arguments": '{"x": 1}'}
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 2}}
    message = {"content": "a", "reasoning_content": "b", "tool_calls": [{"function": function}]}
    at_once = {"choices": [{"message": message, "logprobs": listed, "finish_reason": "stop"}], "usage": usage}
    parts = [{"arguments": '{"x"', "name": "f"}, {"arguments": ": 1}"}]
    deltas: list[dict[str, Any]] = [{"reasoning_content": "b"}, {"content": "a"}]
    deltas += [{"tool_calls": [{"index": 0, "function": part}]} for part in parts]
    events = [{"choices": [{"delta": delta, "logprobs": listed if "content" in delta else None}]} for delta in deltas]
    last = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
    whole = answer_of(ended(raw=json.dumps(at_once).encode()))
    assert whole == answer_of(ended(*events, last, {"choices": [], "usage": usage})) and whole.tokens[0].top == (("a", -0.1),)
    assert (whole.prompt_tokens, whole.cached_tokens, whole.tool_calls[0].arguments) == (3, 2, '{"x": 1}')


def test_log_probabilities_of_completions() -> None:
    listed = {"tokens": [" a"], "token_logprobs": [-0.2], "top_logprobs": [{" b": -2.0, " a": -0.2}]}
    answer = answer_of(ended(raw=json.dumps({"choices": [{"text": " a", "logprobs": listed}]}).encode()))
    assert answer.tokens == (AnsweredToken(" a", -0.2, ((" a", -0.2), (" b", -2.0))),)


@pytest.mark.parametrize(
    "raw",
    [
        b"{",
        b"[]",
        b"<html>",
        b"",
        b'{"choices": []}',
        b'{"choices": 3}',
        b'{"choices": [[]]}',
        b'{"choices": [{"logprobs": {"content": [{}]}}]}',
        b'{"choices": [{"logprobs": {"content": [{"token": "a", "logprob": "x"}]}}]}',
        b'{"choices": [{"message": {"tool_calls": [7]}}]}',
        b'{"choices": [{"message": {"content": [{"type": "text", "text": "a"}]}}]}',
        b'{"choices": [{"message": {"reasoning_content": 5}}]}',
        b'{"choices": [{"text": "a", "finish_reason": {"type": "stop"}}]}',
        b'{"choices": [{"text": "a", "logprobs": {"tokens": ["a"], "token_logprobs": ["NaN"]}}]}',
        b'{"error": {"message": "out of blocks"}}',
        b'data: {"choices": [{"delta": {"content": "a"}',
    ],
)
def test_what_is_no_answer_has_an_error(raw: bytes) -> None:
    assert answer_of(ended(raw=raw or b" ")).error


def test_endless_lists_are_cut() -> None:
    calls = [{"index": number, "function": {"name": "f"}} for number in range(10_000)]
    answer = answer_of(
        ended(raw=json.dumps({"choices": [{"message": {"content": "a" * 10**6, "tool_calls": calls}}]}).encode())
    )
    assert len(answer.content) == 1 << 16 and len(answer.tool_calls) == 8


@pytest.mark.parametrize("probe", [structured_answers, word_copy])
def test_what_needs_no_log_probabilities_does_not_name_them(probe: Any) -> None:
    """llama.cpp refuses ``top_logprobs`` beside ``"logprobs": false``."""
    asked: list[Ask] = []

    class Asked(ProbeSession):
        def send(self, asks: Iterable[Ask], **options: Any) -> list[RecordedAnswer]:
            asked.extend(asks)
            return []

    probe.ask(Asked(Endpoint.parse("http://127.0.0.1:1"), "m", "seed", 0.0))
    assert asked and not any(name in ask.body for ask in asked for name in ("logprobs", "top_logprobs"))


def test_probes_are_selected_by_name() -> None:
    assert [probe.name for probe in probes.selected(["needles", "text"])] == ["needles", "text"]
    assert probes.selected([]) == probes.PROBES and len({probe.name for probe in probes.PROBES}) == len(probes.PROBES)
    with pytest.raises(NotFound, match="did you mean 'needles'"):
        probes.selected(["needle"])


def test_published_schema_is_current() -> None:
    published = Path(__file__).parents[2] / "docs" / "server-verification.schema.json"
    assert json.loads(published.read_text()) == json.loads(json.dumps(probes.schema()))
