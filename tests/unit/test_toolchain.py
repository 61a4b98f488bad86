"""Which nvcc is used, and the reasons against others."""

from __future__ import annotations

from pathlib import Path

import pytest
from toolkits import bare, toolkit

from sm120kit.core import toolchain
from sm120kit.core.errors import RequirementMissing
from sm120kit.core.records import Arch

__all__ = ["bare"]


def test_script_on_path_gives_toolkit_of_nvcc(bare: Path, tmp_path: Path) -> None:
    home = toolkit(tmp_path / "cuda", "13.0.88")
    (bare / "nvcc").write_text(f'#!/bin/sh\nexec {home}/bin/nvcc "$@"\n')
    (bare / "nvcc").chmod(0o755)
    tools = toolchain.find([Arch.SM_120F])
    assert (tools.cuda_home, tools.nvcc_version, tools.host_version) == (home, "13.0.88", "c++ 12.2.0")


def test_cuda_home_comes_first(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bare / "nvcc").symlink_to(toolkit(tmp_path / "one", "12.9.1") / "bin" / "nvcc")
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "two", "13.0.88")))
    assert toolchain.find([Arch.SM_120F]).nvcc_version == "13.0.88"


@pytest.mark.parametrize(
    ("version", "arch", "suits"), [("12.8.93", "sm_120a", True), ("12.8.93", "sm_120f", False), ("12.6.0", "sm_120a", False)]
)
def test_old_nvcc_is_rejected_with_first_release(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, arch: str, suits: bool
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "cuda", version)))
    if suits:
        assert toolchain.find([Arch(arch)]).nvcc_version == version
    else:
        with pytest.raises(RequirementMissing, match=rf"nvcc {version} is older than 12\.\d, the first for {arch}") as error:
            toolchain.find([Arch(arch)])
        assert "sm120kit[cuda]" in error.value.hint


def test_missing_headers_make_a_toolkit_unsuitable(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "cuda", "13.0.88", headers=("nvrtc.h",))))
    assert toolchain.find([], ["nvrtc.h"])
    with pytest.raises(RequirementMissing, match=r"no cublasLt\.h in "):
        toolchain.find([], ["nvrtc.h", "cublasLt.h"])


def test_no_nvcc_at_all(bare: Path) -> None:
    with pytest.raises(RequirementMissing, match="no CUDA compiler"):
        toolchain.find()


def test_cuda_home_without_nvcc(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(RequirementMissing, match="has no bin/nvcc"):
        toolchain.find()


def test_no_host_compiler(bare: Path) -> None:
    (bare / "c++").unlink()
    with pytest.raises(RequirementMissing, match=r"no C\+\+ compiler"):
        toolchain.find()


def test_compilers_run_once_unless_they_change(bare: Path, tmp_path: Path) -> None:
    log, home = tmp_path / "log", toolkit(tmp_path / "cuda", "13.0.88")
    for program in (bare / "c++", home / "bin" / "nvcc"):
        program.write_text(program.read_text().replace("#!/bin/sh\n", f"#!/bin/sh\necho {program.name} $1 >> {log}\n"))
    (bare / "nvcc").symlink_to(home / "bin" / "nvcc")
    first = toolchain.find([Arch.SM_120F])
    assert toolchain.find() == toolchain.at(home) == first
    assert sorted(log.read_text().splitlines()) == ["c++ --version", "nvcc --dryrun", "nvcc --version"]
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(nvcc.read_text().replace("13.0.88", "13.1.115"))
    assert toolchain.find().nvcc_version == "13.1.115"
