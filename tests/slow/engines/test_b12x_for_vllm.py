"""Kernels of b12x 1.5.1 that vLLM 0.33.0 calls, compiled without a GPU by ``image_programs/b12x/compile.py``."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from b12x_library import ENGINE, environment

from sm120kit.core.workspace import Workspace
from sm120kit.kernels import cubin
from sm120kit.kernels.kernel_records import SMEM_CAPACITY_BYTES
from sm120kit.recipes import target as targets
from sm120kit.sources.run_options import Options

LAYER = {"experts": 256, "hidden": 3072, "inner": 512, "top_k": 8, "tokens": [1, 32]}
"""The experts of qwen3.5-122b-nvfp4-2x-rtx-pro-6000-vllm on one of its GPUs."""
REQUEST = {"sm_count": 188, "moe": [LAYER], "gemm": [{"n": 1024, "k": 3072, "rows": [1]}]}


class Compiler:
    """An environment with the locked b12x and CuTe DSL of vLLM 0.33.0, and a cache of b12x."""

    def __init__(self, scratch: Path) -> None:
        target = targets.resolve("vllm-0.33.0", Options(Workspace.open(None)))
        assert isinstance(target, targets.EngineTarget)
        self.scratch, self.python = scratch, environment(target, scratch, patched=False)

    def compile(self, cache: str, request: dict[str, Any]) -> list[dict[str, Any]]:
        """The kernels that the program prints."""
        file = self.scratch / "request.json"
        file.write_text(json.dumps(request))
        argv = [self.python, ENGINE / "b12x" / "compile.py", file, self.scratch / cache]
        variables = os.environ | {"HOME": str(self.scratch)}
        done = subprocess.run(argv, env=variables, capture_output=True, text=True, check=False)
        assert not done.returncode, done.stderr[-3000:]
        return list(json.loads(done.stdout)["kernels"])


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    return Compiler(tmp_path_factory.mktemp("vllm"))


def test_each_call_has_a_kernel_that_is_compiled_once_for_any_cpu(compiler: Compiler) -> None:
    first = compiler.compile("cache", REQUEST)
    assert [kernel["call"].split()[0] for kernel in first] == ["1", "32", "1"] and not any(each["hit"] for each in first)
    assert all(launch["shared_bytes"] <= SMEM_CAPACITY_BYTES for kernel in first for launch in kernel["launches"])
    again = compiler.compile("cache", REQUEST)
    assert [kernel["path"] for kernel in again] == [kernel["path"] for kernel in first]
    assert all(kernel["hit"] for kernel in again)
    compiler.compile("other", REQUEST)
    for kernel in first:
        entry = kernel["path"]
        assert (compiler.scratch / "cache" / entry).read_bytes() == (compiler.scratch / "other" / entry).read_bytes()
        (image,) = cubin.read(compiler.scratch / "cache" / entry)
        assert all(each.arch == "sm_120a" for each in image.kernels)
        code = subprocess.run(["objdump", "-d", compiler.scratch / "cache" / entry], capture_output=True, text=True, check=True)
        assert "%ymm" not in code.stdout and "%zmm" not in code.stdout


def test_another_gpu_has_other_kernels(compiler: Compiler) -> None:
    layer = LAYER | {"tokens": [32]}
    keys = [{each["path"] for each in compiler.compile("cache", {"sm_count": count, "moe": [layer]})} for count in (188, 170)]
    assert keys[0] and not keys[0] & keys[1]
