"""Checks of SGLang: extensions, FP4 compilation, its FlashInfer, its command, and the arguments of our configurations."""

import argparse
import contextlib
import importlib
import importlib.util
import json
import runpy
import sys
from functools import partial
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import SimpleNamespace

from checks_engine import (
    Requested,
    accepts_configurations,
    autotuner,
    fp4_gemm,
    fused_moe,
    indices,
    load_extensions,
    modules_ahead,
    on_capability,
    output_tail,
    prints_version_and_help,
    requested,
    require_our_flashinfer,
    require_served,
    run,
)

BESIDE = ("command", "modules_ahead")
"""Checks that run in a process of their own beside the others."""

TAGS = [tag for tag in EXTENSION_SUFFIXES if tag != ".so"]
"""Suffixes of extensions for this Python. A library that is not an extension has no tag."""

KERNELS = ("sgl_kernel/sm90/common_ops", "sgl_kernel/sm100/common_ops")
"""SGLang loads one of these by file: both register the same operators."""

LOOK_UP = """
import json, sys
sys.path.insert(0, sys.argv[1])
import run
suites = [run.load_suite(run.Path(sys.argv[1], name)) for name in ("engine", "sglang")]
print(json.dumps(getattr(suites[-1], sys.argv[2])(json.load(sys.stdin))))
"""
"""Program that calls a function of this module: SGLang decides when it is imported whether there is a GPU."""


def check_extensions(expected):
    """Every compiled extension for this Python loads, and of SGLang's two sets of kernels that for GPUs other than SM90."""
    import sgl_kernel
    import torch

    kernels = Path(sgl_kernel.common_ops.__file__)
    assert kernels.is_relative_to(Path(sgl_kernel.__file__).parent), f"common_ops is {kernels}"
    assert hasattr(torch.ops.sgl_kernel, "fp8_scaled_mm"), "sgl_kernel has no FP8 GEMM"
    records = {name: metadata.distribution(name).read_text("RECORD") for name in ("sglang", "sglang-kernel")}
    recorded = [(name, line.partition(",")[0]) for name, text in records.items() for line in text.splitlines()]
    files = [file for name, file in recorded if not is_left_out(expected, name, file)]  # noqa: F821 - the runner provides it
    names = {file.removesuffix(tag) for file in files for tag in TAGS if file.endswith(tag)} - {*KERNELS}
    return {"kernels": str(kernels.relative_to(Path(sgl_kernel.__file__).parent))} | load_extensions(names)


def check_compiles_fp4(expected):
    """SGLang's JIT compiles an FP4 kernel for sm_120a that its wheel lacks, and takes CUTLASS from our FlashInfer.

    Of 0.5.11 it is the quantization; 0.5.23 uses FlashInfer's, and has a GEMM of NVFP4 experts for SM120. The check sets the
    arch, which SGLang would query from the GPU.
    """
    try:
        from sglang.jit_kernel.utils import get_cutlass_include_paths

        name, compiled = "its FP4 quantization", _fp4_quantization
    except ModuleNotFoundError:  # since 0.5.23
        from sglang.kernels.jit.utils.deps import get_cutlass_include_paths

        name, compiled = "its GEMM of NVFP4 experts", _fp4_experts
    headers = Path(get_cutlass_include_paths()[0])
    ours = Path(metadata.distribution("flashinfer-python").locate_file("flashinfer"))
    assert headers.is_relative_to(ours), f"CUTLASS is taken from {headers}"
    assert callable(compiled())
    return {"compiled by SGLang": f"{name}, for sm_120a", "with CUTLASS from": str(headers)}


def _fp4_quantization():
    from sglang.jit_kernel import nvfp4, utils

    nvfp4._nvfp4_arch_env = lambda: utils.override_jit_cuda_arch(12, 0, suffix="a")
    return nvfp4._jit_nvfp4_quant_module().scaled_fp4_quant


def _fp4_experts():
    from sglang.kernels.jit.utils import override_jit_cuda_arch
    from sglang.kernels.ops.gemm import sm120_nvfp4_moe

    with override_jit_cuda_arch(12, 0, suffix="a"):
        return sm120_nvfp4_moe._mtp_module().run


def check_uses_our_flashinfer(expected):
    """SGLang imports the patched FlashInfer."""
    require_our_flashinfer(importlib.util.find_spec("flashinfer").origin)


def check_command(expected):
    """``sglang version`` prints the locked version, and the server's ``--help`` works."""
    program = str(Path(sys.prefix, "bin", "sglang"))
    locked = expected["distributions"]["sglang"].partition("+")[0]  # a wheel that is packed again has the upstream version.py
    return prints_version_and_help([program, "version"], [*expected["serve"], "--help"], locked, "--model-path")


def check_arguments(expected):
    """SGLang's argument parser accepts the command line of every configuration."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return accepts_configurations(parser, expected)


def check_modules_ahead(expected):
    """The FlashInfer modules that SGLang requests on SM120 for the configurations are compiled ahead.

    SGLang's own names of FlashInfer's functions are called, up to the point where a module would be loaded. The back-ends are
    those that it selected when they were recorded.
    """
    require_served(expected, "sglang", "0.5.23")
    choices, modules = looked_up("look_up", expected)
    requests = {name: {use: Requested(module) for use, module in uses.items()} for name, uses in modules.items()}
    return modules_ahead(requests, expected) | {f"kernels of {name}": choice for name, choice in choices.items()}


def check_b12x_kernels(expected):
    """b12x finds the kernels of the recipe's table in its cache when SGLang calls it, and compiles none.

    Only launches and queries of the GPU are replaced. The environment is that of the container, and the cache is in its home.
    """
    if not expected["b12x"]:
        raise NotRun("the recipe compiles no kernels of b12x")  # noqa: F821 - the runner provides it
    hits, misses = looked_up("look_up_b12x", expected["b12x"])
    assert hits and not misses, f"{len(misses)} kernels are not in b12x's cache, {len(hits)} are: {'; '.join(misses[:3])}"
    kinds = ", ".join(f"{len({*paths})} {kind}" for kind, paths in sorted(group(hits).items()))
    return {
        "b12x finds": f"{len({path for _, path in hits})} kernels: {kinds}",
        "b12x cache": str(b12x_entrypoint()["b12x_cache"]()),
    }


def looked_up(function, given):
    """The result of a function of this module in a process of its own."""
    argv = [sys.executable, "-B", "-c", LOOK_UP, str(Path(__file__).parents[1]), function]
    result = run(argv, text=json.dumps(given))
    assert result.returncode == 0, output_tail(result)
    return json.loads(result.stdout.splitlines()[-1])


def b12x_entrypoint():
    """The names that the entrypoint defines."""
    return runpy.run_path("/opt/sm120kit/serve.py")


def group(pairs):
    """Values by the first of each pair."""
    groups = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def look_up_b12x(table):
    """Kernels that b12x finds in its cache, as kind and key, and descriptions of the calls for which it finds none.

    For a process of its own.
    """
    b12x_entrypoint()["add_b12x_entries"]()
    if metadata.version("b12x").startswith("1."):
        return _look_up_b12x_1_5(table)
    import cuda.bindings.driver as driver
    import torch

    stream = SimpleNamespace(stream_id=0, cuda_stream=0)
    torch.cuda.current_device = lambda: 0
    torch.cuda.current_stream = lambda device=None: stream
    torch.cuda.is_current_stream_capturing = lambda: False
    import sglang.srt.layers.quantization.modelopt_quant as quant
    from b12x.cute import runtime_patches
    from b12x.gemm import dense
    from b12x.integration import tp_moe

    quant.use_symmetric_memory = lambda *_, **__: contextlib.nullcontext()
    quant.get_tp_group = quant.is_allocation_symmetric = lambda: None
    for module in (dense, tp_moe):
        module.get_num_sm = lambda device: table["sm_count"]
        module.get_max_active_clusters = lambda size: table["sm_count"]
        module.current_cuda_stream = lambda: driver.CUstream(0)
    tp_moe.triton_compact_topk_ids = lambda *operands: None
    find, kind, hits, misses = runtime_patches._load_cute_compile_from_disk, "", [], []

    def found(key):
        if find(key) is None:
            raise LookupError(key)
        hits.append((kind, key))
        return lambda *operands: None

    runtime_patches._load_cute_compile_from_disk = found
    for name, call in _b12x_calls(table, quant):
        kind = name.partition(":")[0]
        try:
            call()
        except LookupError:
            misses.append(name)
    return hits, misses


def _look_up_b12x_1_5(table):
    """As :func:`look_up_b12x`, of b12x 1.5.1, with tensors that have no memory."""
    sys.path.append("/opt/sm120kit/b12x")
    import compile_1_5
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    compile_1_5.without_gpu(table["sm_count"])
    calls, hits, misses = compile_1_5.sglang_calls(table), [], []
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device(compile_1_5.DEVICE):
        for name, call in calls:
            found = compile_1_5.looked_up(lambda _, call=call: call(), 0, compiles=False)
            hits += [(name.partition(":")[0], key) for key, missing in found.items() if not missing]
            misses += [name] * any(found.values())
    return hits, misses


def _b12x_calls(table, quant):
    """SGLang's calls of b12x for the layers of a table, with their descriptions. Weights are reserved and never touched."""
    import torch

    def reserve(*shape):
        return torch.empty(*shape, dtype=torch.uint8)

    for layer in table["moe"]:
        experts, hidden, inner, top_k = (layer[key] for key in ("experts", "hidden", "inner", "top_k"))
        weights = SimpleNamespace(
            w13_weight=reserve(experts, 2 * inner, hidden // 2),
            w13_blockscale_swizzled=reserve(experts, 2 * inner, hidden // 16),
            w2_weight=reserve(experts, hidden, inner // 2),
            w2_blockscale_swizzled=reserve(experts, hidden, inner // 16),
            **{
                name: torch.ones(experts)
                for name in ("w13_input_scale_quant", "w2_input_scale_quant", "g1_alphas", "g2_alphas")
            },
        )
        for tokens in layer["tokens"]:
            x = torch.zeros(tokens, hidden, dtype=torch.bfloat16)
            ids = torch.zeros(tokens, top_k, dtype=torch.int32)
            chosen = SimpleNamespace(topk_weights=torch.zeros(tokens, top_k), topk_ids=ids)
            yield f"experts: {tokens} tokens", partial(quant.b12x_moe, weights, x, chosen)
    for layer in table["gemm"]:
        n, k = layer["n"], layer["k"]
        for rows in layer["rows"]:
            scales = (reserve(-(-count // 128) * 128, k // 16) for count in (rows, n))
            operands = (reserve(rows, k // 2), reserve(n, k // 2), *scales, torch.ones(1), torch.bfloat16)
            yield f"GEMM: {rows} x {n} x {k}", partial(quant.b12x_fp4_gemm, *operands)


def look_up(expected):
    """What SGLang uses on SM120, and the FlashInfer modules that this requests, both by configuration.

    The back-ends are those that SGLang 0.5.23 selected when they were recorded. For a process of its own, in which torch
    reports an SM120 GPU from now on.
    """
    parser = _parser_on_sm120()
    choices, modules = {}, {}
    with on_capability(12, 0):
        for name, served in expected["served"].items():
            selected = served["selected"]
            if not selected or ("flashinfer" in selected["attention"] and served["architecture"] is None):
                missing = "the sizes of its model" if selected else "its back-ends"
                choices[name] = f"not looked up: {missing} are not recorded"
                continue
            arguments = parser.parse_args([*expected["arguments"][name]])
            pairs = [(use, backend) for use, backends in selected.items() for backend in backends]
            calls = {}
            for use, backend in pairs:
                calls |= {", ".join((use, detail)): call for detail, call in _calls(use, backend, arguments, served).items()}
            choices[name] = ", ".join(f"{use}: {backend}" for use, backend in pairs)
            looked_up = {use: requested(call) for use, call in calls.items()}
            modules[name] = {use: module.name for use, module in looked_up.items()}
    return choices, modules


def _parser_on_sm120():
    """SGLang's argument parser in a process in which torch reports an SM120 GPU from now on."""
    import torch

    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda device=None: (12, 0)
    torch.cuda.get_device_name = lambda device=None: "NVIDIA RTX PRO 6000"
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(major=12, minor=0, multi_processor_count=188)
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


def _calls(use, backend, arguments, served):
    """Calls of FlashInfer by a back-end of SGLang 0.5.23, by what distinguishes them; none without a module of FlashInfer."""
    kind = use.removeprefix("draft: ")
    if (kind, backend) == ("attention", "flashinfer"):
        (cache,) = served["selected"]["KV cache"]
        options = {
            "kv_cache_dtype": cache,
            "tensor_parallel_size": arguments.tp_size,
            "speculative_algorithm": arguments.speculative_algorithm,
        }
        return _attention(SimpleNamespace(**options), served["architecture"]["attention"])
    if (kind, backend) == ("sampling", "flashinfer"):
        return _sampling()
    if (kind, backend) == ("experts", "flashinfer_mxfp4"):  # on SM120 layers/quantization/mxfp4.py takes CUTLASS
        import flashinfer
        import torch

        # SGLang runs FlashInfer's autotuner for these experts when it starts (runner/flashinfer_autotune.py).
        tuning = {} if arguments.disable_flashinfer_autotune else {"autotuner": autotuner}
        return tuning | {
            "inputs": lambda: flashinfer.mxfp8_quantize(torch.zeros(32, 64, dtype=torch.bfloat16), True, alignment=32),
            "GEMM": partial(fused_moe, 32, use_mxfp8_act_scaling=True),
        }
    if kind == "layers":  # SGLang initializes the GEMMs of both types of weights, whatever the model's is
        weights = {"fp4": "modelopt_fp4", "fp8": "fp8"}[backend.partition(":")[0]]
        if weights not in served["selected"]["quantization"]:
            return {}
        if backend == "fp4: flashinfer_cutlass":  # layers/quantization/modelopt_quant.py
            return {"fp4 inputs": _fp4_inputs, "fp4 GEMM": fp4_gemm}
    assert "flashinfer" not in backend, f"{use}: {backend} uses FlashInfer, and is not looked up"
    return {}


def _fp4_inputs():
    """Call FlashInfer's quantization of activations to NVFP4."""
    import flashinfer
    import torch

    flashinfer.fp4_quantize(torch.zeros(32, 64, dtype=torch.bfloat16), torch.ones(1), backend="cuda")


def _attention(arguments, grouped):
    """Calls of the FlashInfer backend for new tokens, cached ones, both, and drafted ones with a mask."""
    import torch
    from sglang.srt.layers.attention import flashinfer_backend as backend

    assert grouped, "latent attention uses FlashInfer, and is not looked up"
    gpus, size = arguments.tensor_parallel_size, grouped["head_dim"]
    heads = (grouped["heads"] // gpus, max(1, grouped["kv_heads"] // gpus))
    stored = _stored(arguments)
    workspace = torch.zeros(2**10, dtype=torch.uint8)
    wide = backend.should_use_tensor_core(stored, *heads)

    def cached(**mask):
        wrapper = backend.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        pages = (indices(0, 4), indices(0, 4), indices(0, 1, 2, 3), indices(1))
        wrapper.begin_forward(*pages, *heads, size, 1, q_data_type=torch.bfloat16, kv_data_type=stored, **mask)

    def decode():
        wrapper = backend.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2", use_tensor_cores=wide)
        pages = (indices(0, 1), indices(0), indices(1))
        wrapper.begin_forward(*pages, *heads, size, 1, data_type=stored, q_data_type=torch.bfloat16)

    def new():
        wrapper = backend.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="auto")
        wrapper.begin_forward(indices(0, 4), indices(0, 4), *heads, size, q_data_type=torch.bfloat16)

    states = (torch.zeros(2, 2, size), torch.zeros(2, 2)) * 2
    calls = {"decode": decode, "cached tokens": cached, "new tokens": new, "both": lambda: backend.merge_state(*states)}
    if arguments.speculative_algorithm:
        calls["drafted tokens"] = lambda: cached(custom_mask=torch.ones(16, dtype=torch.bool))
    return calls


def _stored(arguments):
    """The type of elements of the KV cache."""
    import torch

    return {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}.get(arguments.kv_cache_dtype, torch.bfloat16)


def _sampling():
    """Calls of sampling; probabilities of drafts are computed by sglang-kernel."""
    import torch
    from sglang.srt.layers import sampler

    probabilities, number = torch.rand(2, 32), torch.ones(2)
    return {
        "top-k and top-p": lambda: sampler.top_k_top_p_sampling_from_probs(probabilities, number.int(), number),
        "min-p": lambda: sampler.min_p_sampling_from_probs(probabilities, number),
    }
