"""Faults of what a server sends: functions of a JSON document, an event of a stream or a whole answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Damage = Callable[[dict[str, Any], bool], dict[str, Any]]
"""Changes a document; the second argument is whether it is an event of a stream."""


def _entries(document: dict[str, Any]) -> list[dict[str, Any]]:
    listed = (document["choices"][0].get("logprobs") or {}) if document.get("choices") else {}
    return list(listed.get("content") or ())


def _message(document: dict[str, Any]) -> dict[str, Any]:
    choice = document["choices"][0]
    return dict(choice.get("delta") or choice.get("message") or {})


def _with_text(document: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    choice = document["choices"][0]
    part = choice.get("delta") or choice.get("message")
    if part is not None and part.get("content"):
        part["content"] = change(part["content"])
    return document


def top_k_off_by_one(document: dict[str, Any], stream: bool) -> dict[str, Any]:
    """The list begins with the second most likely token."""
    for entry in _entries(document):
        entry["top_logprobs"] = entry["top_logprobs"][1:]
    return document


def logits_as_logprobs(document: dict[str, Any], stream: bool) -> dict[str, Any]:
    """Not normalized."""
    for entry in _entries(document):
        for each in (entry, *entry["top_logprobs"]):
            each["logprob"] += 4.0
    return document


def logprobs_too_high(document: dict[str, Any], stream: bool) -> dict[str, Any]:
    """Half as far from 0 as they are: of another temperature than 1, and not normalized."""
    for entry in _entries(document):
        for each in (entry, *entry["top_logprobs"]):
            each["logprob"] *= 0.5
    return document


def usage_doubled(document: dict[str, Any], stream: bool) -> dict[str, Any]:
    """Twice as many tokens."""
    for name in ("prompt_tokens", "completion_tokens"):
        if document.get("usage"):
            document["usage"][name] *= 2
    return document


def usage_of_uncached(document: dict[str, Any], stream: bool) -> dict[str, Any]:
    """Tokens of the prompt that were cached are not counted."""
    if usage := document.get("usage"):
        usage["prompt_tokens"] -= usage["prompt_tokens_details"]["cached_tokens"]
    return document


def usage_of_chunks(document: dict[str, Any], stream: bool) -> dict[str, Any]:
    """A third of the tokens of an answer is counted, as if a draft were no token."""
    if usage := document.get("usage"):
        usage["completion_tokens"] = max(1, usage["completion_tokens"] // 3)
    return document


def lost_chunk(document: dict[str, Any], stream: bool) -> dict[str, Any]:
    """The text of every 9th event of a stream is lost."""
    return _with_text(document, lambda text: "") if stream and document["number"] % 9 == 5 else document


def marker_in_text(document: dict[str, Any], stream: bool) -> dict[str, Any]:
    """The stop token is a part of the text."""
    return document if stream else _with_text(document, lambda text: text + "<|im_end|>")


def open_thought(document: dict[str, Any], stream: bool) -> dict[str, Any]:
    """A thought that has no end, in an answer that has."""
    if not stream:
        document["choices"][0]["finish_reason"] = "stop"
    return document if stream else _with_text(document, lambda text: "<think>" + text)


def cut_tool_call(document: dict[str, Any], stream: bool) -> dict[str, Any]:
    """The last characters of the arguments are lost."""
    if not stream:
        for call in document["choices"][0].get("message", {}).get("tool_calls") or ():
            call["function"]["arguments"] = call["function"]["arguments"][:-2]
    return document


def cut_streamed_tool_call(document: dict[str, Any], stream: bool) -> dict[str, Any]:
    """The end of the arguments is lost, in streams only."""
    if stream:
        for call in _message(document).get("tool_calls") or ():
            call["function"]["arguments"] = call["function"]["arguments"].rstrip("}")
    return document


def tool_call_in_text(document: dict[str, Any], stream: bool) -> dict[str, Any]:
    """No parser of tool calls."""
    if not stream and (calls := document["choices"][0].get("message", {}).pop("tool_calls", None)):
        document["choices"][0]["message"]["content"] = f'<tool_call>{{"name": "{calls[0]["function"]["name"]}"}}</tool_call>'
    return document


def cut_json(document: dict[str, Any], stream: bool) -> dict[str, Any]:
    """JSON without its end, and without a reason."""
    return document if stream else _with_text(document, lambda text: text[:-9] if text.startswith("{") else text)


def broken_characters(document: dict[str, Any], stream: bool) -> dict[str, Any]:
    """Every letter e arrives as a byte that is no character."""
    return _with_text(document, lambda text: text.replace("e", "\ufffd"))


def other_script(document: dict[str, Any], stream: bool) -> dict[str, Any]:
    """Letters of another script."""
    return _with_text(document, lambda text: "".join(chr(0x4E00 + ord(each)) if each.isalpha() else each for each in text))


def one_piece(document: dict[str, Any], stream: bool) -> dict[str, Any]:
    """Exclamation marks, as of token 0 of many vocabularies."""
    return _with_text(document, lambda text: "!" * len(text))


def unseen_characters(document: dict[str, Any], stream: bool) -> dict[str, Any]:
    """A character without a width before each blank."""
    return _with_text(document, lambda text: text.replace(" ", "\u200b "))


ANSWER_FAULTS: dict[str, Damage] = {
    "top-k-off-by-one": top_k_off_by_one,
    "logits-as-logprobs": logits_as_logprobs,
    "logprobs-too-high": logprobs_too_high,
    "usage-doubled": usage_doubled,
    "usage-of-uncached": usage_of_uncached,
    "usage-of-chunks": usage_of_chunks,
    "lost-chunk": lost_chunk,
    "marker-in-text": marker_in_text,
    "open-thought": open_thought,
    "cut-tool-call": cut_tool_call,
    "cut-streamed-tool-call": cut_streamed_tool_call,
    "tool-call-in-text": tool_call_in_text,
    "cut-json": cut_json,
    "broken-characters": broken_characters,
    "other-script": other_script,
    "one-piece": one_piece,
    "unseen-characters": unseen_characters,
}
