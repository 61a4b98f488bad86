"""Parse an answer of an OpenAI-compatible server, streamed or not, with its text, tokens and counts."""

from collections.abc import Mapping
from typing import Any

from sm120kit.bench.client import EndedRequest
from sm120kit.bench.sample import FAILED, MOST_TOKENS
from sm120kit.bench.sse import Reader
from sm120kit.core.outside import parse_json
from sm120kit.probes.probe_records import AnsweredToken, RecordedAnswer, ToolCall

MOST_TEXT = 1 << 16
"""Limit of each text of an answer in characters; requests are for some dozens of tokens."""
MOST_CALLS, MOST_LISTED = 8, 4096
"""Limits of the tool calls and tokens of an answer."""
REPLACEMENT = "\ufffd"
FARTHEST = 10_000.0
"""Limit of a log-probability: vLLM lists -9999 for a token without probability, other servers the least number."""


def answer_of(ended: EndedRequest) -> RecordedAnswer:
    """The answer of a request that has ended. What is not an answer has an error."""
    parts = _Parts()
    reads, exchange = ended
    try:
        if exchange.error:
            raise ValueError(exchange.error)
        content = b"".join(read for _, read in reads)
        for document in _documents(content):
            parts.add(document)
        if not parts.choices:
            raise ValueError("the answer has no choices")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        parts.error = parts.error or str(error) or type(error).__name__
    return parts.answer(exchange.ended - exchange.started)


def _documents(content: bytes) -> list[Mapping[str, Any]]:
    """The JSON objects of a response: its events, or itself.

    Raises:
        ValueError: it has something else.
    """
    if content.lstrip()[:1] == b"{":
        return [parse_json(content)]
    reader = Reader()
    events = [event.data for event in reader.feed(content)]
    if not events:
        raise ValueError(f"the answer is neither JSON nor a stream of events: {content[:80]!r}")
    if reader.problem:
        raise ValueError(reader.problem)
    return [parse_json(event) for event in events if event.strip() != "[DONE]"]


class _Parts:
    """The parts of an answer as they arrive."""

    def __init__(self) -> None:
        self.error = ""
        self.choices = 0
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: dict[int, tuple[str, str]] = {}
        self.tokens: list[AnsweredToken] = []
        self.usage: Mapping[str, Any] = {}
        self.finish_reason: str | None = None

    def add(self, document: Mapping[str, Any]) -> None:
        """Add an event of a stream, or a whole response."""
        if error := document.get("error"):
            raise ValueError(f"server: {error.get('message', error) if isinstance(error, Mapping) else error}")
        self.usage = document.get("usage") or self.usage
        for choice in document.get("choices") or ():
            self.choices += 1
            self.finish_reason = _text(choice, "finish_reason") or self.finish_reason
            message = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            self.content.append(_text(message, "content"))
            self.reasoning.append(_text(message, "reasoning_content") or _text(message, "reasoning"))
            for number, call in enumerate(message.get("tool_calls") or ()):
                self._add_call(call.get("index", number), call.get("function") or {})
            self.tokens += _tokens(choice.get("logprobs") or {})
        if self.finish_reason in FAILED:
            raise ValueError(f"the request ended with finish_reason {self.finish_reason!r}")

    def _add_call(self, number: int, function: Mapping[str, Any]) -> None:
        if number not in self.calls and len(self.calls) == MOST_CALLS:
            return
        name, arguments = self.calls.get(number, ("", ""))
        self.calls[number] = name + _text(function, "name"), arguments + _text(function, "arguments")

    def answer(self, seconds: float) -> RecordedAnswer:
        """The whole answer."""
        usage = self.usage if isinstance(self.usage, Mapping) else {}
        details = usage.get("prompt_tokens_details")
        return RecordedAnswer(
            error=self.error[:1000],
            content="".join(self.content)[:MOST_TEXT],
            reasoning="".join(self.reasoning)[:MOST_TEXT],
            tool_calls=tuple(ToolCall(name[:200], arguments[:MOST_TEXT]) for name, arguments in self.calls.values()),
            tokens=tuple(self.tokens[:MOST_LISTED]),
            prompt_tokens=_count(usage.get("prompt_tokens")),
            completion_tokens=_count(usage.get("completion_tokens")),
            cached_tokens=_count(details.get("cached_tokens")) if isinstance(details, Mapping) else None,
            finish_reason=self.finish_reason,
            seconds=round(seconds, 3),
        )


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= MOST_TOKENS else None


def _tokens(listed: Mapping[str, Any]) -> list[AnsweredToken]:
    """Tokens in the form of chat completions (``content``) or of completions (``tokens``)."""
    if content := listed.get("content"):
        return [
            AnsweredToken(*_named(entry), tuple(_named(each) for each in entry.get("top_logprobs") or ())) for entry in content
        ]
    tokens, values = listed.get("tokens") or (), listed.get("token_logprobs") or ()
    tops = listed.get("top_logprobs") or [{}] * len(tokens)
    return [
        AnsweredToken(
            str(token),
            _logprob(value),
            tuple(sorted(((name, _logprob(each)) for name, each in (top or {}).items()), key=lambda pair: -pair[1])),
        )
        for token, value, top in zip(tokens, values, tops, strict=False)
    ]


def _named(entry: Mapping[str, Any]) -> tuple[str, float]:
    """A token's name with its log-probability. Tokens that are a part of a character are told apart by their bytes."""
    text = str(entry["token"])
    return (f"bytes {entry['bytes']}" if REPLACEMENT in text and entry.get("bytes") else text), _logprob(entry["logprob"])


def _logprob(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{str(value)[:80]!r} is not a log-probability")
    return max(-FARTHEST, min(float(value), FARTHEST))


def _text(part: Mapping[str, Any], name: str) -> str:
    """A text of a message, "" without one."""
    text = part.get(name) or ""
    if not isinstance(text, str):
        raise ValueError(f"{name} is not a text: {str(text)[:80]}")
    return text
