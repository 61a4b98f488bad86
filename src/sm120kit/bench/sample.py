"""Parse a streamed answer of an OpenAI-compatible server into a sample: times of its chunks, counts of its tokens.

Reads are stamped as they arrive and parsed after all streams have ended, so that parsing never delays a stamp.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from sm120kit.bench.sse import Reader
from sm120kit.core.outside import parse_json

Reads = Sequence[tuple[float, bytes]]
"""Received bytes, with seconds since the run began."""

FAILED = ("abort", "error")
"""Finish reasons of a request that the engine gave up (vLLM's FinishReason, SGLang's FINISH_ABORT)."""

TOGETHER = 0.1
"""Chunks closer than this share of the mean time between chunks arrived together."""


@dataclass(frozen=True)
class Sample:
    """One request. Times are seconds since the run began; None is unknown, never zero.

    ``completion_tokens`` is the server's count in ``usage``; ``chunk_seconds`` are the times of events with text, and
    ``chunk_sizes`` the characters of each, 0 for a part of a tool call. Numbers of tokens and chunks differ: a chunk may have
    several tokens, and a token may be delayed until its character is complete. ``chunk_tokens`` are the tokens of each chunk
    if the server counts them in the stream. ``text_sha256`` is of reasoning and answer. ``error`` is empty for a successful
    request; the data before an error is kept.
    """

    user: int
    prompt: int
    started: float
    ended: float
    status: int | None
    error: str
    chunk_seconds: tuple[float, ...]
    answer_chunks: int
    first_token: float | None
    first_answer: float | None
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    reasoning_tokens: int | None
    finish_reason: str | None
    model: str | None
    text_sha256: str
    chunk_tokens: tuple[int, ...] | None = None
    chunk_sizes: tuple[int, ...] = ()

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token of any kind."""
        return None if self.first_token is None else self.first_token - self.started

    @property
    def ttfa(self) -> float | None:
        """Seconds to the first token of the answer, after all reasoning."""
        return None if self.first_answer is None else self.first_answer - self.started

    @property
    def prefill_tok_s(self) -> float | None:
        """Uncached prompt tokens over the time to the first token, waiting included; None if more are cached than there are."""
        cached = self.cached_tokens or 0
        if self.error or self.prompt_tokens is None or not self.ttft or cached > self.prompt_tokens:
            return None
        return (self.prompt_tokens - cached) / self.ttft

    @property
    def tokens(self) -> int | None:
        """Tokens of the answer; None without ``usage``, or if it has fewer than one for each chunk of text."""
        return self.completion_tokens if not self._miscounted else None

    @property
    def _miscounted(self) -> bool:
        texts = sum(size > 0 for size in self.chunk_sizes)
        return self.completion_tokens is not None and self.completion_tokens < texts

    @property
    def no_rate(self) -> str:
        """The reason why the decode rate is unknown, "" if it is known."""
        times = self.chunk_seconds
        if self.error:
            return "the request failed"
        if self.completion_tokens is None:
            return "the server does not count tokens (usage)"
        if self._miscounted:
            return f"usage has {self.completion_tokens:,} tokens for {len(times):,} chunks of text"
        if len(times) < 2 or self.completion_tokens < 2:
            return "the answer came in one chunk" if times else "the answer has no text"
        return "" if times[-1] > times[self._together - 1] else "all chunks arrived together"

    @property
    def _together(self) -> int:
        """The number of chunks that arrived with the first, as those of a proxy that collects them do, with it.

        They follow each other within ``TOGETHER`` of the mean time between chunks.
        """
        times = self.chunk_seconds
        limit = TOGETHER * (times[-1] - times[0]) / max(1, len(times) - 1)
        return next((number for number, gap in enumerate(self.itl, 1) if gap > limit), len(times))

    @property
    def received(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """Times of chunks and tokens received until then, from the last one that arrived with the first; None without rate."""
        if self.no_rate:
            return None
        begin = self._together - 1
        return self.chunk_seconds[begin:], tuple(accumulate(self.chunk_tokens or self._estimated_tokens()))[begin:]

    def _estimated_tokens(self) -> list[float]:
        """Tokens of each chunk: one, and of those beyond the number of chunks the share that the length of its text has."""
        total, chunks = self.completion_tokens or 0, len(self.chunk_seconds)
        characters = sum(self.chunk_sizes)
        surplus = [max(0.0, total * size / characters - 1) if characters else 1.0 for size in self.chunk_sizes or [1] * chunks]
        share = max(0, total - chunks) / (sum(surplus) or 1.0)
        return [1 + share * each for each in surplus]

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens per second: those of all chunks but the ones that arrived with the first, over the time until the last."""
        if (received := self.received) is None:
            return None
        times, tokens = received
        return (tokens[-1] - tokens[0]) / (times[-1] - times[0])

    @property
    def decode_bounds(self) -> tuple[float, float] | None:
        """Lowest and highest decode rate with at least one token in each chunk; equal if the server counts tokens by chunk."""
        if (rate := self.decode_tok_s) is None:
            return None
        if self.chunk_tokens:
            return rate, rate
        chunks, together = len(self.chunk_seconds), self._together
        seconds = self.chunk_seconds[-1] - self.chunk_seconds[together - 1]
        surplus = max(0, (self.completion_tokens or 0) - chunks)
        return (chunks - together) / seconds, (chunks - together + surplus) / seconds

    @property
    def itl(self) -> tuple[float, ...]:
        """Seconds between chunks with text."""
        return tuple(after - before for before, after in pairwise(self.chunk_seconds))


class _Answer:
    """The parsed part of a stream."""

    def __init__(self) -> None:
        self.chunk_seconds: list[float] = []
        self.chunk_sizes: list[int] = []
        self.counted: list[int | None] = []
        self.streamed_tokens = 0
        self.answer_chunks = 0
        self.first_answer: float | None = None
        self.counts: dict[str, int | None] = {}
        self.finish_reason: str | None = None
        self.model: str | None = None
        self.error = ""
        self.reasoning, self.answer = hashlib.sha256(), hashlib.sha256()
        self.done = False

    def add(self, seconds: float, name: str, data: str) -> None:
        if data.strip() == "[DONE]":
            self.done = True
            return
        try:
            event = parse_json(data)
            if not isinstance(event, dict):
                raise ValueError("not an object")
        except ValueError:
            self.error = self.error or f"an event is not JSON: {data[:80]!r}"
            return
        self.error = self.error or _reported_error(name, event)
        self.model = _text(event.get("model")) or self.model
        usage = self._add_usage(event.get("usage"))
        choices = event.get("choices") or []
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            self.error = self.error or f"an event has no list of choices: {data[:80]!r}"
            return
        for choice in choices:
            self.finish_reason = _text(choice.get("finish_reason")) or self.finish_reason
            delta = choice.get("delta") or {}
            if not isinstance(delta, dict):
                self.error = self.error or f"a delta is not an object: {data[:80]!r}"
                return
            listed = choice.get("token_ids") or _nested(choice, "logprobs", "content")
            self.streamed_tokens += len(listed) if isinstance(listed, list) else 0
            reasoning = delta.get("reasoning_content") or delta.get("reasoning")
            answer = delta.get("content") or choice.get("text") or delta.get("tool_calls")
            if answer:
                self.answer_chunks += 1
                if self.first_answer is None:
                    self.first_answer = seconds
            if answer or reasoning:
                self.chunk_seconds.append(seconds)
                self.chunk_sizes.append(sum(len(text) for text in (reasoning, answer) if isinstance(text, str)))
                self.counted.append(usage if usage is not None else self.streamed_tokens if listed else None)
                self.reasoning.update(_bytes(reasoning))
                self.answer.update(_bytes(answer))
        if self.finish_reason in FAILED:
            self.error = self.error or f"server: the request ended with finish_reason {self.finish_reason!r}"

    def chunk_tokens(self) -> tuple[int, ...] | None:
        """Tokens of each chunk, by the counts in their events; None unless all have one that can be."""
        counted = [count for count in self.counted if count is not None]
        total = self.counts.get("completion_tokens")
        if len(counted) < len(self.counted) or len(counted) < 2 or total is None or counted[-1] > total:
            return None
        tokens = [after - before for before, after in pairwise([0, *counted])]
        return tuple(tokens) if tokens[0] > 0 and min(tokens) >= 0 and counted[-1] > counted[0] else None

    def _add_usage(self, usage: Any) -> int | None:
        """Keep the last usage, and return its completion tokens; a count that is not one is an error."""
        if not usage:
            return None
        details = {} if not isinstance(usage, dict) else usage
        counts = {
            **{name: details.get(name) for name in ("prompt_tokens", "completion_tokens")},
            "cached_tokens": _nested(details, "prompt_tokens_details", "cached_tokens"),
            "reasoning_tokens": _nested(details, "completion_tokens_details", "reasoning_tokens"),
        }
        wrong = {name: value for name, value in counts.items() if value is not None and not _is_count(value)}
        if not isinstance(usage, dict) or wrong:
            self.error = self.error or f"usage has no counts of tokens: {json.dumps(wrong or usage)[:80]}"
            return None
        self.counts = counts
        return self.counts["completion_tokens"]


MOST_CHARACTERS = 1000
"""Limit of a name or error of the server in a result."""


def _bytes(content: object) -> bytes:
    """A part of an answer: text is the same however it is divided into parts; calls of tools are JSON."""
    return (content if isinstance(content, str) else json.dumps(content) if content else "").encode(errors="replace")


def _text(value: object) -> str | None:
    return value[:MOST_CHARACTERS] if isinstance(value, str) else None


MOST_TOKENS = 10**9
"""Larger counts are not counts of tokens."""


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_TOKENS


def _nested(usage: dict[str, Any], group: str, name: str) -> Any:
    details = usage.get(group)
    return details.get(name) if isinstance(details, dict) else None


def _reported_error(name: str, event: dict[str, Any]) -> str:
    """The error that an event reports, in the forms of OpenAI, vLLM, SGLang and FastAPI; "" if it reports none."""
    error = event.get("error")
    if not error and (event.get("object") == "error" or name == "error"):
        error = event
    if not error and "choices" not in event:
        error = event.get("detail")
    if not error:
        return ""
    return f"server: {error.get('message', error) if isinstance(error, dict) else error}"


@dataclass(frozen=True)
class Exchange:
    """A request that has ended: its user, the number of its prompt, its limit of tokens, and how the transport ended it.

    ``error`` is empty unless the transport failed.
    """

    user: int
    prompt: int
    started: float
    ended: float
    status: int | None
    max_tokens: int | None = None
    error: str = ""


def parse_sample(reads: Reads, exchange: Exchange) -> Sample:
    """Parse received bytes into a sample. An error of the transport takes precedence over errors in the stream.

    A stream that ends without a finish reason or inside an event is an error: it was cut off. A missing ``[DONE]`` is none:
    some servers never send it. A count of more tokens than the ``max_tokens`` of the request, or of none, is an error.
    """
    reader, answer = Reader(), _Answer()
    for seconds, read in reads:
        for event in reader.feed(read):
            answer.add(seconds, event.name, event.data)
    cut_off = reader.problem
    if not cut_off and answer.finish_reason is None and not answer.done:
        cut_off = "the stream ended without a finish reason"
    counts = answer.counts
    completion = counts.get("completion_tokens")
    impossible = ""
    if completion is not None and exchange.max_tokens is not None and completion > exchange.max_tokens:
        impossible = f"usage reports {completion:,} completion tokens for max_tokens {exchange.max_tokens:,}"
    if completion == 0:
        impossible = f"usage reports no completion tokens for {len(answer.chunk_seconds):,} chunks of text"
    return Sample(
        user=exchange.user,
        prompt=exchange.prompt,
        started=exchange.started,
        ended=exchange.ended,
        status=exchange.status,
        error=(exchange.error or answer.error or cut_off or impossible)[:MOST_CHARACTERS],
        chunk_seconds=tuple(answer.chunk_seconds),
        answer_chunks=answer.answer_chunks,
        first_token=answer.chunk_seconds[0] if answer.chunk_seconds else None,
        first_answer=answer.first_answer,
        prompt_tokens=counts.get("prompt_tokens"),
        cached_tokens=counts.get("cached_tokens"),
        completion_tokens=completion,
        reasoning_tokens=counts.get("reasoning_tokens"),
        finish_reason=answer.finish_reason,
        model=answer.model,
        text_sha256=hashlib.sha256(answer.reasoning.digest() + answer.answer.digest()).hexdigest(),
        chunk_tokens=answer.chunk_tokens(),
        chunk_sizes=tuple(answer.chunk_sizes),
    )
