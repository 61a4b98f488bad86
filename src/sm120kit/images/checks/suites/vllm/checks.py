"""Checks of vLLM: extensions, FP4 support, its FlashInfer, its command, and the arguments of our configurations.

Without a GPU vLLM detects no platform and refuses every command, so the checks set the platform: CUDA for its parser; CPU,
which ``vllm bench`` selects without a GPU, for its command line, which would query the GPU's capability on CUDA.
"""

import importlib
import re
import sys
from importlib import metadata
from pathlib import Path

from checks_engine import accepts_configurations, output_tail, run

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


def check_extensions(expected):
    """Every compiled extension of the distribution loads."""
    names = re.findall(r"^(.+)\.abi3\.so,", metadata.distribution("vllm").read_text("RECORD"), re.MULTILINE)
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
    from vllm.entrypoints.openai.api_server import validate_api_server_args
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def validate(parsed):
        validate_parsed_serve_args(parsed)
        validate_api_server_args(parsed)  # validates the names of tool and reasoning parsers

    return accepts_configurations(make_arg_parser(FlexibleArgumentParser()), expected, validate)
