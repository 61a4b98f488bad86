"""The toolchain of a FlashInfer recipe: what is installed in the locked version, else the wheels of its lockfile."""

from __future__ import annotations

import hashlib
import platform
from dataclasses import replace
from pathlib import Path

import pytest
from small_engine import make_wheel
from toolkits import bare, toolkit

from sm120kit import recipes
from sm120kit.core.atomic_writes import write_atomic
from sm120kit.core.errors import NotTrusted, OfflineMiss, RequirementMissing
from sm120kit.core.records import Arch
from sm120kit.core.workspace import Workspace
from sm120kit.recipes import locked_toolchain as locked
from sm120kit.recipes import lockfile
from sm120kit.recipes.target import FlashInferTarget, resolve_flashinfer
from sm120kit.sources.origin import Origin
from sm120kit.sources.run_options import Options
from sm120kit.sources.source_records import LockedWheel

__all__ = ["bare"]

HEADERS = ("cublasLt.h", "curand_kernel.h", "nvrtc.h")
NVCC = b"#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n"
PLATFORM = f"manylinux_2_35_{platform.machine()}"


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    """Small wheels of nvcc and of tvm-ffi, the latter for a Python that is not this one."""
    directory = tmp_path / "mirror"
    directory.mkdir()
    files = {f"nvidia/cu13/include/{name}": b"" for name in HEADERS} | {"nvidia/cu13/bin/nvcc": NVCC}
    make_wheel(directory, "nvidia-cuda-nvcc", "13.0.88", files=files)
    ffi = {"tvm_ffi/include/tvm/ffi/c_api.h": b"", "tvm_ffi/lib/libtvm_ffi.so": b""}
    make_wheel(directory, "apache-tvm-ffi", "0.1.9", f"cp310-cp310-{PLATFORM}", files=ffi)
    return directory


@pytest.fixture
def target(tmp_path: Path, mirror: Path) -> FlashInferTarget:
    """A recipe whose lockfile has these wheels."""
    real = resolve_flashinfer("flashinfer-0.6.6", Options(Workspace.open(tmp_path / "state"), Origin(str(mirror))))
    path = tmp_path / "flashinfer-0.6.6.toml"
    path.write_bytes(real.path.read_bytes())
    wheels = []
    for file in sorted(mirror.iterdir()):
        name, version = file.name.split("-")[:2]
        wheels.append(LockedWheel(name.replace("_", "-"), version, file.name, hashlib.sha256(file.read_bytes()).hexdigest()))
    closure = lockfile.make_closure(PLATFORM, "3.10", wheels, replaced=False)
    lock = replace(lockfile.read(recipes.lock_path(real.path)), closures=(closure,))
    write_atomic(recipes.lock_path(path), lockfile.text(lock).encode())
    return replace(real, path=path)


def unpacked(target: FlashInferTarget) -> list[Path]:
    directory = target.options.workspace.cache / "toolchains"
    return sorted(directory.iterdir()) if directory.is_dir() else []


def test_locked_wheels_are_unpacked_once(bare: Path, target: FlashInferTarget) -> None:
    tools = locked.compilers(target, [Arch.SM_120F])
    (directory,) = unpacked(target)
    assert tools.cuda_home == directory / "nvidia" / "cu13" and tools.nvcc_version == "13.0.88"
    offline = replace(target, options=replace(target.options, origin=Origin(None, offline=True)))
    assert locked.compilers(offline, [Arch.SM_120F]) == tools


def test_installed_toolkit_is_used_only_if_it_is_the_locked_one(bare: Path, tmp_path: Path, target: FlashInferTarget) -> None:
    nvcc = bare / "nvcc"
    nvcc.symlink_to(toolkit(tmp_path / "newer", "13.1.7", HEADERS) / "bin" / "nvcc")
    assert locked.compilers(target).cuda_home.is_relative_to(target.options.workspace.root)
    nvcc.unlink()
    nvcc.symlink_to(toolkit(tmp_path / "same", "13.0.88", HEADERS) / "bin" / "nvcc")
    assert locked.compilers(target).cuda_home == tmp_path / "same"


def test_installed_toolkit_without_a_header_is_not_used(bare: Path, tmp_path: Path, target: FlashInferTarget) -> None:
    (bare / "nvcc").symlink_to(toolkit(tmp_path / "same", "13.0.88", HEADERS[1:]) / "bin" / "nvcc")
    assert locked.compilers(target).cuda_home.is_relative_to(target.options.workspace.root)
    assert locked.compilers(target, headers=()).cuda_home == tmp_path / "same"


def test_cuda_home_counts_whatever_its_version(
    bare: Path, tmp_path: Path, target: FlashInferTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "newer", "13.1.7", HEADERS)))
    tools = locked.compilers(target)
    assert tools.nvcc_version == "13.1.7" and not unpacked(target)
    assert locked.toolchain_differences(lockfile.read(target.lock_path), tools) == (
        "nvidia-cuda-nvcc 13.1.7, the lockfile has 13.0.88",
    )
    assert locked.toolchain_differences(lockfile.read(target.lock_path), replace(tools, nvcc_version="13.0.88")) == ()
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "older", "12.6.0", HEADERS)))
    with pytest.raises(RequirementMissing, match=r"nvcc 12\.6\.0 is older") as error:
        locked.compilers(target, [Arch.SM_120F])
    assert "unset CUDA_HOME" in error.value.hint


def test_no_cxx_compiler_is_reported_before_a_download(bare: Path, target: FlashInferTarget) -> None:
    (bare / "c++").unlink()
    with pytest.raises(RequirementMissing, match=r"no C\+\+ compiler"):
        locked.compilers(target)
    assert not target.options.workspace.downloads.exists()


def test_tvm_ffi_is_that_of_the_lockfile(bare: Path, target: FlashInferTarget) -> None:
    """Also if the wheel is for another Python: only its headers and its library are used."""
    ffi = locked.tvm_ffi(target)
    (directory,) = unpacked(target)
    assert ffi == locked.TvmFfi("0.1.9", directory / "tvm_ffi")
    assert ffi.include.is_dir() and ffi.library.is_file()


def test_installed_tvm_ffi_of_the_locked_version_is_used(
    target: FlashInferTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "tvm_ffi"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr("sm120kit.core.toolchain.installed_version", lambda name: "0.1.9")
    assert locked.tvm_ffi(target) == locked.TvmFfi("0.1.9", package)
    monkeypatch.setattr("sm120kit.core.toolchain.installed_version", lambda name: "0.1.15")
    assert locked.tvm_ffi(target).directory.is_relative_to(target.options.workspace.root)


def test_failed_fetch_leaves_no_toolchain(bare: Path, target: FlashInferTarget, mirror: Path) -> None:
    offline = replace(target, options=replace(target.options, origin=Origin(None, offline=True)))
    with pytest.raises(OfflineMiss, match=r"nvidia_cuda_nvcc-13\.0\.88"):
        locked.compilers(offline)
    (wheel,) = mirror.glob("nvidia*")
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(NotTrusted):
        locked.compilers(target)
    assert not unpacked(target)


def test_recipe_without_lockfile_takes_any_toolkit(bare: Path, tmp_path: Path, target: FlashInferTarget) -> None:
    target.lock_path.unlink()
    (bare / "nvcc").symlink_to(toolkit(tmp_path / "newer", "13.1.7", HEADERS) / "bin" / "nvcc")
    assert locked.compilers(target).nvcc_version == "13.1.7"
    with pytest.raises(RequirementMissing, match="is not locked") as error:
        locked.tvm_ffi(target)
    assert "sm120kit recipe lock" in error.value.hint
