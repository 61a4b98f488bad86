"""Peak memory of a comparison of models with a vocabulary of 152,000 at windows of 2,048 tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCABULARY, WINDOW = 152_064, 2048
LIMIT = 2 * 2**30
"""Bytes. All logits of two windows in float32 are 2.3 GiB."""


@pytest.fixture(scope="module")
def large_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer whose logits are large and whose weights are not: 20 MB."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 32}
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY, num_key_value_heads=1, max_position_embeddings=WINDOW, tie_word_embeddings=True, **sizes
        )
    )
    directory = tmp_path_factory.mktemp("model")
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("mode", ["compare", "save"])
def test_memory_at_large_vocabulary(large_vocabulary: Path, mode: str, tmp_path: Path) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps([number * 7919 % VOCABULARY for number in range(WINDOW)]))
    arguments = [large_vocabulary, *([large_vocabulary] if mode == "compare" else ["--save", tmp_path / "reference.kld"])]
    options = ["--text", ids, "--windows", 1, "--window", WINDOW]
    argv = [sys.executable, "-m", "sm120kit", "kld", *map(str, [*arguments, *options])]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "2"})
    assert child.stdout is not None
    output = child.stdout.read().decode()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0, output
    assert usage.ru_maxrss * 1024 < LIMIT, f"{usage.ru_maxrss / 2**20:.2f} GiB"
    print(f"{mode}: {usage.ru_maxrss / 2**20:.2f} GiB")
