"""The kernel wheel as docs/build.md builds it, with one kernel: the patched CUTLASS, CMake, and its own tests with a CPU torch.

A compile takes a bit more than a minute. The kernel is that which computes wrong numbers in stock CUTLASS.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sm120kit.kernels import cubin

ROOT = Path(__file__).parents[3]
KERNEL = "nvfp4_grouped_128x128x64"
PAGE = (ROOT / "docs" / "build.md").read_text()
PASTED = re.findall(r"```\n(pip install [^`]*?python -m build [^`]*?)```", PAGE)[0].splitlines(keepends=True)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the sources of the wheel, and in ``work`` those of FlashInfer 0.6.6, patched."""
    directory = tmp_path_factory.mktemp("kernels")
    shutil.copytree(ROOT / "src" / "sm120kit_kernels", directory / "src" / "sm120kit_kernels")
    (directory / "torch.py").write_text("raise ImportError('a build of the kernels needs no torch')\n")
    shell(next(line for line in PASTED if line.startswith("sm120kit")), directory).check_returncode()
    return directory


def shell(script: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run lines of docs/build.md where torch cannot be imported."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "SM120KIT_STATE": str(directory / "state"), "PYTHONPATH": str(directory)}
    return subprocess.run(["bash", "-ec", script], env=env, cwd=directory, capture_output=True, text=True)


def build(directory: Path, cutlass: str = "$PWD/work/3rdparty/cutlass") -> subprocess.CompletedProcess[str]:
    """Build the wheel of one kernel, below its sources."""
    script = "".join(line for line in PASTED if not line.startswith(("pip", "sm120kit")))
    script = script.replace("$PWD/work/3rdparty/cutlass", cutlass).rstrip()
    return shell(f"{script} -Ccmake.define.SM120KIT_KERNELS={KERNEL}", directory)


@pytest.fixture(scope="module")
def site(work: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which the wheel is installed."""
    done = build(work)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (wheel,) = (work / "src" / "sm120kit_kernels" / "dist").glob("sm120kit_kernels-0.1.0-py3-none-linux_*.whl")
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(wheel)], check=True)
    return target


def test_stock_cutlass_is_refused(work: Path, tmp_path: Path) -> None:
    done = build(work, str(tmp_path))
    assert done.returncode and "is not a CUTLASS patched by sm120kit" in done.stdout + done.stderr


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


def test_files_contain_no_build_paths(work: Path, site: Path) -> None:
    for path in (site / "sm120kit_kernels").iterdir():
        if path.is_file():
            content = path.read_bytes()
            assert str(work).encode() not in content, path.name


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
