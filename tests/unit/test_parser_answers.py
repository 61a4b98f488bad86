"""Refusals as the engines' own parsers have them, recorded with ``ParserRecord.options`` in Pythons that have the engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sm120kit.engines import parser

ANSWERS: dict[str, dict[str, list[list[str]]]] = json.loads(
    (Path(__file__).parent / "data" / "parser_answers.json").read_text()
)
"""Command lines by recipe, ``accepted`` and ``refused`` by the parser of its wheel with the validation that follows."""


@pytest.mark.parametrize("recipe", ANSWERS)
def test_what_the_engines_parser_refuses_is_refused_and_nothing_else(recipe: str) -> None:
    record = parser.load(recipe)
    assert record
    refused = {answer: [argv for argv in lines if parser.rejections(record, argv)] for answer, lines in ANSWERS[recipe].items()}
    assert refused == {"accepted": [], "refused": ANSWERS[recipe]["refused"]}


def test_an_unknown_key_of_a_json_object_is_named() -> None:
    record = parser.load("vllm-0.33.0")
    assert record
    (reason,) = parser.rejections(record, ["/model", "--compilation-config", '{"cudagraph_mod": "FULL"}'])
    assert "cudagraph_mod" in reason and "cudagraph_mode" in reason
