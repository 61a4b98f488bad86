"""What SGLang's own functions answer for the cases of ``patches/sglang``, on the CPU; run by a Python that can import SGLang.

Prints one JSON object. Nothing is replaced: detector and rule are those of the wheel.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from sglang.srt.entrypoints.openai.protocol import Function, Tool
from sglang.srt.function_call.minimax_m2 import MinimaxM2Detector
from sglang.srt.multiplex.pdmux_context import divide_sm, get_arch_constraints

TEXTS = {"type": "object", "properties": {name: {"type": "string"} for name in ("path", "text")}}
TOOLS = [
    Tool(type="function", function=Function(name=name, parameters=parameters))
    for name, parameters in (("edit", TEXTS), ("now", {"type": "object", "properties": {}}))
]
CALLS: dict[str, list[dict[str, str]]] = {
    "plain": [{"path": "a", "text": "x = 1"}],
    "brace": [{"path": "a", "text": "}"}, {"path": "b", "text": "{"}],
    "none": [{}],
    "none, then some": [{}, {"path": "a", "text": "if (x) }"}],
    "some, then none": [{"path": "a", "text": "a < b"}, {}],
}
"""Calls by case; one without parameters is of the tool ``now``."""
TEXT_ANSWERS = ("is a <", "see <minimax:tool", "a <b> c")
"""Answers without calls, with text that could begin one."""

START, END = "<minimax:tool_call>", "</minimax:tool_call>"
CAPABILITIES = ((7, 0), (8, 0), (9, 0), (10, 0), (12, 0), (12, 1))


def written(calls: list[dict[str, str]]) -> str:
    """Calls as the model writes them, after a text with a character that begins a tag."""
    names = ["edit" if parameters else "now" for parameters in calls]
    bodies = ["".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in each.items()) for each in calls]
    invoked = "".join(f'<invoke name="{name}">\n{body}</invoke>\n' for name, body in zip(names, bodies, strict=True))
    return f"1 < 2\n{START}\n{invoked}{END}"


def characters(text: str) -> list[str]:
    return [*text]


def whole_tags(text: str) -> list[str]:
    """One character at a time, the tags of the vocabulary whole."""
    before, _, rest = text.partition(START)
    return [*before, START, *rest.removesuffix(END), END]


def at_once(text: str) -> list[str]:
    return [text]


def streamed(increments: list[str]) -> list[list[str]]:
    """Name and arguments of each call, put together from increments."""
    detector, calls = MinimaxM2Detector(), dict[int, list[str]]()
    for increment in increments:
        for item in detector.parse_streaming_increment(increment, TOOLS).calls:
            call = calls.setdefault(item.tool_index, ["", ""])
            call[0] += item.name or ""
            call[1] += item.parameters or ""
    return [calls[index] for index in sorted(calls)]


def answer_text(increments: list[str]) -> str:
    """The text of an answer, put together from increments and what is left at its end, as SGLang's server does."""
    detector = MinimaxM2Detector()
    texts = [detector.parse_streaming_increment(increment, TOOLS).normal_text for increment in increments]
    return "".join([*texts, detector.finish(TOOLS).normal_text])


def asked(function: Callable[..., Any], *arguments: Any) -> Any:
    """The answer of a function, or the name of its error."""
    try:
        return function(*arguments)
    except ValueError as error:
        return type(error).__name__


def main() -> None:
    calls: dict[str, Mapping[str, Any]] = {}
    for case, listed in CALLS.items():
        text = written(listed)
        whole = MinimaxM2Detector().detect_and_parse(text, TOOLS).calls
        calls[case] = {"whole": [[call.name, call.parameters] for call in whole]}
        calls[case] |= {split.__name__: streamed(split(text)) for split in (characters, whole_tags, at_once)}
    answers = {
        "calls": calls,
        "texts": {text: answer_text(characters(text)) for text in TEXT_ANSWERS},
        "parts": {f"{major}.{minor}": asked(get_arch_constraints, (major, minor)) for major, minor in CAPABILITIES},
        "groups": asked(divide_sm, 188, (12, 0), 6),
    }
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
