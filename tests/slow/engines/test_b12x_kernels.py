"""Kernels of b12x, compiled without a GPU by ``dockerfiles/engine/b12x/compile.py``: what b12x finds in its cache."""

from __future__ import annotations

import base64
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from b12x_library import ENGINE, Library

from sm120kit.kernels import cubin
from sm120kit.kernels.ptx import session

LAYER = {"experts": 256, "hidden": 3072, "inner": 512, "top_k": 8, "tokens": [192, 72, 6, 1]}
"""The experts of qwen3.5-122b-nvfp4-2x-rtx-pro-6000 on one of its GPUs: kernels dynamic, static twice, and micro."""
REQUEST = {"sm_count": 188, "moe": [LAYER], "gemm": [{"n": 1024, "k": 3072, "rows": [8]}]}

NVFP4_MMA = "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(tmp_path_factory.mktemp("b12x"), REQUEST)


@pytest.fixture(scope="module")
def first(library: Library) -> Any:
    return library.compile()


@pytest.fixture(scope="module")
def entries(first: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an image with its entrypoint and the entries."""
    directory = tmp_path_factory.mktemp("image")
    (directory / "serve.py").write_bytes((ENGINE / "serve.py").read_bytes())
    for path, content in first["entries"].items():
        entry = directory / "b12x" / "entries" / path
        entry.parent.mkdir(parents=True)
        entry.write_bytes(base64.b64decode(content))
    return directory


def test_kernels_are_compiled_once_each_with_the_same_bytes(library: Library, first: Any, tmp_path: Path) -> None:
    assert [kernel["hit"] for kernel in first["kernels"]] == [False] * 5
    assert len(first["entries"]) == 5
    assert first["entries"] == library.compile(tmp_path)["entries"]


def test_b12x_finds_the_entries_that_the_entrypoint_adds(library: Library, first: Any, entries: Path, tmp_path: Path) -> None:
    program = "import runpy; runpy.run_path('serve.py')['add_b12x_entries']()"
    environment = library.environment | {"B12X_CUTE_COMPILE_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run([library.python, "-c", program], cwd=entries, env=environment, check=True)
    again = library.compile(tmp_path / "cache")
    assert [kernel["hit"] for kernel in again["kernels"]] == [True] * 5
    assert {kernel["path"] for kernel in again["kernels"]} == {*first["entries"]}


def test_another_number_of_sms_has_other_kernels(library: Library, first: Any, tmp_path: Path) -> None:
    library.request.write_text(json.dumps(REQUEST | {"sm_count": 170, "moe": [LAYER | {"tokens": [192]}]}))
    other = library.compile(tmp_path)
    assert not {kernel["path"] for kernel in other["kernels"]} & {*first["entries"]}


def test_kernels_are_for_sm120_and_use_fp4_tensor_cores(library: Library, entries: Path) -> None:
    (disassembler,) = library.python.parents[1].glob("lib/python*/site-packages/triton/backends/nvidia/bin/nvdisasm")
    for entry in entries.rglob("*.o"):
        (image,) = cubin.read(entry)
        (kernel,) = image.kernels
        assert image.arch == "sm_120a" and kernel.fp4_mma > 0, entry
        code = entry.read_bytes()
        start = code.find(b"\x7fELF", 1)
        entry.with_suffix(".cubin").write_bytes(code[start : start + image.bytes])
        listing = subprocess.run([disassembler, "-c", entry.with_suffix(".cubin")], capture_output=True, text=True, check=True)
        assert listing.stdout.count(" OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X ") == kernel.fp4_mma


def test_ptx_of_the_dense_kernel_is_rewritten_and_assembled_for_hopper(library: Library, tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    dump.mkdir()
    library.request.write_text(json.dumps(REQUEST | {"moe": []}))
    keep = {"CUTE_DSL_KEEP_PTX": "1", "CUTE_DSL_DUMP_DIR": str(dump)}
    (kernel,) = library.compile(tmp_path / "cache", **keep)["kernels"]
    (path,) = dump.glob("*.ptx")
    report = session.rewrite_file(path)
    assert (report.module.source_target, len(report.kernels)) == ("sm_120a", 1)
    assert {opcode: count for opcode, count in report.module.counts.items() if opcode.startswith("mma.")} == {NVFP4_MMA: 24}
    # The DSL's host code writes tensor maps itself: the library that `verify run` preloads replaces them at the launch.
    undefined = subprocess.run(
        ["nm", "-u", tmp_path / "cache" / kernel["path"]], capture_output=True, text=True, check=True
    ).stdout
    assert "_cudaLaunchKernelEx" in undefined and "TensorMapEncode" not in undefined


def test_host_code_runs_on_every_cpu(entries: Path) -> None:
    """The DSL compiles for the CPU of this machine otherwise: with AVX-512 where it has that."""
    for entry in entries.rglob("*.o"):
        listing = subprocess.run(["objdump", "-d", entry], capture_output=True, text=True, check=True).stdout
        instructions = re.findall(r"^ +[0-9a-f]+:\t[^\t]*\t(\w+)", listing, re.MULTILINE)
        assert len(instructions) > 100 and not [name for name in instructions if name.startswith("v")], entry
