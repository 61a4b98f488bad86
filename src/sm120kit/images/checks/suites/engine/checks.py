"""Checks of every engine: environment, serve command, and compilation at run time. Also helpers for the engines' suites."""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

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
    """FlashInfer's JIT compiles, links and loads a module that was not compiled ahead."""
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


def run(argv, environment=None):
    """Run a program and capture its output."""
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)


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
    """Require that an argument parser accepts the command line of every configuration.

    Arguments that a configuration lists as unreleased are excluded, and the parser must reject each of them.
    """
    rejections = {name: refusal(parser, argv, validate) for name, argv in expected["arguments"].items()}
    if not rejections:
        raise NotRun("no configuration is for this engine's recipe")  # noqa: F821 - the runner provides it
    assert not any(rejections.values()), "; ".join(f"{name}: {reason}" for name, reason in rejections.items() if reason)
    facts = {"takes the arguments of": ", ".join(rejections)}
    for name, unreleased in expected["unreleased"].items():
        argv = expected["arguments"][name]
        accepted = [option for option in unreleased if not refusal(parser, [*argv, *option.split()], validate)]
        assert not accepted, f"{name} lists {', '.join(accepted)} as unreleased, and the parser accepts it"
        facts[f"refuses of {name}"] = ", ".join(unreleased)
    return facts
