"""vLLM as released and with ``patches/vllm``, on the CPU: what its own functions answer where a patch is about them.

The environment has the locked wheels, without those with CUDA, and a torch for the CPU: 2 GB, some minutes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from patched_engine import STATES, PatchedEngine

INSIDE = Path(__file__).parents[2] / "support" / "vllm_patches_inside.py"
LIBRARIES = r"nvidia-cutlass-dsl|cuda-(python|bindings|pathfinder)$|nvidia-ml-py$"
"""Distributions of the lockfile that FlashInfer imports, besides those that the parser imports."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The answers of vLLM ``released`` and ``patched``."""
    engine = PatchedEngine("vllm", tmp_path_factory.mktemp("vllm"), LIBRARIES, flashinfer=True)
    return {state: engine.answer(INSIDE, state=state) for state in STATES}


def test_draft_head_finds_the_algorithm_of_its_experts(answers: dict[str, Any]) -> None:
    """The MTP head asks for model.layers.45; the map has the wrapper's name before or after the target renamed it."""
    released, patched = answers["released"]["map"], answers["patched"]["map"]
    assert released.pop("model.layers.45.mlp.experts") == "MXFP8"
    assert {*released.values()} == {None} and len(released) == 2
    assert {*patched.values()} == {"MXFP8"}
    for state in answers.values():
        assert state["other layer"] is None
        assert state["target"] == ["MXFP8", "MXFP8"]


def test_ring_holds_all_drafts_and_divides_the_block(answers: dict[str, Any]) -> None:
    released, patched = answers["released"]["ring"], answers["patched"]["ring"]
    for block, rings in patched.items():
        assert [rows for rows in released[block][5:9] if rows != "AssertionError"] == []
        for drafts, rows in enumerate(rings):
            if drafts > 12 and block == "16":
                assert rows == "ValueError", "20 rows do not fit into a block of 16"
                continue
            assert rows >= 4 + drafts and rows % 4 == 0 and int(block) % rows == 0
            assert released[block][drafts] in (rows, "AssertionError"), "a ring that fitted keeps its size"
    assert [patched["1616"][drafts] for drafts in (4, 7, 12)] == [8, 16, 16]


def test_drafter_gets_a_block_like_that_of_the_target(answers: dict[str, Any]) -> None:
    """Prefix cache hits come in steps of the blocks' common multiple."""
    released, patched = answers["released"]["drafter"], answers["patched"]["drafter"]
    assert released["1648"] == {"kernel": 64, "planned": 64, "steps": 6592}
    assert patched["1648"] == {"kernel": 16, "planned": 1648, "steps": 1648}
    assert (released["848"]["steps"], patched["848"]["steps"]) == (3392, 848)
    assert released["1600"] == patched["1600"] == {"kernel": 64, "planned": 1600, "steps": 1600}
    assert answers["released"]["other back-end"] == answers["patched"]["other back-end"]
