"""Compile kernels of FlashInfer's fused MoE for SM12x without a GPU: ``flashinfer_moe_inside.py REQUEST DIRECTORY``.

Run by a Python that has FlashInfer and CuTe DSL, with ``CUTE_DSL_ARCH``, ``CUTE_DSL_KEEP_PTX=1`` and a ``CUTE_DSL_DUMP_DIR``.
REQUEST is a file with a list of calls as JSON. ``launch_sm120_moe``, which ``b12x_fused_moe`` calls, gets tensors in ordinary
memory, so that FlashInfer selects the kernel. Replaced are what queries the GPU, and the launch.

The PTX of each call is moved to DIRECTORY under the call's name. Prints JSON: for each call the function, tile, pipeline stages
and dynamic shared memory of its launches.
"""

import json
import os
import re
import sys
from pathlib import Path
from unittest import mock

import torch
from cutlass.cutlass_dsl.cutlass import KernelLauncher
from flashinfer.cute_dsl.utils import convert_sf_to_mma_layout
from flashinfer.fused_moe.cute_dsl.blackwell_sm12x import moe_dispatch, triton_compact

SM_COUNT = 188


def shared_bytes(module):
    """The dynamic shared memory of each launch in host code: the field of cudaLaunchConfig_t, in its order."""
    config = r"(%\d+) = llvm\.getelementptr %\d+\[0, 2\] :.*struct<\(array<3 x i32>, array<3 x i32>, i64,"
    for function in str(module).split("llvm.func ")[1:]:
        constants = dict(re.findall(r"(%\d+) = llvm\.mlir\.constant\((\d+) : i64\)", function))
        for field in re.findall(config, function):
            (value,) = re.findall(rf"llvm\.store (%\d+), {field} : i64", function)
            yield int(constants[value])


def scales(experts, rows, columns, mode):
    """Scale factors of weights, in the layout of the kernels."""
    vector = {"nvfp4": 16, "mxfp4": 32}[mode]
    count = experts * rows * columns // vector
    return convert_sf_to_mma_layout(torch.zeros(count, dtype=torch.uint8), rows, columns, experts, vector)


def call(tokens, experts, hidden, inner, top_k, activation="silu", mode="nvfp4"):
    """One call of the fused experts, whose weights are reserved and never touched."""
    gate_up, ones = inner if activation == "relu2" else 2 * inner, torch.ones(experts)
    moe_dispatch.launch_sm120_moe(
        a=torch.zeros(tokens, hidden, dtype=torch.bfloat16),
        topk_ids=torch.zeros(tokens, top_k, dtype=torch.int32),
        topk_weights=torch.zeros(tokens, top_k),
        w1_weight=torch.empty(experts, gate_up, hidden // 2, dtype=torch.uint8),
        w1_weight_sf=scales(experts, gate_up, hidden, mode),
        w1_alpha=ones,
        fc2_input_scale=ones.clone(),
        w2_weight=torch.empty(experts, hidden, inner // 2, dtype=torch.uint8),
        w2_weight_sf=scales(experts, hidden, inner, mode),
        w2_alpha=ones.clone(),
        num_experts=experts,
        top_k=top_k,
        num_local_experts=experts,
        scatter_output=torch.zeros(tokens, hidden, dtype=torch.bfloat16),
        activation=activation,
        quant_mode=mode,
    )


def main():
    requests, directory = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    dump = Path(os.environ["CUTE_DSL_DUMP_DIR"])
    launch, found = KernelLauncher.launch, {}

    def launched(launcher, *arguments, **options):
        kernel = launcher.func_args[0]
        tile, stages = "x".join(map(str, kernel.tile_shape_mnk)), kernel.ab_stage
        launches.append({"function": launcher.funcBody.__qualname__, "tile": tile, "stages": stages})
        return launch(launcher, *arguments, **options)

    def compiled(module, name, compile_function, extra_key_files=()):
        sizes = shared_bytes(compile_function().ir_module)
        for each, size in zip(launches, sizes, strict=True):
            each["shared_bytes"] = size
        return lambda *operands: None

    replaced = [
        (moe_dispatch, "get_num_sm", lambda device: SM_COUNT),
        (moe_dispatch, "get_max_active_clusters", lambda size: SM_COUNT // size),
        (moe_dispatch, "build_and_load_cute_dsl_kernel", compiled),
        (triton_compact, "compact_topk_ids", lambda *operands: None),
        (KernelLauncher, "launch", launched),
    ]
    for owner, name, value in replaced:
        mock.patch.object(owner, name, value).start()
    for request in requests:
        launches = []
        key = request.pop("name")
        call(**request)
        (ptx,) = dump.glob("*.ptx")
        ptx.rename(directory / f"{key}.ptx")
        found[key] = launches
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
