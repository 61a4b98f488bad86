"""The compilers at hand: which nvcc, which host compiler, and whether they can do what is asked."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.version import Version

from sm120kit import process
from sm120kit.errors import ToolchainMissing, ToolchainUnsuitable
from sm120kit.records import Arch, Toolchain

ABSENT = Path(__file__).with_name("absent")
"""Stand-ins for headers that a toolkit may lack (cuBLAS): FlashInfer's headers name a type of theirs and no more."""

FIRST_NVCC = {Arch.SM_120A: Version("12.8"), Arch.SM_120F: Version("12.9"), Arch.SM_121A: Version("12.9")}
"""The first CUDA release whose nvcc knows a target (CUDA Toolkit release notes 12.8 and 12.9)."""

WAY_OUT = "install the compiler as wheels: pip install 'sm120kit[cuda]'"


def find(archs: Sequence[Arch] = (), headers: Sequence[str] = ()) -> Toolchain:
    """The first suitable CUDA toolkit of: ``CUDA_HOME``, nvcc on PATH, the wheels of extra ``cuda``.

    Suitable means: new enough for every one of ``archs``, and ``headers`` are among its include files.

    Raises:
        ToolchainMissing: no nvcc or no C++ compiler at all.
        ToolchainUnsuitable: some are there and none suits; the message says for each why.
    """
    host, host_version = host_compiler()
    refused = []
    for home, origin in _homes():
        version = _nvcc_version(home / "bin" / "nvcc")
        reasons = [
            f"nvcc {version} is older than {FIRST_NVCC[arch]}, the first for {arch}"
            for arch in archs
            if version < FIRST_NVCC[arch]
        ]
        absent = [name for name in headers if not (home / "include" / name).is_file()]
        if absent:
            reasons.append(f"no {', '.join(absent)} in {home / 'include'}")
        if not reasons:
            return Toolchain(home, str(version), host, host_version)
        refused.append(f"{origin} ({home}): {'; '.join(reasons)}")
    if not refused:
        raise ToolchainMissing(
            "no CUDA compiler: CUDA_HOME is not set, no nvcc on PATH, no CUDA wheels in this environment", WAY_OUT
        )
    raise ToolchainUnsuitable("no suitable CUDA compiler\n" + "\n".join(f"  {line}" for line in refused), WAY_OUT)


def host_compiler() -> tuple[str, str]:
    """The C++ compiler (``CXX``, else ``c++``, else ``g++``) and its version line.

    Raises:
        ToolchainMissing: there is none.
    """
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++")):
        path = shutil.which(name)
        if path:
            return path, process.run([path, "--version"]).stdout.splitlines()[0]
    raise ToolchainMissing("no C++ compiler: neither CXX nor c++ nor g++ names a program", "install one: apt-get install g++")


def _homes() -> Iterator[tuple[Path, str]]:
    """CUDA toolkits in the order in which they are tried, with where each was found."""
    named = os.environ.get("CUDA_HOME")
    if named:
        if not (Path(named) / "bin" / "nvcc").is_file():
            raise ToolchainMissing(f"CUDA_HOME={named} has no bin/nvcc", "correct or unset CUDA_HOME")
        yield Path(named), "CUDA_HOME"
    on_path = shutil.which("nvcc")
    if on_path:
        # nvcc on PATH may be a script or a link; only nvcc itself knows where it lives.
        dry = process.run([on_path, "--dryrun", "-x", "cu", "-c", "/dev/null"], check=False).stderr
        here = re.search(r"^#\$ _HERE_=(.+)$", dry, re.MULTILINE)
        if here:
            yield Path(here[1]).resolve().parent, "nvcc on PATH"
    spec = importlib.util.find_spec("nvidia")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        for home in sorted(Path(location).glob("cu*"), reverse=True):
            if (home / "bin" / "nvcc").is_file():
                yield home, "CUDA wheels"


def _nvcc_version(nvcc: Path) -> Version:
    text = process.run([nvcc, "--version"]).stdout
    found = re.search(r"release [\d.]+, V([\d.]+)", text)
    if not found:
        raise ToolchainUnsuitable(f"{nvcc} --version does not state a release: {text.strip()[:200]!r}", WAY_OUT)
    return Version(found[1])
