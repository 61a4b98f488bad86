"""SGLang loads its extensions, uses our FlashInfer and takes the arguments of our configurations."""

import argparse
import importlib
import importlib.util
import sys
from importlib import metadata
from pathlib import Path

from checks_engine import last_words, refused, run


def check_extensions(expected):
    """SGLang's kernels load: those that it takes for any GPU but SM90, and where no GPU is seen."""
    import sgl_kernel
    import torch

    kernels = Path(sgl_kernel.common_ops.__file__)
    assert kernels.is_relative_to(Path(sgl_kernel.__file__).parent), f"common_ops is {kernels}"
    assert hasattr(torch.ops.sgl_kernel, "cutlass_scaled_fp4_mm"), "they have no FP4 GEMM"
    return {"kernels": str(kernels.relative_to(Path(sgl_kernel.__file__).parent))}


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
