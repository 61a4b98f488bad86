"""Refusals as the engines' own parsers have them, recorded with ``ParserRecord.options`` in Pythons that have the engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sm120kit.engines import parser
from sm120kit.recipes import arguments

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


@pytest.mark.parametrize("keys", [["mode"], {"mode": ["integer", "=NONE", "null"]}])
def test_records_of_former_editions_have_keys_without_schemas(
    keys: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = json.loads(parser.record_path("vllm-0.33.0").read_text())
    for option in record["options"]:
        option.update({"keys": keys} if "--compilation-config" in option["names"] else {})
    (tmp_path / "sm120kit.toml").write_text("edition = 1\n")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/vllm-0.33.0-own.arguments.json").write_text(json.dumps(record))
    monkeypatch.chdir(tmp_path)
    own = parser.load("vllm-0.33.0-own")
    assert own and not parser.rejections(own, ["/model", "--compilation-config", '{"mode": 3}'])
    assert parser.rejections(own, ["/model", "--compilation-config", '{"mod": 3}'])
    text = parser.rejections(own, ["/model", "--compilation-config", '{"mode": "ALL"}'])
    assert bool(text) == isinstance(keys, dict), "without types any value is taken"


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"num_speculative_tokens": 3, "method": "mtp", "draft_sample_methd": "greedy"}, "draft_sample_method"),
        ({"num_speculative_tokens": "many"}, "num_speculative_tokens"),
        ({"num_speculative_tokens": "3", "draft-sample-method": "probabilistic", "enforce_eager": None}, ""),
        ({"num_speculative_tokens": 3, "draft_sample_method": "random"}, "probabilistic"),
    ],
)
def test_keys_and_values_of_speculation_are_those_of_the_engines_dataclass(table: dict[str, object], named: str) -> None:
    record = parser.load("vllm-0.33.0")
    assert record
    reasons = parser.rejections(record, ["/model", "--speculative-config", json.dumps(table)])
    assert bool(reasons) == bool(named) and all(named in reason for reason in reasons)


def test_a_chat_template_of_the_engine_needs_no_file() -> None:
    given = {"engine": "vllm-0.33.0", "arguments": ["--chat-template", "template_chatml.jinja"]}
    assert not list(arguments.problems(given))
    assert list(arguments.problems(given | {"arguments": ["--chat-template", "template_chatl.jinja"]}))
