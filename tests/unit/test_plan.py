"""The plan of a FlashInfer wheel: modules, entries that are left out, and the digest of its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sm120kit import recipes
from sm120kit.core.errors import CheckFailed, NotFound, RequirementMissing
from sm120kit.core.records import Arch, LeftOut, Stage, Toolchain
from sm120kit.core.workspace import Workspace
from sm120kit.kernels import tile_records
from sm120kit.kernels.kernel_records import Tile, TileFacts
from sm120kit.patches.patch_records import PatchedTree
from sm120kit.recipes.schema import UndefinedSymbols
from sm120kit.recipes.target import FlashInferTarget
from sm120kit.sources import Origin
from sm120kit.sources.run_options import Options
from sm120kit.sources.source_records import Checkout
from sm120kit.wheels import _plan, image_wheels
from sm120kit.wheels.build_records import NO_TOOLCHAIN, BuildPlan, BuildRequest, Generated

RECIPE = recipes.load_flashinfer("flashinfer-0.6.6")
TREE = PatchedTree(Checkout(RECIPE.pin, Path("/repository"), "c" * 40, "d" * 40), RECIPE.inside, "a" * 40, "b" * 40, ())
TOOLS = Toolchain(Path("/cuda"), "13.0.88", "/usr/bin/c++", "c++ 12.2.0")
DENSE = Generated(
    "fp4_gemm_cutlass_sm120",
    "jit/fp4.so",
    ("fp4_gemm_cutlass_sm120.cu", "fp4_gemm_cutlass_128x128x128.cu"),
    (("tree/csrc/fp4_gemm_cutlass_sm120.cu", "jit/a.cuda.o"), ("jit/fp4_gemm_cutlass_128x128x128.cu", "jit/b.cuda.o")),
    "ninja text",
)
GROUPED = Generated(
    "fused_moe_120",
    "jit/moe.so",
    (
        "cutlass_kernel_file_gemm_sm90_M128_group0.generated.cu",
        "cutlass_kernel_file_gemm_grouped_sm120_x.generated.cu",
        "logger.cpp",
    ),
    (("jit/cutlass_kernel_file_gemm_grouped_sm120_x.generated.cu", "jit/c.cuda.o"),),
    "more ninja text",
)


def make_plan(
    tree: PatchedTree = TREE,
    tools: Toolchain = TOOLS,
    dense: Generated = DENSE,
    measured_cost: _plan.MeasuredCost = lambda unit: None,
    tiles: Sequence[LeftOut] = (),
    recipe: recipes.FlashInferRecipe = RECIPE,
) -> BuildPlan:
    selection = _plan.Selection(recipe, (Arch.SM_120F,), "quick")
    environment = _plan.BuildEnvironment(tools, {"tvm": "1"}, measured_cost)
    return _plan.plan_flashinfer(selection, tree, [dense, GROUPED], environment, tiles)


def test_generators_are_those_of_the_group() -> None:
    requests = _plan.generator_requests(_plan.Selection(RECIPE, (Arch.SM_120F,), "fused-moe"))
    assert list(requests) == ["fused_moe_120"]
    assert requests["fused_moe_120"]["leave_out"] == ["cutlass_kernel_file_gemm_sm90_*"]


def test_group_without_kernels_leaves_out_every_module_and_needs_no_compiler() -> None:
    selection = _plan.Selection(RECIPE, (Arch.SM_120F,), recipes.NO_KERNELS)
    assert _plan.generator_requests(selection) == {} and selection.directory == "flashinfer-0.6.6-none"
    made = _plan.plan_flashinfer(selection, TREE, (), _plan.BuildEnvironment(NO_TOOLCHAIN, {}), ())
    assert made.modules == () and {entry.what for entry in made.left_out} == {*RECIPE.modules}
    assert {entry.reason for entry in made.left_out} == {"compiled on first use: not in kernel group none"}
    with pytest.raises(NotFound, match="no kernel group 'nine'") as unknown:
        recipes.group(RECIPE, "nine")
    assert unknown.value.hint is not None and unknown.value.hint.endswith("; none")


def test_wheel_without_modules_follows_from_its_tree() -> None:
    """It has the patched sources, which FlashInfer compiles on first use."""
    selection, environment = _plan.Selection(RECIPE, RECIPE.archs, "none"), _plan.BuildEnvironment(NO_TOOLCHAIN, {})
    before, again, after = (
        _plan.plan_flashinfer(selection, replace(TREE, tree=tree), (), environment, ()).digest for tree in ("a", "a", "b")
    )
    assert before == again != after


@pytest.mark.parametrize(
    ("own", "name", "change", "refused"),
    [
        ("x86_64", "vllm-0.33.0-spark", {}, False),
        ("x86_64", "vllm-0.33.0-spark", {"group": "none", "from_source": True}, True),
        ("aarch64", "vllm-0.33.0-spark", {"from_source": True}, False),
        ("aarch64", "vllm-0.33.0", {}, True),
        ("aarch64", "vllm-0.33.0", {"group": "none"}, False),
    ],
)
def test_kernels_for_another_machine_are_compiled_where_a_compiler_for_it_is_locked(
    own: str, name: str, change: dict[str, Any], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: own)
    recipe = recipes.load_engine(name)
    request = BuildRequest(**{"stage": Stage.PACK, **change})
    with pytest.raises(RequirementMissing, match=recipe.machine) if refused else nullcontext():
        image_wheels.require_compilable(recipe, request)


def test_left_out_entries_have_reasons() -> None:
    reasons = {entry.what: entry.reason for entry in make_plan().left_out}
    assert "Hopper" in reasons["fused_moe_120: 1 units cutlass_kernel_file_gemm_sm90_*"]
    assert "quick" in reasons["gemm_sm120"]
    assert all(reasons.values())


def test_digest_depends_on_inputs_only() -> None:
    digest = make_plan().digest
    assert make_plan(tools=replace(TOOLS, cuda_home=Path("/other"))).digest == digest
    assert make_plan(tools=replace(TOOLS, machine="riscv64")).digest != digest
    assert make_plan(measured_cost=lambda unit: (1, 1.0)).digest == digest
    assert make_plan(tree=replace(TREE, tree="e" * 40)).digest != digest
    assert make_plan(tools=replace(TOOLS, nvcc_version="13.1")).digest != digest
    assert make_plan(dense=replace(DENSE, ninja="other flags")).digest != digest


def test_digest_covers_what_is_compiled_in_regrouped_units() -> None:
    """Their names are in the ninja file; which instantiations they contain is not."""
    dense = RECIPE.modules[DENSE.name]
    assert "regroup" in _plan.generator_requests(_plan.Selection(RECIPE, (Arch.SM_120F,), "quick"))[DENSE.name]
    other = dense.model_copy(update={"regroup": (dense.regroup[0].model_copy(update={"instantiation": "x"}),)})
    plain = dense.model_copy(update={"regroup": ()})
    digests = {make_plan().digest}
    for table in (other, plain):
        recipe = RECIPE.model_copy(update={"modules": {**RECIPE.modules, DENSE.name: table}})
        digests.add(make_plan(recipe=recipe).digest)
    assert len(digests) == 3
    assert "regroup" not in _plan.generator_requests(_plan.Selection(recipe, (Arch.SM_120F,), "quick"))[DENSE.name]


def test_measured_costs_replace_estimates() -> None:
    unit = make_plan().modules[0].units[1]
    assert unit.estimate_bytes == int(5.6 * 2**30) and unit.estimate_seconds == 108
    measured = (
        make_plan(measured_cost=lambda name: (123, 4.5) if name == "fp4_gemm_cutlass_sm120/b.cuda.o" else None)
        .modules[0]
        .units[1]
    )
    assert (measured.estimate_bytes, measured.estimate_seconds) == (123, 4.5)


def fact(k: int, *, generated: bool, smem_bytes: int = 0, why_not: str = "") -> TileFacts:
    tile = Tile("grouped", "nvfp4", 256, 128, k, "finalize", False, "bf16")
    return TileFacts(tile, generated, not why_not, why_not, smem_bytes=smem_bytes)


def test_tiles_that_do_not_fit_are_left_out_with_a_reason() -> None:
    tiles = [fact(128, generated=True, smem_bytes=101_376), fact(64, generated=False, smem_bytes=102_400)]
    tiles.append(fact(32, generated=False, why_not="no such layout"))
    left_out = tile_records.left_out("r", tiles)
    assert {entry.what: entry.reason for entry in left_out} == {
        "tile grouped nvfp4 256x128x64 finalize": "needs 102,400 B of shared memory; SM120 has 101,376 B",
        "tile grouped nvfp4 256x128x32 finalize": "no such layout",
    }
    assert {*left_out} <= {*make_plan(tiles=left_out).left_out}
    assert make_plan(tiles=left_out).digest != make_plan().digest


def test_generated_tile_that_does_not_fit_is_refused_once() -> None:
    broken = fact(128, generated=True, smem_bytes=102_400)
    with pytest.raises(CheckFailed, match="256x128x128 finalize: needs 102,400 B") as refused:
        tile_records.left_out("r", [broken, replace(broken, tile=replace(broken.tile, swap=True))])
    assert refused.value.message.count("256x128x128") == 1


RECORDED = [
    name for name in recipes.names(recipes.FlashInferRecipe) if recipes.path_of(name).with_suffix(".tiles.json").is_file()
]


def test_plan_of_the_default_engine_compiles_no_tile() -> None:
    assert recipes.load_engine("vllm").flashinfer in RECORDED


def test_record_is_of_one_source_only(tmp_path: Path) -> None:
    target = FlashInferTarget(RECIPE, tmp_path / "r.toml", Options(Workspace(tmp_path), Origin(offline=True)), {}, local=TREE)
    assert tile_records.recorded(target) is None
    tile_records.write(target, [fact(64, generated=False, smem_bytes=102_400)])
    assert [entry.what for entry in tile_records.recorded(target) or ()] == ["tile grouped nvfp4 256x128x64 finalize"]
    assert tile_records.recorded(replace(target, local=replace(TREE, tree="e" * 40))) is None


def test_arguments_of_a_generator_are_part_of_its_call_and_of_the_lock() -> None:
    requests = _plan.generator_requests(_plan.Selection(RECIPE, RECIPE.archs, "serve"))
    prefill = next(name for name in requests if "head_dim_qk_128" in name)
    assert requests[prefill]["arguments"]["dtype_kv"] == "torch.float8_e4m3fn" and "e4m3" in prefill
    locked = RECIPE.inputs()["modules"]
    assert locked[prefill]["arguments"] == requests[prefill]["arguments"]
    assert "arguments" not in locked["gemm_sm120"]
    assert "arguments" not in requests["sampling"]


def test_functions_that_a_module_does_not_contain_are_listed_with_their_reason_and_change_the_digest() -> None:
    functions = UndefinedSymbols(symbols="_ZN10flashinfer*Lj32E*", reason="never called")
    table = RECIPE.modules[DENSE.name].model_copy(update={"undefined": (functions,)})
    built = make_plan(recipe=RECIPE.model_copy(update={"modules": {**RECIPE.modules, DENSE.name: table}}))
    assert built.modules[0].undefined == ("_ZN10flashinfer*Lj32E*",)
    assert LeftOut("fp4_gemm_cutlass_sm120: functions _ZN10flashinfer*Lj32E*", "never called") in built.left_out
    assert built.digest != make_plan().digest
