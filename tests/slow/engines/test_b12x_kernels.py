"""Kernels of b12x, compiled without a GPU by ``image_programs/b12x/compile.py``: what b12x finds in its cache."""

from __future__ import annotations

import base64
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from b12x_library import ENGINE, Library

from sm12x_lab.ptx import ptx_session
from sm120kit.kernels import cubin

LAYER = {"experts": 256, "hidden": 3072, "inner": 512, "top_k": 8, "tokens": [192, 72, 6, 1]}
"""The experts of qwen3.5-122b-nvfp4-2x-rtx-pro-6000 on one of its GPUs: kernels dynamic, static twice, and micro."""
REQUEST = {"sm_count": 188, "moe": [LAYER], "gemm": [{"n": 1024, "k": 3072, "rows": [8]}]}

SHARED_MEMORY = {
    ("MoEDynamicKernel", "128x128x128", 2, 89_088),
    ("MoEStaticKernel", "128x128x128", 2, 90_112),
    ("MoEStaticKernel", "64x128x128", 2, 73_728),
    ("MoEMicroKernel", "64x128x128", 2, 73_728),
    ("DenseGemmKernel", "64x64x128", 4, 50_176),
}
"""Tile, stages, and bytes of shared memory of the kernels."""

DATACENTER = """
import runpy, sys
from cutlass.utils.smem_allocator import SMEM_CAPACITY_MAP
SMEM_CAPACITY_MAP["sm_120"] = SMEM_CAPACITY_MAP["sm_100"]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""A program that runs another one, in which b12x selects stages for the shared memory of datacenter Blackwell."""

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


def test_kernels_are_compiled_once_each_with_the_same_bytes(library: Library, first: Any) -> None:
    assert [kernel["hit"] for kernel in first["kernels"]] == [False] * 5
    assert len(first["entries"]) == 5
    assert first["entries"] == library.compile()["entries"]


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


def test_shared_memory_is_what_the_host_code_requests(first: Any, entries: Path) -> None:
    """The DSL's host code writes it into the launch's configuration, as an immediate."""
    launches = {kernel["path"]: kernel["launches"] for kernel in first["kernels"]}
    for path, (launch,) in launches.items():
        argv = ["objdump", "-d", entries / "b12x" / "entries" / path]
        listing = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
        stored = {int(number, 16) for number in re.findall(r"\tmovq +\$(0x[0-9a-f]+),", listing)}
        assert launch["shared_bytes"] in stored, path
    assert {
        (launch["kernel"], launch["tile"], launch["stages"], launch["shared_bytes"]) for (launch,) in launches.values()
    } == SHARED_MEMORY


def test_kernel_with_too_much_shared_memory_is_an_error(library: Library, tmp_path: Path) -> None:
    """b12x's dense kernel has 4 stages where the DSL reports more shared memory: on SM120 its launch would fail."""
    gemm = {"n": 1024, "k": 3072, "rows": [4096]}
    library.request.write_text(json.dumps(REQUEST | {"moe": [], "gemm": [gemm]}))
    (tmp_path / "datacenter.py").write_text(DATACENTER)
    argv = [library.python, tmp_path / "datacenter.py", ENGINE / "b12x" / "compile.py", library.request, tmp_path / "cache"]
    done = subprocess.run(argv, env=library.environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == (
        "error: kernel of b12x for 4096 x 1024 x 3072: DenseGemmKernel, tile 128x128x128, 4 stages, requests 107,520 bytes of"
        " shared memory; SM120 has 101,376"
    )
    assert not (tmp_path / "cache").exists()
    (kernel,) = library.compile(tmp_path / "cache")["kernels"]
    assert [(launch["stages"], launch["shared_bytes"]) for launch in kernel["launches"]] == [(3, 89_088)]


def test_ptx_of_the_dense_kernel_is_rewritten_and_assembled_for_hopper(library: Library, tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    dump.mkdir()
    library.request.write_text(json.dumps(REQUEST | {"moe": []}))
    keep = {"CUTE_DSL_KEEP_PTX": "1", "CUTE_DSL_DUMP_DIR": str(dump)}
    (kernel,) = library.compile(tmp_path / "cache", **keep)["kernels"]
    (path,) = dump.glob("*.ptx")
    report = ptx_session.rewrite_file(path, tmp_path / "assembled")
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
