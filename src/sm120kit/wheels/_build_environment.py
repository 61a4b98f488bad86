"""The environment in which an engine's own CMake project is built: locked wheels in a directory, without a network."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sm120kit.core import process
from sm120kit.core.errors import CommandFailed, RequirementMissing

ENVIRONMENT = "environment"
"""The directory of the locked wheels below a work directory."""


def find_python(version: str) -> tuple[Path, str]:
    """Find an interpreter of ``version`` (``3.12``): that of this process, else ``python3.12`` on PATH. Also its full version.

    Raises:
        RequirementMissing: there is none.
    """
    program = f"python{version}"
    own = version == f"{sys.version_info.major}.{sys.version_info.minor}"
    path = sys.executable if own else process.find_program(program)
    code = "import platform, sys; print(sys.executable, platform.python_version())"
    done = process.run([path, "-I", "-c", code], check=False) if path else None
    if done is None or done.returncode != 0:
        raise RequirementMissing(
            f"no Python {version}: the locked wheels of the build environment are for it, and {program} on PATH "
            + ("does not run" if done else "does not exist"),
            f"install Python {version} with its headers, and put {program} on PATH",
        )
    executable, _, full_version = done.stdout.strip().rpartition(" ")
    return Path(executable), full_version


def cuda_home_of(compiler: str) -> Path:
    """The CUDA home of the wheels of a compiler version, below the work directory: ``environment/nvidia/cu13``."""
    return Path(ENVIRONMENT) / "nvidia" / f"cu{compiler.partition('.')[0]}"


def network_isolation() -> tuple[str, ...]:
    """The prefix of a command that is to run without a network; empty if this system permits no network namespaces."""
    for prefix in (("unshare", "--net"), ("unshare", "--map-root-user", "--net")):
        try:
            if process.run([*prefix, "true"], check=False).returncode == 0:
                return prefix
        except RequirementMissing:
            break
    return ()


@dataclass(frozen=True)
class Interpreter:
    """A Python with the wheels of ``packages`` in its path, and the stub of the driver that it loads first."""

    python: Path
    packages: Path
    driver: Path


def wrong_answers(
    library: Path, imports: Sequence[str], expected: dict[str, str], interpreter: Interpreter, before: Path | None = None
) -> tuple[str, ...]:
    """Load a module after ``imports`` and return every problem: why it does not load, or expressions with another value.

    Every symbol has to resolve. The library ``before`` is loaded before it. ``expected`` is the printed value by Python
    expression, in which the module is ``library``.
    """
    program = "\n".join(
        [
            "import ctypes, importlib, os, sys",
            "ctypes.CDLL(sys.argv[2], ctypes.RTLD_GLOBAL)",
            *(f"import {name}" for name in imports),
            *(["ctypes.CDLL(sys.argv[3], os.RTLD_NOW)"] if before else []),
            "library = ctypes.CDLL(sys.argv[1], os.RTLD_NOW)",
            *(f"print('answer', {expression})" for expression in expected),
        ]
    )
    environment = {
        **dict.fromkeys(("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHOME")),
        "PYTHONPATH": str(interpreter.packages),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
    }
    done = process.run(
        [interpreter.python, "-c", program, library, interpreter.driver, before or ""], env=environment, check=False
    )
    if done.returncode != 0:
        return (f"does not load: {(done.stderr.strip().splitlines() or [f'exit code {done.returncode}'])[-1]}",)
    answers = [line.removeprefix("answer ") for line in done.stdout.splitlines() if line.startswith("answer ")]
    return tuple(
        f"{expression} is {answer}, not {value}"
        for (expression, value), answer in zip(expected.items(), answers, strict=True)
        if answer != value
    )


def dynamic_section(library: Path) -> tuple[frozenset[str], tuple[str, ...]]:
    """The libraries that a shared object needs, and the directories that it adds to the loader's search path.

    Raises:
        CommandFailed: it is not a shared object.
    """
    output = process.run(["readelf", "--dynamic", "--wide", library]).stdout
    if "Dynamic section at" not in output:
        raise CommandFailed(f"{library} is no shared object", f"command: readelf --dynamic {library}")
    entries = re.findall(r"\((NEEDED|RPATH|RUNPATH)\).*\[(.*)\]", output)
    needed = frozenset(value for kind, value in entries if kind == "NEEDED")
    return needed, tuple(value for kind, value in entries if kind != "NEEDED")
