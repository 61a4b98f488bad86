"""What holds for every engine: it is set up as the recipe says, and what was not compiled ahead can be compiled."""

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
    """The recipe's environment is set."""
    found = {name: os.environ.get(name) for name in expected["env"]}
    assert found == expected["env"], f"it is {found}, the recipe sets {expected['env']}"
    return {"environment": ", ".join(expected["env"])}


def check_serve_command(expected):
    """The program that serves is the one in the image's Python environment."""
    program = shutil.which(expected["serve"][0])
    assert program and Path(program).parent == Path(sys.prefix, "bin"), f"{expected['serve'][0]} is {program or 'not there'}"
    return {"serves with": " ".join(expected["serve"])}


def check_compiles_at_run_time(expected):
    """FlashInfer's own machinery compiles, links and loads a module that was not compiled ahead."""
    source = Path.home() / "sm120kit_probe.cu"
    source.write_text(PROBE)
    try:
        settings = {name: value for name, value in os.environ.items() if name != "FLASHINFER_DISABLE_JIT"}
        done = run([sys.executable, "-c", COMPILE, str(source)], settings | expected["env"])
    finally:
        source.unlink()
    # Without a GPU the launch is refused.
    assert done.returncode == 0 and done.stdout.split()[-1:] == ["120"], last_words(done)
    return {"compiled at run time": "a kernel, by FlashInfer's machinery; its launch was refused for want of a GPU"}


def run(argv, environment=None):
    """A program's end and everything it said."""
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)


def last_words(done):
    """The end of what a program said."""
    return f"exit code {done.returncode}: " + " | ".join((done.stdout + done.stderr).strip().splitlines()[-6:])


def refusal(parser, argv, validate):
    """Why a parser, or ``validate`` after it, refuses a command line; or nothing. A shortened option counts as unknown."""
    known = set(parser._option_string_actions)
    options = [word.partition("=")[0] for word in argv if re.match(r"--[a-z]", word)]
    strange = [option for option in options if option.replace("_", "-") not in known and option not in known]
    if strange:
        return f"it does not know {', '.join(strange)}"
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            validate(parser.parse_args(list(argv)))
        except SystemExit as end:
            return " ".join(said.getvalue().split("error:")[-1].split()) or f"it ends with exit code {end.code}"
        except (KeyError, TypeError, ValueError) as error:
            return str(error)
    return ""


def refused(parser, expected, validate=lambda parsed: None):
    """Show an argument parser every configuration's command line; fail when it refuses one.

    Of a configuration with arguments that are unreleased it is shown the others, and then has to refuse each of these.
    """
    wrong = {name: refusal(parser, argv, validate) for name, argv in expected["arguments"].items()}
    if not wrong:
        raise NotRun("no configuration is for this engine's recipe")  # noqa: F821 - the runner provides it
    assert not any(wrong.values()), "; ".join(f"{name}: {why}" for name, why in wrong.items() if why)
    said = {"takes the arguments of": ", ".join(wrong)}
    for name, phrases in expected["unreleased"].items():
        known = [words for words in phrases if not refusal(parser, [*expected["arguments"][name], *words.split()], validate)]
        assert not known, f"{name} calls {', '.join(known)} unreleased, and it takes that"
        said[f"refuses of {name}"] = ", ".join(phrases)
    return said
