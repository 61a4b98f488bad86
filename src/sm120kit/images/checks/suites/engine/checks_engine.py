"""Checks of every engine: environment, serve command, compilation at run time, and selected back-ends.

Also helpers for the engines' suites.
"""

import contextlib
import importlib
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

QUICK = ("environment", "serve_command")
"""Checks of an image that differs from a checked one in Python files only."""

BESIDE = ("compiles_at_run_time",)
"""Checks that run in a process of their own beside the others."""

TRITON = Path("/opt/sm120kit/triton_ahead")
"""What an image has for kernels of Triton: the recorder, and with a record of its recipe all else."""

PROBE = """
#include <cuda_runtime.h>
#include <tvm/ffi/function.h>
__global__ void touch(int* value) { *value = 120; }
int answer() { touch<<<1, 1>>>(nullptr); return cudaGetLastError() == cudaSuccess ? 0 : 120; }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(answer, answer);
"""

COMPILE = """
import sys
from pathlib import Path
from flashinfer.jit import gen_jit_spec
print(gen_jit_spec("sm120kit_probe", [Path(sys.argv[1])]).build_and_load().answer())
"""


def check_environment(expected):
    """The recipe's environment variables are set."""
    environment = {name: os.environ.get(name) for name in expected["env"]}
    assert environment == expected["env"], f"it is {environment}, the recipe sets {expected['env']}"
    return {"environment": ", ".join(expected["env"])}


def check_serve_command(expected):
    """The serve command is a program of the image's Python environment."""
    program = shutil.which(expected["serve"][0])
    assert program and Path(program).parent == Path(sys.prefix, "bin"), f"{expected['serve'][0]} is {program or 'missing'}"
    return {"serves with": " ".join(expected["serve"])}


def check_compiles_at_run_time(expected):
    """FlashInfer's JIT compiles, links and loads a module that was not compiled ahead of time."""
    source = Path.home() / "sm120kit_probe.cu"
    source.write_text(PROBE)
    try:
        variables = {name: value for name, value in os.environ.items() if name != "FLASHINFER_DISABLE_JIT"}
        result = run([sys.executable, "-c", COMPILE, str(source)], variables | expected["env"])
    finally:
        source.unlink()
    # Without a GPU the launch fails, and the probe returns 120.
    assert result.returncode == 0 and result.stdout.split()[-1:] == ["120"], output_tail(result)
    return {"compiled at run time": "a kernel, by FlashInfer's JIT; its launch failed without a GPU"}


def check_backends(expected):
    """The engine's own validation after parsing, with each model's config.json and an SM12x GPU, selects what is recorded."""
    cases = {name: entry["case"] for name, entry in expected["backends"].items() if entry["case"]}
    if not cases:
        raise NotRun("no configuration for this engine's recipe has a recorded model")  # noqa: F821 - the runner provides it
    program = Path(__file__).with_name("select_backends.py")
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "HOME": home, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        result = run([sys.executable, "-B", str(program), expected["kind"]], environment, json.dumps(cases))
    assert result.returncode == 0, output_tail(result)
    answers = json.loads(result.stdout)
    differences = [text for name in cases for text in differing(name, answers[name], expected["backends"][name])]
    assert not differences, "; ".join(differences)
    others = ", ".join(sorted({*expected["backends"]} - {*cases}))
    return {"selects the recorded back-ends for": ", ".join(cases)} | ({"back-ends not recorded": others} if others else {})


def differing(name, answer, recorded):
    """Differences between an engine's answer for a configuration and the recorded one."""
    if answer["refusal"] != recorded["refusal"]:
        return [f"{name}: {answer['refusal'] or 'accepted'}, recorded {recorded['refusal'] or 'accepted'}"]
    uses = sorted({*answer["selected"]} | {*recorded["selected"]})
    pairs = {use: [", ".join(each["selected"].get(use, ["none"])) for each in (answer, recorded)] for use in uses}
    return [f"{name}: {use} {selected}, recorded {before}" for use, (selected, before) in pairs.items() if selected != before]


def run(argv, environment=None, text=None):
    """Run a program with ``text`` as its input, and capture its output."""
    return subprocess.run(argv, env=environment, input=text, capture_output=True, text=True, check=False)


def output_tail(result):
    """Exit code and last lines of a program's output."""
    return f"exit code {result.returncode}: " + " | ".join((result.stdout + result.stderr).strip().splitlines()[-6:])


def refusal(parser, argv, validate):
    """Why a parser, or ``validate`` after it, rejects a command line; empty if accepted. Abbreviated options are unknown."""
    known = set(parser._option_string_actions)
    options = [argument.partition("=")[0] for argument in argv if re.match(r"--[a-z]", argument)]
    unknown = [option for option in options if option.replace("_", "-") not in known and option not in known]
    if unknown:
        return f"unknown option {', '.join(unknown)}"
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            validate(parser.parse_args(list(argv)))
        except SystemExit as end:
            return " ".join(errors.getvalue().split("error:")[-1].split()) or f"exit code {end.code}"
        except (KeyError, TypeError, ValueError) as error:
            return str(error)
    return ""


def accepts_configurations(parser, expected, validate=lambda parsed: None):
    """Require that an argument parser accepts the command line of every configuration."""
    rejections = {name: refusal(parser, argv, validate) for name, argv in expected["arguments"].items()}
    if not rejections:
        raise NotRun("no configuration is for this engine's recipe")  # noqa: F821 - the runner provides it
    assert not any(rejections.values()), "; ".join(f"{name}: {reason}" for name, reason in rejections.items() if reason)
    return {"takes the arguments of": ", ".join(rejections)}


def load_extensions(names):
    """Import the compiled extensions of these files, without their suffixes, and report them."""
    problems = []
    for name in sorted(names):
        try:
            importlib.import_module(name.replace("/", "."))
        except ImportError as error:
            problems.append(f"{name}: {error}")
    assert names and not problems, "; ".join(problems) or "the distribution has no compiled extension"
    return {"extensions": ", ".join(sorted(names))}


def require_our_flashinfer(package):
    """Require that the file of a package is that of the patched FlashInfer."""
    ours = metadata.distribution("flashinfer-python").locate_file("flashinfer/__init__.py")
    assert Path(package) == Path(ours), f"the engine imports {package}, ours is {ours}"


def prints_version_and_help(version, help_text, locked, part):
    """Run two commands of an engine: the first prints the locked version, and the second an option or command."""
    version, help_text = run(version), run(help_text)
    assert version.returncode == 0 and locked in version.stdout.split(), f"not {locked}: {output_tail(version)}"
    assert help_text.returncode == 0 and part in help_text.stdout, output_tail(help_text)
    print(version.stderr + help_text.stderr)
    return {"version of the command": locked}


class Requested(Exception):
    """Raised where FlashInfer would load or compile a module, with its name."""

    def __init__(self, name):
        super().__init__(name)
        self.name = name


@contextlib.contextmanager
def on_capability(major, minor):
    """Answer every query of the GPU's compute capability, and raise :class:`Requested` where FlashInfer would load a module.

    The GPU has the 188 multiprocessors of an RTX PRO 6000. Pinned memory, which only a driver can allocate, is ordinary memory.
    """
    import torch
    from flashinfer import utils
    from flashinfer.jit.core import JitSpec

    def capability(device=None):
        return major, minor

    def load(spec, *arguments, **options):
        raise Requested(spec.name)

    def empty(*arguments, pin_memory=False, **options):
        return allocate(*arguments, **options)

    properties = SimpleNamespace(major=major, minor=minor, multi_processor_count=188)
    answers = {
        "get_device_capability": capability,
        "get_device_properties": lambda device=None: properties,
        "current_device": lambda: 0,
        "device": contextlib.nullcontext,
    }
    allocate, query = torch.empty, utils.get_compute_capability
    with contextlib.ExitStack() as patched:
        patched.enter_context(mock.patch.object(JitSpec, "build_and_load", load))
        patched.enter_context(mock.patch.multiple(torch.cuda, **answers))
        patched.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor))
        patched.enter_context(mock.patch.object(torch, "empty", empty))
        for name, module in [*sys.modules.items()]:
            if name.startswith("flashinfer") and vars(module).get("get_compute_capability") is query:
                patched.enter_context(mock.patch.object(module, "get_compute_capability", capability))
        yield


def requested(call):
    """The FlashInfer module that a call requests first. A call that requests none returns or raises its own error."""
    try:
        call()
    except Requested as module:
        return module
    raise AssertionError("it was expected to request a module of FlashInfer, and did not")


def autotuner():
    """Call the kernel with which FlashInfer's autotuner delays the launches that it measures."""
    from flashinfer.tllm_utils import delay_kernel

    delay_kernel(0)


def fp4_gemm():
    """Call FlashInfer's NVFP4 GEMM."""
    import flashinfer
    import torch

    matrix, scales = (torch.zeros(*shape, dtype=torch.uint8) for shape in ((32, 64), (128, 8)))
    options = {"block_size": 16, "use_8x4_sf_layout": False, "backend": "cutlass"}
    flashinfer.mm_fp4(matrix, matrix.t(), scales, scales.t(), torch.ones(1), torch.bfloat16, **options)


def fused_moe(tokens=4, **options):
    """Call FlashInfer's mixture of experts of CUTLASS."""
    import flashinfer
    import torch

    inputs, weights = torch.zeros(tokens, 64, dtype=torch.bfloat16), torch.zeros(8, 64, 8, dtype=torch.int64)
    routed = (torch.zeros(tokens, 2, dtype=torch.int32), torch.zeros(tokens, 2))
    flashinfer.fused_moe.cutlass_fused_moe(inputs, *routed, weights, weights, torch.bfloat16, [], output=inputs, **options)


def indices(*values):
    """Indices as FlashInfer takes them."""
    import torch

    return torch.tensor(values, dtype=torch.int32)


def require_served(expected, engine, version):
    """Raise NotRun for another version of the engine, or without a configuration to look up."""
    locked = expected["distributions"][engine].partition("+")[0]
    if locked != version:
        raise NotRun(f"written for {engine} {version}; {locked} selects kernels with other functions")  # noqa: F821
    if not any(served.get("selected") for served in expected["served"].values()):
        raise NotRun("no configuration is for this engine's recipe and has recorded back-ends")  # noqa: F821 - the runner provides it


def triton_kernels(expected):
    """Require that Triton finds the kernels of the recipe's record by its own keys, in a cache as the entrypoint leaves it."""
    program, record = TRITON / "compile.py", TRITON / "record.jsonl"
    if expected["triton"] is None or not record.exists():
        raise NotRun("the image has no kernels of Triton: its recipe had no record of them")  # noqa: F821
    with tempfile.TemporaryDirectory() as cache:
        with mock.patch.dict(os.environ, TRITON_CACHE_DIR=cache):
            runpy.run_path("/opt/sm120kit/serve.py")["add_triton_entries"]()
        result = run([sys.executable, "-B", program, record, "SM12x", cache])
    assert result.returncode == 0, output_tail(result)
    answer = json.loads(result.stdout)
    missing = sorted({kernel["function"] for kernel in answer["failed"]})
    assert answer["kernels"] and not (expected["triton"] and missing), (
        f"Triton does not find {', '.join(missing)}: record them again, or remove their lines from the recipe's .triton.jsonl"
    )
    return {
        "Triton finds": f"{len({kernel['key'] for kernel in answer['kernels']})} kernels in its cache",
        "kernels of Triton compiled on first use": ", ".join(missing) or "none of those recorded",
    }


def modules_ahead(requests, expected):
    """Require that the modules that an engine requests are compiled ahead, and report them with their uses.

    An image with a part of the kernels compiles the others on first use, and they are only reported.
    """
    uses = {}
    for requested_for in requests.values():
        for use, module in requested_for.items():
            uses.setdefault(module.name, set()).add(use)
    listed = {name: f"{name} ({', '.join(sorted(uses[name]))})" for name in sorted(uses)}
    misses = "; ".join(text for name, text in listed.items() if name not in expected["modules"])
    assert not (expected["complete"] and misses), f"not compiled ahead of time: {misses}"
    return {
        "modules requested": "; ".join(listed.values()),
        "modules compiled on first use": misses or "none",
        "configurations looked up": ", ".join(requests),
    }
