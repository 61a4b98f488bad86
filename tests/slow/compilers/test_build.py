"""A real build of the smallest module: index, series, nvcc, wheel, and FlashInfer loading the compiled module.

A compile takes about half a minute. The recipe is the real one with a kernel group of one module added.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sm120kit.kernels import cubin


def argv(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "sm120kit", *map(str, arguments)]


def environment(state: Path, data: Path) -> dict[str, str]:
    return {**os.environ, "SM120KIT_STATE": str(state), "SM120KIT_DATA": str(data)}


def command(state: Path, data: Path, *arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(argv(*arguments), env=environment(state, data), capture_output=True, text=True)
    assert done.returncode == 0 or not check, done.stderr
    return done


def build(state: Path, data: Path, downloads: Path, **options: bool) -> subprocess.CompletedProcess[str]:
    options_ = ["--kernels", "tiny", "--mirror", downloads, "--output", state / "out", "--offline"]
    return command(state, data, "build", "flashinfer@0.6.6", *options_, **options)


def members(wheel: Path) -> dict[str, str]:
    import hashlib

    with zipfile.ZipFile(wheel) as archive:
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


def records(state: Path) -> tuple[dict[str, object], dict[str, object]]:
    (directory,) = (state / "build" / "flashinfer").iterdir()
    return json.loads((directory / "plan.json").read_text()), json.loads((directory / "artifacts.json").read_text())


def test_wheel_contains_module_overrides_and_record(built: tuple[Path, Path], data: Path, tmp_path: Path) -> None:
    state, wheel = built
    plan, artifacts = records(state)
    assert wheel.name == f"flashinfer_python-0.6.6+sm120kit.{plan['digest'][:12]}-py3-none-linux_x86_64.whl"  # type: ignore[index]
    inside = members(wheel)
    (module,) = artifacts["modules"]  # type: ignore[misc]
    assert inside["flashinfer/data/aot/fp4_quantization_120f/fp4_quantization_120f.so"] == module["sha256"]
    assert any(name.startswith("flashinfer/data/cutlass/include/sm120kit/") for name in inside), "overrides reach the JIT"
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/sm120kit.json"))
        origin = json.loads(archive.read(name))
        library = archive.extract("flashinfer/data/aot/fp4_quantization_120f/fp4_quantization_120f.so", tmp_path)
    assert (origin["tree"], origin["plan"]) == (plan["tree"], plan["digest"])
    assert "sm120-smem-accounting" in {patch["slug"] for patch in origin["patches"]}
    images = cubin.read(Path(library))
    assert {image.arch for image in images} <= {"sm_120", "sm_120f"}
    assert sum(len(image.kernels) for image in images) == artifacts["kernels"] > 0  # type: ignore[operator]


def test_warm_dry_run_reads_each_input_once(built: tuple[Path, Path], data: Path, downloads: Path, tmp_path: Path) -> None:
    state, _ = built
    script, out = Path(__file__).parents[2] / "support" / "count_reads.py", tmp_path / "reads.json"
    arguments = ["build", "flashinfer@0.6.6", "--kernels", "tiny", "--mirror", str(downloads), "--offline", "--dry-run"]
    command(state, data, *arguments)
    subprocess.run([sys.executable, script, out, *arguments], env=environment(state, data), capture_output=True, check=True)
    counts = json.loads(out.read_text())
    inputs = [path for name in ("patches", "cutlass_overrides") for path in (data / name).rglob("*") if path.is_file()]
    inputs += [data / "recipes" / "engines" / "flashinfer-0.6.6.toml"]
    assert len(inputs) > 20 and {counts["opened"].get(str(path.resolve())) for path in inputs} == {1}
    programs = {Path(argv[0]).name for argv in counts["programs"]}
    assert "nvcc" in programs and programs <= {"c++", "g++", "nvcc"}, "neither git nor a generator"


def test_flashinfer_loads_the_module_without_compiling(built: tuple[Path, Path], tmp_path: Path) -> None:
    """FlashInfer's own loader, JIT disabled, no nvcc: a host function of the module against a table of e2m1 values."""
    state, wheel = built
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (work,) = (state / "work").glob("flashinfer-0.6.6*")
    program = """
import ctypes, pathlib, sys, types
libraries = pathlib.Path(sys.argv[2])
for name in ("stubs/libcuda.so", "libcudart.so"):
    ctypes.CDLL(str(libraries / name), ctypes.RTLD_GLOBAL)
package = types.ModuleType("flashinfer")
package.__path__ = [sys.argv[1] + "/flashinfer"]
sys.modules["flashinfer"] = package
import torch
torch.version.cuda = "13.0"  # as in a CUDA build of torch; the generator reads it where there is no nvcc
from flashinfer.jit.fp4_quantization import gen_fp4_quantization_sm120f_module
spec = gen_fp4_quantization_sm120f_module()
assert spec.is_aot, spec.aot_path
module = spec.build_and_load()
codes = torch.arange(256, dtype=torch.uint8).reshape(2, 128)
scales = torch.arange(120, 136, dtype=torch.uint8).reshape(2, 8)
out = torch.empty(2, 256, dtype=torch.float32)
module.mxfp4_dequantize_host(codes, scales, out, 32)
e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
def value(code):
    return e2m1[code & 7] * (-1.0 if code & 8 else 1.0)
for row in range(2):
    for column in range(256):
        code = int(codes[row, column // 2]) >> (4 * (column % 2)) & 15
        expected = value(code) * 2.0 ** (int(scales[row, column // 32]) - 127)
        assert out[row, column] == expected, (row, column)
print("answered")
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(site), str(work / "cuda" / "lib64")],
        env={
            "PATH": "/nonexistent",
            "FLASHINFER_DISABLE_JIT": "1",
            "FLASHINFER_CUDA_ARCH_LIST": "12.0f",
            "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
            "HOME": str(tmp_path),
        },
        capture_output=True,
        text=True,
    )
    assert done.stdout.endswith("answered\n"), done.stderr


def test_second_build_compiles_nothing(built: tuple[Path, Path], data: Path, downloads: Path) -> None:
    state, wheel = built
    objects = {path: path.stat().st_mtime_ns for path in state.rglob("*.o")}
    again = build(state, data, downloads)
    assert "nothing to do" in again.stderr and again.stdout.strip() == str(wheel)
    assert {path: path.stat().st_mtime_ns for path in state.rglob("*.o")} == objects


def test_changed_wheel_is_refused_in_state_and_replaced_in_output(
    built: tuple[Path, Path], data: Path, downloads: Path, tmp_path: Path
) -> None:
    state, wheel = built
    (finished,) = (state / "build" / "flashinfer").glob("*/*.whl")
    content = finished.read_bytes()
    wheel.write_bytes(content[:-10] + b"0123456789")
    build(state, data, downloads)
    assert wheel.read_bytes() == content
    try:
        finished.write_bytes(content[:-10] + b"0123456789")
        done = build(state, data, downloads, check=False)
    finally:
        finished.write_bytes(content)
    assert done.returncode == 12 and str(finished) in done.stderr and f"rm -r {finished.parent}" in done.stderr
    assert wheel.read_bytes() == content


def test_build_in_another_directory_gives_same_bytes(
    built: tuple[Path, Path], data: Path, downloads: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    state, wheel = built
    other = tmp_path_factory.mktemp("a-directory-with-a-longer-name")
    again = Path(build(other, data, downloads).stdout.strip())
    first, second = records(state)[0], records(other)[0]
    assert [first[key] for key in ("tree", "commit", "digest")] == [second[key] for key in ("tree", "commit", "digest")]
    assert members(wheel) == members(again)
    assert wheel.read_bytes() == again.read_bytes()


def test_changed_header_recompiles_units_that_include_it(
    built: tuple[Path, Path], data: Path, downloads: Path, tmp_path: Path
) -> None:
    """A change in a header of CUTLASS that the unit does not include leaves its object alone; one that it includes does not."""
    state, _ = built
    changed = tmp_path / "data"
    shutil.copytree(data, changed)
    (work,) = (state / "work").glob("flashinfer-0.6.6*")
    (device,) = work.rglob("quantization.cuda.o")
    before = device.stat().st_mtime_ns
    header = changed / "cutlass_overrides" / "include" / "sm120kit" / "unused_by_quantization.hpp"
    header.write_text("// included by no unit\n")
    build(state, changed, downloads)
    assert len(list((state / "build" / "flashinfer").iterdir())) == 2, "another tree is another plan"
    assert device.stat().st_mtime_ns == before, "but nothing was compiled"
