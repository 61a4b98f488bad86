"""``verify kernels`` without a GPU: errors, compiled programs, and whether committed receipts match the series."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import stored_receipts

from sm12x_lab import RECEIPTS, gpu_tests
from sm12x_lab.gpu_tests import faults, verification
from sm12x_lab.gpu_tests.programs import Compiler, EngineTree
from sm12x_lab.gpu_tests.verified_kernels import KernelConfiguration
from sm12x_lab.ptx import interposed
from sm120kit import patches
from sm120kit.core import toolchain
from sm120kit.core.data_roots import data_root
from sm120kit.core.errors import CompileFailed, NotFound, RequirementMissing, ResourceUnavailable
from sm120kit.core.records import Arch
from sm120kit.core.workspace import Workspace
from sm120kit.kernels import cubin
from sm120kit.kernels.cubin import elf, fatbin
from sm120kit.kernels.kernel_records import Tile
from sm120kit.kernels.tiles import listing
from sm120kit.recipes.target import resolve_flashinfer
from sm120kit.sources.run_options import Options

RECIPE = "flashinfer-0.6.6"
CUTLASS = "3rdparty/cutlass"


def sm120kit(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the tool; it sees no GPU unless ``env`` provides one."""
    return subprocess.run(
        [sys.executable, "-m", "sm120kit", "verify", "kernels", *map(str, arguments)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **env},
        capture_output=True,
        text=True,
    )


def refused(done: subprocess.CompletedProcess[str], code: int, *messages: str) -> None:
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for message in messages:
        assert message in done.stderr


# ---- errors


def test_no_gpu_is_refused(tmp_path: Path) -> None:
    state = ("--state", tmp_path / "state")
    refused(
        sm120kit(RECIPE, *state),
        ResourceUnavailable.exit_code,
        "compute capability 9.0 (Hopper",
        "no GPU here",
        "sm120kit tiles RECIPE --emulate",
    )
    refused(sm120kit(RECIPE, "--device", "native", *state), ResourceUnavailable.exit_code, "an SM12x GPU")
    assert [path.name for path in (tmp_path / "state").rglob("*") if path.is_file()] == ["sm120kit-state.lock"]


def test_bad_arguments(tmp_path: Path) -> None:
    state = ("--state", tmp_path / "state")
    refused(sm120kit("flashinferr", *state), NotFound.exit_code, "flashinferr")
    refused(
        sm120kit(RECIPE, "--device", "tpu", *state), NotFound.exit_code, "unknown device 'tpu'", "emulate, rewritten, native"
    )
    for partial in (("--quick",), ("--only", "x"), ("--compile-only",)):
        refused(sm120kit(RECIPE, "--receipt", tmp_path / "r", *partial, *state), 2, "a receipt requires a complete run")
    assert not (tmp_path / "r").exists()


def test_cuda_home_without_nvcc_is_refused(tmp_path: Path) -> None:
    refused(
        sm120kit(RECIPE, "--compile-only", "--state", tmp_path, CUDA_HOME=str(tmp_path)),
        RequirementMissing.exit_code,
        "has no bin/nvcc",
    )


DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return %(init)d; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "A Card", size); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? %(major)d : %(minor)d; return 0; }
int cuDriverGetVersion(int *version) { *version = 13010; return 0; }
"""


@pytest.mark.parametrize(
    ("card", "device", "messages"),
    [
        (
            {"init": 0, "major": 8, "minor": 0},
            "emulate",
            ("this is A Card, compute capability 8.0", "CUDA_VISIBLE_DEVICES"),
        ),
        ({"init": 0, "major": 9, "minor": 0}, "native", ("this is A Card, compute capability 9.0", "--device emulate")),
        ({"init": 0, "major": 12, "minor": 1}, "emulate", ("compute capability 12.1", "--device native")),
        ({"init": 34, "major": 9, "minor": 0}, "emulate", ("CUDA programs see no GPU here",)),
    ],
    ids=["Ampere", "Hopper", "Spark", "stub of the driver"],
)
def test_unsuitable_gpu_is_refused(tmp_path: Path, card: dict[str, int], device: str, messages: tuple[str, ...]) -> None:
    compiler, _ = toolchain.host_compiler()
    library = tmp_path / "libcuda.so.1"
    subprocess.run(
        [compiler, "-x", "c", "-", "-shared", "-fPIC", "-w", "-o", library], input=DRIVER % card, text=True, check=True
    )
    done = sm120kit(RECIPE, "--device", device, "--state", tmp_path / "state", LD_LIBRARY_PATH=str(tmp_path))
    refused(done, ResourceUnavailable.exit_code, *messages)


# ---- the patched tree


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], EngineTree]:
    """The patched tree of a recipe."""
    options = Options(Workspace.open(tmp_path_factory.mktemp("state")))

    @cache
    def tree(name: str) -> EngineTree:
        patched = resolve_flashinfer(name, options).tree
        root = tmp_path_factory.mktemp("tree")
        patches.materialise(patched, root)
        return EngineTree(root, patched.tree, CUTLASS)

    return tree


@pytest.fixture(scope="module")
def tree(trees: Callable[[str], EngineTree]) -> EngineTree:
    return trees(RECIPE)


def test_each_mutant_applies_and_changes_one_file(tree: EngineTree, tmp_path: Path) -> None:
    seeded = faults.mutants(tree, tmp_path, gpu_tests.Backend.EMULATE)
    expected = {
        "scale-factor stride",
        "scale fold",
        "TMA box",
        "missing barrier",
        "stage count off by one",
        "wrong group offset",
    }
    assert expected <= {fault.kind for fault in seeded}
    for fault in seeded:
        assert fault.program.tree is not None
        (include,) = fault.program.tree.before
        (edited,) = (path for path in include.rglob("*") if path.is_file())
        (original,) = (path for name in tree.names() if (path := tree.root / name / edited.relative_to(include)).is_file())
        assert edited.read_text() != original.read_text(), fault.name
    native = faults.mutants(tree, tmp_path, gpu_tests.Backend.NATIVE)
    assert {fault.kind for fault in seeded} - {fault.kind for fault in native} == {"missing barrier"}


def compiled(name: str) -> str:
    """The git tree id of a recipe's series without the patches that no program compiles."""
    (source,) = (source for source in resolve_flashinfer(name, Options(Workspace.open(None))).sources if source.checkout)
    series = patches.load_for_tree(source.pin, source.inside, data_root() / "patches")
    chosen = [patch for patch in series if stored_receipts.is_compiled(patch)]
    _, steps = patches.compose(source.checkout, source.inside, chosen, data_root() / "cutlass_overrides")
    return steps[-1].tree


def test_committed_receipts_cover_the_series_and_every_tile(trees: Callable[[str], EngineTree], tmp_path: Path) -> None:
    paths = sorted(RECEIPTS.glob("*/verify-*.json"))
    assert paths, "no receipt of verify kernels"
    for path in paths:
        record = json.loads(path.read_text())
        tree = trees(record["engine"])
        assert stored_receipts.stale(path, tree.tree, compiled(record["engine"])) == []
        names = {row["name"] for row in record["configurations"]} | {left["what"] for left in record["left_out"]}
        # No program runs groupwise GEMMs.
        tiles = [call.tile for call in listing.instantiations(tree.root) if call.tile.family != "groupwise"]
        assert tiles and {KernelConfiguration(tile).name for tile in tiles} <= names
        seeded = {fault.name for fault in faults.mutants(tree, tmp_path, gpu_tests.Backend(record["device"]))}
        assert {*seeded, faults.STOCK} <= {fault["name"] for fault in record["planted"]}


# ---- programs


@pytest.mark.parametrize(("arch", "emulated"), [("sm_90a", True), ("sm_120a", False)])
def test_instruction_probe_compiles(tmp_path: Path, arch: str, emulated: bool) -> None:
    tools = toolchain.find([] if emulated else [Arch(arch)], gpu_tests.HEADERS)
    compiler = Compiler(arch, emulated, tools, tmp_path, jobs=1, budget_bytes=None)
    with compiler.compile_all([verification.INSTRUCTIONS]) as compiled:
        ((_, program),) = compiled
    assert isinstance(program, Path)
    names = {kernel.name for image in cubin.read(program) for kernel in image.kernels if image.arch == arch}
    assert any("software" in name for name in names)
    assert any("hardware" in name for name in names) is not emulated
    with compiler.compile_all([verification.INSTRUCTIONS]) as compiled:
        assert list(compiled) == [(verification.INSTRUCTIONS, program)]
    assert compiler.costs.of("instructions") is not None


def test_program_of_a_captured_kernel_has_a_trap_of_its_name(tree: EngineTree, tmp_path: Path) -> None:
    configuration = KernelConfiguration(Tile("dense", "nvfp4", 128, 128, 128, "none", False, "bf16"), generated=True)
    compiler = Compiler("compute_120a", False, toolchain.find(headers=gpu_tests.HEADERS), tmp_path, jobs=1, budget_bytes=None)
    kernels = {}
    with compiler.compile_all([verification._program(configuration, tree, captured) for captured in (False, True)]) as compiled:
        for program, built in compiled:
            assert isinstance(built, Path)
            host = elf.Elf(memoryview(built.read_bytes()))
            modules = [bytes(image.unpacked()).decode() for image in fatbin.images(host.bytes_of(".nv_fatbin"))]
            kernels[program.captured] = {
                name: text for module in modules for name, text in interposed.single_kernels(module.rstrip("\0")).items()
            }
    assert kernels[True].keys() == kernels[False].keys()
    (name,) = (name for name in kernels[True] if "device_kernel" in name)
    assert "mma.sync" in kernels[False][name] and "mma.sync" not in kernels[True][name]
    assert "trap;" in kernels[True][name]


def test_compiled_kernel_equals_the_tile_table(tree: EngineTree, tmp_path: Path) -> None:
    """K=64 with the 9 stages and 98,304 bytes of ``sm120kit tiles``; and a program that does not compile."""
    configuration = KernelConfiguration(Tile("grouped", "nvfp4", 128, 128, 64, "none", False, "bf16"))
    program = verification._program(configuration, tree)
    broken = gpu_tests.programs.Program("broken", "instructions.cu", ("-Dmain=#",))
    compiler = Compiler("sm_90a", True, toolchain.find(headers=gpu_tests.HEADERS), tmp_path, jobs=1, budget_bytes=None)
    with compiler.compile_all([program, broken]) as compiled:
        results = dict(compiled)
    failed, built = results[broken], results[program]
    assert isinstance(failed, CompileFailed) and "error" in failed.message
    assert isinstance(built, Path)
    listed = json.loads(subprocess.run([built, "--list"], capture_output=True, text=True, check=True).stdout)
    assert (listed["stages"], listed["smem_bytes"], listed["emulated"]) == (9, 98_304, True)
    assert {"std", "moe", "big", "inexact", "nan"} <= {*listed["sets"]}
    assert {"scale-factor stride", "wrong group offset"} <= {fault["class"] for fault in listed["faults"]}
