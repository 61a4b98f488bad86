"""The plan of the kernel wheel: which kernels are compiled, and the digest of its inputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sm120kit import recipes
from sm120kit.core.errors import NotFound, RequirementMissing
from sm120kit.core.memory import Costs
from sm120kit.core.records import Arch, Toolchain
from sm120kit.kernels.cubin import matching
from sm120kit.kernels.cubin.cubin_records import Cubin, Kernel
from sm120kit.patches.patch_records import PatchedTree
from sm120kit.sources.source_records import Checkout
from sm120kit.wheels import _kernel_wheel, _plan
from sm120kit.wheels.build_records import BuildPlan
from sm120kit.wheels.compile import CompileSettings

RECIPE = recipes.load_flashinfer("flashinfer-0.6.6")
TREE = PatchedTree(Checkout(RECIPE.pin, Path("/repository"), "c" * 40, "d" * 40), RECIPE.inside, "a" * 40, "b" * 40, ())
TOOLS = Toolchain(Path("/cuda"), "13.0.88", "/usr/bin/c++", "c++ 12.2.0")
FILES = {
    "kernels/nvfp4_dense_1x2x3.cu": "1",
    "kernels/nvfp4_grouped_1x2x3.cu": "2",
    "kernels/mxfp8_dense_1x2x3.cu": "3",
    "include/x.cuh": "4",
    "face.cc": "5",
}


ENVIRONMENT = _plan.BuildEnvironment(TOOLS, {"cmake": "4"})


def make_plan(prefix: str | None = None, archs: tuple[Arch, ...] = (Arch.SM_120F,), **changed: Any) -> BuildPlan:
    arguments: dict[str, Any] = {"tree": TREE, "version": "0.1.0", "files": FILES, "environment": ENVIRONMENT}
    return _plan.plan_kernel_wheel(_plan.Selection(RECIPE, archs, prefix), **(arguments | changed))


def compiled(prefix: str | None) -> list[str]:
    (module,) = make_plan(prefix).modules
    return [Path(unit.source).stem for unit in module.units]


@pytest.mark.parametrize(
    ("prefix", "names"),
    [
        (None, ["mxfp8_dense_1x2x3", "nvfp4_dense_1x2x3", "nvfp4_grouped_1x2x3"]),
        ("all", ["mxfp8_dense_1x2x3", "nvfp4_dense_1x2x3", "nvfp4_grouped_1x2x3"]),
        ("nvfp4", ["nvfp4_dense_1x2x3", "nvfp4_grouped_1x2x3"]),
        ("nvfp4_grouped", ["nvfp4_grouped_1x2x3"]),
        ("mxfp8_dense_1x2x3", ["mxfp8_dense_1x2x3"]),
    ],
)
def test_kernels_are_selected_by_prefix(prefix: str | None, names: list[str]) -> None:
    assert compiled(prefix) == names
    left_out = [entry.what for entry in make_plan(prefix).left_out]
    assert sorted(names + left_out) == compiled(None)


@pytest.mark.parametrize("prefix", ["nvfp", "nvfp4_", "1x2x3", "NVFP4", ""])
def test_unknown_prefix(prefix: str) -> None:
    with pytest.raises(NotFound, match="no kernel's name"):
        make_plan(prefix)


def test_digest_depends_on_inputs_only() -> None:
    digest = make_plan().digest
    assert make_plan("all").digest == digest
    assert make_plan(environment=replace(ENVIRONMENT, measured_cost=lambda unit: (1, 1.0))).digest == digest
    other_home = replace(TOOLS, cuda_home=Path("/other"))
    assert make_plan(environment=replace(ENVIRONMENT, toolchain=other_home)).digest == digest
    changed = [
        make_plan("nvfp4"),
        make_plan(files={**FILES, "face.cc": "6"}),
        make_plan(tree=replace(TREE, tree="e" * 40)),
        make_plan(archs=(Arch.SM_120A,)),
        make_plan(environment=replace(ENVIRONMENT, toolchain=replace(TOOLS, nvcc_version="13.1"))),
        make_plan(environment=replace(ENVIRONMENT, versions={"cmake": "5"})),
        make_plan(version="0.2.0"),
    ]
    assert len({digest, *(other.digest for other in changed)}) == 1 + len(changed)


def test_kernels_are_expected_by_full_name_and_arch() -> None:
    (module,) = make_plan("nvfp4_dense", archs=(Arch.SM_120A, Arch.SM_121A)).modules

    def matches(name: str, arch: str) -> list[int]:
        mangled = f"_ZN7cutlass13device_kernelIN16sm120kit_kernels5NamedINS1_{len(name)}{name}EEEEEvNT_6ParamsE"
        cubin = Cubin("x", arch, 1, (Kernel(mangled, arch, 1, 0, 0, 1, ""),))
        return [len(matching(pattern, [cubin])) for pattern, _ in module.expect_kernels]

    assert matches("nvfp4_dense_1x2x3", "sm_120a") == [1, 0]
    assert matches("nvfp4_dense_1x2x3", "sm_121a") == [0, 1]
    assert matches("nvfp4_dense_1x2x32", "sm_120a") == [0, 0]


def test_source_files_of_the_kernel_wheel() -> None:
    files = _kernel_wheel.source_files()
    assert {"CMakeLists.txt", "pyproject.toml", "face.cc", "kernels/nvfp4_grouped_128x128x64.cu"} <= set(files)
    assert not any("__pycache__" in name for name in files)
    assert _kernel_wheel.source_version() == "0.1.0"


def test_missing_build_package_is_reported_before_anything_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = _kernel_wheel.importlib.util.find_spec
    monkeypatch.setattr(_kernel_wheel.importlib.util, "find_spec", lambda name: None if name == "cmake" else real(name))
    work = tmp_path / "work"
    with pytest.raises(RequirementMissing, match=r"needs cmake, which") as refused:
        _kernel_wheel.compile_kernels(make_plan(), TREE, tmp_path, work, CompileSettings(Costs(tmp_path / "costs"), 1, 1))
    assert "sm120kit[kernels]" in refused.value.hint and not work.exists()


@pytest.mark.parametrize("name", ["sp ace", "com,ma", "semi;colon", "quo'te"])
def test_work_directory_that_splits_arguments_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(RequirementMissing, match="splits their arguments"):
        settings = CompileSettings(Costs(tmp_path / "costs"), 1, 1)
        _kernel_wheel.compile_kernels(make_plan(), TREE, tmp_path, tmp_path / name, settings)
    assert not (tmp_path / name).exists()
