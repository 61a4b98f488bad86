"""Checks of SGLang: extensions, FP4 compilation, its FlashInfer, its command, and the arguments of our configurations."""

import argparse
import importlib
import importlib.util
import sys
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from checks_engine import accepts_configurations, output_tail, run

TAGS = [tag for tag in EXTENSION_SUFFIXES if tag != ".so"]
"""Suffixes of extensions for this Python. A library that is not an extension has no tag."""

KERNELS = ("sgl_kernel/sm90/common_ops", "sgl_kernel/sm100/common_ops")
"""SGLang loads one of these by file: both register the same operators."""


def check_extensions(expected):
    """Every compiled extension for this Python loads, and of SGLang's two sets of kernels that for GPUs other than SM90."""
    import sgl_kernel
    import torch

    kernels = Path(sgl_kernel.common_ops.__file__)
    assert kernels.is_relative_to(Path(sgl_kernel.__file__).parent), f"common_ops is {kernels}"
    assert hasattr(torch.ops.sgl_kernel, "fp8_scaled_mm"), "sgl_kernel has no FP8 GEMM"
    records = [metadata.distribution(name).read_text("RECORD") for name in ("sglang", "sglang-kernel")]
    files = [line.partition(",")[0] for text in records for line in text.splitlines()]
    names = {file.removesuffix(tag) for file in files for tag in TAGS if file.endswith(tag)} - {*KERNELS}
    problems = []
    for name in sorted(names):
        try:
            importlib.import_module(name.replace("/", "."))
        except ImportError as error:
            problems.append(f"{name}: {error}")
    assert not problems, "; ".join(problems)
    return {"kernels": str(kernels.relative_to(Path(sgl_kernel.__file__).parent)), "extensions": ", ".join(sorted(names))}


def check_compiles_fp4(expected):
    """SGLang's JIT compiles its FP4 quantization, which its wheel lacks, with the CUTLASS of our FlashInfer.

    The check sets the arch, which SGLang would query from the GPU.
    """
    from sglang.jit_kernel import nvfp4, utils

    headers = Path(utils.get_cutlass_include_paths()[0])
    ours = Path(metadata.distribution("flashinfer-python").locate_file("flashinfer"))
    assert headers.is_relative_to(ours), f"CUTLASS is taken from {headers}"
    nvfp4._nvfp4_arch_env = lambda: utils.override_jit_cuda_arch(12, 0, suffix="a")
    assert callable(nvfp4._jit_nvfp4_quant_module().scaled_fp4_quant)
    return {"compiled by SGLang": "its FP4 quantization, for sm_120a", "with CUTLASS from": str(headers)}


def check_uses_our_flashinfer(expected):
    """SGLang imports the patched FlashInfer."""
    package = importlib.util.find_spec("flashinfer").origin
    ours = metadata.distribution("flashinfer-python").locate_file("flashinfer/__init__.py")
    assert Path(package) == Path(ours), f"SGLang would import {package}, ours is {ours}"


def check_command(expected):
    """``sglang version`` prints the locked version, and the server's ``--help`` works."""
    version = run([str(Path(sys.prefix, "bin", "sglang")), "version"])
    locked = expected["distributions"]["sglang"]
    assert version.returncode == 0 and locked in version.stdout.split(), f"not {locked}: {output_tail(version)}"
    help_text = run([*expected["serve"], "--help"])
    assert help_text.returncode == 0 and "--model-path" in help_text.stdout, output_tail(help_text)
    print(version.stderr + help_text.stderr)
    return {"sglang version": locked}


def check_arguments(expected):
    """SGLang's argument parser accepts the command line of every configuration."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return accepts_configurations(parser, expected)
