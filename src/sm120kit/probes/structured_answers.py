"""A tool call, as a stream and at once, and an answer in a JSON schema."""

import json
import re
from typing import Any

from sm120kit.core.outside import parse_json
from sm120kit.probes.probe_records import CannotBeJudged, ProbeJudgement, Recorded, RecordedAnswer, judged, unknown
from sm120kit.probes.probe_session import ProbeSession, ServerProbe

TOKENS = 96
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "inhabitants": {"type": "integer"}},
    "required": ["city", "inhabitants"],
    "additionalProperties": False,
}
LEFT_IN_TEXT = re.compile(
    r"(<tool_call>|<function|\[TOOL_CALLS\]|<\|python_tag\|>|<\|tool|<minimax:tool_call>).{0,80}get_weather", re.DOTALL
)


def ask(session: ProbeSession) -> None:
    """Ask for the weather with a tool, and for a city in a schema."""
    tools: dict[str, Any] = {"tools": [TOOL], "tool_choice": "auto", "listed": False}
    question = "What is the weather in Paris now? Use the tool."
    session.send(session.chat(f"tool/{way}", question, TOKENS, stream=way == "stream", **tools) for way in ("whole", "stream"))
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    request = "Name the capital of France and its inhabitants as JSON."
    session.send([session.chat("schema", request, TOKENS, response_format=form, listed=False)])


def judge(recorded: Recorded) -> ProbeJudgement:
    """Check the calls and the JSON, each if the server can."""
    seen, unjudged = [], []
    for name, check in (("tool/whole", _call), ("tool/stream", _call), ("schema", _schema)):
        answer = recorded[name].answer
        try:
            if answer.error:
                raise CannotBeJudged(f"the request failed: {answer.error[:120]}")
            seen.append(check(answer))
        except CannotBeJudged as reason:
            unjudged.append(f"{name}: {reason}")
        except ValueError as problem:
            return judged(False, f"{name}: {problem}")
    whole, stream = (recorded[f"tool/{way}"].answer.tool_calls for way in ("whole", "stream"))
    if whole and stream and [call.name for call in whole] != [call.name for call in stream]:
        return judged(False, "the stream calls other tools than the answer at once")
    return judged(True, "; ".join([*seen, *unjudged])) if seen else unknown("; ".join(unjudged))


def _call(answer: RecordedAnswer) -> str:
    """Raises ValueError for a call that is none."""
    if left := LEFT_IN_TEXT.search(answer.text):
        raise ValueError(f"the call is left in the text, after {left[1]!r}: no parser of tool calls, or another model's")
    if not answer.tool_calls:
        if answer.finish_reason == "tool_calls":
            raise ValueError("finish_reason is 'tool_calls', without a call")
        raise CannotBeJudged("the model calls no tool")
    if answer.finish_reason == "length":
        raise CannotBeJudged("the call is longer than the answer may be")
    for call in answer.tool_calls:
        if call.name != "get_weather":
            raise ValueError(f"a call of {call.name!r}, which is not offered")
        _object(call.arguments, "the arguments of the call")
    return f"{len(answer.tool_calls)} tool call with arguments in JSON"


def _schema(answer: RecordedAnswer) -> str:
    """Raises ValueError for an answer that is not in the schema."""
    text = answer.content.strip()
    if not text.startswith("{"):
        raise CannotBeJudged("the server does not keep the answer to a schema")
    if answer.finish_reason == "length":
        raise CannotBeJudged("the JSON is longer than the answer may be")
    given = _object(text, "the answer")
    if set(given) != set(SCHEMA["required"]) or type(given["inhabitants"]) is not int:
        raise ValueError(f"the answer is not in the schema: {json.dumps(given)[:120]}")
    return "JSON in its schema"


def _object(text: str, what: str) -> dict[str, Any]:
    try:
        parsed = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{what} is not JSON: {text[:120]!r}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{what} is no JSON object: {text[:120]!r}")
    return parsed


STRUCTURED_ANSWERS = ServerProbe(
    "tool calls and JSON",
    ask,
    judge,
    "calls of several tools; servers without a parser of tool calls, and models that call none",
)
