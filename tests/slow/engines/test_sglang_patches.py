"""SGLang as released and with ``patches/sglang``, on the CPU: what its own functions answer where a patch is about them.

The environment has the locked wheels, without those with CUDA, and a torch for the CPU: 2 GB, some minutes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from patched_engine import STATES, PatchedEngine

INSIDE = Path(__file__).parents[2] / "support" / "sglang_patches_inside.py"


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The answers of SGLang ``released`` and ``patched``."""
    engine = PatchedEngine("sglang-0.5.23", tmp_path_factory.mktemp("sglang"))
    return {state: engine.answer(INSIDE, state=state) for state in STATES}


SPLITS = ("characters", "whole_tags", "at_once")


def _loaded(calls: list[list[str]]) -> list[tuple[str, Any]]:
    """Names with the parsed arguments; those that are no JSON are None."""

    def parsed(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return None

    return [(name, parsed(text)) for name, text in calls]


def test_streamed_minimax_calls_are_those_of_the_whole_text(answers: dict[str, Any]) -> None:
    for case, streamed in answers["patched"]["calls"].items():
        whole = _loaded(streamed["whole"])
        assert whole and None not in dict(whole).values()
        for split in SPLITS:
            assert _loaded(streamed[split]) == whole, (case, split)


def test_answers_without_calls_are_whole(answers: dict[str, Any]) -> None:
    texts = answers["patched"]["texts"]
    assert texts and all(streamed == text for text, streamed in texts.items())


def test_the_released_detector_loses_and_mixes_calls(answers: dict[str, Any]) -> None:
    """A test without a difference would show nothing of the patch."""
    calls = answers["released"]["calls"]
    assert [calls[case]["characters"] for case in calls] == [[]] * len(calls), "the start tag is split"
    assert _loaded(calls["plain"]["whole_tags"]) == _loaded(calls["plain"]["whole"])
    assert _loaded(calls["brace"]["whole_tags"])[0] == ("edit", None), "a brace in a value counts"
    assert calls["none"]["whole_tags"] == [["now", ""]]
    assert _loaded(calls["none, then some"]["at_once"])[0][1] != {}, "the first call has what is the second's"


def test_the_rule_for_green_contexts_has_no_end(answers: dict[str, Any]) -> None:
    released, patched = answers["released"]["parts"], answers["patched"]["parts"]
    newer = {"10.0", "12.0", "12.1"}
    assert {name for name, parts in released.items() if parts == "ValueError"} == newer
    assert {name: patched[name] for name in newer} == {name: [8, 8] for name in newer}, "at least 8 SMs, in steps of 8"
    assert {name: parts for name, parts in patched.items() if name not in newer} == {
        name: parts for name, parts in released.items() if name not in newer
    }
    assert answers["released"]["groups"] == "ValueError"
    groups = answers["patched"]["groups"]
    assert groups and all(sum(group) == 188 and group[0] % 8 == 0 for group in groups)
