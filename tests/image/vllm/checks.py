"""vLLM loads its extensions, uses our FlashInfer and takes the arguments of our configurations.

Without a GPU vLLM finds no platform and refuses to say anything, so it is told which to take: for its parser that for GPUs of
NVIDIA; for its command line, which would ask the GPU for its capability, the one that its own ``vllm bench`` takes then.
"""

import importlib
import sys
from importlib import metadata
from pathlib import Path

from checks_engine import last_words, refused, run

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
    """vLLM's platforms, with the one for NVIDIA's GPUs chosen."""
    from vllm import platforms

    if platforms.current_platform.is_unspecified():
        from vllm.platforms.cuda import CudaPlatform

        platforms.current_platform = CudaPlatform()
    return platforms


def check_extensions(expected):
    """Every compiled extension of the distribution loads."""
    names = [str(file).removesuffix(".abi3.so") for file in metadata.files("vllm") if str(file).endswith(".abi3.so")]
    assert names, "the distribution has no compiled extension"
    wrong = []
    import torch  # noqa: F401 - extensions are linked with its libraries

    for name in sorted(names):
        try:
            importlib.import_module(name.replace("/", "."))
        except ImportError as error:
            wrong.append(f"{name}: {error}")
    assert not wrong, "; ".join(wrong)
    return {"extensions": ", ".join(sorted(names))}


def check_fp4_support(expected):
    """Its compiled code says that SM120 has FP4 GEMMs and SM90 has not."""
    on_cuda()
    from vllm import _custom_ops

    said = {capability: _custom_ops.cutlass_scaled_mm_supports_fp4(capability) for capability in (120, 90)}
    assert said == {120: True, 90: False}, f"it says {said}"
    return {"cutlass_scaled_mm_supports_fp4": "(120) True, (90) False"}


def check_uses_our_flashinfer(expected):
    """The FlashInfer that vLLM finds is the patched one, and vLLM takes it for usable."""
    on_cuda()
    from vllm.utils import flashinfer as found

    assert found.has_flashinfer(), "vLLM says that there is no FlashInfer"
    package = Path(importlib.import_module("flashinfer").__file__)
    ours = Path(metadata.distribution("flashinfer-python").locate_file("flashinfer/__init__.py"))
    assert package == ours, f"vLLM imports {package}, ours is {ours}"
    assert found.has_flashinfer_cutlass_fused_moe(), "vLLM does not find FlashInfer's CUTLASS MoE"


def check_command(expected):
    """``vllm --version`` says the version that the lock has, and ``vllm serve --help`` starts."""
    version = run([sys.executable, "-c", START, "--version"])
    wanted = expected["distributions"]["vllm"]
    assert version.returncode == 0 and version.stdout.split()[-1:] == [wanted], f"not {wanted}: {last_words(version)}"
    text = run([sys.executable, "-c", START, "serve", "--help"])
    assert text.returncode == 0 and "vllm serve" in text.stdout, last_words(text)
    print(version.stderr + text.stderr)
    return {"vllm --version": wanted}


def check_arguments(expected):
    """Its argument parser, and its server before it starts, take the command line of every configuration."""
    on_cuda()
    from vllm.entrypoints.openai.api_server import validate_api_server_args
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def validate(parsed):
        validate_parsed_serve_args(parsed)
        validate_api_server_args(parsed)  # knows the parsers for tools and reasoning

    return refused(make_arg_parser(FlexibleArgumentParser()), expected, validate)
