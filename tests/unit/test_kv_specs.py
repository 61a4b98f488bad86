"""The KV cache as sm120kit computes it, against vLLM's own specifications of the same models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kv_rows import TOLERANCE, theirs

from sm120kit.serving._kv_layout import kv_cache

RECORD = json.loads((Path(__file__).parent / "data" / "kv_specs.json").read_text())
CASES: dict[str, dict[str, Any]] = {name: case for name, case in RECORD["cases"].items() if not case.get("refusal")}
UNKNOWN = {
    "DoryForCausalLM": "recurrent_kv_cache_mode",
    "Gemma 3 4B": "num_key_value_heads",
    "HYV4ForCausalLM": "learnable_sink",
    "WhisperForConditionalGeneration": "encoder",
    "Zamba2ForCausalLM": "num_query_groups",
}
"""Classes whose cache is unknown, with a word of the reason."""


@pytest.mark.parametrize("name", CASES)
def test_cache_is_that_of_vllm_or_unknown_with_the_reason(name: str) -> None:
    cache, why = kv_cache(CASES[name]["config"])
    if name in UNKNOWN:
        assert cache is None and UNKNOWN[name] in why
        return
    assert cache, why
    ours = (cache.token_bytes(2), cache.window_bytes(2, 0), cache.state_bytes())
    assert ours == pytest.approx(theirs(CASES[name]["rows"]), rel=TOLERANCE)


def test_most_classes_are_built_and_refusals_have_a_reason() -> None:
    refused = {name: case["refusal"] for name, case in RECORD["cases"].items() if case.get("refusal")}
    assert len(CASES) >= 110 and all(refused.values()) and UNKNOWN.keys() <= CASES.keys()
    kinds = {kind for case in CASES.values() for kind, *_ in case["rows"]}
    assert {"FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec", "MLAAttentionSpec", "MambaSpec"} <= kinds
