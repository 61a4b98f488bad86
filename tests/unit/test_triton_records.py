"""The committed records of kernels of Triton: what an image of their recipe has of them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from sm120kit import recipes
from sm120kit.core.data_roots import data_root
from sm120kit.images import _triton as triton
from sm120kit.images import image_inputs

NAMES = sorted(path.name.removesuffix(".triton.jsonl") for path in (data_root() / "recipes" / "engines").glob("*.triton.jsonl"))


def test_both_engines_have_one() -> None:
    assert {"sglang-0.5.23", "vllm-0.33.0"} <= {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_image_has_the_kernels_of_its_own_engine(name: str) -> None:
    recipe, kernels = recipes.load_engine(name), [json.loads(line) for line in triton.record(name).splitlines()]
    assert kernels and {kernel["function"].split(".")[0] for kernel in kernels} == {recipe.engine}
    assert list(image_inputs.server_program(recipe)) == image_inputs.entrypoint(recipe.serve), "it adds them to the cache"


@pytest.mark.parametrize("name", NAMES)
def test_constants_and_attributes_are_those_of_the_signature(name: str) -> None:
    """A key is a place in the signature."""
    for kernel in map(json.loads, triton.record(name).splitlines()):
        constants = [kind == "constexpr" for kind in kernel["signature"].values()]
        (places, values), (aligned, attributes) = kernel["constants"], kernel["attributes"]
        assert len(places) == len(values) and len(aligned) == len(attributes)
        assert {path[0] for path in places} >= {place for place, constant in enumerate(constants) if constant}
        assert all(path[0] < len(constants) for path in (*places, *aligned)), kernel["function"]


@pytest.mark.parametrize("rank", [0, 1])
def test_records_of_each_of_two_ranks_need_one_process(rank: int) -> None:
    """As ``start_sglang.py`` makes the groups of a configuration for two GPUs."""
    suite = data_root() / "src" / "sm120kit" / "images" / "checks" / "suites" / "engine"
    program = f"""
import sys; sys.path.insert(0, {str(suite)!r})
import gpu, torch, torch.distributed as distributed
gpu.fake_process_groups(2, {rank})
group, sums = distributed.new_group([0, 1], backend="nccl"), torch.ones(3)
distributed.all_reduce(sums, group=group)
print(distributed.get_rank(), distributed.get_rank(group), distributed.get_world_size(group))"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == [str(rank), str(rank), "2"], done.stderr


@pytest.mark.parametrize("name", ["sglang-0.5.23", "sglang-0.5.23-b12x"])
def test_all_variants_of_an_autotuned_kernel_are_recorded(name: str) -> None:
    """Of this one, blocks of 32 and 64 by 1, 2 and 4 warps; Triton keeps what it measured, and a run must not take it."""
    kernels = [json.loads(line) for line in triton.record(name).splitlines()]
    solvers = [kernel for kernel in kernels if kernel["function"].endswith(":chunk_gated_delta_rule_fwd_kkt_solve_kernel")]
    assert sorted(kernel["options"]["num_warps"] for kernel in solvers) == [1, 1, 2, 2, 4, 4]
