"""Checks of vLLM: extensions, FP4 support, its FlashInfer, its command, and the arguments of our configurations.

Without a GPU vLLM detects no platform and refuses every command, so the checks set the platform: CUDA for its parser; CPU,
which ``vllm bench`` selects without a GPU, for its command line, which would query the GPU's capability on CUDA.
"""

import importlib
import logging
import os
import re
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from checks_engine import accepts_configurations, on_capability, output_tail, report_requests, requested, require_served, run

START = """
import sys
from vllm import platforms
if platforms.current_platform.is_unspecified():
    from vllm.platforms.cpu import CpuPlatform
    platforms.current_platform = CpuPlatform()
sys.argv[0] = "vllm"
from vllm.entrypoints.cli.main import main
main()
"""


def on_cuda():
    """Select vLLM's CUDA platform and return the module of platforms."""
    from vllm import platforms

    if platforms.current_platform.is_unspecified():
        from vllm.platforms.cuda import CudaPlatform

        platforms.current_platform = CudaPlatform()
    return platforms


def sm120_platform():
    """Answer vLLM's queries of the compute capability with that of SM120 while a block runs; torch refuses them without a GPU.

    Modules query it when they are imported, such as those of model loaders, which plugins import
    (``model_executor/layers/quantization/utils/w8a8_utils.py`` and ``kernels/oink_ops.py`` of 0.33.0).
    """
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    capability = classmethod(lambda cls, device_id=0: DeviceCapability(12, 0))
    return mock.patch.object(type(current_platform), "get_device_capability", capability)


def check_extensions(expected):
    """Every compiled extension of the distribution loads that the recipe does not leave out."""
    names = re.findall(r"^(.+)\.abi3\.so,", metadata.distribution("vllm").read_text("RECORD"), re.MULTILINE)
    names = [name for name in names if not is_left_out(expected, "vllm", f"{name}.abi3.so")]  # noqa: F821 - the runner provides it
    assert names, "the distribution has no compiled extension"
    problems = []
    import torch  # noqa: F401 - extensions link its libraries

    for name in sorted(names):
        try:
            importlib.import_module(name.replace("/", "."))
        except ImportError as error:
            problems.append(f"{name}: {error}")
    assert not problems, "; ".join(problems)
    return {"extensions": ", ".join(sorted(names))}


def check_fp4_support(expected):
    """vLLM's compiled code reports FP4 GEMMs for SM120 and none for SM90."""
    on_cuda()
    from vllm import _custom_ops

    supported = {capability: _custom_ops.cutlass_scaled_mm_supports_fp4(capability) for capability in (120, 90)}
    assert supported == {120: True, 90: False}, f"cutlass_scaled_mm_supports_fp4 returns {supported}"
    return {"cutlass_scaled_mm_supports_fp4": "(120) True, (90) False"}


def check_uses_our_flashinfer(expected):
    """vLLM detects FlashInfer with its CUTLASS MoE and imports the patched package."""
    on_cuda()
    from vllm.utils import flashinfer as support

    assert support.has_flashinfer(), "vLLM does not detect FlashInfer"
    package = Path(importlib.import_module("flashinfer").__file__)
    ours = Path(metadata.distribution("flashinfer-python").locate_file("flashinfer/__init__.py"))
    assert package == ours, f"vLLM imports {package}, ours is {ours}"
    assert support.has_flashinfer_cutlass_fused_moe(), "vLLM does not detect FlashInfer's CUTLASS MoE"


def check_command(expected):
    """``vllm --version`` prints the locked version, and ``vllm serve --help`` works."""
    version = run([sys.executable, "-c", START, "--version"])
    locked = expected["distributions"]["vllm"]
    assert version.returncode == 0 and version.stdout.split()[-1:] == [locked], f"not {locked}: {output_tail(version)}"
    help_text = run([sys.executable, "-c", START, "serve", "--help"])
    assert help_text.returncode == 0 and "vllm serve" in help_text.stdout, output_tail(help_text)
    print(version.stderr + help_text.stderr)
    return {"vllm --version": locked}


def check_arguments(expected):
    """vLLM's argument parser and the validation of its server accept the command line of every configuration."""
    on_cuda()
    try:
        from vllm.entrypoints.common import cli_args  # since 0.33

        last = cli_args.validate_api_server_args
    except ImportError:
        from vllm.entrypoints.openai import api_server, cli_args

        last = api_server.validate_api_server_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def validate(parsed):
        cli_args.validate_parsed_serve_args(parsed)
        last(parsed)  # validates the names of tool and reasoning parsers

    with sm120_platform():  # the parser loads plugins
        return accepts_configurations(cli_args.make_arg_parser(FlexibleArgumentParser()), expected, validate)


def check_modules_ahead(expected):
    """The FlashInfer modules that vLLM requests on SM120 for the configurations are compiled ahead.

    vLLM's own functions select the kernels and call FlashInfer, up to the point where a module would be loaded. With a part of
    the kernels, missing modules are reported; with all of them, none may be missing.
    """
    require_served(expected, "vllm", "0.19.1")
    logging.disable(logging.INFO)  # vLLM logs each selection, which is reported below
    on_cuda()
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    requests, selected = {}, {}
    with on_capability(12, 0), sm120_platform():
        for name, served in expected["served"].items():
            if served["architecture"] is None:
                selected[f"kernels of {name}"] = "not looked up: the sizes of its model are not recorded"
                continue
            arguments = parser.parse_args([*expected["arguments"][name]])
            with mock.patch.dict(os.environ, served["environment"]), set_current_vllm_config(VllmConfig()):
                choices, requests[name] = _lookups(arguments, served)
            selected[f"kernels of {name}"] = ", ".join(f"{use}: {choice}" for use, choice in choices.items())
    return report_requests(expected, requests) | selected


def _lookups(arguments, served):
    """What vLLM selects for a configuration, and the FlashInfer modules that this requests, both by use."""
    choices, modules = {}, {}
    for lookup in (_attention, _linear, _experts, _sampler, _others):
        chosen, loaded = lookup(arguments, served)
        choices |= chosen
        modules |= loaded
    return choices, modules


def _attention(arguments, served):
    """The attention backend. A quantized checkpoint may set an FP8 KV cache where the arguments leave it open."""
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    grouped, latent = (served["architecture"][key] for key in ("attention", "latent_attention"))
    size = latent["kv_rank"] + latent["rope"] if latent else grouped["head_dim"]
    heads = (latent or grouped)["heads"] // arguments.tensor_parallel_size
    backend = arguments.attention_backend
    caches = ["auto", "fp8"] if arguments.kv_cache_dtype == "auto" else [arguments.kv_cache_dtype]
    choices, modules = {}, {}
    for cache in caches:
        config = AttentionSelectorConfig(size, torch.bfloat16, cache, None, use_mla=latent is not None)
        enum = AttentionBackendEnum[backend] if isinstance(backend, str) else backend
        path = current_platform.get_attn_backend_cls(enum, config, num_heads=heads)
        use = f"attention, {cache} cache"
        choices[use] = path.rpartition(".")[2]
        if choices[use] == "FlashInferBackend":
            for phase, plan in _plans(grouped, arguments.tensor_parallel_size, cache).items():
                modules[f"{use}, {phase}"] = requested(plan)
    return choices, modules


def _plans(grouped, gpus, cache):
    """Calls that plan prefill and decode with the wrappers of vLLM's FlashInfer backend, as its metadata builder does."""
    import torch
    from vllm.v1.attention.backends import flashinfer as backend

    builder = object.__new__(backend.FlashInferMetadataBuilder)
    builder._workspace_buffer = torch.zeros(2**10, dtype=torch.uint8)
    builder._prefill_wrapper = builder._decode_wrapper = None
    builder.use_dcp = False
    stored = torch.bfloat16
    if cache != "auto":
        stored = backend.FlashInferBackend.get_fp8_dtype_for_flashinfer(cache)
    shape = {"num_qo_heads": grouped["heads"] // gpus, "num_kv_heads": max(1, grouped["kv_heads"] // gpus), "page_size": 16}
    scale = {"sm_scale": 1.0, "window_left": -1, "logits_soft_cap": 0.0}
    dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": stored, "o_data_type": torch.bfloat16}

    def indices(*values):
        return torch.tensor(values, dtype=torch.int32)

    def prefill():
        pages = (indices(0, 1), indices(0), indices(4))
        builder._get_prefill_wrapper().plan(
            indices(0, 4), *pages, head_dim_qk=grouped["head_dim"], causal=True, **shape, **scale, **dtypes
        )

    def decode():
        pages = (indices(0, 1), indices(0), indices(4))
        wrapper = builder._get_decode_wrapper(1)
        backend.fast_plan_decode(wrapper, *pages, head_dim=grouped["head_dim"], **shape, **scale, **dtypes)

    return {"prefill": prefill, "decode": decode}


def _linear(arguments, served):
    """The GEMM of quantized linear layers."""
    import flashinfer
    import torch
    from vllm.model_executor.layers.quantization.utils.nvfp4_utils import select_nvfp4_linear_backend
    from vllm.utils import flashinfer as support

    if served["quantization"].startswith("FP8"):
        assert not support.is_flashinfer_fp8_blockscale_gemm_supported(), "FP8 layers use FlashInfer, which is not looked up"
        return {"FP8 layers": "vLLM's own"}, {}
    if not served["quantization"].startswith("NVFP4"):
        return {}, {}
    backend = select_nvfp4_linear_backend().value
    if not backend.startswith("flashinfer-"):
        return {"NVFP4 layers": backend}, {}
    matrix, scales = (torch.zeros(*shape, dtype=torch.uint8) for shape in ((32, 64), (128, 8)))
    options = {"block_size": 16, "use_8x4_sf_layout": False, "backend": backend.removeprefix("flashinfer-")}
    module = requested(
        lambda: flashinfer.mm_fp4(matrix, matrix.t(), scales, scales.t(), torch.ones(1), torch.bfloat16, **options)
    )
    return {"NVFP4 layers": backend}, {"NVFP4 layers": module}


def _experts(arguments, served):
    """The kernels of routed experts."""
    import flashinfer
    import torch
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
    from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import select_nvfp4_moe_backend
    from vllm.model_executor.layers.quantization.utils import quant_utils
    from vllm.model_executor.layers.quantization.utils.flashinfer_mxint4_moe import is_flashinfer_mxint4_moe_available

    experts = served["architecture"]["experts"]
    if experts is None:
        return {}, {}
    if served["quantization"].startswith("int4"):
        assert not is_flashinfer_mxint4_moe_available(), "int4 experts use FlashInfer, which is not looked up"
        return {"int4 experts": "vLLM's own"}, {}
    gpus = arguments.tensor_parallel_size
    parallel = FusedMoEParallelConfig(gpus, 1, 1, 1, 0, 0, 0, 0, 1, False, "allgather_reducescatter", False)
    config = FusedMoEConfig(
        num_experts=experts["count"],
        experts_per_token=experts["active"],
        hidden_dim=served["architecture"]["hidden"],
        intermediate_size_per_partition=experts["width"] // gpus,
        num_local_experts=experts["count"],
        num_logical_experts=experts["count"],
        activation=MoEActivation.SILU,
        device="cuda",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=parallel,
        in_dtype=torch.bfloat16,
    )
    backend, _ = select_nvfp4_moe_backend(config, quant_utils.kNvfp4Static, quant_utils.kNvfp4Dynamic)
    if backend.value != "FLASHINFER_CUTLASS":
        return {"NVFP4 experts": backend.value}, {}
    tokens, weights = torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(8, 64, 8, dtype=torch.int64)
    routed = (torch.zeros(4, 2, dtype=torch.int32), torch.zeros(4, 2))
    module = requested(
        lambda: flashinfer.fused_moe.cutlass_fused_moe(tokens, *routed, weights, weights, torch.bfloat16, [], output=tokens)
    )
    return {"NVFP4 experts": backend.value}, {"NVFP4 experts": module}


def _sampler(arguments, served):
    """Top-k and top-p sampling."""
    import torch
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, flashinfer_sample

    name = TopKTopPSampler().forward.__name__
    if name != "forward_cuda":
        return {"sampler": "torch and Triton"}, {}
    number = torch.ones(2)
    module = requested(lambda: flashinfer_sample(torch.zeros(2, 32), number.int(), number, {}))
    return {"sampler": "FlashInfer"}, {"sampler": module}


def _others(arguments, served):
    """RoPE and all-reduce, which use FlashInfer only with other settings or on other GPUs."""
    from vllm.config.vllm import enable_allreduce_rms_fusion
    from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import DeepseekScalingRotaryEmbedding

    gpus = SimpleNamespace(tensor_parallel_size=arguments.tensor_parallel_size, data_parallel_size=1, pipeline_parallel_size=1)
    assert not enable_allreduce_rms_fusion(SimpleNamespace(parallel_config=gpus)), "the all-reduce is FlashInfer's"
    assert not DeepseekScalingRotaryEmbedding.enabled(), "RoPE of latent attention is FlashInfer's"
    return {}, {}
