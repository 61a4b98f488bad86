"""Entrypoint of the images of engines: ``serve.py PROGRAM ARGUMENT...`` becomes the recipe's serve command.

Without an NVIDIA driver the engines end in a traceback when they are imported, even for their help. Then ``--help`` and
``--version`` are answered here, from the options recorded with the recipe, and anything else ends with the reason.
"""

import ctypes
import os
import sys
from importlib import metadata
from pathlib import Path

ENGINES = ("vllm", "sglang")
HELP = Path(__file__).with_name("help.txt")


def has_driver():
    """Whether the driver's library can be loaded; container runtimes mount it together with a GPU."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def answer(argv):
    """Print help, version, or why nothing is served; returns the exit code."""
    if any(argument == "-h" or argument.partition("=")[0] == "--help" for argument in argv):
        print(HELP.read_text(), end="")
    elif "--version" in argv:
        print(*(engine.version for name in ENGINES for engine in metadata.distributions(name=name)))
    else:
        print("error: this container has no NVIDIA driver, and serving needs a GPU", file=sys.stderr)
        print("hint: docker run --gpus all; --help and --version work without one", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    if not has_driver():
        sys.exit(answer(sys.argv[1:]))
    os.execvp(sys.argv[1], sys.argv[1:])  # the server is this process, with its signals and its exit code
