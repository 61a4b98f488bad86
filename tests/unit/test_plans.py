"""Plans of repositories of the Hub against the engines themselves, as ``tests/arguments/plans.py`` recorded both."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from kv_rows import TOLERANCE, theirs

from sm120kit.images import backends

DATA = Path(__file__).parent / "data"
RECORD: dict[str, Any] = json.loads((DATA / "plans.json").read_text())
SGLANG: dict[str, dict[str, Any]] = json.loads((DATA / "plans_sglang.json").read_text())["repositories"]
REPOSITORIES: dict[str, dict[str, Any]] = RECORD["repositories"]
MEMORY, SHARE = backends.GPUS["RTX PRO 6000"]["memory_gb"] * 1e9, 0.90
"""Bytes of a GPU, and the share that the planned command lines let vLLM take."""


def context(arguments: list[str]) -> int:
    """The longest sequence of a command line, 0 if it states none."""
    stated = dict(pairwise(arguments)).get("--max-model-len", "")
    assert dict(pairwise(arguments))["--gpu-memory-utilization"] == f"{SHARE:.2f}"
    return int(stated) if stated.isdigit() else 0


def test_the_record_is_of_many_models_on_one_and_several_gpus() -> None:
    assert len(REPOSITORIES) >= 20 and {entry["plan"]["gpus"] for entry in REPOSITORIES.values()} >= {1, 2, 4, 8}
    kinds = {entry["engine"]["selected"]["quantization"][0] for entry in REPOSITORIES.values()}
    assert {"None", "fp8", "modelopt_fp4", "modelopt_mixed", "gpt_oss_mxfp4"} <= kinds


@pytest.mark.parametrize("name", REPOSITORIES)
def test_vllm_accepts_the_command_line_and_needs_what_is_planned(name: str) -> None:
    plan, engine = REPOSITORIES[name]["plan"], REPOSITORIES[name]["engine"]
    assert engine["refusal"] == ""
    assert plan["weights"] == pytest.approx(engine["weights"], rel=TOLERANCE), "bytes of the first GPU"
    tokens, windows, states = theirs(engine["rows"])
    assert not plan["why"] and plan["token"] == pytest.approx(tokens, rel=TOLERANCE), "bytes of a token on the first GPU"
    room = MEMORY * SHARE - engine["weights"]
    assert context(plan["arguments"]) * tokens + windows + states <= room, "one sequence of full length"


@pytest.mark.parametrize("name", [name for name, entry in REPOSITORIES.items() if entry["plan"]["source"]])
def test_planned_back_ends_are_those_that_vllm_selects(name: str) -> None:
    plan, engine = REPOSITORIES[name]["plan"], REPOSITORIES[name]["engine"]
    assert plan["selected"] == {use: engine["selected"].get(use) for use in plan["selected"]}


@pytest.mark.parametrize("name", [name for name, entry in SGLANG.items() if entry["engine"]])
def test_sglang_selects_what_is_planned_and_keeps_as_many_bytes(name: str) -> None:
    """A plan states nothing of a model that SGLang refuses. Its configurator does not know the FP8 cache of a checkpoint."""
    plan, engine = SGLANG[name]["plan"], SGLANG[name]["engine"]
    assert not (engine["refusal"] and plan["selected"])
    assert plan["selected"] == {use: engine["selected"].get(use) for use in plan["selected"]}
    if pool := engine["pool"].get("token"):
        assert pool / plan["token"] == pytest.approx(1, rel=TOLERANCE) or pool == 2 * plan["token"]
