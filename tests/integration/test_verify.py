"""verify kernels without a GPU: what it says then, what it compiles, and whether kept receipts are about this series."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from sm120kit import cubin, patches, pipeline, recipe, toolchain, verify
from sm120kit.errors import CompileFailed
from sm120kit.records import Arch, Tile
from sm120kit.tiles import listing
from sm120kit.verify import controls, kernels, receipt
from sm120kit.verify.matrix import Configuration
from sm120kit.verify.programs import Compiler, Tree
from sm120kit.workspace import Workspace, data_root

RECIPE = "flashinfer-0.6.6"
CUTLASS = "3rdparty/cutlass"


def sm120kit(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    """The tool, which sees no GPU unless ``env`` says otherwise."""
    return subprocess.run(
        [sys.executable, "-m", "sm120kit", "verify", "kernels", *map(str, arguments)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **env},
        capture_output=True,
        text=True,
    )


def refused(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


# ---- what it cannot do


def test_no_gpu(tmp_path: Path) -> None:
    state = ("--state", tmp_path / "state")
    refused(sm120kit(RECIPE, *state), 45, "compute capability 9.0 (Hopper", "no GPU here", "sm120kit tiles ENGINE --emulate")
    refused(sm120kit(RECIPE, "--device", "native", *state), 45, "an SM12x GPU")
    assert [path for path in (tmp_path / "state").rglob("*") if path.is_file()] == []


def test_bad_arguments(tmp_path: Path) -> None:
    state = ("--state", tmp_path / "state")
    refused(sm120kit("flashinferr", *state), 10, "flashinferr")
    refused(sm120kit(RECIPE, "--device", "tpu", *state), 10, "unknown device 'tpu'", "emulate, native")
    for partial in (("--quick",), ("--only", "x"), ("--compile-only",)):
        refused(sm120kit(RECIPE, "--receipt", tmp_path / "r", *partial, *state), 2, "a receipt is of a whole run")
    assert not (tmp_path / "r").exists()


def test_no_nvcc(tmp_path: Path) -> None:
    refused(sm120kit(RECIPE, "--compile-only", "--state", tmp_path, CUDA_HOME=str(tmp_path)), 40, "has no bin/nvcc")


DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return %(init)d; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "A Card", size); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? %(major)d : %(minor)d; return 0; }
int cuDriverGetVersion(int *version) { *version = 13010; return 0; }
"""


@pytest.mark.parametrize(
    ("card", "device", "code", "words"),
    [
        (
            {"init": 0, "major": 8, "minor": 0},
            "emulate",
            46,
            ("this is A Card, compute capability 8.0", "CUDA_VISIBLE_DEVICES"),
        ),
        ({"init": 0, "major": 9, "minor": 0}, "native", 46, ("this is A Card, compute capability 9.0", "--device emulate")),
        ({"init": 0, "major": 12, "minor": 1}, "emulate", 46, ("compute capability 12.1", "--device native")),
        ({"init": 34, "major": 9, "minor": 0}, "emulate", 45, ("CUDA programs see no GPU here",)),
    ],
    ids=["Ampere", "Hopper", "Spark", "stub of the driver"],
)
def test_a_gpu_that_will_not_do(tmp_path: Path, card: dict[str, int], device: str, code: int, words: tuple[str, ...]) -> None:
    compiler, _ = toolchain.host_compiler()
    library = tmp_path / "libcuda.so.1"
    subprocess.run(
        [compiler, "-x", "c", "-", "-shared", "-fPIC", "-w", "-o", library], input=DRIVER % card, text=True, check=True
    )
    done = sm120kit(RECIPE, "--device", device, "--state", tmp_path / "state", LD_LIBRARY_PATH=str(tmp_path))
    refused(done, code, *words)


# ---- the patched tree


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tree]:
    """The patched tree of a recipe."""
    options = pipeline.Options(Workspace.open(tmp_path_factory.mktemp("state")))

    @cache
    def tree(name: str) -> Tree:
        patched = pipeline.patched_tree(recipe.load(name), options)
        root = tmp_path_factory.mktemp("tree")
        patches.materialise(patched, root)
        return Tree(root, patched.tree, CUTLASS)

    return tree


@pytest.fixture(scope="module")
def tree(trees: Callable[[str], Tree]) -> Tree:
    return trees(RECIPE)


def test_every_planted_fault_fits_the_tree_and_changes_one_file(tree: Tree, tmp_path: Path) -> None:
    planted = controls.mutants(tree, tmp_path, verify.Device.EMULATE)
    wanted = {"scale-factor stride", "scale fold", "TMA box", "missing barrier", "stage count off by one", "wrong group offset"}
    assert wanted <= {one.kind for one in planted}
    for one in planted:
        assert one.program.tree is not None
        (place,) = one.program.tree.before
        (edited,) = (path for path in place.rglob("*") if path.is_file())
        (original,) = (path for name in tree.names() if (path := tree.root / name / edited.relative_to(place)).is_file())
        assert edited.read_text() != original.read_text(), one.name
    native = controls.mutants(tree, tmp_path, verify.Device.NATIVE)
    assert {one.kind for one in planted} - {one.kind for one in native} == {"missing barrier"}


def test_kept_receipts_are_about_this_series_and_every_tile(trees: Callable[[str], Tree], tmp_path: Path) -> None:
    found = sorted((data_root() / "patches" / "evidence").glob("verify-*.json"))
    assert found, "no receipt of verify kernels"
    for path in found:
        kept = json.loads(path.read_text())
        tree = trees(kept["engine"])
        assert receipt.stale(path, tree.tree) == []
        named = {one["name"] for one in kept["configurations"]} | {one["what"] for one in kept["left_out"]}
        assert {Configuration(one.tile).name for one in listing.instantiations(tree.root)} <= named
        planted = {one.name for one in controls.mutants(tree, tmp_path, verify.Device(kept["device"]))}
        assert {*planted, controls.STOCK} <= {one["name"] for one in kept["planted"]}


# ---- what it compiles


@pytest.mark.compiler
@pytest.mark.parametrize(("arch", "emulated"), [("sm_90a", True), ("sm_120a", False)])
def test_the_instruction_probe_compiles(tmp_path: Path, arch: str, emulated: bool) -> None:
    tools = toolchain.find([] if emulated else [Arch(arch)], verify.HEADERS)
    compiler = Compiler(arch, emulated, tools, tmp_path, jobs=1, budget_bytes=None)
    with compiler.compile_all([kernels.INSTRUCTIONS]) as compiled:
        ((_, program),) = compiled
    assert isinstance(program, Path)
    names = {kernel.name for image in cubin.read(program) for kernel in image.kernels if image.arch == arch}
    assert any("software" in name for name in names)
    assert any("hardware" in name for name in names) is not emulated
    with compiler.compile_all([kernels.INSTRUCTIONS]) as compiled:
        assert list(compiled) == [(kernels.INSTRUCTIONS, program)]
    assert compiler.costs.of("instructions") is not None


@pytest.mark.compiler
def test_a_kernel_compiles_and_is_the_one_of_the_tile_table(tree: Tree, tmp_path: Path) -> None:
    """K=64, whose 9 stages and 98,304 bytes ``sm120kit tiles`` states; and a definition that is none."""
    one = Configuration(Tile("grouped", "nvfp4", 128, 128, 64, "none", False, "bf16"))
    program = kernels._program(one, tree)
    broken = verify.programs.Program("broken", "instructions.cu", ("-Dmain=#",))
    compiler = Compiler("sm_90a", True, toolchain.find(headers=verify.HEADERS), tmp_path, jobs=1, budget_bytes=None)
    with compiler.compile_all([program, broken]) as compiled:
        found = dict(compiled)
    failed, built = found[broken], found[program]
    assert isinstance(failed, CompileFailed) and "error" in failed.message
    assert isinstance(built, Path)
    said = json.loads(subprocess.run([built, "--list"], capture_output=True, text=True, check=True).stdout)
    assert (said["stages"], said["smem_bytes"], said["emulated"]) == (9, 98_304, True)
    assert {"std", "moe", "big", "inexact", "nan"} <= {*said["sets"]}
    assert {"scale-factor stride", "wrong group offset"} <= {fault["class"] for fault in said["faults"]}
