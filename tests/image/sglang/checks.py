"""SGLang loads its extensions, uses our FlashInfer and takes the arguments of our configurations."""

import argparse
import importlib
import importlib.util
import sys
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from checks_engine import last_words, refused, run

TAGS = [tag for tag in EXTENSION_SUFFIXES if tag != ".so"]
"""How the files of extensions for this Python end. A library that is none has no tag."""

KERNELS = ("sgl_kernel/sm90/common_ops", "sgl_kernel/sm100/common_ops")
"""Of these SGLang loads one, by file: both register the same operators."""


def check_extensions(expected):
    """Every compiled extension for this Python loads, and of SGLang's kernels those for any GPU but SM90."""
    import sgl_kernel
    import torch

    kernels = Path(sgl_kernel.common_ops.__file__)
    assert kernels.is_relative_to(Path(sgl_kernel.__file__).parent), f"common_ops is {kernels}"
    assert hasattr(torch.ops.sgl_kernel, "fp8_scaled_mm"), "they have no FP8 GEMM"
    files = [str(file) for name in ("sglang", "sglang-kernel") for file in metadata.files(name)]
    names = {file.removesuffix(tag) for file in files for tag in TAGS if file.endswith(tag)} - {*KERNELS}
    wrong = []
    for name in sorted(names):
        try:
            importlib.import_module(name.replace("/", "."))
        except ImportError as error:
            wrong.append(f"{name}: {error}")
    assert not wrong, "; ".join(wrong)
    return {"kernels": str(kernels.relative_to(Path(sgl_kernel.__file__).parent)), "extensions": ", ".join(sorted(names))}


def check_compiles_fp4(expected):
    """SGLang compiles at first use what its kernels lack, FP4, with the CUTLASS of our FlashInfer: here the quantization.

    Which arch it is for it would ask the GPU.
    """
    from sglang.jit_kernel import nvfp4, utils

    headers = Path(utils.get_cutlass_include_paths()[0])
    ours = Path(metadata.distribution("flashinfer-python").locate_file("flashinfer"))
    assert headers.is_relative_to(ours), f"it takes CUTLASS from {headers}"
    nvfp4._nvfp4_arch_env = lambda: utils.override_jit_cuda_arch(12, 0, suffix="a")
    assert callable(nvfp4._jit_nvfp4_quant_module().scaled_fp4_quant)
    return {"compiled by SGLang": "its FP4 quantization, for sm_120a", "with CUTLASS from": str(headers)}


def check_uses_our_flashinfer(expected):
    """The FlashInfer that SGLang finds is the patched one."""
    found = importlib.util.find_spec("flashinfer").origin
    ours = metadata.distribution("flashinfer-python").locate_file("flashinfer/__init__.py")
    assert Path(found) == Path(ours), f"SGLang would import {found}, ours is {ours}"


def check_command(expected):
    """``sglang version`` says the version that the lock has, and the server's help is there."""
    version = run([str(Path(sys.prefix, "bin", "sglang")), "version"])
    wanted = expected["distributions"]["sglang"]
    assert version.returncode == 0 and wanted in version.stdout.split(), f"not {wanted}: {last_words(version)}"
    text = run([*expected["serve"], "--help"])
    assert text.returncode == 0 and "--model-path" in text.stdout, last_words(text)
    print(version.stderr + text.stderr)
    return {"sglang version": wanted}


def check_arguments(expected):
    """Its argument parser takes the command line of every configuration."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return refused(parser, expected)
