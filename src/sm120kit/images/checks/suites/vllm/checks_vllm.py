"""Checks of vLLM: extensions, FP4 support, its FlashInfer, its command, and the arguments of our configurations.

Without a GPU vLLM detects no platform and refuses every command, so the checks set the platform: CUDA for its parser; CPU,
which ``vllm bench`` selects without a GPU, for its command line, which would query the GPU's capability on CUDA.
"""

import importlib
import json
import logging
import os
import re
import sys
from functools import partial
from importlib import metadata
from unittest import mock

from checks_engine import (
    accepts_configurations,
    autotuner,
    fp4_gemm,
    fused_moe,
    indices,
    load_extensions,
    modules_ahead,
    on_capability,
    prints_version_and_help,
    requested,
    require_our_flashinfer,
    require_served,
    triton_kernels,
)

BESIDE = ("command", "modules_ahead", "triton_kernels")
"""Checks that run in a process of their own beside the others."""

TUNED = ("fp4_gemm_cutlass_sm120", "fused_moe_120", "gemm", "gemm_sm120")
"""Modules of FlashInfer whose tactics its autotuner measures. vLLM runs it when a server starts."""

START = """
import gc, sys
gc.disable()
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


def command_line():
    """The module of vLLM's arguments, and the function that validates them last."""
    try:
        from vllm.entrypoints.common import cli_args  # since 0.33
    except ImportError:
        from vllm.entrypoints.openai import api_server, cli_args

        return cli_args, api_server.validate_api_server_args
    return cli_args, cli_args.validate_api_server_args


def check_extensions(expected):
    """Every compiled extension of the distribution loads that the recipe does not leave out."""
    names = re.findall(r"^(.+)\.abi3\.so,", metadata.distribution("vllm").read_text("RECORD"), re.MULTILINE)
    names = [name for name in names if not is_left_out(expected, "vllm", f"{name}.abi3.so")]  # noqa: F821 - the runner provides it
    import torch  # noqa: F401 - extensions link its libraries

    return load_extensions(names)


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
    require_our_flashinfer(importlib.import_module("flashinfer").__file__)
    assert support.has_flashinfer_cutlass_fused_moe(), "vLLM does not detect FlashInfer's CUTLASS MoE"


def check_command(expected):
    """``vllm --version`` prints the locked version, and ``vllm serve --help`` works."""
    start = [sys.executable, "-c", START]
    locked = expected["distributions"]["vllm"]
    return prints_version_and_help([*start, "--version"], [*start, "serve", "--help"], locked, "vllm serve")


def check_arguments(expected):
    """vLLM's argument parser and the validation of its server accept the command line of every configuration."""
    on_cuda()
    cli_args, last = command_line()
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def validate(parsed):
        cli_args.validate_parsed_serve_args(parsed)
        last(parsed)  # validates the names of tool and reasoning parsers

    with sm120_platform():  # the parser loads plugins
        return accepts_configurations(cli_args.make_arg_parser(FlexibleArgumentParser()), expected, validate)


def check_modules_ahead(expected):
    """The FlashInfer modules that vLLM requests on SM120 for the configurations are compiled ahead.

    vLLM's own functions call FlashInfer, up to the point where a module would be loaded; the back-ends are those that it
    selected when they were recorded, because that takes a model.
    """
    require_served(expected, "vllm", "0.33.0")
    logging.disable(logging.WARNING)  # vLLM logs each selection, which is reported below
    on_cuda()
    cli_args, _ = command_line()
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    requests, selected = {}, {}
    with on_capability(12, 0), sm120_platform():
        parser = cli_args.make_arg_parser(FlexibleArgumentParser())  # loads plugins
        for name, served in expected["served"].items():
            if reason := _not_looked_up(served):
                selected[f"kernels of {name}"] = f"not looked up: {reason}"
                continue
            arguments = parser.parse_args([*expected["arguments"][name]])
            with mock.patch.dict(os.environ, served["environment"]), set_current_vllm_config(VllmConfig()):
                choices, requests[name] = _recorded(arguments, served)
            if _autotunes(arguments) and any(module.name in TUNED for module in requests[name].values()):
                requests[name]["autotuner"] = requested(autotuner)
            selected[f"kernels of {name}"] = ", ".join(f"{use}: {choice}" for use, choice in choices.items())
    return modules_ahead(requests, expected) | selected


def check_triton_kernels(expected):
    """The recorded kernels of Triton that vLLM launches when it starts are compiled ahead."""
    return triton_kernels(expected)


def _autotunes(arguments):
    """Whether a server with these arguments measures FlashInfer's tactics when it starts."""
    from vllm.config.vllm import OPTIMIZATION_LEVEL_TO_CONFIG

    if arguments.enable_flashinfer_autotune is not None:
        return arguments.enable_flashinfer_autotune
    return OPTIMIZATION_LEVEL_TO_CONFIG[int(arguments.optimization_level)]["kernel_config"]["enable_flashinfer_autotune"]


def _not_looked_up(served):
    """What is missing to look up the kernels of a configuration; empty if nothing."""
    if not served["selected"]:
        return "its back-ends are not recorded"
    # Recorded back-ends other than attention by FlashInfer are called the same for every model.
    sizes = "FLASHINFER" in served["selected"].get("attention", ())
    return "the sizes of its model are not recorded" if sizes and served["architecture"] is None else ""


def _recorded(arguments, served):
    """The back-ends that vLLM 0.33.0 selects for a configuration, and the FlashInfer modules that they request, by use."""
    choices = {use: ", ".join(names) for use, names in served["selected"].items()}
    calls = {(use, name): _calls(use, name, arguments, served) for use, names in served["selected"].items() for name in names}
    if _sampler_is_flashinfer():
        choices["sampler"], calls["sampler", ""] = "FlashInfer", _sampling()
    modules = {}
    for (use, _), every in calls.items():
        modules |= {", ".join(filter(None, (use, detail))): requested(call) for detail, call in every.items()}
    return choices, modules


SPARSE_MLA = ("FLASHINFER_MLA_SPARSE_DSV4", "FLASHINFER_MLA_SPARSE_DSV41", "FLASHINFER_MLA_SPARSE_SM120")


def _calls(use, name, arguments, served):
    """Calls of FlashInfer by a back-end of vLLM 0.33.0, by what distinguishes them. Empty if it has no module of FlashInfer."""
    kind = use.removeprefix("draft: ")
    if (kind, name) == ("attention", "FLASHINFER"):
        return _flashinfer_attention(use, arguments, served)
    if kind == "attention" and name in SPARSE_MLA:
        return {"": _sparse_mla}
    if kind == "experts" and name.endswith(" FLASHINFER_CUTLASS"):
        return {"": fused_moe}
    if (kind, name) == ("layers", "FlashInferCutlassNvFp4LinearKernel"):
        return {name: fp4_gemm}
    if (kind, name) == ("layers", "FlashInferCutlassMxfp8LinearKernel"):
        return {name: _mxfp8_gemm}
    if (kind, name) == ("layers", "FlashInferFP8ScaledMMLinearKernel"):
        # It passes "auto", with which FlashInfer's autotuner loads CUTLASS first, and then cuBLAS.
        return {f"{name}, {backend}": partial(_fp8_gemm, backend) for backend in ("auto", "cublas")}
    # Attention for decoding is looked up with that for prompts; the prefill of gated DeltaNet on SM12x is in CuTe DSL.
    without_module = {("attention, decode", "FLASHINFER"), ("attention, decode", "TRTLLM (XQA on SM12x)")}
    without_module |= {("linear attention, prefill", "flashinfer")}
    known = (kind, name) in without_module or not re.search("flashinfer|trtllm", name, re.IGNORECASE)
    assert known, f"{use}: {name} uses FlashInfer, and is not looked up"
    return {}


def _flashinfer_attention(use, arguments, served):
    """Calls that plan or run attention for prompts, and for decoding: FlashInfer's own kernels, or XQA.

    XQA is used if vLLM reaches NVIDIA's server of kernels, or ``VLLM_HAS_FLASHINFER_CUBIN`` is set. The page size is part of
    its name. vLLM computes that of models with linear attention from the size of their state, unless an argument sets it, and
    then XQA is not looked up.
    """
    import torch
    from vllm.v1.attention.backends import flashinfer as backend
    from vllm.v1.worker.utils import select_common_block_size

    grouped, gpus = served["architecture"]["attention"], arguments.tensor_parallel_size
    draft = "draft: " if use.startswith("draft: ") else ""
    (cache,) = served["selected"][f"{draft}KV cache"]
    stored = torch.bfloat16 if cache == "auto" else backend.FlashInferBackend.get_dtype_for_flashinfer(cache)
    heads, kept, size = grouped["heads"] // gpus, max(1, grouped["kv_heads"] // gpus), grouped["head_dim"]
    shape = {"num_qo_heads": heads, "num_kv_heads": kept, "page_size": 16}
    scale = {"sm_scale": 1.0, "window_left": -1, "logits_soft_cap": 0.0}
    dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": stored, "o_data_type": torch.bfloat16}
    workspace = torch.zeros(2**20, dtype=torch.uint8)

    def prefill():
        wrapper = backend.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="auto")
        pages = (indices(0, 1), indices(0), indices(4))
        wrapper.plan(indices(0, 4), *pages, seq_lens=indices(4), head_dim_qk=size, causal=True, **shape, **scale, **dtypes)

    def decode():
        wrapper = backend.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True, backend="auto")
        pages = (indices(0, 1), indices(0), indices(4), indices(4))
        backend.fast_plan_decode(wrapper, *pages, head_dim=size, **shape, **scale, **dtypes)

    def xqa(page, tokens):
        pages, query = torch.zeros(2, page, kept, size).to(stored), torch.zeros(tokens, heads, size, dtype=torch.bfloat16)
        backend.flashinfer_xqa_batch_decode_with_kv_cache(
            query=query,
            kv_cache=(pages, pages),
            workspace_buffer=workspace,
            block_tables=indices(0).view(1, 1),
            seq_lens=indices(4),
            max_seq_len=page,
            out=query,
            kv_layout="NHD",
            q_len_per_req=tokens,
            mask=backend._make_xqa_draft_block_mask(tokens, True, "cpu").unsqueeze(0) if tokens > 1 else None,
        )

    calls = {f"{cache} cache, prompts": prefill, f"{cache} cache, decoding": decode}
    if arguments.block_size or not served["architecture"]["linear_attention"]:
        page = select_common_block_size(arguments.block_size or 16, [backend.FlashInferBackend])
        tokens = 1 if draft else 1 + _drafted_tokens(arguments)
        calls[f"{cache} cache, decoding with XQA"] = partial(xqa, page, tokens)
    return calls


def _sparse_mla():
    """Load the module of FlashInfer's sparse latent attention, which is the same for every model."""
    from flashinfer.mla._sparse_mla_sm120 import _execution

    _execution.get_sparse_mla_sm120_module()


def _mxfp8_gemm():
    """Load the module of FlashInfer's MXFP8 GEMM."""
    from flashinfer.gemm import gemm_base

    gemm_base.get_gemm_sm120_module_cutlass_mxfp8()


def _drafted_tokens(arguments):
    """The number of tokens that a configuration drafts in a step."""
    speculative = arguments.speculative_config or {}
    return (json.loads(speculative) if isinstance(speculative, str) else speculative).get("num_speculative_tokens", 0)


def _fp8_gemm(backend):
    """Call FlashInfer's FP8 GEMM with a scale for each tensor."""
    import flashinfer
    import torch

    matrix = torch.zeros(1, 32, 64).to(torch.float8_e4m3fn)
    flashinfer.bmm_fp8(matrix, matrix.transpose(1, 2), torch.ones(1), torch.ones(1), torch.bfloat16, backend=backend)


def _sampler_is_flashinfer():
    """Whether vLLM 0.33.0 samples with FlashInfer."""
    import torch
    from vllm.v1.sample.ops import topk_topp_sampler

    with mock.patch.object(torch.accelerator, "current_device_index", lambda: 0):
        return topk_topp_sampler.flashinfer_sampler_supported()


def _sampling():
    """Calls of top-k and top-p sampling."""
    import torch
    from vllm.v1.sample.ops.topk_topp_sampler import flashinfer_sample

    number = torch.ones(2)
    return {"": lambda: flashinfer_sample(torch.zeros(2, 32), number.int(), number, {})}
