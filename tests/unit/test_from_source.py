"""Repacked wheels, the plan of an engine's extension modules, and recipes that are not well-formed."""

from __future__ import annotations

import base64
import csv
import hashlib
import re
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sm120kit import recipes
from sm120kit.core.errors import BadInput, Mismatch, RequirementMissing
from sm120kit.core.records import Arch, Toolchain
from sm120kit.patches.patch_records import PatchedTree
from sm120kit.recipes.added_files import read_added_sources
from sm120kit.sources.source_records import Checkout, LockedWheel, SdistPin
from sm120kit.wheels import _extensions, _plan, _repack
from sm120kit.wheels.build_records import BuildPlan

INFO = "vllm-9.0.dist-info"
OFFICIAL = {
    "vllm/__init__.py": b"version = '9.0'\n",
    "vllm/_C.abi3.so": b"official",
    "vllm/_moe.abi3.so": b"also official",
    f"{INFO}/METADATA": b"Metadata-Version: 2.1\nName: vllm\nVersion: 9.0\nSummary: Version: 9.0\n",
    f"{INFO}/WHEEL": b"Wheel-Version: 1.0\nTag: cp38-abi3-linux_x86_64\n",
    f"{INFO}/RECORD": b"",
}


def write(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            member = zipfile.ZipInfo(name, (2026, 4, 27, 7, 59, 0))
            member.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
            archive.writestr(member, data)
    return path


@pytest.fixture
def official(tmp_path: Path) -> Path:
    return write(tmp_path / "vllm-9.0-cp38-abi3-manylinux_2_35_x86_64.whl", OFFICIAL)


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    path = tmp_path / "ours.so"
    path.write_bytes(b"ours")
    return path


def packed(official: Path, ours: Path, out: Path) -> Path:
    out.mkdir()
    return _repack.repack(official, "9.0+sm120kit.0123456789ab", {"vllm/_C.abi3.so": ours}, {"sm120kit.json": b"{}"}, out)


def test_repacked_wheel_differs_in_one_member_version_and_record(official: Path, ours: Path, tmp_path: Path) -> None:
    wheel = packed(official, ours, tmp_path / "out")
    assert wheel.name == "vllm-9.0+sm120kit.0123456789ab-cp38-abi3-linux_x86_64.whl", "the tags are those inside"
    info = "vllm-9.0+sm120kit.0123456789ab.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
        assert archive.getinfo("vllm/_C.abi3.so").external_attr >> 16 == 0o100755
        assert {member.date_time for member in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    rows = list(csv.reader(files[f"{info}/RECORD"].decode().splitlines()))
    expected = {
        name: ["sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode(), str(len(data))]
        for name, data in files.items()
    } | {f"{info}/RECORD": ["", ""]}
    assert {name: rest for name, *rest in rows} == expected and len(rows) == len(files)
    assert files.pop(f"{info}/METADATA").decode().splitlines()[2:] == [
        "Version: 9.0+sm120kit.0123456789ab",
        "Summary: Version: 9.0",
    ]
    assert files.pop("vllm/_C.abi3.so") == b"ours" and files.pop(f"{info}/sm120kit.json") == b"{}"
    del files[f"{info}/RECORD"]
    same = {name.replace(INFO, info): data for name, data in OFFICIAL.items()}
    assert files == {name: same[name] for name in files} and len(files) == 3


def test_repacking_is_reproducible(official: Path, ours: Path, tmp_path: Path) -> None:
    first, second = packed(official, ours, tmp_path / "a"), packed(official, ours, tmp_path / "b")
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{INFO}/METADATA": b"Name: vllm\nVersion: 9.1\n"}, r"has 0 lines 'Version: 9\.0'"),
        ({"other-1.dist-info/METADATA": b""}, r"has 2 \.dist-info directories"),
    ],
)
def test_wheel_that_cannot_be_repacked(change: dict[str, bytes | None], message: str, ours: Path, tmp_path: Path) -> None:
    files = {name: data for name, data in ({**OFFICIAL, **change}).items() if data is not None}
    with pytest.raises(BadInput, match=message):
        packed(write(tmp_path / "vllm-9.0-cp38-abi3-linux_x86_64.whl", files), ours, tmp_path / "out")


# The plan


def wheel(name: str, digit: str = "a") -> LockedWheel:
    return LockedWheel(name, "1.0", f"{name}-1.0-py3-none-any.whl", digit * 64)


RECIPE = recipes.load_engine("vllm-0.20.0")
TREE = PatchedTree(
    Checkout(SdistPin("vllm", "vllm", "0.20.0", "0" * 64), Path("/r"), "1" * 40, "2" * 40), (), "3" * 40, "4" * 40, ()
)
TOOLS = Toolchain(Path("environment/nvidia/cu13"), "13.0.88", "/usr/bin/c++", "c++ 12")


ENVIRONMENT = _plan.BuildEnvironment(TOOLS, {"cmake": "4.4.4"})


def make_plan(**changed: Any) -> BuildPlan:
    arguments: dict[str, Any] = {
        "recipe": RECIPE,
        "tree": TREE,
        "carried": {"cutlass": ("4.4.2", "5" * 40)},
        "official": wheel("vllm"),
        "wheels": [wheel("torch"), wheel("nvidia-cuda-nvcc")],
        "environment": ENVIRONMENT,
    }
    return _plan.plan_extensions(**(arguments | changed))


def test_plan_has_every_unit_with_its_object_file() -> None:
    planned = make_plan()
    (module,) = planned.modules
    assert module.library == "_C_stable_libtorch.abi3.so"
    assert {unit.output for unit in module.units} >= {
        "CMakeFiles/_C_stable_libtorch.dir/csrc/libtorch_stable/torch_bindings.cpp.o",
        "CMakeFiles/_C_stable_libtorch.dir/csrc/libtorch_stable/permute_cols.cu.o",
    }
    assert not any("c2x" in unit.source for unit in module.units), "patches/vllm/no-c2x-for-sm12x"
    assert {left.what for left in planned.left_out} == {
        name
        for name, filled in RECIPE.from_source.injected.items()
        if filled.files  # type: ignore[union-attr]
    }


def with_table(**update: Any) -> recipes.EngineRecipe:
    assert RECIPE.from_source is not None
    return RECIPE.model_copy(update={"from_source": RECIPE.from_source.model_copy(update=update)})


def fewer_units() -> recipes.EngineRecipe:
    assert RECIPE.from_source is not None
    (target,) = RECIPE.from_source.targets.values()
    return with_table(targets={"_C_stable_libtorch": target.model_copy(update={"units": target.units[1:]})})


INPUTS: dict[str, dict[str, Any]] = {
    "the patched source": {"tree": replace(TREE, tree="6" * 40)},
    "the patched CUTLASS": {"carried": {"cutlass": ("4.4.2", "7" * 40)}},
    "the upstream wheel": {"official": wheel("vllm", "b")},
    "a wheel of the environment": {"wheels": [wheel("torch", "b"), wheel("nvidia-cuda-nvcc")]},
    "the host compiler": {"environment": replace(ENVIRONMENT, toolchain=replace(TOOLS, host_version="c++ 13"))},
    "nvcc": {"environment": replace(ENVIRONMENT, toolchain=replace(TOOLS, nvcc_version="13.1.1"))},
    "cmake": {"environment": replace(ENVIRONMENT, versions={"cmake": "4.0"})},
    "the archs": {"recipe": RECIPE.model_copy(update={"archs": (Arch.SM_121A,)})},
    "the units": {"recipe": fewer_units()},
    "what is injected": {"recipe": with_table(injected={})},
    "files of the recipe": {"recipe": with_table(files={"CMakeLists.txt": "0" * 64})},
}


@pytest.mark.parametrize("what", INPUTS)
def test_digest_covers_every_input(what: str) -> None:
    assert make_plan(**INPUTS[what]).digest != make_plan().digest


def test_digest_covers_neither_order_of_wheels_nor_costs() -> None:
    assert make_plan(wheels=[wheel("nvidia-cuda-nvcc"), wheel("torch")]).digest == make_plan().digest
    assert make_plan(environment=replace(ENVIRONMENT, measured_cost=lambda unit: (1, 1.0))).digest == make_plan().digest
    moved = replace(TOOLS, cuda_home=Path("other"), host_compiler="/opt/c++")
    assert make_plan(environment=replace(ENVIRONMENT, toolchain=moved)).digest == make_plan().digest


@pytest.mark.parametrize(
    ("carried", "message"), [({"cutlass": ("4.2.1", "5")}, "carries 4.2.1"), ({}, "carries no such project")]
)
def test_engine_requires_another_cutlass(carried: dict[str, tuple[str, str]], message: str) -> None:
    with pytest.raises(BadInput, match=f"VLLM_CUTLASS_SRC_DIR requires cutlass 4.4.2; flashinfer-0.6.8.post1 {message}"):
        make_plan(carried=carried)


def test_project_at_a_commit_need_not_be_in_flashinfer() -> None:
    assert RECIPE.from_source is not None
    name, filled = next(item for item in RECIPE.from_source.injected.items() if item[1].project)
    commits = [
        with_table(
            injected={name: filled.model_copy(update={"version": "4.7.1", "git": "https://x/y.git", "commit": digit * 40})}
        )
        for digit in "ab"
    ]
    first, second = (make_plan(recipe=recipe, carried={}).digest for recipe in commits)
    assert first != second
    assert "https" not in str(commits[0].inputs()["from_source"]) and "a" * 40 in str(commits[0].inputs())


def test_module_of_vllm_0_33_has_the_units_and_files_of_its_recipe() -> None:
    """CMake would report units that differ after minutes of downloads; a file without the sha256 in the recipe is refused."""
    recipe = recipes.load_engine("vllm-0.33.0")
    assert recipe.from_source is not None
    project = read_added_sources(recipe)["CMakeLists.txt"]
    (target,) = recipe.from_source.targets.values()
    variables = dict(re.findall(r"^set\((\w+) (csrc/\S+)\)$", project, re.MULTILINE))
    sources = re.findall(r"^  (\S+\.(?:cu|cpp))\)?$", project, re.MULTILINE)
    assert {re.sub(r"\$\{(\w+)\}", lambda name: variables[name[1]], source) for source in sources} == {*target.units}
    with_other = recipe.from_source.model_copy(update={"files": {"CMakeLists.txt": "0" * 64}})
    with pytest.raises(Mismatch, match=r"CMakeLists.txt has sha256"):
        read_added_sources(recipe.model_copy(update={"from_source": with_other}))


def test_flags_contain_no_paths() -> None:
    command = (
        "/v/python -m sm120kit.core.memory /w/cuda/bin/nvcc -ccbin=/usr/bin/c++ -DA=1 -I/w/source -isystem /w/x -isystem y "
        "-Xcompiler=-ffile-prefix-map=/w=. -O3 -gencode arch=compute_120f,code=sm_120f "
        "-MD -MT a.o -MF a.o.d -x cu -c a.cu -o a.o"
    )
    assert _extensions._flags(command.split()) == "-DA=1 -O3 -gencode arch=compute_120f,code=sm_120f"


def test_missing_python_of_the_locked_wheels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert _extensions.find_python(own)[1].startswith(f"{own}.")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RequirementMissing, match=r"no Python 3\.99: .* python3\.99 on PATH does not exist"):
        _extensions.find_python("3.99")
    shim = tmp_path / "python3.99"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    with pytest.raises(RequirementMissing, match=r"python3\.99 on PATH does not run"):
        _extensions.find_python("3.99")


# Recipes


BAD: dict[str, tuple[Callable[[str], str], str]] = {
    "no sha256": (lambda text: text.replace('sha256 = "a6d5', 'sha256 = "A6d5'), "from_source.sha256: .* is not a sha256"),
    "both kinds": (
        lambda text: text.replace('version = "4.4.2"', 'version = "4.4.2"\nfiles = ["x"]'),
        "VLLM_CUTLASS_SRC_DIR: needs either project and version, or files",
    ),
    "half a commit": (
        lambda text: text.replace('version = "4.4.2"', f'version = "4.4.2"\ncommit = "{"a" * 40}"'),
        "git and commit belong together",
    ),
    "no version": (lambda text: text.replace('version = "4.4.2"', ""), "needs either project and version, or files"),
    "a path out": (
        lambda text: text.replace('["stand-in"]', '["../stand-in"]'),
        "'../stand-in' is not a path below the source",
    ),
    "no variable": (lambda text: text.replace("injected.DEEPGEMM", "injected.deepgemm"), "is not the name of a variable"),
    "unknown key": (lambda text: text.replace("imports = [", "import = ["), "unknown key; did you mean 'imports'"),
    "a file out": (
        lambda text: f'{text}\n[from_source.files]\n"../x" = "{"0" * 64}"\n',
        r"from_source.files.*'\.\./x' is not a path below",
    ),
    "no units": (lambda text: text[: text.index("units = [")] + "units = []\n", "units: .*at least 1 item"),
}


@pytest.mark.parametrize("name", BAD)
def test_recipe_that_is_not_well_formed(name: str, tmp_path: Path) -> None:
    change, message = BAD[name]
    path = tmp_path / "vllm-0.20.0.toml"
    path.write_text(change(recipes.locate("vllm-0.20.0").read_text()))
    with pytest.raises(BadInput, match=message):
        recipes.read(path)


def test_prose_and_estimates_are_no_locked_inputs() -> None:
    inputs = str(RECIPE.inputs()["from_source"])
    assert "reason" not in inputs and "seconds" not in inputs and "sha256" in inputs
    assert "from_source" not in recipes.load_engine("vllm-0.19.1").inputs()
