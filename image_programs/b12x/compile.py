"""Compile kernels of b12x without a GPU: ``compile.py REQUEST [DIRECTORY]``; run by a Python that has b12x 0.8.3 or 1.5.1.

REQUEST is a file with the table ``b12x`` of a recipe as JSON. b12x's own functions are called with tensors in ordinary memory,
in the order of the request, so that b12x selects and names the kernels as on a GPU. Nothing is launched. Replaced are what
queries the GPU (``sm_count`` is the answer), the look of the DSL for a driver before it links the host code (``cuInit`` in
``cutlass/base_dsl/compiler.py``), and the target of the host code, which is otherwise this machine's CPU and fails on others.

Each kernel is looked up, compiled and stored by b12x (``b12x/cute/runtime_patches.py``), with DIRECTORY as its cache, by
default an empty one. Prints JSON: ``kernels`` has the call, the path below the cache, whether it was found there, the launches
of its host code, and the CPU seconds of each; ``entries`` has the files by path, in base64, without DIRECTORY; ``mib`` is the
memory of this process. A launch has the class of the kernel, the tile, pipeline stages and MMA steps along K of its object, and
the bytes of dynamic shared memory that the DSL writes into the host code; kernels that are found in the cache have no launches.

A kernel that requests more shared memory than SM120 has is an error, and is not stored: its launch would fail on a GPU.

``compile_1_5.py`` beside this has 1.5.1's calls: a launch has the class that is compiled and the bytes, as b12x records them.
"""

import base64
import contextlib
import json
import os
import platform
import resource
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

SHARED_MEMORY_BYTES = 101_376
"""Limit of shared memory per CTA of SM120 and SM121 (CUDA C++ Programming Guide, compute capability 12.x)."""

HOST_CPUS = {"x86_64": ("x86-64", "+sse2"), "aarch64": ("generic", "+neon")}
"""LLVM's name of the least CPU of each architecture, and one of its features: without any, those of this machine are used."""


def portable_host_code(module):
    """Compile the host functions of an exported module for every CPU of this architecture."""
    from cutlass._mlir import ir

    cpu, feature = HOST_CPUS[platform.machine()]

    def restrict(operation):
        if operation.name == "llvm.func":
            operation.attributes["target_cpu"] = ir.StringAttr.get(cpu, module.context)
            features = ir.Attribute.parse(f'#llvm.target_features<["{feature}"]>', module.context)
            operation.attributes["target_features"] = features
        return ir.WalkResult.ADVANCE

    module.operation.walk(restrict)
    return module


class CannotLaunch(BaseException):
    """SM120 cannot launch a kernel; no Exception, which the DSL and b12x may handle."""


def constant(value):
    """The number that a value of the DSL's intermediate representation is; None if it is computed at run time."""
    from cutlass._mlir import ir

    operation = value.owner
    computed = getattr(operation, "name", "") != "arith.constant"  # an argument of a function is owned by a block
    return None if computed else ir.IntegerAttr(operation.attributes["value"]).value


def launch_of(name, kernel, shared_bytes):
    """A launch of a kernel's object, by its attributes in b12x, with the bytes that the launch requests."""
    tile = "x".join(map(str, getattr(kernel, "tile_shape_mnk", ())))
    stages, k_blocks = getattr(kernel, "ab_stage", 0), getattr(kernel, "num_k_blocks", 0)
    what = f"{name}, tile {tile}, {stages} stages"
    if shared_bytes is None:
        raise CannotLaunch(f"{what}, computes its shared memory at the launch, so that it cannot be compared with SM120's")
    if shared_bytes > SHARED_MEMORY_BYTES:
        raise CannotLaunch(f"{what}, requests {shared_bytes:,} bytes of shared memory; SM120 has {SHARED_MEMORY_BYTES:,}")
    return {"kernel": name, "tile": tile, "stages": stages, "k_blocks": k_blocks, "shared_bytes": shared_bytes}


@contextlib.contextmanager
def without_gpu(sm_count, kernels):
    """Let b12x and its DSL compile for a GPU with ``sm_count`` SMs while the block runs; launches do nothing.

    Kernels that b12x looks up are appended to ``kernels``, with the launches of those that it does not find.
    """
    import cuda.bindings.driver as driver
    import torch
    from b12x.cute import runtime_patches
    from b12x.gemm import dense
    from b12x.integration import tp_moe
    from cutlass.base_dsl import export
    from cutlass.base_dsl.compiler import CompileCallable, Compiler
    from cutlass.cutlass_dsl.cutlass import CutlassBaseDSL, KernelLauncher

    look_up, compile_, encode, launch, emit = (
        runtime_patches._load_cute_compile_from_disk,
        CompileCallable._compile,
        export.encode_metadata_into_ir_module,
        KernelLauncher.launch,
        CutlassBaseDSL.cuda_launch_func,
    )

    def looked_up(key):
        entry = look_up(key)
        kernels.append({"path": f"{key[:2]}/{key}.o", "hit": entry is not None, "launches": []})
        return entry

    def launched(launcher, *arguments, **options):
        name = launcher.funcBody.__qualname__.split(".")[0]  # the class, of which the first argument is the object

        def emitted(*operands, dynamic_shared_memory_size, **others):
            size = constant(dynamic_shared_memory_size)
            kernels[-1]["launches"].append(launch_of(name, launcher.func_args[0], size))
            return emit(*operands, dynamic_shared_memory_size=dynamic_shared_memory_size, **others)

        with mock.patch.object(CutlassBaseDSL, "cuda_launch_func", emitted):
            return launch(launcher, *arguments, **options)

    def compiled(*arguments, **options):
        compile_(*arguments, **options)
        return lambda *operands: None

    stream = SimpleNamespace(stream_id=0, cuda_stream=0)
    replaced = [
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "current_stream", lambda device=None: stream),
        (torch.cuda, "is_current_stream_capturing", lambda: True),
        (KernelLauncher, "launch", launched),
        (Compiler, "_check_cuda_dependencies_once", lambda compiler, libraries: None),
        (CompileCallable, "_compile", compiled),
        (runtime_patches, "_load_cute_compile_from_disk", looked_up),
        (export, "encode_metadata_into_ir_module", lambda *arguments: portable_host_code(encode(*arguments))),
        (tp_moe, "triton_compact_topk_ids", lambda *operands: None),
    ]
    for module in (dense, tp_moe):
        replaced += [
            (module, "get_num_sm", lambda device: sm_count),
            (module, "get_max_active_clusters", lambda size: sm_count // size),
            (module, "current_cuda_stream", lambda: driver.CUstream(0)),
        ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def moe_calls(experts, hidden, inner, top_k, tokens):
    """Calls of the fused experts of a layer, whose memory is reserved and never touched, by their description.

    The workspace is that of ``b12x_workspace`` of ``patches/sglang/b12x-moe.patch``: kernels for small batches depend on it.
    """
    import torch
    from b12x.integration import tp_moe

    def reserve(*shape):
        return torch.empty(*shape, dtype=torch.uint8)

    scales = torch.ones(experts)
    gate_up = reserve(experts, 2 * inner, hidden // 2), reserve(experts, 2 * inner, hidden // 16), scales
    down = reserve(experts, hidden, inner // 2), reserve(experts, hidden, inner // 16), scales.clone()
    small = 1
    while tp_moe.select_tp_moe_backend(num_tokens=small + 1, num_topk=top_k) == "static":
        small += 1
    largest = torch.empty(small, hidden, dtype=torch.bfloat16), torch.empty(small, top_k, dtype=torch.int32)
    workspace = tp_moe.allocate_tp_moe_workspace(
        *(largest[0], scales, gate_up[0], scales, down[0], largest[1]), input_scales_static=True
    )

    def call(count):
        x, ids = torch.zeros(count, hidden, dtype=torch.bfloat16), torch.zeros(count, top_k, dtype=torch.int32)
        tp_moe.b12x_moe_fp4(
            *(x, scales, *gate_up, scales, *down, torch.zeros(count, top_k), ids),
            workspace=workspace if count <= small else tp_moe.allocate_tp_moe_workspace_pool(),
            output=torch.empty_like(x),
            input_scales_are_reciprocal=True,
            input_scales_static=True,
        )

    return {f"{count} tokens, {experts} experts, {hidden} x {inner}, top {top_k}": (call, count) for count in tokens}


def gemm_calls(n, k, rows):
    """Calls of the GEMM of a layer, by their description."""
    import torch
    from b12x.cute.fp4 import as_grouped_scale_view
    from b12x.gemm import dense_gemm

    def operand(count):
        blocks = torch.empty(1, -(-count // 128) * 128, -(-k // 64) * 4, dtype=torch.uint8)
        return torch.empty(count, k // 2, 1, dtype=torch.uint8), as_grouped_scale_view(blocks, count, k)

    def call(count):
        types = {"ab_dtype": "float4_e2m1fn", "sf_dtype": "float8_e4m3fn", "c_dtype": "bfloat16", "sf_vec_size": 16}
        out = torch.empty(count, n, 1, dtype=torch.bfloat16)
        dense_gemm(operand(count), operand(n), out, alpha=torch.ones(1), **types)

    return {f"{count} x {n} x {k}": (call, count) for count in rows}


def compile_all(request, directory):
    """Make the calls of a request, with ``directory`` as b12x's cache. Returns the kernels that b12x looked up."""
    if metadata.version("b12x").startswith("1."):
        import compile_1_5  # beside this file

        return compile_1_5.compile_all(request, directory)
    os.environ["B12X_CUTE_COMPILE_CACHE_DIR"] = directory  # which is in the key of 1.5.1
    kernels = []
    with without_gpu(request["sm_count"], kernels):
        calls = {}
        for layer in request["moe"]:
            calls |= moe_calls(**layer)
        for layer in request["gemm"]:
            calls |= gemm_calls(**layer)
        for name, (call, count) in calls.items():
            before, start = len(kernels), resource.getrusage(resource.RUSAGE_SELF)
            try:
                call(count)
            except CannotLaunch as problem:
                sys.exit(f"error: kernel of b12x for {name}: {problem}")
            used = resource.getrusage(resource.RUSAGE_SELF)
            seconds = used.ru_utime + used.ru_stime - start.ru_utime - start.ru_stime
            for kernel in kernels[before:]:
                kernel |= {"call": name, "seconds": round(seconds, 1)}
    return kernels


def main():
    request = json.loads(Path(sys.argv[1]).read_text())
    output = os.dup(1)
    os.dup2(2, 1)  # libraries print to stdout
    with tempfile.TemporaryDirectory() as scratch:
        kernels = compile_all(request, sys.argv[2] if len(sys.argv) > 2 else scratch)
        files = sorted(path for path in Path(scratch).glob("*/*") if path.suffix != ".lock")
        entries = {str(path.relative_to(scratch)): base64.b64encode(path.read_bytes()).decode() for path in files}
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 2**10
    with os.fdopen(output, "w") as file:
        json.dump({"kernels": kernels, "entries": entries, "mib": mib}, file)


if __name__ == "__main__":
    main()
