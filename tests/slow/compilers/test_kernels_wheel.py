"""A real ``sm120kit build kernels`` with one kernel: compiler wheels, CMake, the wheel, and its own tests with a CPU torch.

A compile takes a bit more than a minute. The kernel is that which computes wrong numbers in stock CUTLASS.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sm120kit.kernels import cubin

ROOT = Path(__file__).parents[3]
KERNEL = "nvfp4_grouped_128x128x64"


def command(state: Path, *arguments: str | Path, python_path: str = "", data: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run the tool as on a machine without a CUDA toolkit: the only compiler is that of the wheels."""
    path = [str(Path(name).parent) for name in ("/usr/bin/git", "/bin/sh")]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA", "SM120KIT"))}
    return subprocess.run(
        [sys.executable, "-m", "sm120kit", *map(str, arguments)],
        env={
            **inherited,
            "PATH": os.pathsep.join(path),
            "SM120KIT_STATE": str(state),
            "SM120KIT_DATA": str(data),
            "PYTHONPATH": os.pathsep.join(filter(None, (python_path, os.environ.get("PYTHONPATH")))),
        },
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def wheel(state: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built where torch cannot be imported."""
    no_torch = tmp_path_factory.mktemp("no_torch")
    (no_torch / "torch.py").write_text("raise ImportError('a build of the kernels needs no torch')\n")
    done = command(state, "build", "kernels", "--kernels", KERNEL, "--output", state / "out", python_path=str(no_torch))
    assert done.returncode == 0, done.stderr
    assert "unverified on SM120" in done.stderr
    return Path(done.stdout.strip())


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which the wheel is installed."""
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(wheel)], check=True)
    return target


def test_wheel_contains_library_and_build_info(wheel: Path, state: Path, site: Path) -> None:
    (directory,) = (state / "build" / "kernels").iterdir()
    plan = json.loads((directory / "plan.json").read_text())
    artifacts = json.loads((directory / "artifacts.json").read_text())
    assert wheel.name == f"sm120kit_kernels-0.1.0+sm120kit.{plan['digest'][:12]}-py3-none-linux_x86_64.whl"
    info = json.loads((site / "sm120kit_kernels" / "build_info.json").read_text())
    assert (info["plan"], info["tree"], info["kernels"]) == (plan["digest"], plan["tree"], [KERNEL])
    assert (info["cutlass"], info["archs"]) == ("4.2.1", ["sm_120f"])
    assert {"single-k-block-mainloop", "effective-block-sf"} <= {patch["slug"] for patch in info["patches"]}
    (module,) = artifacts["modules"]
    with zipfile.ZipFile(wheel) as archive:
        assert module["path"] in archive.namelist()


def test_library_needs_neither_torch_nor_cuda_runtime(site: Path) -> None:
    section = subprocess.run(
        ["readelf", "-d", site / "sm120kit_kernels" / "sm120kit_kernels.so"], capture_output=True, text=True
    )
    needed = set(re.findall(r"NEEDED.*\[(.+?)\.so", section.stdout))
    assert "libtvm_ffi" in needed
    assert needed <= {"libtvm_ffi", "libstdc++", "libgcc_s", "libc", "libm", "libdl", "librt", "libpthread", "ld-linux-x86-64"}
    assert "RUNPATH" not in section.stdout and "RPATH" not in section.stdout


def test_device_code_is_for_sm12x_only(site: Path) -> None:
    images = cubin.read(site / "sm120kit_kernels" / "sm120kit_kernels.so")
    assert {image.arch for image in images} == {"sm_120f"}
    names = [kernel.name for image in images for kernel in image.kernels]
    assert sum("device_kernel" in name and KERNEL in name for name in names) == 1


def test_files_contain_no_build_paths(state: Path, site: Path) -> None:
    for path in (site / "sm120kit_kernels").iterdir():
        if path.is_file():
            content = path.read_bytes()
            assert str(state).encode() not in content and sys.prefix.encode() not in content, path.name


def test_second_build_compiles_nothing(wheel: Path, state: Path) -> None:
    log = next(state.glob("work/kernels-*/compile.log"))
    before = log.stat().st_mtime_ns
    done = command(state, "build", "kernels", "--kernels", KERNEL, "--output", state / "out", "--offline")
    assert done.returncode == 0 and "nothing to do for kernels@flashinfer-0.6.6" in done.stderr
    assert log.stat().st_mtime_ns == before


def test_tests_of_the_package_pass_with_cpu_torch(site: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    inside = ROOT / "tests" / "support" / "kernels_wheel_inside.py"
    options = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "--noconftest", "-c", os.devnull]
    done = subprocess.run(
        [sys.executable, *options, f"--rootdir={tmp_path}", f"--junitxml={report}", str(inside)],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    junit = report.read_text()
    counts = dict(re.findall(r'(tests|skipped|failures|errors)="(\d+)"', junit))
    assert int(counts["tests"]) - int(counts["skipped"]) >= 50
    # Only tests that need a GPU are skipped, or with a GPU those that need a machine without one.
    assert {reason.split(" GPU")[0] for reason in re.findall(r'pytest.skip" message="(.+?)"', junit)} <= {
        "needs a",
        "there is a",
    }


def test_bad_input_is_refused(wheel: Path, state: Path, tmp_path: Path) -> None:
    offline = ("--offline", "--output", state / "refused")
    done = command(state, "build", "kernels", "--kernels", "nvfp5", *offline)
    assert done.returncode == 10 and "'nvfp5'" in done.stderr and KERNEL in done.stderr
    done = command(state, "build", "kernels@flashinfer-9", *offline)
    assert done.returncode == 10 and "flashinfer-9" in done.stderr
    recipe = tmp_path / "flashinfer-1.0.toml"
    text = (
        (ROOT / "recipes" / "engines" / "flashinfer-0.6.6.toml").read_text().replace('"flashinfer-0.6.6"', '"flashinfer-1.0"')
    )
    recipe.write_text(re.sub(r"\[sources\.cutlass\]\n(\w+ = .*\n)+", "", text))
    done = command(state, "build", f"kernels@{recipe}", *offline)
    assert done.returncode == 10 and "the sources of flashinfer-1.0 contain no CUTLASS" in done.stderr, done.stderr
    done = command(state, "build", "kernels", "--kernels", "mxfp8_dense", "--memory", "1", *offline)
    assert done.returncode == 41 and "1.0 GiB can be used" in done.stderr
    done = command(state, "build", "kernels", "--arch", "sm_90", *offline)
    assert done.returncode == 10 and "sm_90" in done.stderr
    assert not (state / "refused").exists()


def test_bad_sources_fail_the_build(state: Path, tmp_path: Path) -> None:
    """A kernel that does not compile, a file without the kernel of its name, and a CMake project that fails."""
    data = tmp_path / "data"
    for name in ("recipes", "patches", "cutlass_overrides", "src/sm120kit_kernels"):
        shutil.copytree(ROOT / name, data / name)
    source = data / "src" / "sm120kit_kernels"
    broken = source / "kernels" / "broken_dense_1x1x1.cu"
    arguments = ("build", "kernels", "--kernels", "broken", "--output", state / "refused")

    broken.write_text("#error this cannot be\n")
    done = command(state, *arguments, data=data)
    assert done.returncode == 50 and "broken_dense_1x1x1.cu.o does not compile" in done.stderr, done.stderr
    assert "this cannot be" in done.stderr and "compile.log" in done.stderr

    broken.write_text(
        '#include "sm120kit_kernels/kernels.hpp"\n'
        "__global__ void device_kernel_of_another_name() {}\n"
        'namespace sm120kit_kernels { static Registered const r{"broken_dense_1x1x1", {nullptr, nullptr, 1}}; }\n'
    )
    done = command(state, *arguments, data=data)
    assert done.returncode == 51 and "0 kernels like *device_kernel*18broken_dense_1x1x1E*@sm_120f*" in done.stderr, done.stderr

    (source / "CMakeLists.txt").write_text('cmake_minimum_required(VERSION 3.26)\nmessage(FATAL_ERROR "not today")\n')
    done = command(state, *arguments, data=data)
    assert done.returncode == 50 and "not today" in done.stderr, done.stderr
    assert not (state / "refused").exists()
