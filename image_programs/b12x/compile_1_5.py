"""Kernels of b12x 1.5.1, compiled without a GPU; for ``compile.py`` beside this, which has the form of request and answer.

b12x's functions are called as in vLLM 0.33.0 (``model_executor/layers/fused_moe/b12x.py``, ``kernels/linear/nvfp4/b12x.py``)
and in SGLang 0.5.23 with ``patches/sglang`` (``srt/b12x.py``), with tensors that have no memory, up to the kernel, which b12x
looks up, compiles and stores. Its description of a GPU is that of its own compiler processes (``_lib/compile_pool.py``).
"""

import contextlib
import json
import multiprocessing
import os
import resource
from functools import partial
from types import SimpleNamespace

SHARED_MEMORY_BYTES, SHARED_MEMORY_OF_SM = 101_376, 102_400
"""Limits of shared memory per CTA and per multiprocessor of SM120 and SM121 (CUDA C++ Programming Guide, 12.x)."""

DEVICE = "cuda:0"


class Reached(BaseException):
    """A call has its kernel, which would be launched next; no Exception, which b12x may handle."""


def without_gpu(sm_count):
    """Let b12x compile for a GPU with ``sm_count`` SMs, and end each call at its kernel. Returns the module of experts."""
    from b12x._lib import compile_pool

    target = (0, (12, 0), "none", "SM120", sm_count, SHARED_MEMORY_BYTES, SHARED_MEMORY_OF_SM)
    compile_pool._initialize_worker(*target, multiprocessing.Array("q", (0, 0)))
    import torch
    from b12x.gemm.blockscaled import _linear
    from b12x.gemm.blockscaled import _preparation as gemm
    from b12x.moe.fused_moe import _impl as moe
    from compile import portable_host_code  # beside this file
    from cutlass.base_dsl import export
    from torch._subclasses import fake_tensor

    def last(name):
        build = getattr(moe, name)

        def built(*arguments, **options):
            build(*arguments, **options)
            raise Reached

        setattr(moe, name, built)

    def planned(query, device):
        from b12x.preparation import detect_device

        plan, found = declare(query, device), detect_device(torch.device(DEVICE))
        config = plan.contract.configure(plan.query, device=found.identity, search=False).default
        compile_pool.compile_in_process(map(compile_pool.describe_compilation, plan._compile_jobs(config, found)))
        raise Reached

    last("_get_micro_kernel")
    last("_get_dynamic_kernel")
    declare, gemm.heuristic_plan = gemm.heuristic_plan, planned
    # Operators on tensors without memory otherwise answer with a shape only.
    operators = torch.ops.b12x
    operators.tp_moe_compact_micro_launch = moe._tp_moe_compact_micro_launch_op._init_fn
    operators.tp_moe_dynamic_launch = moe._tp_moe_dynamic_launch_op._init_fn
    operators.blockscaled_serialized = _linear._blockscaled_serialized_op._init_fn
    moe._ensure_w13_kernel_order_inplace = lambda *arguments, **options: None
    encode = export.encode_metadata_into_ir_module
    export.encode_metadata_into_ir_module = lambda *given, **options: portable_host_code(encode(*given, **options))
    fake_tensor.init_gpu_context = lambda device: None
    torch.Tensor.data_ptr = lambda tensor: 4096
    return moe


def moe_calls(experts, hidden, inner, top_k, tokens, swiglu_limit=None):
    """Calls of the fused NVFP4 experts of a layer, by their description."""
    import torch
    from b12x.moe import fused_moe

    def empty(*shape, dtype=torch.float32):
        return torch.empty(*shape, dtype=dtype, device=DEVICE)

    def weight(rows, columns):
        return (
            empty(experts, rows, columns // 2, dtype=torch.uint8),
            empty(experts, rows, columns // 16, dtype=torch.float8_e4m3fn),
        )

    plan = fused_moe.plan_weights(
        quant_modes="nvfp4",
        source_format="modelopt_nvfp4",
        activation="silu",
        params_dtype=torch.bfloat16,
        num_experts=experts,
        hidden_size=hidden,
        intermediate_size=inner,
        w13_layout="w31",
    )
    names = [f"{name}{part}" for name in ("w1_", "w2_") for part in ("fp4", "blockscale")]
    scales = {name: empty(experts) for name in ("w1_global_scale", "a1_gscale", "w2_global_scale", "a2_gscale")}
    weights = dict(zip(names, (*weight(2 * inner, hidden), *weight(hidden, inner)), strict=True))
    prepared = fused_moe.prepare_weights(plan=plan, params_dtype=torch.bfloat16, **weights, **scales)
    swiglu = {"swiglu_limit": swiglu_limit, "swiglu_alpha": None, "swiglu_beta": None}

    def call(count):
        capacity = {"max_tokens": count, "core_token_counts": (count,), "num_topk": top_k, "route_num_experts": 0}
        chosen = {"quant_mode": "nvfp4", "apply_router_weight_on_input": False, "frozen": True, **swiglu}
        caps = fused_moe.Caps(device=torch.device(DEVICE), weight_plan=prepared.plan, **capacity, **chosen)
        planned, x = fused_moe.plan(caps), empty(count, hidden, dtype=torch.bfloat16)
        binding = fused_moe.bind(
            planned,
            scratch=empty(int(planned.scratch_specs()[0].shape[0]), dtype=torch.uint8),
            a=x,
            experts=prepared,
            topk_weights=empty(count, top_k),
            topk_ids=empty(count, top_k, dtype=torch.int32),
            output=torch.empty_like(x),
            input_scales_static=True,
            unit_scale_contract=False,
        )
        fused_moe.run(binding=binding)

    return {f"{count} tokens, {experts} experts, {hidden} x {inner}, top {top_k}": (call, count) for count in tokens}


def gemm_calls(n, k, rows):
    """Calls of the NVFP4 GEMM of a layer, by their description."""
    import torch
    from b12x.gemm import blockscaled

    def operand(count):
        values = torch.empty(count, k // 2, dtype=torch.uint8, device=DEVICE)
        padded = -(-count // 128) * 128, -(-k // 64) * 4
        return values, torch.empty(*padded, dtype=torch.float8_e4m3fn, device=DEVICE)

    def call(count):
        alpha = torch.empty(1, device=DEVICE)
        blockscaled.mm_nvfp4(*operand(count), *operand(n), alpha, out_dtype=torch.bfloat16)

    return {f"{count} x {n} x {k}": (call, count) for count in rows}


def sglang_calls(request):
    """The calls of SGLang 0.5.23 with ``patches/sglang`` for the layers of a request, by their description.

    Call it outside, and iterate inside, the contexts of the tensors: what SGLang imports makes tensors of its own.
    """
    import torch
    from sglang.srt import b12x, runtime_context
    from sglang.srt.distributed.device_communicators import pynccl_allocator
    from sglang.srt.layers import dp_attention

    torch.equal = lambda *_: True  # of tensors without memory
    pynccl_allocator.use_symmetric_memory = lambda *_, **__: contextlib.nullcontext()
    dp_attention.is_allocation_symmetric = lambda: False
    runtime_context.get_parallel = lambda: SimpleNamespace(tp_group=None)
    return _sglang_calls(request, b12x)


def _sglang_calls(request, b12x):
    import torch

    for sizes in request["moe"]:
        experts, hidden, inner, top_k = (sizes[key] for key in ("experts", "hidden", "inner", "top_k"))
        layer = SimpleNamespace(params_dtype=torch.bfloat16)
        for name, rows, columns in (("w13", 2 * inner, hidden), ("w2", hidden, inner)):
            scales = torch.empty(experts, rows, columns // 16, dtype=torch.float8_e4m3fn)
            setattr(layer, f"{name}_weight", torch.empty(experts, rows, columns // 2, dtype=torch.uint8))
            setattr(layer, f"{name}_blockscale_swizzled", scales)
            setattr(layer, f"{name}_weight_scale_2", torch.empty((experts, 1) if name == "w13" else experts))
            setattr(layer, f"{name}_input_scale_quant", torch.empty(experts))
        layer.g1_alphas = layer.g1_alphas_up = torch.empty(experts)
        b12x.prepare_experts(layer)
        for tokens in sizes["tokens"]:
            x, weights = torch.empty(tokens, hidden, dtype=torch.bfloat16), torch.empty(tokens, top_k)
            chosen = SimpleNamespace(topk_weights=weights, topk_ids=weights.int())
            given = SimpleNamespace(hidden_states=x, hidden_states_scale=None, topk_output=chosen)
            yield f"experts: {tokens} tokens", partial(b12x.run_experts, layer, given)
    for n, k, counts in ((sizes["n"], sizes["k"], sizes["rows"]) for sizes in request["gemm"]):
        for rows in counts:
            x, weight = (torch.empty(count, k // 2, dtype=torch.uint8) for count in (rows, n))
            scales = [torch.empty(-(-count // 128) * 128, k // 16).to(torch.float8_e4m3fn) for count in (rows, n)]
            operands = (x, weight.T, scales[0], scales[1].T, torch.empty(1), torch.bfloat16)
            yield f"GEMM: {rows} x {n} x {k}", partial(b12x.fp4_gemm, *operands)


def cpu_seconds():
    """CPU seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def looked_up(call, count, compiles=True):
    """Make a call up to its kernel. Returns whether each kernel that this process had not yet was missing, by key.

    Without ``compiles``, the call ends at the first that is missing.
    """
    from b12x._lib import compiler

    found, look_up = {}, compiler._load_cute_compile_from_disk

    def looked(key):
        entry = look_up(key)
        found.setdefault(key, entry is None)
        if entry is None and not compiles:
            raise Reached
        return entry

    compiler._load_cute_compile_from_disk = looked
    try:
        call(count)
    except Reached:
        return found
    finally:
        compiler._load_cute_compile_from_disk = look_up
    raise RuntimeError("the call has no kernel of b12x")


def launches(key):
    """The launches of a kernel, as b12x recorded them from its host code; their class is what b12x compiled."""
    from b12x._lib import compiler

    manifest = json.loads(compiler._cache_manifest_path(key).read_text())
    record = manifest["launch_metadata"]
    sizes = [size for each in record["launch_dynamic_smem_bytes"].values() for size in each]
    if record["status"] != "exact" or not sizes or max(sizes) > SHARED_MEMORY_BYTES:
        raise SystemExit(f"error: SM120 cannot launch {key}: {record['status']}, {sizes} bytes of shared memory")
    return [{"kernel": manifest["target"].rpartition(".")[2], "shared_bytes": size} for size in sizes]


def compile_all(request, directory):
    """Make the calls of a request, with ``directory`` as b12x's cache. Returns the kernels that b12x looked up."""
    os.environ["B12X_COMPILE_CACHE_DIR"] = directory
    without_gpu(request["sm_count"])
    from torch._subclasses.fake_tensor import FakeTensorMode

    kernels = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        calls = {}
        for make, layers in ((moe_calls, request.get("moe", [])), (gemm_calls, request.get("gemm", []))):
            for layer in layers:
                calls |= make(**layer)
        for name, (call, count) in calls.items():
            start = cpu_seconds()
            found = looked_up(call, count)
            seconds = round(cpu_seconds() - start, 1)
            for key, missing in found.items():
                path = f"{key[:2]}/{key}.o"
                kernels.append({"call": name, "path": path, "hit": not missing, "launches": launches(key), "seconds": seconds})
    return kernels
