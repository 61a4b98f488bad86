"""Which of our own kernels a build compiles, and what names the result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sm120kit import build, plan, recipe
from sm120kit.build import kernels
from sm120kit.cubin import matching
from sm120kit.errors import ToolchainMissing, ToolchainUnsuitable, UnknownName
from sm120kit.memory import Costs
from sm120kit.records import Arch, BuildPlan, Checkout, Cubin, Kernel, PatchedTree, Toolchain

ITEM = recipe.load("flashinfer-0.6.6")
TREE = PatchedTree(Checkout(ITEM.pin, Path("/somewhere"), "c" * 40, "d" * 40), ITEM.inside, "a" * 40, "b" * 40, ())
TOOLS = Toolchain(Path("/cuda"), "13.0.88", "/usr/bin/c++", "c++ 12.2.0")
FILES = {
    "kernels/nvfp4_dense_1x2x3.cu": "1",
    "kernels/nvfp4_grouped_1x2x3.cu": "2",
    "kernels/mxfp8_dense_1x2x3.cu": "3",
    "include/x.cuh": "4",
    "face.cc": "5",
}


def make(start: str | None = None, **changed: Any) -> BuildPlan:
    given: dict[str, Any] = {
        "archs": [Arch.SM_120F],
        "tree": TREE,
        "files": FILES,
        "version": "0.1.0",
        "toolchain": TOOLS,
        "versions": {"cmake": "4"},
    }
    return plan.kernels(ITEM, start, **{**given, **changed})


def chosen(start: str | None) -> list[str]:
    (module,) = make(start).modules
    return [Path(unit.source).stem for unit in module.units]


@pytest.mark.parametrize(
    ("start", "names"),
    [
        (None, ["mxfp8_dense_1x2x3", "nvfp4_dense_1x2x3", "nvfp4_grouped_1x2x3"]),
        ("all", ["mxfp8_dense_1x2x3", "nvfp4_dense_1x2x3", "nvfp4_grouped_1x2x3"]),
        ("nvfp4", ["nvfp4_dense_1x2x3", "nvfp4_grouped_1x2x3"]),
        ("nvfp4_grouped", ["nvfp4_grouped_1x2x3"]),
        ("mxfp8_dense_1x2x3", ["mxfp8_dense_1x2x3"]),
    ],
)
def test_kernels_are_chosen_by_how_their_names_start(start: str | None, names: list[str]) -> None:
    assert chosen(start) == names
    left = [item.what for item in make(start).left_out]
    assert sorted(names + left) == chosen(None)


@pytest.mark.parametrize("start", ["nvfp", "nvfp4_", "1x2x3", "NVFP4", ""])
def test_no_such_start(start: str) -> None:
    with pytest.raises(UnknownName, match="no kernel's name"):
        make(start)


def test_digest_follows_what_goes_in_and_nothing_else() -> None:
    digest = make().digest
    assert make("all").digest == digest
    assert make(known=lambda unit: (1, 1.0)).digest == digest
    assert make(toolchain=replace(TOOLS, cuda_home=Path("/elsewhere"))).digest == digest
    others = [
        make("nvfp4"),
        make(files={**FILES, "face.cc": "6"}),
        make(tree=replace(TREE, tree="e" * 40)),
        make(archs=[Arch.SM_120A]),
        make(toolchain=replace(TOOLS, nvcc_version="13.1")),
        make(versions={"cmake": "5"}),
        make(version="0.2.0"),
    ]
    assert len({digest, *(other.digest for other in others)}) == 1 + len(others)


def test_each_kernel_is_expected_by_its_whole_name_for_each_arch() -> None:
    (module,) = make("nvfp4_dense", archs=[Arch.SM_120A, Arch.SM_121A]).modules

    def found(name: str, arch: str) -> list[int]:
        mangled = f"_ZN7cutlass13device_kernelIN16sm120kit_kernels5NamedINS1_{len(name)}{name}EEEEEvNT_6ParamsE"
        cubin = Cubin("x", arch, 1, (Kernel(mangled, arch, 1, 0, 0, 1, ""),))
        return [len(matching(pattern, [cubin])) for pattern, _ in module.expect_kernels]

    assert found("nvfp4_dense_1x2x3", "sm_120a") == [1, 0]
    assert found("nvfp4_dense_1x2x3", "sm_121a") == [0, 1]
    assert found("nvfp4_dense_1x2x32", "sm_120a") == [0, 0]


def test_the_sources_are_there() -> None:
    files = build.source_files()
    assert {"CMakeLists.txt", "pyproject.toml", "face.cc", "kernels/nvfp4_grouped_128x128x64.cu"} <= set(files)
    assert not any("__pycache__" in name for name in files)
    assert build.source_version() == "0.1.0"


def test_what_a_build_needs_is_named_before_anything_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = kernels.importlib.util.find_spec
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None if name == "cmake" else real(name))
    work = tmp_path / "work"
    with pytest.raises(ToolchainMissing, match=r"needs cmake, which") as refused:
        build.compile_kernels(make(), TREE, tmp_path, work, build.Means(Costs(tmp_path / "costs"), 1, 1))
    assert "sm120kit[cuda,kernels]" in refused.value.hint and not work.exists()


@pytest.mark.parametrize("name", ["sp ace", "com,ma", "semi;colon", "quo'te"])
def test_a_directory_that_would_divide_arguments_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ToolchainUnsuitable, match="divides their arguments"):
        build.compile_kernels(make(), TREE, tmp_path, tmp_path / name, build.Means(Costs(tmp_path / "costs"), 1, 1))
    assert not (tmp_path / name).exists()
