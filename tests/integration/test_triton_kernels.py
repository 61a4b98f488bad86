"""Kernels of Triton from a server's record to its next start: recorded, compiled without a GPU, found by Triton."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sm120kit.core.data_roots import data_root

pytest.importorskip("triton")

PROGRAMS = data_root() / "image_programs" / "triton_ahead"
KERNEL = """
import triton
import triton.language as tl

@triton.jit
def scaled(value, FACTOR: tl.constexpr):
    return value * FACTOR

@triton.autotune([triton.Config({"BLOCK": 128})], key=["count"])
@triton.jit
def add(x, y, count, dtype: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr = scaled):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, SCALED(tl.load(x + at, mask=at < count).to(dtype), 3), mask=at < count)
"""
START = """
import sys, tempfile
sys.path.insert(0, sys.argv[1])
import compile as ahead
import torch, triton, triton.language as tl
from triton.runtime.driver import driver
driver.set_active(ahead.WithoutGpu(120))
import small_kernels
found = []
triton.knobs.compilation.listener = lambda *, cache_hit, **_: found.append(cache_hit)
for count in (1, 1008, 1001):
    small_kernels.add.fn.warmup(torch.empty(8), torch.empty(8, dtype=torch.bfloat16), count, tl.float32, BLOCK=128, grid=(1,))
print(found)
"""


def python(tmp_path: Path, *argv: str, path: str = "", **variables: str) -> Any:
    """What a Python prints that can import the small kernels."""
    (tmp_path / "small_kernels.py").write_text(KERNEL)
    paths = os.pathsep.join(filter(None, (path, str(tmp_path))))
    environment = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", **variables}
    done = subprocess.run([sys.executable, *argv], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.lower())


def test_next_start_finds_what_the_first_one_launched(tmp_path: Path) -> None:
    start = ("-c", START, str(PROGRAMS))
    variables = {"TRITON_CACHE_DIR": str(tmp_path / "cold"), "SM120KIT_RECORD_TRITON": str(tmp_path / "record")}
    assert python(tmp_path, *start, path=str(PROGRAMS / "record"), **variables) == [False] * 3
    (record,) = (tmp_path / "record").glob("*.jsonl")
    assert len(record.read_text().splitlines()) == 3
    answer = subprocess.run(
        [sys.executable, PROGRAMS / "compile.py", record, "120"],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        check=True,
    )
    compiled = json.loads(answer.stdout)
    assert len(compiled["kernels"]) == 3 and not compiled["failed"]
    assert {path.partition("/")[0] for path in compiled["entries"]} == {path.name for path in (tmp_path / "cold").iterdir()}
    for path, content in compiled["entries"].items():
        file = tmp_path / "image" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(
            base64.b64decode(content).replace(b"/opt/sm120kit/triton_ahead/entries", str(tmp_path / "image").encode())
        )
    assert python(tmp_path, *start, TRITON_CACHE_DIR=str(tmp_path / "image")) == [True] * 3


def test_other_source_is_not_found(tmp_path: Path) -> None:
    start = ("-c", START, str(PROGRAMS))
    variables = {"TRITON_CACHE_DIR": str(tmp_path / "cold"), "SM120KIT_RECORD_TRITON": str(tmp_path / "record")}
    python(tmp_path, *start, path=str(PROGRAMS / "record"), **variables)
    (record,) = (tmp_path / "record").glob("*.jsonl")
    check = [str(PROGRAMS / "compile.py"), str(record), "120", str(tmp_path / "cold")]
    assert len(python(tmp_path, *check)["kernels"]) == 3
    absent = tmp_path / "elsewhere"
    absent.mkdir()
    (absent / "small_kernels.py").write_text(KERNEL.replace("value * FACTOR", "value + FACTOR"))
    missing = python(tmp_path, *check, path=str(absent))
    assert not missing["kernels"] and {each["problem"] for each in missing["failed"]} == {"missing: "}
