"""The environment in which an engine's own CMake project is built: locked wheels in a directory, and no network."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from sm120kit import process
from sm120kit.errors import CommandFailed, ToolchainMissing
from sm120kit.workspace import publish_directory

ENVIRONMENT = "environment"
"""The directory of the locked wheels below a work directory."""


def find_python(version: str) -> tuple[Path, str]:
    """An interpreter of ``version`` (``3.12``) and its whole version: that of this process, else ``python3.12`` on PATH.

    Raises:
        ToolchainMissing: there is none.
    """
    named = f"python{version}"
    found = sys.executable if version == f"{sys.version_info.major}.{sys.version_info.minor}" else shutil.which(named)
    program = "import platform, sys; print(sys.executable, platform.python_version())"
    done = process.run([found, "-I", "-c", program], check=False) if found else None
    if done is None or done.returncode != 0:
        raise ToolchainMissing(
            f"no Python {version}: the locked wheels of the build environment are for it, and {named} on PATH "
            + ("does not run" if done else "is no program"),
            f"install Python {version} with its headers, and put {named} on PATH",
        )
    executable, _, whole = done.stdout.strip().rpartition(" ")
    return Path(executable), whole


def cuda_home_of(compiler: str) -> Path:
    """Where the CUDA wheels of a compiler's version lie in an environment: ``environment/nvidia/cu13``."""
    return Path(ENVIRONMENT) / "nvidia" / f"cu{compiler.partition('.')[0]}"


def install(wheels: Sequence[Path], python: Path, place: Path) -> None:
    """Unpack wheels into directory ``place``: whole or not at all, with nothing that they do not bring themselves.

    Raises:
        CommandFailed: they are not for this Python.
        NotEnoughDisk, StateUnwritable: they cannot be stored.
    """
    if place.is_dir():
        return
    from uv import find_uv_bin

    with publish_directory(place) as beside:
        words: list[str | Path] = [find_uv_bin(), "pip", "install", "--no-deps", "--no-index", "--offline", "--no-config"]
        words += ["--no-cache", "--no-python-downloads", "--quiet", "--python", python, "--target", beside, *wheels]
        process.run(words, tied=True)


def isolation() -> tuple[str, ...]:
    """What to put before a command so that it runs without any network; empty where this system does not let us."""
    for words in (("unshare", "--net"), ("unshare", "--map-root-user", "--net")):
        try:
            if process.run([*words, "true"], check=False).returncode == 0:
                return words
        except ToolchainMissing:
            break
    return ()


def answers(
    library: Path, imports: Sequence[str], expected: dict[str, str], python: Path, place: Path, driver: Path
) -> tuple[str, ...]:
    """What is wrong with a module that is loaded in the environment at ``place``, with a stand-in for the driver.

    Every symbol must resolve, and every expression of ``expected`` must come to what is written beside it.
    """
    program = "\n".join(
        [
            "import ctypes, importlib, os, sys",
            "ctypes.CDLL(sys.argv[2], ctypes.RTLD_GLOBAL)",
            *(f"import {name}" for name in imports),
            "library = ctypes.CDLL(sys.argv[1], os.RTLD_NOW)",
            *(f"print('answer', {expression})" for expression in expected),
        ]
    )
    environment = {"PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONNOUSERSITE": "1"}
    drop = ["LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHOME"]
    done = process.run([python, "-c", program, library, driver], env=environment, drop=drop, check=False)
    if done.returncode != 0:
        return (f"does not load: {(done.stderr.strip().splitlines() or [f'exit code {done.returncode}'])[-1]}",)
    given = [line.removeprefix("answer ") for line in done.stdout.splitlines() if line.startswith("answer ")]
    return tuple(
        f"{expression} is {answer}, not {wanted}"
        for (expression, wanted), answer in zip(expected.items(), given, strict=True)
        if answer != wanted
    )


def linked(library: Path) -> tuple[frozenset[str], tuple[str, ...]]:
    """The libraries that a shared object needs, and the directories in which it makes the loader look.

    Raises:
        CommandFailed: it is not a shared object.
    """
    said = process.run(["readelf", "--dynamic", "--wide", library]).stdout
    if "Dynamic section at" not in said:
        raise CommandFailed(f"{library} is no shared object", f"command: readelf --dynamic {library}")
    found = re.findall(r"\((NEEDED|RPATH|RUNPATH)\).*\[(.*)\]", said)
    return frozenset(name for kind, name in found if kind == "NEEDED"), tuple(path for kind, path in found if kind != "NEEDED")
