"""The measuring program of doctor, with copies between processes of this machine instead of GPUs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sm120kit.core.errors import RequirementMissing
from sm120kit.hosts.doctor import measure


def test_transfers_without_gpu() -> None:
    copies = measure.run_transfers("copies", 2, sys.executable, kind="cpu")
    assert [line["wrong"] for line in copies.having("pair")] == [0] and not copies.hung + copies.failed
    reduced = measure.run_transfers("collective", 3, sys.executable, kind="cpu")
    assert sorted((line["rank"], line["wrong"]) for line in reduced.having("rank")) == [(0, 0), (1, 0), (2, 0)]
    assert len(reduced.having("bus")) == 1 and not reduced.hung + reduced.failed


def test_corrupted_copies_are_counted(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        f"""#!{sys.executable}
import runpy, sys, torch
copy = torch.Tensor.copy_
def corrupt(self, source, non_blocking=False):
    copy(self, source)
    self.view(-1)[-1] = source.view(-1)[-1].bitwise_xor(1)
    return self
torch.Tensor.copy_ = corrupt
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    )
    python.chmod(0o755)
    output = measure.run_transfers("copies", 2, str(python), kind="cpu")
    assert [line["wrong"] for line in output.having("pair")] == [6]  # three sizes, both ways


def test_measure_requires_torch_with_gpus(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -S -c 'import torch'\n")
    python.chmod(0o755)
    with pytest.raises(RequirementMissing, match="No module named 'torch'"):
        measure.run_transfers("copies", 2, str(python))
    with pytest.raises(RequirementMissing, match="detects 0 of 64 GPUs"):
        measure.run_transfers("copies", 64, sys.executable)
